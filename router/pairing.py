"""Whether a prompt is computed where it will be decoded, or on a prefill instance: by cost.

Computing it where it is decoded saves the hand-off, and holds up the answers under way there. So a turn
that adds little to what its decode instance holds stays, and one that adds much goes to a prefill
instance first, without a threshold. Policies that know no costs hand over whatever can be handed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moongate.router.cost import CostWeights
from moongate.router.model import Role
from moongate.router.policy import Ranked


class Pair(NamedTuple):
    """Where a request is decoded, at what cost in all, and where its prompt is computed.

    `prefill` None: there as well. `ranking` has the places to decode, the chosen one first.
    """

    ranking: Sequence[Ranked]
    prefill: Ranked | None


def choose_pair(
    decoding: Sequence[Ranked],
    receiving: Sequence[Ranked],
    prefilling: Sequence[Ranked],
    weights: CostWeights,
    prompt_tokens: int,
    handoff_tokens_per_ms: float,
) -> Pair:
    """Return the cheapest way. All are ranked for the same request.

    `decoding`: all that may decode; `receiving`: of these, those that can fetch what another prefilled.
    """
    if not prefilling or not receiving:
        return Pair(decoding, None)
    prefill = prefilling[0]
    if prefill.cost_ms is None or decoding[0].cost_ms is None:
        return Pair(receiving, prefill)
    alone = sorted((_alone(p, weights) for p in decoding if _may_compute(p)), key=_cost)
    paired = sorted(
        (
            _paired(place, prefill, weights, prompt_tokens, handoff_tokens_per_ms)
            for place in receiving
        ),
        key=_cost,
    )
    if alone and _cost(alone[0]) <= _cost(paired[0]):
        return Pair(_with_others(alone, paired), None)
    return Pair(_with_others(paired, alone), prefill)


def _with_others(chosen: Sequence[Ranked], others: Sequence[Ranked]) -> list[Ranked]:
    """Return the places of the way that was chosen, and behind them those that only the other has."""
    holders = {place.holder for place in chosen}
    return [*chosen, *(place for place in others if place.holder not in holders)]


def _may_compute(place: Ranked) -> bool:
    """Tell whether it may come to computing the prompt where it is decoded: the rest of it.

    A prompt of which a decode instance holds nothing is no rest; such are the prefill instances for.
    """
    candidate = place.candidate
    return candidate.role is not Role.DECODE or candidate.overlap_tokens > 0


def _alone(place: Ranked, weights: CostWeights) -> Ranked:
    """Return what it costs to compute the prompt where it is decoded."""
    candidate = place.candidate
    prefill_ms = place.terms_ms.get("prefill", 0.0)
    held_up = 1 + candidate.active_requests
    stall_ms = weights.stall_ms + prefill_ms * held_up * weights.stall_weight
    return place._replace(
        cost_ms=_cost(place) + stall_ms, terms_ms={**place.terms_ms, "stall": stall_ms}
    )


def _paired(
    place: Ranked,
    prefill: Ranked,
    weights: CostWeights,
    prompt_tokens: int,
    handoff_tokens_per_ms: float,
) -> Ranked:
    """Return what it costs to decode there what was prefilled elsewhere."""
    moved_tokens = max(prompt_tokens - place.candidate.overlap_tokens, 0)
    terms_ms = {
        "prefill_leg": _cost(prefill),
        "handoff": weights.handoff_ms + moved_tokens / handoff_tokens_per_ms,
        **{name: ms for name, ms in place.terms_ms.items() if name in ("queue", "active")},
    }
    return Ranked(place.candidate, prefill.reason, sum(terms_ms.values()), terms_ms)


def _cost(place: Ranked) -> float:
    assert place.cost_ms is not None
    return place.cost_ms
