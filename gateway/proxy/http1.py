"""HTTP/1.1 towards an engine, sans-IO: a request as bytes, bytes of a connection as an answer.

httptools (llhttp, strict) parses; here is what an answer is beyond that: interim answers are left out,
trailers too, an end that is only told by the connection's end, and whether the connection may be used
again. What can't be an answer raises `MalformedAnswer`.

By hand and not by a client library since on this path the library is most of what a request costs
(docs/decisions/0007); it serves the proxied routes only.
"""

from __future__ import annotations

from collections.abc import Sequence

import httptools

HEADER_BYTES_MAX = 65_536
"""Of an answer's headers together; no engine sends so many."""

INTERIM = frozenset({100, *range(102, 200)})
"""Answers before the answer. 101 would switch the protocol, which nobody asked for."""

FINAL = range(200, 600)


class MalformedAnswer(ValueError):
    """The bytes are no answer; the text says why."""


def format_request(
    target: str, host: str, headers: Sequence[tuple[bytes, bytes]], body_bytes: int
) -> bytes:
    """Return the head of a POST. Headers come from a parser, so they need no escaping."""
    lines = [f"POST {target} HTTP/1.1\r\nhost: {host}\r\n".encode("latin-1")]
    lines += [b"%b: %b\r\n" % header for header in headers]
    lines.append(b"content-length: %d\r\n\r\n" % body_bytes)
    return b"".join(lines)


class AnswerReader:
    """Reads one answer. `feed` it what comes, `end` it when the connection does."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []  # names in lower case
        self._forget_headers()
        self.has_head = False
        self.is_complete = False
        self.has_surplus = False  # bytes that belong to no answer of ours
        self._body: list[bytes] = []
        self._head_bytes = 0  # received before the head was complete
        self._is_framed = False  # its end is told by a length or by chunks
        self._is_reusable = False
        self._problem: str | None = None
        self._parser = httptools.HttpResponseParser(self)

    @property
    def may_continue(self) -> bool:
        """Tell whether the connection can carry another exchange. Asked when complete."""
        return self.is_complete and self._is_reusable and not self.has_surplus

    def feed(self, data: bytes) -> None:
        """Take in bytes. Raises: MalformedAnswer."""
        if not self.has_head:
            if self._head_bytes > HEADER_BYTES_MAX:
                raise MalformedAnswer(f"the headers have more than {HEADER_BYTES_MAX} bytes")
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if not self.is_complete:
                raise MalformedAnswer(self._problem or str(error)) from error
            self.has_surplus = True

    def end(self) -> None:
        """The connection ended. Raises: MalformedAnswer if the answer did not."""
        if self.is_complete:
            return
        if not self.has_head or self._is_framed:
            raise MalformedAnswer("the connection ended before the answer did")
        self.is_complete = True
        self._is_reusable = False

    def take_body(self) -> bytes:
        """Return the body's bytes that came since it was last asked."""
        body = self._body
        if not body:
            return b""
        self._body = []
        return body[0] if len(body) == 1 else b"".join(body)

    # --- httptools calls these --------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.is_complete:
            self.has_surplus = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.has_head:
            return  # a trailer, or surplus
        name = name.lower()
        self._header_bytes += len(name) + len(value)
        if name == b"transfer-encoding":
            self._codings.append(value.lower())
        elif name == b"content-length":
            self._has_length = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self.has_surplus:
            return
        status = self._parser.get_status_code()
        if status in INTERIM:
            self._forget_headers()
            return
        if status not in FINAL:
            raise self._refuse(f"unexpected status {status}")
        if self._header_bytes > HEADER_BYTES_MAX:
            raise self._refuse(f"the headers have more than {HEADER_BYTES_MAX} bytes")
        if self._codings and self._codings != [b"chunked"]:
            raise self._refuse(f"unknown transfer-encoding {self._codings[0][:80]!r}")
        self._is_framed = self._has_length or bool(self._codings)
        self._is_reusable = self._parser.should_keep_alive()
        self.status = status
        self.has_head = True

    def _forget_headers(self) -> None:
        self.headers.clear()
        self._header_bytes = 0
        self._has_length = False
        self._codings: list[bytes] = []

    def _refuse(self, problem: str) -> MalformedAnswer:
        self._problem = problem  # what the parser raises in place of our error has no text
        return MalformedAnswer(problem)

    def on_body(self, body: bytes) -> None:
        if not self.is_complete:
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self.has_head:
            self.is_complete = True
