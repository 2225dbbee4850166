"""Connections to engines, against servers that do with them what engines do at their worst."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from live_gateway import until
from raw_server import Peer, RawServer, Script

from moongate.gateway.proxy.upstream import (
    KEEP_ALIVE_S,
    Answer,
    Disconnected,
    NoConnection,
    PoolFull,
    TimedOut,
    Unreachable,
    Upstream,
    UpstreamError,
)

pytestmark = [
    pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"]),
    pytest.mark.timeout(15),
]

CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@contextlib.asynccontextmanager
async def connected(
    url: str, *, connect_s: float = 2.0, read_s: float = 5.0, connections_max: int | None = None
) -> AsyncIterator[Upstream]:
    upstream = Upstream(
        url, connect_timeout_s=connect_s, read_timeout_s=read_s, connections_max=connections_max
    )
    try:
        yield upstream
    finally:
        await upstream.close()
        await asyncio.sleep(0)  # for the transports to close


@contextlib.asynccontextmanager
async def served(
    *scripts: Script,
    connect_s: float = 2.0,
    read_s: float = 5.0,
    connections_max: int | None = None,
) -> AsyncIterator[tuple[Upstream, RawServer]]:
    async with RawServer(*scripts) as server:
        async with connected(
            server.url, connect_s=connect_s, read_s=read_s, connections_max=connections_max
        ) as upstream:
            yield upstream, server


async def ask(upstream: Upstream, body: bytes = b"{}") -> tuple[int, bytes]:
    """Send a request and return its whole answer."""
    async with asyncio.timeout(5):
        answer = await upstream.send("/x", [], [body])
        try:
            return answer.status, await rest_of(answer)
        finally:
            answer.close()


async def rest_of(answer: Answer) -> bytes:
    body = b""
    while piece := await answer.read():
        body += piece
    return body


async def echo(peer: Peer) -> None:
    """Answer every request with its body."""
    while True:
        await peer.answer(await peer.request())


# --- connections used again -----------------------------------------------------------------------


async def test_a_request_has_its_pieces_in_order() -> None:
    heads: list[bytes] = []

    async def script(peer: Peer) -> None:
        heads.append(await peer.head())
        await peer.answer(await peer.reader.readexactly(6))

    async with served(script) as (upstream, server):
        answer = await upstream.send("/x?y", [(b"X-A", b"1")], [b"ab", b"", b"cdef"])
        assert await rest_of(answer) == b"abcdef"
        answer.close()
    host = server.url.removeprefix("http://").encode()
    head = b"POST /x?y HTTP/1.1\r\nhost: %b\r\nX-A: 1\r\ncontent-length: 6\r\n\r\n" % host
    assert heads == [head]


async def test_a_connection_serves_one_request_after_the_other() -> None:
    async with served(echo) as (upstream, server):
        for body in (b"a", b"b", b"x" * 1_000_000, b"c"):
            assert await ask(upstream, body) == (200, body)
        assert len(server.peers) == 1


async def test_requests_at_the_same_time_have_connections_of_their_own() -> None:
    async with served(echo) as (upstream, server):
        bodies = [b"%d" % n for n in range(8)]
        answers = await asyncio.gather(*(ask(upstream, body) for body in bodies))
        assert answers == [(200, body) for body in bodies]
        assert len(server.peers) == 8
        await asyncio.gather(*(ask(upstream, body) for body in bodies))
        assert len(server.peers) == 8


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokSURPLUS",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        CHUNKED + b"2\r\nok\r\n0\r\n\r\nx",
    ],
)
async def test_a_connection_that_may_not_go_on_is_closed(answer: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer)
        await peer.drain()

    async with served(script) as (upstream, server):
        assert await ask(upstream, b"1") == (200, b"ok")
        await server.peers[0].left()
        assert await ask(upstream, b"2") == (200, b"ok")
        assert server.requests == [[b"1"], [b"2"]]


async def test_the_end_of_the_connection_may_be_the_end_of_the_answer() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\n\r\nsome")
        await peer.send(b" more")
        peer.close()

    async with served(script) as (upstream, server):
        for _ in range(2):
            assert await ask(upstream) == (200, b"some more")
        assert len(server.peers) == 2


async def test_interim_answers_are_passed_over() -> None:
    async def script(peer: Peer) -> None:
        while True:
            body = await peer.request()
            await peer.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            await asyncio.sleep(0.01)
            await peer.send(b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n")
            await peer.answer(body)

    async with served(script) as (upstream, server):
        assert [await ask(upstream, b"a"), await ask(upstream, b"b")] == [(200, b"a"), (200, b"b")]
        assert len(server.peers) == 1


async def test_an_answer_closed_before_its_end_takes_its_connection_with_it() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED + b"2\r\nok\r\n")
        await peer.drain()

    async with served(script) as (upstream, server):
        answer = await upstream.send("/x", [], [b"1"])
        assert await answer.read() == b"ok"
        answer.close()
        await server.peers[0].left()
        answer.close()  # does nothing
        with pytest.raises(Disconnected):
            await answer.read()


async def test_closing_twice_leaves_the_next_exchange_alone() -> None:
    async with served(echo) as (upstream, server):
        first = await upstream.send("/x", [], [b"a"])
        await rest_of(first)
        first.close()
        second = await upstream.send("/x", [], [b"bb"])
        first.close()
        assert await rest_of(second) == b"bb"
        second.close()
        assert len(server.peers) == 1


# --- early answers --------------------------------------------------------------------------------

LARGE = b"x" * 8_000_000
"""More than the sockets' buffers hold."""


async def test_an_early_answer_arrives_and_its_connection_is_not_used_again() -> None:
    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.answer(b"too large", status=413)
        await peer.drain()

    async with served(script, echo) as (upstream, server):
        # Nobody reads the body; with what is left of it the connection is of no use.
        assert await ask(upstream, LARGE) == (413, b"too large")
        await server.peers[0].left()
        assert await ask(upstream, b"2") == (200, b"2")
        assert len(server.peers) == 2


@pytest.mark.parametrize("way", ["close", "reset"])
async def test_an_early_answer_survives_the_end_of_its_connection(way: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.answer(b"too large", status=413)
        await asyncio.sleep(0.05)
        getattr(peer, way)()

    async with served(script) as (upstream, server):
        assert await ask(upstream, LARGE) == (413, b"too large")
        assert len(server.peers) == 1


# --- idle connections -----------------------------------------------------------------------------


async def test_c108_an_idle_connection_is_closed_before_the_engine_does_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert KEEP_ALIVE_S < 5.0  # uvicorn's
    monkeypatch.setattr("moongate.gateway.proxy.upstream.KEEP_ALIVE_S", 0.15)
    async with served(echo) as (upstream, server):
        await ask(upstream, b"1")
        await server.peers[0].left()
        await ask(upstream, b"2")
        assert server.requests == [[b"1"], [b"2"]]


async def test_c108_a_connection_idle_for_too_long_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(echo) as (upstream, server):
        await ask(upstream, b"1")
        await asyncio.sleep(0.02)
        monkeypatch.setattr("moongate.gateway.proxy.upstream.KEEP_ALIVE_S", 0.01)
        await ask(upstream, b"2")
        assert server.requests == [[b"1"], [b"2"]]


@pytest.mark.parametrize("way", ["close", "reset"])
async def test_c108_a_connection_that_closes_under_a_request_costs_nothing(way: str) -> None:
    async def once(peer: Peer) -> None:
        await peer.answer(await peer.request())
        await peer.reader.read(1)  # the next request is on its way
        getattr(peer, way)()

    async with served(once, echo) as (upstream, server):
        await ask(upstream, b"1")
        assert await ask(upstream, b"2") == (200, b"2")
        assert server.requests == [[b"1"], [b"2"]]


async def test_c108_a_connection_that_was_closed_unnoticed_costs_nothing() -> None:
    async with served(echo) as (upstream, server):
        await ask(upstream, b"1")
        server.peers[0].close_unnoticed()
        assert await ask(upstream, b"2") == (200, b"2")  # before the loop could tell us
        assert len(server.peers) == 2


async def test_a_request_is_sent_once_more_and_no_oftener() -> None:
    async def once(peer: Peer) -> None:
        await peer.answer(await peer.request())
        await peer.request()
        peer.close()

    async def never(peer: Peer) -> None:
        await peer.request()
        peer.close()

    async with served(once, never) as (upstream, server):
        await ask(upstream, b"1")
        with pytest.raises(Disconnected):
            await ask(upstream, b"2")
        assert server.requests == [[b"1", b"2"], [b"2"]]


@pytest.mark.parametrize("byte", [b"H", b"HTTP/1.1 100 X\r\n\r\n", b"HTTP/1.1 200 OK\r\n", b"?"])
async def test_a_request_of_which_a_byte_was_answered_is_not_sent_again(byte: bytes) -> None:
    async def half(peer: Peer) -> None:
        await peer.answer(await peer.request())
        await peer.request()
        await peer.send(byte)
        await asyncio.sleep(0.02)
        peer.close()

    async with served(half) as (upstream, server):
        await ask(upstream, b"1")
        with pytest.raises(Disconnected):
            await ask(upstream, b"2")
        assert server.requests == [[b"1", b"2"]]


async def test_a_request_on_a_new_connection_is_not_sent_again() -> None:
    async def never(peer: Peer) -> None:
        await peer.request()
        peer.close()

    async with served(never) as (upstream, server):
        with pytest.raises(Disconnected):
            await ask(upstream, b"1")
        assert server.requests == [[b"1"]]


async def test_bytes_that_nobody_asked_for_close_an_idle_connection() -> None:
    async def talkative(peer: Peer) -> None:
        await peer.answer(await peer.request())
        await asyncio.sleep(0.02)
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil")
        await peer.drain()

    async with served(talkative, echo) as (upstream, server):
        await ask(upstream, b"1")
        await server.peers[0].left()
        assert await ask(upstream, b"2") == (200, b"2")
        assert len(server.peers) == 2


# --- broken answers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [b"", b"SSH-2.0-x\r\n", b"HTTP/1.1 101 X\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 2"],
)
async def test_what_is_no_answer_is_a_broken_connection(answer: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer)
        peer.close()

    async with served(script) as (upstream, _):
        with pytest.raises(Disconnected):
            await ask(upstream)


@pytest.mark.parametrize("way", ["close", "reset"])
@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nsome", CHUNKED + b"4\r\nsome\r\n"],
)
async def test_an_answer_that_breaks_off_gives_what_came_and_says_so(
    answer: bytes, way: str
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer)
        await asyncio.sleep(0.03)
        getattr(peer, way)()

    async with served(script) as (upstream, _):
        begun = await upstream.send("/x", [], [b"1"])
        assert await begun.read() == b"some"
        with pytest.raises(Disconnected):
            await begun.read()
        begun.close()


async def test_a_reset_is_no_end_of_an_answer_without_a_length() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\n\r\nsome")
        await asyncio.sleep(0.03)
        peer.reset()

    async with served(script) as (upstream, _):
        with pytest.raises(Disconnected):
            await ask(upstream)


async def test_what_comes_right_before_nonsense_is_relayed() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED)
        await asyncio.sleep(0.02)
        await peer.send(b"3\r\none\r\n3\r\ntwo\r\nnonsense")
        await peer.drain()

    pieces: list[bytes] = []
    async with served(script) as (upstream, _):
        answer = await upstream.send("/x", [], [b"1"])
        with pytest.raises(Disconnected):
            await answer.relay(pieces.append)
        answer.close()
    assert b"".join(pieces) == b"onetwo"


async def test_a_relay_gives_each_piece_as_it_comes() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED + b"1\r\na\r\n")
        for letter in (b"b", b"c"):
            await asyncio.sleep(0.02)
            await peer.send(b"1\r\n" + letter + b"\r\n")
        await peer.send(b"0\r\n\r\n")

    pieces: list[bytes] = []
    async with served(script) as (upstream, _):
        answer = await upstream.send("/x", [], [b"1"])
        await answer.relay(pieces.append)
        answer.close()
    assert pieces == [b"a", b"b", b"c"]


# --- time -----------------------------------------------------------------------------------------


async def test_silence_before_the_answer_is_timed_out_and_cancelled() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.drain()

    async with served(script, read_s=0.1) as (upstream, server):
        with pytest.raises(TimedOut):
            await ask(upstream, b"1")
        await server.peers[0].left()
        assert server.requests == [[b"1"]]


async def test_silence_on_a_kept_connection_is_not_asked_again() -> None:
    async def script(peer: Peer) -> None:
        await peer.answer(await peer.request())
        await peer.request()
        await peer.drain()

    async with served(script, read_s=0.1) as (upstream, server):
        await ask(upstream, b"1")
        with pytest.raises(TimedOut):
            await ask(upstream, b"2")
        assert server.requests == [[b"1", b"2"]]


async def test_silence_within_the_answer_is_timed_out() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED + b"2\r\nok\r\n")
        await peer.drain()

    async with served(script, read_s=0.1) as (upstream, _):
        answer = await upstream.send("/x", [], [b"1"])
        assert await answer.read() == b"ok"
        with pytest.raises(TimedOut):
            await answer.read()
        answer.close()


async def test_an_engine_that_keeps_writing_has_all_the_time() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED)
        for _ in range(10):
            await asyncio.sleep(0.05)
            await peer.send(b"1\r\nx\r\n")
        await peer.send(b"0\r\n\r\n")

    async with served(script, read_s=0.2) as (upstream, _):
        assert await ask(upstream) == (200, b"x" * 10)


async def test_a_paused_answer_is_not_timed_out_but_a_resumed_one_is() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED + b"1\r\na\r\n")
        await asyncio.sleep(0.05)
        await peer.send(b"1\r\nb\r\n")
        await peer.drain()

    async with served(script, read_s=0.1) as (upstream, _):
        answer = await upstream.send("/x", [], [b"1"])
        assert await answer.read() == b"a"
        answer.pause()
        answer.pause()
        with pytest.raises(TimeoutError):  # the test's own
            await asyncio.wait_for(answer.read(), 0.4)
        answer.resume()
        assert await answer.read() == b"b"
        with pytest.raises(TimedOut):
            await answer.read()
        answer.close()


async def test_a_paused_answer_holds_the_engine_up_and_arrives_whole() -> None:
    sent: list[int] = []
    piece = b"x" * 100_000

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 40000000\r\n\r\n")
        for _ in range(400):
            await peer.send(piece)
            sent.append(len(piece))

    async with served(script) as (upstream, _):
        answer = await upstream.send("/x", [], [b"1"])
        answer.pause()
        await asyncio.sleep(0.3)
        assert sum(sent) < 20_000_000
        answer.resume()
        received = 0
        while some := await answer.read():
            received += len(some)
        assert received == 40_000_000
        answer.close()


async def test_a_connection_paused_at_its_answers_end_serves_the_next_request() -> None:
    async with served(echo) as (upstream, server):
        answer = await upstream.send("/x", [], [b"a"])
        assert await rest_of(answer) == b"a"
        answer.pause()
        answer.close()
        assert await ask(upstream, b"b") == (200, b"b")
        assert len(server.peers) == 1


# --- no connection --------------------------------------------------------------------------------


async def test_a_port_that_nobody_listens_on_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with connected(f"http://127.0.0.1:{port}") as upstream:
        with pytest.raises(Unreachable):
            await ask(upstream)


async def test_a_name_that_does_not_resolve_is_unreachable() -> None:
    async with connected("http://nobody.invalid:80") as upstream:
        with pytest.raises((Unreachable, NoConnection)):
            await ask(upstream)


@contextlib.contextmanager
def nobody_accepts() -> Iterator[str]:
    """Yield the address of a listener whose queue is full, so that nobody gets through."""
    with socket.socket() as listener, contextlib.ExitStack() as waiting:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        for _ in range(4):
            sock = waiting.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", port))
        yield f"http://127.0.0.1:{port}"


async def test_a_connection_that_takes_too_long_is_given_up() -> None:
    with nobody_accepts() as url:
        async with connected(url, connect_s=0.1) as upstream:
            with pytest.raises(NoConnection):
                await ask(upstream)


async def test_a_full_pool_says_so_at_once_and_has_room_again_later() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED)
        await peer.drain()

    async with served(script, connections_max=2) as (upstream, server):
        first, second = [await upstream.send("/x", [], [b"1"]) for _ in range(2)]
        with pytest.raises(PoolFull):
            await ask(upstream)
        first.close()
        third = await upstream.send("/x", [], [b"1"])
        with pytest.raises(PoolFull):
            await ask(upstream)
        assert len(server.peers) == 3
        second.close()
        third.close()


async def test_what_frees_an_instances_memory_needs_no_place_in_the_pool() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED)
        await peer.drain()

    async with served(script, connections_max=1) as (upstream, _):
        first = await upstream.send("/x", [], [b"1"])
        second = await upstream.send("/x", [], [b"2"], may_exceed=True)
        with pytest.raises(PoolFull):
            await ask(upstream)
        first.close()
        second.close()


async def test_it_is_told_when_a_request_is_on_its_way() -> None:
    told: list[int] = []
    async with served(echo) as (upstream, server):
        answer = await upstream.send("/x", [], [b"1"], on_sent=lambda: told.append(1))
        answer.close()
        assert (len(told), len(server.requests)) == (1, 1)
    with nobody_accepts() as url:
        async with connected(url, connect_s=0.05) as upstream:
            with pytest.raises(NoConnection):
                await upstream.send("/x", [], [b"1"], on_sent=lambda: told.append(2))
    assert told == [1]


async def test_kept_connections_count_while_they_are_used() -> None:
    async with served(echo, connections_max=1) as (upstream, server):
        for _ in range(3):
            await ask(upstream)
        held = await upstream.send("/x", [], [b"1"])
        with pytest.raises(PoolFull):
            await ask(upstream)
        assert len(server.peers) == 1
        held.close()


async def test_connections_that_are_being_made_count() -> None:
    with nobody_accepts() as url:
        async with connected(url, connect_s=0.2, connections_max=1) as upstream:
            waiting = asyncio.create_task(ask(upstream))
            await asyncio.sleep(0.02)
            with pytest.raises(PoolFull):
                await ask(upstream)
            with pytest.raises(NoConnection):
                await waiting
            with pytest.raises(NoConnection):  # and not PoolFull
                await ask(upstream)


async def test_a_failed_request_leaves_no_place_taken() -> None:
    async def never(peer: Peer) -> None:
        await peer.request()
        peer.close()

    async with served(never, connections_max=1) as (upstream, server):
        for _ in range(3):
            with pytest.raises(Disconnected):
                await ask(upstream)
        assert len(server.peers) == 3


# --- cancelling -----------------------------------------------------------------------------------


async def cancel(task: asyncio.Task[object]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("beginning", [b"", b"HTTP/1.1 200", CHUNKED, CHUNKED + b"2\r\nok\r\n"])
async def test_a_cancelled_request_closes_its_connection(beginning: bytes) -> None:
    has_begun = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(beginning)
        has_begun.set()
        await peer.drain()

    async with served(script, connections_max=1) as (upstream, server):
        task = asyncio.create_task(ask(upstream))
        await has_begun.wait()
        await asyncio.sleep(0.02)
        await cancel(task)
        await server.peers[0].left()
        second = asyncio.create_task(ask(upstream))  # there is room
        await until(lambda: len(server.peers) == 2)
        await cancel(second)


async def test_a_request_cancelled_while_it_is_sent_closes_its_connection() -> None:
    async def script(peer: Peer) -> None:
        await peer.head()
        await asyncio.sleep(0.2)  # takes nothing in
        await peer.drain()

    async with served(script) as (upstream, server):
        task = asyncio.create_task(ask(upstream, LARGE))
        await until(lambda: len(server.peers) == 1)
        await asyncio.sleep(0.05)
        await cancel(task)
        await server.peers[0].left()


async def test_a_request_cancelled_while_it_connects_leaves_no_place_taken() -> None:
    with nobody_accepts() as url:
        async with connected(url, connect_s=0.1, connections_max=1) as upstream:
            task = asyncio.create_task(ask(upstream))
            await asyncio.sleep(0.02)
            await cancel(task)
            with pytest.raises(NoConnection):
                await ask(upstream)


async def test_closing_the_pool_ends_what_is_under_way() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED)
        await peer.drain()

    async with served(echo, script) as (upstream, server):
        await ask(upstream)
        held = await upstream.send("/x", [], [b"1"])
        busy = await upstream.send("/x", [], [b"1"])
        assert await rest_of(held) == b"1"
        held.close()
        reading = asyncio.create_task(busy.read())
        await asyncio.sleep(0.02)
        await upstream.close()
        with pytest.raises(UpstreamError):
            await reading
        for peer in server.peers:
            await peer.left()


async def test_nothing_is_sent_once_the_pool_is_closed() -> None:
    async with served(echo) as (upstream, server):
        await upstream.close()
        with pytest.raises(Unreachable, match="removed"):
            await ask(upstream)
        assert server.peers == []


# --- TLS ------------------------------------------------------------------------------------------


def self_signed(directory: Path) -> ssl.SSLContext:
    """Return a server's context with a certificate that nobody vouches for."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate with")
    key, certificate = directory / "key.pem", directory / "cert.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", str(key), "-out", str(certificate), "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    return context


def https(server: RawServer) -> str:
    return server.url.replace("http:", "https:")


async def test_a_certificate_that_nobody_vouches_for_is_refused(tmp_path: Path) -> None:
    async with RawServer(echo, tls=self_signed(tmp_path)) as server:
        async with connected(https(server)) as upstream:
            with pytest.raises(Unreachable, match="certificate"):
                await ask(upstream)


async def test_a_trusted_engine_is_spoken_to_through_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = self_signed(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    async with RawServer(echo, tls=context) as server:
        async with connected(https(server)) as upstream:
            for body in (b"a", b"x" * 1_000_000):
                assert await ask(upstream, body) == (200, body)
            assert len(server.peers) == 1


async def test_a_server_that_speaks_no_tls_is_unreachable() -> None:
    async def script(peer: Peer) -> None:
        await peer.reader.read(1)
        await peer.send(b"HTTP/1.1 400 X\r\ncontent-length: 0\r\n\r\n")

    async with RawServer(script) as server, connected(https(server)) as upstream:
        with pytest.raises(Unreachable):
            await ask(upstream)


async def test_a_server_that_says_nothing_to_tls_is_timed_out() -> None:
    async def script(peer: Peer) -> None:
        await peer.drain()

    async with RawServer(script) as server, connected(https(server), connect_s=0.2) as upstream:
        with pytest.raises(NoConnection):
            await ask(upstream)
