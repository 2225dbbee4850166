"""Answers of the gateway's own: refusals, the end of what is cancelled, and responses in the background.

Only reads exchanges; what is answered is counted, once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import orjson

from moongate.gateway.errors import GatewayError, stream_error_events
from moongate.gateway.headers import response_headers
from moongate.gateway.proxy.collected import follow_into
from moongate.gateway.proxy.exchange import Exchange
from moongate.gateway.proxy.request_reading import RequestReader
from moongate.gateway.responses.background import Background
from moongate.gateway.telemetry.metrics import SHED_CODES, Metrics

logger = logging.getLogger(__name__)

CLIENT_LEFT_STATUS = 499
"""Counted for a request whose client left; nobody receives it."""

_STOPS = "the gateway is stopping"


class OwnAnswers:
    """Answers without an engine."""

    def __init__(self, metrics: Metrics, reader: RequestReader, background: Background) -> None:
        self._metrics = metrics
        self._reader = reader
        self._background = background

    def refuse(self, exchange: Exchange, error: GatewayError) -> None:
        """Answer with an error."""
        reason = error.reason or error.code
        if reason in SHED_CODES:
            self._metrics.rejected.add(1, reason)
        rates = exchange.meter.headers() if exchange.meter is not None else {}
        headers = {**rates, **error.headers}
        _answer(exchange, error.status, error.body(exchange.route.family), headers)

    def fail(self, exchange: Exchange) -> None:
        """There is a bug of ours, which is being handled. What has begun can't be an error any more."""
        logger.exception("a bug of ours")
        if exchange.client.has_started:
            exchange.client.break_off()
        else:
            self.refuse(exchange, GatewayError(500, "the gateway failed", "internal_error"))

    def end_early(self, exchange: Exchange) -> None:
        """It is cancelled: its client has left, or the gateway stops and has waited enough."""
        client, account = exchange.client, exchange.account
        if client.disconnected:
            logger.info("the client left")
            account.count(CLIENT_LEFT_STATUS)
            return
        logger.warning("ended, since the gateway stops")
        if not client.has_started:
            self.refuse(exchange, _stopping())
            return
        account.broken_off()
        account.count(200)
        if exchange.is_stream:
            family = exchange.route.family
            first, last = b"".join(exchange.opening), exchange.usage.tail()
            client.finish(
                stream_error_events(_STOPS, "gateway_stopping", family, first=first, last=last)
            )
        else:
            client.break_off()

    async def answer_later(self, exchange: Exchange, raw: bytes) -> None:
        """Tell the client what to ask for, or what comes, of an answer that goes on without it.

        It is counted when it ends. Raises: GatewayError.
        """
        client, account, background = exchange.client, exchange.account, self._background
        account.model_label = self._reader.find_model(exchange.body)
        run = await background.begin(client, raw, exchange.body)
        account.is_counted = True
        if not run.is_stream:
            _answer(exchange, 200, orjson.dumps(run.announced), {})
            return
        collected = run.collected
        try:
            await collected.begun()
        except asyncio.CancelledError:
            background.forget(run)  # its client can't know its name
            raise
        if collected.status == 200:
            await follow_into(collected, client)
            return
        await collected.ended()
        client.start(collected.status or 500, collected.answer_headers)
        client.finish(collected.answer)


def _answer(exchange: Exchange, status: int, body: bytes, extra: Mapping[str, str]) -> None:
    """Answer in JSON."""
    if not exchange.account.is_counted:
        exchange.account.count(status)
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "x-request-id": exchange.account.request_id,
        **extra,
    }
    exchange.client.start(status, response_headers((), headers))
    exchange.client.finish(body)


def _stopping() -> GatewayError:
    return GatewayError(503, _STOPS, "gateway_stopping", headers={"retry-after": "1"})
