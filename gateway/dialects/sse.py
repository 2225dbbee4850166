"""Where server-sent events end in a stream of bytes: sans-IO, without decoding them.

The relay forwards whole events only, so that a stream which the engine breaks off in the middle of
one can still be ended with a proper error event; the bytes that a client receives are the engine's.
"""

from __future__ import annotations

import re

HELD_BYTES_MAX = 1 << 20
"""An event longer than this is forwarded in pieces rather than gathered without end."""

_BOUNDARIES = (b"\n\n", b"\r\n\r\n", b"\r\r")
_BOUNDARY = re.compile(b"|".join(_BOUNDARIES))

_END = re.compile(
    rb"^(?:data: ?\[DONE\]|data: ?\{\"error\": ?[{\"]|event: ?(?:error|message_stop)\b"
    rb"|event: ?response\.(?:completed|failed|incomplete)\b)",
    re.MULTILINE,
)
"""What ends a stream, by API family: chat and completions, messages, responses. A model may write the
same words, but inside of JSON, so never at a line's beginning."""


class EventSplitter:
    """Give it bytes as they come; it returns those that complete events."""

    def __init__(self, held_bytes_max: int = HELD_BYTES_MAX) -> None:
        self._held = b""
        self._held_bytes_max = held_bytes_max

    @property
    def held(self) -> bytes:
        """Return what was received and not returned: the beginning of an event."""
        return self._held

    def feed(self, chunk: bytes) -> bytes:
        """Return all bytes up to the end of the last complete event; possibly none."""
        if not self._held and chunk.endswith(b"\n\n"):
            return chunk  # whole events, as engines mostly send them
        data = self._held + chunk if self._held else chunk
        end = _last_boundary(data)
        if end == len(data) or len(data) - end > self._held_bytes_max:
            self._held = b""
            return data
        self._held = data[end:]
        return data[:end]


def _last_boundary(data: bytes) -> int:
    """Return the position behind the last empty line, 0 if there is none."""
    ends = (data.rfind(mark) + len(mark) for mark in _BOUNDARIES if mark in data)
    return max(ends, default=0)


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
