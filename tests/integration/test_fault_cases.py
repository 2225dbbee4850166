"""What docs/fault-cases.md promises beyond what the tests of single parts look at."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from agent_clients import percentile, problem_of_error
from fake_engine import FakeEngine, Received, chat_answer, stream_event
from live_gateway import live_gateway, until
from processes import start_gateway
from raw_client import get, post, raw_client

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]

MODEL_MISSING_S = 0.05
ADDED_BY_A_MISSING_TOKENIZER_S = 0.03
LISTED_S = 0.5


async def take(stream: AsyncIterator[Any], told: list[Any]) -> None:
    async for chunk in stream:
        told.append(chunk.choices[0])  # noqa: PERF401 -- what came before an error counts


async def test_c01_an_sdk_takes_a_broken_stream_for_an_error() -> None:
    async def answer(request: Received) -> None:
        await request.start_stream()
        for text in ("a", "b", "c"):
            await request.send_chunk(stream_event(text))
        await asyncio.sleep(0.05)
        request.cut()

    async with FakeEngine(answer) as engine, live_gateway([engine.url]) as gateway:
        async with openai.AsyncOpenAI(
            base_url=f"{gateway.url}/v1", api_key="x", max_retries=0
        ) as client:
            told: list[Any] = []
            stream = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x"}], stream=True
            )
            with pytest.raises(openai.APIError, match="broke its answer off"):
                await take(stream, told)
        assert [choice.delta.content for choice in told] == ["a", "b", "c"]
        assert {choice.finish_reason for choice in told} == {None}
        assert await gateway.metric("moongate_broken_off_total", instance="a") == 1
        assert await gateway.metric("moongate_inflight_requests") == 0


HOP_BY_HOP = {
    "connection": "keep-alive, x-hop",
    "x-hop": "1",
    "keep-alive": "timeout=5",
    "te": "trailers",
    "trailer": "x-sum",
    "upgrade": "h2c",
    "proxy-authenticate": "Basic",
    "proxy-authorization": "Basic eA==",
}


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_c15_an_answer_is_framed_once_and_brings_nothing_of_its_connection(
    is_chunked: bool,
) -> None:
    async def answer(request: Received) -> None:
        if not is_chunked:
            await request.answer(200, chat_answer(), HOP_BY_HOP)
            return
        lines = "".join(f"{name}: {value}\r\n" for name, value in HOP_BY_HOP.items())
        head = f"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nx-engine: 7\r\n{lines}\r\n"
        await request.send(head.encode())
        await request.send_chunk(chat_answer())
        await request.send_chunk(b"")

    async with (
        FakeEngine(answer) as engine,
        live_gateway([engine.url]) as gateway,
        raw_client(gateway.port) as client,
    ):
        await client.send(post(framing=None))
        answered = await client.answer()
        assert answered.body == chat_answer()
        assert not set(HOP_BY_HOP) & set(answered.headers)
        assert len({"content-length", "transfer-encoding"} & set(answered.headers)) == 1
        # The connection itself is not harmed by what the engine said of its own.
        await client.send(get("/health"))
        assert (await client.answer()).status == 200


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", rb'"messages":[{"role":"user","content":"x %b y"}]'),
        ("/v1/completions", rb'"prompt":"x %b y"'),
        ("/v1/messages", rb'"max_tokens":9,"messages":[{"role":"user","content":"x %b y"}]'),
        ("/v1/responses", rb'"input":"x %b y"'),
    ],
)
async def test_c19_half_a_character_harms_nobody_on_any_route(path: str, field: bytes) -> None:
    async with FakeEngine() as engine, live_gateway([engine.url]) as gateway:
        for code in (rb"\ud83d", rb"\ud83d\ude42"):
            raw = b'{"model":"m",' + field % code + b"}"
            answer = await gateway.client.post(path, content=raw)
            assert answer.status_code == 200
            assert engine.received[-1].body == raw
        assert await gateway.metric("moongate_retries_total") == 0
        assert await gateway.metric("moongate_instance_up", instance="a") == 1


async def test_c28_a_model_that_is_none_is_told_in_an_instant_and_in_one_shape() -> None:
    async with FakeEngine() as engine, live_gateway([engine.url]) as gateway:
        took: list[float] = []
        for model in ("nope", None, ["a"], 7):
            for _ in range(3):
                began = time.perf_counter()
                answer = await gateway.chat(model=model)
                took.append(time.perf_counter() - began)
                assert problem_of_error(answer.json()) is None
                assert answer.json()["error"]["param"] == "model"
        assert sorted(took)[len(took) // 2] < MODEL_MISSING_S
    assert engine.received == []


async def test_c30_whatever_is_wrong_is_told_in_one_shape() -> None:
    async with FakeEngine() as engine, live_gateway([engine.url]) as gateway:
        client, chat = gateway.client, "/v1/chat/completions"
        answers = [
            await client.post(chat, content=b'{"model":'),
            await client.post(chat, content=b""),
            await client.post(chat, content=b"[]"),
            await client.post(chat, content=b'{"model": "\xff"}'),
            await client.post(chat, json={"model": "m"}),
            await client.get(chat),
            await client.delete(chat),
            await client.post("/v1/nope", content=b"{}"),
            await client.get("/nope"),
        ]
        statuses = [answer.status_code for answer in answers]
        assert statuses == [400] * 5 + [405] * 2 + [404] * 2
        for answer in answers:
            assert answer.headers["content-type"] == "application/json"
            assert answer.headers["x-request-id"]
            assert problem_of_error(answer.json()) is None
    assert engine.received == []


async def test_c90_sigterm_lets_answers_end_that_are_no_streams(tmp_path: Path) -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def answer(request: Received) -> None:
        if request.json().get("stream"):
            await request.start_stream()
            await request.send_chunk(stream_event("a"))
            begun.set()
            await may_end.wait()
            await request.send_chunk(stream_event("b") + b"data: [DONE]\n\n")
            await request.send_chunk(b"")
        else:
            await may_end.wait()
            await request.answer(200, chat_answer())

    async with FakeEngine(answer) as engine:
        settings = {"instances": [{"id": "a", "url": engine.url}], "drain": {"limit_s": 20.0}}
        gateway = await asyncio.to_thread(start_gateway, tmp_path, settings)
        try:
            body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
            url = f"{gateway.url}/v1/chat/completions"
            async with httpx.AsyncClient(timeout=20, trust_env=False) as client:
                asking = [
                    asyncio.create_task(client.post(url, json={**body, "stream": is_stream}))
                    for is_stream in (True, False)
                ]
                await begun.wait()
                await until(lambda: len(engine.received) == 2)
                gateway.process.terminate()
                await asyncio.sleep(0.3)
                async with httpx.AsyncClient(timeout=2, trust_env=False) as another:
                    with pytest.raises(httpx.TransportError):
                        await another.get(f"{gateway.url}/ready")
                may_end.set()
                stream, whole = await asyncio.gather(*asking)
            assert stream.content == stream_event("a") + stream_event("b") + b"data: [DONE]\n\n"
            assert (whole.status_code, whole.content) == (200, chat_answer())
            assert await asyncio.to_thread(gateway.process.wait, 10) == 0
        finally:
            await asyncio.to_thread(gateway.kill)


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
async def test_c98_an_engine_without_a_key_is_sent_none(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_KEY", "b-1")
    async with FakeEngine() as with_key, FakeEngine() as without:
        instances = [
            {"id": "a", "url": with_key.url, "api_key_env": "ENGINE_KEY"},
            {"id": "b", "url": without.url},
        ]
        async with live_gateway([], instances=instances, policy={"name": "round_robin"}) as gateway:
            for _ in range(2):
                await gateway.chat(headers={name: "Bearer gw-1"})
        keyed, keyless = with_key.received[0].headers, without.received[0].headers
        assert keyed["authorization"] == "Bearer b-1"
        assert "x-api-key" not in keyed
        assert not {"authorization", "x-api-key"} & set(keyless)
        assert "gw-1" not in "".join([*keyed.values(), *keyless.values()])


@pytest.mark.parametrize(
    "path",
    [
        "/reset_prefix_cache", "/sleep", "/wake_up", "/is_sleeping", "/collective_rpc",
        "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/scale_elastic_ep", "/pause", "/resume",
        "//v1/models", "/v1/../sleep", "/V1/models", "/v1/chat/completions/../../../sleep",
        "/v1/%2e%2e/sleep", "/version", "/server_info", "/kv_event_sources",
    ],
)  # fmt: skip
async def test_c101_what_an_engine_has_for_its_operators_is_not_reached(path: str) -> None:
    async with (
        FakeEngine() as engine,
        live_gateway([engine.url]) as gateway,
        raw_client(gateway.port) as client,
    ):
        for request in (post(path=path), get(path), post(b"", path=path, method="DELETE")):
            await client.send(request)
            answer = await client.answer()
            assert answer.status in (404, 405), answer
            assert problem_of_error(answer.json()) is None
    assert engine.received == []


@pytest.mark.parametrize("origin", ["", "origin: http://[::"])
async def test_a_host_that_is_none_is_refused_and_no_bug(origin: str) -> None:
    body_headers = ("content-type: application/json", origin)
    request = post(b"{}", *body_headers, path="/admin/instances")
    async with (
        FakeEngine() as engine,
        live_gateway([engine.url]) as gateway,
        raw_client(gateway.port) as client,
    ):
        await client.send(request.replace(b"host: gateway", b"host: [::"))
        answer = await client.answer()
    assert answer.status == 400
    assert problem_of_error(answer.json()) is None


async def test_c106_a_tokenizer_that_is_nowhere_costs_no_request_and_no_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "moongate")

    async def median_s(mode: str) -> float:
        async with FakeEngine() as engine:
            engine.models = [{"id": "m", "object": "model", "root": "an/alias", "parent": None}]
            async with live_gateway([engine.url], tokenizer={"mode": mode}) as gateway:
                took = []
                for n in range(50):
                    began = time.perf_counter()
                    assert (await gateway.chat(content=f"prompt {n}")).status_code == 200
                    took.append(time.perf_counter() - began)
                assert (await gateway.client.get("/ready")).status_code == 200
        return percentile(took, 0.5)

    without, with_alias = await median_s("off"), await median_s("auto")
    assert with_alias - without <= ADDED_BY_A_MISSING_TOKENIZER_S
    told = [record for record in caplog.records if "an/alias" in record.getMessage()]
    assert len(told) <= 1, "one attempt is one line"


async def test_c113_models_are_listed_at_once_whatever_some_instances_do() -> None:
    async def hang(request: Received) -> None:
        await request.client_left.wait()

    async with FakeEngine(model="m1") as a, FakeEngine(model="m2") as slow:
        slow.side_calls["/v1/models"] = hang
        dead = {"id": "c", "url": "http://127.0.0.1:9"}
        instances: list[dict[str, Any]] = [
            dead, {"id": "a", "url": a.url}, {"id": "b", "url": slow.url},
        ]  # fmt: skip
        async with live_gateway([], instances=instances, wait_ready=False) as gateway:
            await until(lambda: sum(i.is_healthy for i in gateway.core.fleet) >= 1)
            began = time.perf_counter()
            listed = await gateway.client.get("/v1/models")
            assert time.perf_counter() - began < LISTED_S
            assert [card["id"] for card in listed.json()["data"]] == ["m1"]
    instances = [dead]
    async with live_gateway([], instances=instances, wait_ready=False) as gateway:
        none = await gateway.client.get("/v1/models")
        assert none.status_code == 503
        assert json.loads(none.content)["error"]["code"] == "no_instance"
