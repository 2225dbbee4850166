"""Streams: how they begin, how they end, and what the gateway itself asks of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

import pytest
from fake_engine import FakeEngine, Received, stream_event
from live_gateway import LiveGateway, live_gateway, until

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(15)]

DONE = b"data: [DONE]\n\n"
ALWAYS = {"stream_usage": "always"}

# --- C04: usage -----------------------------------------------------------------------------------


def usage_event(cached_tokens: int) -> bytes:
    value = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "choices": [],
        "usage": {
            "prompt_tokens": 64,
            "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        },
    }
    return b"data: " + json.dumps(value).encode() + b"\n\n"


async def obey(request: Received) -> None:
    """Answer as an engine that reports usage if, and only if, it is asked."""
    options = request.json().get("stream_options") or {}
    await request.start_stream()
    await request.send_chunk(stream_event("a"))
    await request.send_chunk(stream_event("b"))
    last = usage_event(48) if options.get("include_usage") else b""
    await request.send_chunk(last + DONE)
    await request.send_chunk(b"")


def choiceless(content: bytes) -> list[Any]:
    """Return the events of a stream that have no choices."""
    events = [event[6:] for event in content.split(b"\n\n") if event and event != DONE.strip()]
    return [event for event in map(json.loads, events) if not event["choices"]]


TEXT = stream_event("a") + stream_event("b")


async def test_c04_usage_is_counted_of_every_stream_and_shown_to_who_asked() -> None:
    async with (
        FakeEngine(obey) as engine,
        live_gateway([engine.url], observability=ALWAYS) as gateway,
    ):
        answers = [
            await gateway.chat(stream=True),
            await gateway.chat(stream=True, stream_options={"include_usage": False}),
            await gateway.chat(stream=True, stream_options={"include_usage": True}),
        ]
        assert await gateway.metric("moongate_delivered_cached_tokens_total") == 3 * 48
    assert [answer.content for answer in answers] == [TEXT + DONE, TEXT + DONE,
                                                      TEXT + usage_event(48) + DONE]  # fmt: skip
    assert [len(choiceless(answer.content)) for answer in answers] == [0, 0, 1]
    asked = [body["stream_options"] for body in engine.bodies]
    assert asked == [{"include_usage": True}] * 3


async def test_c04_by_default_nothing_is_asked_that_the_client_did_not_ask() -> None:
    async with FakeEngine(obey) as engine, live_gateway([engine.url]) as gateway:
        for options in (None, {"include_usage": False}):
            answer = await gateway.chat(stream=True, stream_options=options)
            assert answer.content == TEXT + DONE
        assert await gateway.metric("moongate_delivered_cached_tokens_total") == 0
    assert [body.get("stream_options") for body in engine.bodies] == [
        None,
        {"include_usage": False},
    ]


async def test_c04_usage_is_counted_however_the_engine_cuts_its_stream() -> None:
    async def cut_finely(request: Received) -> None:
        await request.start_stream()
        stream = TEXT + usage_event(48) + DONE
        for start in range(0, len(stream), 7):
            await request.send_chunk(stream[start : start + 7])
            await asyncio.sleep(0)
        await request.send_chunk(b"")

    async with (
        FakeEngine(cut_finely) as engine,
        live_gateway([engine.url], observability=ALWAYS) as gateway,
    ):
        assert (await gateway.chat(stream=True)).content == TEXT + DONE
        assert await gateway.metric("moongate_delivered_cached_tokens_total") == 48


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"stream": False}),
        ("/v1/responses", {"stream": True}),
        ("/v1/messages", {"stream": True}),
    ],
)
async def test_c04_where_usage_comes_by_itself_the_body_stays(
    path: str, fields: Mapping[str, Any]
) -> None:
    raw = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields})
    async with FakeEngine() as engine, live_gateway([engine.url], observability=ALWAYS) as gateway:
        await gateway.client.post(path, content=raw)
    assert engine.received[0].body.decode() == raw


# --- C06: refusals --------------------------------------------------------------------------------

REFUSAL = b'{"error":{"message":"top_logprobs: at most 20","code":400}}'


async def test_c06_a_refused_stream_is_refused_with_its_status_and_body() -> None:
    async def refuse(request: Received) -> None:
        await request.answer(400, REFUSAL)

    async with FakeEngine(refuse) as engine, live_gateway([engine.url]) as gateway:
        answer = await gateway.chat(stream=True, logprobs=True, top_logprobs=21)
        assert (answer.status_code, answer.content) == (400, REFUSAL)
        assert answer.headers["content-type"] == "application/json"
        assert await gateway.metric("moongate_requests_total", code="400") == 1
        assert await gateway.metric("moongate_requests_total", code="200") == 0
    assert len(engine.received) == 1


async def refuse_503(request: Received) -> None:
    await request.answer(503, b'{"error":{"message":"full"}}')


async def die_before_the_first_token(request: Received) -> None:
    await request.start_stream()
    await asyncio.sleep(0.02)
    request.cut()


@pytest.mark.parametrize(
    ("handler", "status", "message"),
    [
        (refuse_503, 503, "full"),
        (die_before_the_first_token, 502, "the engine failed: the connection was closed"),
    ],
)
async def test_c06_where_all_fail_before_the_first_token_no_stream_begins(
    handler: Any, status: int, message: str
) -> None:
    async with (
        FakeEngine(handler) as a,
        FakeEngine(handler) as b,
        live_gateway([a.url, b.url]) as gateway,
    ):
        answer = await gateway.chat(stream=True)
        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["error"]["message"] == message
        assert len(a.received) == len(b.received) == 1
        assert gateway.inflight() == 0


# --- C12: ends ------------------------------------------------------------------------------------

ERROR = b'{"error":{"message":"n: at least 1","type":"BadRequestError","code":400}}'
ENDS = [
    ("/v1/chat/completions", DONE),
    ("/v1/chat/completions", b"data: " + ERROR + b"\n\n"),
    ("/v1/completions", b"data: [DONE]\r\n\r\n"),
    ("/v1/responses", b'event: response.completed\ndata: {"type":"response.completed"}\n\n'),
    ("/v1/responses", b'event: response.failed\ndata: {"type":"response.failed"}\n\n'),
    ("/v1/responses", b'event: response.incomplete\ndata: {"type":"response.incomplete"}\n\n'),
    ("/v1/messages", b'event: message_stop\ndata: {"type":"message_stop"}\n\n'),
    ("/v1/messages", b'event: error\ndata: {"type":"error","error":{"message":"x"}}\n\n'),
]


async def test_c12_a_stream_that_the_engine_leaves_open_ends_with_its_last_event() -> None:
    async def leave_open(request: Received) -> None:
        await request.start_stream()
        await request.send_chunk(stream_event("a"))
        await request.send_chunk(ENDS[request.json()["x_end"]][1])
        await request.client_left.wait()

    async def ask(gateway: LiveGateway, number: int) -> None:
        path, end = ENDS[number]
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt": "x"}
        began = time.monotonic()
        answer = await gateway.client.post(path, json={**body, "stream": True, "x_end": number})
        assert time.monotonic() - began < 2.0
        assert answer.content == stream_event("a") + end

    async with FakeEngine(leave_open) as engine, live_gateway([engine.url]) as gateway:
        async with asyncio.timeout(5):
            await asyncio.gather(*(ask(gateway, number) for number in range(len(ENDS))))
            for request in engine.received:
                await request.client_left.wait()
        await until(lambda: gateway.inflight() == 0)
        assert await gateway.metric("moongate_broken_off_total") == 0
        assert await gateway.metric("moongate_requests_total", code="200") == len(ENDS)


async def test_c12_an_end_that_repeats_itself_puts_nothing_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moongate.gateway.proxy.relaying.END_OF_STREAM_S", 0.2)

    async def repeat(request: Received) -> None:
        await request.start_stream()
        while not request.client_left.is_set():
            await request.send_chunk(DONE)
            await asyncio.sleep(0.05)

    async with FakeEngine(repeat) as engine, live_gateway([engine.url]) as gateway:
        answer = await asyncio.wait_for(gateway.chat(stream=True), 2.0)
        assert answer.content.startswith(DONE)
        await asyncio.wait_for(engine.received[0].client_left.wait(), 2.0)


async def test_c12_an_ended_stream_that_is_ended_properly_keeps_its_connection() -> None:
    async with FakeEngine(obey) as engine, live_gateway([engine.url]) as gateway:
        for _ in range(3):
            assert (await gateway.chat(stream=True)).content == TEXT + DONE
    assert len({id(request.writer) for request in engine.received}) == 1


async def test_c12_a_long_last_event_arrives_whole_however_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moongate.gateway.proxy.relaying.END_OF_STREAM_S", 0.1)
    long = b"event: response.completed\ndata: " + b"x" * 1_500_000
    event = long + b"\n\n"

    async def slowly(request: Received) -> None:
        await request.start_stream()
        await request.send_chunk(event[:1_200_000])
        await asyncio.sleep(0.4)
        await request.send_chunk(event[1_200_000:])
        await request.send_chunk(b"")

    async with FakeEngine(slowly) as engine, live_gateway([engine.url]) as gateway:
        body = {"model": "m", "input": "x", "stream": True}
        assert (await gateway.client.post("/v1/responses", json=body)).content == event


async def test_a_client_that_leaves_with_the_end_mark_had_a_whole_answer() -> None:
    """Client libraries close a stream as soon as they have read its end."""
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": 7},
    }
    counted = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"

    async def answer(request: Received) -> None:
        await request.start_stream()
        await request.send_chunk(stream_event("a") + counted + b"data: [DONE]\n\n")
        await request.client_left.wait()

    async with FakeEngine(answer) as engine, live_gateway([engine.url]) as gateway:
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
        async with gateway.client.stream("POST", "/v1/chat/completions", json=body) as stream:
            async for piece in stream.aiter_raw():
                if b"[DONE]" in piece:
                    break
        assert gateway.inflight() == 0
        assert await gateway.metric("moongate_delivered_cached_tokens_total") == 7
        assert await gateway.metric("moongate_requests_total", code="200") == 1
        assert await gateway.metric("moongate_requests_total", code="499") == 0
        assert await gateway.metric("moongate_broken_off_total") == 0


async def test_an_engine_that_breaks_off_behind_the_end_mark_has_said_all() -> None:
    async def answer(request: Received) -> None:
        await request.start_stream()
        await request.send_chunk(stream_event("a") + b"data: [DONE]\n\n")
        await asyncio.sleep(0.05)
        request.cut()

    async with FakeEngine(answer) as engine, live_gateway([engine.url]) as gateway:
        received = await gateway.chat(stream=True)
        assert received.content == stream_event("a") + b"data: [DONE]\n\n"
        assert await gateway.metric("moongate_broken_off_total") == 0
