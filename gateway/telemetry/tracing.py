"""Traces of requests: which are recorded, their phases, and their spans.

Theory of operation. A request's time is cut into phases that follow one another, so all that is done
while it runs is to note when each ended. Its spans are made behind its end, from these times and from its
receipt: one for the request, and below it one for each phase (one for each attempt at an engine, under
which the engine's own go). The exporter makes them, many requests' in a row, which takes half as long as
one by one between other work.

Whether a trace is recorded is the caller's choice where it sent a context, else chance
(`observability.sample_ratio`). A context is passed on to engines in any case, so that they record what
is recorded here and nothing else.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import NamedTuple

from moongate.gateway.dialects.routes import Route
from moongate.gateway.telemetry.otlp import SpanForm, SpanKind, consecutive_spans
from moongate.gateway.telemetry.receipt import Receipt
from moongate.gateway.telemetry.span_attributes import WORDS_MAX, attempt_words, request_attributes
from moongate.gateway.telemetry.trace_context import (
    TRACEPARENT,
    TraceContext,
    parse_traceparent,
    with_context,
)
from moongate.gateway.telemetry.trace_export import TraceExporter

PHASES_MAX = 64
"""Of a request; attempts are few."""

OFFSET_S = 10.0
"""How often it is looked at by how much unix time and our clock differ; it follows corrections of time."""


RECEIVE = SpanForm("receive", SpanKind.INTERNAL)
TOKENISE = SpanForm("tokenise", SpanKind.INTERNAL)
QUEUE = SpanForm("queue", SpanKind.INTERNAL)
ROUTE = SpanForm("route", SpanKind.INTERNAL)
STREAM = SpanForm("stream", SpanKind.INTERNAL)
"""The phases, in this order; between the last two come attempts. `RECEIVE`: from a request's head until its
body is read. `QUEUE`: what it waits for before it can be decided: events of the turn before, the pool; and once
more behind `ROUTE`, if no instance has room.
`STREAM`: from its answer's first byte to the last."""


@lru_cache(WORDS_MAX)
def _attempt_form(instance: str, error: str | None) -> SpanForm:
    words = attempt_words(instance, error)
    return SpanForm("upstream_first_byte", SpanKind.CLIENT, words, is_error=error is not None)


_ids = random.Random()  # noqa: S311 - ids are told apart, never relied on


class RequestTrace:
    """One request's place in a trace, and when its phases ended."""

    __slots__ = (
        "_forms", "_has_headers", "_parent_id", "_times", "context", "first_id", "trace_id",
    )  # fmt: skip

    def __init__(
        self, given: TraceContext | None, context: TraceContext, first_id: int, began_at: float,
        *, has_headers: bool,
    ) -> None:  # fmt: skip
        """`given`: the client's context. `has_headers`: it sent headers of one, good or not."""
        self.context = context  # of the request's own span
        self.trace_id = context.trace_id.hex()
        self._parent_id = given.span_id if given is not None else None
        self.first_id = first_id  # of the spans below it
        self._has_headers = has_headers
        self._forms: list[SpanForm] = []
        self._times = [began_at]

    @property
    def is_recorded(self) -> bool:
        return self.context.is_sampled

    def note(self, phase: SpanForm, ended_at: float) -> None:
        """A phase has ended; it began where the one before it ended."""
        self._forms.append(phase)
        self._times.append(ended_at)

    def note_attempt(self, ended_at: float, instance: str, error: str | None) -> None:
        """An attempt at an engine has its answer's first byte, or failed."""
        if len(self._forms) < PHASES_MAX:
            self.note(_attempt_form(instance, error), ended_at)

    def pass_on(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Return an engine's headers with the attempt that is under way as the parent of its spans."""
        context = self.context
        if context.is_sampled:
            span_id = (self.first_id + len(self._forms)).to_bytes(8, "big")
            context = TraceContext(context.trace_id, span_id, is_sampled=True)
        if not self._has_headers:
            return [*headers, (TRACEPARENT, context.as_header())]
        return with_context(headers, context, keeps_state=self._parent_id is not None)

    def spans(self, form: SpanForm, attributes: bytes, offset_ns: int, ended_at: float) -> bytes:
        """Return all spans. `offset_ns`: what to add to our clock for unix time."""
        trace_id, span_id, _ = self.context
        times = [
            (int(at * 1e9) + offset_ns).to_bytes(8, "little") for at in (*self._times, ended_at)
        ]
        ended = times.pop()
        phases = consecutive_spans(tuple(self._forms), trace_id, span_id, self.first_id, times)
        return phases + form.span(trace_id, span_id, self._parent_id, times[0], ended, attributes)


class _Ended(NamedTuple):
    """A request that has ended, of which spans are to be made."""

    trace: RequestTrace
    at: float
    route: Route
    status: int
    request_id: str
    receipt: Receipt | None
    input_tokens: int | None


class Tracing:
    """Begins and ends the traces of one gateway's requests."""

    def __init__(
        self, exporter: TraceExporter, sample_ratio: float, clock: Callable[[], float]
    ) -> None:
        self._exporter = exporter
        self.sample(sample_ratio)
        self._clock = clock
        self._offset_ns = 0
        self._offset_until = float("-inf")

    def sample(self, ratio: float) -> None:
        """Record this part of the traces that begin here from now on."""
        self._bound = int(ratio * (1 << 64))

    def begin(self, headers: Mapping[str, str], began_at: float) -> RequestTrace:
        """Return the trace of a request whose first bytes came then."""
        # Below the highest, so that those of the phases follow without beginning anew.
        number = _ids.getrandbits(62) + 1
        span_id, given = number.to_bytes(8, "big"), None
        has_headers = "traceparent" in headers or "tracestate" in headers
        if has_headers:
            given = parse_traceparent(headers.get("traceparent"))
        if given is not None:
            context = TraceContext(given.trace_id, span_id, given.is_sampled)
        else:
            trace_number = _ids.getrandbits(128)
            # By its random half, as SDKs do, so that all who see a trace choose alike.
            is_sampled = trace_number & ((1 << 64) - 1) < self._bound
            context = TraceContext(trace_number.to_bytes(16, "big"), span_id, is_sampled)
        return RequestTrace(given, context, number + 1, began_at, has_headers=has_headers)

    def end(
        self,
        trace: RequestTrace,
        route: Route,
        status: int,
        request_id: str,
        receipt: Receipt | None,
        input_tokens: int | None,
    ) -> None:
        """Let a request's spans be made and sent. `receipt` None: it was not forwarded."""
        if trace.is_recorded:
            ended = _Ended(trace, self._clock(), route, status, request_id, receipt, input_tokens)
            self._exporter.offer(functools.partial(self._encode, ended))

    def _encode(self, ended: _Ended) -> bytes:
        """Return a request's spans."""
        trace, ended_at, route, status, request_id, receipt, input_tokens = ended
        if ended_at > self._offset_until:
            self._offset_until = ended_at + OFFSET_S
            self._offset_ns = time.time_ns() - int(self._clock() * 1e9)
        error = str(status) if status >= 500 else None
        if error is None and receipt is not None and receipt.is_broken_off:
            error = "broken_off"
        attributes = request_attributes(route, status, request_id, receipt, error, input_tokens)
        form = _request_form(route.template, has_failed=error is not None)
        return trace.spans(form, attributes, self._offset_ns, ended_at)


@cache
def _request_form(template: str, *, has_failed: bool) -> SpanForm:
    return SpanForm(f"POST {template}", SpanKind.SERVER, is_error=has_failed)
