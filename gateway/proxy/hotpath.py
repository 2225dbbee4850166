"""The proxied routes: read, route, relay. Here is the order of the steps, and what outlives a request.

Theory of operation. Each request is an `Exchange`, run as a task that is cancelled when its client leaves,
at whatever point; `finally` blocks close the connection to the engine (which so learns that it should
stop) and give the reservation back. `intake.py` makes the request that the core is asked about;
`attempts.py` sends it, until an answer has begun (`sending.py`, to one instance; `pairs.py`, over two);
`engine_answers.py` passes that on, from the engine's connection to the client's without a task in
between; `own_answers.py` answers where no engine does. These parts live as long as the gateway.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

from moongate.gateway.auth.access import Access, Meter
from moongate.gateway.config.live_settings import LiveSettings
from moongate.gateway.config.settings import Settings
from moongate.gateway.dialects.routes import PromptKind
from moongate.gateway.driver import Driver
from moongate.gateway.errors import GatewayError
from moongate.gateway.headers import clean_request_id, make_request_id, read_headers
from moongate.gateway.instances.links import Links
from moongate.gateway.pool.pooling import Pooling
from moongate.gateway.pool.seeding import Seeding
from moongate.gateway.prompts.divergence import Divergences
from moongate.gateway.prompts.prompt import PromptPipeline
from moongate.gateway.proxy.account import Account, Observers
from moongate.gateway.proxy.attempts import Attempts
from moongate.gateway.proxy.bootstrap import Bootstraps
from moongate.gateway.proxy.client import Client
from moongate.gateway.proxy.engine_answers import EngineAnswers
from moongate.gateway.proxy.exchange import Exchange
from moongate.gateway.proxy.id_forwarding import IdForwarding
from moongate.gateway.proxy.intake import Intake
from moongate.gateway.proxy.own_answers import OwnAnswers
from moongate.gateway.proxy.pairs import Pairs
from moongate.gateway.proxy.request_reading import RequestReader
from moongate.gateway.proxy.reservation import Reservation
from moongate.gateway.proxy.sending import Sender
from moongate.gateway.responses.background import Background
from moongate.gateway.responses.response_turns import ResponseTurns
from moongate.gateway.telemetry.logs import REQUEST, LoggedRequest
from moongate.gateway.telemetry.metrics import Metrics
from moongate.gateway.telemetry.recent import RecentReceipts
from moongate.gateway.telemetry.recent_turns import RecentTurns
from moongate.gateway.telemetry.tracing import QUEUE, RECEIVE, ROUTE, Tracing
from moongate.router import Forward, Hold, Outcome, Reject, Request, RequestArrived, RequestId

logger = logging.getLogger(__name__)

ADOPTED_MAX = 128
"""Past so many hand-offs whose clients have left, requests are not handed over any more: a prompt that is
computed where it is decoded ends with its client."""

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
        self._driver = driver
        self._metrics = metrics
        self._access = access
        self._pooling = pooling
        self._seeding = seeding
        self._adopted: set[asyncio.Task[None]] = set()
        self._requests = 0
        self.recent = RecentReceipts(settings.observability.decisions_max)
        self.observers = Observers(metrics, self.recent, seen, tracing, driver.clock)
        self.reader = RequestReader(live, driver, access)
        self.id_forwarding = IdForwarding(settings.tokenizer.forward_ids, prompts)
        self.bootstraps = Bootstraps(settings.limits.connect_timeout_s)
        self.background = Background(turns, self._answer_admitted)
        self._intake = Intake(settings, self.reader, driver, prompts, turns, divergences, metrics)
        sender = Sender(links, driver, prompts, self.id_forwarding, access, metrics)
        pairs = Pairs(links, sender, self.bootstraps, metrics, self._adopt)
        answers = EngineAnswers(metrics, pooling)
        self._attempts = Attempts(links, sender, pairs, answers, metrics)
        self._own_answers = OwnAnswers(metrics, self.reader, self.background)

    @property
    def settings(self) -> Settings:
        """Return the settings in force."""
        return self._live.current

    def renew(self, settings: Settings) -> None:
        """Make anew what is made of the settings."""
        self.recent.resize(settings.observability.decisions_max)
        self.id_forwarding.mode = settings.tokenizer.forward_ids
        self.bootstraps.timeout_s = settings.limits.connect_timeout_s
        self._intake.renew(settings)

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

    def _adopt(self, work: Coroutine[None, None, None]) -> None:
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
        await self._run(self._begin(client))

    async def _answer_admitted(self, client: Client) -> None:
        """Compute what a request has asked for that is answered already, and was counted then."""
        await self._run(self._begin(client), is_admitted=True)

    def refuse(self, client: Client, error: GatewayError) -> None:
        """Answer a request that is refused before its body is read."""
        self._own_answers.refuse(self._begin(client), error)

    # --- one request ------------------------------------------------------------------------------

    def _begin(self, client: Client) -> Exchange:
        self._requests += 1
        request_id = RequestId(str(self._requests))
        headers = read_headers(client.headers)
        given_id = clean_request_id(headers.get("x-request-id"), self._access.tenants.are_in)
        client_id = given_id or make_request_id()
        account = Account(self.observers, client.route, client_id, headers, client.opened_at)
        account.tenant = client.tenant.name
        return Exchange(
            request_id,
            self.settings,
            client,
            client.route,
            headers,
            self._access.meter(client.tenant),
            account,
            Reservation(self._driver, request_id),
        )

    async def _run(self, exchange: Exchange, *, is_admitted: bool = False) -> None:
        """Answer it, whatever happens. A cancellation means that the client has left.

        `is_admitted`: as a request it was counted before.
        """
        account = exchange.account
        trace_id = account.trace.trace_id if account.trace is not None else None
        # Of this task, which is only for it.
        REQUEST.set(LoggedRequest(account.request_id, trace_id))
        try:
            await self._serve(exchange, is_admitted=is_admitted)
        except GatewayError as error:
            if error.status < 500:
                # What can't be translated for an instance says nothing of it.
                exchange.reservation.finish(Outcome.REFUSED)
            self._own_answers.refuse(exchange, error)
        except Exception:
            self._own_answers.fail(exchange)
        except asyncio.CancelledError:
            exchange.reservation.finish(Outcome.CLIENT_LEFT, told=exchange.told_tokens)
            if not account.is_counted:  # else it has all it wanted
                self._own_answers.end_early(exchange)
            raise
        finally:
            # Whatever happened, the instance's reservation ends here.
            exchange.reservation.finish(Outcome.BROKEN_OFF, told=exchange.told_tokens)
            if exchange.meter is not None:
                _end_meter(exchange, exchange.meter)
            if self._seeding is not None:
                self._seeding.forget(exchange.id)

    async def _serve(self, exchange: Exchange, *, is_admitted: bool) -> None:
        """Read, decide, forward and relay. Raises: GatewayError."""
        _check_method(exchange)
        raw = exchange.client.take_body()
        if exchange.meter is not None and not is_admitted:
            await exchange.meter.begin(len(raw))
        self._intake.parse(exchange, raw)
        if exchange.route.kind is PromptKind.RESPONSES:
            if Background.takes(exchange.body):
                await self._own_answers.answer_later(exchange, raw)
                return
            await self._intake.continue_turn(exchange)
        exchange.account.phase_ended(RECEIVE)
        has_room = len(self._adopted) < ADOPTED_MAX
        request = await self._intake.read_request(exchange, has_room=has_room)
        if not self._driver.is_settled(request):
            await self._settle(request)
        if self._pooling is not None and exchange.read.is_nameable:
            prompt = self._intake.name_blocks(exchange)
            request = await self._pooling.enrich(request, prompt)
            if self._seeding is not None:
                self._seeding.note(exchange.id, prompt)
        forward = await self._admit(exchange, request)
        await self._attempts.forward(exchange, request, forward)

    async def _settle(self, request: Request) -> None:
        began = self._driver.clock()
        await self._driver.until_settled(request)
        self._metrics.settle_seconds.observe(self._driver.clock() - began)

    async def _admit(self, exchange: Exchange, request: Request) -> Forward:
        """Return where it goes, once it may. Raises: GatewayError."""
        driver, account = self._driver, exchange.account
        began = driver.clock()
        account.phase_ended(QUEUE)
        command = driver.handle(RequestArrived(request))
        decided = driver.clock()
        self._metrics.route_seconds.observe(decided - began)
        account.phase_ended(ROUTE)
        if isinstance(command, Hold):
            command = await driver.until_admitted(exchange.id)
            account.waited(driver.clock() - decided)
        match command:
            case Forward():
                exchange.reservation.begin()
                return command
            case Reject():
                raise self.reader.rejection(command)
            case _:
                raise AssertionError(command)


def _check_method(exchange: Exchange) -> None:
    method = exchange.client.method
    if method != "POST":
        message = f"{exchange.route.template} takes POST, not {method[:16]}"
        raise GatewayError(405, message, "method_not_allowed", headers={"allow": "POST"})


def _end_meter(exchange: Exchange, meter: Meter) -> None:
    """Count what an answer that has no end has cost; one that an engine never gave costs nothing."""
    account, usage = exchange.account, exchange.usage
    has_left = exchange.client.disconnected and account.receipt is not None
    if account.has_first_byte or has_left:
        told = usage.completion_tokens()
        meter.end(None, told if told is not None else usage.events)
    else:
        meter.give_back()
