"""Alone or by a pair: by what it costs in milliseconds, written out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from moongate.router.cost import CostWeights
from moongate.router.model import Holder, InstanceId, Reason, Role, Trust
from moongate.router.pairing import Pair, choose_pair
from moongate.router.policy import Candidate, Ranked

WEIGHTS = CostWeights(handoff_ms=10.0, stall_ms=4.0, stall_weight=0.5)
TOKENS, TOKENS_PER_MS = 1000, 50.0  # a transfer of all of it: 20 ms


def ranked(
    name: str,
    role: Role,
    *,
    overlap: int = 0,
    requests: int = 0,
    reason: Reason = Reason.LOAD,
    **terms_ms: float,
) -> Ranked:
    candidate = Candidate(
        Holder(InstanceId(name)), role, 1.0, Trust.EXACT, requests, 0, 0, overlap_tokens=overlap
    )
    return Ranked(candidate, reason, sum(terms_ms.values()), terms_ms)


PREFILL = ranked("p", Role.PREFILL, reason=Reason.DEVICE_PREFIX, prefill=100.0, queue=5.0)


def choose(places: Sequence[Ranked], prefilling: Sequence[Ranked]) -> Pair:
    """Return the choice where all of the places can fetch."""
    return choose_pair(places, places, prefilling, WEIGHTS, TOKENS, TOKENS_PER_MS)


def test_without_prefill_instances_all_stays_as_it_was_ranked() -> None:
    places = [ranked("d", Role.DECODE, prefill=125.0)]
    assert choose(places, []) == (places, None)


def test_a_prompt_of_which_the_decode_instance_holds_nothing_is_prefilled_elsewhere() -> None:
    cheap = ranked("d", Role.DECODE, prefill=1.0)
    pair = choose([cheap], [PREFILL])
    assert pair.prefill == PREFILL
    (place,) = pair.ranking
    assert place.terms_ms == {"prefill_leg": 105.0, "handoff": 30.0}
    assert (place.cost_ms, place.reason) == (135.0, Reason.DEVICE_PREFIX)


def test_the_rest_of_a_prompt_is_computed_where_the_beginning_is() -> None:
    rest = ranked("d", Role.DECODE, overlap=990, prefill=1.25)
    pair = choose([rest], [PREFILL])
    assert pair.prefill is None
    (place,) = pair.ranking
    assert place.terms_ms == {"prefill": 1.25, "stall": 4.0 + 1.25 * 0.5}
    assert place.cost_ms == pytest.approx(1.25 + 4.625)


def test_the_answers_under_way_are_held_up_by_it() -> None:
    def stall_ms(requests: int) -> float:
        place = ranked("d", Role.DECODE, overlap=500, requests=requests, prefill=20.0)
        pair = choose([place], [PREFILL])
        assert pair.prefill is None
        return pair.ranking[0].terms_ms["stall"]

    assert [stall_ms(requests) for requests in (0, 1, 3)] == [14.0, 24.0, 44.0]


def test_a_long_rest_is_prefilled_elsewhere_and_only_it_is_moved() -> None:
    long = ranked("d", Role.DECODE, overlap=400, requests=2, prefill=75.0)
    pair = choose([long], [PREFILL])
    assert pair.prefill == PREFILL
    assert pair.ranking[0].terms_ms == {"prefill_leg": 105.0, "handoff": 10.0 + 600 / 50}


def test_a_decode_instances_load_counts_in_a_pair_and_its_prefill_does_not() -> None:
    busy = ranked("d0", Role.DECODE, prefill=125.0, queue=3.0, active=60.0)
    idle = ranked("d1", Role.DECODE, prefill=125.0)
    pair = choose([busy, idle], [PREFILL])
    assert [place.holder.instance_id for place in pair.ranking] == ["d1", "d0"]
    assert pair.ranking[1].cost_ms == 135.0 + 63.0


def test_an_instance_of_both_roles_computes_what_costs_less_than_a_hand_off() -> None:
    both = ranked("b", Role.BOTH, prefill=80.0)
    decode = ranked("d", Role.DECODE, prefill=125.0)
    pair = choose([decode, both], [PREFILL])
    assert pair.prefill is None
    assert [place.holder.instance_id for place in pair.ranking] == ["b", "d"]
    assert pair.ranking[0].cost_ms == 80.0 + 4.0 + 40.0
    dear = ranked("b", Role.BOTH, prefill=88.0)
    pair = choose([decode, dear], [PREFILL])
    assert pair.prefill == PREFILL
    assert len(pair.ranking) == 2


def test_what_cannot_fetch_is_no_place_to_hand_over_to() -> None:
    both, decode = ranked("b", Role.BOTH, prefill=200.0), ranked("d", Role.DECODE, prefill=125.0)
    pair = choose_pair([both, decode], [decode], [PREFILL], WEIGHTS, TOKENS, TOKENS_PER_MS)
    assert pair.prefill == PREFILL
    assert [place.holder.instance_id for place in pair.ranking] == ["d", "b"]
    alone = choose_pair([both], [], [PREFILL], WEIGHTS, TOKENS, TOKENS_PER_MS)
    assert alone == ([both], None)


def test_a_prompt_shorter_than_what_is_held_moves_nothing() -> None:
    # Its length is an estimate.
    place = ranked("b", Role.BOTH, overlap=1200, prefill=500.0)
    pair = choose([place], [PREFILL])
    assert pair.ranking[0].terms_ms["handoff"] == 10.0


@pytest.mark.parametrize("side", ["prefill", "decode", "both"])
def test_policies_without_costs_hand_over_what_can_be_handed_over(side: str) -> None:
    place = ranked("d", Role.DECODE, overlap=990, prefill=1.0)
    prefill = PREFILL
    if side != "prefill":
        place = place._replace(cost_ms=None)
    if side != "decode":
        prefill = prefill._replace(cost_ms=None)
    pair = choose([place], [prefill])
    assert pair == ([place], prefill)
