"""What a placement costs, in milliseconds, and how fast an instance is.

One continuous number without thresholds. Its terms, each shown in receipts:

- `queue`: prompt tokens that the holder was given and has not finished, at its prefill rate.
- `active`: every unfinished request shares the engine's steps with the new one.
- `sessions`: for a request that begins a session, those that lately began on the holder: they will come
  back to it, whether or not one of their turns is under way just now.
- `fetch`, `fetch_disk`: tokens that the holder would get from the shared pool: bytes at the rate of the
  place where they lie, and what a fetch takes however short it is.
- `stall`: a prefill on a decode instance holds up the answers that it is decoding, and will decode.
- `handoff`: where another instance prefills, what it takes to get the blocks across. Its own cost is
  then the term `prefill_leg`.
- `prefill`: the request's own tokens that the holder would have to compute.
- `history`: tokens of the session's earlier turns that would be computed *again*. They are paid
  twice over: the work delays the holder's other requests, and its copy displaces their blocks.
- `shared`: a credit. What `n` requests before this one have also begun with will be begun with
  again, about as often; a second copy of it then serves `n` more, so the one that makes it is
  charged only 1/(n+1) of the work. Without this term a popular system prompt would gather the whole
  fleet's sessions on the instance that happened to see it first.
- `again`: tokens of the very prompt that another holder is computing just now. They are paid three times
  over, and without the credit: a burst of one prompt waits where it is computed already.

Rates start from a prior, are learned from observed first-byte times, and are bounded.
"""

from __future__ import annotations

import math
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

FETCH_BYTES_PER_MS_PRIOR = 4_000_000.0
"""4 GB/s: one network interface of 100 Gbit/s, shared; only the start value of what is learned."""

DISK_BYTES_PER_MS_PRIOR = 1_000_000.0
"""1 GB/s: one SSD, shared."""

HANDOFF_TOKENS_PER_MS_PRIOR = 50.0
"""200 KB a token at 10 GB/s; only the start value of what is learned."""

LOCAL_SPEEDUP = 2.0
"""What lies on the reader's own host needs no network."""

OBSERVED_BYTES_MIN = 1_000_000
"""Shorter fetches say more about fixed overheads than about the rate."""


def span_tokens(begin: float, end: float, context_tokens: float) -> float:
    """Return what computing a prompt's tokens from `begin` to `end` costs, in tokens of its beginning."""
    return (end - begin) * (1 + (begin + end) / 2 / context_tokens)


@dataclass(slots=True)
class LearnedRate:
    """How much (tokens, bytes) is done in a ms, learned from how long it took."""

    prior: float
    amount_min: int  # less tells nothing
    learned: float | None = None

    @property
    def per_ms(self) -> float:
        return self.prior if self.learned is None else self.learned

    def observe(self, amount: float, elapsed_ms: float) -> None:
        """Learn from one piece of work that was not held up by others."""
        if amount < self.amount_min or elapsed_ms <= 0:
            return
        seen = min(max(amount / elapsed_ms, self.prior / RATE_BOUND), self.prior * RATE_BOUND)
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
    fetch_ms: float = 5.0  # ms that a fetch from the pool takes beside its bytes
    handoff_ms: float = 10.0  # ms that a hand-off from prefill to decode takes beside its blocks
    again_weight: float = (
        2.0  # extra charge for what is being computed elsewhere, times its prefill
    )
    stall_ms: float = 4.0  # ms that any prefill on a decode instance costs the answers there
    stall_weight: float = 0.5  # and of its own time, for each of them and for those to come


class Pricing(NamedTuple):
    """What it costs to place one request: the terms, from what is known of the holder.

    *Reuse* is a holder's overlap, and what the pool has beyond it, each weighed by how far it is
    believed; `best_reuse_tokens` is the fleet's best.
    `history_tokens` and `departures`: see `lineage.Lineage`.
    """

    weights: CostWeights
    tokens_per_ms: float  # prefill rate of weight 1
    prompt_tokens: int
    best_reuse_tokens: float
    history_tokens: int
    departures: int
    context_tokens: float = math.inf  # so many before it make a token cost twice as much
    pending_tokens: int = 0  # of all the prompt, that somebody is computing; 0: nobody is

    def terms_ms(
        self,
        weight: float,
        queued_prefill_tokens: int,
        active_requests: int,
        recent_sessions: int,
        reuse_tokens: float,
        fetch_ms: float = 0.0,
        *,
        from_disk: bool = False,
    ) -> dict[str, float]:
        """Return all terms for a holder with this load and reuse; their sum is the cost."""
        prefill_ms, history_ms, shared_ms, again_ms = self.prompt_terms_ms(weight, reuse_tokens)
        session_ms = 0.0 if self.history_tokens else self.weights.session_ms
        fetch = {"fetch_disk" if from_disk else "fetch": fetch_ms} if fetch_ms else {}
        return {
            "queue": queued_prefill_tokens / (self.tokens_per_ms * weight),
            "active": active_requests / weight * self.weights.active_request_ms,
            "sessions": recent_sessions / weight * session_ms,
            "prefill": prefill_ms,
            "history": history_ms,
            "shared": shared_ms,
            **({"again": again_ms} if self.pending_tokens else {}),
            **fetch,
        }

    def fetch_ms(self, tokens: float, ms_per_token: float) -> float:
        """Return what it takes to get these tokens from the pool."""
        return self.weights.fetch_ms + tokens * ms_per_token if tokens > 0 else 0.0

    def prompt_terms_ms(
        self, weight: float, reuse_tokens: float
    ) -> tuple[float, float, float, float]:
        """Return what the prompt costs on a holder that reuses this: `prefill`, `history`, `shared`
        and `again`."""
        tokens_per_ms = self.tokens_per_ms * weight
        departures = self.departures
        lost_history = self._span_tokens(reuse_tokens, self.history_tokens)
        extra = 0.0
        if not self.pending_tokens:
            extra = self._span_tokens(reuse_tokens, self.best_reuse_tokens)
        repeated = self._span_tokens(reuse_tokens, self.pending_tokens)
        return (
            self._span_tokens(reuse_tokens, self.prompt_tokens) / tokens_per_ms,
            self.weights.history_weight * lost_history / tokens_per_ms / (1 + departures),
            -extra / tokens_per_ms * departures / (1 + departures),
            self.weights.again_weight * repeated / tokens_per_ms,
        )

    def _span_tokens(self, begin: float, end: float) -> float:
        """Return what the tokens in between cost, none if they aren't in this order; see `span_tokens`."""
        return span_tokens(begin, end, self.context_tokens) if end > begin else 0.0
