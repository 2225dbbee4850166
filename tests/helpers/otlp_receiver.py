"""A collector of traces for tests: takes OTLP over HTTP, decodes it with the official package."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass(slots=True)
class Collector:
    """Listens on localhost. `statuses` are answered one after the other, then 200."""

    statuses: list[int] = field(default_factory=list)
    delay_s: float = 0.0
    bodies: list[bytes] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    url: str = ""
    _runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 27)
        app.router.add_post("/v1/traces", self._take)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        body = await request.read()
        await asyncio.sleep(self.delay_s)
        status = self.statuses.pop(0) if self.statuses else 200
        if status == 200:
            self.bodies.append(body)
            self.headers.append({name.lower(): value for name, value in request.headers.items()})
        return web.Response(status=status)

    def spans(self) -> list[Span]:
        """Return all spans that came, in their order."""
        return [span for body in self.bodies for span in decode_spans(body)]

    def trace_of(self, request_id: str) -> dict[str, list[Span]]:
        """Return a request's spans by name, its own as `request`."""
        all_spans = self.spans()
        own = [s for s in all_spans if attributes(s).get("moongate.request_id") == request_id]
        assert len(own) == 1, (request_id, len(own))
        found = {"request": own}
        for span in all_spans:
            if span.parent_span_id == own[0].span_id and span.trace_id == own[0].trace_id:
                found.setdefault(span.name, []).append(span)
        return found


def decode_spans(body: bytes) -> list[Span]:
    """Return the spans of one call's body."""
    request = ExportTraceServiceRequest.FromString(body)
    return [s for r in request.resource_spans for scope in r.scope_spans for s in scope.spans]


def attributes(span: Span) -> dict[str, Any]:
    return read_attributes(span.attributes)


def read_attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair) for pair in pairs}


def _value(pair: KeyValue) -> Any:
    which = pair.value.WhichOneof("value")
    assert which is not None, pair.key
    return getattr(pair.value, which)
