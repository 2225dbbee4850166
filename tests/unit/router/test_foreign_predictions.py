"""What other gateways assume: a block stands for all before it."""

from __future__ import annotations

import random

import pytest

from moongate.router import Holder, InstanceId
from moongate.router.foreign_predictions import ForeignPredictions, stride_blocks, told_blocks
from moongate.router.model import BlockHash

A, B = Holder(InstanceId("a")), Holder(InstanceId("b"))


def chain(count: int, name: str = "x") -> list[BlockHash]:
    return [BlockHash(f"{name}{n}".encode()) for n in range(count)]


@pytest.mark.parametrize(
    ("block_tokens", "stride"), [(1, 128), (16, 8), (64, 2), (128, 1), (528, 1)]
)
def test_a_block_is_told_for_every_128_tokens(block_tokens: int, stride: int) -> None:
    assert stride_blocks(block_tokens) == stride
    assert len(told_blocks(chain(1280), range(1280), block_tokens)) == 1280 // stride


def test_what_is_told_lies_at_the_same_places_wherever_the_part_begins() -> None:
    whole = told_blocks(chain(64), range(64), 16)
    assert whole == [chain(64)[n] for n in (7, 15, 23, 31, 39, 47, 55, 63)]
    assert told_blocks(chain(64), range(7, 64), 16) == whole
    assert told_blocks(chain(64), range(8, 62), 16) == whole[1:-1]
    assert told_blocks(chain(64), range(62, 63), 16) == []


def test_the_last_block_known_tells_the_overlap() -> None:
    foreign = ForeignPredictions()
    foreign.add("r", A, told_blocks(chain(40), range(40), 16), expires_at=10.0)
    assert foreign.find_overlaps(chain(100), 100, 16) == {A: 40}
    assert foreign.find_overlaps(chain(100), 39, 16) == {A: 32}
    assert foreign.find_overlaps(chain(12), 12, 16) == {A: 8}
    assert foreign.find_overlaps(chain(100, "y"), 100, 16) == {}
    assert ForeignPredictions().find_overlaps(chain(100), 100, 16) == {}


def test_only_the_end_of_a_long_confirmed_prompt_needs_to_be_told() -> None:
    foreign = ForeignPredictions()
    foreign.add("r", A, told_blocks(chain(1000), range(900, 1000), 16), expires_at=10.0)
    assert foreign.find_overlaps(chain(2000), 2000, 16) == {A: 1000}


def test_a_block_is_assumed_as_long_as_one_entry_has_it() -> None:
    foreign = ForeignPredictions()
    blocks = told_blocks(chain(16), range(16), 16)
    foreign.add("r", A, blocks, 10.0)
    foreign.add("s", A, blocks[:1], 10.0)
    foreign.add("t", B, blocks, 5.0)
    foreign.drop("r")
    assert foreign.find_overlaps(chain(16), 16, 16) == {A: 8, B: 16}
    foreign.expire(5.0)
    assert foreign.find_overlaps(chain(16), 16, 16) == {A: 8}
    foreign.shorten("s", 7.0)
    assert foreign.next_expiry() == 7.0
    foreign.expire(7.0)
    foreign.check()
    assert len(foreign) == 0


def test_what_is_shortened_never_lives_longer_and_what_is_gone_stays_so() -> None:
    foreign = ForeignPredictions()
    foreign.add("r", A, chain(1), 10.0)
    foreign.shorten("r", 20.0)
    foreign.expire(10.0)
    foreign.shorten("r", 30.0)
    foreign.drop("r")
    assert len(foreign) == 0


def test_a_holder_that_lost_its_cache_has_nothing() -> None:
    foreign = ForeignPredictions()
    foreign.add("r", A, chain(8), 10.0)
    foreign.add("s", B, chain(8), 10.0)
    foreign.forget(A)
    assert foreign.find_overlaps(chain(8), 8, 128) == {B: 8}


def test_past_the_limit_the_oldest_go_and_what_is_larger_is_not_taken() -> None:
    foreign = ForeignPredictions(blocks_max=10)
    foreign.add("r", A, chain(6, "r"), 10.0)
    foreign.add("s", A, chain(4, "s"), 10.0)
    foreign.add("t", A, chain(1, "t"), 10.0)
    foreign.add("u", A, chain(11, "u"), 10.0)
    assert foreign.find_overlaps(chain(6, "r"), 6, 128) == {}
    assert foreign.find_overlaps(chain(4, "s"), 4, 128) == {A: 4}
    foreign.check()


def test_it_is_as_a_table_of_all_blocks_but_for_the_stride() -> None:
    chance = random.Random(8)
    for _ in range(200):
        foreign, truth = ForeignPredictions(), dict[Holder, int]()
        prompt = chain(chance.randrange(1, 200))
        for n in range(chance.randrange(5)):
            holder = chance.choice([A, B])
            end = chance.randrange(1, len(prompt) + 1)
            foreign.add(n, holder, told_blocks(prompt, range(end), 16), 1.0)
            truth[holder] = max(truth.get(holder, 0), end)
        found = foreign.find_overlaps(prompt, len(prompt), 16)
        assert found == {h: end // 8 * 8 for h, end in truth.items() if end >= 8}
        foreign.check()
