"""Pieces and beginnings are found again, within a bound; hashes are those of a prompt hashed in one go."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moongate.gateway.prompts import prompt_memory
from moongate.gateway.prompts.prompt_memory import ENTRY_BYTES, Key, Piece, PromptMemory, name_piece
from moongate.router import BlockSpace
from moongate.router.blocks import hash_prompt, pack_tokens
from moongate.router.model import BlockHash

SPACE = BlockSpace(2)
TAG = b"\0\0"
ROOMY = 1 << 20


def piece(text: str, *ids: int) -> Piece:
    return Piece(text.encode(), pack_tokens(ids))


def key(text: str) -> Key:
    return name_piece(text.encode(), TAG)


def add(memory: PromptMemory, text: str, *ids: int) -> None:
    memory.add_piece(key(text), piece(text, *ids))


def knows(memory: PromptMemory, text: str) -> bool:
    return memory.find_piece(key(text), text.encode()) is not None


def hashes(
    memory: PromptMemory,
    pieces: Sequence[Piece],
    space: BlockSpace = SPACE,
    salt: str | None = None,
) -> Sequence[BlockHash]:
    keys = [name_piece(one.text, TAG) for one in pieces]
    return memory.hash_pieces(keys, pieces, joined(pieces), space, salt)


def joined(pieces: Sequence[Piece]) -> bytes:
    return b"".join(one.tokens for one in pieces)


@contextlib.contextmanager
def noting_hashes() -> Iterator[list[int]]:
    """Note how many blocks are hashed at each call."""
    noted: list[int] = []

    def noting(function: Callable[..., list[BlockHash]]) -> Callable[..., list[BlockHash]]:
        def note(*arguments: Any) -> list[BlockHash]:
            chain = function(*arguments)
            noted.append(len(chain))
            return chain

        return note

    with pytest.MonkeyPatch.context() as patch:
        for name in ("extend_chain", "hash_prompt"):
            patch.setattr(prompt_memory, name, noting(getattr(prompt_memory, name)))
        yield noted


@pytest.fixture
def hashed() -> Iterator[list[int]]:
    with noting_hashes() as noted:
        yield noted


# --- pieces ---------------------------------------------------------------------------------------


def test_a_piece_is_found_by_its_text() -> None:
    memory = PromptMemory(ROOMY)
    add(memory, "a", 1, 2)
    assert memory.find_piece(key("a"), b"a") == piece("a", 1, 2)
    assert memory.find_piece(key("b"), b"b") is None


def test_a_text_of_another_ones_name_is_not_taken_for_it() -> None:
    memory = PromptMemory(ROOMY)
    add(memory, "a", 1)
    assert memory.find_piece(key("a"), b"forged") is None
    memory.add_piece(key("a"), piece("forged", 2))
    assert memory.find_piece(key("a"), b"a") is None
    assert memory.find_piece(key("a"), b"forged") == piece("forged", 2)


def test_tags_keep_one_text_apart() -> None:
    memory = PromptMemory(ROOMY)
    memory.add_piece(name_piece(b"a", b"\0\1"), piece("a", 1))
    assert memory.find_piece(name_piece(b"a", b"\0\2"), b"a") is None


def test_a_piece_knows_its_ids_as_json() -> None:
    ids = [1, 2**32 - 1]
    assert b"[%b]" % piece("a", *ids).ids_json == orjson.dumps(ids)
    assert piece("", *()).ids_json == b""
    one = piece("a", 7)
    assert one.ids_json is one.ids_json
    assert (one.token_count, piece("").token_count) == (1, 0)


# --- the bound ------------------------------------------------------------------------------------

SMALL = ENTRY_BYTES + 1 + 10
"""The bytes of an entry of one letter and one token."""


def test_what_was_used_least_recently_is_forgotten_first() -> None:
    memory = PromptMemory(3 * SMALL)
    for text in "abc":
        add(memory, text, 1)
    assert knows(memory, "a")
    add(memory, "d", 1)
    assert [knows(memory, text) for text in "abcd"] == [True, False, True, True]
    assert memory.bytes_used == 3 * SMALL


@pytest.mark.parametrize(("is_looked_up", "anew"), [(True, []), (False, [1])])
def test_a_beginning_that_is_looked_up_is_kept(
    hashed: list[int], is_looked_up: bool, anew: list[int]
) -> None:
    pieces = [piece("a", 1, 2), piece("b", 3, 4)]
    memory = PromptMemory(_size_of(pieces) + SMALL)
    hashes(memory, pieces)
    add(memory, "c", 1)
    if is_looked_up:
        hashes(memory, pieces)
    add(memory, "d", 1)  # one of the three before it has to go
    hashed.clear()
    hashes(memory, pieces)
    assert hashed == anew


def test_a_piece_added_again_counts_once() -> None:
    memory = PromptMemory(ROOMY)
    for _ in range(3):
        add(memory, "a", 1)
    assert memory.bytes_used == SMALL


def test_what_exceeds_the_bound_is_not_kept_and_drives_nothing_out() -> None:
    memory = PromptMemory(SMALL)
    add(memory, "a", 1)
    add(memory, "b" * 9, *range(9))
    assert (knows(memory, "a"), knows(memory, "b" * 9), memory.bytes_used) == (True, False, SMALL)


def test_a_bound_of_nothing_keeps_nothing_and_hashes_all_the_same() -> None:
    memory = PromptMemory(0)
    add(memory, "a", 1)
    pieces = [piece("a", 1, 2), piece("b", 3, 4)]
    assert hashes(memory, pieces) == hash_prompt(SPACE, joined(pieces))
    assert (knows(memory, "a"), memory.bytes_used) == (False, 0)


# --- beginnings -----------------------------------------------------------------------------------


def _size_of(pieces: Sequence[Piece]) -> int:
    memory = PromptMemory(ROOMY)
    hashes(memory, pieces)
    return memory.bytes_used


TURN_1 = [piece("system", *range(100, 107)), piece("user", *range(200, 206)), piece("open", 1, 2)]
TURN_2 = [*TURN_1[:2], piece("open answer", 1, 2, *range(300, 309)), piece("open", 1, 2)]


def test_the_same_prompt_again_is_not_hashed_again(hashed: list[int]) -> None:
    memory = PromptMemory(ROOMY)
    first = hashes(memory, TURN_1)
    assert hashed == [7]
    assert hashes(memory, TURN_1) is first
    assert hashed == [7]


def test_the_next_turn_is_hashed_from_where_the_last_one_left_off(hashed: list[int]) -> None:
    memory = PromptMemory(ROOMY)
    hashes(memory, TURN_1)
    assert hashes(memory, TURN_2) == hash_prompt(SPACE, joined(TURN_2))
    # 13 tokens are common, 6 blocks; the next turn has 26 tokens, 13 blocks.
    assert hashed == [7, 7]


def test_a_fork_is_hashed_from_where_it_forks(hashed: list[int]) -> None:
    memory = PromptMemory(ROOMY)
    hashes(memory, TURN_1)
    fork = [*TURN_1[:2], piece("another", *range(400, 411))]
    assert hashes(memory, fork) == hash_prompt(SPACE, joined(fork))
    assert hashed == [7, 6]


def test_another_space_or_salt_shares_no_beginning(hashed: list[int]) -> None:
    memory = PromptMemory(ROOMY)
    tokens = joined(TURN_1)
    for space, salt in ((SPACE, None), (BlockSpace(2, "ad"), None), (SPACE, "t1"), (SPACE, "t2")):
        assert hashes(memory, TURN_1, space, salt) == hash_prompt(space, tokens, salt)
    assert hashed == [7, 7, 7, 7]


def test_a_forgotten_beginning_is_hashed_anew(hashed: list[int]) -> None:
    memory = PromptMemory(_size_of(TURN_1))
    first = hashes(memory, TURN_1)
    for n in range(9):
        add(memory, str(n), n)
    hashed.clear()
    assert hashes(memory, TURN_1) == first
    assert hashed == [7]


def test_no_pieces_have_no_hashes() -> None:
    memory = PromptMemory(ROOMY)
    assert list(memory.hash_pieces([], [], b"", SPACE, None)) == []
    assert memory.bytes_used == 0


def test_pieces_too_short_for_a_block_have_no_hashes() -> None:
    memory = PromptMemory(ROOMY)
    assert list(hashes(memory, [piece("a", 1)])) == []
    # From an empty beginning on, the salt is still in the first block.
    pieces = [piece("a", 1), piece("b", 2, 3)]
    assert list(hashes(memory, [piece("a", 1)], SPACE, "t1")) == []
    assert hashes(memory, pieces, SPACE, "t1") == hash_prompt(SPACE, joined(pieces), "t1")


# --- any history ----------------------------------------------------------------------------------

PIECES = [
    piece(f"text {n}", *range(n * 10, n * 10 + length))
    for n, length in enumerate((0, 1, 2, 3, 5, 8, 17))
]
prompts = st.lists(st.sampled_from(PIECES), max_size=8)
spaces = st.sampled_from(
    [BlockSpace(1), BlockSpace(2), BlockSpace(3), BlockSpace(16), BlockSpace(2, "ad")]
)
salts = st.sampled_from([None, None, "", "t1", "t2"])


@settings(deadline=None)
@given(
    bytes_max=st.sampled_from([0, 400, 1000, 3000, ROOMY]),
    calls=st.lists(st.tuples(prompts, spaces, salts), max_size=12),
)
def test_hashes_are_those_of_the_whole_prompt_and_the_bound_holds(
    bytes_max: int, calls: list[tuple[list[Piece], BlockSpace, str | None]]
) -> None:
    memory = PromptMemory(bytes_max)
    for pieces, space, salt in calls:
        for one in pieces:
            name = name_piece(one.text, TAG)
            found = memory.find_piece(name, one.text)
            assert found in (None, one)
            if found is None:
                memory.add_piece(name, one)
            _check_bound(memory, bytes_max)
        assert list(hashes(memory, pieces, space, salt)) == hash_prompt(space, joined(pieces), salt)
        _check_bound(memory, bytes_max)


def _check_bound(memory: PromptMemory, bytes_max: int) -> None:
    assert memory.bytes_used == sum(size for _, size in memory._entries.values()) <= bytes_max


@settings(deadline=None)
@given(
    history=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    block_size_tokens=st.integers(1, 5),
)
def test_a_growing_history_hashes_each_block_once(
    history: list[int], block_size_tokens: int
) -> None:
    """Turns end with what opens the answer, which the next turn's answer goes on with."""
    memory, space = PromptMemory(ROOMY), BlockSpace(block_size_tokens)
    said: list[Piece] = []
    with noting_hashes() as hashed:
        for turn, length in enumerate(history):
            hashes(memory, [*said, piece("open", 1, 2)], space)
            said.append(piece(f"answer {turn}", *range(length)))
    # Beyond the history itself only what opens the answers is hashed, each turn.
    said_blocks = len(joined(said)) // (4 * block_size_tokens)
    opening_blocks_max = 2 // block_size_tokens + 1
    assert sum(hashed) <= said_blocks + len(history) * opening_blocks_max
