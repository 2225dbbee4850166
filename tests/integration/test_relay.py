"""How answers cross the gateway: bytes, headers, errors, and clients that leave."""

from __future__ import annotations

import asyncio
import gzip
import json

import httpx
import pytest
from fake_engine import FakeEngine, Received, chat_answer, stream_event
from live_gateway import LiveGateway, live_gateway, until

from moongate.router import InstanceId

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]

# --- bytes ----------------------------------------------------------------------------------------


async def test_c13_a_compressed_answer_keeps_its_bytes_length_and_encoding() -> None:
    packed = gzip.compress(chat_answer("gzip"))

    async def answer(request: Received) -> None:
        await request.answer(200, packed, {"content-encoding": "gzip"})

    async with FakeEngine(answer) as engine, live_gateway([engine.url]) as gateway:
        for accepted in ("gzip", "identity", "br, zstd"):
            async with gateway.client.stream(
                "POST",
                "/v1/chat/completions",
                json={"model": "m", "messages": [{"role": "user", "content": "x"}]},
                headers={"accept-encoding": accepted},
            ) as received:
                raw = b"".join([chunk async for chunk in received.aiter_raw()])
            assert raw == packed
            assert received.headers["content-encoding"] == "gzip"
            assert received.headers["content-length"] == str(len(packed))
            assert engine.received[-1].headers["accept-encoding"] == accepted


async def test_c16_every_field_reaches_the_engine_with_its_value_and_type() -> None:
    raw = (
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "return_token_ids": true, '
        b'"chat_template_kwargs": {"enable_thinking": false}, "cache_salt": "t1", '
        b'"vllm_xargs": {"a": 1, "b": 1.0}, "x_new_2027": [1], '
        b'"tools": [{"type": "function", "function": {"name": "f"}}]}'
    )
    async with FakeEngine() as engine, live_gateway([engine.url]) as gateway:
        answer = await gateway.client.post("/v1/chat/completions", content=raw)
    assert answer.status_code == 200
    assert engine.received[0].body == raw


async def test_c18_fields_that_a_newer_engine_answers_with_pass() -> None:
    answered = (
        b'{"id":"c","prompt_routed_experts":null,"kv_cache_meta":{"a":[1.0]},"choices":[],'
        b'"usage":{"prompt_tokens":1,"prompt_tokens_details":{"new_x":2}}}'
    )

    async def answer(request: Received) -> None:
        await request.answer(200, answered)

    async with FakeEngine(answer) as engine, live_gateway([engine.url]) as gateway:
        received = await gateway.chat()
    assert (received.status_code, received.content) == (200, answered)


@pytest.mark.parametrize("stream", [False, True])
async def test_c20_numbers_that_json_has_not_pass_as_they_are(stream: bool) -> None:
    odd = (
        b'{"choices":[{"logprobs":{"top_logprobs":[-Infinity,NaN,1E400]}}],"embedding":[-Infinity]}'
    )
    streamed = b"data: " + odd + b"\n\ndata: [DONE]\n\n"

    async def answer(request: Received) -> None:
        if not stream:
            await request.answer(200, odd)
            return
        await request.start_stream()
        await request.send_chunk(streamed)
        await request.send_chunk(b"")

    looked_at = {"stream_usage": "always"}
    async with (
        FakeEngine(answer) as engine,
        live_gateway([engine.url], observability=looked_at) as gateway,
    ):
        received = await gateway.chat(stream=stream)
    assert (received.status_code, received.content) == (200, streamed if stream else odd)


async def test_c03_a_stream_keeps_its_bytes_however_the_engine_cuts_them() -> None:
    event = stream_event("北京🙂")

    async def answer(request: Received) -> None:
        await request.start_stream()
        for position in range(len(event)):
            await request.send_chunk(event[position : position + 1])
            await asyncio.sleep(0.001)
        await request.send_chunk(b"data: [DONE]\n\n")
        await request.send_chunk(b"")

    async with FakeEngine(answer) as engine, live_gateway([engine.url]) as gateway:
        received = await gateway.chat(stream=True)
    assert received.content == event + b"data: [DONE]\n\n"


async def test_c01_a_stream_that_breaks_off_ends_with_an_error_event() -> None:
    async def answer(request: Received) -> None:
        await request.start_stream()
        for text in ("a", "b", "c"):
            await request.send_chunk(stream_event(text))
        await request.send_chunk(b'data: {"half')
        await asyncio.sleep(0.05)
        request.cut()

    async with FakeEngine(answer) as engine, live_gateway([engine.url]) as gateway:
        received = await gateway.chat(stream=True)
        events = received.content.split(b"\n\n")
        assert b"".join(e + b"\n\n" for e in events[:3]) == b"".join(map(stream_event, "abc"))
        error = json.loads(events[3].removeprefix(b"data: "))["error"]
        assert error["type"] == "server_error"
        assert error["code"] == "engine_disconnected"
        assert events[4:] == [b"data: [DONE]", b""]
        assert gateway.inflight() == 0


async def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one() -> None:
    async def answer(request: Received) -> None:
        await request.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n" + b"x" * 50)
        await asyncio.sleep(0.05)
        request.cut()

    async with FakeEngine(answer) as engine, live_gateway([engine.url]) as gateway:
        with pytest.raises(httpx.RemoteProtocolError):
            await gateway.chat()
        assert gateway.inflight() == 0
    assert len(engine.received) == 1


async def test_a_stream_left_open_after_its_end_mark_is_closed() -> None:
    async def answer(request: Received) -> None:
        await request.start_stream()
        await request.send_chunk(stream_event("a") + b"data: [DONE]\n\n")
        await request.client_left.wait()

    async with FakeEngine(answer) as engine, live_gateway([engine.url]) as gateway:
        received = await asyncio.wait_for(gateway.chat(stream=True), 3.0)
        assert received.content == stream_event("a") + b"data: [DONE]\n\n"
        await asyncio.wait_for(engine.received[0].client_left.wait(), 2.0)


# --- headers --------------------------------------------------------------------------------------


async def test_c15_hop_by_hop_headers_stay_where_they_belong() -> None:
    async def answer(request: Received) -> None:
        body = chat_answer()
        await request.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: keep-alive, x-hop\r\n"
            b"x-hop: 1\r\nkeep-alive: timeout=5\r\ntransfer-encoding: chunked\r\nx-engine: 7\r\n\r\n"
        )
        await request.send_chunk(body)
        await request.send_chunk(b"")

    async with FakeEngine(answer) as engine, live_gateway([engine.url]) as gateway:
        received = await gateway.chat(
            headers={"x-hop": "2", "connection": "x-hop", "te": "trailers"}
        )
    for name in ("x-hop", "keep-alive"):
        assert name not in received.headers
    assert received.headers["x-engine"] == "7"
    sent = engine.received[0].headers
    assert "x-hop" not in sent
    assert "te" not in sent
    assert sent["host"] == engine.url.removeprefix("http://")


async def test_a_request_id_is_echoed_and_passed_on_or_made() -> None:
    async with FakeEngine() as engine, live_gateway([engine.url]) as gateway:
        given = await gateway.chat(headers={"x-request-id": "abc-1"})
        made = await gateway.chat()
        odd = await gateway.chat(headers={"x-request-id": "a b" + "x" * 200})
    assert given.headers["x-request-id"] == "abc-1" == engine.received[0].headers["x-request-id"]
    assert len(made.headers["x-request-id"]) == 32
    assert made.headers["x-request-id"] == engine.received[1].headers["x-request-id"]
    assert len(odd.headers["x-request-id"]) == 32


async def test_c98_a_clients_key_reaches_an_engine_only_where_configured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ENGINE_KEY", "b-1")
    keys = {"authorization": "Bearer gw-1", "x-api-key": "gw-1"}
    async with FakeEngine() as with_key, FakeEngine() as without:
        instances = [
            {"id": "a", "url": with_key.url, "api_key_env": "ENGINE_KEY"},
            {"id": "b", "url": without.url},
        ]
        async with live_gateway([], instances=instances, policy={"name": "round_robin"}) as gateway:
            for _ in range(2):
                await gateway.chat(headers=keys)
        forwarded = {**with_key.received[0].headers}
        assert forwarded["authorization"] == "Bearer b-1"
        assert "gw-1" not in "".join([*forwarded.values(), *without.received[0].headers.values()])
        async with live_gateway([without.url], auth={"forward_client_key": True}) as gateway:
            await gateway.chat(headers=keys)
        assert without.received[-1].headers["authorization"] == "Bearer gw-1"


async def test_what_is_for_the_kv_connector_comes_from_the_gateway_only() -> None:
    raw = b'{"model":"m", "kv_transfer_params": {"prompt_token_ids": [1]}, "messages":[{"role":"user","content":"x"}]}'
    async with FakeEngine() as engine:
        async with live_gateway([engine.url]) as gateway:
            await gateway.client.post("/v1/chat/completions", content=raw)
        allowed = {"allow_kv_transfer_params": True}
        async with live_gateway([engine.url], limits=allowed) as gateway:
            await gateway.client.post("/v1/chat/completions", content=raw)
    cut = b'{"model":"m", "messages":[{"role":"user","content":"x"}]}'
    assert [request.body for request in engine.received] == [cut, raw]


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
async def test_nothing_for_connectors_comes_by_other_ways(path: str) -> None:
    """An address to push an encoder's output to, and a text where the KV connector expects an object."""
    ask = {
        "model": "m", "messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x",
        "max_tokens": 1,
    }  # fmt: skip
    address = {"consumer_zmq": "tcp://10.0.0.1:1"}
    async with FakeEngine() as engine:
        async with live_gateway([engine.url]) as gateway:

            async def post(**fields: object) -> httpx.Response:
                return await gateway.client.post(f"/v1/{path}", json={**ask, **fields})

            for extra in ({}, {"long": "y" * 10_000}):
                await post(ec_transfer_params=address, **extra)
                assert b"10.0.0.1" not in engine.received[-1].body
                for name in ("kv_transfer_params", "ec_transfer_params"):
                    arguments = {name: "x", "more": ["z" * 5000] if extra else 1}
                    answer = await post(vllm_xargs=arguments, **extra)
                    assert answer.status_code == 400
                    assert name in answer.text
            assert len(engine.received) == 2
            assert (await post(vllm_xargs={"session_id": "s"})).status_code == 200
        async with live_gateway([engine.url], limits={"allow_kv_transfer_params": True}) as gateway:
            await post(ec_transfer_params=address)
            assert b"10.0.0.1" in engine.received[-1].body


async def test_what_can_not_be_translated_is_not_held_against_an_instance() -> None:
    odd: list[dict[str, object]] = [
        {"messages": [{"role": "user", "content": [{"type": "unknown"}]}]},
        {"messages": None},
        {"messages": [{"role": "user", "content": "x"}], "tools": True},
    ]
    async with FakeEngine() as engine:
        instances = [{"id": "a", "url": engine.url, "messages": "chat"}]
        async with live_gateway([], instances=instances) as gateway:
            for body in odd * 4:
                for path in ("/v1/messages", "/v1/messages/count_tokens"):
                    answer = await gateway.client.post(
                        path, json={"model": "m", "max_tokens": 1, **body}
                    )
                    assert answer.status_code == 400, answer.text
            assert not engine.received
            assert gateway.inflight() == 0
            listed = (await gateway.client.get("/admin/instances")).json()["instances"]
            assert [i["state"] for i in listed] == ["up"]
            assert await gateway.metric("moongate_broken_off_total") == 0
            state = gateway.core.fleet.find(InstanceId("a"))
            assert state is not None
            assert state.breaker.failures == 0


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "content_type", "body", "expected"),
    [
        (400, "application/json", b'{"error":{"code":"context_length_exceeded"}}', None),
        (422, "application/json", b'{"detail":[{"loc":["body","n"]}]}', None),
        (
            400,
            "text/plain",
            b"bad prompt\n",
            {
                "error": {
                    "message": "bad prompt",
                    "type": "invalid_request_error",
                    "param": None,
                    "code": None,
                }
            },
        ),
    ],
)
async def test_c24_an_engines_refusal_passes_with_its_status_after_one_attempt(
    status: int, content_type: str, body: bytes, expected: object
) -> None:
    async def answer(request: Received) -> None:
        await request.answer(status, body, {"content-type": content_type})

    async with (
        FakeEngine(answer) as one,
        FakeEngine(answer) as other,
        live_gateway([one.url, other.url]) as gateway,
    ):
        received = await gateway.chat(stream=True)
        assert received.status_code == status
        assert received.headers["content-type"].startswith("application/json")
        if expected is None:
            assert received.content == body
        else:
            assert received.json() == expected
        assert len(one.received) + len(other.received) == 1
        assert gateway.inflight() == 0


async def test_c28_an_unknown_model_is_told_apart_from_a_missing_one_without_any_engine() -> None:
    async with FakeEngine() as engine, live_gateway([engine.url]) as gateway:
        unknown = await gateway.chat(model="nope")
        missing = await gateway.client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}
        )
        others = [await gateway.chat(model=value) for value in (None, ["a"])]
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert unknown.json()["error"]["type"] == "invalid_request_error"
    assert [answer.status_code for answer in (missing, *others)] == [400, 400, 400]
    assert engine.received == []


async def test_c30_what_is_no_request_is_refused_clearly_without_any_engine() -> None:
    async with FakeEngine() as engine, live_gateway([engine.url]) as gateway:
        post = gateway.client.post
        chat = "/v1/chat/completions"
        answers = [
            await post(chat, content=b'{"model":'),
            await post(chat, content=b""),
            await post(chat, content=b"[]"),
            await gateway.client.get(chat),
            await post("/v1/nope", content=b"{}"),
            await post(chat, content=b'{"model": "\xff"}'),
        ]
        statuses = [answer.status_code for answer in answers]
        assert statuses == [400, 400, 400, 405, 404, 400]
        for answer in answers:
            error = answer.json()["error"]
            assert error["message"]
            assert "Traceback" not in answer.text
        assert answers[3].headers["allow"] == "POST"
        assert await gateway.metric("moongate_inflight_requests") == 0
    assert engine.received == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"stream": "yes"}, "stream"),
    ],
)
async def test_wrong_types_are_named(fields: dict[str, object], param: str) -> None:
    async with FakeEngine() as engine, live_gateway([engine.url]) as gateway:
        answer = await gateway.chat(**fields)  # type: ignore[arg-type]
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert engine.received == []


async def test_a_key_given_twice_that_decides_the_route_is_refused() -> None:
    nested = b'{"model":"m","messages":[{"role":"user","content":"a"}],"metadata":{"model":"x"}}'
    twice = b'{"model":"m","model":"m","messages":[{"role":"user","content":"a"}]}'
    async with FakeEngine() as engine, live_gateway([engine.url]) as gateway:
        fine = await gateway.client.post("/v1/chat/completions", content=nested)
        refused = await gateway.client.post("/v1/chat/completions", content=twice)
    assert fine.status_code == 200
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "model"


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_refused_and_nothing_forwarded(chunked: bool) -> None:
    body = b'{"model":"m","x":"' + b"a" * 33_000_000 + b'"}'

    async def pieces() -> object:  # without a length, so that it has to be counted
        for start in range(0, len(body), 1_000_000):
            yield body[start : start + 1_000_000]

    async with (
        FakeEngine() as engine,
        live_gateway([engine.url], limits={"body_bytes_max": 32_000_000}) as gateway,
    ):
        content = pieces() if chunked else body
        try:
            answer = await gateway.client.post("/v1/chat/completions", content=content)  # type: ignore[arg-type]
        except (httpx.WriteError, httpx.ReadError):
            return  # refused so early that the rest could not be sent
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"
        assert gateway.inflight() == 0
    assert engine.received == []


async def test_c19_a_lone_surrogate_passes_byte_for_byte() -> None:
    lone = rb'{"model":"m","messages":[{"role":"user","content":"x \ud83d y"}]}'
    pair = rb'{"model":"m","messages":[{"role":"user","content":"x \ud83d\ude42 y"}]}'
    async with FakeEngine() as engine, live_gateway([engine.url]) as gateway:
        for raw in (lone, pair):
            answer = await gateway.client.post("/v1/chat/completions", content=raw)
            assert answer.status_code == 200
    assert [request.body for request in engine.received] == [lone, pair]


# --- clients that leave ---------------------------------------------------------------------------


async def leave_after(gateway: LiveGateway, seconds: float, **body: object) -> None:
    """Send a request and close the connection after a while."""
    with pytest.raises((httpx.TimeoutException, TimeoutError)):
        await asyncio.wait_for(gateway.chat(**body), seconds)  # type: ignore[arg-type]


@pytest.mark.parametrize("stream", [False, True])
async def test_c07_a_client_that_leaves_before_the_first_byte_ends_the_engines_work(
    stream: bool,
) -> None:
    async def answer(request: Received) -> None:
        await asyncio.wait_for(request.client_left.wait(), 20.0)

    async with FakeEngine(answer) as engine, live_gateway([engine.url]) as gateway:
        await leave_after(gateway, 0.3, stream=stream, max_tokens=2000)
        await asyncio.wait_for(engine.received[0].client_left.wait(), 2.0)
        await until(lambda: gateway.inflight() == 0)
        assert await gateway.metric("moongate_requests_total", code="499") == 1
        assert await gateway.metric("moongate_retries_total") == 0
        assert await gateway.metric("moongate_instance_up", instance="a") == 1


async def test_a_client_that_leaves_in_the_stream_ends_the_engines_work() -> None:
    async def answer(request: Received) -> None:
        await request.start_stream()
        while not request.client_left.is_set():
            await request.send_chunk(stream_event("x"))
            await asyncio.sleep(0.02)

    async with FakeEngine(answer) as engine, live_gateway([engine.url]) as gateway:
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
        async with gateway.client.stream("POST", "/v1/chat/completions", json=body) as received:
            async for _ in received.aiter_raw():
                break
        await asyncio.wait_for(engine.received[0].client_left.wait(), 2.0)
        await until(lambda: gateway.inflight() == 0)


async def test_c101_a_path_reaches_the_engine_as_the_table_spells_it_or_not_at_all() -> None:
    async with FakeEngine() as engine, live_gateway([engine.url]) as gateway:
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        fine = await gateway.client.post("/v1/%63hat/completions?a=%20b", json=body)
        assert fine.status_code == 200
        for path in ("/reset_prefix_cache", "/sleep", "//v1/models", "/v1/../sleep", "/V1/models"):
            assert (await gateway.client.post(path, json=body)).status_code in (404, 405)
    assert [request.path for request in engine.received] == ["/v1/chat/completions?a=%20b"]


async def test_every_answer_has_a_request_id() -> None:
    async with FakeEngine() as engine, live_gateway([engine.url]) as gateway:
        for path in ("/health", "/v1/models", "/metrics", "/nope", "/v1/chat/completions"):
            given = await gateway.client.get(path, headers={"x-request-id": "abc-1"})
            assert given.headers.get_list("x-request-id") == ["abc-1"], path
            assert (await gateway.client.get(path)).headers["x-request-id"]
