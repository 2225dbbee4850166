"""A conversation's outline, kept without its text: where two turns first differ, and why. Pure.

Of each message its length and hashes stay: of the whole, and of each `CHUNK_BYTES` of it, so that the place of
a change is known to that many bytes. Only what is new in a turn is cut into chunks.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import orjson

CHUNK_BYTES = 64
"""So exactly the place of a change is known, where no text is kept."""

ENTRY_BYTES = 180
"""What a text's entry takes beside its bytes, as measured."""

PARTS_MAX = 4_000
"""Of a conversation with more messages and tools no outline is made: 100 bytes each, for each session."""

EXCERPT_BYTES = 40
"""What is shown on either side of a change, where texts are kept."""


class Cause(Enum):
    """What made a prompt diverge from the turn before."""

    SALT = "salt"  # another cache_salt
    SYSTEM = "system"  # a system or developer message
    TOOLS = "tools"  # other tools, or other fields of them
    TOOLS_ORDER = "tools_order"  # the same tools in another order
    HISTORY = "history"  # a message that had been sent before
    TEMPLATE = "template"  # the same messages, rendered otherwise: reasoning that was dropped, say


class Mark(NamedTuple):
    """One message, or one tool. `key` is of its whole text."""

    role: str
    size_bytes: int
    key: int


class Outline(NamedTuple):
    """One turn's conversation."""

    salt: str | None
    tools: Sequence[Mark]
    messages: Sequence[Mark]

    def shared_with(self, other: Outline) -> int:
        """Return how many messages both have, wherever."""
        return len({*self.messages} & {*other.messages})


@dataclass(frozen=True, slots=True)
class Difference:
    """Where one turn first differs from the turn before.

    `message`: its index in the chat, system message included; None: it is no message. `byte`: about where in
    its content (in its JSON, if that is no plain text); None: it was added or left out. Excerpts: only where
    texts are kept.
    """

    cause: Cause
    message: int | None = None
    role: str | None = None
    byte: int | None = None
    bytes_before: int | None = None
    bytes_now: int | None = None
    text_before: str | None = None
    text_now: str | None = None


def outline_of(fields: Mapping[str, Any], salt: str | None, texts: TextMemory) -> Outline | None:
    """Return a chat's outline; note the texts of its parts. None: it is none, or too long.

    Cost: 0.2 ms for 80 messages of 320 KB.
    """
    tools, messages = fields.get("tools") or [], fields.get("messages")
    if not isinstance(tools, list) or not isinstance(messages, list):
        return None
    if len(tools) + len(messages) > PARTS_MAX:
        return None
    marks = [_mark(message, texts) for message in messages]
    return Outline(salt, [texts.note("tool", tool) for tool in tools], marks)


def _mark(message: Any, texts: TextMemory) -> Mark:
    role = message.get("role") if isinstance(message, dict) else None
    is_plain = isinstance(message, dict) and message.keys() <= {"role", "content", "type"}
    content = message.get("content") if is_plain else message
    return texts.note(role if isinstance(role, str) else "", content)


def find_difference(before: Outline, now: Outline, texts: TextMemory) -> Difference | None:
    """Return where a turn first differs from what it should begin like. None: it begins like it."""
    if before.salt != now.salt:
        return Difference(Cause.SALT)
    if before.tools != now.tools:
        is_order = sorted(before.tools) == sorted(now.tools)
        return Difference(Cause.TOOLS_ORDER if is_order else Cause.TOOLS)
    for index, old in enumerate(before.messages):
        new = now.messages[index] if index < len(now.messages) else None
        if new != old:
            return _message_difference(index, old, new, texts)
    return None


def _message_difference(index: int, old: Mark, new: Mark | None, texts: TextMemory) -> Difference:
    is_system = old.role in ("system", "developer") or (
        new is not None and new.role in ("system", "developer")
    )
    cause = Cause.SYSTEM if is_system else Cause.HISTORY
    if new is None or new.role != old.role:
        size = new.size_bytes if new is not None else None
        return Difference(cause, index, old.role, None, old.size_bytes, size)
    byte, text_before, text_now = texts.first_difference(old, new)
    return Difference(
        cause, index, old.role, byte, old.size_bytes, new.size_bytes, text_before, text_now
    )


class TextMemory:
    """Texts of messages by their hashes, in chunks' hashes or, if they may be kept, as they are.

    `bytes_max` bounds what is kept; the longest unused go first, and with them the place of a change.
    """

    def __init__(self, bytes_max: int, *, keeps_text: bool) -> None:
        self._bytes_max = bytes_max
        self._keeps_text = keeps_text
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        self.bytes_used = 0

    def note(self, role: str, content: Any) -> Mark:
        """Return the mark of a message's content, or of a tool."""
        text = (
            content.encode("utf-8", "surrogatepass") if isinstance(content, str) else _json(content)
        )
        key = hash(text)
        if key in self._kept:
            self._kept.move_to_end(key)
        else:
            self._keep(key, text if self._keeps_text else _chunk_hashes(text))
        return Mark(role, len(text), key)

    def first_difference(self, old: Mark, new: Mark) -> tuple[int | None, str | None, str | None]:
        """Return about the byte at which two texts differ, and what they say there, if it is kept."""
        one, other = self._kept.get(old.key), self._kept.get(new.key)
        if one is None or other is None:
            return None, None, None
        if self._keeps_text:
            at = _common_bytes(one, other)
            return at, _excerpt(one, at), _excerpt(other, at)
        at = _common_bytes(one, other) // _HASH_BYTES * CHUNK_BYTES
        return min(at, old.size_bytes, new.size_bytes), None, None

    def _keep(self, key: int, kept: bytes) -> None:
        self._kept[key] = kept
        self.bytes_used += ENTRY_BYTES + len(kept)
        while self.bytes_used > self._bytes_max:
            self.bytes_used -= ENTRY_BYTES + len(self._kept.popitem(last=False)[1])


_HASH_BYTES = 4


def _chunk_hashes(text: bytes) -> bytes:
    """Return the hashes of a text's chunks, one after the other. Cost: 15 us for 6 KB."""
    crc32 = zlib.crc32
    starts = range(0, len(text), CHUNK_BYTES)
    return b"".join(
        [crc32(text[start : start + CHUNK_BYTES]).to_bytes(_HASH_BYTES) for start in starts]
    )


def _common_bytes(one: bytes, other: bytes) -> int:
    """Return how many leading bytes are alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _excerpt(text: bytes, at: int) -> str:
    part = text[max(at - EXCERPT_BYTES, 0) : at + EXCERPT_BYTES]
    return part.decode("utf-8", "replace")


def _json(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:  # nested more deeply than it writes, or a lone surrogate
        pass
    try:
        return repr(value).encode("utf-8", "backslashreplace")
    except RecursionError:
        return b"nested too deeply to be told apart"
