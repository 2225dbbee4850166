"""The engine's names of blocks: the bytes that vLLM makes, which scheme it uses, and the memory of them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import vllm_digests
from hypothesis import given, settings
from hypothesis import strategies as st

from moongate.kvpool import digests as digests_module
from moongate.kvpool.digests import (
    ALGORITHMS,
    DEFAULT_SEED,
    DigestKeys,
    DigestMemory,
    HashScheme,
    SchemeProbe,
    digest_blocks,
    matches,
)
from moongate.kvpool.keys import BlockDigest
from moongate.router.blocks import pack_tokens

from .builders import SIZE, as_int, chain, digests, stored, tokens

EXPECTED = Path(__file__).with_name("vllm_digests.json")


# --- vLLM's own -----------------------------------------------------------------------------------


def keys_of(kind: str) -> tuple[DigestKeys | None, DigestKeys | None]:
    """Return what isolates the first block, and every block."""
    isolation = vllm_digests.KINDS[kind]
    lora = (("lora", *isolation["lora"]),) if "lora" in isolation else ()
    salt = (("cache_salt", isolation["salt"]),) if "salt" in isolation else ()
    return (*lora, *salt) or None, lora or None


def compare(rows: Sequence[dict[str, Any]]) -> None:
    packed = pack_tokens(vllm_digests.TOKENS)
    for row in rows:
        seed = DEFAULT_SEED if row["seed"] is None else row["seed"]
        root = HashScheme(row["algorithm"], seed).root
        assert root is not None
        first_keys, every_keys = keys_of(row["kind"])
        made = digest_blocks(row["algorithm"], root, packed, SIZE, first_keys, every_keys)
        assert [digest.hex() for digest in made] == row["digests"], row
        assert all(map(matches, row["names"], made))
        assert all(
            matches(bytes.fromhex(name), d) for name, d in zip(row["digests"], made, strict=True)
        )


def test_digests_are_those_that_vllm_has_been_seen_to_make() -> None:
    """See `tests/e2e/test_digests.py`, which compares the values with vLLM's own."""
    rows = json.loads(EXPECTED.read_text())
    assert len(rows) == (2 * 3 + 2 * 2) * len(vllm_digests.KINDS)
    compare(rows)


def test_only_full_blocks_have_a_digest() -> None:
    root = ALGORITHMS["sha256"](DEFAULT_SEED)
    packed = pack_tokens(tokens(2))
    assert len(digest_blocks("sha256", root, packed[:-1], SIZE)) == 1
    assert digest_blocks("sha256", root, packed[: SIZE * 4 - 1], SIZE) == []


# --- which scheme ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_int", [True, False])
@pytest.mark.parametrize("seed", [DEFAULT_SEED, "0", "of the operator"])
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_a_scheme_is_known_from_one_first_block(algorithm: str, seed: str, *, is_int: bool) -> None:
    (digest,) = digests(tokens(1), algorithm, seed)
    probe = SchemeProbe(["of the operator"])
    probe.observe(stored([as_int(digest) if is_int else digest], tokens(1)))
    assert probe.scheme == HashScheme(algorithm, seed)
    assert probe.is_done
    assert probe.mismatches == 0


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
@pytest.mark.parametrize("is_one_event", [True, False])
def test_with_a_seed_of_chance_the_algorithm_is_known_from_two_blocks(
    algorithm: str, *, is_one_event: bool
) -> None:
    first, second = digests(tokens(2), algorithm, "of chance")
    probe = SchemeProbe()
    if is_one_event:
        probe.observe(stored([first, second], tokens(2)))
    else:
        probe.observe(stored([first], tokens(1)))
        assert (probe.scheme, probe.mismatches) == (None, 1)
        probe.observe(stored([second], tokens(1, 5), parent=first))
    assert probe.scheme == HashScheme(algorithm, None)
    assert probe.scheme.root is None
    assert not probe.is_done
    assert probe.roots == {chain(tokens(1))[0]: first}


def test_with_a_seed_of_chance_each_first_block_is_remembered_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(digests_module, "ROOTS_MAX", 2)
    probe = SchemeProbe()
    for number in range(3):
        names = digests(tokens(2, 100 * number), "xxhash", "of chance")
        probe.observe(stored(names, tokens(2, 100 * number)))
    assert list(probe.roots) == [chain(tokens(1, first))[0] for first in (100, 200)]


def test_integers_of_an_unknown_seed_are_never_named() -> None:
    probe = SchemeProbe()
    first, second = (as_int(digest) for digest in digests(tokens(2), "xxhash", "of chance"))
    for _ in range(3):
        probe.observe(stored([first, second], tokens(2)))
        probe.observe(stored([second], tokens(1, 5), parent=first))
    assert (probe.scheme, probe.mismatches, len(probe.roots)) == (None, 3, 0)


def test_what_has_extra_keys_or_is_malformed_proves_nothing() -> None:
    (digest,) = digests(tokens(1))
    probe = SchemeProbe()
    for event in (
        stored([digest], tokens(1), lora="ad-1"),
        stored([digest], tokens(1), extra_keys=(("salt",),)),
        stored([], []),
        stored([digest], tokens(1), size=0),
        stored([digest], tokens(1), parent=digest),  # nothing was announced before
    ):
        probe.observe(event)
        assert (probe.scheme, probe.mismatches) == (None, 0)
    probe.observe(stored([digest], tokens(1)[:-1]))  # not a whole block
    assert (probe.scheme, probe.roots) == (None, {})


def test_later_blocks_change_nothing_that_is_known() -> None:
    (digest,) = digests(tokens(1))
    probe = SchemeProbe()
    probe.observe(stored([digest], tokens(1)))
    probe.observe(stored([b"other"], tokens(1, 50)))
    assert (probe.scheme, probe.mismatches) == (HashScheme("sha256", DEFAULT_SEED), 0)


# --- the memory -----------------------------------------------------------------------------------


def remember(memory: DigestMemory, token_ids: list[int]) -> Sequence[BlockDigest]:
    blocks = chain(token_ids)
    return memory.digest("xxhash", blocks, pack_tokens(token_ids), SIZE, made(token_ids)[0])


def made(token_ids: list[int]) -> list[BlockDigest]:
    return digests(token_ids, "xxhash")


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32), st.integers(10, 200))
def test_a_memory_answers_as_if_there_were_none(seed: int, digests_max: int) -> None:
    chance, memory = random.Random(seed), DigestMemory(digests_max)
    histories: list[list[int]] = [[]]
    for _ in range(30):
        history = chance.choice(histories)
        # It goes on, forks, or is rewritten; ends are seldom at a block's end.
        kept = history[
            : chance.choice([len(history), len(history), chance.randrange(len(history) + 1)])
        ]
        history = [*kept, *(chance.randrange(3) for _ in range(chance.randrange(SIZE, 40)))]
        histories.append(history)
        assert list(remember(memory, history)) == made(history)
    longest = max(len(history) // SIZE for history in histories)
    assert memory.count <= max(digests_max, 2 * longest)


def test_a_turn_digests_only_what_it_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, digested = DigestMemory(), []

    def count(algorithm: str, parent: bytes, packed: bytes, *rest: Any, **more: Any) -> Any:
        digested.append(len(packed) // 4 // SIZE)
        return digest_blocks(algorithm, parent, packed, *rest, **more)

    monkeypatch.setattr(digests_module, "digest_blocks", count)
    for turns in (10, 13, 13):
        remember(memory, tokens(turns))
    assert digested == [9, 3, 0]
    assert memory.count == 13


def test_a_fork_copies_what_it_shares() -> None:
    memory = DigestMemory()
    remember(memory, tokens(4))
    remember(memory, tokens(6))
    remember(memory, [*tokens(4), *tokens(3, 900)])
    assert memory.count == 6 + 7


def test_the_conversation_that_was_used_least_recently_is_forgotten() -> None:
    memory = DigestMemory(25)
    for first in (1, 1_000):
        remember(memory, tokens(10, first))
    remember(memory, tokens(10, 1))
    remember(memory, tokens(10, 2_000))
    assert memory.count == 20
    assert memory._find(chain(tokens(10, 1)))[0] is not None
    assert memory._find(chain(tokens(10, 1_000))) == (None, 0)


def test_one_that_is_larger_than_the_limit_is_kept_alone() -> None:
    memory = DigestMemory(5)
    remember(memory, tokens(10))
    assert memory.count == 10
    assert list(remember(memory, tokens(1, 500))) == made(tokens(1, 500))
    assert memory.count == 1
