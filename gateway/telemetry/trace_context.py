"""W3C Trace Context: which trace a request belongs to, as headers say it.

Source: https://www.w3.org/TR/trace-context/ (level 1, and level 2's rule for later versions).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_SAMPLED = 1


class TraceContext(NamedTuple):
    """A trace, and the span in it that comes before. `is_sampled`: the caller records it."""

    trace_id: bytes  # 16
    span_id: bytes  # 8
    is_sampled: bool

    def as_header(self) -> bytes:
        return b"00-%b-%b-%02x" % (
            self.trace_id.hex().encode(), self.span_id.hex().encode(), self.is_sampled
        )  # fmt: skip


def parse_traceparent(text: str | None) -> TraceContext | None:
    """Return what a `traceparent` says. None: it is missing or says nothing that can be relied on."""
    found = _FORM.fullmatch(text) if text is not None else None
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == "ff" or (version == "00" and rest):
        return None
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(
        bytes.fromhex(trace_id), bytes.fromhex(span_id), bool(int(flags, 16) & _SAMPLED)
    )


def with_context(
    headers: Collection[tuple[bytes, bytes]], context: TraceContext, *, keeps_state: bool
) -> list[tuple[bytes, bytes]]:
    """Return headers (names in lower case) with this context in place of the one that came.

    `keeps_state`: the trace is the one that came, so what vendors added to it still holds.
    """
    dropped = (TRACEPARENT,) if keeps_state else (TRACEPARENT, TRACESTATE)
    kept = [header for header in headers if header[0] not in dropped]
    kept.append((TRACEPARENT, context.as_header()))
    return kept
