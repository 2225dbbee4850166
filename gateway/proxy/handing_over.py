"""One request over two instances: performs what `router/handoff.py` says, on real connections.

Both legs are one task, apart from the exchange whose client waits for them. A client that leaves cancels
its exchange, but not this: the hand-off is adopted, goes on until the decode side has fetched the blocks,
and only then is the request over for the core as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from moongate.gateway.dialects.messages_bridge import Bridge
from moongate.gateway.instances.links import Link
from moongate.gateway.proxy.bootstrap import BootstrapFailed, Bootstraps
from moongate.gateway.proxy.legs import read_prefill
from moongate.gateway.proxy.upstream import (
    Answer,
    Disconnected,
    NoConnection,
    PoolFull,
    TimedOut,
    Unreachable,
    UpstreamError,
)
from moongate.router import FailureKind, Forward, Holder
from moongate.router.handoff import (
    Handoff,
    HandoffError,
    HandoffKind,
    NothingLeft,
    PrefillAnswer,
    SendDecode,
    SendPrefill,
    TransferParams,
)

logger = logging.getLogger(__name__)

DELIVERED_WITHIN_S = 5.0
"""How long a decode leg whose client has left may go on after it was sent: by then the engine has it, and
cancelling it frees the blocks on either side."""

RELEASE_PAUSE_S = 1.0
RELEASES_MAX = 60
"""A decode leg that no instance could take is delivered to the one chosen for it, for nobody, as soon as
that one can be reached; after these attempts the blocks are left to the prefill engine's own limit."""

FAILURES: Mapping[type[UpstreamError], FailureKind] = {
    Unreachable: FailureKind.UNREACHABLE,
    NoConnection: FailureKind.NO_CONNECTION,
    Disconnected: FailureKind.DISCONNECTED,
    TimedOut: FailureKind.TIMEOUT,
    PoolFull: FailureKind.FULL,
}


class HandoffResult(Enum):
    """How a hand-off ended; for metrics."""

    HANDED_OVER = "handed_over"
    REDELIVERED = "redelivered"  # the same, to another decode instance than was chosen first
    FAILED = "failed"
    REFUSED = "refused"  # by either instance, for the request's own fault
    RELEASED = "released"  # its client had left


@dataclass(frozen=True, slots=True)
class Opened:
    """An answer that has begun, and its first bytes (none: it is empty).

    `bridge`: what it was asked through; None: as the client asked.
    """

    answer: Answer
    first: bytes
    bridge: Bridge | None = None


class PrefillRefused(Exception):
    """The prefill instance answered with an error, which says what is wrong better than we can."""

    def __init__(self, opened: Opened) -> None:
        super().__init__(f"status {opened.answer.status}")
        self.opened = opened


class PrefillFailed(Exception):
    """The prefill leg failed. `cause` None: it was answered, but not with a prefill."""

    def __init__(
        self, kind: FailureKind, status: int | None = None, cause: UpstreamError | None = None
    ) -> None:
        super().__init__(str(cause or status))
        self.kind = kind
        self.status = status
        self.cause = cause


class SendLeg(Protocol):
    """How the request sends a leg: with these parameters for the engine's connector."""

    async def __call__(
        self,
        holder: Holder,
        link: Link,
        params: TransferParams | None,
        *,
        is_one_token: bool = False,
        is_release: bool = False,
        on_sent: Callable[[], object] | None = None,
    ) -> Opened:
        """Return the answer's beginning. Raises: UpstreamError."""
        ...


class HandoffRun:
    """One request's hand-off under way.

    `start` it, and where the core says so `redeliver`; then wait for what is `opened`. Where nobody
    waits any more, `finish_alone`.
    """

    def __init__(
        self,
        kind: HandoffKind,
        transfer_id: str,
        send_leg: SendLeg,
        bootstraps: Bootstraps,
        on_prefilled: Callable[[bool], object],
    ) -> None:
        """`on_prefilled` is told, when the prefill leg was answered, whether blocks are kept."""
        self.machine = Handoff(kind, transfer_id)
        self.is_handed_over = False  # blocks are kept, or were, for the decode leg
        self.is_owed = False  # to the prefill instance: a decode leg that no instance could take
        self.cached_tokens: int | None = None  # of the prompt, on the prefill instance
        self._send_leg = send_leg
        self._bootstraps = bootstraps
        self._on_prefilled = on_prefilled
        self._has_redelivered = False
        self._target: tuple[Holder, Link] | None = None  # of the decode leg
        self._sent = asyncio.Event()  # the decode leg
        self._task: asyncio.Task[Opened | None] | None = None

    # --- for the exchange -------------------------------------------------------------------------

    def start(self, forward: Forward, prefill: Link, decode: Link) -> None:
        self._run(self._both_legs(self.machine.begin(), forward, prefill, decode))

    def redeliver(self, forward: Forward, decode: Link) -> None:
        """Send the decode leg, which no instance has got, to this one."""
        self._has_redelivered = True
        self._run(self._decode(self.machine.redeliver(), forward.holder, decode))

    async def opened(self) -> Opened:
        """Return the answer's beginning. Cancelling this cancels none of the legs.

        Raises: PrefillRefused (4xx), PrefillFailed, UpstreamError (the decode leg).
        """
        assert self._task is not None
        opened = await asyncio.shield(self._task)
        assert opened is not None, "nothing to send for a client that is there"
        return opened

    def result(self, opened: Opened) -> HandoffResult:
        """Return how it ended where its answer has begun."""
        status = opened.answer.status
        if status >= 400:
            return HandoffResult.FAILED if status >= 500 else HandoffResult.REFUSED
        return HandoffResult.REDELIVERED if self._has_redelivered else HandoffResult.HANDED_OVER

    # --- the legs ---------------------------------------------------------------------------------

    def _run(self, legs: Coroutine[Any, Any, Opened | None]) -> None:
        self._task = asyncio.create_task(legs)

    async def _both_legs(
        self, begun: SendPrefill, forward: Forward, prefill: Link, decode: Link
    ) -> Opened | None:
        """Return the decode leg's beginning; None: nothing was left to send. Raises: see `opened`."""
        answer = await self._prefill(begun, forward, prefill)
        try:
            action = self.machine.prefill_answered(answer)
        except HandoffError as error:
            logger.warning("instance %s: %s", prefill.id, error)
            raise PrefillFailed(FailureKind.STATUS) from error
        self.is_handed_over = isinstance(action, SendDecode) and action.params is not None
        self.cached_tokens = answer.cached_tokens
        self._on_prefilled(self.is_handed_over)
        return await self._decode(action, forward.holder, decode)

    async def _prefill(self, begun: SendPrefill, forward: Forward, link: Link) -> PrefillAnswer:
        """Raises: PrefillRefused, PrefillFailed."""
        assert forward.prefill is not None
        asking = asyncio.create_task(self._ask_bootstrap(forward.prefill, link))
        try:
            body = await self._send_prefill(begun, forward.prefill, link)
            is_held, params, cached_tokens = read_prefill(body)
            if not is_held:
                logger.warning("instance %s: a prefill did not end by its length", link.id)
            engine_id, url = await asking, link.settings.bootstrap_url
            if engine_id is None and is_held:
                # It may have been starting just then, and the prefill took a while.
                engine_id = await self._ask_bootstrap(forward.prefill, link)
            return PrefillAnswer(is_held, params, cached_tokens, url, engine_id)
        except (PrefillRefused, PrefillFailed):
            self.machine.prefill_failed()
            raise
        finally:
            asking.cancel()

    async def _send_prefill(self, begun: SendPrefill, holder: Holder, link: Link) -> bytes:
        """Return the answer's body. Raises: PrefillRefused, PrefillFailed."""
        try:
            opened = await self._send_leg(holder, link, begun.params, is_one_token=True)
            status = opened.answer.status
            if 400 <= status < 500:
                raise PrefillRefused(opened)
            try:
                body = await read_all(opened)
            finally:
                opened.answer.close()
        except UpstreamError as error:
            raise PrefillFailed(FAILURES[type(error)], cause=error) from error
        if status >= 500:
            raise PrefillFailed(FailureKind.STATUS, status)
        return body

    async def _ask_bootstrap(self, holder: Holder, link: Link) -> str | None:
        url = link.settings.bootstrap_url
        if self.machine.kind is not HandoffKind.MOONCAKE or url is None:
            return None
        try:
            return await self._bootstraps.engine_id(url, holder.rank)
        except BootstrapFailed as error:
            logger.warning("instance %s: %s", link.id, error)
            return None

    async def _decode(
        self, action: SendDecode | NothingLeft, holder: Holder, link: Link
    ) -> Opened | None:
        """Send the decode leg and return its answer's beginning. Raises: UpstreamError."""
        if isinstance(action, NothingLeft):
            return None
        self.is_owed, self._target = False, (holder, link)
        self._sent.clear()
        try:
            opened = await self._send_leg(
                holder,
                link,
                action.params,
                is_one_token=action.is_release,
                is_release=action.is_release,
                on_sent=self._sent.set,
            )
        except UpstreamError as error:
            self.is_owed = self.is_handed_over and not FAILURES[type(error)].was_sent
            if not self.is_owed:
                self.machine.decode_ended()
            raise
        self.machine.decode_began()
        return opened

    # --- after the client -------------------------------------------------------------------------

    async def finish_alone(self, on_failed: Callable[[FailureKind, bool], bool]) -> HandoffResult:
        """Bring a hand-off whose client has left to where nothing is kept for it any more.

        `on_failed` is told of a leg that failed, and whether it was the prefill; where the core knows
        another decode instance it calls `redeliver`, and returns True.
        """
        was_decoding = self.machine.is_decoding
        self.machine.client_left()
        assert self._task is not None
        try:
            if was_decoding:
                await self._until_delivered(self._task)
                self._task.cancel()  # without effect on one that is done
            while True:
                await asyncio.wait({self._task})
                result = self._read_end(self._task, on_failed)
                if result is not None:
                    return await self.release() if self.is_owed else result
        finally:
            self._task.cancel()  # if it is the gateway that ends
            await asyncio.wait({self._task})

    async def _until_delivered(self, task: asyncio.Task[Opened | None]) -> None:
        """Return once a decode leg has come to its answer, or has been with the engine for a while."""
        sent = asyncio.create_task(self._sent.wait())
        try:
            await asyncio.wait({task, sent}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sent.cancel()
        await asyncio.wait({task}, timeout=DELIVERED_WITHIN_S)

    def _read_end(
        self, task: asyncio.Task[Opened | None], on_failed: Callable[[FailureKind, bool], bool]
    ) -> HandoffResult | None:
        """Return how legs that nobody waits for ended; None: they go on."""
        if task.cancelled():
            return HandoffResult.RELEASED
        error = task.exception()
        match error:
            case None:
                opened = task.result()
                if opened is not None:
                    opened.answer.close()
                return HandoffResult.RELEASED
            case PrefillRefused():
                error.opened.answer.close()
                return HandoffResult.REFUSED
            case PrefillFailed():
                on_failed(error.kind, True)
            case UpstreamError():
                if on_failed(FAILURES[type(error)], False):
                    return None
            case _:
                raise error
        logger.warning("a hand-off whose client has left failed: %s", error)
        return HandoffResult.FAILED

    async def release(self) -> HandoffResult:
        """Deliver a decode leg that no instance could take, for nobody, once its own can be reached."""
        self.machine.client_left()
        assert self._target is not None
        holder, link = self._target
        for _ in range(RELEASES_MAX):
            try:
                opened = await self._decode(self.machine.redeliver(), holder, link)
            except UpstreamError as error:
                if not self.is_owed:
                    logger.warning("instance %s: a release failed: %s", link.id, error)
                    return HandoffResult.FAILED
                await asyncio.sleep(RELEASE_PAUSE_S)
            else:
                assert opened is not None
                opened.answer.close()
                return HandoffResult.RELEASED
        logger.warning("instance %s: not to be reached; blocks are left to their limit", link.id)
        return HandoffResult.FAILED


async def read_all(opened: Opened) -> bytes:
    """Return an answer's whole body. Raises: UpstreamError."""
    pieces = [opened.first]
    while piece := await opened.answer.read():
        pieces.append(piece)
    return b"".join(pieces)
