"""One request over two instances: performs what `router/handoff.py` says, on real connections.

The legs run as tasks of their own. A client that leaves cancels its exchange, but not these: they are
adopted, go on until the decode side has fetched the blocks, and only then is the request over for the
core as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeVar

from moongate.gateway.bootstrap import BootstrapFailed, Bootstraps
from moongate.gateway.legs import read_prefill
from moongate.gateway.links import Link, Links
from moongate.gateway.upstream import (
    Answer,
    Disconnected,
    PoolFull,
    TimedOut,
    Unreachable,
    UpstreamError,
)
from moongate.router import FailureKind, Forward, Holder
from moongate.router.handoff import (
    Action,
    Handoff,
    HandoffError,
    HandoffKind,
    PrefillAnswer,
    SendDecode,
    SendPrefill,
    TransferParams,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

DELIVERED_WITHIN_S = 5.0
"""How long a decode leg whose client has left may go on without a byte: by then the engine has it, and
cancelling it frees the blocks on either side."""


FAILURES: Mapping[type[UpstreamError], FailureKind] = {
    Unreachable: FailureKind.UNREACHABLE,
    Disconnected: FailureKind.DISCONNECTED,
    TimedOut: FailureKind.TIMEOUT,
    PoolFull: FailureKind.FULL,
}


class HandoffResult(Enum):
    """How a hand-off ended; for metrics."""

    HANDED_OVER = "handed_over"
    REDELIVERED = "redelivered"  # the same, to another decode instance than was chosen first
    FAILED = "failed"
    REFUSED = "refused"  # by the prefill instance, for the request's own fault
    RELEASED = "released"  # its client had left


@dataclass(frozen=True, slots=True)
class Opened:
    """An answer that has begun, and its first bytes (none: it is empty)."""

    answer: Answer
    first: bytes


class PrefillRefused(Exception):
    """The prefill instance answered with an error, which says what is wrong better than we can."""

    def __init__(self, opened: Opened) -> None:
        super().__init__(f"status {opened.answer.status}")
        self.opened = opened


class PrefillFailed(Exception):
    """The prefill leg failed. `cause` None: by an answer with a status of 500 or more."""

    def __init__(
        self, kind: FailureKind, status: int | None = None, cause: UpstreamError | None = None
    ) -> None:
        super().__init__(str(cause or status))
        self.kind = kind
        self.status = status
        self.cause = cause


class Sender(Protocol):
    """How an exchange sends a leg."""

    async def send_leg(
        self,
        holder: Holder,
        link: Link,
        params: TransferParams | None,
        *,
        is_one_token: bool = False,
    ) -> Opened:
        """Send the request with these parameters for the engine's connector. Raises: UpstreamError."""
        ...


class HandoffRun:
    """One request's hand-off under way."""

    def __init__(
        self, kind: HandoffKind, transfer_id: str, sender: Sender, bootstraps: Bootstraps
    ) -> None:
        self.machine = Handoff(kind, transfer_id)
        self._sender = sender
        self._bootstraps = bootstraps
        self.task: asyncio.Task[Any] | None = None  # the leg under way

    async def protect(self, leg: Coroutine[Any, Any, T]) -> T:
        """Run a leg to its end, whatever becomes of whoever waits for it."""
        task = asyncio.create_task(leg)
        self.task = task
        return await asyncio.shield(task)

    # --- the legs ---------------------------------------------------------------------------------

    async def prefill(self, forward: Forward, link: Link) -> Action:
        """Send the prefill leg. Return what comes next.

        Raises: PrefillRefused (4xx), PrefillFailed, HandoffError.
        """
        begun = self.machine.begin()
        assert isinstance(begun, SendPrefill)
        asking = asyncio.create_task(self._ask_bootstrap(forward, link))
        try:
            assert forward.prefill is not None
            opened = await self._sender.send_leg(
                forward.prefill, link, begun.params, is_one_token=True
            )
            answer = await self._read_prefill(opened, forward, link, asking)
        except UpstreamError as error:
            self.machine.prefill_failed()
            raise PrefillFailed(FAILURES[type(error)], cause=error) from error
        finally:
            asking.cancel()
        return self.machine.prefill_answered(answer)

    async def _read_prefill(
        self, opened: Opened, forward: Forward, link: Link, asking: asyncio.Task[str | None]
    ) -> PrefillAnswer:
        """Raises: UpstreamError, PrefillRefused, PrefillFailed."""
        status = opened.answer.status
        if 400 <= status < 500:
            self.machine.prefill_failed()
            raise PrefillRefused(opened)
        try:
            body = await read_all(opened)
        finally:
            opened.answer.close()
        if status >= 500:
            self.machine.prefill_failed()
            raise PrefillFailed(FailureKind.STATUS, status)
        is_held, params, cached_tokens = read_prefill(body)
        if not is_held:
            logger.warning("instance %s: a prefill did not end by its length", link.id)
        return PrefillAnswer(
            is_held, params, cached_tokens, link.settings.bootstrap_url, await asking
        )

    async def _ask_bootstrap(self, forward: Forward, link: Link) -> str | None:
        url = link.settings.bootstrap_url
        if self.machine.kind is not HandoffKind.MOONCAKE or url is None:
            return None
        assert forward.prefill is not None
        try:
            return await self._bootstraps.engine_id(url, forward.prefill.rank)
        except BootstrapFailed as error:
            logger.warning("instance %s: %s", link.id, error)
            return None

    async def decode(self, forward: Forward, link: Link, action: SendDecode) -> Opened:
        """Send the decode leg and return its answer's beginning. Raises: UpstreamError."""
        return await self._sender.send_leg(
            forward.holder, link, action.params, is_one_token=action.is_release
        )

    # --- after the client -------------------------------------------------------------------------

    async def finish_alone(
        self, forward: Forward, links: Links, on_prefilled: Callable[[], object]
    ) -> HandoffResult:
        """Bring a hand-off whose client has left to where nothing is kept for it any more."""
        task = self.task
        assert task is not None
        self.machine.client_left()
        if self.machine.is_decoding:
            await asyncio.wait({task}, timeout=DELIVERED_WITHIN_S)
            task.cancel()  # without effect on one that is done
        try:
            outcome = await task
            if isinstance(outcome, SendDecode):
                on_prefilled()
                link = links.get(forward.holder.instance_id)
                outcome = await self.decode(forward, link, outcome)
                await read_all(outcome)
        except PrefillRefused as error:
            error.opened.answer.close()
            return HandoffResult.REFUSED
        except (PrefillFailed, HandoffError, UpstreamError) as error:
            logger.warning("a hand-off whose client has left failed: %s", error)
            return HandoffResult.FAILED
        except asyncio.CancelledError:
            if not task.cancelled():
                raise  # it is the gateway that ends
        else:
            if isinstance(outcome, Opened):
                outcome.answer.close()
        return HandoffResult.RELEASED


async def read_all(opened: Opened) -> bytes:
    """Return an answer's whole body. Raises: UpstreamError."""
    pieces = [opened.first]
    while piece := await opened.answer.read():
        pieces.append(piece)
    return b"".join(pieces)
