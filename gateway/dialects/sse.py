"""Where server-sent events end in a stream of bytes: sans-IO, without decoding them.

The relay forwards whole events only, so that a stream which the engine breaks off in the middle of
one can still be ended with a proper error event; the bytes that a client receives are the engine's.
"""

from __future__ import annotations

import re

HELD_BYTES_MAX = 1 << 20
"""An event longer than this is forwarded in pieces rather than gathered without end."""

EDITED_BYTES_MAX = 1 << 23
"""One that may have to be changed is gathered up to this length. Most are short; clients decide how long some are,
since engines repeat fields of requests in them. Each change takes some 10 ns a byte."""

_BOUNDARIES = (b"\n\n", b"\r\n\r\n", b"\r\r")
_BOUNDARY = re.compile(b"|".join(_BOUNDARIES))
_SPANNED_BYTES = max(map(len, _BOUNDARIES)) - 1
"""How much of an empty line may have come before the piece that completes it."""

_END = re.compile(
    rb"^(?:data: ?\[DONE\]|data: ?\{\"error\": ?[{\"]|event: ?(?:error|message_stop)\b"
    rb"|event: ?response\.(?:completed|failed|incomplete)\b)",
    re.MULTILINE,
)
"""What ends a stream, by API family: chat and completions, messages, responses. A model may write the
same words, but inside of JSON, so never at a line's beginning."""


class EventSplitter:
    """Give it bytes as they come; it returns those that complete events. Cost: O(bytes), however cut."""

    def __init__(self, held_bytes_max: int = HELD_BYTES_MAX) -> None:
        self._held = bytearray()
        self._held_bytes_max = held_bytes_max

    @property
    def held(self) -> bytes:
        """Return what was received and not returned: the beginning of an event."""
        return bytes(self._held)

    def feed(self, chunk: bytes) -> bytes:
        """Return all bytes up to the end of the last complete event; possibly none."""
        if not self._held and chunk.endswith(b"\n\n"):
            return chunk  # whole events, as engines mostly send them
        # Nothing that is held ends an event; with what follows its last bytes may.
        looked_from = max(len(self._held) - _SPANNED_BYTES, 0)
        self._held += chunk
        end = _last_boundary(self._held, looked_from)
        if len(self._held) - end > self._held_bytes_max:
            end = len(self._held)
        return _take(self._held, end)


class EventCutter:
    """Give it bytes as they come; it returns the events that they complete, one by one, as `split_events`
    does. What it holds is for its user to bound."""

    def __init__(self) -> None:
        self._held = bytearray()

    @property
    def held(self) -> bytes:
        """Return the beginning of an event."""
        return bytes(self._held)

    @property
    def held_bytes(self) -> int:
        return len(self._held)

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the events that are whole now. Cost: O(bytes), however cut."""
        looked_from = max(len(self._held) - _SPANNED_BYTES, 0)
        self._held += chunk
        if _BOUNDARY.search(self._held, looked_from) is None:
            return []
        events, rest = split_events(bytes(self._held))
        self._held = bytearray(rest)
        return events


def _take(held: bytearray, end: int) -> bytes:
    """Cut the first bytes off, and return them."""
    if not end:
        return b""
    with memoryview(held) as view:
        taken = bytes(view[:end])
    del held[:end]
    return taken


def _last_boundary(data: bytearray, start: int) -> int:
    """Return the position behind the last empty line that ends behind `start`, 0 if there is none."""
    found = ((data.rfind(mark, start), len(mark)) for mark in _BOUNDARIES)
    return max((at + length for at, length in found if at >= 0), default=0)


def split_events(data: bytes) -> tuple[list[bytes], bytes]:
    """Return the whole events, each with the empty line that ends it, and what follows the last."""
    events, start = [], 0
    for boundary in _BOUNDARY.finditer(data):
        events.append(data[start : boundary.end()])
        start = boundary.end()
    return events, data[start:]


def ends_stream(events: bytes) -> bool:
    """Tell whether whole events have one among them after which nothing follows.

    What is no whole event, a piece of one that was too long to gather, is still followed by its rest.
    """
    may_end = b"[DONE]" in events or b'"error"' in events or b"event:" in events
    return may_end and events.endswith(_BOUNDARIES) and _END.search(events) is not None
