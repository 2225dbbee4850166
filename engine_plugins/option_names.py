"""A launch's refusal in the words of `moongate engine`: its fields as the options that were given. Pure.

Launches are also made by programs, which know their fields; so a refusal names these.
"""

from __future__ import annotations

import re

_DIFFERENT = {
    "block_size_tokens": "--block-size",
    "buffer_bytes": "--buffer-size",
    "config_file": "--mooncake-config",
    "data_parallel": "--data-parallel-size",
    "device_names": "--device-name",
    "disk_buffer_bytes": "--disk-buffer-size",
    "disk_bytes": "--disk-size",
    "disk_folder": "--disk",
    "handoff": "--kv-connector",
    "lease_s": "--lease",
    "max_model_len_tokens": "--max-model-len",
    "mode": "--pool-mode",
    "pipeline_parallel": "--pipeline-parallel-size",
    "segment_bytes": "--segment-size",
    "shutdown_timeout_s": "--shutdown-timeout",
    "tensor_parallel": "--tensor-parallel-size",
}
"""Fields whose option isn't their name with dashes."""

_AT_FIRST = re.compile(r"^([a-z_]+)(?=:)")
_SNAKE = re.compile(r"(?<![\w'-])[a-z]+(?:_[a-z]+)+(?![\w'-])")
# One word may also be meant as such: only where a field is told to be chosen or compared.
_TOLD = re.compile(
    r"\b(choose|clashes with|goes with|in|set)"
    r" (device|handoff|mode|pool|port|protocol|role)\b"
)


def option_of(field: str) -> str:
    """Return the option that sets a launch's field."""
    return _DIFFERENT.get(field, "--" + field.replace("_", "-"))


def in_options(refusal: str) -> str:
    """Return a `LaunchError`'s text with options in place of the fields that it names."""
    if refusal.startswith("extra_args:"):  # what follows names vLLM's flags
        return refusal.replace("extra_args", "after --", 1)
    text = _TOLD.sub(lambda found: f"{found[1]} {option_of(found[2])}", refusal)
    text = _AT_FIRST.sub(lambda found: option_of(found[1]), text)
    return _SNAKE.sub(lambda found: option_of(found[0]), text)
