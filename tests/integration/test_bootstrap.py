"""Asking a bootstrap server over HTTP: other answers than the expected, and none."""

from __future__ import annotations

import socket

import pytest
from fake_engine import FakeEngine, Received
from raw_server import Peer, RawServer

from moongate.gateway.proxy.bootstrap import BODY_BYTES_MAX, BootstrapFailed, Bootstraps

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(15)]

ONE_ENGINE = b'{"0": {"engine_id": "e0", "worker_addr": {"0": {"0": "tcp://10.0.0.1:5000"}}}}'


async def query(handler: object, timeout_s: float = 2.0) -> str:
    async with FakeEngine() as server:
        server.side_calls["/query"] = handler  # type: ignore[assignment]
        bootstraps = Bootstraps(timeout_s)
        try:
            return await bootstraps.engine_id(server.url, None)
        finally:
            await bootstraps.close()


async def test_it_is_asked_over_http() -> None:
    async def answer(request: Received) -> None:
        await request.answer(200, ONE_ENGINE)

    assert await query(answer) == "e0"


async def test_other_answers_and_none_are_failures() -> None:
    async def starting(request: Received) -> None:
        await request.answer(503, ONE_ENGINE)

    async def silent(request: Received) -> None:
        await request.client_left.wait()

    async def cut(request: Received) -> None:
        request.cut()

    with pytest.raises(BootstrapFailed, match="status 503"):
        await query(starting)
    with pytest.raises(BootstrapFailed, match="no answer in time"):
        await query(silent, timeout_s=0.05)
    with pytest.raises(BootstrapFailed):
        await query(cut)


async def test_nobody_is_asked_in_its_place_and_an_answer_has_an_end() -> None:
    asked: list[str] = []

    async def secret(request: Received) -> None:
        asked.append(request.path)
        await request.answer(200, ONE_ENGINE)

    async with FakeEngine() as other:
        other.side_calls["/secret"] = secret
        redirect = (
            f"HTTP/1.1 302 Found\r\nlocation: {other.url}/secret\r\ncontent-length: 0\r\n\r\n"
        ).encode()

        async def send_on(peer: Peer) -> None:
            await peer.head()
            await peer.send(redirect)
            peer.close()

        async with RawServer(send_on) as server:
            bootstraps = Bootstraps(2.0)
            with pytest.raises(BootstrapFailed, match="status 302"):
                await bootstraps.engine_id(server.url, None)
            await bootstraps.close()
    assert asked == []

    async def long(request: Received) -> None:
        await request.answer(200, ONE_ENGINE + b" " * BODY_BYTES_MAX)

    with pytest.raises(BootstrapFailed, match="more than 65536 bytes"):
        await query(long)


async def test_a_server_that_is_not_there_is_a_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    bootstraps = Bootstraps(1.0)
    with pytest.raises(BootstrapFailed):
        await bootstraps.engine_id(f"http://127.0.0.1:{port}", None)
    await bootstraps.close()
