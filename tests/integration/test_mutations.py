"""Requests and answers with bytes changed at random, from fixed seeds.

What they mean is nobody's concern; what counts is that each side gets well-formed messages only, that
nothing is left behind, and that the next one is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence

import pytest
from fake_engine import FakeEngine, Received, answer_ok, chat_answer, stream_event
from live_gateway import LiveGateway, live_gateway, until
from raw_client import CHAT_BODY, STREAM_BODY, RawAnswer, RawClient, chunked, get, post, raw_client

pytestmark = [
    pytest.mark.asyncio(loop_factories=["uvloop"]),
    pytest.mark.timeout(20),
]

SEEDS = [1, 2, 3]
CHUNKED = "transfer-encoding: chunked"
OFFER = ("connection: upgrade", "upgrade: h2c")

REQUESTS = [
    post(),
    post(STREAM_BODY),
    post(b"", framing=CHUNKED) + chunked(CHAT_BODY[:9], CHAT_BODY[9:], trailers=b"x: 1\r\n"),
    post(CHAT_BODY, *OFFER),
    post(b"", *OFFER, framing=CHUNKED) + chunked(CHAT_BODY),
    post(CHAT_BODY, "expect: 100-continue"),
    post(version="1.0"),
    post(path="/admin/explain"),
    post(b"", path="/admin/explain", framing=CHUNKED) + chunked(CHAT_BODY),
    get("/health"),
    get("/v1/chat/completions"),
]

JSON = b"content-type: application/json\r\n"
EVENTS = (stream_event("a"), stream_event("b"), b"data: [DONE]\n\n")
ANSWERS = [
    b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\n\r\n" % (JSON, len(chat_answer())) + chat_answer(),
    b"HTTP/1.1 200 OK\r\n" + JSON + b"transfer-encoding: chunked\r\n\r\n"
    + chunked(chat_answer()[:30], chat_answer()[30:], trailers=b"x: 1\r\n"),
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    + chunked(*EVENTS),
    b"HTTP/1.1 200 OK\r\n" + JSON + b"\r\n" + chat_answer(),
    b"HTTP/1.1 100 C\r\n\r\nHTTP/1.1 400 B\r\ncontent-type: text/plain\r\ncontent-length: 3\r\n\r\nbad",
    b"HTTP/1.1 204 N\r\n\r\n",
    b"HTTP/1.1 500 X\r\n" + JSON + b"content-length: 2\r\n\r\n{}",
]  # fmt: skip

PIECES = [
    b"\r\n", b"\n", b"\r", b"\x00", b"\xff", b":", b" ", b"0\r\n\r\n", b"5\r\n", b"HTTP/1.1",
    b"content-length: 5\r\n", b"transfer-encoding: chunked\r\n", b"connection: close\r\n",
    b"connection: upgrade\r\nupgrade: x\r\n", b"expect: 100-continue\r\n", b"a" * 70_000,
]  # fmt: skip


def mutated(message: bytes, chance: random.Random) -> list[bytes]:
    """Return a message with some bytes changed, in packets."""
    data = bytearray(message)
    for _ in range(chance.choice([0, 1, 1, 2, 4])):
        at = chance.randrange(len(data))
        match chance.randrange(4):
            case 0:
                data[at:at] = chance.choice(PIECES)
            case 1:
                del data[at : at + chance.randrange(1, 20)]
            case 2:
                data[at] = chance.randrange(256)
            case _:
                data[at:at] = message[chance.randrange(len(message)) :][: chance.randrange(60)]
        data = data or bytearray(b"x")
    cuts = sorted(chance.randrange(len(data) + 1) for _ in range(chance.choice([0, 0, 1, 3])))
    pieces = [bytes(data[a:b]) for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    return [piece for piece in pieces if piece]


async def answers_until_closed(client: RawClient) -> list[RawAnswer]:
    """Return the answers on a connection that the client closes its side of."""
    answers = []
    await asyncio.sleep(0.02)
    with contextlib.suppress(OSError, RuntimeError):  # it is closed already
        client.writer.write_eof()
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            answer = await client.answer()
            if answer.status != 100:
                answers.append(answer)
    return answers


async def assert_nothing_is_left(gateway: LiveGateway) -> None:
    state = gateway.server._server.server_state
    await until(lambda: not state.tasks and gateway.inflight() == 0)
    for link in gateway.server.gateway._links or ():
        upstream = link.upstream
        assert (len(upstream._busy), upstream._connecting) == (0, 0)
    assert (await gateway.chat()).status_code == 200


async def in_batches(jobs: Sequence[object]) -> None:
    for start in range(0, len(jobs), 20):
        await asyncio.gather(*jobs[start : start + 20])  # type: ignore[call-overload]


@pytest.mark.parametrize("seed", SEEDS)
async def test_whatever_clients_send_is_answered_in_step_or_refused(
    seed: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moongate.gateway.client_protocol.DISCARD_S", 0.01)
    chance = random.Random(seed)

    async def ask(gateway: LiveGateway) -> None:
        together = b"".join(chance.choices(REQUESTS, k=chance.choice([1, 1, 1, 2, 3])))
        pieces = mutated(together, chance)
        async with raw_client(gateway.port) as client:
            with contextlib.suppress(ConnectionError):
                await client.send(*pieces, pause_s=chance.choice([0, 0.002]))
                if chance.randrange(3) == 0:
                    client.writer.transport.abort()
                    return
                answers = await answers_until_closed(client)
                assert not any(answer.closes for answer in answers[:-1]), pieces

    async with FakeEngine() as engine, live_gateway([engine.url]) as gateway:
        await in_batches([ask(gateway) for _ in range(200)])
        await assert_nothing_is_left(gateway)
        assert all(request.body.startswith(b"{") for request in engine.received)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("seed", SEEDS)
async def test_whatever_engines_answer_clients_get_well_formed(
    seed: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moongate.gateway.proxy.relaying.END_OF_STREAM_S", 0.05)
    chance = random.Random(seed)

    async def answer(request: Received) -> None:
        for piece in mutated(chance.choice(ANSWERS), chance):
            await request.send(piece)
            await asyncio.sleep(chance.choice([0, 0.003]))
        match chance.randrange(3):
            case 0:
                request.cut()
            case 1:
                request.writer.close()

    async def ask(gateway: LiveGateway) -> None:
        async with raw_client(gateway.port) as client:
            await client.send(chance.choice([post(), post(STREAM_BODY), post(version="1.0")]))
            with contextlib.suppress(
                asyncio.IncompleteReadError
            ):  # its end is missing, and seen so
                answered = await client.answer()
                assert 200 <= answered.status <= 599

    async with FakeEngine(answer) as engine:
        limits = {"upstream_timeout_s": 0.2}
        async with live_gateway([engine.url], limits=limits) as gateway:
            await in_batches([ask(gateway) for _ in range(200)])
            engine.handler = answer_ok
            await until(lambda: all(instance.is_healthy for instance in gateway.core.fleet))
            await assert_nothing_is_left(gateway)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []
