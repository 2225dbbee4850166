"""A DNS server on localhost that knows one name."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Self, cast

import dns.asyncresolver
import dns.flags
import dns.message
import dns.rcode
import dns.rrset

NAME = "_http._tcp.engines.test."


class DnsServer:
    """Answers queries for the SRV records of `NAME` with what is set; others with NXDOMAIN."""

    def __init__(self) -> None:
        self.services: Sequence[tuple[str, int]] = ()  # target and port
        self.is_silent = False
        self.queries = 0
        self._transport: asyncio.DatagramTransport | None = None

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(
            lambda: _Protocol(self), local_addr=("127.0.0.1", 0)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._transport is not None
        self._transport.close()

    def resolver(self) -> dns.asyncresolver.Resolver:
        """Return a resolver that asks this server only."""
        assert self._transport is not None
        resolver = dns.asyncresolver.Resolver(configure=False)
        resolver.nameservers = ["127.0.0.1"]
        resolver.port = self._transport.get_extra_info("sockname")[1]
        return resolver

    def answer(self, data: bytes) -> bytes | None:
        self.queries += 1
        if self.is_silent:
            return None
        query = dns.message.from_wire(data)
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.AA
        if query.question[0].name.to_text() != NAME:
            answer.set_rcode(dns.rcode.NXDOMAIN)
        elif self.services:
            records = [f"0 0 {port} {target}" for target, port in self.services]
            answer.answer.append(dns.rrset.from_text(NAME, 1, "IN", "SRV", *records))
        return answer.to_wire()


class _Protocol(asyncio.DatagramProtocol):
    def __init__(self, server: DnsServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: Any) -> None:
        answer = self._server.answer(data)
        if answer is not None:
            self._transport.sendto(answer, addr)
