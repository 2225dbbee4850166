"""Requests that wait for an instance with room: in what order, for how long, and what is told of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, Received, chat_answer, stream_event
from live_gateway import LiveGateway, live_gateway, until

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]


class Gate:
    """An engine that answers when the test says so, in the order in which requests came."""

    def __init__(self) -> None:
        self.engine = FakeEngine(self._act)
        self._opened = asyncio.Semaphore(0)

    async def _act(self, request: Received) -> None:
        leaving = asyncio.ensure_future(request.client_left.wait())
        opening = asyncio.ensure_future(self._opened.acquire())
        await asyncio.wait([leaving, opening], return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        opening.cancel()
        if not request.client_left.is_set():
            await request.answer(200, chat_answer())

    def let_through(self, count: int = 1) -> None:
        for _ in range(count):
            self._opened.release()

    @property
    def contents(self) -> list[str]:
        """Return what was asked, in the order in which it came here."""
        return [body["messages"][0]["content"] for body in self.engine.bodies]


@contextlib.asynccontextmanager
async def gated(
    limits: Mapping[str, Any] | None = None, **admission: Any
) -> AsyncIterator[tuple[LiveGateway, Gate]]:
    """Run a gateway before one instance that runs one request at a time."""
    gate = Gate()
    admission = {"instance_requests_max": 1, **admission}
    async with gate.engine:
        async with live_gateway(
            [gate.engine.url], admission=admission, limits=limits or {}
        ) as gateway:
            yield gateway, gate


async def waiting(gateway: LiveGateway) -> float:
    return await gateway.metric("moongate_queue_requests")


class Asked:
    """Chats that are under way, by their content."""

    def __init__(self, gateway: LiveGateway) -> None:
        self._gateway = gateway
        self.tasks: dict[str, asyncio.Task[httpx.Response]] = {}

    async def ask(self, content: str, **headers: str) -> None:
        """Send a chat, and return once it runs or waits. Names of headers with _ for -."""
        named = {"x-session-id": content, **{k.replace("_", "-"): v for k, v in headers.items()}}
        core = self._gateway.core
        assert core.admission is not None
        before = len(core.requests) + len(core.admission.queue)
        self.tasks[content] = asyncio.create_task(
            self._gateway.chat(content=content, headers=named)
        )
        await until(lambda: self._count() > before)

    def _count(self) -> int:
        core = self._gateway.core
        assert core.admission is not None
        return len(core.requests) + len(core.admission.queue)

    async def statuses(self) -> list[int]:
        return [answer.status_code for answer in await asyncio.gather(*self.tasks.values())]


async def test_what_has_no_room_waits_and_is_told_for_how_long() -> None:
    async with gated() as (gateway, gate):
        asked = Asked(gateway)
        await asked.ask("first")
        await asked.ask("second")
        assert await waiting(gateway) == 1
        assert await gateway.metric("moongate_reading_requests") == 0
        await asyncio.sleep(0.1)
        assert gate.contents == ["first"]
        gate.let_through(2)
        assert await asked.statuses() == [200, 200]
        first, second = (task.result() for task in asked.tasks.values())
        assert "x-moongate-queue-ms" not in first.headers
        assert 100 <= float(second.headers["x-moongate-queue-ms"]) < 2000
        receipts = (await gateway.client.get("/admin/decisions")).json()["decisions"]
        times = sorted(receipt["queue_ms"] or 0 for receipt in receipts)
        assert times[0] == 0
        assert 100 <= times[1] < 2000
        assert await waiting(gateway) == 0
        assert await gateway.metric("moongate_queue_seconds_count") == 1


async def test_the_lower_priority_is_sooner() -> None:
    async with gated() as (gateway, gate):
        asked = Asked(gateway)
        await asked.ask("runs")
        for content, priority in (("p5", "5"), ("p0", "0"), ("p-1", "-1"), ("p1", "+1")):
            await asked.ask(content, x_moongate_priority=priority)
        gate.let_through(5)
        assert await asked.statuses() == [200] * 5
        assert gate.contents == ["runs", "p-1", "p0", "p1", "p5"]


@pytest.mark.parametrize("header", ["x-moongate-priority", "x-moongate-max-wait-ms"])
@pytest.mark.parametrize("value", ["high", "1.5", "", "9" * 30])
async def test_a_wish_that_is_no_number_is_refused(header: str, value: str) -> None:
    async with gated() as (gateway, gate):
        answer = await gateway.chat(headers={header: value})
        assert answer.status_code == 400
        assert header in answer.json()["error"]["message"]
        assert gate.contents == []


async def test_who_leaves_while_waiting_is_gone_and_costs_nothing() -> None:
    async with gated() as (gateway, gate):
        asked = Asked(gateway)
        for content in ("runs", "leaves", "stays"):
            await asked.ask(content)
        asked.tasks.pop("leaves").cancel()
        await until(lambda: _has(gateway, 1))
        gate.let_through(2)
        assert await asked.statuses() == [200, 200]
        assert gate.contents == ["runs", "stays"]
        await until(lambda: gateway.inflight() == 0)
        assert await gateway.metric("moongate_requests_total", code="499") == 1
        assert await gateway.metric("moongate_routed_total") == 2


async def _has(gateway: LiveGateway, count: int) -> bool:
    return await waiting(gateway) == count


async def test_who_is_let_through_just_as_it_leaves_is_given_back() -> None:
    """Whatever comes first: the reservation ends with the request."""
    async with gated() as (gateway, gate):
        for number in range(20):
            asked = Asked(gateway)
            await asked.ask(f"runs{number}")
            await asked.ask(f"leaves{number}")
            gate.let_through()
            if number % 2:
                await asyncio.sleep(0)
            asked.tasks[f"leaves{number}"].cancel()
            await asyncio.wait(asked.tasks.values())
            await until(lambda: gateway.inflight() == 0)
        assert await waiting(gateway) == 0


async def test_c25_what_waits_too_long_is_refused_with_a_retry_after() -> None:
    async with gated(wait_s_max=0.3) as (gateway, gate):
        asked = Asked(gateway)
        await asked.ask("runs")
        answer = await gateway.chat(content="late")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_timeout")
        assert int(answer.headers["retry-after"]) >= 1
        assert gate.contents == ["runs"]
        assert await gateway.metric("moongate_rejected_total", reason="queue_timeout") == 1
        gate.let_through()
        assert await asked.statuses() == [200]


async def test_a_client_may_allow_less() -> None:
    async with gated() as (gateway, gate):
        asked = Asked(gateway)
        await asked.ask("runs")
        loop = asyncio.get_running_loop()
        began = loop.time()
        answer = await gateway.chat(headers={"x-moongate-max-wait-ms": "200"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_timeout")
        assert 0.15 < loop.time() - began < 2.0
        gate.let_through()
        assert await asked.statuses() == [200]


async def test_c25_past_the_bound_of_the_queue_requests_are_refused_with_a_retry_after() -> None:
    async with gated(limits={"queue_requests_max": 2}) as (gateway, gate):
        asked = Asked(gateway)
        for content in ("runs", "waits", "waits too"):
            await asked.ask(content)
        answer = await gateway.chat(content="one too many", headers={"x-session-id": "new"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
        assert await gateway.metric("moongate_rejected_total", reason="queue_full") == 1
        gate.let_through(3)
        assert await asked.statuses() == [200] * 3
        assert "one too many" not in gate.contents


async def test_the_retry_after_is_as_long_as_it_takes() -> None:
    """An engine that takes 0.25 s for each of 12: whoever is refused is told about what that takes."""

    async def act(request: Received) -> None:
        await asyncio.sleep(0.25)
        await request.answer(200, chat_answer())

    limits = {"queue_requests_max": 12}
    async with FakeEngine(act) as engine:
        async with live_gateway(
            [engine.url], admission={"instance_requests_max": 1}, limits=limits
        ) as gateway:
            asked = Asked(gateway)
            for n in range(13):
                await asked.ask(f"first{n}")
            await until(lambda: _has(gateway, 4))  # by then the pace is known
            for n in range(8):
                await asked.ask(f"second{n}")
            refused = await gateway.chat(content="x", headers={"x-session-id": "x"})
            assert refused.status_code == 503
            loop = asyncio.get_running_loop()
            began = loop.time()
            assert await asked.statuses() == [200] * 21
            took_s = loop.time() - began
            assert took_s * 0.6 <= int(refused.headers["retry-after"]) <= took_s * 1.5 + 1


async def test_when_the_gateway_stops_what_still_waits_is_told_so() -> None:
    async with gated() as (gateway, gate):
        asked = Asked(gateway)
        await asked.ask("runs")
        await asked.ask("waits")
        gateway.server.request_stop()
        answer = await asked.tasks["waits"]
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "gateway_stopping")
        assert gate.contents == ["runs"]
        with contextlib.suppress(httpx.HTTPError):
            await asked.tasks["runs"]


# --- what it costs --------------------------------------------------------------------------------


LONG_ANSWER = chat_answer().replace(b'"completion_tokens": 1', b'"completion_tokens": 200')


async def answer_at_length(request: Received) -> None:
    """Answer with 200 tokens; in streams without saying so."""
    if not request.json().get("stream"):
        await request.answer(200, LONG_ANSWER)
        return
    await request.start_stream()
    await request.send_chunk(stream_event("x") * 200)
    await request.send_chunk(b"data: [DONE]\n\n")
    await request.send_chunk(b"")


class Contest:
    """Two tenants that ask again and again, each with eight clients; how many are answered of whom."""

    def __init__(self, gateway: LiveGateway) -> None:
        self._gateway = gateway
        self.answered = Counter[str]()
        self._over = asyncio.Event()

    async def run(self, count: int, says: Mapping[str, Any]) -> Counter[str]:
        """Let about so many be answered, after half as many. `says`: what the second adds."""
        fields = {"a": {"max_tokens": 4000}, "b": {"max_tokens": 4000, **says}}
        clients = [
            asyncio.create_task(self._ask_on(name, fields[name])) for name in "ab" for _ in range(8)
        ]
        await until(lambda: self.answered.total() >= count // 2, timeout_s=20)
        self.answered.clear()
        await until(lambda: self.answered.total() >= count, timeout_s=20)
        result = self.answered.copy()
        self._over.set()
        await asyncio.gather(*clients)
        return result

    async def _ask_on(self, name: str, fields: Mapping[str, Any]) -> None:
        while not self._over.is_set():
            headers = {"authorization": f"Bearer {KEYS[name]}"}
            answer = await self._gateway.chat(headers=headers, **fields)
            assert answer.status_code == 200
            self.answered[name] += 1


KEYS = {"a": "sk-aaaaaaaa", "b": "sk-bbbbbbbb"}


@pytest.mark.parametrize(
    "says",
    [
        {},
        {"max_output_tokens": 1},
        {"max_tokens": 1, "max_completion_tokens": 4000},
        {"max_tokens": 1, "stream": True},
        {"n": 100},
    ],
)
async def test_whatever_a_tenant_says_of_its_answers_its_share_is_what_they_have(
    says: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, key in KEYS.items():
        monkeypatch.setenv(f"KEY_{name}", key)
    keys = [{"tenant": name, "key_env": f"KEY_{name}"} for name in KEYS]
    async with FakeEngine(answer_at_length) as engine:
        async with live_gateway(
            [engine.url], admission={"instance_requests_max": 1}, auth={"keys": keys}
        ) as gateway:
            answered = await Contest(gateway).run(120, says)
    assert abs(answered["a"] - answered["b"]) <= 50, answered  # a quantum is twenty


# --- others' queues, and nobody left --------------------------------------------------------------


async def test_what_can_start_starts_though_the_queue_for_others_is_full() -> None:
    gate = Gate()
    async with gate.engine, FakeEngine(model="other") as other:
        async with live_gateway(
            [gate.engine.url, other.url],
            admission={"instance_requests_max": 1},
            limits={"queue_requests_max": 2},
        ) as gateway:
            asked = Asked(gateway)
            for content in ("runs", "waits", "waits too"):
                await asked.ask(content)
            assert (await gateway.chat(model="other")).status_code == 200
            gate.let_through(3)
            assert await asked.statuses() == [200] * 3


async def test_c91_when_the_last_instance_goes_what_waits_is_refused_at_once() -> None:
    async with gated() as (gateway, gate):
        asked = Asked(gateway)
        for content in ("runs", "waits", "waits too"):
            await asked.ask(content)
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert (await gateway.client.post("/admin/instances/a/drain")).status_code < 300
        for content in ("waits", "waits too"):
            answer = await asked.tasks[content]
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_instance")
            assert int(answer.headers["retry-after"]) >= 1
        assert loop.time() - began < 2.0
        newcomer = await gateway.chat()
        assert newcomer.json()["error"]["code"] == "no_instance"
        gate.let_through()
        assert (await asked.tasks["runs"]).status_code == 200
