"""What vLLM runs when it starts, in each of its processes: entry point of `vllm.general_plugins`.

Lets MooncakeConnector start on machines without an accelerator. It runs inside the engine, in the
API server, the engine core and each worker, and more than once; so it imports nothing of the
gateway's, does its work in any order and any number of times, and does nothing at all where PyTorch
was built for an accelerator.
"""

from __future__ import annotations


def register() -> None:
    """Answer device index 0 where there is no accelerator to ask.

    Why: MooncakeConnector's worker keeps the current device's index to select it again in its sender
    threads. On a CPU build the question raises; any answer is right, since selecting does nothing.
    Source: vLLM 0.32.0 `v1/mooncake/mooncake_connector.py`, PyTorch 2.13 `accelerator/__init__.py`.
    """
    import torch

    # What PyTorch was built for, not what is there: looking for devices would initialise CUDA here
    # and break the processes that the API server forks.
    if torch.accelerator.current_accelerator() is None:
        torch.accelerator.current_device_index = _no_accelerator


def _no_accelerator() -> int:
    return 0
