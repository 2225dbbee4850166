"""Attempts on instances: send where the core says, and again where it says so.

Nothing is sent to the client before an engine's first byte, so until then an attempt may be repeated; what
is repeated, and where, the core decides. In the end one answer is relayed, or an error raised. Of an
exchange it writes that an attempt on one instance has no `handoff`.
"""

from __future__ import annotations

import asyncio

from moongate.gateway.driver import RequestCommand
from moongate.gateway.instances.links import Links
from moongate.gateway.proxy.engine_answers import EngineAnswers
from moongate.gateway.proxy.exchange import Exchange
from moongate.gateway.proxy.failures import as_gateway_error
from moongate.gateway.proxy.handing_over import FAILURES, Opened, PrefillFailed, PrefillRefused
from moongate.gateway.proxy.pairs import Pairs
from moongate.gateway.proxy.refusals import Refusals, Refused
from moongate.gateway.proxy.sending import Sender
from moongate.gateway.proxy.upstream import UpstreamError
from moongate.gateway.telemetry.metrics import Metrics
from moongate.router import FailureKind, Forward, Request


class Attempts:
    """Makes a request's attempts."""

    def __init__(
        self, links: Links, sender: Sender, pairs: Pairs, answers: EngineAnswers, metrics: Metrics
    ) -> None:
        self._links = links
        self._sender = sender
        self._pairs = pairs
        self._answers = answers
        self._metrics = metrics

    async def forward(self, exchange: Exchange, request: Request, forward: Forward) -> None:
        """Send a request where the core says, again if it says so, and relay the answer.

        Raises: GatewayError, if no instance gives one.
        """
        account = exchange.account
        refusals = Refusals()
        try:
            while True:
                account.forwarded(forward, request, is_stream=exchange.body.is_stream)
                opened: Opened | None = None
                failure: UpstreamError | None = None
                command: RequestCommand | None = None
                try:
                    opened = await self._attempt(exchange, forward)
                    status = opened.answer.status
                    account.attempted(forward, str(status) if status >= 500 else None)
                    if status >= 500:
                        command = self._report(exchange, FailureKind.STATUS, status)
                    elif status == 429 and exchange.handoff is None:
                        command = self._report(exchange, FailureKind.RATE_LIMITED, status)
                        refusals.keep(Refused(opened, forward))
                        opened = None  # it is closed with the others
                    gives_way = isinstance(command, Forward) or (status >= 500 and refusals.best())
                    if opened is not None and not gives_way:
                        await self._answers.relay(exchange, opened, forward)
                        return
                except UpstreamError as error:
                    failure = error
                    account.attempted(forward, FAILURES[type(error)].value)
                    command = self._report(exchange, FAILURES[type(error)])
                except PrefillRefused as error:
                    account.attempted(forward, None)
                    refusals.keep(Refused(error.opened, forward))
                    status = error.opened.answer.status
                    command = self._report(
                        exchange, FailureKind.RATE_LIMITED, status, is_prefill=True
                    )
                except PrefillFailed as error:
                    failure = error.cause
                    account.attempted(forward, error.kind.value)
                    command = self._report(exchange, error.kind, error.status, is_prefill=True)
                except asyncio.CancelledError:
                    if opened is None:
                        account.attempted(forward, "client_left")
                    raise
                finally:
                    if opened is not None:
                        opened.answer.close()
                if not isinstance(command, Forward):
                    self._pairs.release_owed(exchange)
                    await self._relay_refusal(exchange, refusals.best(), failure)
                    return
                forward = command
        finally:
            refusals.close()

    async def _attempt(self, exchange: Exchange, forward: Forward) -> Opened:
        """Return the answer's beginning. Raises: UpstreamError, PrefillFailed, PrefillRefused (429)."""
        link = self._links.get(forward.holder.instance_id)
        if forward.prefill is None and not forward.is_redelivery:
            exchange.handoff = None
            return await self._sender.send(exchange, forward.holder, link, None)
        return await self._pairs.attempt(exchange, forward, link)

    async def _relay_refusal(
        self, exchange: Exchange, refused: Refused | None, failure: UpstreamError | None
    ) -> None:
        """Nobody could do it, and one that could later says when. Raises: GatewayError, if none does."""
        if refused is None:
            raise as_gateway_error(failure)
        await self._answers.relay(exchange, refused.opened, refused.forward)

    def _report(
        self,
        exchange: Exchange,
        kind: FailureKind,
        status: int | None = None,
        *,
        is_prefill: bool = False,
    ) -> RequestCommand | None:
        """Tell the core of a failed attempt; it says whether there is another."""
        command = exchange.reservation.failed(kind, status, is_prefill=is_prefill)
        if isinstance(command, Forward):
            self._metrics.retries.add(1, kind.value)
        return command
