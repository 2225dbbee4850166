"""Traces on their way to a collector that is well, slow, gone, or refuses."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter

import pytest
from live_gateway import until
from otlp_receiver import Collector, decode_spans

from moongate.gateway.telemetry import trace_export
from moongate.gateway.telemetry.otlp import SpanForm, SpanKind, resource
from moongate.gateway.telemetry.trace_export import TraceExporter, TraceResult

pytestmark = pytest.mark.asyncio

SPAN = SpanForm("s", SpanKind.SERVER).span(b"t" * 16, b"s" * 8, None, bytes(8), bytes(8), b"")


class Exporting:
    """An exporter, and what it counted."""

    def __init__(self, url: str, pauses_s: tuple[float, ...] = (0.01, 0.01)) -> None:
        self.counts: Counter[TraceResult] = Counter()
        self.exporter = TraceExporter(
            f"{url}/v1/traces", {"x-key": "k"}, resource({"service.name": "moongate"}), self._count,
            interval_s=0.02, pauses_s=pauses_s,
        )  # fmt: skip

    def _count(self, count: int, result: TraceResult) -> None:
        self.counts[result] += count

    def offer(self, count: int) -> None:
        for _ in range(count):
            self.exporter.offer(lambda: SPAN)


async def test_all_that_is_offered_arrives_in_batches() -> None:
    async with Collector() as collector:
        one = Exporting(collector.url)
        one.exporter.start()
        one.offer(1300)
        await until(lambda: one.counts[TraceResult.SENT] == 1300)
        await one.exporter.close()
        assert [len(decode_spans(body)) for body in collector.bodies] == [512, 512, 276]
        assert {h["content-type"] for h in collector.headers} == {"application/x-protobuf"}
        assert {h["x-key"] for h in collector.headers} == {"k"}


async def test_what_is_left_at_the_end_is_sent() -> None:
    async with Collector() as collector:
        one = Exporting(collector.url)
        one.offer(3)
        await one.exporter.close()
        assert len(collector.spans()) == 3


async def test_a_collector_that_is_busy_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", trace_export.__name__)
    async with Collector(statuses=[503, 429]) as collector:
        one = Exporting(collector.url)
        one.exporter.start()
        one.offer(2)
        await until(lambda: one.counts[TraceResult.SENT] == 2)
        await one.exporter.close()
        assert len(collector.spans()) == 2
    assert one.counts == {TraceResult.SENT: 2}
    assert [r.getMessage() for r in caplog.records] == [
        f"traces can't be sent to {collector.url}/v1/traces: status 503",
        f"traces are sent to {collector.url}/v1/traces again",
    ]


async def test_what_is_refused_is_not_sent_again() -> None:
    async with Collector(statuses=[400]) as collector:
        one = Exporting(collector.url)
        one.exporter.start()
        one.offer(2)
        await until(lambda: one.counts[TraceResult.FAILED] == 2)
        one.offer(1)
        await until(lambda: one.counts[TraceResult.SENT] == 1)
        await one.exporter.close()
        assert len(collector.spans()) == 1


async def test_a_collector_that_is_gone_costs_one_line_and_its_traces(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    one = Exporting(f"http://127.0.0.1:{port}")
    one.exporter.start()
    for expected in (5, 10):
        one.offer(5)
        await until(lambda expected=expected: one.counts[TraceResult.FAILED] == expected)
    await one.exporter.close()
    assert len(caplog.records) == 1


async def test_what_has_no_room_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_export, "QUEUE_REQUESTS_MAX", 10)
    async with Collector() as collector:
        one = Exporting(collector.url)
        one.offer(13)
        assert one.counts == {TraceResult.DROPPED: 3}
        await one.exporter.close()
        assert len(collector.spans()) == 10


async def test_the_end_waits_for_no_silent_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_export, "LAST_S", 0.1)
    async with Collector(delay_s=1.0) as collector:
        one = Exporting(collector.url)
        one.offer(600)
        began = asyncio.get_running_loop().time()
        await one.exporter.close()
        assert asyncio.get_running_loop().time() - began < 0.8
    assert one.counts == {TraceResult.FAILED: 600}


async def test_spans_that_can_not_be_made_cost_no_others(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> bytes:
        raise RuntimeError("a bug")

    async with Collector() as collector:
        one = Exporting(collector.url)
        one.exporter.start()
        one.offer(1)
        one.exporter.offer(fail)
        one.offer(1)
        await until(lambda: one.counts[TraceResult.SENT] == 2)
        one.exporter.offer(fail)
        await until(lambda: one.counts[TraceResult.FAILED] == 2)
        one.offer(1)
        await until(lambda: one.counts[TraceResult.SENT] == 3)
        await one.exporter.close()
    assert len(caplog.records) == 2
