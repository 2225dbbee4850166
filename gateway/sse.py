"""Where server-sent events end in a stream of bytes: sans-IO, without decoding them.

The relay forwards whole events only, so that a stream which the engine breaks off in the middle of
one can still be ended with a proper error event; the bytes that a client receives are the engine's.
"""

from __future__ import annotations

HELD_BYTES_MAX = 1 << 20
"""An event longer than this is forwarded in pieces rather than gathered without end."""


END_MARK = b"data: [DONE]"


class EventSplitter:
    """Give it bytes as they come; it returns those that complete events."""

    def __init__(self) -> None:
        self._held = b""

    @property
    def held(self) -> bytes:
        """Return what was received and not returned: the beginning of an event."""
        return self._held

    def feed(self, chunk: bytes) -> bytes:
        """Return all bytes up to the end of the last complete event; possibly none."""
        data = self._held + chunk if self._held else chunk
        end = _last_boundary(data)
        if end == len(data) or len(data) - end > HELD_BYTES_MAX:
            self._held = b""
            return data
        self._held = data[end:]
        return data[:end]


def _last_boundary(data: bytes) -> int:
    """Return the position behind the last empty line, 0 if there is none."""
    ends = (
        data.rfind(mark) + len(mark) for mark in (b"\n\n", b"\r\n\r\n", b"\r\r") if mark in data
    )
    return max(ends, default=0)


def ends_stream(events: bytes) -> bool:
    """Tell whether whole events have the end mark of chat and completions among them.

    A model may write the mark's words itself, but inside of JSON, so never at a line's beginning.
    """
    return events.startswith(END_MARK) or b"\n" + END_MARK in events
