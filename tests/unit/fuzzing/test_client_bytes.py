"""Bytes of clients, in any pieces: requests as they were meant, or an answer that says what is wrong.

The protocol is driven without a socket: a transport notes what is written, and in the hot path's place
stands what answers with the body that came.
"""

from __future__ import annotations

import asyncio
import json
import re
from types import SimpleNamespace
from typing import Any

import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from odd_values import damaged, pieces_of, quick
from raw_client import chunked, get, post
from uvicorn.server import ServerState

from moongate.gateway.auth.tenants import ANYBODY
from moongate.gateway.client_protocol import ClientProtocol, ClientRequest
from moongate.gateway.config.process_settings import LimitsSettings
from moongate.gateway.errors import GatewayError

LIMITS = LimitsSettings(body_bytes_max=4096, headers_bytes_max=2048)
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


class Wire(asyncio.Transport):
    """The other end: notes what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        """Nobody reads here."""

    def resume_reading(self) -> None:
        """Nobody reads here."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing is kept back."""


class Echo:
    """In a gateway's place: proxied requests get their own bodies back, others 404."""

    def __init__(self) -> None:
        self.settings = SimpleNamespace(limits=LIMITS)
        self.driver = SimpleNamespace(clock=lambda: 0.0)
        self.readiness = SimpleNamespace(is_draining=False)
        self.access = SimpleNamespace(admit=lambda _: ANYBODY)
        self.bodies: list[bytes] = []
        self.refused: list[int] = []

    async def answer(self, client: ClientRequest) -> None:
        body = client.take_body()
        self.bodies.append(body)
        client.start(200, ((b"content-length", b"%d" % len(body)),))
        client.finish(body)

    def refuse(self, client: ClientRequest, error: GatewayError) -> None:
        self.refused.append(error.status)
        body = error.body()
        client.start(error.status, ((b"content-length", b"%d" % len(body)),))
        client.finish(body)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 404, "headers": headers})
        await send({"type": "http.response.body", "body": b""})


async def _feed(pieces: list[bytes]) -> tuple[Echo, Wire, list[dict[str, Any]]]:
    troubles: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: troubles.append(context))
    echo, wire = Echo(), Wire()
    config = uvicorn.Config(echo, http=ClientProtocol, ws="none", lifespan="off", log_config=None)
    protocol = ClientProtocol(config, ServerState(), {}, asyncio.get_running_loop())
    protocol.connection_made(wire)
    for piece in pieces:
        if wire.is_closed:
            break
        protocol.data_received(piece)
        for _ in range(4):  # what was asked is answered
            await asyncio.sleep(0)
    protocol.connection_lost(None)
    return echo, wire, troubles


def feed(pieces: list[bytes]) -> tuple[Echo, list[int]]:
    """Return what came of the pieces: the gateway's side, and the statuses that the client saw."""
    echo, wire, troubles = asyncio.run(_feed(pieces))
    assert not troubles, troubles
    statuses = [int(status) for status in _STATUS.findall(wire.written)]
    return echo, statuses


BODIES = st.binary(max_size=60).map(lambda b: json.dumps({"x": b.hex()}).encode())
NAMES = st.sampled_from(["x-a", "accept", "x-request-id", "authorization"])
HEADERS = st.lists(st.tuples(NAMES, st.text("abc ;=\t", max_size=12)), max_size=3).map(
    lambda pairs: [f"{name}: {value}" for name, value in pairs]
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Return a request for a proxied route and its body, framed in one of the ways."""
    body, headers = draw(BODIES), draw(HEADERS)
    if draw(st.booleans()):
        return post(body, *headers), body
    parts = pieces_of(draw, body, 3)
    framing = "transfer-encoding: chunked"
    trailers = draw(st.sampled_from([b"", b"x-trailer: 1\r\n"]))
    return post(b"", *headers, framing=framing) + chunked(*parts, trailers=trailers), body


@quick
@given(data=st.data())
def test_requests_in_any_pieces_are_those_that_were_sent(data: st.DataObject) -> None:
    request, body = data.draw(requests())
    draw: Any = data.draw
    echo, statuses = feed(pieces_of(draw, request))
    assert (echo.bodies, statuses) == ([body], [200])


@quick
@given(data=st.data())
def test_requests_one_after_the_other_are_answered_in_order(data: st.DataObject) -> None:
    sent = data.draw(st.lists(requests(), min_size=1, max_size=3))
    pieces = [get("/nowhere")] + [request for request, _ in sent]
    echo, statuses = feed(pieces)
    assert echo.bodies == [body for _, body in sent]
    assert statuses == [404] + [200] * len(sent)


@quick
@given(data=st.data())
def test_damaged_requests_are_answered_or_refused_and_never_raise(data: st.DataObject) -> None:
    request, _ = data.draw(requests())
    broken = data.draw(damaged(request) | st.binary(max_size=80))
    draw: Any = data.draw
    echo, statuses = feed(pieces_of(draw, broken))
    assert set(statuses) <= {200, 400, 404, 405, 413, 431, 501}
    assert len(echo.bodies) + len(echo.refused) <= len(statuses) + 1


@quick
@given(size=st.integers(0, 9000), piece_bytes=st.integers(1, 600), is_chunked=st.booleans())
def test_no_more_than_the_limit_is_kept(size: int, piece_bytes: int, is_chunked: bool) -> None:
    body = b"b" * size
    parts = [body[n : n + piece_bytes] for n in range(0, size, piece_bytes)]
    whole = post(body)
    if is_chunked:
        whole = post(b"", framing="transfer-encoding: chunked") + chunked(*parts)
    pieces = [whole[n : n + piece_bytes] for n in range(0, len(whole), piece_bytes)]
    echo, statuses = feed(pieces)
    assert statuses == [200 if size <= LIMITS.body_bytes_max else 413]
    assert sum(map(len, echo.bodies)) == (size if size <= LIMITS.body_bytes_max else 0)


@quick
@given(size=st.integers(0, 6000), in_name=st.booleans(), piece_bytes=st.integers(40, 3000))
def test_no_more_headers_than_the_limit_are_kept(
    size: int, in_name: bool, piece_bytes: int
) -> None:
    long = "n" * size
    whole = post(b"{}", f"x-{long}: 1" if in_name else f"x-a: {long}")
    echo, statuses = feed([whole[n : n + piece_bytes] for n in range(0, len(whole), piece_bytes)])
    assert statuses in ([200], [431])
    assert statuses == [200] or size > LIMITS.headers_bytes_max / 2
    assert statuses == [431] or size < LIMITS.headers_bytes_max
    assert echo.refused in ([], [431])
