"""What an engine tells the gateway in an answer does not reach clients, unless they may have it."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest
from fake_engine import FakeEngine, Received
from live_gateway import LiveGateway, live_gateway

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(15)]

PARAMS = {"remote_host": "10.0.0.7", "remote_block_ids": [[1, 2, 3]]}
ANSWER = {
    "id": "x",
    "choices": [{"message": {"content": 'say \\"kv_transfer_params\\": {}'}}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 2},
    "kv_transfer_params": PARAMS,
    "more": "y" * 100,
}
BODY = json.dumps(ANSWER).encode()


async def whole(request: Received) -> None:
    await request.answer(200, BODY)


async def in_pieces(request: Received) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    request.writer.write(head % len(BODY))
    for begin in range(0, len(BODY), 40):
        await asyncio.sleep(0.002)
        request.writer.write(BODY[begin : begin + 40])


async def chunked(request: Received) -> None:
    request.writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    for begin in range(0, len(BODY), 60):
        await asyncio.sleep(0.002)
        piece = BODY[begin : begin + 60]
        request.writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
    request.writer.write(b"0\r\n\r\n")


@pytest.mark.parametrize("handler", [whole, in_pieces, chunked])
async def test_parameters_are_taken_out_of_answers_and_all_else_stays(handler: object) -> None:
    async with FakeEngine(handler) as engine, live_gateway([engine.url]) as gateway:  # type: ignore[arg-type]
        answer = await gateway.chat()
        assert answer.json() == {**ANSWER, "kv_transfer_params": None}
        assert len(answer.content) == len(BODY)
        assert (await gateway.chat()).status_code == 200  # on the same connection
    limits = {"allow_kv_transfer_params": True}
    async with FakeEngine(handler) as engine:  # type: ignore[arg-type]
        async with live_gateway([engine.url], limits=limits) as gateway:
            assert (await gateway.chat()).content == BODY


async def test_an_answer_without_any_is_passed_on_byte_for_byte() -> None:
    body = BODY.replace(json.dumps(PARAMS).encode(), b"null")

    async def answer(request: Received) -> None:
        await request.answer(200, body)

    async with FakeEngine(answer) as engine, live_gateway([engine.url]) as gateway:
        assert (await gateway.chat()).content == body


async def ask(gateway: LiveGateway, path: str) -> bytes:
    body = {"model": "m", "input": "x", "messages": [{"role": "user", "content": "x"}]}
    answer = await gateway.client.post(path, json=body, headers={"accept-encoding": "identity"})
    return answer.content


async def test_they_are_looked_for_where_texts_are_generated_and_nowhere_else() -> None:
    async with FakeEngine(whole) as engine, live_gateway([engine.url]) as gateway:
        for path in ("/v1/responses", "/v1/messages"):
            assert json.loads(await ask(gateway, path))["kv_transfer_params"] is None
        assert await ask(gateway, "/v1/embeddings") == BODY


async def test_a_compressed_answer_is_passed_on_as_it_is() -> None:
    packed = gzip.compress(BODY)

    async def answer(request: Received) -> None:
        await request.answer(200, packed, {"content-encoding": "gzip"})

    async with FakeEngine(answer) as engine, live_gateway([engine.url]) as gateway:
        assert (await gateway.chat()).content == BODY


async def test_an_answer_that_breaks_off_is_passed_on_up_to_there() -> None:
    async def broken(request: Received) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 900\r\n\r\n"
        request.writer.write(head + b'{"id":1,"kv_trans')
        await asyncio.sleep(0.05)
        request.cut()

    async with FakeEngine(broken) as engine, live_gateway([engine.url]) as gateway:
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]})
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
            % (len(body), body.encode())
        )
        received = await reader.read()
        writer.close()
    assert received.partition(b"\r\n\r\n")[2] == b'{"id":1,"kv_trans'
