"""Stopping: what was opened is closed, also at a second signal, and where starting failed midway."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from live_gateway import live_gateway, until

from moongate.gateway.app import Gateway
from moongate.gateway.config.settings import Settings
from moongate.gateway.instances.monitor import Monitor
from moongate.gateway.instances.roster import Roster
from moongate.gateway.server import GatewayServer, listen
from moongate.simulator.engine import EngineProfile
from moongate.simulator.server import SimEngine, SimEngineConfig

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

TURN = {
    "model": "sim",
    "stream": True,
    "messages": [{"role": "user", "content": "def f(): return 1"}],
}


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[SimEngine]:
    engine = SimEngine(
        SimEngineConfig(
            kv_events_port=0, kv_replay_port=0, profile=EngineProfile(decode_tokens_per_s=20)
        )
    )
    await engine.start()
    yield engine
    await engine.stop()


async def test_c90_while_it_drains_it_is_not_ready_and_what_runs_ends(
    engine: SimEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    body = {**TURN, "max_tokens": 20, "ignore_eos": True}
    async with live_gateway([engine.url], drain={"limit_s": 30.0}) as gateway:

        async def ask(*, stream: bool) -> httpx.Response:
            path = "/v1/chat/completions"
            return await gateway.client.post(path, json={**body, "stream": stream})

        # What is asked before the listener has closed, which takes a tenth of a second at most.
        readiness = gateway.server.gateway.readiness
        readiness.is_draining = True
        ready, late = await gateway.client.get("/ready"), await ask(stream=False)
        assert ready.status_code == 503
        assert ready.json()["reasons"] == ["the gateway is stopping"]
        readiness.is_draining = False
        running = [asyncio.create_task(ask(stream=stream)) for stream in (True, False)]
        await until(lambda: gateway.inflight() == 2)
        gateway.server.request_stop()
        assert readiness.is_draining
        whole, plain = await asyncio.gather(*running)
        assert whole.text.rstrip().endswith("data: [DONE]")
        for answer in (plain, late):
            assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        with pytest.raises(httpx.ConnectError):
            await gateway.client.get("/ready")
    told = [r.getMessage() for r in caplog.records if r.name == "moongate.gateway.server"]
    assert told[0] == "told to stop: nothing new is taken, what runs may take 30 s"
    assert "the gateway has stopped" in told


async def test_a_second_signal_breaks_answers_off_and_closes_everything(engine: SimEngine) -> None:
    before = asyncio.all_tasks()
    async with live_gateway([engine.url], drain={"limit_s": 30.0}) as gateway:
        context, core = gateway.server.gateway.monitor._context, gateway.core
        async with gateway.client.stream(
            "POST", "/v1/chat/completions", json={**TURN, "max_tokens": 500, "ignore_eos": True}
        ) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            began = time.monotonic()
            gateway.server.request_stop()
            gateway.server.request_stop()
            rest = [line async for line in lines]
    assert time.monotonic() - began < 3.0, "the answer would take 25 s, drain.limit_s is 30 s"
    assert sum('"error"' in line for line in rest) == 1, "the client is told"
    assert context.closed
    assert core.loads.get(next(iter(core.fleet)).holders[0]).active_requests == 0
    ours = {t for t in asyncio.all_tasks() - before if "moongate" in repr(t.get_coro())}
    assert not ours


async def test_what_a_failed_start_opened_is_closed(
    engine: SimEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"instances": [{"id": "a", "url": engine.url}]}
    gateway = Gateway(Settings.model_validate(settings))

    def fail(self: Monitor) -> None:
        raise RuntimeError("no more sockets")

    monkeypatch.setattr(Monitor, "start", fail)
    with pytest.raises(SystemExit):
        await GatewayServer(gateway, listen("127.0.0.1", 0)).serve()
    assert gateway.monitor._context.closed


async def test_what_can_not_be_closed_keeps_nothing_else_open(
    engine: SimEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = Roster.close

    async def close_and_fail(self: Roster) -> None:
        await close(self)
        raise RuntimeError("half closed")

    monkeypatch.setattr(Roster, "close", close_and_fail)
    gateway = Gateway(Settings.model_validate({"instances": [{"id": "a", "url": engine.url}]}))
    await gateway.start()
    with pytest.raises(RuntimeError, match="half closed"):
        await gateway.stop()
    assert gateway.monitor._context.closed
