"""How long a step takes, from what is computed in it: a sum of few terms, each with a unit.

Responsible for one step and for a row of steps in which the same requests decode, in closed form. Not for who
computes what (`batching.py`). Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Work(NamedTuple):
    """What one step computes."""

    prefill_tokens: int = 0
    prefill_contexts: float = 0.0  # each prefill token times the tokens before it, summed
    sequences: int = 0  # that decode one token each
    decode_contexts: int = 0  # tokens before those, summed


@dataclass(frozen=True, slots=True)
class StepTiming:
    """The speed of one engine. Attention makes a token cost more, the more tokens lie before it."""

    overhead_ms: float  # of each step: scheduling, launching, sampling
    prefill_token_us: float  # for each prompt token: the layers' matrices
    prefill_context_ns: float = 0.0  # for each prompt token and each token before it: attention
    weights_ms: float = 0.0  # of each step that decodes: reading the weights, whatever the batch
    sequence_us: float = 0.0  # for each decoding sequence
    decode_context_ns: float = 0.0  # for each token before a decoded one: reading its KV

    def step_s(self, work: Work, slowness: float = 1.0) -> float:
        """Return how long a step takes. `slowness`: 2.0 for an engine that is half as fast."""
        ms = self.overhead_ms
        ms += work.prefill_tokens * self.prefill_token_us * 1e-3
        ms += work.prefill_contexts * self.prefill_context_ns * 1e-6
        if work.sequences:
            ms += self.weights_ms + work.sequences * self.sequence_us * 1e-3
            ms += work.decode_contexts * self.decode_context_ns * 1e-6
        return ms * slowness / 1000

    def decode_s(self, steps: int, work: Work, slowness: float = 1.0) -> float:
        """Return how long so many steps take in which `work.sequences` decode; `work` is the first."""
        first_s = self.step_s(work, slowness)
        growth_s = work.sequences * self.decode_context_ns * 1e-9 * slowness
        return steps * first_s + growth_s * steps * (steps - 1) / 2

    def steps_begun(self, elapsed_s: float, steps_max: int, work: Work, slowness: float) -> int:
        """Return after how many of `steps_max` such steps `elapsed_s` is over: at least one."""
        low, high = 1, steps_max
        while low < high:
            middle = (low + high) // 2
            if self.decode_s(middle, work, slowness) >= elapsed_s:
                high = middle
            else:
                low = middle + 1
        return low

    def prefill_s(self, tokens: int, reused_tokens: int = 0) -> float:
        """Return how long a prompt takes in one step, beside nothing else."""
        contexts = tokens * (reused_tokens + tokens / 2)
        return self.step_s(Work(tokens, contexts))
