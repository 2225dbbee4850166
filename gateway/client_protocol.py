"""A client's connection: uvicorn's, but for the proxied routes, which are answered without ASGI.

uvicorn reads requests, keeps connections alive and stops in order. Where a request is for a proxied
route its ASGI cycle is replaced by a `ClientRequest`, to which the hot path writes as bytes come: ASGI
itself would cost more than all else there (docs/decisions/0007).

Beyond what uvicorn does: headers, trailers and addresses without end are refused; trailers are no
headers; a request that comes before the last one was answered is not answered (pipelining; the
connection closes after the first answer), nor read before the client has taken in what it was sent; an
offer of another protocol is passed over, with the body behind it; a request that names no host or several, or
whose body is coded otherwise than in chunks, is refused. On proxied routes a client that
closes its side has left, and one that reads slowly slows the engine down instead of filling memory.

Source: uvicorn 0.54 `HttpToolsProtocol`, whose attributes are used; the version is locked, and the
conformance tests would notice.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from moongate.gateway.auth.tenants import ANYBODY
from moongate.gateway.dialects.routes import PROXIED, Route
from moongate.gateway.errors import GatewayError
from moongate.gateway.proxy.client import RawHeaders

if TYPE_CHECKING:
    from moongate.gateway.app import Gateway

DISCARD_S = 1.0
"""How long what a client still sends is read and discarded after it was refused: closed at once, its
connection would be reset, perhaps before it has read why."""

PIECES_MAX = 256
"""Pieces of a body that are kept apart: many small ones would take many times their bytes."""

_HOST = re.compile(rb"(?:\[[0-9a-fA-F:.]+\]|[\w.~!$&'()*+,;=%-]*)(?::\d*)?")
"""A name, an address, or nothing (RFC 3986, 3.2.2)."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


class _NobodyWaits:
    """In place of the event by which uvicorn tells an ASGI cycle that something came."""

    def set(self) -> None:
        """Tell nobody: the protocol itself tells a `ClientRequest`."""


NOBODY_WAITS = _NobodyWaits()


class ClientRequest:
    """One proxied request: what came, and where its answer goes.

    Its first attributes are those that uvicorn asks of a cycle.
    """

    def __init__(
        self,
        protocol: ClientProtocol,
        route: Route,
        method: str,
        target: str,
        headers: RawHeaders,
        opened_at: float,
        *,
        is_http_11: bool,
    ) -> None:
        self.response_complete = False
        self.disconnected = False
        self.keep_alive = is_http_11
        self.message_event = NOBODY_WAITS
        self.more_body = True
        self.route = route
        self.method = method
        self.target = target
        self.headers = headers
        self.tenant = ANYBODY  # until its key was looked at
        self.opened_at = opened_at
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None
        self.has_started = False
        self._protocol = protocol
        self._is_http_11 = is_http_11
        self._pieces: list[bytes] = []
        self._gathered: bytearray | None = None  # in place of very many pieces
        self._size = 0
        self._is_chunked = False
        self._head = b""  # not sent before the first bytes of the body are there
        self._task: asyncio.Task[None] | None = None

    # --- the request ------------------------------------------------------------------------------

    def feed(self, piece: bytes) -> int:
        """Take in a piece of the body and return the bytes in all."""
        self._size += len(piece)
        if self._gathered is not None:
            self._gathered += piece
            return self._size
        self._pieces.append(piece)
        if len(self._pieces) > PIECES_MAX:
            self._gathered, self._pieces = bytearray(b"".join(self._pieces)), []
        return self._size

    def take_body(self) -> bytes:
        """Return the whole body, once it is complete."""
        pieces, self._pieces = self._pieces, []
        if self._gathered is not None:
            pieces, self._gathered = [bytes(self._gathered)], None
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def run(self, answer: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Answer the request in a task, which is cancelled when the client leaves."""
        self._task = asyncio.get_running_loop().create_task(answer)
        return self._task

    def leave(self) -> None:
        """The client closed its connection."""
        self.disconnected = True
        if self._task is not None and not self.response_complete:
            self._task.cancel()

    # --- the answer -------------------------------------------------------------------------------

    def start(self, status: int, headers: RawHeaders) -> None:
        """Begin the answer. Without a content-length the body is sent in chunks."""
        self.has_started = True
        lines = [STATUS_LINE[status]]
        has_length = False
        for name, value in (*self._protocol.default_headers, *headers):
            if name == b"content-length":
                if status == 204:  # whatever an engine says (RFC 9110, 8.6)
                    continue
                has_length = True
            elif name == b"connection":  # only ever "close", of a refusal
                self.keep_alive = False
            lines += (name, b": ", value, b"\r\n")
        if not has_length and status not in (204, 304):
            if self._is_http_11:
                self._is_chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
            else:
                self.keep_alive = False  # the end of the connection is the end of the body
        lines.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        self._head = b"".join(lines)

    def write(self, piece: bytes) -> None:
        """Send a piece of the body, not empty."""
        if self.disconnected:
            return
        if self._is_chunked:
            piece = b"%b%x\r\n%b\r\n" % (self._head, len(piece), piece)
        elif self._head:
            piece = self._head + piece
        self._head = b""
        self._protocol.transport.write(piece)

    def finish(self, piece: bytes = b"") -> None:
        """Send the last piece of the body and end the answer."""
        if self.method == "HEAD":
            piece = b""
        if self._is_chunked:
            end = b"%x\r\n%b\r\n%b" % (len(piece), piece, LAST_CHUNK) if piece else LAST_CHUNK
        else:
            end = piece
        if self._head or end:
            self._send(self._head + end)
        self._head = b""
        self._complete()

    def flush_head(self) -> None:
        """Send the head by itself: no byte of the body is there yet, and the client may want it."""
        self._send(self._head)
        self._head = b""

    def break_off(self) -> None:
        """End the answer so that the client sees that it isn't whole."""
        self.keep_alive = False
        if self._head:
            self.flush_head()
        self._complete()

    def _send(self, data: bytes) -> None:
        if not self.disconnected:
            self._protocol.transport.write(data)

    def _complete(self) -> None:
        if not self.response_complete:
            self.response_complete = True
            self._protocol.answered(self)


class ClientProtocol(HttpToolsProtocol):
    """See the module. Made by uvicorn for each connection."""

    cycle: Any

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._gateway = cast("Gateway", self.config.app)
        self._set_limits()
        self._sections = 0  # heads, and what stands between chunks, trailers among them
        self._open_section = 0  # the one that isn't complete, 0: none
        self._section_bytes = 0  # received while it was open
        self._skipped_framing = b""  # of a body that the parser would take for another protocol's
        self._is_in_body = False
        self._is_discarding = False  # what comes belongs to nothing that will be answered

    @property
    def default_headers(self) -> RawHeaders:
        """Return the headers of every answer: the date."""
        return self.server_state.default_headers

    # --- the connection ---------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._is_discarding:
            return
        self._unset_keepalive_if_required()
        section = self._open_section
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._read_past_offer(data[offer.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("the request is not HTTP/1.1")
        if section and section == self._open_section:
            # The parser keeps a header until it is whole, so one without end is noticed here.
            self._section_bytes += len(data)
            if self._section_bytes > self._headers_bytes_max:
                self._refuse_head()

    def _read_past_offer(self, rest: bytes) -> None:
        """Read on as if no other protocol had been offered, which a server may (RFC 9110, 7.8)."""
        if self._skipped_framing:
            self.parser = _BodyReader(self, self._skipped_framing).parser
            self._skipped_framing = b""
        if rest:
            self.data_received(rest)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if isinstance(self.cycle, ClientRequest):
            self.cycle.leave()

    def eof_received(self) -> None:
        """Close: whoever closes its side has left. To some it is but half a goodbye; engines and
        reverse proxies take it the same way, and generating for nobody costs more."""
        if isinstance(self.cycle, ClientRequest):
            self.cycle.leave()

    def pause_writing(self) -> None:
        super().pause_writing()
        if isinstance(self.cycle, ClientRequest) and self.cycle.on_pause is not None:
            self.cycle.on_pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if isinstance(self.cycle, ClientRequest) and self.cycle.on_resume is not None:
            self.cycle.on_resume()
        if self.cycle is None or self.cycle.response_complete:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.flow.write_paused and not self.transport.is_closing():
            # Else a client that asks and never reads could fill memory with answers.
            self.flow.pause_reading()

    def send_400_response(self, msg: str) -> None:
        self._refuse(GatewayError(400, msg, "invalid_request"))

    # --- httptools calls these --------------------------------------------------------------------

    def _set_limits(self) -> None:
        limits = self._gateway.settings.limits
        self._headers_bytes_max = limits.headers_bytes_max
        self._body_bytes_max = limits.body_bytes_max

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._set_limits()
        self._begin_section()

    def _begin_section(self) -> None:
        self._sections += 1
        self._open_section = self._sections
        self._section_bytes = 0

    def on_headers_complete(self) -> None:
        self._open_section = 0
        if self._is_discarding:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.discard()
            return
        fields_bytes = sum(len(n) + len(v) + 4 for n, v in self.headers)
        if len(self.url) + fields_bytes > self._headers_bytes_max:
            self._refuse_head()
            return
        problem = _find_problem(self.parser.get_http_version(), self.headers)
        if problem is not None:
            self._refuse(problem)
            return
        path = _read_path(self.url)
        if path in PROXIED:
            self._begin(PROXIED[path])
        else:
            super().on_headers_complete()
        if self.parser.should_upgrade():
            framing = [h for h in self.headers if h[0] in (b"content-length", b"transfer-encoding")]
            self._skipped_framing = b"".join(b"%b: %b\r\n" % header for header in framing)
            self.cycle.keep_alive = False
        self.headers = []  # for trailers, which nobody reads
        self._is_in_body = True

    def on_chunk_header(self) -> None:
        self._begin_section()  # the last chunk's are the trailers

    def on_body(self, body: bytes) -> None:
        self._open_section = 0
        if self._is_discarding:
            return
        if not isinstance(self.cycle, ClientRequest):
            super().on_body(body)
        elif self.cycle.feed(body) > self._body_bytes_max:
            self._refuse_body()

    def on_message_complete(self) -> None:
        self._open_section = 0
        if self._is_discarding or self._skipped_framing:
            return
        self._is_in_body = False
        if not isinstance(self.cycle, ClientRequest):
            super().on_message_complete()
        elif self.cycle.more_body:
            self.cycle.more_body = False
            self._start(self.cycle)

    def discard(self) -> None:
        """Read nothing more than what is being answered; then the connection closes."""
        self.cycle.keep_alive = False
        self._is_discarding = True

    # --- proxied requests -------------------------------------------------------------------------

    def _begin(self, route: Route) -> None:
        """A request for a proxied route has its headers complete."""
        query = httptools.parse_url(self.url).query
        is_http_11 = self.parser.get_http_version() == "1.1"
        # The path as the table has it, however the client spelled it.
        target = f"{route.template}?{query.decode('latin-1')}" if query else route.template
        method = self.parser.get_method().decode("latin-1")
        opened_at = self._gateway.driver.clock()
        self.cycle = ClientRequest(
            self, route, method, target, self.headers, opened_at, is_http_11=is_http_11
        )
        if not self.parser.should_keep_alive() or self._gateway.readiness.is_draining:
            self.cycle.keep_alive = False
        try:
            # Before anything else of it is read.
            self.cycle.tenant = self._gateway.access.admit(self.headers)
        except GatewayError as error:
            self._refuse(error)
            return
        length = next((v for n, v in self.headers if n == b"content-length"), b"0")
        if int(length) > self._body_bytes_max:
            self._refuse_body()
        elif self.expect_100_continue and is_http_11:
            self.transport.write(CONTINUE)

    def _start(self, request: ClientRequest) -> None:
        task = request.run(self._gateway.answer(request))
        self.tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.logger.error("a bug of ours", exc_info=task.exception())
            self.transport.close()

    def answered(self, request: ClientRequest) -> None:
        """An answer is complete: the connection waits for the next request, or closes."""
        if self.transport.is_closing():
            return
        if self._is_discarding:
            self.loop.call_later(DISCARD_S, self.transport.close)
        elif not request.keep_alive:
            self.transport.close()
        else:
            self.on_response_complete()

    # --- refusing ---------------------------------------------------------------------------------

    def _refuse_head(self) -> None:
        maximum = self._headers_bytes_max
        message = f"the headers are larger than {maximum} bytes"
        self._refuse(GatewayError(431, message, "headers_too_large"))

    def _refuse_body(self) -> None:
        message = f"the body is larger than {self._body_bytes_max} bytes"
        self._refuse(GatewayError(413, message, "body_too_large"))

    def _refuse(self, error: GatewayError) -> None:
        """Answer a request that is not read any further."""
        if self._is_discarding:
            return
        request = self.cycle
        if self._is_in_body and request is not None and request.response_complete:
            self.discard()  # it was answered before its body was read
            self.answered(request)
            return
        if isinstance(request, RequestResponseCycle) and _waits_for_body(request):
            request.disconnected = True
            request.message_event.set()
            request = None
        if request is None or request.response_complete:
            route = PROXIED.get(_read_path(self.url), UNREAD_ROUTE)
            now = self._gateway.driver.clock()
            request = self.cycle = ClientRequest(
                self, route, "", "", self.headers, now, is_http_11=True
            )
        self.discard()
        if isinstance(request, ClientRequest) and request.more_body:
            request.more_body = False
            self._gateway.refuse(request, error)
        # Else what can't be read came behind a request that is being answered.


class _BodyReader:
    """Reads a body for a protocol whose parser takes an offer of another protocol for its end."""

    def __init__(self, protocol: ClientProtocol, framing: bytes) -> None:
        self._protocol = protocol
        self._has_begun = False
        self.on_body = protocol.on_body
        self.on_chunk_header = protocol.on_chunk_header
        self.on_message_complete = protocol.on_message_complete
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % framing)

    def on_message_begin(self) -> None:
        if self._has_begun:
            self._protocol.discard()  # another request, though this one was to be the last
        self._has_begun = True


def _find_problem(version: str, headers: RawHeaders) -> GatewayError | None:
    """Return why a request is not answered whose head the parser lets pass, None where nothing is wrong with it.

    Source: RFC 9112, 3.2 (host) and 6.1 (transfer codings); RFC 9110, 15.6.6 (versions).
    """
    hosts = [value for name, value in headers if name == b"host"]
    if version not in ("1.0", "1.1"):
        return GatewayError(505, f"HTTP/{version}: expected HTTP/1.1", "version_not_supported")
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        told = f"host: expected one such header, there are {len(hosts)}"
        return GatewayError(400, told, "invalid_request")
    if hosts and _HOST.fullmatch(hosts[0]) is None:
        return GatewayError(400, "host: expected HOST or HOST:PORT", "invalid_request")
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if not codings:
        return None
    if version == "1.0":
        return GatewayError(400, "transfer-encoding: not in HTTP/1.0", "invalid_request")
    names = [name.strip(b" \t") for name in b",".join(codings).lower().split(b",")]
    if names == [b"chunked"]:
        return None
    message = "transfer-encoding: expected chunked, once, and no other"
    if names[-1] == b"chunked" and b"chunked" not in names[:-1]:
        return GatewayError(501, message, "not_implemented")
    return GatewayError(400, message, "invalid_request")


def _waits_for_body(cycle: RequestResponseCycle) -> bool:
    return cycle.more_body and not cycle.response_started


UNREAD_ROUTE = Route("unmatched")
"""In place of a route that is not one of the proxied, or not known yet."""


def _read_path(url: bytes) -> str:
    """Return an address's path as routes name it, "" if it has none that could be one."""
    try:
        path = httptools.parse_url(url).path or b""  # none in http://host
        return unquote(path.decode("ascii"))
    except (httptools.HttpParserInvalidURLError, UnicodeDecodeError):
        return ""
