"""Where a prompt's text can be cut so that its pieces may be tokenised one by one.

A tokenizer takes the added tokens that it doesn't normalise out of a text before all else (a chat
template's control tokens are such: `<|im_start|>`), and encodes what lies between two of them by
itself. So a text may be cut before each, and the ids of the pieces, put together, are the ids of the
whole. Where that isn't so, for whatever reason, there are no marks and a text stays in one piece.

Source: tokenizers 0.23 `AddedVocabulary::extract_and_normalize`; checked against each tokenizer when
it is loaded, and by property tests over several templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer

PIECE_CHARS_MIN = 64
"""Shorter pieces are not cut off: what closes one message and opens the next stays together. Where a
cut lies depends only on the text before it, so texts that begin alike are cut alike."""

_SAMPLES = (
    "a",
    " a",
    "a ",
    "\n",
    " \n\n  a",
    "\t",
    "é",
    "世界",
    "🙂",
    "1234",
    "'s",
    "<|",
    "",
    "B.C",
)
"""What stands between marks in the check: whatever tokenizers treat differently by its neighbours."""


class Boundaries:
    """The cuts of one tokenizer's texts. Without marks there are none."""

    def __init__(self, marks: Iterable[str]) -> None:
        self.marks = tuple(marks)
        # The longest first, as the tokenizer matches them.
        longest_first = sorted(self.marks, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if self.marks else None

    def is_cut(self, text: str, at: int) -> bool:
        """Tell whether a text may be cut here: a mark follows."""
        return self._pattern is not None and self._pattern.match(text, at) is not None

    def split(self, text: str, chars_min: int = PIECE_CHARS_MIN) -> list[str]:
        """Return the text in pieces, each but the first beginning with a mark. Cost: one scan."""
        if self._pattern is None:
            return [text]
        pieces, start = [], 0
        for match in self._pattern.finditer(text):
            at = match.start()
            if at - start >= chars_min:
                pieces.append(text[start:at])
                start = at
        pieces.append(text[start:])
        return pieces


def find_boundaries(tokenizer: Tokenizer, sources: Iterable[str]) -> Boundaries:
    """Return the boundaries of a tokenizer; `sources` are the texts in which its marks are named.

    Only tokens that a template or the special tokens name are marks: a vocabulary may have hundreds
    that never occur.
    """
    described = json.loads(tokenizer.to_str())
    if (described.get("model") or {}).get("dropout"):
        return Boundaries(())  # encodes the same text differently each time
    named = "\0".join(sources)
    safe = _safe_marks(described.get("added_tokens") or ())
    boundaries = Boundaries(mark for mark in safe if mark in named)
    return boundaries if _is_additive(tokenizer, boundaries) else Boundaries(())


def _safe_marks(added_tokens: Sequence[dict[str, Any]]) -> list[str]:
    """Return the tokens that are found wherever they stand, whatever stands around them."""
    # Those that are normalised are only looked for in what the others have left.
    raw = [token for token in added_tokens if not token["normalized"]]
    return [
        token["content"]
        for token in raw
        if token["content"].strip() == token["content"] != ""
        and not any(_may_disturb(other, token["content"]) for other in raw)
    ]


def _may_disturb(other: dict[str, Any], mark: str) -> bool:
    """Tell whether a cut before `mark` can change what becomes of it, or of `other` before it.

    `other` may be the mark itself.
    """
    content, is_word = other["content"], other["single_word"]
    # What begins as the mark does is found in its place, so it may not depend on what is before it.
    is_unsure = (other["lstrip"] or is_word) and content.startswith(mark)
    # What is only found as a word of its own depends on the mark's first character.
    is_neighbour = is_word and (mark[0].isalnum() or mark[0] == "_" or not mark[0].isascii())
    return is_unsure or is_neighbour or _may_swallow(content, mark)


def _may_swallow(other: str, mark: str) -> bool:
    """Tell whether a match of `other` that begins before a mark's place can reach into the mark."""
    if other.find(mark, 1) > 0:
        return True
    reach = range(1, min(len(other), len(mark) + 1))
    return any(mark.startswith(other[-length:]) for length in reach)


def _is_additive(tokenizer: Tokenizer, boundaries: Boundaries) -> bool:
    """Tell whether pieces, encoded one by one, give the ids of the whole."""
    if not boundaries.marks:
        return True

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    for mark in boundaries.marks:
        text = mark.join(_SAMPLES) + mark.join(boundaries.marks) + mark + mark
        pieces = boundaries.split(text, chars_min=1)
        if [token for piece in pieces for token in encode(piece)] != encode(text):
            return False
    return True
