"""Whom a request is answered to: a connection, or nobody who waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from moongate.gateway.auth.tenants import Tenant
from moongate.gateway.dialects.routes import Route

RawHeaders = Sequence[tuple[bytes, bytes]]


class Client(Protocol):
    """One request, and where its answer goes. See `ClientRequest`."""

    route: Route
    method: str
    target: str
    headers: RawHeaders
    tenant: Tenant
    opened_at: float  # when its head was there, by the gateway's clock
    has_started: bool
    disconnected: bool  # it has left
    on_pause: Callable[[], None] | None
    on_resume: Callable[[], None] | None

    def take_body(self) -> bytes:
        """Return the whole body."""
        ...

    def start(self, status: int, headers: RawHeaders) -> None:
        """Begin the answer."""
        ...

    def write(self, piece: bytes) -> None:
        """Send a piece of the body, not empty."""
        ...

    def finish(self, piece: bytes = b"") -> None:
        """Send the last piece of the body and end the answer."""
        ...

    def break_off(self) -> None:
        """End the answer so that it is seen not to be whole."""
        ...
