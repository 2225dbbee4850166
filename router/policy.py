"""The policies: one class each, with one method that ranks candidates.

A policy is side-effect free: everything that it may look at is in its arguments, chance included,
and whatever it would remember (whose turn it is, what was forwarded where) the core keeps and shows
in the candidates. `make_policy` finds one by name, or by `module:Class` for one of yours; see
`examples/my_policy.py`.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, assert_never, runtime_checkable

import xxhash

from moongate.router.cost import CostWeights, placement_terms_ms
from moongate.router.model import Holder, Reason, Request, Role, Trust

RandomBelow = Callable[[int], int]
"""Return an integer in [0, n): the only chance that a policy has."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A holder that could take the request now: healthy, not draining, with its model."""

    holder: Holder
    role: Role
    weight: float
    trust: Trust
    active_requests: int
    queued_prefill_tokens: int
    tokens_per_ms: float  # prefill rate
    last_chosen: int  # counts the fleet's forwards; 0: never chosen
    overlap_tokens: int = 0  # confirmed and predicted
    confirmed_tokens: int = 0  # of these, said by the engine itself
    recent_sessions: int = 0  # of the fleet's last sessions, those that began here


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known of the request beside its candidates."""

    request: Request
    prompt_tokens: int  # 0: not known
    history_tokens: int  # of the session's earlier turns, 0 for a new session
    departures: int  # earlier requests that went on from the same point


@dataclass(frozen=True, slots=True)
class Ranked:
    """A candidate's place in a ranking, and why it would be chosen."""

    candidate: Candidate
    reason: Reason
    cost_ms: float | None = None
    terms_ms: Mapping[str, float] = field(default_factory=dict)


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
        """Return all candidates, best first. There is at least one."""
        ...


class PolicyError(ValueError):
    """A policy or one of its options can't be used; the text says which and what would be right."""


# --- the policies ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """The one that waited longest. Stays even when instances come, go or serve several models."""

    name: ClassVar[str] = "round_robin"
    reads_prompts: ClassVar[bool] = False

    def rank(
        self, situation: Situation, candidates: Sequence[Candidate], random_below: RandomBelow
    ) -> list[Ranked]:
        return [Ranked(c, Reason.LOAD) for c in sorted(candidates, key=_waited_longest)]


@dataclass(frozen=True, slots=True)
class Random:
    """Any, with equal chance."""

    name: ClassVar[str] = "random"
    reads_prompts: ClassVar[bool] = False

    def rank(
        self, situation: Situation, candidates: Sequence[Candidate], random_below: RandomBelow
    ) -> list[Ranked]:
        rest = list(candidates)
        shuffled = [rest.pop(random_below(len(rest))) for _ in range(len(candidates))]
        return [Ranked(c, Reason.LOAD) for c in shuffled]


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """The fewest unfinished requests for its weight, then the fewest prompt tokens ahead."""

    name: ClassVar[str] = "least_loaded"
    reads_prompts: ClassVar[bool] = False

    def rank(
        self, situation: Situation, candidates: Sequence[Candidate], random_below: RandomBelow
    ) -> list[Ranked]:
        return [Ranked(c, Reason.LOAD) for c in sorted(candidates, key=_by_load)]


@dataclass(frozen=True, slots=True)
class PowerOfTwo:
    """The less loaded of two picked by chance."""

    name: ClassVar[str] = "power_of_two"
    reads_prompts: ClassVar[bool] = False

    def rank(
        self, situation: Situation, candidates: Sequence[Candidate], random_below: RandomBelow
    ) -> list[Ranked]:
        rest = list(candidates)
        picked = [rest.pop(random_below(len(rest))) for _ in range(min(2, len(rest)))]
        order = sorted(picked, key=_by_load) + sorted(rest, key=_by_load)
        return [Ranked(c, Reason.LOAD) for c in order]


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
            return [Ranked(c, Reason.LOAD) for c in sorted(candidates, key=_by_load)]
        return [Ranked(c, Reason.SESSION) for c in by_session(key, candidates)]


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
        worth = {c.holder: c.overlap_tokens * self._trust_weight(c.trust) for c in candidates}
        best = max(worth.values())
        ranked = [self._price(situation, c, worth[c.holder], best) for c in candidates]
        if situation.request.tie_key is not None:
            preferred = by_session(situation.request.tie_key, candidates)
            return sorted(ranked, key=lambda r: (r.cost_ms, preferred.index(r.candidate)))
        # Equal costs go to whoever waited longest, so that an idle fleet fills evenly.
        return sorted(ranked, key=lambda r: (r.cost_ms, _waited_longest(r.candidate)))

    def _price(
        self, situation: Situation, candidate: Candidate, worth: float, best: float
    ) -> Ranked:
        terms_ms = placement_terms_ms(
            weights=self.weights,
            tokens_per_ms=candidate.tokens_per_ms,
            queued_prefill_tokens=candidate.queued_prefill_tokens,
            active_requests=candidate.active_requests / candidate.weight,
            recent_sessions=candidate.recent_sessions / candidate.weight,
            prompt_tokens=situation.prompt_tokens,
            overlap_tokens=worth,
            best_overlap_tokens=best,
            history_tokens=situation.history_tokens,
            departures=situation.departures,
        )
        reason = Reason.DEVICE_PREFIX if candidate.overlap_tokens else Reason.LOAD
        return Ranked(candidate, reason, sum(terms_ms.values()), terms_ms)

    def _trust_weight(self, trust: Trust) -> float:
        match trust:
            case Trust.EXACT:
                return 1.0
            case Trust.DEGRADED:
                return self.weights.degraded_weight
            case Trust.APPROXIMATE:
                return self.weights.approximate_weight
            case _:
                assert_never(trust)


@dataclass(frozen=True, slots=True)
class PrefixAffinity(KvCost):
    """As `kv_cost`, for engines without events: by what was forwarded where, nothing else.

    The gateway opens no event sources for it.
    """

    name: ClassVar[str] = "prefix_affinity"


@dataclass(frozen=True, slots=True)
class PlugIn:
    """A policy of the operator's own, whose mistakes must not stop the router.

    If it raises, or returns anything but all candidates once each, the request goes by load and its
    receipt says `fallback`.
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
            is_whole = sorted(_place(r.candidate) for r in ranked) == sorted(
                map(_place, candidates)
            )
        except Exception:  # it is not our code
            is_whole = False
        if is_whole:
            return ranked
        return [Ranked(c, Reason.FALLBACK) for c in sorted(candidates, key=_by_load)]


BUILT_IN: Mapping[str, type[Any]] = {
    cls.name: cls
    for cls in (RoundRobin, Random, LeastLoaded, PowerOfTwo, SessionHash, PrefixAffinity, KvCost)
}


# --- shared orders --------------------------------------------------------------------------------


def _waited_longest(candidate: Candidate) -> tuple[int, Holder]:
    return candidate.last_chosen, _sortable(candidate.holder)


def _by_load(candidate: Candidate) -> tuple[float, float, int, Holder]:
    return (
        candidate.active_requests / candidate.weight,
        candidate.queued_prefill_tokens / candidate.weight,
        *_waited_longest(candidate),
    )


def _place(candidate: Candidate) -> Holder:
    return _sortable(candidate.holder)


def _sortable(holder: Holder) -> Holder:
    return Holder(holder.instance_id, -1 if holder.rank is None else holder.rank)


def by_session(key: str, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates in the order in which a session key prefers them."""
    return sorted(
        candidates,
        key=lambda c: xxhash.xxh3_64_intdigest(f"{key}\0{c.holder}".encode()),
        reverse=True,
    )


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
    except TypeError as error:
        raise PolicyError(f"policy {name!r} does not take these options: {error}") from error
    if not isinstance(policy, Policy):
        raise PolicyError(f"policy {name!r} lacks what a policy has: name, reads_prompts, rank()")
    return PlugIn(policy)


def _nearest(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _list(names: Any) -> str:
    return ", ".join(sorted(names))
