"""Pure engine models for tests: one of round numbers, a request to it, and a step that must be one."""

from __future__ import annotations

from moongate.simulator.engine import EngineModel, EngineProfile, EngineRequest, StepResult
from moongate.simulator.transfer import Handoff

PROFILE = EngineProfile(
    blocks=11,
    block_size_tokens=4,
    prefill_tokens_per_s=1000.0,
    decode_tokens_per_s=10.0,
    max_num_seqs=3,
    max_num_batched_tokens=16,
    max_model_len_tokens=40,
    step_overhead_ms=10.0,
    kv_bytes_per_token=10,
    kv_link_bytes_per_s=1000.0,
)
"""10 ms a step, 1 ms a prompt token, 100 ms a decoded one; 10 ms for a token that is fetched."""


def request(
    name: str,
    prompt_tokens: int,
    max_tokens: int = 1,
    *,
    first: int = 0,
    handoff: Handoff | None = None,
) -> EngineRequest:
    """A prompt of consecutive tokens; the same `first` gives the same prefix."""
    prompt = tuple(range(first, first + prompt_tokens))
    return EngineRequest(name, prompt, max_tokens, handoff=handoff)


def step(engine: EngineModel, now: float = 0.0) -> StepResult:
    result = engine.step(now)
    assert result is not None
    return result
