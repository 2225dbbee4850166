"""Keeps what an engine's connectors tell the gateway in an answer from clients.

The keys `kv_transfer_params` and `ec_transfer_params` stand in whole answers only, mostly with null; addresses and block ids of
another instance are no business of a client. A value is overwritten where it stands: `null`, and spaces
for the rest, so that the answer keeps its length and its bytes can be passed on as they come.

The text of the answer can't be mistaken for a key, since quotes inside a string are escaped. A
compressed answer is not looked into.
"""

from __future__ import annotations

import re
from enum import Enum

_TAIL = b'_transfer_params"'
_KEYS = tuple(b'"%b%b' % (kind, _TAIL) for kind in (b"kv", b"ec"))
_KEY_BYTES = len(_KEYS[0])
_KEY = re.compile(b"|".join(_KEYS))
_COLON = re.compile(rb"[ \t\r\n]*(:?)[ \t\r\n]*")
_SIGNS = re.compile(rb'["\\{}\[\]]')


def tells_nothing(text: bytes) -> bool:
    """Tell whether a text has nothing to blank: no such keys, or with null, as vLLM writes it.

    Cost: 1 us for a short answer.
    """
    found = text.find(_TAIL)
    while found != -1:
        behind = found + len(_TAIL)
        if not text.startswith(b":null", behind):
            return False
        found = text.find(_TAIL, behind)
    return True


class _At(Enum):
    TEXT = "text"
    COLON = "colon"  # behind the key
    VALUE = "value"  # in an object or a list


class TransferParamsFilter:
    """Give it an answer's pieces in order; pass on what it returns, and `rest` at the end."""

    def __init__(self) -> None:
        self._at = _At.TEXT
        self._held = b""  # that can't be told yet
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False

    def feed(self, piece: bytes) -> bytes:
        """Return what may be passed on by now."""
        if self._held:
            piece, self._held = self._held + piece, b""
        elif self._at is _At.TEXT and tells_nothing(piece):
            return self._hold_back(piece)
        parts: list[bytes] = []
        while piece:
            match self._at:
                case _At.TEXT:
                    done, piece = self._read_text(piece)
                case _At.COLON:
                    done, piece = self._read_colon(piece)
                case _At.VALUE:
                    done, piece = self._blank(piece)
            parts.append(done)
        return b"".join(parts)

    def rest(self) -> bytes:
        """Return what was held back: the answer is complete."""
        held, self._held = self._held, b""
        return held

    def _hold_back(self, text: bytes) -> bytes:
        """Return a text that tells nothing, but for an end that may be the key's beginning."""
        quote = text.rfind(b'"', -_KEY_BYTES + 1)
        if quote != -1 and any(key.startswith(text[quote:]) for key in _KEYS):
            self._held = text[quote:]
            return text[:quote]
        return text

    def _read_text(self, text: bytes) -> tuple[bytes, bytes]:
        found = _KEY.search(text)
        if found is None:
            return self._hold_back(text), b""
        self._at = _At.COLON
        return text[: found.end()], text[found.end() :]

    def _read_colon(self, text: bytes) -> tuple[bytes, bytes]:
        """Behind the key: a value of several parts is blanked, any other left as it is."""
        found = _COLON.match(text)
        assert found is not None
        value = text[found.end() :]
        if not found[1] and value:
            self._at = _At.TEXT  # it was a text of this name, and no key
            return text[: found.end()], value
        if len(value) < len(b"null"):
            self._held = text
            return b"", b""
        if value[:1] not in (b"{", b"["):
            self._at = _At.TEXT
            return text[: found.end()], value
        self._at = _At.VALUE
        blanked, behind = self._blank(value)
        if len(blanked) < len(b"null"):
            return text[: found.end() + len(blanked)], behind  # there is nothing in it
        return text[: found.end()] + b"null" + blanked[4:], behind

    def _blank(self, text: bytes) -> tuple[bytes, bytes]:
        """Return spaces for the value's bytes, and what comes behind it."""
        end = self._find_end(text)
        if end is None:
            return b" " * len(text), b""
        self._at = _At.TEXT
        return b" " * end, text[end:]

    def _find_end(self, text: bytes) -> int | None:
        """Return where the value ends, None if not in this text."""
        position = 0
        if self._is_escaped:
            self._is_escaped, position = False, 1
        while found := _SIGNS.search(text, position):
            sign, position = found[0], found.end()
            if sign == b"\\":
                if position == len(text):
                    self._is_escaped = True
                position += 1
            elif sign == b'"':
                self._is_in_string = not self._is_in_string
            elif not self._is_in_string:
                self._depth += 1 if sign in b"{[" else -1
                if self._depth == 0:
                    return position
        return None


def without_params(text: bytes) -> bytes:
    """Return a whole answer with what it tells blanked."""
    filtering = TransferParamsFilter()
    return filtering.feed(text) + filtering.rest()
