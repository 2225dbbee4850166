"""An engine's answer on its way to the client: as it is, but for what the contract takes out.

Bytes go from the engine's connection to the client's without a task in between. What is read in passing
comes back as `Relayed`, with the answer's last bytes unsent: whoever called counts first, so that a client
that has seen the end finds everything as it is after it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from moongate.gateway.dialects.json_edits import Edit
from moongate.gateway.dialects.routes import ApiFamily
from moongate.gateway.dialects.sse import EDITED_BYTES_MAX, EventSplitter, ends_stream
from moongate.gateway.dialects.usage import UsageReader
from moongate.gateway.errors import error_body
from moongate.gateway.proxy.client import Client
from moongate.gateway.proxy.handing_over import Opened
from moongate.gateway.proxy.transfer_params import (
    TransferParamsFilter,
    tells_nothing,
    without_params,
)
from moongate.gateway.proxy.upstream import Answer, UpstreamError

logger = logging.getLogger(__name__)

ERROR_TEXT_BYTES_MAX = 65_536
"""An engine's plain-text error is wrapped into JSON up to this length."""

END_OF_STREAM_S = 1.0
"""After a stream's end mark the engine closes it; one that doesn't is closed by us."""


class AnswerKind(Enum):
    """How an answer is passed on."""

    EVENTS = "events"  # whole ones, as they come
    WHOLE = "whole"  # the body as it comes
    TEXT_ERROR = "text_error"  # wrapped into JSON


class Relayed(NamedTuple):
    """What an answer said of its work, and its last bytes, which are not sent yet.

    `error`: it broke off before its end.
    """

    usage: UsageReader
    last: bytes = b""
    error: UpstreamError | None = None
    first: bytes = b""  # the first events that were passed on


def kind_of(answer: Answer) -> AnswerKind:
    content_type = answer.header(b"content-type")
    if answer.header(b"content-encoding"):
        return AnswerKind.WHOLE  # its events can't be told apart
    if content_type.startswith("text/event-stream"):
        return AnswerKind.EVENTS
    is_text_error = answer.status >= 400 and "json" not in content_type
    return AnswerKind.TEXT_ERROR if is_text_error else AnswerKind.WHOLE


async def relay_body(
    opened: Opened, client: Client, *, hides_params: bool, edit: Edit | None = None
) -> Relayed:
    """Pass a body on. `hides_params`: without what it says to KV connectors. `edit`: as a whole."""
    answer, last, usage = opened.answer, opened.first, UsageReader()
    if edit is not None:
        return await _relay_edited(opened, edit, hides_params=hides_params)
    if answer.is_complete:
        last += await answer.read()  # what came with its end
        usage.feed(last)  # with what is for our eyes only
        if hides_params and not tells_nothing(last):
            last = without_params(last)
        return Relayed(usage, last)
    params = TransferParamsFilter() if hides_params else None

    def take(piece: bytes) -> None:
        if params is not None:
            piece = params.feed(piece)
        if piece:
            usage.feed(piece)
            client.write(piece)

    try:
        if last:
            take(last)
        await answer.relay(take)
    except UpstreamError as error:
        return Relayed(usage, params.rest() if params is not None else b"", error)
    last = params.rest() if params is not None else b""
    usage.feed(last)
    return Relayed(usage, last)


async def _relay_edited(opened: Opened, edit: Edit, *, hides_params: bool) -> Relayed:
    """Gather a body and return it changed: no more of it can be sent before its end is there."""
    usage, pieces = UsageReader(), [opened.first]
    try:
        while piece := await opened.answer.read():
            pieces.append(piece)
    except UpstreamError as error:
        return Relayed(usage, b"", error)  # half of it can't be edited, and is of no use
    body = b"".join(pieces)
    usage.feed(body)
    if hides_params and not tells_nothing(body):
        body = without_params(body)
    return Relayed(usage, edit(body))


async def relay_events(
    opened: Opened,
    client: Client,
    on_end: Callable[[UsageReader], None],
    usage: UsageReader,
    first: list[bytes],
    *,
    edit: Edit | None = None,
) -> Relayed:
    """Pass whole events on as they come. `edit`: what is done to them, but for those longer than
    `EDITED_BYTES_MAX`, which pass as they are. `usage`: reads them first. `first`: gets the first ones passed on.

    `on_end` is called with the event that ends the stream, before it is passed on: a client may leave as
    soon as it has it.
    """
    answer = opened.answer
    splitter = EventSplitter(EDITED_BYTES_MAX) if edit is not None else EventSplitter()
    try:
        async with asyncio.timeout(None) as limit:
            take = _event_taker(client, splitter, usage, limit, edit, on_end, first)
            take(opened.first)
            await answer.relay(take)
    except TimeoutError:
        logger.info("an engine left its ended stream open")
    except UpstreamError as error:
        return Relayed(usage, error=error, first=b"".join(first))
    usage.feed(splitter.held)
    return Relayed(usage, splitter.held, first=b"".join(first))


def _event_taker(
    client: Client,
    splitter: EventSplitter,
    usage: UsageReader,
    limit: asyncio.Timeout,
    edit: Edit | None,
    on_end: Callable[[UsageReader], None],
    first: list[bytes],
) -> Callable[[bytes], None]:
    """Return what is done with each piece of a stream, as it comes."""
    loop = asyncio.get_running_loop()

    def take(piece: bytes) -> None:
        events = splitter.feed(piece)
        if not events:
            return
        usage.feed(events)
        if limit.when() is None and ends_stream(events):
            limit.reschedule(loop.time() + END_OF_STREAM_S)
            on_end(usage)
        if edit is not None:
            events = edit(events)
        if events:
            if not first:
                first.append(events)
            client.write(events)

    return take


async def wrap_text_error(opened: Opened, family: ApiFamily) -> bytes:
    """Return a plain-text error as an error object."""
    answer, text = opened.answer, opened.first
    try:
        while len(text) < ERROR_TEXT_BYTES_MAX and (piece := await answer.read()):
            text += piece
    except UpstreamError as error:
        logger.info("an error's text broke off: %s", error)
    message = text[:ERROR_TEXT_BYTES_MAX].decode("utf-8", "replace").strip()
    message = message or "the engine gave no reason"
    return error_body(message, answer.status, None, family=family)
