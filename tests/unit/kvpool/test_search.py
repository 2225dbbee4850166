"""Where a prefix ends: exactly for one without holes, and with few questions."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moongate.kvpool.search import ROUNDS_MAX, search_prefix

LONG = 5_600  # a prompt of 90,000 tokens in blocks of 16


class Found(NamedTuple):
    blocks: int
    keys: int
    rounds: int


def search(count: int, there: Container[int], likely: int | None = None) -> Found:
    """Search a chain of which these positions are there."""
    questions, keys, rounds = search_prefix(count, likely), 0, 0
    try:
        asked = next(questions)
        while True:
            assert len(set(asked)) == len(asked)
            assert all(0 <= position < count for position in asked)
            keys, rounds = keys + len(asked), rounds + 1
            asked = questions.send({position for position in asked if position in there})
    except StopIteration as end:
        return Found(end.value, keys, rounds)


@st.composite
def chains(draw: st.DrawFn) -> tuple[int, int, int | None]:
    """Return the length of a chain, how much of it is there, and how much probably is."""
    count = draw(st.one_of(st.integers(0, 80), st.integers(0, 20_000)))
    return count, draw(st.integers(0, count)), draw(st.none() | st.integers(0, count + 100))


@given(chains())
def test_the_end_of_a_prefix_without_holes_is_found_exactly(
    chain: tuple[int, int, int | None],
) -> None:
    count, there, likely = chain
    assert search(count, range(there), likely).blocks == there


@given(
    st.integers(0, 300),
    st.sets(st.integers(0, 299)),
    st.none() | st.integers(0, 300),
)
def test_with_holes_the_last_block_was_seen_and_the_next_one_was_missed(
    count: int, holes: set[int], likely: int | None
) -> None:
    there = set(range(count)) - holes
    blocks, _, rounds = search(count, there, likely)
    assert blocks == 0 or blocks - 1 in there
    assert blocks == count or blocks in holes
    assert rounds < ROUNDS_MAX


@pytest.mark.parametrize("tail", range(65))
def test_all_but_a_tail_costs_at_most_24_keys_in_4_round_trips(tail: int) -> None:
    there = LONG - tail
    for likely in (None, LONG + 9, LONG, LONG - 1, LONG - 50, LONG - 600, 300, 1, 0):
        found = search(LONG, range(there), likely)
        assert found.blocks == there
        assert (found.keys, found.rounds) <= (24, 4)
        assert found.rounds <= 4


@pytest.mark.parametrize("likely", [1, 40, 64, 65, 66, 700, 3_000, 5_500, 5_590])
def test_near_where_the_previous_turn_ended_it_costs_as_little(likely: int) -> None:
    for there in range(max(likely - 64, 0), min(likely + 65, LONG + 1)):
        found = search(LONG, range(there), likely)
        assert found.blocks == there
        assert found.keys <= 24
        assert found.rounds <= 4


@pytest.mark.parametrize(
    ("there", "likely"), [(0, None), (0, 1), (0, 3_000), (0, LONG), (LONG, None), (LONG, LONG)]
)
def test_nothing_and_all_cost_one_round_trip(there: int, likely: int | None) -> None:
    assert search(LONG, range(there), likely).rounds == 1


def test_a_likely_end_that_is_right_costs_one_round_trip() -> None:
    assert search(LONG, range(4_000), 4_000) == Found(4_000, 13, 1)


def test_a_hole_just_before_the_end_ends_the_prefix() -> None:
    there = set(range(100)) - {97}
    assert search(LONG, there, 90).blocks == 97


def test_a_first_block_that_is_gone_leaves_nothing() -> None:
    assert search(LONG, range(1, LONG), 5_000) == Found(0, 13, 1)


def test_every_other_block_ends_in_few_rounds() -> None:
    found = search(LONG, range(0, LONG, 2))
    assert found.blocks % 2 == 1
    assert found.rounds <= 8


def test_an_empty_chain_has_nothing_to_ask_for() -> None:
    assert search(0, ()) == Found(0, 0, 0)
