"""An attempt over two instances: prefill on one, decode on another.

What the pair has to do is `handing_over.py`'s; here is what the request, its client and the core have to
do with it. Blocks may be kept for a hand-off whose client has left, so it is adopted and goes on to where
nothing is kept any more. Writes an exchange's `handoff`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine

from moongate.gateway.headers import make_request_id
from moongate.gateway.instances.links import Link, Links
from moongate.gateway.proxy.bootstrap import Bootstraps
from moongate.gateway.proxy.exchange import Exchange
from moongate.gateway.proxy.handing_over import (
    HandoffResult,
    HandoffRun,
    Opened,
    PrefillFailed,
    PrefillRefused,
)
from moongate.gateway.proxy.sending import Sender
from moongate.gateway.proxy.upstream import UpstreamError
from moongate.gateway.telemetry.metrics import Metrics
from moongate.router import FailureKind, Forward, Outcome

Adopt = Callable[[Coroutine[None, None, None]], None]
"""Lets work go on whose client has left."""


class Pairs:
    """Hands requests over."""

    def __init__(
        self, links: Links, sender: Sender, bootstraps: Bootstraps, metrics: Metrics, adopt: Adopt
    ) -> None:
        self._links = links
        self._sender = sender
        self._bootstraps = bootstraps
        self._metrics = metrics
        self._adopt = adopt

    async def attempt(self, exchange: Exchange, forward: Forward, link: Link) -> Opened:
        """Return the answer's beginning. `link`: to the decode instance.

        Raises: UpstreamError, PrefillFailed; PrefillRefused with
        429, since another instance may have room.
        """
        if forward.is_redelivery:
            assert exchange.handoff is not None
            handoff = exchange.handoff
            handoff.redeliver(forward, link)
        else:
            handoff = exchange.handoff = self._begin(exchange, forward, link)
        try:
            opened = await handoff.opened()
        except PrefillRefused as error:
            opened = error.opened
            if opened.answer.status == 429:
                self._count(HandoffResult.REFUSED)
                raise
        except asyncio.CancelledError:
            self._leave_to_itself(exchange, handoff)
            raise
        except (PrefillFailed, UpstreamError):
            if not handoff.is_owed:  # else it goes on, here or on its own
                self._count(HandoffResult.FAILED)
            raise
        self._count(handoff.result(opened))
        return opened

    def _begin(self, exchange: Exchange, forward: Forward, link: Link) -> HandoffRun:
        assert forward.prefill is not None
        prefill = self._links.get(forward.prefill.instance_id)
        handoff = HandoffRun(
            prefill.settings.handoff,
            make_request_id(),
            functools.partial(self._sender.send, exchange),
            self._bootstraps,
            on_prefilled=exchange.reservation.prefilled,
        )
        handoff.start(forward, prefill, link)
        return handoff

    def _leave_to_itself(self, exchange: Exchange, handoff: HandoffRun) -> None:
        """The client left in the middle of a hand-off: it goes on to where nothing is kept for it."""
        reservation = exchange.reservation
        reservation.is_adopted = True

        def try_others(kind: FailureKind, is_prefill: bool) -> bool:
            command = reservation.failed(kind, is_prefill=is_prefill)
            if not isinstance(command, Forward) or not command.is_redelivery:
                return False
            handoff.redeliver(command, self._links.get(command.holder.instance_id))
            return True

        async def finish() -> None:
            try:
                self._count(await handoff.finish_alone(try_others))
            finally:
                reservation.is_adopted = False
                reservation.finish(Outcome.CLIENT_LEFT, told=exchange.told_tokens)

        self._adopt(finish())

    def release_owed(self, exchange: Exchange) -> None:
        """The client is told of a failure, and blocks may still be kept for it."""
        handoff = exchange.handoff

        async def release(handoff: HandoffRun) -> None:
            self._count(await handoff.release())

        if handoff is not None and handoff.is_owed:
            self._adopt(release(handoff))

    def _count(self, result: HandoffResult) -> None:
        self._metrics.handoffs.add(1, result.value)
