"""Clients' connections, byte by byte: what is one request, what is none, and who has left.

On the server's own event loop. Where cases differ in bytes only they share a gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_engine import FakeEngine, Received, chat_answer, stream_event
from live_gateway import LiveGateway, live_gateway, until
from raw_client import (
    CHAT_BODY,
    STREAM_BODY,
    RawClient,
    chunked,
    get,
    post,
    raw_client,
)
from raw_server import Peer, RawServer

from moongate.gateway.client_protocol import DISCARD_S, ClientProtocol
from moongate.gateway.server import KEEP_ALIVE_S

pytestmark = [
    pytest.mark.asyncio(loop_factories=["uvloop"]),
    pytest.mark.timeout(20),
]

CHUNKED = "transfer-encoding: chunked"
DONE = b"data: [DONE]\n\n"


@pytest.fixture(autouse=True)
def _discards_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DISCARD_S == 1.0
    monkeypatch.setattr("moongate.gateway.client_protocol.DISCARD_S", 0.03)


@contextlib.asynccontextmanager
async def connected(
    handler: Any = None, *, receive_bytes: int | None = None, **settings: Any
) -> AsyncIterator[tuple[RawClient, FakeEngine, LiveGateway]]:
    """Run an engine, a gateway before it and a client of that."""
    async with (
        FakeEngine(*[handler] if handler is not None else []) as engine,
        live_gateway([engine.url], **settings) as gateway,
        raw_client(gateway.port, receive_bytes=receive_bytes) as client,
    ):
        yield client, engine, gateway


def protocols(gateway: LiveGateway) -> list[ClientProtocol]:
    """Return the gateway's sides of its connections."""
    return list(gateway.server._server.server_state.connections)  # type: ignore[arg-type]


async def assert_refused(client: RawClient, status: int, code: str) -> None:
    """Check that there is one answer, an error object, and then the connection's end."""
    answer = await client.answer()
    assert (answer.status, answer.code, answer.closes) == (status, code, True)
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    assert await client.rest() == b""


# --- what could be two requests -------------------------------------------------------------------

HIDDEN = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"


AMBIGUOUS = [
    f"content-length: 4\r\n{CHUNKED}",
    f"{CHUNKED}\r\ncontent-length: 4",
    "content-length: 4\r\ncontent-length: 4",
    "content-length: 4\r\ncontent-length: 40",
    "content-length: 4, 4",
    "content-length: +4",
    "content-length: 0x4",
    "content-length: 4 4",
    "content-length : 4",
    "content-length: 99999999999999999999999999",
    "transfer-encoding : chunked",
    "transfer-encoding: xchunked",
    "transfer-encoding: identity",
    "transfer-encoding: chunked, identity",
    "transfer-encoding: chunked\r\ntransfer-encoding: identity",
    "transfer-encoding: \x0bchunked",
    "transfer-encoding:\r\n chunked",
    "x: a\r\n transfer-encoding: chunked",
    "x: a\ntransfer-encoding: chunked",
    "x: a\rtransfer-encoding: chunked",
    "x: a\x00b",
    "no colon",
    ": no name",
    "content-length: 4\n\r",
]


async def test_a_request_that_could_be_read_in_two_ways_is_refused() -> None:
    async with FakeEngine() as engine, live_gateway([engine.url]) as gateway:
        for framing in AMBIGUOUS:
            async with raw_client(gateway.port) as client:
                await client.send(post(b"0\r\n\r\n" + HIDDEN, framing=framing))
                await assert_refused(client, 400, "invalid_request")
        assert engine.received == []
        assert await gateway.metric("moongate_requests_total", code="400") == len(AMBIGUOUS)


HOST = b"host: gateway\r\n"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/admin/instances", "/health"])
@pytest.mark.parametrize(
    ("hosts", "status"),
    [
        ((), 400),
        (("gateway", "gateway"), 400),
        (("gateway", "other"), 400),
        (("user@gateway",), 400),
        (("gateway/v1",), 400),
        (("gate way",), 400),
        (("gateway:x",), 400),
        (("[::",), 400),
        (("",), 200),
        (("gateway:8000",), 200),
        (("[::1]:8000",), 200),
        (("a_b.example",), 200),
    ],
)
async def test_a_request_names_one_host(path: str, hosts: tuple[str, ...], status: int) -> None:
    lines = b"".join(f"host: {host}\r\n".encode() for host in hosts)
    request = post() if path.startswith("/v1/") else get(path)
    request = request.replace(b"/v1/chat/completions", path.encode())
    async with connected() as (client, engine, _):
        await client.send(request.replace(HOST, lines))
        if status == 400:
            await assert_refused(client, 400, "invalid_request")
            assert engine.received == []
        else:
            assert (await client.answer()).status == 200


async def test_before_http_1_1_no_host_had_to_be_named() -> None:
    async with connected() as (client, _, _):
        await client.send(post(version="1.0").replace(HOST, b""))
        assert (await client.answer()).status == 200
    async with connected() as (client, _, _):
        await client.send(post(version="1.0").replace(HOST, HOST + HOST))
        await assert_refused(client, 400, "invalid_request")


@pytest.mark.parametrize(
    ("codings", "version", "status", "code"),
    [
        (("gzip, chunked",), "1.1", 501, "not_implemented"),
        (("gzip", "chunked"), "1.1", 501, "not_implemented"),
        (("Chunked , CHUNKED",), "1.1", 400, "invalid_request"),
        (("chunked", "chunked"), "1.1", 400, "invalid_request"),
        (("chunked",), "1.0", 400, "invalid_request"),
    ],
)
async def test_a_body_comes_in_chunks_and_is_coded_in_no_other_way(
    codings: tuple[str, ...], version: str, status: int, code: str
) -> None:
    framing = "\r\n".join(f"transfer-encoding: {coding}" for coding in codings)
    async with connected() as (client, engine, _):
        await client.send(post(chunked(CHAT_BODY) + HIDDEN, framing=framing, version=version))
        await assert_refused(client, status, code)
        assert engine.received == []


async def test_chunks_may_be_named_in_capitals() -> None:
    async with connected() as (client, _, _):
        await client.send(post(chunked(CHAT_BODY), framing="transfer-encoding:  CHUNKED "))
        assert (await client.answer()).status == 200


@pytest.mark.parametrize("version", ["2.0", "0.9"])
async def test_only_http_1_is_spoken(version: str) -> None:
    async with connected() as (client, engine, _):
        await client.send(post(version=version))
        await assert_refused(client, 505, "version_not_supported")
        assert engine.received == []


NO_REQUESTS = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    b"SSH-2.0-x\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"POST /v1/chat/completions\r\n\r\n",
    b"POST /v1/chat/completions HTTP/3.1\r\n\r\n",
    b"POST /v1/chat/completions?a b HTTP/1.1\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\nhost: x\n\n",
    b"CONNECT example.org:443 HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET http://example.org HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET * HTTP/1.1\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\n\r\n",
    b"GET //[ HTTP/1.1\r\n\r\n",
]


async def test_what_is_no_request_is_refused() -> None:
    async with FakeEngine() as engine, live_gateway([engine.url]) as gateway:
        for data in NO_REQUESTS:
            async with raw_client(gateway.port) as client:
                await client.send(data)
                answer = await client.answer()
                assert answer.status in (400, 404, 405, 505)
                assert answer.code
                if answer.status in (400, 505):
                    assert answer.closes
                    assert await client.rest() == b""
        assert engine.received == []


WRONG_BODIES = [
    b"38\r\n" + CHAT_BODY + b"\r\nwrong\r\n",
    b"38\r\n" + CHAT_BODY + b"WRONG",
    b"38\n" + CHAT_BODY + b"\n0\n\n",
    b"-1\r\n",
    b"fffffffffffffffff\r\n",
    b"38\r\n" + CHAT_BODY + b"\r\n0\r\nno colon\r\n\r\n",
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/admin/explain", "/v1/nope"])
@pytest.mark.parametrize("cut", [False, True])
async def test_a_body_that_goes_wrong_is_refused_and_not_forwarded(path: str, cut: bool) -> None:
    assert len(CHAT_BODY) == 0x38
    expected = (400, 404) if path == "/v1/nope" else (400,)
    async with FakeEngine() as engine, live_gateway([engine.url]) as gateway:
        for body in WRONG_BODIES:
            pieces = [post(b"", path=path, framing=CHUNKED), body + HIDDEN]
            async with raw_client(gateway.port) as client:
                await client.send(*pieces if cut else [b"".join(pieces)], pause_s=0.02)
                answer = await client.answer()
                assert answer.status in expected
                assert answer.closes or answer.status == 404  # before its body came
                assert await client.rest() == b""
        assert engine.received == []


async def test_a_refusal_is_the_only_answer_to_all_that_came_with_it() -> None:
    async with connected(limits={"body_bytes_max": 1024}) as (client, engine, _):
        await client.send(post(b"x" * 2000) + post() + b"garbage\r\n\r\n" + b"y" * 100_000)
        await assert_refused(client, 413, "body_too_large")
        assert engine.received == []


async def test_headers_that_are_too_large_are_the_only_thing_refused() -> None:
    async with connected(limits={"headers_bytes_max": 1024}) as (client, engine, _):
        await client.send(post(CHAT_BODY, "x: " + "a" * 2000) + b"garbage\r\n\r\n")
        await assert_refused(client, 431, "headers_too_large")
        assert engine.received == []


# --- pipelining -----------------------------------------------------------------------------------


async def answer_slowly(request: Received) -> None:
    await asyncio.sleep(0.1)
    await request.answer(200, chat_answer())


async def stream_slowly(request: Received) -> None:
    await request.start_stream()
    for _ in range(3):
        await request.send_chunk(stream_event("x"))
        await asyncio.sleep(0.05)
    await request.send_chunk(DONE)
    await request.send_chunk(b"")


@pytest.mark.parametrize("cut", [False, True])
async def test_a_second_request_before_the_first_answer_is_not_answered(cut: bool) -> None:
    async with FakeEngine(answer_slowly) as engine, live_gateway([engine.url]) as gateway:
        for second in (post(), get("/health"), b"garbage\r\n\r\n"):
            async with raw_client(gateway.port) as client:
                await client.send(*[post(), second] if cut else [post() + second], pause_s=0.02)
                answer = await client.answer()
                assert (answer.status, answer.body, answer.closes) == (200, chat_answer(), True)
                assert await client.rest() == b""
        assert len(engine.received) == 3


async def test_a_second_request_that_is_not_complete_yet_may_still_be_answered() -> None:
    async with connected(answer_slowly) as (client, engine, _):
        await client.send(post() + post()[:20])
        assert (await client.answer()).body == chat_answer()
        await client.send(post()[20:])
        assert (await client.answer()).body == chat_answer()
        assert len(engine.received) == 2


async def test_a_second_request_leaves_a_stream_that_has_begun_whole() -> None:
    async with connected(stream_slowly) as (client, engine, _):
        await client.send(post(STREAM_BODY))
        status, headers = await client.head()
        assert (status, headers["transfer-encoding"]) == (200, "chunked")
        await client.send(post())
        received = b"".join([piece async for piece in client.chunks()])
        assert received == stream_event("x") * 3 + DONE
        assert await client.rest() == b""
        assert len(engine.received) == 1


async def test_a_proxied_request_behind_one_for_operators_never_reaches_an_engine() -> None:
    explained = post(path="/admin/explain")
    async with connected() as (client, engine, _):
        await client.send(explained + post(b'{"model":"other"}'))
        answer = await client.answer()
        assert answer.status == 200  # of its own body, without the other's
        assert answer.closes
        assert await client.rest() == b""
        assert engine.received == []


# --- one connection for all -----------------------------------------------------------------------


async def test_a_connection_serves_operators_and_clients_in_turn() -> None:
    async with connected() as (client, engine, gateway):
        for _ in range(3):
            for request, expected in (
                (get("/health"), 200),
                (post(), 200),
                (get("/v1/models"), 200),
                (post(STREAM_BODY), 200),
                (post(b"{"), 400),
                (get("/v1/nope"), 404),
                (post(path="/admin/explain"), 200),
                (get("/v1/chat/completions"), 405),
            ):
                await client.send(request)
                answer = await client.answer()
                assert (answer.status, answer.closes) == (expected, False)
        assert len(engine.received) == 6
        assert len(protocols(gateway)) >= 1


async def test_a_request_may_come_byte_by_byte() -> None:
    async with connected() as (client, engine, _):
        data = post(b"", framing=CHUNKED) + chunked(CHAT_BODY[:20], CHAT_BODY[20:])
        await client.send(*(data[n : n + 1] for n in range(len(data))), pause_s=0.0001)
        assert (await client.answer()).body == chat_answer()
        assert engine.received[0].body == CHAT_BODY


async def test_an_answer_without_a_body_leaves_the_connection_in_step() -> None:
    async def no_content(request: Received) -> None:
        await request.send(b"HTTP/1.1 204 No Content\r\n\r\n")

    async with connected(no_content) as (client, _, _):
        await client.send(post())
        assert (await client.answer()).status == 204
        await client.send(get("/health"))
        assert (await client.answer()).json() == {"status": "ok"}


async def test_an_answer_without_a_body_has_no_length_whatever_the_engine_says() -> None:
    async def no_content(request: Received) -> None:
        await request.send(b"HTTP/1.1 204 No Content\r\ncontent-length: 5\r\nx-a: b\r\n\r\n")

    async with connected(no_content) as (client, _, _):
        await client.send(post())
        answer = await client.answer()
        assert (answer.status, answer.headers["x-a"]) == (204, "b")
        assert not {"content-length", "transfer-encoding"} & answer.headers.keys()
        await client.send(get("/health"))
        assert (await client.answer()).json() == {"status": "ok"}


async def test_a_head_request_is_refused_without_a_body() -> None:
    async with connected() as (client, _, _):
        await client.send(b"HEAD /v1/chat/completions HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = await client.answer(has_body=False)
        assert (answer.status, answer.headers["allow"]) == (405, "POST")
        await client.send(get("/health"))
        assert (await client.answer()).json() == {"status": "ok"}


async def test_empty_lines_before_a_request_mean_nothing() -> None:
    async with connected() as (client, engine, _):
        for _ in range(2):
            await client.send(b"\r\n\r\n" + post())
            assert (await client.answer()).status == 200
        assert len(engine.received) == 2


async def test_c108_an_idle_connection_serves_again_for_as_long_as_clients_keep_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert KEEP_ALIVE_S >= 75
    monkeypatch.setattr("moongate.gateway.server.KEEP_ALIVE_S", 0.4)
    async with connected() as (client, _, _):
        for _ in range(2):
            await client.send(post())
            assert (await client.answer()).status == 200
            await asyncio.sleep(0.2)
        assert await client.rest() == b""


# --- bodies in chunks -----------------------------------------------------------------------------


async def test_chunks_reach_the_engine_as_one_body_with_its_length() -> None:
    async with connected() as (client, engine, _):
        data = post(b"", framing=CHUNKED) + chunked(
            *(CHAT_BODY[n : n + 7] for n in range(0, 56, 7))
        )
        await client.send(data)
        assert (await client.answer()).status == 200
        received = engine.received[0]
        assert received.body == CHAT_BODY
        assert received.headers["content-length"] == str(len(CHAT_BODY))
        assert "transfer-encoding" not in received.headers


async def test_extensions_of_chunks_are_passed_over() -> None:
    body = b'38;a=1;b="2;3"\r\n' + CHAT_BODY + b"\r\n0;last\r\n\r\n"
    async with connected() as (client, engine, _):
        await client.send(post(b"", framing=CHUNKED) + body)
        assert (await client.answer()).status == 200
        assert engine.received[0].body == CHAT_BODY


@pytest.mark.parametrize("cut", [False, True])
async def test_trailers_are_no_headers(cut: bool) -> None:
    trailers = b"x-evil: 1\r\nx-session-id: s\r\nx-request-id: evil\r\nexpect: 100-continue\r\n"
    data = post(b"", "x-good: 1", framing=CHUNKED) + chunked(CHAT_BODY, trailers=trailers)
    pieces = [data[n : n + 1] for n in range(len(data))] if cut else [data]
    async with connected() as (client, engine, _):
        for _ in range(2):
            await client.send(*pieces, pause_s=0.0001 if cut else 0)
            answer = await client.answer()
            assert answer.status == 200
            assert answer.headers["x-request-id"] != "evil"
        for received in engine.received:
            assert received.headers["x-good"] == "1"
            assert not {"x-evil", "x-session-id", "expect"} & received.headers.keys()
            assert received.body == CHAT_BODY


async def test_trailers_without_end_are_refused() -> None:
    async with connected(limits={"headers_bytes_max": 4096}) as (client, engine, _):
        await client.send(post(b"", framing=CHUNKED) + b"38\r\n" + CHAT_BODY + b"\r\n0\r\n")
        await flood(client, b"x: " + b"a" * 500 + b"\r\n")
        await assert_refused(client, 431, "headers_too_large")
        assert engine.received == []


async def test_large_chunks_are_no_trailers() -> None:
    body = CHAT_BODY[:-1] + b',"x":"' + b"a" * 3_000_000 + b'"}'
    pieces = [body[n : n + 10_000] for n in range(0, len(body), 10_000)]
    async with connected(limits={"headers_bytes_max": 1024}) as (client, engine, _):
        await client.send(post(b"", framing=CHUNKED))
        for piece in pieces:  # each packet ends where the next chunk has begun
            await client.send(b"%x\r\n" % len(piece))
            await client.send(piece + b"\r\n")
        await client.send(b"0\r\n\r\n")
        assert (await client.answer()).status == 200
        assert engine.received[0].body == body


async def test_small_chunks_do_not_take_many_times_their_bytes() -> None:
    body = CHAT_BODY[:-1] + b',"x":"' + b"a" * 100_000 + b'"}'
    async with connected() as (client, engine, gateway):
        await client.send(post(b"", framing=CHUNKED))
        data = chunked(*(body[n : n + 2] for n in range(0, len(body), 2)))
        await client.send(data[:-5])
        await asyncio.sleep(0.2)
        gathered = [p.cycle._gathered for p in protocols(gateway) if hasattr(p.cycle, "_gathered")]
        assert [len(held) for held in gathered] == [len(body)]
        await client.send(data[-5:])
        assert (await client.answer()).status == 200
        assert engine.received[0].body == body


# --- another protocol is offered ------------------------------------------------------------------

OFFER = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABk")
"""Java's client sends this with every request that isn't encrypted."""


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_an_offer_of_another_protocol_is_passed_over(is_chunked: bool) -> None:
    if is_chunked:
        head, body = post(b"", *OFFER, framing=CHUNKED), chunked(CHAT_BODY[:9], CHAT_BODY[9:])
    else:
        head, body = post(CHAT_BODY, *OFFER)[: -len(CHAT_BODY)], CHAT_BODY
    data = head + body
    cuts = ([data], [head, body], [data[n : n + 1] for n in range(len(data))])
    async with FakeEngine() as engine, live_gateway([engine.url]) as gateway:
        for pieces in cuts:
            async with raw_client(gateway.port) as client:
                await client.send(*pieces, pause_s=0.0001)
                answer = await client.answer()
                assert (answer.status, answer.body, answer.closes) == (200, chat_answer(), True)
                assert await client.rest() == b""
        assert [request.body for request in engine.received] == [CHAT_BODY] * 3
        for request in engine.received:
            assert not {"upgrade", "http2-settings", "connection"} & request.headers.keys()


async def test_a_body_behind_an_offer_is_no_request() -> None:
    head = post(HIDDEN, *OFFER)[: -len(HIDDEN)]
    async with FakeEngine() as engine, live_gateway([engine.url]) as gateway:
        for pieces in ([head + HIDDEN], [head, HIDDEN], [head, HIDDEN[:9], HIDDEN[9:]]):
            async with raw_client(gateway.port) as client:
                await client.send(*pieces, pause_s=0.02)
                await assert_refused(client, 400, "invalid_request")
        assert engine.received == []


async def test_what_comes_behind_an_offers_body_is_not_answered() -> None:
    async with connected(answer_slowly) as (client, engine, _):
        await client.send(post(CHAT_BODY, *OFFER) + post())
        assert (await client.answer()).body == chat_answer()
        assert await client.rest() == b""
        assert [request.body for request in engine.received] == [CHAT_BODY]


async def test_a_body_behind_an_offer_has_the_same_limit() -> None:
    async with connected(limits={"body_bytes_max": 1024}) as (client, engine, _):
        await client.send(post(b"", *OFFER, framing=CHUNKED) + chunked(*[b"x" * 100] * 20))
        await assert_refused(client, 413, "body_too_large")
        assert engine.received == []


async def test_operators_may_offer_another_protocol_too() -> None:
    async with connected() as (client, _, _):
        await client.send(get("/health", *OFFER))
        assert (await client.answer()).json() == {"status": "ok"}
    async with connected() as (client, _, _):
        await client.send(post(CHAT_BODY, *OFFER, path="/admin/explain"))
        assert (await client.answer()).status == 200


# --- expect ---------------------------------------------------------------------------------------


async def test_a_client_that_asks_before_it_sends_is_told_to_go_on() -> None:
    async with connected() as (client, engine, _):
        await client.send(post(CHAT_BODY, "expect: 100-continue")[: -len(CHAT_BODY)])
        assert await client.head() == (100, {})
        await client.send(CHAT_BODY)
        assert (await client.answer()).status == 200
        assert "expect" not in engine.received[0].headers
        await client.send(post())
        assert (await client.answer()).status == 200


async def test_a_client_that_asks_with_too_large_a_body_is_refused_at_once() -> None:
    async with connected(limits={"body_bytes_max": 1024}) as (client, engine, _):
        await client.send(post(b"", "expect: 100-continue", framing="content-length: 1025"))
        await assert_refused(client, 413, "body_too_large")
        assert engine.received == []


async def test_an_old_client_is_not_told_to_go_on() -> None:
    async with connected() as (client, _, _):
        await client.send(post(CHAT_BODY, "expect: 100-continue", version="1.0"))
        assert (await client.answer()).status == 200


# --- HTTP/1.0 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", ["", "connection: keep-alive"])
async def test_an_old_client_gets_a_stream_that_ends_with_the_connection(header: str) -> None:
    async with connected(stream_slowly) as (client, _, _):
        await client.send(post(STREAM_BODY, header, version="1.0"))
        answer = await client.answer()
        assert answer.body == stream_event("x") * 3 + DONE
        assert "transfer-encoding" not in answer.headers
        assert answer.closes


async def test_an_old_client_gets_an_answer_with_its_length() -> None:
    async with connected() as (client, _, _):
        await client.send(post(version="1.0"))
        answer = await client.answer()
        assert answer.headers["content-length"] == str(len(chat_answer()))
        assert (answer.body, answer.closes) == (chat_answer(), True)
        assert await client.rest() == b""


async def test_a_client_that_closes_gets_its_answer() -> None:
    async with connected(stream_slowly) as (client, _, _):
        await client.send(post(STREAM_BODY, "connection: close"))
        answer = await client.answer()
        assert (answer.body, answer.closes) == (stream_event("x") * 3 + DONE, True)
        assert await client.rest() == b""


# --- answers --------------------------------------------------------------------------------------


async def test_an_answer_with_a_length_keeps_it_and_every_byte() -> None:
    bodies = [bytes(n % 251 for n in range(size)) for size in (0, 1, 1000, 70_000, 3_000_000, 2)]
    coming = iter(bodies)

    async def answer(request: Received) -> None:
        await request.answer(200, next(coming))

    async with connected(answer) as (client, _, _):
        for body in bodies:
            await client.send(post())
            received = await client.answer()
            assert received.headers["content-length"] == str(len(body))
            assert received.body == body


async def test_an_answer_that_ends_with_its_connection_is_whole() -> None:
    async def answer(request: Received) -> None:
        await request.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + b"x" * 5000
        )
        request.writer.close()

    async with connected(answer) as (client, _, _):
        for _ in range(2):
            await client.send(post())
            assert (await client.answer()).body == b"x" * 5000


async def test_a_status_without_meaning_is_the_engines_failure() -> None:
    async def answer(request: Received) -> None:
        await request.answer(999, b"{}")

    async with connected(answer) as (client, _, _):
        await client.send(post())
        received = await client.answer()
        assert (received.status, received.code) == (502, "engine_unreachable")


async def test_a_stream_with_a_length_that_breaks_off_ends_with_its_error() -> None:
    async def answer(request: Received) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 9999\r\n\r\n"
        await request.send(head + stream_event("a"))
        await asyncio.sleep(0.02)
        request.cut()

    async with connected(answer) as (client, _, _):
        await client.send(post(STREAM_BODY))
        received = await client.answer()
        first, error, done, rest = received.body.split(b"\n\n")
        assert first + b"\n\n" == stream_event("a")
        assert json.loads(error[5:])["error"]["code"] == "engine_disconnected"
        assert (done, rest) == (b"data: [DONE]", b"")
        await client.send(get("/health"))
        assert (await client.answer()).json() == {"status": "ok"}


async def test_an_encoded_stream_passes_as_it_comes() -> None:
    pieces = [b"\x1f\x8b\x08\x00", b"no event's end", b"\n\nhere"]
    has_first = asyncio.Event()

    async def answer(request: Received) -> None:
        await request.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: gzip\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        await request.send_chunk(pieces[0])
        await has_first.wait()
        for piece in (*pieces[1:], b""):
            await request.send_chunk(piece)

    async with connected(answer) as (client, _, _):
        await client.send(post(STREAM_BODY))
        assert (await client.head())[1]["content-encoding"] == "gzip"
        received = []
        async for piece in client.chunks():
            received.append(piece)
            has_first.set()
        assert b"".join(received) == b"".join(pieces)


async def test_an_answer_that_breaks_off_closes_the_connection() -> None:
    async def answer(request: Received) -> None:
        await request.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        await request.send_chunk(b'{"half":')
        await asyncio.sleep(0.02)
        request.cut()

    async with connected(answer) as (client, _, _):
        await client.send(post())
        await client.head()
        assert await client.rest() == b'8\r\n{"half":\r\n'  # and no last chunk


# --- hop by hop -----------------------------------------------------------------------------------


async def test_c15_what_concerns_one_connection_stays_on_it() -> None:
    async def answer(request: Received) -> None:
        await request.answer(
            200,
            b"{}",
            {
                "connection": "X-Mine, close",
                "x-mine": "1",
                "keep-alive": "timeout=5",
                "proxy-authenticate": "Basic",
                "trailer": "x",
                "upgrade": "h2c",
                "x-theirs": "1",
            },
        )
        request.writer.close()

    headers = (
        "connection: X-Private, keep-alive",
        "connection: x-other",
        "x-private: 1",
        "X-Other: 1",
        "keep-alive: timeout=5",
        "te: trailers",
        "trailer: x",
        "proxy-authorization: Basic x",
        "proxy-connection: keep-alive",
        "x-kept: 1",
    )
    async with connected(answer) as (client, engine, _):
        await client.send(post(CHAT_BODY, *headers))
        received = await client.answer()
        assert (received.closes, received.headers["x-theirs"]) == (False, "1")
        ours = {name for name in received.headers if not name.startswith("x-moongate-")}
        assert ours == {"date", "content-type", "content-length", "x-theirs", "x-request-id"}
        sent = engine.received[0].headers
        assert sent.keys() == {"host", "content-length", "x-kept", "x-request-id"}


# --- slow readers ---------------------------------------------------------------------------------

TOTAL = 50_000_000
EVENT = b"data: " + b"x" * 99_992 + b"\n\n"
assert len(EVENT) == 100_000


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_slow_reader_slows_the_engine_and_gets_everything(is_stream: bool) -> None:
    sent = [0]

    async def answer(request: Received) -> None:
        kind = b"text/event-stream" if is_stream else b"application/json"
        await request.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (kind, TOTAL)
        )
        for _ in range(TOTAL // len(EVENT)):
            await request.send(EVENT)
            sent[0] += len(EVENT)

    async with connected(answer, receive_bytes=65_536) as (client, _, gateway):
        await client.send(post(STREAM_BODY))
        await asyncio.sleep(0.3)
        held = sent[0]
        await asyncio.sleep(0.2)
        assert sent[0] == held < 20_000_000  # what sockets hold, and no more
        buffered = [p.transport.get_write_buffer_size() for p in protocols(gateway)]
        assert max(buffered) < 2_000_000
        _, headers = await client.head()
        received = 0
        if is_stream:
            async for piece in client.chunks():
                assert (
                    piece.strip(b"x") in (b"data: ", b"\n\n", b"data: xx\n\n", b"")
                    or EVENT in piece
                )
                received += len(piece)
        else:
            assert headers["content-length"] == str(TOTAL)
            while received < TOTAL:
                received += len(await client.reader.read(1 << 20))
        assert received == TOTAL
        await client.send(get("/health"))
        assert (await client.answer()).json() == {"status": "ok"}
        assert gateway.inflight() == 0


async def test_answers_that_nobody_reads_hold_further_requests_up() -> None:
    body = b"x" * 200_000

    async def answer(request: Received) -> None:
        await request.answer(200, body)

    count = 150  # of which the sockets hold but some
    async with connected(answer, receive_bytes=65_536) as (client, engine, gateway):
        for n in range(count):
            await client.send(post())
            deadline = asyncio.get_running_loop().time() + 0.1
            while len(engine.received) <= n or gateway.inflight():
                if asyncio.get_running_loop().time() > deadline:
                    break
                await asyncio.sleep(0.001)
            else:
                continue
            break
        asked = n + 1
        assert asked < count
        assert len(engine.received) < asked
        buffered = [p.transport.get_write_buffer_size() for p in protocols(gateway)]
        assert max(buffered) < 2_000_000
        for _ in range(asked):
            received = await client.answer()
            assert received.body == body
        assert len(engine.received) == asked


# --- clients that leave ---------------------------------------------------------------------------


async def hang(request: Received) -> None:
    await asyncio.wait_for(request.client_left.wait(), 10.0)


async def stream_on(request: Received) -> None:
    await request.start_stream()
    while not request.client_left.is_set():
        await request.send_chunk(stream_event("x"))
        await asyncio.sleep(0.01)


async def assert_freed(engine: FakeEngine, gateway: LiveGateway) -> None:
    await asyncio.wait_for(engine.received[0].client_left.wait(), 2.0)
    await until(lambda: gateway.inflight() == 0)
    assert await gateway.metric("moongate_requests_total", code="499") == 1
    assert await gateway.metric("moongate_broken_off_total") == 0


@pytest.mark.parametrize("way", ["close", "reset", "half-close"])
@pytest.mark.parametrize("handler", [hang, stream_on])
async def test_a_client_that_leaves_ends_the_engines_work(handler: Any, way: str) -> None:
    async with connected(handler) as (client, engine, gateway):
        await client.send(post(STREAM_BODY))
        await until(lambda: len(engine.received) == 1)
        if handler is stream_on:
            await client.head()
        match way:
            case "close":
                client.close()
            case "reset":
                client.writer.transport.abort()
            case _:
                client.writer.write_eof()
        await assert_freed(engine, gateway)
        if way == "half-close":
            await client.rest()  # which ends


async def test_a_slow_reader_that_closes_its_side_has_left_too() -> None:
    async def answer(request: Received) -> None:
        await request.start_stream()
        while not request.client_left.is_set():
            await request.send_chunk(EVENT)

    async with connected(answer, receive_bytes=65_536) as (client, engine, gateway):
        await client.send(post(STREAM_BODY))
        await until(lambda: any(p.flow.write_paused for p in protocols(gateway)))
        client.writer.write_eof()
        await until(lambda: gateway.inflight() == 0)
        engine.received[0].cut()


@pytest.mark.parametrize("way", ["close", "half-close"])
@pytest.mark.parametrize("framing", ["content-length: 5000000", CHUNKED])
async def test_a_client_that_leaves_while_it_sends_leaves_nothing(framing: str, way: str) -> None:
    async with connected() as (client, engine, gateway):
        start = b"4c4b40\r\n" if framing == CHUNKED else b""
        await client.send(post(start + CHAT_BODY + b" " * 1_000_000, framing=framing))
        await until(lambda: any(hasattr(p.cycle, "feed") for p in protocols(gateway)))
        if way == "close":
            client.close()
        else:
            client.writer.write_eof()
            assert await client.rest() == b""
        await until(lambda: not any(hasattr(p.cycle, "feed") for p in protocols(gateway)))
        assert (await gateway.chat()).status_code == 200
        assert gateway.inflight() == 0
        assert len(engine.received) == 1


async def test_a_client_that_leaves_in_a_head_leaves_nothing() -> None:
    async with connected() as (client, engine, gateway):
        await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx: a")
        await asyncio.sleep(0.02)
        client.writer.write_eof()
        assert await client.rest() == b""
        assert (await gateway.chat()).status_code == 200
        assert len(engine.received) == 1


# --- limits ---------------------------------------------------------------------------------------


async def flood(client: RawClient, piece: bytes) -> None:
    """Send a piece again and again, until the gateway answers or closes."""
    answered = asyncio.create_task(client.reader.read(1))
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(5):
            while not answered.done():
                await client.send(piece)
                await asyncio.sleep(0)
    # What was read in order to notice is put back.
    first = await answered
    client.reader._buffer[:0] = first  # type: ignore[attr-defined]


async def test_headers_over_the_limit_are_refused_wherever_they_go() -> None:
    many = [f"x-{n}: {'a' * 90}" for n in range(700)]
    async with FakeEngine() as engine, live_gateway([engine.url]) as gateway:
        for path in ("/v1/chat/completions", "/admin/explain", "/v1/nope"):
            async with raw_client(gateway.port) as client:
                await client.send(post(CHAT_BODY, *many, path=path))
                await assert_refused(client, 431, "headers_too_large")
        assert engine.received == []


ENDLESS = [
    (b"POST /v1/chat/completions HTTP/1.1\r\nx: ", b"a" * 1000),
    (b"POST /v1/chat/completions HTTP/1.1\r\n", b"a" * 1000),
    (b"POST /v1/chat/completions HTTP/1.1\r\n", b"a: b\r\n" * 100),
    (b"POST /v1/chat/completions?", b"a" * 1000),
    (b"GET /metrics HTTP/1.1\r\nx: ", b"a" * 1000),
    (b"GET /", b"a" * 1000),
]


async def test_a_head_without_end_is_refused() -> None:
    async with FakeEngine() as engine, live_gateway([engine.url]) as gateway:
        for start, piece in ENDLESS:
            async with raw_client(gateway.port) as client:
                await client.send(start)
                await flood(client, piece)
                await assert_refused(client, 431, "headers_too_large")
        assert engine.received == []
        rejected = await gateway.metric("moongate_rejected_total", reason="headers_too_large")
        assert rejected == len(ENDLESS)


async def test_an_address_over_the_limit_is_refused() -> None:
    async with connected() as (client, engine, _):
        await client.send(post(path="/v1/chat/completions?" + "a" * 70_000))
        await assert_refused(client, 431, "headers_too_large")
        assert engine.received == []


async def test_headers_within_the_limit_reach_the_engine() -> None:
    async with connected() as (client, engine, _):
        await client.send(post(CHAT_BODY, *(f"x-{n}: {'a' * 1000}" for n in range(55))))
        assert (await client.answer()).status == 200
        assert engine.received[0].headers["x-54"] == "a" * 1000


@pytest.mark.parametrize("framing", ["content-length: 20000000", CHUNKED])
async def test_a_client_that_still_sends_can_read_why_it_was_refused(framing: str) -> None:
    limits = {"body_bytes_max": 1_000_000}
    async with connected(limits=limits) as (client, engine, gateway):
        start = b"1312d00\r\n" if framing == CHUNKED else b""
        await client.send(post(start, framing=framing))

        async def upload() -> None:
            for _ in range(50):
                await client.send(b"x" * 100_000)

        sending = asyncio.create_task(upload())
        await assert_refused(client, 413, "body_too_large")
        await asyncio.gather(sending, return_exceptions=True)
        assert engine.received == []
        assert gateway.inflight() == 0
        assert await gateway.metric("moongate_rejected_total", reason="body_too_large") == 1


@pytest.mark.parametrize("framing", ["content-length: 2000000", CHUNKED])
async def test_operators_have_the_same_limit(framing: str) -> None:
    async with connected(limits={"body_bytes_max": 100_000}) as (client, _, gateway):
        start = b"1e8480\r\n" if framing == CHUNKED else b""
        await client.send(post(start, path="/admin/explain", framing=framing))
        for _ in range(3):
            await client.send(b"x" * 50_000)
        answer = await client.answer()
        assert (answer.status, answer.code) == (413, "body_too_large")
        assert gateway.inflight() == 0


async def test_a_client_that_leaves_an_operators_request_is_no_bug(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with connected() as (client, _, gateway):
        await client.send(post(b"{", path="/admin/explain", framing="content-length: 9"))
        await until(lambda: bool(gateway.server._server.server_state.tasks))
        client.close()
        await until(lambda: not gateway.server._server.server_state.tasks)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_body_at_the_limit_passes() -> None:
    body = CHAT_BODY + b" " * (2000 - len(CHAT_BODY))
    async with connected(limits={"body_bytes_max": 2000}) as (client, engine, _):
        await client.send(post(body))
        assert (await client.answer()).status == 200
        await client.send(post(b"", framing=CHUNKED) + chunked(body[:999], body[999:]))
        assert (await client.answer()).status == 200
        assert [request.body for request in engine.received] == [body, body]


# --- an engine that answers before it has read ----------------------------------------------------


async def early_engine(peer: Peer) -> None:
    """Be an engine that refuses chats as soon as it has seen their headers."""
    while True:
        head = await peer.head()
        target = head.split(b" ")[1]
        if head.startswith(b"POST /v1/chat"):
            await peer.answer(
                b'{"error":{"message":"no"}}', b"content-type: application/json\r\n", 413
            )
            await peer.drain()
            return
        if head.startswith(b"POST"):
            await peer.answer(b"", b"connection: close\r\n", 404)
            return
        models = b'{"data":[{"id":"m","object":"model"}]}'
        known = {b"/health": b"", b"/v1/models": models}
        await peer.answer(known.get(target, b""), status=200 if target in known else 404)


async def test_an_early_refusal_by_the_engine_reaches_a_client_with_a_large_body() -> None:
    body = CHAT_BODY[:-1] + b',"x":"' + b"a" * 20_000_000 + b'"}'
    async with RawServer(early_engine) as engine, live_gateway([engine.url]) as gateway:
        async with raw_client(gateway.port) as client:
            for _ in range(2):
                await client.send(post(body))
                answer = await client.answer()
                assert (answer.status, answer.json()) == (413, {"error": {"message": "no"}})
            assert gateway.inflight() == 0
