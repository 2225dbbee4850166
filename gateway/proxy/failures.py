"""What a client is told of an instance that failed: without its address, which is no business of clients."""

from __future__ import annotations

from moongate.gateway.errors import GatewayError
from moongate.gateway.proxy.upstream import (
    NoConnection,
    PoolFull,
    TimedOut,
    Unreachable,
    UpstreamError,
)


def describe(error: UpstreamError) -> str:
    """Return what went wrong, in words."""
    match error:
        case Unreachable():
            return "it could not be reached"
        case TimedOut() | NoConnection():
            return "it did not answer in time"
        case _:
            return "the connection was closed"


def as_gateway_error(error: UpstreamError | None) -> GatewayError:
    """Return the answer. None: a prefill instance answered, but not with a prefill."""
    if error is None:
        return GatewayError(502, "the prompt could not be computed", "prefill_failed")
    if isinstance(error, PoolFull):
        return GatewayError(
            503, f"the instances' connections are all in use: {error}", "gateway_pool",
            headers={"retry-after": "1"},
        )  # fmt: skip
    if isinstance(error, TimedOut | NoConnection):
        return GatewayError(504, f"the engine failed: {describe(error)}", "engine_timeout")
    return GatewayError(502, f"the engine failed: {describe(error)}", "engine_unreachable")
