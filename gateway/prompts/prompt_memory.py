"""What was tokenised and hashed before, found again by content: in whole conversations' beginnings.

Three kinds of entries. A *piece* of a prompt's text (see `boundaries.py`) with its token ids: the same
message in any conversation is encoded once. A *beginning*, a sequence of pieces, with its block hashes:
a turn hashes only what it adds. An *opening*, the text of such a sequence: a turn is compared with it in one
go, and only what follows is cut and looked up. Sessions play no part, so forks and sub-agents share what
they share.

One bound for all, in bytes: past it the entries that were used least recently go. A forgotten piece is
encoded again, a forgotten beginning hashed again; nothing else depends on them.
"""

from __future__ import annotations

import bisect
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import orjson
import xxhash

from moongate.router import BlockSpace
from moongate.router.blocks import TOKEN_BYTES, extend_chain, hash_prompt
from moongate.router.model import BlockHash

Key = bytes
"""Names a piece of text, or a beginning."""

ENTRY_BYTES = 450
"""An entry's own overhead, about: its objects and its place in the table."""

OPENING_CHARS_MIN = 2048
LEVEL_RATIO = 1.25
"""Openings are found by the hash of their text up to the highest level that they reach: 2,048 characters,
2,560, 3,200, ... So conversations are told apart by four fifths of their text, whatever they share."""

LEVELS_TRIED = 5
"""A text is looked for at so many levels: it has at most tripled since its last turn."""

OPENINGS_PER_HEAD = 8
"""Of texts alike up to their level; the oldest goes first."""

HASH_BYTES = 72
"""A block hash and its place in a list."""


@dataclass(slots=True)
class Piece:
    """A piece of text (UTF-8) and its ids, packed as for hashing."""

    text: bytes
    tokens: bytes
    _json: bytes | None = None

    @property
    def token_count(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def ids_json(self) -> bytes:
        """Return the ids as JSON numbers with commas between; made when first asked for."""
        if self._json is None:
            ids = array("I")
            ids.frombytes(self.tokens)
            self._json = orjson.dumps(ids.tolist())[1:-1]
        return self._json


@dataclass(slots=True, eq=False)
class Opening:
    """A prompt's text up to a cut, and its pieces; most likely the next turn's begins so."""

    text: str
    keys: Sequence[Key]
    pieces: Sequence[Piece]


Head = tuple[bytes, int]
"""Names the beginning of a text up to a level: its hash, and the level."""

Value = Piece | Opening | list[BlockHash]


def name_piece(text: bytes, tag: bytes) -> Key:
    """Return the name of a text. `tag` keeps tokenizers and salts apart.

    The hash need not withstand an attacker: a piece that is found is compared with the text.
    """
    return xxhash.xxh3_128_digest(text) + tag


class PromptMemory:
    """Bounded by `bytes_max`; see the module. Not for use from several threads."""

    def __init__(self, bytes_max: int, opening_chars_min: int = OPENING_CHARS_MIN) -> None:
        self.bytes_max = bytes_max
        self._levels = [int(opening_chars_min * LEVEL_RATIO**n) for n in range(48)]
        self._bytes = 0
        self._entries: OrderedDict[object, tuple[Value, int]] = OrderedDict()
        self._openings: dict[Head, list[Opening]] = {}
        self._heads: dict[Opening, Head] = {}

    @property
    def bytes_used(self) -> int:
        """Return the bytes in use, about."""
        return self._bytes

    # --- pieces -----------------------------------------------------------------------------------

    def find_piece(self, key: Key, text: bytes) -> Piece | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        piece = entry[0]
        assert isinstance(piece, Piece)
        if piece.text != text:
            return None  # another text of the same name: forged
        self._entries.move_to_end(key)
        return piece

    def add_piece(self, key: Key, piece: Piece) -> None:
        # As if its JSON were made already: 6 bytes a token are more than most have.
        size = len(piece.text) + len(piece.tokens) + 6 * piece.token_count + ENTRY_BYTES
        self._add(key, piece, size)

    # --- openings ---------------------------------------------------------------------------------

    def find_opening(
        self, text: str, tag: bytes, is_cut: Callable[[str, int], bool]
    ) -> Opening | None:
        """Return the longest opening with which a text begins, and which ends where it may be cut.

        Cost: a hash and a comparison of the text; of a text that nothing goes on from, some hashes.
        """
        longest = bisect.bisect_right(self._levels, len(text))
        for level in reversed(self._levels[max(longest - LEVELS_TRIED, 0) : longest]):
            fitting = [
                opening
                for opening in self._openings.get(_name_head(text, level, tag), ())
                if text.startswith(opening.text) and is_cut(text, len(opening.text))
            ]
            for opening in sorted(fitting, key=lambda fit: -len(fit.text)):
                if self._touch(opening):
                    return opening
        return None

    def _touch(self, opening: Opening) -> bool:
        """Note that an opening is used. One whose pieces were forgotten is forgotten too."""
        entries = self._entries
        if not all(key in entries for key in opening.keys):
            self._drop(opening)
            return False
        for key in opening.keys:
            entries.move_to_end(key)
        entries.move_to_end(opening)
        return True

    def add_opening(self, opening: Opening, tag: bytes, extended: Opening | None) -> None:
        """Remember an opening, in place of the one that it goes on from. Short ones are not."""
        length = len(opening.text)
        if length < self._levels[0]:
            return
        if extended is not None and extended in self._entries:
            self._drop(extended)
        level = self._levels[bisect.bisect_right(self._levels, length) - 1]
        head = _name_head(opening.text, level, tag)
        others = self._openings.get(head, [])
        if any(other.text == opening.text for other in others):
            return
        if len(others) >= OPENINGS_PER_HEAD:
            self._drop(others[0])
        self._openings.setdefault(head, []).append(opening)
        self._heads[opening] = head
        size = sys.getsizeof(opening.text) + 16 * len(opening.keys) + ENTRY_BYTES
        self._add(opening, opening, size)

    # --- beginnings -------------------------------------------------------------------------------

    def hash_pieces(
        self,
        keys: Sequence[Key],
        pieces: Sequence[Piece],
        tokens: bytes,
        space: BlockSpace,
        salt: str | None,
    ) -> Sequence[BlockHash]:
        """Return the block hashes of a prompt of these pieces; `tokens` are theirs, put together.

        Remembered are the whole, for when it comes again, and the beginning without the last piece:
        templates end a prompt with what opens the answer, and the next turn differs from there on.
        """
        names = _name_beginnings(keys, space, salt)
        known = next((e for n in reversed(names) if (e := self._find_beginning(n)) is not None), [])
        chain = known
        step = space.block_size_tokens * TOKEN_BYTES
        if len(tokens) // step > len(known):
            rest = tokens[len(known) * step :]
            if known:
                chain = [*known, *extend_chain(known[-1], rest, space.block_size_tokens)]
            else:
                chain = hash_prompt(space, tokens, salt)
        self._remember(names[-1:], chain, known)
        blocks_before_last = (len(tokens) - len(pieces[-1].tokens)) // step if pieces else 0
        before_last = chain if blocks_before_last == len(chain) else chain[:blocks_before_last]
        self._remember(names[-2:-1], before_last, chain)
        return chain

    def _find_beginning(self, name: object) -> list[BlockHash] | None:
        entry = self._entries.get(name)
        if entry is None:
            return None
        self._entries.move_to_end(name)
        chain = entry[0]
        assert isinstance(chain, list)
        return chain

    def _remember(
        self, name: Sequence[object], chain: list[BlockHash], shared: list[BlockHash]
    ) -> None:
        if name and name[0] not in self._entries:
            own = max(len(chain) - len(shared), 0)
            self._add(name[0], chain, ENTRY_BYTES + own * HASH_BYTES + 8 * len(chain))

    # --- the bound --------------------------------------------------------------------------------

    def _add(self, key: object, value: Value, size: int) -> None:
        previous = self._entries.pop(key, None)
        if previous is not None:
            self._bytes -= previous[1]
        self._entries[key] = (value, size)
        self._bytes += size
        if size > self.bytes_max:
            self._drop(key)
        while self._bytes > self.bytes_max:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: object) -> None:
        value, size = self._entries.pop(key)
        self._bytes -= size
        if isinstance(value, Opening):
            head = self._heads.pop(value)
            self._openings[head].remove(value)
            if not self._openings[head]:
                del self._openings[head]


def _name_head(text: str, level: int, tag: bytes) -> Head:
    # Surrogates can't be tokenised, which is for others to say.
    return xxhash.xxh3_128_digest(text[:level].encode("utf-8", "surrogatepass")) + tag, level


def _name_beginnings(
    keys: Sequence[Key], space: BlockSpace, salt: str | None
) -> list[tuple[bytes, BlockSpace, str | None]]:
    """Return the name of each beginning, shortest first.

    Two beginnings of one name would only mislead the choice of an instance, as block hashes would.
    """
    digest = xxhash.xxh3_128_digest
    name, names = b"", []
    for key in keys:
        name = digest(name + key)
        names.append((name, space, salt))
    return names
