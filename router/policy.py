"""The policies: one class each, with one method that ranks candidates.

A policy is side-effect free: everything that it may look at is in its arguments, chance included,
and whatever it would remember (whose turn it is, what was forwarded where) the core keeps and shows
in the candidates. `make_policy` finds one by name, or by `module:Class` for one of yours; see
`examples/my_policy.py`.
"""

from __future__ import annotations

import dataclasses
import difflib
import heapq
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import xxhash

from moongate.router.cost import CostWeights, Pricing
from moongate.router.model import Holder, PoolPart, Reason, Request, Role, Trust

RandomBelow = Callable[[int], int]
"""Return an integer in [0, n): the only chance that a policy has."""


class Candidate(NamedTuple):
    """A holder that could take the request now: healthy, not draining, with its model."""

    holder: Holder
    role: Role
    weight: float  # relative speed
    trust: Trust
    active_requests: int
    queued_prefill_tokens: int
    last_chosen: int  # counts the fleet's forwards; 0: never chosen
    recent_sessions: int = 0  # of the fleet's last sessions, those that began here
    overlap_tokens: int = 0  # confirmed and predicted
    confirmed_tokens: int = 0  # of these, said by the engine itself
    pool: PoolPart | None = None  # what the pool has for it; None: nothing
    fetch_ms_per_token: float = 0.0  # from there
    slowness: float = 1.0  # how many times later first bytes come than from others of its weight

    def having(self, overlap_tokens: int, confirmed_tokens: int) -> Candidate:
        """Return the candidate with this overlap."""
        return Candidate(*self[:8], overlap_tokens, confirmed_tokens, *self[10:])

    def fetching(self, pool: PoolPart, fetch_ms_per_token: float) -> Candidate:
        """Return the candidate with what it could get from the pool."""
        return Candidate(*self[:10], pool, fetch_ms_per_token, self.slowness)

    @property
    def pool_tokens(self) -> int:
        """Return the tokens that it would get from the pool: what is there beyond its overlap."""
        return max(self.pool.tokens - self.overlap_tokens, 0) if self.pool is not None else 0


class Situation(NamedTuple):
    """What is known of the request beside its candidates, and what is asked for."""

    request: Request
    prompt_tokens: int  # 0: not known
    history_tokens: int  # of the session's earlier turns, 0 for a new session
    departures: int  # earlier requests that went on from the same point
    tokens_per_ms: float  # the fleet's prefill rate, of weight 1
    places: int  # how many have to be ranked at least, if there are so many
    context_tokens: float = math.inf  # so many before it make a token cost twice as much


SAME_PROMPT_TOKENS, SAME_PROMPT_PART = 256, 16
"""By so many tokens, and such a part of itself, a prompt may be longer than what is predicted of it, and be
the same: a block of common sizes, and what other gateways don't tell (`foreign_predictions.py`)."""

NO_TERMS: Mapping[str, float] = {}


class Ranked(NamedTuple):
    """A candidate's place in a ranking, and why it would be chosen.

    `cost_ms` None: the policy does not work with costs; else the terms' sum.
    """

    candidate: Candidate
    reason: Reason
    cost_ms: float | None = None
    terms_ms: Mapping[str, float] = NO_TERMS

    @property
    def holder(self) -> Holder:
        return self.candidate.holder


@runtime_checkable
class Policy(Protocol):
    """Ranks candidates. `reads_prompts`: whether prompts need to be tokenised for it."""

    @property
    def name(self) -> str: ...

    @property
    def reads_prompts(self) -> bool: ...

    def rank(
        self, situation: Situation, candidates: Sequence[Candidate], random_below: RandomBelow
    ) -> list[Ranked]:
        """Return candidates, best first: at least `situation.places` of them, or all.

        There is at least one, and they come in the order of their names. Who is left out can't be
        chosen, and isn't shown in the receipt.
        """
        ...


class PolicyError(ValueError):
    """A policy or one of its options can't be used; the text says which and what would be right."""


# --- the policies ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """The one that waited longest. Stays even when instances come, go or serve several models.

    A slow instance waits for as many times more turns.
    """

    name: ClassVar[str] = "round_robin"
    reads_prompts: ClassVar[bool] = False

    def rank(
        self, situation: Situation, candidates: Sequence[Candidate], random_below: RandomBelow
    ) -> list[Ranked]:
        # Of those that waited equally long the first by name, in whose order they come.
        first = heapq.nsmallest(situation.places, candidates, key=_turns(candidates))
        return [Ranked(c, Reason.LOAD) for c in first]


@dataclass(frozen=True, slots=True)
class Random:
    """Any, with equal chance."""

    name: ClassVar[str] = "random"
    reads_prompts: ClassVar[bool] = False

    def rank(
        self, situation: Situation, candidates: Sequence[Candidate], random_below: RandomBelow
    ) -> list[Ranked]:
        rest = list(candidates)
        places = min(situation.places, len(rest))
        drawn = [rest.pop(random_below(len(rest))) for _ in range(places)]
        return [Ranked(c, Reason.LOAD) for c in drawn]


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """The fewest unfinished requests for its weight, then the fewest prompt tokens ahead."""

    name: ClassVar[str] = "least_loaded"
    reads_prompts: ClassVar[bool] = False

    def rank(
        self, situation: Situation, candidates: Sequence[Candidate], random_below: RandomBelow
    ) -> list[Ranked]:
        first = heapq.nsmallest(situation.places, candidates, key=_by_load(candidates))
        return [Ranked(c, Reason.LOAD) for c in first]


@dataclass(frozen=True, slots=True)
class PowerOfTwo:
    """The less loaded of two picked by chance."""

    name: ClassVar[str] = "power_of_two"
    reads_prompts: ClassVar[bool] = False

    def rank(
        self, situation: Situation, candidates: Sequence[Candidate], random_below: RandomBelow
    ) -> list[Ranked]:
        rest, by_load = list(candidates), _by_load(candidates)
        picked = [rest.pop(random_below(len(rest))) for _ in range(min(2, len(rest)))]
        others = heapq.nsmallest(situation.places - len(picked), rest, key=by_load)
        return [Ranked(c, Reason.LOAD) for c in (*sorted(picked, key=by_load), *others)]


@dataclass(frozen=True, slots=True)
class SessionHash:
    """The same session key to the same holder (rendezvous hashing); without a key, by load.

    When a holder leaves, only its own sessions move.
    """

    name: ClassVar[str] = "session_hash"
    reads_prompts: ClassVar[bool] = False

    def rank(
        self, situation: Situation, candidates: Sequence[Candidate], random_below: RandomBelow
    ) -> list[Ranked]:
        key = situation.request.session_key
        if key is None:
            return LeastLoaded().rank(situation, candidates, random_below)
        first = heapq.nsmallest(situation.places, candidates, key=_by_session(key))
        return [Ranked(c, Reason.SESSION) for c in first]


@dataclass(frozen=True, slots=True)
class KvCost:
    """The least expected cost in milliseconds (`cost.py`), from exact ownership where there is any.

    A request whose prompt says nothing (it could not be read, or its model caches nothing) goes by
    its session key, else by load.
    """

    name: ClassVar[str] = "kv_cost"
    reads_prompts: ClassVar[bool] = True

    weights: CostWeights = field(default_factory=CostWeights)

    def rank(
        self, situation: Situation, candidates: Sequence[Candidate], random_below: RandomBelow
    ) -> list[Ranked]:
        if situation.prompt_tokens == 0:
            return SessionHash().rank(situation, candidates, random_below)
        weights = self.weights
        # What a token of an overlap is worth, by how far it can be believed.
        worth_by_trust = (weights.approximate_weight, weights.degraded_weight, 1.0)
        worths = [
            c.overlap_tokens and c.overlap_tokens * worth_by_trust[c.trust] for c in candidates
        ]
        reuses = worths if not situation.request.pool else [
            worth if c.pool is None else _with_pool(c, c.pool, worth)
            for c, worth in zip(candidates, worths, strict=True)
        ]  # fmt: skip
        pricing = Pricing(
            weights=weights,
            tokens_per_ms=situation.tokens_per_ms,
            prompt_tokens=situation.prompt_tokens,
            best_reuse_tokens=max(reuses),
            history_tokens=situation.history_tokens,
            departures=situation.departures,
            context_tokens=situation.context_tokens,
            pending_tokens=_pending_tokens(situation.prompt_tokens, candidates),
        )
        fetches_ms = [
            pricing.fetch_ms(reuse - worth, c.fetch_ms_per_token)
            for c, worth, reuse in zip(candidates, worths, reuses, strict=True)
        ] if reuses is not worths else None  # fmt: skip
        costs_ms = price_all(pricing, candidates, reuses, fetches_ms)
        tie_key = situation.request.tie_key
        # Equal costs go to whoever waited longest, so that an idle fleet fills evenly; and of those
        # never chosen to the first.
        tie = _last_chosen if tie_key is None else _by_session(tie_key)
        order = zip(costs_ms, map(tie, candidates), range(len(candidates)), strict=True)
        first = [n for _, _, n in heapq.nsmallest(situation.places, order)]
        return [
            _with_terms(
                pricing, candidates[n], reuses[n], fetches_ms[n] if fetches_ms is not None else 0.0
            )
            for n in first
        ]


@dataclass(frozen=True, slots=True)
class PrefixAffinity(KvCost):
    """As `kv_cost`, for engines without events: by what was forwarded where, nothing else.

    The gateway opens no event sources for it.
    """

    name: ClassVar[str] = "prefix_affinity"


@dataclass(frozen=True, slots=True)
class PlugIn:
    """A policy of the operator's own, whose mistakes must not stop the router.

    If it raises, ranks nobody, anybody twice, or what isn't among the candidates, the request goes
    by load and its receipt says `fallback`. Fewer places than asked for are no mistake: the first is
    what counts.
    """

    policy: Policy

    @property
    def name(self) -> str:
        return self.policy.name

    @property
    def reads_prompts(self) -> bool:
        return self.policy.reads_prompts

    def rank(
        self, situation: Situation, candidates: Sequence[Candidate], random_below: RandomBelow
    ) -> list[Ranked]:
        try:
            ranked = list(self.policy.rank(situation, candidates, random_below))
            given = {candidate.holder: candidate for candidate in candidates}
            is_usable = bool(ranked) and all(
                given.pop(r.candidate.holder) == r.candidate for r in ranked
            )
        except Exception:  # it is not our code
            is_usable = False
        if is_usable:
            return ranked
        first = LeastLoaded().rank(situation, candidates, random_below)
        return [Ranked(entry.candidate, Reason.FALLBACK) for entry in first]


BUILT_IN: Mapping[str, type[Any]] = {
    cls.name: cls
    for cls in (RoundRobin, Random, LeastLoaded, PowerOfTwo, SessionHash, PrefixAffinity, KvCost)
}


# --- prices ---------------------------------------------------------------------------------------


def price_all(
    pricing: Pricing,
    candidates: Sequence[Candidate],
    reuses_tokens: Sequence[float],
    fetches_ms: Sequence[float] | None = None,
) -> list[float]:
    """Return what each candidate costs: to the last bit the sum of the terms that are shown.

    The load's terms are written out, and the prompt's are worked out once for all of equal weight and
    reuse: this is the one loop over the fleet that computes anything. `fetches_ms` None: none fetches.
    """
    rate, active_ms = pricing.tokens_per_ms, pricing.weights.active_request_ms
    session_ms = 0.0 if pricing.history_tokens else pricing.weights.session_ms
    prompt_terms: dict[tuple[float, float], tuple[float, float, float, float]] = {}
    last_weight, last_reuse = math.nan, math.nan  # mostly those of the next one, too
    prefill = history = shared = again = 0.0
    costs_ms: list[float] = []
    for candidate, reuse_tokens in zip(candidates, reuses_tokens, strict=True):
        weight = candidate.weight / candidate.slowness
        if weight != last_weight or reuse_tokens != last_reuse:
            last_weight, last_reuse = weight, reuse_tokens
            terms = prompt_terms.get((weight, reuse_tokens))
            if terms is None:
                terms = pricing.prompt_terms_ms(weight, reuse_tokens)
                prompt_terms[weight, reuse_tokens] = terms
            prefill, history, shared, again = terms
        costs_ms.append(
            candidate.queued_prefill_tokens / (rate * weight)
            + candidate.active_requests / weight * active_ms
            + candidate.recent_sessions / weight * session_ms
            + prefill
            + history
            + shared
            + again
        )
    if fetches_ms is not None:
        return [cost + fetch for cost, fetch in zip(costs_ms, fetches_ms, strict=True)]
    return costs_ms


def _pending_tokens(prompt_tokens: int, candidates: Sequence[Candidate]) -> int:
    """Return how much of the prompt is computed somewhere just now, if that is all of it; else 0.

    A prompt that only begins alike is another session's, which had better live elsewhere. Without
    events nobody knows whether it is still being computed.
    """
    pending, slack = 0, min(SAME_PROMPT_TOKENS, prompt_tokens // SAME_PROMPT_PART)
    for candidate in candidates:
        overlap_tokens = candidate.overlap_tokens
        if overlap_tokens > pending and prompt_tokens - overlap_tokens <= slack:
            is_confirmed = candidate.confirmed_tokens == overlap_tokens
            if is_confirmed:
                return 0  # somebody has it
            if candidate.trust is not Trust.APPROXIMATE:
                pending = overlap_tokens
    return pending


def _with_pool(candidate: Candidate, pool: PoolPart, worth_tokens: float) -> float:
    """Return what reuse is worth where the pool may go on after an overlap, or stand in for it."""
    return max(worth_tokens + candidate.pool_tokens * pool.weight, pool.tokens * pool.weight)


def _with_terms(
    pricing: Pricing, candidate: Candidate, reuse_tokens: float, fetch_ms: float
) -> Ranked:
    terms_ms = pricing.terms_ms(
        candidate.weight / candidate.slowness,
        candidate.queued_prefill_tokens,
        candidate.active_requests,
        candidate.recent_sessions,
        reuse_tokens,
        fetch_ms,
        from_disk=candidate.pool is not None and candidate.pool.on_disk,
    )
    reason = Reason.DEVICE_PREFIX if candidate.overlap_tokens else Reason.LOAD
    if fetch_ms and candidate.pool_tokens > candidate.overlap_tokens:
        reason = Reason.POOL_PREFIX
    return Ranked(candidate, reason, sum(terms_ms.values()), terms_ms)


# --- shared orders --------------------------------------------------------------------------------


_last_chosen: Callable[[Candidate], int] = attrgetter("last_chosen")


def _turns(candidates: Sequence[Candidate]) -> Callable[[Candidate], float]:
    """Return the order in which candidates have waited, the longest first; turns of slow ones count less."""
    now = max(map(_last_chosen, candidates)) + 1
    return lambda candidate: (candidate.last_chosen - now) / candidate.slowness


def _by_load(
    candidates: Sequence[Candidate],
) -> Callable[[Candidate], tuple[float, float, float, Holder]]:
    """Return the order of least load.

    A slow instance keeps its requests for longer, so that by their number it has its share; only where that
    says nothing its turns do.
    """
    now = max(map(_last_chosen, candidates)) + 1  # as in `_turns`
    return lambda candidate: (
        candidate.active_requests / candidate.weight,
        candidate.queued_prefill_tokens / candidate.weight,
        (candidate.last_chosen - now) / candidate.slowness,
        candidate.holder,
    )


def _by_session(key: str) -> Callable[[Candidate], int]:
    """Return the order in which a session key prefers holders (rendezvous hashing)."""
    return lambda c: -xxhash.xxh3_64_intdigest(f"{key}\0{c.holder}".encode())


# --- by name --------------------------------------------------------------------------------------


def make_policy(name: str, options: Mapping[str, Any] | None = None) -> Policy:
    """Return the policy of this name with these options.

    Raises: PolicyError for an unknown name or option, or a value that an option can't have.
    """
    options = dict(options or {})
    if ":" in name:
        return _make_plug_in(name, options)
    if name not in BUILT_IN:
        known = [*BUILT_IN, "module:Class"]
        raise PolicyError(f"unknown policy {name!r}{_nearest(name, known)}; known: {_list(known)}")
    cls = BUILT_IN[name]
    if issubclass(cls, KvCost):
        return cls(weights=_make_weights(name, options))
    if options:
        raise PolicyError(f"policy {name} has no options, but got {_list(options)}")
    policy: Policy = cls()
    return policy


def _make_weights(name: str, options: Mapping[str, Any]) -> CostWeights:
    known = [f.name for f in dataclasses.fields(CostWeights)]
    for option, value in options.items():
        if option not in known:
            raise PolicyError(
                f"policy {name} has no option {option!r}{_nearest(option, known)}; "
                f"known: {_list(known)}"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
            raise PolicyError(f"option {option} of policy {name} must be a number >= 0: {value!r}")
    return CostWeights(**{option: float(value) for option, value in options.items()})


def _make_plug_in(name: str, options: Mapping[str, Any]) -> Policy:
    module_name, _, class_name = name.partition(":")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # whatever somebody else's module does when it is imported
        raise PolicyError(f"policy {name!r} can't be loaded: {error}") from error
    try:
        policy = cls(**options)
    except Exception as error:  # as above
        raise PolicyError(f"policy {name!r} does not take these options: {error}") from error
    if not isinstance(policy, Policy):
        raise PolicyError(f"policy {name!r} lacks what a policy has: name, reads_prompts, rank()")
    return PlugIn(policy)


def _nearest(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _list(names: Any) -> str:
    return ", ".join(sorted(names))
