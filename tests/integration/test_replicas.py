"""Gateways as replicas: what one has answered the others continue, with a real Redis between them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, Received
from live_gateway import LiveGateway, live_gateway, until
from redis_process import RedisProcess, needs_redis

from moongate.gateway.replicas.shared_state import SharedState
from moongate.gateway.responses.response_sharing import LEASE_S, SharedResponses
from moongate.gateway.responses.response_store import ResponseStore, StoredResponse

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60), needs_redis]

OUTPUT = [{"type": "message", "role": "assistant", "content": "a"}]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisProcess]:
    with RedisProcess(tmp_path) as running:
        yield running


class Engine:
    """Answers each response by a name of its own, once it may."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __call__(self, request: Received) -> None:
        body = request.json()
        self.bodies.append(body)
        name = body.get("request_id", f"resp_{len(self.bodies)}")
        await self.may_answer.wait()
        answer = {
            "id": name, "object": "response", "status": "completed", "output": OUTPUT,
            "previous_response_id": None, "background": False,
        }  # fmt: skip
        await request.answer(200, json.dumps(answer).encode())


@contextlib.asynccontextmanager
async def replicas(
    server: RedisProcess, handler: Engine, timeout_ms: float = 500.0
) -> AsyncIterator[tuple[LiveGateway, LiveGateway]]:
    state = {"kind": "redis", "url": server.url, "timeout_ms": timeout_ms}
    async with FakeEngine(handler) as engine, live_gateway([engine.url], state=state) as one:
        async with live_gateway([engine.url], state=state) as other:
            yield one, other


async def respond(gateway: LiveGateway, **fields: Any) -> Any:
    answer = await gateway.client.post("/v1/responses", json={"model": "m", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def begin_where_others_see_it(one: LiveGateway, other: LiveGateway) -> str:
    """Begin a response in the background at one; return its path once the other says that it runs."""
    queued = await respond(one, input="1", background=True)
    path = f"/v1/responses/{queued['id']}"
    assert (await other.client.get(path)).json()["status"] == "in_progress"
    return path


async def test_a_conversation_goes_on_at_any_replica(server: RedisProcess) -> None:
    handler = Engine()
    async with replicas(server, handler) as (one, other):
        first = await respond(one, input="1")
        second = await respond(other, input="2", previous_response_id=first["id"])
        assert second["previous_response_id"] == first["id"]
        await respond(one, input="3", previous_response_id=second["id"])
        said = [i["content"] for i in handler.bodies[-1]["input"] if i["role"] == "user"]
        assert said == ["1", "2", "3"]
        told = await other.client.get(f"/v1/responses/{second['id']}")
        assert told.json()["id"] == second["id"]
        assert server.client().ttl(f"moongate:response::{second['id']}") > 86_000
        assert await one.metric("moongate_redis_up") == 1


async def test_what_is_deleted_at_one_is_gone_at_all_but_for_what_continues_it(
    server: RedisProcess,
) -> None:
    handler = Engine()
    async with replicas(server, handler) as (one, other):
        first = await respond(one, input="1")
        second = await respond(other, input="2", previous_response_id=first["id"])
        assert (await other.client.delete(f"/v1/responses/{first['id']}")).json()["deleted"] is True

        async def is_gone() -> bool:
            return (await one.client.get(f"/v1/responses/{first['id']}")).status_code == 404

        await until(is_gone)
        await respond(one, input="3", previous_response_id=second["id"])
        assert len(handler.bodies[-1]["input"]) == 5


@pytest.mark.parametrize("is_whole", [True, False])
async def test_replicas_hear_at_once_what_became_of_responses_of_one_that_stops(
    server: RedisProcess, is_whole: bool
) -> None:
    handler = Engine()
    handler.may_answer.clear()
    state = {"kind": "redis", "url": server.url}
    async with FakeEngine(handler) as engine, live_gateway([engine.url], state=state) as other:
        drain = {"limit_s": 30.0 if is_whole else 0.3}
        async with live_gateway([engine.url], state=state, drain=drain) as one:
            path = await begin_where_others_see_it(one, other)
            await until(lambda: handler.bodies)
            one.server.request_stop()
            began = time.monotonic()
            await asyncio.sleep(0.2)
            told = (await other.client.get(path)).json()
            assert told["status"] == "in_progress"
            if is_whole:
                handler.may_answer.set()
            running = one.server.gateway._hot_path.background._running  # type: ignore[union-attr]
            await until(lambda: not running)
        told = (await other.client.get(path)).json()
        assert time.monotonic() - began < LEASE_S / 2
        if is_whole:
            assert told["status"] == "completed"
        else:
            assert (told["status"], told["error"]["code"]) == ("failed", "server_error")
            assert "has stopped" in told["error"]["message"]


async def test_what_runs_in_the_background_is_told_and_cancelled_from_anywhere(
    server: RedisProcess,
) -> None:
    handler = Engine()
    handler.may_answer.clear()
    async with replicas(server, handler) as (one, other):
        queued = await respond(one, input="1", background=True)
        path = f"/v1/responses/{queued['id']}"

        async def status() -> str:
            told = (await other.client.get(path)).json()
            return str(told.get("status"))

        await until(lambda: handler.bodies)
        assert await status() == "in_progress"
        early = await other.client.post(
            "/v1/responses", json={"model": "m", "input": "x", "previous_response_id": queued["id"]}
        )
        assert early.status_code == 400
        cancelled = await other.client.post(f"{path}/cancel")
        assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
        await until(lambda: one.inflight() == 0)
        assert (await other.client.post(f"{path}/cancel")).status_code == 400

        handler.may_answer.set()
        queued = await respond(one, input="1", background=True)
        path = f"/v1/responses/{queued['id']}"

        async def is_complete() -> bool:
            return await status() == "completed"

        await until(is_complete)


async def test_a_response_whose_replica_died_has_failed(server: RedisProcess) -> None:
    handler = Engine()
    handler.may_answer.clear()
    async with replicas(server, handler) as (one, other):
        path = await begin_where_others_see_it(one, other)
        task = one.server.gateway._hot_path.background._informing  # type: ignore[union-attr]
        assert task is not None
        task.cancel()  # as if the replica were gone
        state = other.server.gateway._state
        assert state is not None
        state.up_since -= LEASE_S
        server.client().delete(f"moongate:response::{path.rpartition('/')[2]}:run")
        told = (await other.client.get(path)).json()
        assert (told["status"], told["error"]["code"]) == ("failed", "server_error")
        handler.may_answer.set()


async def test_what_was_completed_while_redis_was_away_is_completed_everywhere(
    server: RedisProcess,
) -> None:
    handler = Engine()
    handler.may_answer.clear()
    async with replicas(server, handler) as (one, other):
        path = await begin_where_others_see_it(one, other)
        server.freeze()
        handler.may_answer.set()
        await until(lambda: one.inflight() == 0)
        await until(lambda: _metric_is(other, 0))
        server.thaw()

        async def are_completed() -> bool:
            told = [(await gateway.client.get(path)).json() for gateway in (one, other)]
            assert all(each.get("status") != "failed" for each in told), told
            return all(each.get("status") == "completed" for each in told)

        await until(are_completed, 10.0)


async def test_a_stale_copy_is_not_put_over_what_redis_lost(server: RedisProcess) -> None:
    handler = Engine()
    handler.may_answer.clear()
    async with replicas(server, handler) as (one, other):
        path = await begin_where_others_see_it(one, other)
        handler.may_answer.set()
        await until(lambda: one.inflight() == 0)
        await asyncio.sleep(0.2)  # until that is written
        server.client().flushall()
        assert (await other.client.get(path)).json()["status"] == "in_progress"
        assert (await one.client.get(path)).json()["status"] == "completed"

        async def is_completed() -> bool:
            return bool((await other.client.get(path)).json()["status"] == "completed")

        await until(is_completed)


async def test_what_one_has_deleted_while_redis_was_away_is_gone_everywhere(
    server: RedisProcess,
) -> None:
    async with replicas(server, Engine()) as (one, other):
        first = await respond(one, input="1")
        path = f"/v1/responses/{first['id']}"
        assert (await other.client.get(path)).status_code == 200
        server.freeze()
        await until(lambda: _metric_is(one, 0))
        assert (await one.client.delete(path)).status_code == 200
        assert (await one.client.get(path)).status_code == 503
        server.thaw()

        async def are_gone() -> bool:
            codes = {(await gateway.client.get(path)).status_code for gateway in (one, other)}
            return codes == {404}

        await until(are_gone, 10.0)


async def test_a_replica_heeds_all_that_others_want_of_it(server: RedisProcess) -> None:
    handler = Engine()
    handler.may_answer.clear()
    async with replicas(server, handler) as (one, other):
        kept, gone = [await respond(one, input=text, background=True) for text in ("1", "2")]
        assert (await other.client.delete(f"/v1/responses/{gone['id']}")).status_code == 200
        await until(lambda: one.inflight() == 1)
        lease = f"moongate:response::{kept['id']}:run"
        server.client().delete(lease)
        await until(lambda: server.client().exists(lease))
        cancelled = await other.client.post(f"/v1/responses/{kept['id']}/cancel")
        assert cancelled.json()["status"] == "cancelled"
        for gateway in (one, other):
            assert (await gateway.client.get(f"/v1/responses/{gone['id']}")).status_code == 404
        await until(lambda: one.inflight() == 0)


async def test_streams_of_other_replicas_are_told_once_they_have_ended(
    server: RedisProcess,
) -> None:
    handler = Engine()
    handler.may_answer.clear()
    async with replicas(server, handler) as (one, other):
        queued = await respond(one, input="1", background=True)
        stream = {"stream": True}
        plain = await other.client.get(f"/v1/responses/{queued['id']}", params=stream)
        assert (plain.status_code, plain.json()["error"]["param"]) == (400, "stream")
        asked = {"model": "m", "input": "2", "background": True, "stream": True}
        begun = asyncio.create_task(one.client.post("/v1/responses", json=asked))
        await until(lambda: len(handler.bodies) == 2)
        name = handler.bodies[1]["request_id"]
        following = asyncio.create_task(other.client.get(f"/v1/responses/{name}", params=stream))
        await asyncio.sleep(0.2)
        await one.client.delete(f"/v1/responses/{name}")
        told = await following
        assert told.status_code == 200
        assert "response.failed" in told.text
        begun.cancel()
        handler.may_answer.set()


async def test_large_contents_have_the_time_that_they_need(server: RedisProcess) -> None:
    async with replicas(server, Engine(), timeout_ms=50.0) as (one, other):
        first = await respond(one, input="x" * 20_000_000)

        async def is_known() -> bool:
            return (await other.client.get(f"/v1/responses/{first['id']}")).status_code == 200

        await until(is_known, 10.0)


@pytest.mark.parametrize("fault", ["stopped", "frozen", "flushed"])
async def test_a_redis_that_fails_costs_no_request_and_heals(
    fault: str, server: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    handler = Engine()
    caplog.set_level(logging.WARNING, "moongate")
    faults: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "stopped": (server.stop, server.start),
        "frozen": (server.freeze, server.thaw),
        "flushed": (server.client().flushall, server.client().ping),
    }
    begin_fault, end_fault = faults[fault]
    async with replicas(server, handler, timeout_ms=50.0) as (one, other):
        last = await respond(one, input="0")
        begin_fault()
        slow = 0
        for number in range(20):
            began = time.monotonic()
            last = await respond(one, input=str(number), previous_response_id=last["id"])
            slow += time.monotonic() - began > 0.06
        assert slow <= 3  # a call's limit, while it isn't known yet
        assert len(handler.bodies[-1]["input"]) == 41
        if fault != "flushed":
            await until(lambda: _metric_is(one, 0))
            ready = await one.client.get("/ready")
            assert (ready.status_code, ready.json()["degraded"]) == (200, ["redis"])
            lines = [r.getMessage() for r in caplog.records if "Redis does not" in r.getMessage()]
            assert 1 <= len(lines) <= 2  # one for each replica
        if fault != "flushed":
            lost = await other.client.get("/v1/responses/resp_lost")
            assert (lost.status_code, lost.headers["retry-after"]) == (503, "1")
        end_fault()
        await until(lambda: _metric_is(one, 1), 10.0)
        await until(lambda: _metric_is(other, 1), 10.0)
        last = await respond(one, input="x", previous_response_id=last["id"])

        async def is_known() -> bool:
            return (await other.client.get(f"/v1/responses/{last['id']}")).status_code == 200

        await until(is_known)
        await respond(other, input="y", previous_response_id=last["id"])
        assert len(handler.bodies[-1]["input"]) == 45


async def _metric_is(gateway: LiveGateway, value: float) -> bool:
    return await gateway.metric("moongate_redis_up") == value


async def test_a_gateway_starts_without_redis(server: RedisProcess) -> None:
    server.stop()
    async with replicas(server, Engine()) as (one, _):
        first = await respond(one, input="1")
        await respond(one, input="2", previous_response_id=first["id"])
        assert (await one.client.get("/ready")).json()["degraded"] == ["redis"]
        unknown = await one.client.get("/v1/responses/resp_nobody")
        assert unknown.json()["error"]["code"] == "state_unavailable"


async def test_values_that_are_not_ours_are_as_none(server: RedisProcess) -> None:
    client = server.client()
    client.set("moongate:response::resp_a", b"\xff\x00")
    client.set("moongate:response::resp_b", b"\x92\x91\x92\xa6resp_b\xa1v\xc2")
    client.lpush("moongate:response::resp_c", "x")
    async with replicas(server, Engine()) as (one, _):
        for name in ("resp_a", "resp_b", "resp_c"):
            assert (await one.client.get(f"/v1/responses/{name}")).status_code == 404
        assert await one.metric("moongate_redis_up") == 1


async def test_an_id_with_a_colon_is_no_part_of_anothers(server: RedisProcess) -> None:
    handler = Engine()
    handler.may_answer.clear()
    async with replicas(server, handler) as (one, other):
        queued = await respond(one, input="1", background=True)
        assert (await other.client.get(f"/v1/responses/{queued['id']}")).status_code == 200
        for part in ("run", "cancel"):
            path = f"/v1/responses/{queued['id']}:{part}"
            assert (await other.client.get(path)).status_code == 404
            assert (await other.client.post(f"{path}/cancel")).status_code == 404
        assert await one.metric("moongate_redis_up") == 1
        handler.may_answer.set()


async def test_part_of_a_conversation_that_expired_makes_it_unknown(server: RedisProcess) -> None:
    now = time.monotonic
    state = SharedState(server.url, timeout_s=1.0, clock=now)
    await state.start()
    stores = ResponseStore(60, 1 << 20), ResponseStore(60, 1 << 20)
    one, other = (SharedResponses(store, state, 60) for store in stores)
    first = StoredResponse("t", "a", None, b"1", b"2", b"{}", version="1")
    second = StoredResponse("t", "b", first, b"3", b"4", b"{}", version="2")
    for response in (first, second):
        stores[0].put(response, now())
        one.put(response)
    async with asyncio.timeout(5):
        while (found := await other.find("t", "b", now())) is None:
            await asyncio.sleep(0.01)
    assert found.history() == b"1,2,3,4"
    assert await other.find("other", "b", now()) is None
    third = SharedResponses(ResponseStore(60, 1 << 20), state, 60)
    server.client().delete("moongate:response:t:a:1")
    assert await third.find("t", "b", now()) is None
    for shared in (one, other, third):
        await shared.close()
    await state.close()
