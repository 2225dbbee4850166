"""Traces of requests, as a collector gets them, and the context that engines get."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_engine import FakeEngine, Received, chat_answer, stream_event
from live_gateway import LiveGateway, live_gateway, until
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from otlp_receiver import Collector, attributes, read_attributes

from moongate.gateway.dialects.body import name_session
from moongate.gateway.telemetry import tracing
from moongate.simulator.engine import EngineProfile
from moongate.simulator.server import SimEngine, SimEngineConfig

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PHASES = ("receive", "tokenise", "queue", "route", "upstream_first_byte", "stream")


@contextlib.asynccontextmanager
async def traced(collector: Collector, *urls: str, **settings: Any) -> AsyncIterator[LiveGateway]:
    """Run a gateway that has sent all of its traces when this ends."""
    told = {"otlp_endpoint": collector.url, **settings.pop("observability", {})}
    async with live_gateway(urls, observability=told, **settings) as gateway:
        yield gateway


def given(flags: str = "01", request_id: str = "r1") -> dict[str, str]:
    return {"traceparent": f"00-{TRACE}-{PARENT}-{flags}", "x-request-id": request_id}


def context_of(received: Received) -> list[str]:
    return received.headers["traceparent"].split("-")


async def test_a_request_has_a_span_for_each_phase_and_its_receipt() -> None:
    profile = EngineProfile(prefill_tokens_per_s=20_000.0, decode_tokens_per_s=200.0)
    sim = SimEngine(SimEngineConfig(profile=profile, model="m", kv_events_port=0))
    await sim.start()
    text = " ".join(f"word{n}" for n in range(300))
    async with Collector() as collector:
        async with traced(collector, sim.url) as gateway:
            await gateway.chat(content=text, max_tokens=8)
            options = {"stream": True, "stream_options": {"include_usage": True}}
            headers = {**given(), "x-session-id": "session-key"}
            answer = await gateway.chat(content=text, max_tokens=8, headers=headers, **options)
            assert answer.status_code == 200
            (shown,) = (
                await gateway.client.get("/admin/decisions", params={"request_id": "r1"})
            ).json()["decisions"]
        spans = collector.trace_of("r1")
        await sim.stop()
    assert list(spans) == ["request", *PHASES]
    (own,) = spans["request"]
    assert (own.trace_id.hex(), own.parent_span_id.hex()) == (TRACE, PARENT)
    assert (own.name, own.kind) == ("POST /v1/chat/completions", Span.SPAN_KIND_SERVER)
    assert own.status.code == Status.STATUS_CODE_UNSET
    phases = [spans[name][0] for name in PHASES]
    assert phases[0].start_time_unix_nano == own.start_time_unix_nano
    for before, after in itertools.pairwise(phases):
        assert before.start_time_unix_nano <= before.end_time_unix_nano
        assert before.end_time_unix_nano == after.start_time_unix_nano
    assert own.end_time_unix_nano >= phases[-1].end_time_unix_nano
    assert abs(own.end_time_unix_nano / 1e9 - time.time()) < 20
    # 8 tokens at 200 a second come behind the first byte.
    assert phases[-1].end_time_unix_nano - phases[-1].start_time_unix_nano > 0.02e9
    assert attributes(phases[4])["moongate.instance"] == "a"

    (chosen,), outcome = shown["candidates"], shown["outcome"]
    told = attributes(own)
    assert told == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "m",
        "gen_ai.conversation.id": name_session("session-key"),
        "gen_ai.usage.input_tokens": shown["prompt_tokens"],
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": outcome["cached_tokens"],
        "moongate.request_id": "r1",
        "moongate.policy": "kv_cost",
        "moongate.reason": "only_choice",
        "moongate.instance": "a",
        "moongate.device_tokens": shown["device_tokens"],
        "moongate.reuse_error_tokens": outcome["reuse_error_tokens"],
        "moongate.cost_ms": chosen["cost_ms"],
        "moongate.ttft_ms": pytest.approx(shown["ttft_ms"], abs=0.001),
        **{f"moongate.cost.{term}_ms": ms for term, ms in chosen["cost_terms_ms"].items()},
    }
    assert told["moongate.device_tokens"] > 0
    assert told["moongate.reuse_error_tokens"] == 0
    assert shown["trace_id"] == TRACE


async def test_a_resource_says_which_gateway_it_was() -> None:
    async with FakeEngine() as engine, Collector() as collector:
        async with traced(collector, engine.url) as gateway:
            await gateway.chat()
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service

        (sent,) = service.ExportTraceServiceRequest.FromString(collector.bodies[0]).resource_spans
        told = read_attributes(sent.resource.attributes)
    assert told["service.name"] == "moongate"
    assert {"service.version", "service.instance.id"} <= told.keys()


async def test_an_engines_spans_go_under_the_attempt_that_it_answered() -> None:
    async with FakeEngine() as engine, Collector() as collector:
        async with traced(collector, engine.url) as gateway:
            headers = {**given(), "tracestate": "vendor=1"}
            await gateway.chat(headers=headers)
            await gateway.chat(headers={"x-request-id": "r2", "tracestate": "vendor=1"})
        first, second = engine.received
        for received, request_id in ((first, "r1"), (second, "r2")):
            _, trace_id, span_id, flags = context_of(received)
            spans = collector.trace_of(request_id)
            assert trace_id == spans["request"][0].trace_id.hex()
            assert span_id == spans["upstream_first_byte"][0].span_id.hex()
            assert spans["upstream_first_byte"][0].kind == Span.SPAN_KIND_CLIENT
            assert flags == "01"
        assert context_of(first)[1] == TRACE
        assert context_of(second)[1] != TRACE
        assert first.headers["tracestate"] == "vendor=1"
        assert "tracestate" not in second.headers  # of no trace that was named
        assert not collector.trace_of("r2")["request"][0].parent_span_id


async def test_what_the_client_does_not_record_nobody_does() -> None:
    async with FakeEngine() as engine, Collector() as collector:
        async with traced(collector, engine.url) as gateway:
            answer = await gateway.chat(headers=given("00"))
            assert answer.status_code == 200
        assert collector.spans() == []
        _, trace_id, _, flags = context_of(engine.received[0])
        assert (trace_id, flags) == (TRACE, "00")


@pytest.mark.parametrize(("ratio", "recorded"), [(0.0, 0), (0.5, 18), (1.0, 40)])
async def test_a_share_of_the_traces_that_begin_here_is_recorded(
    ratio: float, recorded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "_ids", random.Random(2))  # of which 18 of 40 are in a half
    async with FakeEngine() as engine, Collector() as collector:
        async with traced(collector, engine.url, observability={"sample_ratio": ratio}) as gateway:
            for _ in range(40):
                await gateway.chat()
            await gateway.chat(headers=given())
        own = [span for span in collector.spans() if span.kind == Span.SPAN_KIND_SERVER]
        assert len(own) == recorded + 1  # the client's choice counts more
        *begun, theirs = (context_of(received) for received in engine.received)
        for _, trace_id, _, flags in begun:
            assert flags == ("01" if int(trace_id[16:], 16) < ratio * 2**64 else "00")
        assert [flags for *_, flags in begun].count("01") == recorded
        assert theirs[3] == "01"


async def test_without_tracing_a_clients_context_passes_as_it_came() -> None:
    async with FakeEngine() as engine, live_gateway([engine.url]) as gateway:
        headers = {"traceparent": "00-anything", "tracestate": "vendor=1"}
        await gateway.chat(headers=headers)
        await gateway.chat()
        first, second = engine.received
        assert {name: first.headers[name] for name in headers} == headers
        assert "traceparent" not in second.headers


async def test_each_attempt_has_a_span_of_its_own() -> None:
    async def fail_once(request: Received) -> None:
        if len(a.received) + len(b.received) == 1:
            request.cut()
        else:
            await request.answer(200, chat_answer())

    async with FakeEngine(fail_once) as a, FakeEngine(fail_once) as b, Collector() as collector:
        async with traced(collector, a.url, b.url) as gateway:
            answer = await gateway.chat(headers=given())
            assert answer.status_code == 200
        spans = collector.trace_of("r1")
        failed, answered = spans["upstream_first_byte"]
        received = [*a.received, *b.received]
        contexts = {context_of(one)[2] for one in received}
        assert contexts == {failed.span_id.hex(), answered.span_id.hex()}
    assert attributes(failed)["error.type"] == "disconnected"
    assert failed.status.code == Status.STATUS_CODE_ERROR
    assert attributes(answered)["moongate.instance"] == answer.headers["x-moongate-instance"]
    assert attributes(failed)["moongate.instance"] != attributes(answered)["moongate.instance"]
    assert attributes(spans["request"][0])["moongate.attempts"] == 2
    assert spans["request"][0].status.code == Status.STATUS_CODE_UNSET


async def test_a_request_that_is_refused_has_a_span_without_a_receipt() -> None:
    async with FakeEngine() as engine, Collector() as collector:
        async with traced(collector, engine.url) as gateway:
            assert (await gateway.chat(model="nope", headers=given())).status_code == 404
        spans = collector.trace_of("r1")
    told = attributes(spans["request"][0])
    assert told["http.response.status_code"] == 404
    assert "gen_ai.request.model" not in told
    assert "upstream_first_byte" not in spans


async def test_a_client_that_leaves_and_an_engine_that_breaks_off_show() -> None:
    async def act(request: Received) -> None:
        if request.headers["x-request-id"] == "left":
            await request.client_left.wait()
            return
        await request.start_stream()
        await request.send_chunk(stream_event("a"))
        request.cut()

    async with FakeEngine(act) as engine, Collector() as collector:
        async with traced(collector, engine.url) as gateway:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(gateway.chat(headers={"x-request-id": "left"}), 0.3)
            await gateway.chat(stream=True, headers={"x-request-id": "broken"})
            await until(lambda: gateway.inflight() == 0)
        left, broken = collector.trace_of("left"), collector.trace_of("broken")
    assert attributes(left["request"][0])["http.response.status_code"] == 499
    assert attributes(left["upstream_first_byte"][0])["error.type"] == "client_left"
    assert attributes(broken["request"][0])["error.type"] == "broken_off"
    assert broken["request"][0].status.code == Status.STATUS_CODE_ERROR
    assert "stream" in broken


@pytest.mark.parametrize("trouble", ["gone", "silent"])
async def test_a_collector_in_trouble_costs_no_request(trouble: str) -> None:
    async with FakeEngine() as engine, Collector(delay_s=5.0) as collector:
        if trouble == "gone":
            collector.url = "http://127.0.0.1:9"
        async with traced(collector, engine.url) as gateway:
            tracing = gateway.server.gateway._exporter
            assert tracing is not None
            tracing._interval_s = 0.01
            took = []
            for _ in range(30):
                began = time.perf_counter()
                assert (await gateway.chat()).status_code == 200
                took.append(time.perf_counter() - began)
            assert sorted(took)[-2] < 0.2
            assert await gateway.metric("moongate_requests_total", code="200") == 30
