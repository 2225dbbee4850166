"""The proxied routes as plain ASGI: receive, route, relay.

Theory of operation. Each request is an `_Exchange`, run as a task beside a watch on the client: when
the client leaves, at whatever point, the task is cancelled, and its `finally` blocks close the
connection to the engine (which so learns that it should stop) and give the reservation back. Nothing
is sent to the client before the engine's status is known, so until then an attempt may be repeated
on another instance; what is repeated, and where, the core decides.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from moongate.gateway.body import (
    Body,
    find_session_key,
    find_user,
    parse_body,
    without_key,
)
from moongate.gateway.driver import Driver, RequestCommand
from moongate.gateway.errors import GatewayError, error_body, stream_error_events
from moongate.gateway.headers import (
    clean_request_id,
    read_headers,
    request_headers,
    response_headers,
)
from moongate.gateway.links import Links
from moongate.gateway.metrics import UNKNOWN_MODEL, Metrics
from moongate.gateway.prompt import PromptPipeline, ReadPrompt
from moongate.gateway.receipt import receipt_headers
from moongate.gateway.routes import Route
from moongate.gateway.settings import Settings
from moongate.gateway.sse import EventSplitter, ends_stream
from moongate.gateway.upstream import (
    Disconnected,
    TimedOut,
    Unreachable,
    UpstreamAnswer,
    UpstreamError,
)
from moongate.gateway.usage import UsageReader
from moongate.router import (
    FailureKind,
    Forward,
    Outcome,
    Reject,
    RejectReason,
    Request,
    RequestArrived,
    RequestFailed,
    RequestFinished,
    RequestFirstByte,
    RequestId,
)

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

KV_TRANSFER_PARAMS = "kv_transfer_params"
"""Names another instance to fetch KV from, or token ids in place of the prompt: not for clients."""

ERROR_TEXT_BYTES_MAX = 65_536
"""An engine's plain-text error is wrapped into JSON up to this length."""

SHED_CODES = frozenset({"no_instance", "queue_full", "body_too_large", "headers_too_large"})
"""Refusals for want of room, which `moongate_rejected_total` counts by reason."""

CLIENT_LEFT_STATUS = 499
"""Counted for a request whose client left; nobody receives it."""

END_OF_STREAM_S = 1.0
"""After a stream's end mark the engine closes it; one that doesn't is closed by us."""

FAILURES: dict[type[UpstreamError], FailureKind] = {
    Unreachable: FailureKind.UNREACHABLE,
    Disconnected: FailureKind.DISCONNECTED,
    TimedOut: FailureKind.TIMEOUT,
}


class HotPath:
    """Serves the proxied routes. What it needs it is given; see `app.py`."""

    def __init__(
        self,
        settings: Settings,
        driver: Driver,
        links: Links,
        prompts: PromptPipeline,
        metrics: Metrics,
    ) -> None:
        self.settings = settings
        self.driver = driver
        self.links = links
        self.prompts = prompts
        self.metrics = metrics
        self._requests = 0

    async def __call__(self, route: Route, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        self._requests += 1
        exchange = _Exchange(self, route, scope, send, RequestId(str(self._requests)))
        try:
            raw = await _read_body(scope, receive, self.settings)
        except GatewayError as error:
            await exchange.refuse(error)
            return
        except _ClientLeft:
            return
        work = asyncio.ensure_future(exchange.run(raw))
        watch = asyncio.ensure_future(_until_client_leaves(receive))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            if not work.done():
                work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        if not work.cancelled():
            work.result()  # a bug of ours shows in the server's log

    async def refuse(self, route: Route, scope: Scope, send: Send, error: GatewayError) -> None:
        """Answer a request that is refused before its body is read."""
        self._requests += 1
        await _Exchange(self, route, scope, send, RequestId(str(self._requests))).refuse(error)


@dataclass(frozen=True, slots=True)
class _Opened:
    """An answer that has begun: its first bytes (none: it is empty), and what follows them."""

    answer: UpstreamAnswer
    first: bytes
    chunks: AsyncIterator[bytes]


class _ClientLeft(Exception):
    """The client closed its connection before its request was complete."""


async def _read_body(scope: Scope, receive: Receive, settings: Settings) -> bytes:
    """Return the whole body. Raises: GatewayError (413, 431), _ClientLeft."""
    limits = settings.limits
    header_bytes = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    if header_bytes > limits.headers_bytes_max:
        message = f"the headers have {header_bytes} bytes; {limits.headers_bytes_max} are allowed"
        raise GatewayError(431, message, "headers_too_large")
    length = next((v for n, v in scope["headers"] if n == b"content-length"), b"0")
    _check_length(int(length) if length.isdigit() else 0, limits.body_bytes_max)
    chunks: list[bytes] = []
    size = 0
    while True:
        message_ = await receive()
        if message_["type"] == "http.disconnect":
            raise _ClientLeft
        chunk = message_.get("body", b"")
        size += len(chunk)
        _check_length(size, limits.body_bytes_max)
        chunks.append(chunk)
        if not message_.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _check_length(size: int, bytes_max: int) -> None:
    if size > bytes_max:
        raise GatewayError(
            413, f"the body is larger than {bytes_max} bytes", "body_too_large",
            headers={"connection": "close"},
        )  # fmt: skip


async def _until_client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Exchange:
    """One request from its parsed body to the end of its answer."""

    def __init__(
        self, path: HotPath, route: Route, scope: Scope, send: Send, request_id: RequestId
    ) -> None:
        self._path = path
        self._route = route
        query = scope["query_string"].decode("latin-1")
        # The path as the table has it, however the client spelled it.
        self._target = f"{route.template}?{query}" if query else route.template
        self._scope = scope
        self._send = send
        self._id = request_id
        self._headers = read_headers(scope["headers"])
        given_id = clean_request_id(self._headers.get("x-request-id"))
        self._client_id = given_id or uuid.uuid4().hex
        self._began = path.driver.clock()
        self._model_label = UNKNOWN_MODEL
        self._is_reserved = False  # the core waits for our RequestFinished
        self._has_first_byte = False
        self._has_one_choice = True
        self._has_started = False  # a status has gone to the client

    # --- the steps --------------------------------------------------------------------------------

    async def run(self, raw: bytes) -> None:
        """Parse, route, relay. A cancellation means that the client has left."""
        try:
            body = self._parse(raw)
            model = self._find_model(body)
            self._model_label = model
            policy = self._find_policy()
            read = await self._read_prompt(body, policy)
            request = Request(
                id=self._id,
                model=model,
                prompt=read.prompt,
                is_prompt_missing=read.fallback is not None,
                session_key=find_session_key(
                    self._headers, body, self._path.settings.session.header
                ),
                tie_key=find_user(body),
                policy=policy,
            )
            self._has_one_choice = body.fields.get("n") in (None, 1)
            await self._settle(request)
            await self._forward(self._handle_arrival(request), body)
        except GatewayError as error:
            await self.refuse(error)
        except Exception:
            logger.exception("request %s: a bug of ours", self._client_id)
            if self._has_started:
                raise  # the server closes the connection, so the client sees that it is cut
            await self.refuse(GatewayError(500, "the gateway failed", "internal_error"))
        except asyncio.CancelledError:
            self._finish(Outcome.CLIENT_LEFT)
            logger.info("request %s: the client left", self._client_id)
            self._count(CLIENT_LEFT_STATUS)
            raise
        finally:
            # Whatever happened, the instance's reservation ends here.
            self._finish(Outcome.BROKEN_OFF)

    def _parse(self, raw: bytes) -> Body:
        """Return the body, without what only the gateway may say to an engine's KV connector."""
        body = parse_body(raw, self._route)
        is_allowed = self._path.settings.limits.allow_kv_transfer_params
        if is_allowed or KV_TRANSFER_PARAMS not in body.fields:
            return body
        return parse_body(without_key(raw, KV_TRANSFER_PARAMS), self._route)

    def _find_model(self, body: Body) -> str:
        """Return the model that the request is for. Raises: GatewayError (404, 400, 503)."""
        cards = self._path.driver.core.fleet.model_cards()
        if body.model is None:
            if len(cards) == 1:
                return next(iter(cards))
            raise GatewayError(
                400, "model: missing; several are served", "invalid_request", "model"
            )
        if body.model in cards:
            return body.model
        if any(instance.facts is None for instance in self._path.driver.core.fleet):
            raise self._unavailable()
        raise GatewayError(
            404, f"the model {body.model[:200]!r} does not exist", "model_not_found", "model"
        )

    def _find_policy(self) -> str | None:
        """Return the policy that the request asks for, where the operator allows that."""
        name = self._headers.get("x-moongate-policy")
        if name is None or not self._path.settings.policy.allow_override:
            return None
        if not self._path.driver.core.has_policy(name):
            raise GatewayError(
                400, f"x-moongate-policy: unknown policy {name[:64]!r}", "invalid_request"
            )
        return name

    async def _read_prompt(self, body: Body, policy: str | None) -> ReadPrompt:
        """Return what is known of the prompt, if the policy looks at it at all."""
        if not self._path.driver.core.get_policy(policy).reads_prompts:
            return ReadPrompt(None)
        metrics, clock = self._path.metrics, self._path.driver.clock
        began = clock()
        read = await self._path.prompts.read(self._route, body)
        if read.prompt is not None:
            mode = "exact" if read.prompt.is_exact else "text"
            metrics.tokenize_seconds.labels(mode).observe(clock() - began)
        if read.fallback is not None:
            metrics.route_fallback.labels(read.fallback).inc()
        return read

    async def _settle(self, request: Request) -> None:
        began = self._path.driver.clock()
        if await self._path.driver.until_settled(request):
            self._path.metrics.settle_seconds.observe(self._path.driver.clock() - began)

    def _handle_arrival(self, request: Request) -> Forward:
        began = self._path.driver.clock()
        command = self._path.driver.handle(RequestArrived(request))
        self._path.metrics.route_seconds.observe(self._path.driver.clock() - began)
        match command:
            case Forward():
                self._is_reserved = True
                return command
            case Reject(reason=RejectReason.UNKNOWN_MODEL):
                raise GatewayError(404, "the model does not exist", "model_not_found", "model")
            case Reject():
                raise self._unavailable(command.retry_after_s)
            case _:
                raise AssertionError(command)

    def _unavailable(self, retry_after_s: float | None = None) -> GatewayError:
        seconds = max(1, round(retry_after_s or self._path.settings.health.interval_s))
        return GatewayError(
            503, "no instance can take the request now", RejectReason.NO_INSTANCE.value,
            headers={"retry-after": str(seconds)},
        )  # fmt: skip

    async def _forward(self, forward: Forward, body: Body) -> None:
        """Send the request where the core says, again if it says so, and relay the answer."""
        while True:
            self._note_forward(forward)
            opened: _Opened | None = None
            failure: UpstreamError | None = None
            try:
                opened = await self._attempt(forward, body)
                command: RequestCommand | None = None
                if opened.answer.status >= 500:
                    command = self._report(FailureKind.STATUS, opened.answer.status)
                if not isinstance(command, Forward):
                    await self._relay(opened, forward)
                    return
            except UpstreamError as error:
                failure = error
                command = self._report(FAILURES[type(error)])
            finally:
                if opened is not None:
                    opened.answer.close()
            if not isinstance(command, Forward):
                assert failure is not None
                raise _as_gateway_error(failure)
            forward = command

    async def _attempt(self, forward: Forward, body: Body) -> _Opened:
        """Return the engine's answer with its first bytes. Raises: UpstreamError.

        vLLM sends a stream's headers before it has computed anything, so only the first bytes of
        the body show that an answer has begun.
        """
        link = self._path.links.get(forward.holder.instance_id)
        headers = request_headers(
            self._scope["headers"],
            request_id=self._client_id,
            forward_credentials=self._path.settings.auth.forward_client_key,
            api_key=link.api_key,
        )
        if forward.holder.rank is not None:
            headers.append(("x-data-parallel-rank", str(forward.holder.rank)))
        answer = await link.upstream.send(self._target, headers, body.raw)
        chunks = answer.chunks()
        try:
            return _Opened(answer, await anext(chunks, b""), chunks)
        except BaseException:
            answer.close()
            raise

    def _report(self, kind: FailureKind, status: int | None = None) -> RequestCommand | None:
        """Tell the core of a failed attempt; it says whether there is another."""
        command = self._path.driver.handle(RequestFailed(self._id, kind, status))
        if isinstance(command, Forward):
            self._path.metrics.retries.labels(kind.value).inc()
        else:
            self._is_reserved = False
        return command

    def _note_forward(self, forward: Forward) -> None:
        metrics, decision = self._path.metrics, forward.decision
        instance = forward.holder.instance_id
        metrics.routed.labels(instance, decision.policy, decision.reason.value).inc()
        if decision.prompt_tokens is not None:
            recompute = max(decision.prompt_tokens - decision.device_tokens, 0)
            metrics.prompt_tokens.labels("device").inc(decision.device_tokens)
            metrics.prompt_tokens.labels("recompute").inc(recompute)

    def _finish(self, outcome: Outcome, completion_tokens: int | None = None) -> None:
        """Give the reservation back, once."""
        if self._is_reserved:
            self._is_reserved = False
            self._path.driver.handle(RequestFinished(self._id, outcome, completion_tokens))

    # --- answering --------------------------------------------------------------------------------

    async def _relay(self, opened: _Opened, forward: Forward) -> None:
        """Pass an answer on as it is, but for a plain-text error, which is wrapped."""
        answer = opened.answer
        is_stream = answer.header("content-type").startswith("text/event-stream")
        self._note_first_byte(forward, shows_prefill=is_stream and answer.status == 200)
        is_json = "json" in answer.header("content-type")
        is_encoded = bool(answer.header("content-encoding"))
        if answer.status >= 400 and not is_json and not is_encoded:
            await self._relay_text_error(opened, forward)
            return
        ours = self._our_headers(forward)
        await self._start(answer.status, response_headers(answer.raw_headers, ours))
        if is_stream:
            await self._relay_stream(opened, forward)
        else:
            await self._relay_body(opened, forward)

    async def _relay_body(self, opened: _Opened, forward: Forward) -> None:
        usage = UsageReader()
        chunk = opened.first
        try:
            while chunk:
                usage.feed(chunk)
                await self._send_chunk(chunk, more=True)
                chunk = await anext(opened.chunks, b"")
        except UpstreamError as error:
            # Without the last body message the server closes the connection, which is how a client
            # learns that what it has is not all.
            self._break_off(opened.answer.status, forward, error)
            return
        self._end(opened.answer.status, usage)
        await self._send_chunk(b"", more=False)

    async def _relay_stream(self, opened: _Opened, forward: Forward) -> None:
        """Pass whole events on as they come; end a stream that breaks off with an error event."""
        splitter, usage = EventSplitter(), UsageReader()
        chunk = opened.first
        limit_s: float | None = None
        try:
            while chunk:
                ready = splitter.feed(chunk)
                if ready:
                    usage.feed(ready)
                    await self._send_chunk(ready, more=True)
                if ends_stream(ready):
                    limit_s = END_OF_STREAM_S
                chunk = await asyncio.wait_for(anext(opened.chunks, b""), limit_s)
        except TimeoutError:
            logger.info("request %s: the engine left its ended stream open", self._client_id)
        except UpstreamError as error:
            self._break_off(opened.answer.status, forward, error)
            message = f"the engine broke its answer off: {_describe(error)}"
            events = stream_error_events(message, "engine_disconnected")
            await self._send_chunk(events, more=False)
            return
        if splitter.held:
            usage.feed(splitter.held)
            await self._send_chunk(splitter.held, more=True)
        self._end(opened.answer.status, usage)
        await self._send_chunk(b"", more=False)

    async def _relay_text_error(self, opened: _Opened, forward: Forward) -> None:
        answer, text = opened.answer, opened.first
        try:
            while len(text) < ERROR_TEXT_BYTES_MAX and (chunk := await anext(opened.chunks, b"")):
                text += chunk
        except UpstreamError as error:
            logger.info("request %s: the error's text broke off: %s", self._client_id, error)
        message = text[:ERROR_TEXT_BYTES_MAX].decode("utf-8", "replace").strip()
        body = error_body(message or "the engine gave no reason", answer.status, None)
        ours = {
            **self._our_headers(forward),
            "content-type": "application/json",
            "content-length": str(len(body)),
        }
        self._end(answer.status, UsageReader())
        await self._start(answer.status, response_headers(answer.raw_headers, ours))
        await self._send_chunk(body, more=False)

    async def refuse(self, error: GatewayError) -> None:
        """Answer with an error of the gateway's own."""
        self._count(error.status)
        if error.code in SHED_CODES:
            self._path.metrics.rejected.labels(error.code).inc()
        body = error.body()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-request-id": self._client_id,
            **error.headers,
        }
        await self._start(error.status, response_headers((), headers))
        await self._send_chunk(body, more=False)

    def _our_headers(self, forward: Forward) -> dict[str, str]:
        headers = {"x-request-id": self._client_id}
        if self._path.settings.observability.receipt_headers:
            headers |= receipt_headers(forward.decision)
        return headers

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._has_started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _send_chunk(self, chunk: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": more})

    # --- counting ---------------------------------------------------------------------------------

    def _note_first_byte(self, forward: Forward, *, shows_prefill: bool) -> None:
        if not self._is_reserved or self._has_first_byte:
            return
        self._has_first_byte = True
        self._path.driver.handle(RequestFirstByte(self._id, shows_prefill))
        elapsed_s = self._path.driver.clock() - self._began
        self._path.metrics.ttft_seconds.labels(forward.holder.instance_id).observe(elapsed_s)

    def _break_off(self, status: int, forward: Forward, error: UpstreamError) -> None:
        """The engine ended its answer before it was complete."""
        instance = forward.holder.instance_id
        logger.warning("request %s: %s broke its answer off: %s", self._client_id, instance, error)
        self._path.metrics.broken_off.labels(instance).inc()
        self._finish(Outcome.BROKEN_OFF)
        self._count(status)

    def _end(self, status: int, usage: UsageReader) -> None:
        """The engine's answer is complete."""
        cached_tokens = usage.cached_tokens()
        if cached_tokens is not None:
            self._path.metrics.delivered_cached_tokens.inc(cached_tokens)
        self._finish(Outcome.ANSWERED, usage.completion_tokens() if self._has_one_choice else None)
        self._count(status)

    def _count(self, status: int) -> None:
        metrics = self._path.metrics
        metrics.requests.labels(self._route.template, self._model_label, str(status)).inc()
        metrics.e2e_seconds.observe(self._path.driver.clock() - self._began)


def _describe(error: UpstreamError) -> str:
    """Return what went wrong without the engine's address, which is no business of clients."""
    match error:
        case Unreachable():
            return "it could not be reached"
        case TimedOut():
            return "it did not answer in time"
        case _:
            return "the connection was closed"


def _as_gateway_error(error: UpstreamError) -> GatewayError:
    if isinstance(error, TimedOut):
        return GatewayError(504, f"the engine failed: {_describe(error)}", "engine_timeout")
    return GatewayError(502, f"the engine failed: {_describe(error)}", "engine_unreachable")
