"""What a name in DNS leads to: the addresses of engines, asked now.

A and AAAA records come from the system's resolver (hosts files and search domains as everywhere on the
machine), asked in a thread; SRV records, which it doesn't tell, from its name servers. An answer without
records is no answer: it is what a name gives that is misspelt, or a resolver that has lost its zone.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import dns.asyncresolver
import dns.exception

from moongate.gateway.config.discovery_settings import DiscoverySettings

LOOKUP_S = 5.0
"""For one look-up as a whole."""

ADDRESSES_MAX = 1024
"""More are no fleet; it would be somebody's mistake."""


class LookupFailed(Exception):
    """The name could not be looked up, or leads nowhere."""


class Address(NamedTuple):
    """Where an engine's HTTP server is. `host`: an address, or with SRV a name."""

    host: str
    port: int


Resolve = Callable[[DiscoverySettings], Awaitable[frozenset[Address]]]
"""Returns what the name leads to: one address at least. Raises: LookupFailed."""


class Resolver:
    """Asks DNS. `servers`: makes what SRV records are asked of."""

    def __init__(
        self,
        servers: Callable[[], dns.asyncresolver.Resolver] = dns.asyncresolver.Resolver,
    ) -> None:
        self._servers = servers

    async def resolve(self, settings: DiscoverySettings) -> frozenset[Address]:
        """See `Resolve`."""
        assert settings.name is not None
        try:
            async with asyncio.timeout(LOOKUP_S):
                if settings.record == "srv":
                    found = await self._find_services(settings.name)
                else:
                    assert settings.port is not None
                    found = await _find_addresses(settings.name, settings.port)
        except TimeoutError as error:
            raise LookupFailed(f"{settings.name}: no answer in {LOOKUP_S:g} s") from error
        if not 0 < len(found) <= ADDRESSES_MAX:
            raise LookupFailed(f"{settings.name}: {len(found)} addresses")
        return found

    async def _find_services(self, name: str) -> frozenset[Address]:
        """Raises: LookupFailed."""
        try:
            answer = await self._servers().resolve(name, "SRV", lifetime=LOOKUP_S)
        except (dns.exception.DNSException, OSError) as error:
            raise LookupFailed(f"{name}: {error}") from error
        return frozenset(
            Address(record.target.to_text(omit_final_dot=True), record.port) for record in answer
        )


async def _find_addresses(name: str, port: int) -> frozenset[Address]:
    """Raises: LookupFailed."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LookupFailed(f"{name}: {error.strerror or error}") from error
    return frozenset(Address(str(sockaddr[0]), port) for *_, sockaddr in found)
