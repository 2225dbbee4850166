"""What a placement costs, in milliseconds, and how fast an instance is.

One continuous number without thresholds. Its terms, each shown in receipts:

- `queue`: prompt tokens that the holder was given and has not finished, at its prefill rate.
- `active`: every unfinished request shares the engine's steps with the new one.
- `sessions`: for a request that begins a session, those that lately began on the holder: they will come
  back to it, whether or not one of their turns is under way just now.
- `prefill`: the request's own tokens that the holder would have to compute.
- `history`: tokens of the session's earlier turns that would be computed *again*. They are paid
  twice over: the work delays the holder's other requests, and its copy displaces their blocks.
- `shared`: a credit. What `n` requests before this one have also begun with will be begun with
  again, about as often; a second copy of it then serves `n` more, so the one that makes it is
  charged only 1/(n+1) of the work. Without this term a popular system prompt would gather the whole
  fleet's sessions on the instance that happened to see it first.

Rates start from a prior, are learned from observed first-byte times, and are bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

PREFILL_TOKENS_PER_MS_PRIOR = 8.0
"""Mid-size model on one current GPU; only the start value of what is learned."""

RATE_BOUND = 200.0
"""A learned rate stays within prior / bound and prior x bound: from a CPU to a GPU group."""

RATE_SMOOTHING = 0.3
"""Weight of the newest observation: three of them make two thirds of the estimate."""

OBSERVED_TOKENS_MIN = 128
"""Shorter prefills say more about fixed overheads than about the rate."""


@dataclass(slots=True)
class PrefillRate:
    """Learned prefill speed, in tokens per ms."""

    prior: float = PREFILL_TOKENS_PER_MS_PRIOR
    learned: float | None = None

    @property
    def tokens_per_ms(self) -> float:
        return self.prior if self.learned is None else self.learned

    def observe(self, tokens: int, elapsed_ms: float) -> None:
        """Learn from one prefill that was not held up by others."""
        if tokens < OBSERVED_TOKENS_MIN or elapsed_ms <= 0:
            return
        seen = min(max(tokens / elapsed_ms, self.prior / RATE_BOUND), self.prior * RATE_BOUND)
        if self.learned is None:
            self.learned = seen
        else:
            self.learned += RATE_SMOOTHING * (seen - self.learned)


@dataclass(frozen=True, slots=True)
class CostWeights:
    """What an operator may set under `policy.options` of `kv_cost` and `prefix_affinity`."""

    active_request_ms: float = 60.0  # ms that one unfinished request costs a new one
    session_ms: float = 10.0  # ms that one session lately begun there costs a new one
    history_weight: float = 3.0  # extra charge for a recomputed history, times its prefill
    degraded_weight: float = 0.8  # what an overlap is worth when some events were lost
    approximate_weight: float = 0.9  # what a predicted overlap is worth without any events


class Pricing(NamedTuple):
    """What it costs to place one request: the terms, from what is known of the holder.

    `best_overlap_tokens` is the fleet's best overlap, weighed by trust as every overlap here is.
    `history_tokens` and `departures`: see `lineage.Lineage`.
    """

    weights: CostWeights
    tokens_per_ms: float  # prefill rate of weight 1
    prompt_tokens: int
    best_overlap_tokens: float
    history_tokens: int
    departures: int

    def terms_ms(
        self,
        weight: float,
        queued_prefill_tokens: int,
        active_requests: int,
        recent_sessions: int,
        overlap_tokens: float,
    ) -> dict[str, float]:
        """Return all terms for a holder with this load and overlap; their sum is the cost."""
        prefill_ms, history_ms, shared_ms = self.prompt_terms_ms(weight, overlap_tokens)
        session_ms = 0.0 if self.history_tokens else self.weights.session_ms
        return {
            "queue": queued_prefill_tokens / (self.tokens_per_ms * weight),
            "active": active_requests / weight * self.weights.active_request_ms,
            "sessions": recent_sessions / weight * session_ms,
            "prefill": prefill_ms,
            "history": history_ms,
            "shared": shared_ms,
        }

    def prompt_terms_ms(self, weight: float, overlap_tokens: float) -> tuple[float, float, float]:
        """Return what the prompt costs on a holder with this overlap: `prefill`, `history`, `shared`."""
        tokens_per_ms = self.tokens_per_ms * weight
        departures = self.departures
        lost_history = max(self.history_tokens - overlap_tokens, 0.0)
        extra = max(self.best_overlap_tokens - overlap_tokens, 0.0)
        return (
            max(self.prompt_tokens - overlap_tokens, 0.0) / tokens_per_ms,
            self.weights.history_weight * lost_history / tokens_per_ms / (1 + departures),
            -extra / tokens_per_ms * departures / (1 + departures),
        )
