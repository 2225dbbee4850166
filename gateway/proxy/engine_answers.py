"""An engine's answer on its way to the client: what is put before it, done to it, and counted at its end.

How the bytes pass is `relaying.py`'s. Writes an exchange's `usage` and `is_stream`, and gives its
reservation back.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

from moongate.gateway.dialects.json_edits import Edit
from moongate.gateway.dialects.messages_bridge import error_of
from moongate.gateway.dialects.messages_stream import MessageStream
from moongate.gateway.dialects.stream_usage import without_usage_events
from moongate.gateway.dialects.usage import UsageReader
from moongate.gateway.errors import stream_error_events
from moongate.gateway.headers import response_headers
from moongate.gateway.pool.pooling import Pooling
from moongate.gateway.proxy.exchange import Exchange
from moongate.gateway.proxy.failures import describe
from moongate.gateway.proxy.handing_over import Opened
from moongate.gateway.proxy.relaying import (
    AnswerKind,
    Relayed,
    kind_of,
    relay_body,
    relay_events,
    wrap_text_error,
)
from moongate.gateway.proxy.upstream import Answer, UpstreamError
from moongate.gateway.telemetry.metrics import Metrics
from moongate.gateway.telemetry.receipt import receipt_headers
from moongate.router import Forward, Outcome

logger = logging.getLogger(__name__)


class EngineAnswers:
    """Passes answers on. `pooling`: None where there is no pool."""

    def __init__(self, metrics: Metrics, pooling: Pooling | None) -> None:
        self._metrics = metrics
        self._pooling = pooling

    async def relay(self, exchange: Exchange, opened: Opened, forward: Forward) -> None:
        """Pass an answer on, and count it before the client has its end."""
        answer, client, kind = opened.answer, exchange.client, kind_of(opened.answer)
        _note_first_byte(exchange, opened, forward)
        if kind is AnswerKind.TEXT_ERROR:
            await self._relay_text_error(exchange, opened, forward)
            return
        headers = response_headers(answer.raw_headers, _own_headers(exchange, forward))
        edit = _edit_of(exchange, opened, kind)
        if kind is AnswerKind.EVENTS or edit is not None:
            # There may become more or less of it on the way.
            headers = [header for header in headers if header[0] != b"content-length"]
        client.start(answer.status, headers)
        client.on_pause, client.on_resume = answer.pause, answer.resume
        try:
            if kind is AnswerKind.EVENTS:
                exchange.is_stream = True
                opening: list[bytes] = []
                exchange.opening = opening
                end = functools.partial(self._end, exchange, answer.status, forward)
                relayed = await relay_events(
                    opened, client, end, exchange.usage, opening, edit=edit
                )
                relayed = _with_missing_end(exchange, opened, relayed)
            else:
                hides = _hides_params(exchange, answer)
                relayed = await relay_body(opened, client, hides_params=hides, edit=edit)
        finally:
            client.on_pause = client.on_resume = None
        if relayed.error is None or exchange.account.is_counted:
            self._end(exchange, answer.status, forward, relayed.usage)
            client.finish(relayed.last)
        else:
            self._break_off(exchange, answer.status, forward, relayed.error)
            _tell_break(exchange, kind, relayed, relayed.error)

    async def _relay_text_error(self, exchange: Exchange, opened: Opened, forward: Forward) -> None:
        answer = opened.answer
        body = await wrap_text_error(opened, exchange.route.family)
        ours = {
            **_own_headers(exchange, forward),
            "content-type": "application/json",
            "content-length": str(len(body)),
        }
        self._end(exchange, answer.status, forward, UsageReader())
        exchange.client.start(answer.status, response_headers(answer.raw_headers, ours))
        exchange.client.finish(body)

    def _break_off(
        self, exchange: Exchange, status: int, forward: Forward, error: UpstreamError
    ) -> None:
        """The engine ended its answer before it was complete."""
        instance = forward.holder.instance_id
        logger.warning("%s broke its answer off: %s", instance, error)
        exchange.account.broken_off()
        self._metrics.broken_off.add(1, instance)
        exchange.reservation.finish(Outcome.BROKEN_OFF, told=exchange.told_tokens)
        exchange.account.count(status)

    def _end(self, exchange: Exchange, status: int, forward: Forward, usage: UsageReader) -> None:
        """The engine's answer is complete. The second time, after a stream's end mark, it is known."""
        account, meter = exchange.account, exchange.meter
        if account.is_counted:
            return
        exchange.usage = usage
        cached_tokens, computing = usage.cached_tokens(), forward.holder
        handoff, decision = exchange.handoff, forward.decision
        if handoff is not None and handoff.is_handed_over and decision.prefill is not None:
            # To the decode instance all of the prompt is cached.
            cached_tokens, computing = handoff.cached_tokens, decision.prefill.holder
        pool_tokens = None
        if exchange.pool_prompt is not None and self._pooling is not None and status == 200:
            pool_tokens = usage.pool_tokens()
            self._pooling.answered(
                computing.instance_id,
                exchange.pool_prompt,
                decision.reused_tokens if decision.pool_tokens else 0,
                # What an engine reports that another one prefilled for says nothing of the pool.
                cached_tokens if forward.prefill is None else None,
            )
        output_tokens = usage.completion_tokens()
        if meter is not None and exchange.route.is_cached:
            meter.ended(status, usage.prompt_tokens(), output_tokens)
        elif meter is not None:
            meter.give_back()  # counted, but not computed
        is_traced = account.trace is not None and not exchange.has_exact_prompt
        account.answered(
            prompt_tokens=usage.prompt_tokens() if is_traced else None,
            cached_tokens=cached_tokens,
            pool_tokens=pool_tokens,
            output_tokens=output_tokens,
        )
        completion_tokens = output_tokens if exchange.has_one_choice else None
        outcome = Outcome.REFUSED if 400 <= status < 500 else Outcome.ANSWERED
        exchange.reservation.finish(
            outcome, completion_tokens, cached_tokens, told=exchange.told_tokens
        )
        account.count(status)


# --- before it ------------------------------------------------------------------------------------


def _note_first_byte(exchange: Exchange, opened: Opened, forward: Forward) -> None:
    answer, account = opened.answer, exchange.account
    if not exchange.reservation.is_held or account.has_first_byte:
        return
    has_events = answer.header(b"content-type").startswith("text/event-stream")
    shows_prefill = has_events and answer.status == 200
    if shows_prefill or not answer.is_complete:  # else its end follows at once
        exchange.reservation.first_byte(shows_prefill=shows_prefill)
    account.first_byte(forward.holder.instance_id)


def _own_headers(exchange: Exchange, forward: Forward) -> dict[str, str]:
    account = exchange.account
    headers = {"x-request-id": account.request_id}
    if exchange.settings.observability.receipt_headers:
        headers |= receipt_headers(forward.decision)
        if account.queue_ms is not None:
            headers["x-moongate-queue-ms"] = f"{account.queue_ms:.1f}"
    return headers | exchange.meter.headers() if exchange.meter is not None else headers


# --- what is done to it ---------------------------------------------------------------------------


def _edit_of(exchange: Exchange, opened: Opened, kind: AnswerKind) -> Edit | None:
    """Return what is done to the answer, None if it passes as it is."""
    answer, bridge = opened.answer, opened.bridge
    if answer.header(b"content-encoding"):
        return None
    if answer.status != 200:
        return functools.partial(error_of, answer.status) if bridge is not None else None
    # The name comes first: what is kept of a response is what its client gets.
    parts = [part for part in (exchange.renaming, exchange.turn) if part is not None]
    if kind is not AnswerKind.EVENTS:
        around = [bridge.take_whole] if bridge is not None else []
        return _chained([*around, *(part.take_whole for part in parts)])
    edits: list[Edit] = [MessageStream().take_events] if bridge is not None else []
    edits += [part.take_events for part in parts]
    return _chained([*edits, *([without_usage_events] if exchange.drops_usage else [])])


def _chained(edits: Sequence[Edit]) -> Edit | None:
    """Return one edit for several, None for none."""
    if len(edits) < 2:
        return edits[0] if edits else None

    def edit(text: bytes) -> bytes:
        return functools.reduce(lambda changed, one: one(changed), edits, text)

    return edit


def _hides_params(exchange: Exchange, answer: Answer) -> bool:
    """Tell whether the answer may have something for the gateway's eyes only."""
    is_allowed = exchange.settings.limits.allow_kv_transfer_params
    return exchange.route.generates and not is_allowed and answer.status == 200


# --- where it breaks off --------------------------------------------------------------------------


def _with_missing_end(exchange: Exchange, opened: Opened, relayed: Relayed) -> Relayed:
    """Return what came of a stream: where a bridge saw no end mark, what it became has no end either."""
    if opened.bridge is None or relayed.error is not None or exchange.account.is_counted:
        return relayed
    error = UpstreamError("the stream ended without its end mark")
    return relayed._replace(last=b"", error=error)


def _tell_break(
    exchange: Exchange, kind: AnswerKind, relayed: Relayed, error: UpstreamError
) -> None:
    """Let the client see that its answer is not whole."""
    client = exchange.client
    if kind is AnswerKind.EVENTS:
        message = f"the engine broke its answer off: {describe(error)}"
        seen, family = relayed.usage.tail(), exchange.route.family
        client.finish(
            stream_error_events(
                message, "engine_disconnected", family, first=relayed.first, last=seen
            )
        )
        return
    # The connection is closed before the body's end, which is how a client learns that what
    # it has is not all.
    if relayed.last:
        client.write(relayed.last)
    client.break_off()
