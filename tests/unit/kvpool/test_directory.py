"""What is known of the pool, and for how long."""

from __future__ import annotations

import pytest

from moongate.kvpool import directory as directory_module
from moongate.kvpool.directory import NOTHING, PoolDirectory, PoolPrefix, Recalled
from moongate.router.model import BlockHash

CHAIN = [BlockHash(bytes([number])) for number in range(10)]
OTHER = [*CHAIN[:4], *(BlockHash(bytes([100 + number])) for number in range(6))]
PREFIX = PoolPrefix(4, 160, "host:1")


def answered(prefix: PoolPrefix = PREFIX, usable: int = 10, now: float = 0.0) -> PoolDirectory:
    directory = PoolDirectory()
    directory.note_answer(CHAIN, usable, prefix, now)
    return directory


def test_an_answer_holds_for_two_seconds_and_is_a_place_to_start_from_later() -> None:
    directory = answered(now=10.0)
    assert directory.recall(CHAIN, 10, now=11.9) == Recalled(PREFIX, True, 4)
    assert directory.recall(CHAIN, 10, now=12.0) == Recalled(PoolPrefix(0), False, 4)


def test_an_answer_says_nothing_of_a_prompt_that_goes_on_otherwise() -> None:
    """A system prompt's end, asked for a moment ago, isn't where other sessions end."""
    assert answered().recall(OTHER, 10, now=1.0) == Recalled(PREFIX, False, 4)


def test_a_prompt_that_ends_where_the_prefix_ends_needs_no_more() -> None:
    assert answered().recall(OTHER, 4, now=1.0).is_fresh
    whole = answered(usable=4)
    assert whole.recall(CHAIN, 4, now=1.0).is_fresh
    assert whole.recall(CHAIN, 10, now=1.0) == Recalled(PREFIX, False, 4), (
        "what follows wasn't asked"
    )


def test_what_was_computed_since_outdates_an_answer() -> None:
    directory = answered()
    directory.outdate(CHAIN)
    assert directory.recall(CHAIN, 10, now=0.1) == Recalled(PoolPrefix(0), False, 4)
    directory.outdate([BlockHash(b"unknown")])
    assert len(directory) == 1


def test_a_hint_counts_for_ten_seconds_with_the_size_that_blocks_have() -> None:
    directory = answered(now=0.0)
    directory.note_stored(CHAIN[4:7], now=1.0)
    assert directory.hints == 3
    assert directory.recall(CHAIN, 10, now=10.9) == Recalled(PoolPrefix(7, 160), False, 7)
    assert directory.recall(CHAIN, 6, now=10.9) == Recalled(PoolPrefix(6, 160), False, 6)
    assert directory.recall(CHAIN, 10, now=11.0) == Recalled(PoolPrefix(0), False, 4)


def test_an_answer_is_more_than_all_hints_behind_it() -> None:
    directory = PoolDirectory()
    directory.note_stored(CHAIN[:8], now=0.0)
    directory.note_answer(CHAIN, 8, PREFIX, now=1.0)
    assert directory.recall(CHAIN, 8, now=1.0) == Recalled(PREFIX, True, 4)
    assert directory.recall(CHAIN, 8, now=4.0) == Recalled(PoolPrefix(4, 160), False, 4)


def test_an_answer_takes_what_was_answered_before_of_blocks_behind_it() -> None:
    directory = answered(PoolPrefix(9, 160), now=0.0)
    directory.note_answer(CHAIN, 10, PREFIX, now=5.0)
    assert directory.recall(CHAIN, 10, now=5.1) == Recalled(PREFIX, True, 4)
    shorter = answered(PoolPrefix(6, 160), usable=6, now=0.0)
    shorter.note_answer(CHAIN, 10, PREFIX, now=1.0)
    assert shorter.recall(CHAIN, 10, now=1.1) == Recalled(PREFIX, True, 4)
    shorter.note_answer(CHAIN, 10, PoolPrefix(0), now=1.2)
    assert shorter.recall(CHAIN, 10, now=1.3) == NOTHING


def test_an_answer_as_long_as_was_asked_for_says_nothing_of_what_is_behind() -> None:
    directory = answered(PoolPrefix(9, 160), now=0.0)
    directory.note_answer(CHAIN, 4, PREFIX, now=1.0)
    assert directory.recall(CHAIN, 10, now=1.1) == Recalled(PoolPrefix(9, 160), True, 9)


def test_an_answer_of_nothing_takes_the_hints() -> None:
    directory = PoolDirectory()
    directory.note_stored(CHAIN[:3], now=0.0)
    directory.note_answer(CHAIN, 10, PoolPrefix(0), now=0.0)
    assert directory.recall(CHAIN, 10, now=0.0) == NOTHING
    assert (len(directory), directory.hints) == (0, 0)


def test_nothing_is_known_of_an_unknown_chain() -> None:
    assert answered().recall(CHAIN[5:], 5, now=0.0) == NOTHING


def test_forgetting_a_chain_leaves_others() -> None:
    directory = answered()
    other = [BlockHash(b"x"), BlockHash(b"y")]
    directory.note_stored(CHAIN[:6], now=0.0)
    directory.note_stored(other, now=0.0)
    directory.forget(CHAIN)
    assert directory.recall(CHAIN, 10, now=0.0) == NOTHING
    assert directory.recall(other, 2, now=0.0).likely_blocks == 2
    directory.forget_all()
    assert directory.recall(other, 2, now=0.0) == NOTHING


def test_old_hints_go_with_the_next_announcement() -> None:
    directory = PoolDirectory()
    directory.note_stored(CHAIN[:5], now=0.0)
    directory.note_stored(CHAIN[:1], now=5.0)  # announced again: young
    directory.note_stored(CHAIN[9:], now=10.0)
    assert directory.hints == 2
    directory.note_stored([], now=20.0)
    assert directory.hints == 0


def test_it_is_bounded_and_the_oldest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "FACTS_MAX", 2)
    monkeypatch.setattr(directory_module, "HINTS_MAX", 3)
    directory = PoolDirectory()
    for length in (2, 3, 5):
        directory.note_answer(CHAIN, 10, PoolPrefix(length), now=0.0)
    assert directory.recall(CHAIN, 2, now=0.0) == NOTHING
    assert directory.recall(CHAIN, 4, now=0.0).likely_blocks == 3
    directory.note_stored([BlockHash(b"a"), BlockHash(b"b"), BlockHash(b"c"), BlockHash(b"d")], 0.0)
    assert directory.hints == 3
    assert directory.recall([BlockHash(b"a")], 1, now=0.0) == NOTHING


@pytest.mark.parametrize("length", [1, 63, 64, 65, 300, 320, 321, 2_000])
def test_what_is_known_is_found_however_far_it_lies_back(length: int) -> None:
    chain = [BlockHash(number.to_bytes(2, "big")) for number in range(2_000)]
    directory = PoolDirectory()
    directory.note_stored([BlockHash(b"other")], now=0.0)
    directory.note_answer(chain, 2_000, PoolPrefix(length), now=0.0)
    assert directory.recall(chain, 2_000, now=1.0) == Recalled(PoolPrefix(length), True, length)
    assert directory.recall(chain, length - 1, now=1.0) == NOTHING
