"""The proxied routes: read, route, relay.

Theory of operation. Each request is an `_Exchange`, run as a task that is cancelled when its client
leaves, at whatever point; its `finally` blocks close the connection to the engine (which so learns
that it should stop) and give the reservation back. Nothing is sent to the client before the engine's
first byte, so until then an attempt may be repeated on another instance; what is repeated, and where,
the core decides. From then on the engine's bytes go from its connection to the client's without a task
in between.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from urllib.parse import unquote_to_bytes

import orjson

from moongate.gateway.auth.access import Access, Meter
from moongate.gateway.config.live_settings import LiveSettings
from moongate.gateway.config.settings import Settings
from moongate.gateway.dialects.aliases import Aliases, Renaming
from moongate.gateway.dialects.body import (
    Body,
    parse_body,
    with_cache_salt,
    without_key,
)
from moongate.gateway.dialects.json_edits import Edit
from moongate.gateway.dialects.messages_bridge import Bridge, bridge_for, error_of
from moongate.gateway.dialects.messages_stream import MessageStream
from moongate.gateway.dialects.prompt_fields import read_salt
from moongate.gateway.dialects.routes import WITH_CHOICES, ApiFamily, PromptKind
from moongate.gateway.dialects.stream_usage import (
    asks_for_usage,
    with_usage_asked,
    without_usage_events,
)
from moongate.gateway.dialects.usage import UsageReader
from moongate.gateway.driver import Driver, RequestCommand
from moongate.gateway.errors import GatewayError, stream_error_events
from moongate.gateway.headers import (
    clean_request_id,
    make_request_id,
    read_headers,
    request_headers,
    response_headers,
)
from moongate.gateway.instances.links import Link, Links
from moongate.gateway.pool.pooling import Pooling, PromptTokens
from moongate.gateway.pool.seeding import Seeding
from moongate.gateway.prompts.divergence import Divergences
from moongate.gateway.prompts.prompt import PromptPipeline, ReadPrompt
from moongate.gateway.proxy.account import Account, Observers
from moongate.gateway.proxy.bootstrap import Bootstraps
from moongate.gateway.proxy.client import Client
from moongate.gateway.proxy.collected import follow_into
from moongate.gateway.proxy.failures import as_gateway_error, describe
from moongate.gateway.proxy.handing_over import (
    FAILURES,
    HandoffResult,
    HandoffRun,
    Opened,
    PrefillFailed,
    PrefillRefused,
)
from moongate.gateway.proxy.id_forwarding import KV_TRANSFER_PARAMS, IdForwarding, with_params
from moongate.gateway.proxy.legs import one_token_body
from moongate.gateway.proxy.refusals import Refusals, Refused
from moongate.gateway.proxy.relaying import (
    AnswerKind,
    kind_of,
    relay_body,
    relay_events,
    wrap_text_error,
)
from moongate.gateway.proxy.request_reading import RequestReader
from moongate.gateway.proxy.upstream import Answer, UpstreamError
from moongate.gateway.responses.background import Background
from moongate.gateway.responses.response_turns import ResponseTurn, ResponseTurns
from moongate.gateway.telemetry.logs import REQUEST, LoggedRequest
from moongate.gateway.telemetry.metrics import SHED_CODES, Metrics
from moongate.gateway.telemetry.receipt import receipt_headers
from moongate.gateway.telemetry.recent import RecentReceipts
from moongate.gateway.telemetry.recent_turns import RecentTurns
from moongate.gateway.telemetry.tracing import QUEUE, RECEIVE, ROUTE, TOKENISE, Tracing
from moongate.router import (
    FailureKind,
    Forward,
    Hold,
    Holder,
    ModelCard,
    Outcome,
    PrefillEnded,
    Reject,
    Request,
    RequestArrived,
    RequestFailed,
    RequestFinished,
    RequestFirstByte,
    RequestId,
)
from moongate.router import PrefillFailed as PrefillFailedEvent
from moongate.router.handoff import TransferParams

logger = logging.getLogger(__name__)

NOT_READ = ReadPrompt(None)
"""Of a prompt at which the policy doesn't look."""

ADOPTED_MAX = 128
"""Past so many hand-offs whose clients have left, requests are not handed over any more: a prompt that is
computed where it is decoded ends with its client."""

_STOPS = "the gateway is stopping"

CLIENT_LEFT_STATUS = 499
"""Counted for a request whose client left; nobody receives it."""

ADOPTED_S = 5.0
"""When the gateway stops, what goes on without a client may go on for this long: most of it comes to its
end within milliseconds, and keeps other instances' memory until then."""


class HotPath:
    """Serves the proxied routes. What it needs it is given; see `app.py`."""

    def __init__(
        self,
        live: LiveSettings,
        driver: Driver,
        links: Links,
        prompts: PromptPipeline,
        metrics: Metrics,
        turns: ResponseTurns,
        divergences: Divergences,
        seen: RecentTurns,
        access: Access,
        pooling: Pooling | None = None,
        seeding: Seeding | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        settings = live.current
        self._live = live
        self.recent = RecentReceipts(settings.observability.decisions_max)
        self.observers = Observers(metrics, self.recent, seen, tracing, driver.clock)
        self.access = access
        self.turns = turns
        self.background = Background(turns, self._answer_admitted)
        self.divergences = divergences
        self.pooling = pooling
        self.seeding = seeding
        self.driver = driver
        self.links = links
        self.prompts = prompts
        self.metrics = metrics
        self.reader = RequestReader(live, driver, access)
        self.aliases = Aliases(settings.models.aliases)
        self.id_forwarding = IdForwarding(settings.tokenizer.forward_ids, prompts)
        self.bootstraps = Bootstraps(settings.limits.connect_timeout_s)
        self._adopted: set[asyncio.Task[None]] = set()
        self._requests = 0

    @property
    def settings(self) -> Settings:
        """Return the settings in force."""
        return self._live.current

    def renew(self, settings: Settings) -> None:
        """Make anew what is made of the settings."""
        self.recent.resize(settings.observability.decisions_max)
        self.aliases = Aliases(settings.models.aliases)
        self.id_forwarding.mode = settings.tokenizer.forward_ids
        self.bootstraps.timeout_s = settings.limits.connect_timeout_s

    async def close(self) -> None:
        """End what goes on without a client, if it doesn't soon come to its end."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + ADOPTED_S
        while self._adopted and loop.time() < deadline:
            await asyncio.wait(self._adopted, timeout=deadline - loop.time())
        for task in self._adopted:
            task.cancel()
        await asyncio.gather(*self._adopted, return_exceptions=True)
        await self.background.close()
        await self.bootstraps.close()

    @property
    def adopted(self) -> int:
        """Return how many hand-offs go on without a client."""
        return len(self._adopted)

    def adopt(self, work: Coroutine[None, None, None]) -> None:
        """Let work go on whose client has left."""
        task = asyncio.create_task(work)
        self._adopted.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._adopted.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a bug of ours", exc_info=task.exception())

    async def answer(self, client: Client) -> None:
        """Answer a request whose body is complete."""
        await self._exchange(client).run()

    async def _answer_admitted(self, client: Client) -> None:
        """Compute what a request has asked for that is answered already, and was counted then."""
        await self._exchange(client).run(is_admitted=True)

    def refuse(self, client: Client, error: GatewayError) -> None:
        """Answer a request that is refused before its body is read."""
        self._exchange(client).refuse(error)

    def _exchange(self, client: Client) -> _Exchange:
        self._requests += 1
        return _Exchange(self, client, RequestId(str(self._requests)))


class _Exchange:
    """One request from its body to the end of its answer."""

    def __init__(self, path: HotPath, client: Client, request_id: RequestId) -> None:
        self._path = path
        self._settings = path.settings  # a reload is for those that come after
        self._client = client
        self._route = client.route
        self._id = request_id
        self._tenant = client.tenant
        self._meter = path.access.meter(client.tenant)
        self._usage = UsageReader()  # of a stream, as far as it has come
        self._headers = read_headers(client.headers)
        is_secret = path.access.tenants.are_in
        given_id = clean_request_id(self._headers.get("x-request-id"), is_secret)
        self._client_id = given_id or make_request_id()
        self._account = Account(
            path.observers, client.route, self._client_id, self._headers, client.opened_at
        )
        self._account.tenant = client.tenant.name
        self._is_reserved = False  # the core waits for our RequestFinished
        self._has_one_choice = True
        self._drops_usage = False  # asked for by us, not by the client
        self._known: PromptTokens | None = None  # for the pool, where there is one
        self._body: Body | None = None  # as engines may get it
        self._read = NOT_READ
        self._turn: ResponseTurn | None = None  # whose answer is read in passing
        self._renaming: Renaming | None = None  # of a model that has an alias
        self._bridge: Bridge | None = None  # around what the instance of this attempt hasn't
        self._handoff: HandoffRun | None = None
        self._is_adopted = False  # its hand-off goes on without it
        self._is_stream = False  # of events, and it has begun

    # --- the steps --------------------------------------------------------------------------------

    async def run(self, *, is_admitted: bool = False) -> None:
        """Parse, route, relay. A cancellation means that the client has left.

        `is_admitted`: as a request it was counted before.
        """
        trace = self._account.trace
        trace_id = trace.trace_id if trace is not None else None
        REQUEST.set(LoggedRequest(self._client_id, trace_id))  # of this task, which is only for it
        try:
            self._check_method()
            raw = self._client.take_body()
            if self._meter is not None and not is_admitted:
                await self._meter.begin(len(raw))
            parsed = self._parse(raw)
            if self._route.kind is PromptKind.RESPONSES and Background.takes(parsed):
                await self._answer_later(raw, parsed)
                return
            body = self._body = await self._begin_turn(parsed)
            self._account.phase_ended(RECEIVE)
            self._has_one_choice = body.top.get("n") in (None, 1)
            request = await self._read_request(body)
            if not self._path.driver.is_settled(request):
                await self._settle(request)
            if self._path.pooling is not None and self._read.is_nameable:
                self._known = self._name_blocks(self._read, body)
                request = await self._path.pooling.enrich(request, self._known)
                if self._path.seeding is not None:
                    self._path.seeding.note(self._id, self._known)
            await self._forward(await self._handle_arrival(request), request, body)
        except GatewayError as error:
            self.refuse(error)
        except Exception:
            logger.exception("a bug of ours")
            if self._client.has_started:
                self._client.break_off()
            else:
                self.refuse(GatewayError(500, "the gateway failed", "internal_error"))
        except asyncio.CancelledError:
            self._finish(Outcome.CLIENT_LEFT)
            if not self._account.is_counted:  # else it has all it wanted
                self._end_early()
            raise
        finally:
            # Whatever happened, the instance's reservation ends here.
            self._finish(Outcome.BROKEN_OFF)
            if self._meter is not None:
                self._end_meter(self._meter)
            if self._path.seeding is not None:
                self._path.seeding.forget(self._id)

    def _end_meter(self, meter: Meter) -> None:
        """Count what an answer that has no end has cost; one that an engine never gave costs nothing."""
        account = self._account
        has_left = self._client.disconnected and account.receipt is not None
        if account.has_first_byte or has_left:
            told = self._usage.completion_tokens()
            meter.end(None, told if told is not None else self._usage.events)
        else:
            meter.give_back()

    def _end_early(self) -> None:
        """The request is cancelled: its client has left, or the gateway stops and has waited enough."""
        client = self._client
        if client.disconnected:
            logger.info("the client left")
            self._account.count(CLIENT_LEFT_STATUS)
            return
        logger.warning("ended, since the gateway stops")
        if not client.has_started:
            self.refuse(_stopping())
            return
        self._account.broken_off()
        self._account.count(200)
        if self._is_stream:
            client.finish(stream_error_events(_STOPS, "gateway_stopping", self._route.family))
        else:
            client.break_off()

    def _check_method(self) -> None:
        method = self._client.method
        if method != "POST":
            message = f"{self._route.template} takes POST, not {method[:16]}"
            raise GatewayError(405, message, "method_not_allowed", headers={"allow": "POST"})

    def _parse(self, raw: bytes) -> Body:
        """Return the body as engines may get it.

        That is without what only the gateway may say to an engine's KV connector, and, where the
        operator wants every stream's usage or it is needed for a rate, with the wish for it. Raises:
        GatewayError (400; 404 for a model that isn't the tenant's).
        """
        asked = parse_body(raw, self._route)
        body, self._renaming = self._path.aliases.resolve(asked, self._route)
        self._path.reader.check_rights(self._tenant, asked.model, body.model)
        is_allowed = self._settings.limits.allow_kv_transfer_params
        if not is_allowed and KV_TRANSFER_PARAMS in body.top:
            body = parse_body(without_key(body.raw, KV_TRANSFER_PARAMS), self._route)
        has_usage = self._route.kind in WITH_CHOICES and body.is_stream
        is_metered = self._meter is not None and self._meter.counts_tokens
        asks_always = self._settings.observability.stream_usage == "always" or is_metered
        if asks_always and has_usage and not body.is_lenient and not asks_for_usage(body.top):
            self._drops_usage = True
            body = parse_body(with_usage_asked(body.raw, body.top), self._route)
        self._path.reader.check_limits(body, self._headers)
        salt = self._tenant.cache_salt
        return body if salt is None or not self._route.is_cached else with_cache_salt(body, salt)

    async def _answer_later(self, raw: bytes, body: Body) -> None:
        """Tell the client what to ask for, or what comes, of an answer that goes on without it.

        It is counted when it ends. Raises: GatewayError.
        """
        self._account.model_label = self._path.reader.find_model(body)
        background = self._path.background
        run = await background.begin(self._client, raw, body)
        self._account.is_counted = True
        if not run.is_stream:
            self._answer_with(200, orjson.dumps(run.announced), {})
            return
        collected = run.collected
        try:
            await collected.begun()
        except asyncio.CancelledError:
            background.forget(run)  # its client can't know its name
            raise
        if collected.status == 200:
            await follow_into(collected, self._client)
            return
        await collected.ended()
        self._client.start(collected.status or 500, collected.answer_headers)
        self._client.finish(collected.answer)

    def _answer_with(self, status: int, body: bytes, extra: Mapping[str, str]) -> None:
        """Answer by ourselves, in JSON."""
        if not self._account.is_counted:
            self._account.count(status)
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-request-id": self._client_id,
            **extra,
        }
        self._client.start(status, response_headers((), headers))
        self._client.finish(body)

    async def _begin_turn(self, body: Body) -> Body:
        """Return the body with all that it continues. Raises: GatewayError (404)."""
        if self._route.kind is not PromptKind.RESPONSES:
            return body
        turn = await self._path.turns.begin(self._tenant.name, body, self._route)
        self._turn = None if turn.is_plain else turn
        return turn.body

    async def _read_request(self, body: Body) -> Request:
        """Return the request as routing sees it. Raises: GatewayError."""
        path = self._path
        model = self._account.model_label = path.reader.find_model(body)
        if body.model is None:  # the only one that is served
            path.reader.check_rights(self._tenant, model)
        policy = path.reader.find_policy(self._headers)
        if path.driver.core.get_policy(policy).reads_prompts:
            self._read = await self._read_prompt(body)
        self._account.phase_ended(TOKENISE)
        request = path.reader.request(
            self._id,
            self._route,
            body,
            self._headers,
            self._read,
            model,
            policy,
            self._tenant,
            has_room=path.adopted < ADOPTED_MAX,
        )
        if self._meter is not None:
            self._meter.note_prompt(request.prompt_tokens)
        if request.session_key is not None:
            self._account.session_key = request.session_key
            self._note_turn(request.session_key, request, body)
        return request

    def _note_turn(self, session_key: str, request: Request, body: Body) -> None:
        """Let it be noticed if the turn does not begin like its session's last."""
        divergences, model = self._path.divergences, request.model
        fields, prompt = self._read.fields, self._read.prompt
        if fields is not None and prompt is not None:
            divergences.note(session_key, model, fields, read_salt(body), prompt)
        if request.ends_session:
            divergences.forget(session_key, model)

    async def _read_prompt(self, body: Body) -> ReadPrompt:
        """Return what is known of the prompt."""
        metrics, clock = self._path.metrics, self._path.driver.clock
        began = clock()
        read = await self._path.prompts.read(self._route, body)
        if read.prompt is not None:
            mode = "exact" if read.prompt.is_exact else "text"
            metrics.tokenize_seconds.observe(clock() - began, mode)
        if read.fallback is not None:
            metrics.route_fallback.add(1, read.fallback)
        return read

    async def _settle(self, request: Request) -> None:
        began = self._path.driver.clock()
        await self._path.driver.until_settled(request)
        self._path.metrics.settle_seconds.observe(self._path.driver.clock() - began)

    def _name_blocks(self, read: ReadPrompt, body: Body) -> PromptTokens:
        assert read.prompt is not None
        return PromptTokens(read.prompt, read.tokens, read_salt(body), self._find_card())

    async def _handle_arrival(self, request: Request) -> Forward:
        """Return where it goes, once it may. Raises: GatewayError."""
        began = self._path.driver.clock()
        self._account.phase_ended(QUEUE)
        command = self._path.driver.handle(RequestArrived(request))
        decided = self._path.driver.clock()
        self._path.metrics.route_seconds.observe(decided - began)
        self._account.phase_ended(ROUTE)
        if isinstance(command, Hold):
            command = await self._path.driver.until_admitted(self._id)
            self._account.waited(self._path.driver.clock() - decided)
        match command:
            case Forward():
                self._is_reserved = True
                return command
            case Reject():
                raise self._path.reader.rejection(command)
            case _:
                raise AssertionError(command)

    async def _forward(self, forward: Forward, request: Request, body: Body) -> None:
        """Send the request where the core says, again if it says so, and relay the answer."""
        refusals = Refusals()
        try:
            await self._attempt_all(forward, request, body, refusals)
        finally:
            refusals.close()

    async def _attempt_all(
        self, forward: Forward, request: Request, body: Body, refusals: Refusals
    ) -> None:
        while True:
            self._account.forwarded(forward, request, is_stream=body.is_stream)
            opened: Opened | None = None
            failure: UpstreamError | None = None
            try:
                opened = await self._attempt(forward)
                status = opened.answer.status
                self._account.attempted(forward, str(status) if status >= 500 else None)
                command: RequestCommand | None = None
                if status >= 500:
                    command = self._report(FailureKind.STATUS, status)
                elif status == 429 and self._handoff is None:
                    command = self._report(FailureKind.RATE_LIMITED, status)
                    refusals.keep(Refused(opened, forward, self._bridge))
                    opened = None  # it is closed with the others
                gives_way = isinstance(command, Forward) or (status >= 500 and refusals.best())
                if opened is not None and not gives_way:
                    await self._relay(opened, forward)
                    return
            except UpstreamError as error:
                failure = error
                self._account.attempted(forward, FAILURES[type(error)].value)
                command = self._report(FAILURES[type(error)])
            except PrefillFailed as error:
                failure = error.cause
                self._account.attempted(forward, error.kind.value)
                command = self._report(error.kind, error.status, is_prefill=True)
            except asyncio.CancelledError:
                if opened is None:
                    self._account.attempted(forward, "client_left")
                raise
            finally:
                if opened is not None:
                    opened.answer.close()
            if not isinstance(command, Forward):
                self._release_owed()
                await self._relay_refusal(refusals.best(), failure)
                return
            forward = command

    async def _relay_refusal(self, refused: Refused | None, failure: UpstreamError | None) -> None:
        """Nobody could do it, and one that could later says when. Raises: GatewayError, if none does."""
        if refused is None:
            raise as_gateway_error(failure)
        self._bridge = refused.bridge
        await self._relay(refused.opened, refused.forward)

    async def _attempt(self, forward: Forward) -> Opened:
        """Return the answer's beginning. Raises: UpstreamError, PrefillFailed."""
        link = self._path.links.get(forward.holder.instance_id)
        if forward.prefill is None and not forward.is_redelivery:
            self._handoff = None
            return await self.send_leg(forward.holder, link, None)
        return await self._attempt_pair(forward, link)

    async def send_leg(
        self,
        holder: Holder,
        link: Link,
        params: TransferParams | None,
        *,
        is_one_token: bool = False,
        is_release: bool = False,
        on_sent: Callable[[], object] | None = None,
    ) -> Opened:
        """Return the engine's answer with its first bytes. Raises: UpstreamError.

        vLLM sends a stream's headers before it has computed anything, so only the first bytes of
        the body show that an answer has begun. All but the first two is for the legs of a hand-off.
        """
        body = self._body
        assert body is not None
        headers = self._headers_for(holder, link)
        raw, target = body.raw, self._target()
        self._bridge = self._bridge_to(link, body)
        if self._bridge is not None:
            raw, target = self._bridge.body, self._bridge.path
        if is_one_token:
            raw = one_token_body(raw, PromptKind.CHAT if self._bridge else self._route.kind)
        if is_one_token or any((self._turn, self._renaming, self._bridge)):
            # It is read here, and not unpacked.
            headers = [header for header in headers if header[0] != b"accept-encoding"]
        pieces = with_params(raw, self._ids_for(body, link), params)
        answer = await link.upstream.send(
            target, headers, pieces, on_sent=on_sent, may_exceed=is_release
        )
        try:
            return Opened(answer, await answer.read())
        except BaseException:
            answer.close()
            raise

    def _target(self) -> str:
        """Return the address as engines get it: without a query that has a client's key in it."""
        target = self._client.target
        if "?" not in target or self._path.settings.auth.forward_client_key:
            return target
        is_secret = self._path.access.tenants.are_in(unquote_to_bytes(target))
        return self._route.template if is_secret else target

    def _bridge_to(self, link: Link, body: Body) -> Bridge | None:
        """Return the way around for an instance that has no messages, None where none is needed."""
        is_messages = self._route.family is ApiFamily.ANTHROPIC
        if not is_messages or self._path.links.has_messages(link.id):
            return None
        manners = self._path.prompts.manners(self._account.model_label)
        return bridge_for(self._route, body.fields, manners)

    def _headers_for(self, holder: Holder, link: Link) -> list[tuple[bytes, bytes]]:
        headers = request_headers(
            self._client.headers,
            request_id=self._client_id,
            forward_credentials=self._settings.auth.forward_client_key,
            is_secret=self._path.access.tenants.are_in,
            api_key=link.api_key,
            rank=holder.rank,
        )
        trace = self._account.trace
        return headers if trace is None else trace.pass_on(headers)

    def _ids_for(self, body: Body, link: Link) -> bytes | None:
        """Return the prompt's token ids, if the instance should get them."""
        if self._read.tokenized is None:
            return None
        ids = self._path.id_forwarding.ids_for(
            self._route, body, self._read, link.api, self._context_tokens()
        )
        if ids is not None:
            self._path.metrics.ids_forwarded.add(1, link.id)
        return ids

    def _context_tokens(self) -> int | None:
        card = self._find_card()
        return card.max_model_len_tokens if card is not None else None

    def _find_card(self) -> ModelCard | None:
        return self._path.driver.core.fleet.model_cards().get(self._account.model_label)

    def _report(
        self, kind: FailureKind, status: int | None = None, *, is_prefill: bool = False
    ) -> RequestCommand | None:
        """Tell the core of a failed attempt; it says whether there is another."""
        command = self._tell_failure(kind, status, is_prefill)
        if isinstance(command, Forward):
            self._path.metrics.retries.add(1, kind.value)
        return command

    def _tell_failure(
        self, kind: FailureKind, status: int | None, is_prefill: bool
    ) -> RequestCommand | None:
        event = PrefillFailedEvent if is_prefill else RequestFailed
        command = self._path.driver.handle(event(self._id, kind, status))
        if not isinstance(command, Forward):
            self._is_reserved = False
        return command

    # --- over two instances -----------------------------------------------------------------------

    async def _attempt_pair(self, forward: Forward, link: Link) -> Opened:
        """Prefill on one instance, decode on another. Raises: UpstreamError, PrefillFailed."""
        if forward.is_redelivery:
            handoff = self._handoff
            assert handoff is not None
            handoff.redeliver(forward, link)
        else:
            handoff = self._handoff = self._begin_handoff(forward, link)
        try:
            opened = await handoff.opened()
        except PrefillRefused as error:
            opened = error.opened
        except asyncio.CancelledError:
            self._leave_to_itself(handoff)
            raise
        except (PrefillFailed, UpstreamError):
            if not handoff.is_owed:  # else it goes on, here or on its own
                self._count_handoff(HandoffResult.FAILED)
            raise
        self._count_handoff(handoff.result(opened))
        return opened

    def _begin_handoff(self, forward: Forward, link: Link) -> HandoffRun:
        assert forward.prefill is not None
        driver, prefill = self._path.driver, self._path.links.get(forward.prefill.instance_id)
        handoff = HandoffRun(
            prefill.settings.handoff,
            make_request_id(),
            self,
            self._path.bootstraps,
            on_prefilled=lambda is_held: driver.handle(PrefillEnded(self._id, is_held)),
        )
        handoff.start(forward, prefill, link)
        return handoff

    def _leave_to_itself(self, handoff: HandoffRun) -> None:
        """The client left in the middle of a hand-off: it goes on to where nothing is kept for it."""
        self._is_adopted = True

        def try_others(kind: FailureKind, is_prefill: bool) -> bool:
            command = self._tell_failure(kind, None, is_prefill)
            if not isinstance(command, Forward) or not command.is_redelivery:
                return False
            handoff.redeliver(command, self._path.links.get(command.holder.instance_id))
            return True

        async def finish() -> None:
            try:
                self._count_handoff(await handoff.finish_alone(try_others))
            finally:
                self._is_adopted = False
                self._finish(Outcome.CLIENT_LEFT)

        self._path.adopt(finish())

    def _release_owed(self) -> None:
        """The client is told of a failure, and blocks may still be kept for it."""
        handoff = self._handoff

        async def release(handoff: HandoffRun) -> None:
            self._count_handoff(await handoff.release())

        if handoff is not None and handoff.is_owed:
            self._path.adopt(release(handoff))

    def _count_handoff(self, result: HandoffResult) -> None:
        self._path.metrics.handoffs.add(1, result.value)

    def _finish(
        self,
        outcome: Outcome,
        completion_tokens: int | None = None,
        cached_tokens: int | None = None,
        usage: UsageReader | None = None,
    ) -> None:
        """Give the reservation back, once. `usage`: of a whole answer; None: as far as a stream has come."""
        if self._is_reserved and not self._is_adopted:
            self._is_reserved = False
            told = self._told_tokens(usage or self._usage)
            finished = RequestFinished(self._id, outcome, completion_tokens, cached_tokens, *told)
            self._path.driver.handle(finished)

    def _told_tokens(self, usage: UsageReader) -> tuple[int | None, int | None]:
        """Return the tokens of all answers, as far as they came, and of the prompt: for those that had to wait."""
        if self._path.driver.core.admission is None:
            return None, None
        told = usage.completion_tokens()
        generated = told if told is not None or not self._is_stream else usage.events
        return generated, usage.prompt_tokens() if self._route.is_cached else None

    # --- answering --------------------------------------------------------------------------------

    async def _relay(self, opened: Opened, forward: Forward) -> None:
        """Pass an answer on; see `relaying.py`."""
        answer, client, kind = opened.answer, self._client, kind_of(opened.answer)
        has_events = answer.header(b"content-type").startswith("text/event-stream")
        self._note_first_byte(opened, forward, shows_prefill=has_events and answer.status == 200)
        if kind is AnswerKind.TEXT_ERROR:
            await self._relay_text_error(opened, forward)
            return
        headers = response_headers(answer.raw_headers, self._our_headers(forward))
        edit = self._edit_of(answer, kind)
        if kind is AnswerKind.EVENTS or edit is not None:
            # There may become more or less of it on the way.
            headers = [header for header in headers if header[0] != b"content-length"]
        client.start(answer.status, headers)
        client.on_pause, client.on_resume = answer.pause, answer.resume
        try:
            if kind is AnswerKind.EVENTS:
                self._is_stream = True
                end = functools.partial(self._end, answer.status, forward)
                relayed = await relay_events(opened, client, end, self._usage, edit=edit)
                if (
                    self._bridge is not None
                    and relayed.error is None
                    and not self._account.is_counted
                ):
                    # What it became has no end either.
                    error = UpstreamError("the stream ended without its end mark")
                    relayed = relayed._replace(last=b"", error=error)
            else:
                hides = self._hides_params(answer)
                relayed = await relay_body(opened, client, hides_params=hides, edit=edit)
        finally:
            client.on_pause = client.on_resume = None
        if relayed.error is None or self._account.is_counted:
            self._end(answer.status, forward, relayed.usage)
            client.finish(relayed.last)
            return
        self._break_off(answer.status, forward, relayed.error)
        if kind is AnswerKind.EVENTS:
            message = f"the engine broke its answer off: {describe(relayed.error)}"
            seen = relayed.usage.tail()
            family = self._route.family
            client.finish(
                stream_error_events(
                    message, "engine_disconnected", family, first=relayed.first, last=seen
                )
            )
        else:
            # The connection is closed before the body's end, which is how a client learns that what
            # it has is not all.
            if relayed.last:
                client.write(relayed.last)
            client.break_off()

    def _edit_of(self, answer: Answer, kind: AnswerKind) -> Edit | None:
        """Return what is done to the answer, None if it passes as it is."""
        if answer.header(b"content-encoding"):
            return None
        if answer.status != 200:
            is_ours = self._bridge is not None
            return functools.partial(error_of, answer.status) if is_ours else None
        # The name comes first: what is kept of a response is what its client gets.
        parts = [part for part in (self._renaming, self._turn) if part is not None]
        if kind is not AnswerKind.EVENTS:
            around = [self._bridge.take_whole] if self._bridge is not None else []
            return _chained([*around, *(part.take_whole for part in parts)])
        edits: list[Edit] = [MessageStream().take_events] if self._bridge is not None else []
        edits += [part.take_events for part in parts]
        return _chained([*edits, *([without_usage_events] if self._drops_usage else [])])

    def _hides_params(self, answer: Answer) -> bool:
        """Tell whether the answer may have something for the gateway's eyes only."""
        is_allowed = self._settings.limits.allow_kv_transfer_params
        return self._route.generates and not is_allowed and answer.status == 200

    async def _relay_text_error(self, opened: Opened, forward: Forward) -> None:
        answer = opened.answer
        body = await wrap_text_error(opened, self._route.family)
        ours = {
            **self._our_headers(forward),
            "content-type": "application/json",
            "content-length": str(len(body)),
        }
        self._end(answer.status, forward, UsageReader())
        self._client.start(answer.status, response_headers(answer.raw_headers, ours))
        self._client.finish(body)

    def refuse(self, error: GatewayError) -> None:
        """Answer with an error of the gateway's own."""
        reason = error.reason or error.code
        if reason in SHED_CODES:
            self._path.metrics.rejected.add(1, reason)
        rates = self._meter.headers() if self._meter is not None else {}
        headers = {**rates, **error.headers}
        self._answer_with(error.status, error.body(self._route.family), headers)

    def _our_headers(self, forward: Forward) -> dict[str, str]:
        headers = {"x-request-id": self._client_id}
        if self._settings.observability.receipt_headers:
            headers |= receipt_headers(forward.decision)
            if self._account.queue_ms is not None:
                headers["x-moongate-queue-ms"] = f"{self._account.queue_ms:.1f}"
        return headers | self._meter.headers() if self._meter is not None else headers

    # --- counting ---------------------------------------------------------------------------------

    def _note_first_byte(self, opened: Opened, forward: Forward, *, shows_prefill: bool) -> None:
        if not self._is_reserved or self._account.has_first_byte:
            return
        if shows_prefill or not opened.answer.is_complete:  # else its end follows at once
            self._path.driver.handle(RequestFirstByte(self._id, shows_prefill))
        self._account.first_byte(forward.holder.instance_id)

    def _break_off(self, status: int, forward: Forward, error: UpstreamError) -> None:
        """The engine ended its answer before it was complete."""
        instance = forward.holder.instance_id
        logger.warning("%s broke its answer off: %s", instance, error)
        self._account.broken_off()
        self._path.metrics.broken_off.add(1, instance)
        self._finish(Outcome.BROKEN_OFF)
        self._account.count(status)

    def _end(self, status: int, forward: Forward, usage: UsageReader) -> None:
        """The engine's answer is complete. The second time, after a stream's end mark, it is known."""
        if self._account.is_counted:
            return
        cached_tokens, computing = usage.cached_tokens(), forward.holder
        handoff, decision = self._handoff, forward.decision
        if handoff is not None and handoff.is_handed_over and decision.prefill is not None:
            # To the decode instance all of the prompt is cached.
            cached_tokens, computing = handoff.cached_tokens, decision.prefill.holder
        pool_tokens = None
        if self._known is not None and self._path.pooling is not None and status == 200:
            pool_tokens = usage.pool_tokens()
            self._path.pooling.answered(
                computing.instance_id,
                self._known,
                decision.reused_tokens if decision.pool_tokens else 0,
                # What an engine reports that another one prefilled for says nothing of the pool.
                cached_tokens if forward.prefill is None else None,
            )
        output_tokens = usage.completion_tokens()
        if self._meter is not None and self._route.is_cached:
            self._meter.ended(status, usage.prompt_tokens(), output_tokens)
        elif self._meter is not None:
            self._meter.give_back()  # counted, but not computed
        is_traced = self._account.trace is not None and not self._has_exact_prompt()
        self._account.answered(
            prompt_tokens=usage.prompt_tokens() if is_traced else None,
            cached_tokens=cached_tokens,
            pool_tokens=pool_tokens,
            output_tokens=output_tokens,
        )
        completion_tokens = output_tokens if self._has_one_choice else None
        outcome = Outcome.REFUSED if 400 <= status < 500 else Outcome.ANSWERED
        self._finish(outcome, completion_tokens, cached_tokens, usage)
        self._account.count(status)

    def _has_exact_prompt(self) -> bool:
        return self._read.prompt is not None and self._read.prompt.is_exact


def _chained(edits: Sequence[Edit]) -> Edit | None:
    """Return one edit for several, None for none."""
    if len(edits) < 2:
        return edits[0] if edits else None

    def edit(text: bytes) -> bytes:
        return functools.reduce(lambda changed, one: one(changed), edits, text)

    return edit


def _stopping() -> GatewayError:
    return GatewayError(503, _STOPS, "gateway_stopping", headers={"retry-after": "1"})
