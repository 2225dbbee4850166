"""Hand-offs that go wrong, and clients that leave: who answers, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from typing import Any

import pytest
from live_gateway import live_gateway, until
from pd_fleet import (
    PROMPT,
    SLOW_DECODE,
    SLOW_PREFILL,
    Fleet,
    adopted,
    instance,
    params,
    pd_fleet,
    usage,
)

from moongate.gateway.proxy import handing_over
from moongate.gateway.proxy.bootstrap import BootstrapFailed
from moongate.router import FailureKind
from moongate.simulator.server import SimEngine
from moongate.simulator.transfer import Connector, Role

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]

TAKING_TURNS = {"name": "round_robin"}


def instances_of(fleet: Fleet) -> list[dict[str, Any]]:
    named = [("p", Role.PREFILL, fleet.prefill), ("d", Role.DECODE, fleet.decode)]
    return [instance(f"{n}{i}", e, role) for n, role, some in named for i, e in enumerate(some)]


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    assert handing_over.DELIVERED_WITHIN_S == 5.0
    monkeypatch.setattr(handing_over, "DELIVERED_WITHIN_S", 0.2)


# --- a prefill that fails -------------------------------------------------------------------------


async def test_c67_a_prefill_that_fails_is_repeated_on_another_under_another_id() -> None:
    async with pd_fleet(prefill=2, policy=TAKING_TURNS) as fleet:
        fleet.prefill[0].debugging.fail_next(status=500, delay_s=0.1)
        answer = await fleet.complete()
        assert (answer.status_code, answer.headers["x-moongate-prefill-instance"]) == (200, "p1")
        (first,), (second,) = (engine.received for engine in fleet.prefill)
        assert params(first)["transfer_id"] != params(second)["transfer_id"]
        (decode,) = fleet.decode[0].received  # none that waits for what will not come
        assert params(decode)["transfer_id"] == params(second)["transfer_id"]
        assert await fleet.handoffs("failed") == await fleet.handoffs("handed_over") == 1
        assert await fleet.gateway.metric("moongate_retries_total", reason="status") == 1
        await fleet.until_idle()
        await fleet.complete()
        assert len(fleet.prefill[0].received) == 1  # it is left alone for a while


async def test_where_no_prefill_instance_can_do_it_one_that_decodes_does_it_alone() -> None:
    async with pd_fleet(prefill=2, policy=TAKING_TURNS) as fleet:
        for engine in fleet.prefill:
            engine.debugging.fail_next(status=503)
        answer = await fleet.complete()
        assert answer.status_code == 200
        assert "x-moongate-prefill-instance" not in answer.headers
        (decode,) = fleet.decode[0].received
        assert "kv_transfer_params" not in decode.body
        assert await fleet.handoffs("failed") == 2
        await fleet.until_idle()
        # Both are suspended now, and requests do without them.
        again = await fleet.complete()
        assert (again.status_code, len(fleet.decode[0].received)) == (200, 2)
        assert [len(engine.received) for engine in fleet.prefill] == [1, 1]


async def test_c67_where_nobody_can_do_it_the_client_is_told() -> None:
    async with pd_fleet(policy=TAKING_TURNS) as fleet:
        fleet.prefill[0].debugging.fail_next(status=500)
        fleet.decode[0].debugging.fail_next(status=500)
        answer = await fleet.complete()
        assert answer.status_code == 500  # what the last one said
        await fleet.until_idle()
        assert all(i.breaker.is_closed for i in fleet.gateway.core.fleet)


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_c67_what_a_prefill_instance_refuses_is_refused(status: int) -> None:
    async with pd_fleet(prefill=2, policy=TAKING_TURNS) as fleet:
        fleet.prefill[0].debugging.fail_next(status=status)
        answer = await fleet.complete(stream=True)
        assert answer.status_code == status
        assert answer.json()["error"]["message"] == "injected fault"
        assert answer.headers["content-type"] == "application/json"
        assert not fleet.prefill[1].received
        assert not fleet.decode[0].received
        assert await fleet.handoffs("refused") == 1
        await fleet.until_idle()


async def test_c25_a_prefill_instance_without_room_is_no_reason_to_refuse() -> None:
    async with pd_fleet(prefill=2, policy=TAKING_TURNS) as fleet:
        fleet.prefill[0].debugging.fail_next(status=429)
        answer = await fleet.complete()
        assert (answer.status_code, answer.headers["x-moongate-prefill-instance"]) == (200, "p1")
        assert await fleet.gateway.metric("moongate_retries_total", reason="rate_limited") == 1
        await fleet.until_idle()
        for engine in fleet.prefill:  # then where it is decoded
            engine.debugging.fail_next(status=429)
        answer = await fleet.complete()
        assert answer.status_code == 200
        assert "x-moongate-prefill-instance" not in answer.headers
        await fleet.until_idle()
        assert all(i.breaker.is_closed for i in fleet.gateway.core.fleet)


async def test_a_prefill_instance_that_is_gone_costs_no_request() -> None:
    async with pd_fleet(policy=TAKING_TURNS) as fleet:
        await fleet.complete()
        await fleet.prefill[0].crash()
        answers = [await fleet.complete() for _ in range(5)]
        assert [answer.status_code for answer in answers] == [200] * 5
        assert await fleet.gateway.metric("moongate_retries_total") <= 1
        assert len(fleet.decode[0].received) == 6


async def test_a_prefill_instance_that_was_started_anew_is_known_by_its_new_id() -> None:
    async with pd_fleet(policy=TAKING_TURNS) as fleet:
        old = fleet.prefill[0]
        await fleet.complete()
        await old.crash()
        config = dataclasses.replace(
            old._config, port=old.port or 0, bootstrap_port=old.bootstrap_port or 0
        )
        again = SimEngine(config)
        await again.start()
        try:
            answers = [await fleet.complete(prompt=[*PROMPT, n]) for n in range(5)]
            assert [answer.status_code for answer in answers] == [200] * 5
            await until(lambda: all(i.is_healthy for i in fleet.gateway.core.fleet))
            answer = await fleet.complete(prompt=[7, *PROMPT])
            assert answer.headers["x-moongate-prefill-instance"] == "p0"
            last = fleet.decode[0].received[-1]
            assert params(last)["remote_engine_id"] == again.runners[0].engine_id
            assert usage(again) == 0.0
        finally:
            await again.stop()


async def test_a_bootstrap_server_that_does_not_answer_makes_a_failed_prefill() -> None:
    async with pd_fleet(prefill_config={"transfer_hold_s": 0.3}) as fleet:
        with socket.create_server(("127.0.0.1", 0)) as nobody:
            port = nobody.getsockname()[1]
        instances = instances_of(fleet)
        instances[0]["bootstrap_url"] = f"http://127.0.0.1:{port}"
        async with live_gateway([], instances=instances) as gateway:
            answer = await gateway.chat(max_tokens=2)
            assert answer.status_code == 200
            assert "x-moongate-prefill-instance" not in answer.headers
            assert await gateway.metric("moongate_pd_handoffs_total", result="failed") == 1


async def test_a_bootstrap_server_that_was_just_starting_is_asked_again() -> None:
    async with pd_fleet() as fleet:
        asked = fleet.gateway.server.gateway._hot_path
        assert asked is not None
        real, calls = asked.bootstraps.engine_id, []

        async def engine_id(url: str, rank: int | None) -> str:
            calls.append(url)
            if len(calls) == 1:
                raise BootstrapFailed("starting")
            return await real(url, rank)

        asked.bootstraps.engine_id = engine_id  # type: ignore[method-assign]
        assert (await fleet.complete()).headers["x-moongate-prefill-instance"] == "p0"
        assert len(calls) == 2
        await fleet.until_idle()


async def test_several_ranks_that_nobody_told_us_of_are_not_guessed_at() -> None:
    config = {"data_parallel_size": 2, "transfer_hold_s": 0.3}  # and no events to tell them by
    async with pd_fleet(prefill_config=config) as fleet:
        answer = await fleet.complete()
        assert (answer.status_code, await fleet.handoffs("failed")) == (200, 1)


# --- a decode leg that does not get there -----------------------------------------------------------


async def test_a_refused_decode_leg_is_delivered_to_another_instance() -> None:
    unnoticed = {"interval_s": 60.0}
    async with pd_fleet(decode=2, policy=TAKING_TURNS, health=unnoticed) as fleet:
        await fleet.decode[0].crash()
        answer = await fleet.complete(stream=True)
        assert answer.status_code == 200
        assert answer.headers["x-moongate-instance"] == "d1"
        assert answer.headers["x-moongate-prefill-instance"] == "p0"
        (prefill,), (decode,) = fleet.prefill[0].received, fleet.decode[1].received
        assert params(decode)["transfer_id"] == params(prefill)["transfer_id"]
        assert await fleet.handoffs("redelivered") == 1
        assert await fleet.handoffs("failed") == 0
        assert fleet.held() == 0.0
        await until(lambda: fleet.gateway.inflight() == 0)


async def test_a_decode_instance_replaced_while_the_prompt_is_computed_gets_its_leg() -> None:
    slow = {"profile": SLOW_PREFILL}
    async with pd_fleet(prefill_config=slow, instances=[]) as fleet:
        for name, engine, role in (
            ("p0", fleet.prefill[0], Role.PREFILL),
            ("d0", fleet.decode[0], Role.DECODE),
        ):
            record = instance(name, engine, role)
            await fleet.gateway.client.put(f"/admin/instances/{name}", json=record)
        await until(lambda: sum(i.facts is not None for i in fleet.gateway.core.fleet) == 2)
        asking = asyncio.create_task(fleet.complete())
        await until(lambda: fleet.prefill[0].received)
        changed = {**instance("d0", fleet.decode[0], Role.DECODE), "block_size": 16}
        answer = await fleet.gateway.client.put("/admin/instances/d0", json=changed)
        assert answer.json() == {"change": "replaced"}
        assert not fleet.decode[0].received
        answer = await asking
        assert (answer.status_code, answer.headers["x-moongate-instance"]) == (200, "d0")
        (prefill,), (decode,) = fleet.prefill[0].received, fleet.decode[0].received
        assert params(decode)["transfer_id"] == params(prefill)["transfer_id"]
        await fleet.until_idle()


async def test_a_decode_instance_that_takes_no_connection_is_not_waited_for_twice() -> None:
    with socket.socket() as listener, contextlib.ExitStack() as waiting:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        async with pd_fleet(
            decode=2, policy=TAKING_TURNS, limits={"connect_timeout_s": 0.2}
        ) as fleet:
            for _ in range(4):
                sock = waiting.enter_context(socket.socket())
                sock.setblocking(False)
                sock.connect_ex(address)
            links = fleet.gateway.server.gateway._links
            assert links is not None
            upstream = links.get(fleet.gateway.core.fleet.find("d0").spec.id).upstream  # type: ignore[union-attr,arg-type]
            upstream._port = address[1]
            answer = await fleet.complete()
            assert (answer.status_code, answer.headers["x-moongate-instance"]) == (200, "d1")
            assert await fleet.handoffs("redelivered") == 1
            reason = FailureKind.NO_CONNECTION.value
            assert await fleet.gateway.metric("moongate_retries_total", reason=reason) == 1
            assert fleet.held() == 0.0


async def test_a_decode_instance_without_room_passes_the_leg_on(briefly: None) -> None:
    limits = {"connections_per_instance_max": 1}
    slow = {"profile": SLOW_DECODE}
    async with pd_fleet(decode=2, decode_config=slow, limits=limits, policy=TAKING_TURNS) as fleet:
        held = asyncio.create_task(fleet.complete(max_tokens=40))
        await until(lambda: len(fleet.decode[0].received) == 1)
        await fleet.complete(prompt=[1, 2, 3, 4, 5], max_tokens=1)  # d1's turn
        answer = await fleet.complete(prompt=[9, *PROMPT], max_tokens=1)  # d0's
        assert (answer.status_code, answer.headers["x-moongate-instance"]) == (200, "d1")
        assert await fleet.handoffs("redelivered") == 1
        assert fleet.held() == 0.0
        held.cancel()
        await fleet.until_idle()


async def test_where_no_decode_instance_has_room_the_blocks_are_released_all_the_same(
    briefly: None,
) -> None:
    limits = {"connections_per_instance_max": 1}
    slow = {"profile": SLOW_DECODE}
    async with pd_fleet(decode_config=slow, limits=limits, policy=TAKING_TURNS) as fleet:
        held = asyncio.create_task(fleet.complete(max_tokens=60))
        await until(lambda: len(fleet.decode[0].received) == 1)
        answer = await fleet.complete(prompt=[9, *PROMPT])
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "gateway_pool"
        await until(lambda: fleet.held() == 0.0)
        release = fleet.decode[0].received[-1]
        assert (release.body["max_tokens"], release.body["stream"]) == (1, False)
        await until(lambda: fleet.handoffs("released"))
        assert not held.done()
        held.cancel()
        await fleet.until_idle()


async def test_blocks_wait_for_a_decode_instance_that_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handing_over, "RELEASE_PAUSE_S", 0.05)
    async with pd_fleet(policy=TAKING_TURNS) as fleet:
        old = fleet.decode[0]
        fleet.prefill[0].debugging.fail_next(status=None, delay_s=0.2)
        asking = asyncio.create_task(fleet.complete())
        await until(lambda: len(fleet.prefill[0].received) == 1)
        await old.crash()
        assert (await asking).status_code == 502
        assert fleet.held() > 0.0
        fleet.decode[0] = again = SimEngine(dataclasses.replace(old._config, port=old.port or 0))
        await again.start()
        try:
            await fleet.until_idle()
            assert [leg.body["max_tokens"] for leg in again.received] == [1]
            assert await fleet.handoffs("released") == 1
        finally:
            await again.stop()


async def test_what_a_decode_instance_fails_at_is_computed_anew() -> None:
    async with pd_fleet(decode=2, policy=TAKING_TURNS) as fleet:
        fleet.decode[0].debugging.fail_next(status=500)
        answer = await fleet.complete()
        assert (answer.status_code, answer.headers["x-moongate-instance"]) == (200, "d1")
        ids = [params(leg)["transfer_id"] for leg in fleet.prefill[0].received]
        assert len(set(ids)) == 2
        assert params(fleet.decode[1].received[0])["transfer_id"] == ids[1]
        assert await fleet.handoffs("failed") == await fleet.handoffs("handed_over") == 1
        assert fleet.gateway.inflight() == 0


# --- clients that leave -----------------------------------------------------------------------------


async def leave(fleet: Fleet, when: Any, **body: Any) -> None:
    """Ask, and leave as soon as `when()` holds."""
    asking = asyncio.create_task(fleet.complete(**body))
    await until(when)
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking


@pytest.mark.parametrize("connector", [Connector.MOONCAKE, Connector.NIXL])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_during_prefill_leaves_nothing(
    is_stream: bool, connector: Connector
) -> None:
    slow = {"profile": SLOW_PREFILL}  # 0.2 s
    async with pd_fleet(connector=connector, prefill_config=slow) as fleet:
        await leave(fleet, lambda: usage(fleet.prefill[0]) > 0, stream=is_stream, max_tokens=500)
        await fleet.until_idle()
        assert fleet.prefill[0].runners[0].model.statistics().finished_requests["abort"] == 0
        (release,) = fleet.decode[0].received
        assert (release.body["max_tokens"], release.body["stream"]) == (1, False)
        assert await fleet.handoffs("released") == 1
        code = {"route": "/v1/completions", "code": "499"}
        assert await fleet.gateway.metric("moongate_requests_total", **code) == 1


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_while_the_decode_leg_waits_leaves_nothing(
    is_stream: bool, briefly: None
) -> None:
    async with pd_fleet() as fleet:
        fleet.decode[0].debugging.fail_next(status=None, delay_s=0.3)
        await leave(fleet, lambda: fleet.decode[0].received, stream=is_stream, max_tokens=500)
        assert fleet.held() > 0.0
        await fleet.until_idle()
        assert len(fleet.decode[0].received) == 1
        assert await fleet.handoffs("released") == 1


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_during_decode_ends_it(is_stream: bool, briefly: None) -> None:
    async with pd_fleet(decode_config={"profile": SLOW_DECODE}) as fleet:
        decode = fleet.decode[0].runners[0].model
        await leave(
            fleet,
            lambda: decode.statistics().generation_tokens >= 2,
            stream=is_stream,
            max_tokens=500,
        )
        await fleet.until_idle()
        assert decode.statistics().finished_requests["abort"] == 1


async def test_c69_clients_that_leave_between_the_legs_leave_nothing(briefly: None) -> None:
    async with pd_fleet(policy=TAKING_TURNS) as fleet:
        decode = fleet.decode[0]
        decode.debugging.fail_next(status=None, delay_s=0.3, count=100)
        asking = [
            asyncio.create_task(fleet.complete(prompt=[n, *PROMPT], max_tokens=200))
            for n in range(100)
        ]
        await until(lambda: len(fleet.prefill[0].received) == 100)
        for n, task in enumerate(asking):  # some when the prefill is under way, some later
            if n % 10 == 0:
                await asyncio.sleep(0.005)
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await fleet.until_idle(10.0)
        assert len(decode.received) == 100


async def test_a_client_that_leaves_after_a_failed_prefill_leaves_nothing() -> None:
    async with pd_fleet(prefill=2, policy=TAKING_TURNS) as fleet:
        fleet.prefill[0].debugging.fail_next(status=500, delay_s=0.1)
        await leave(fleet, lambda: fleet.prefill[0].received)
        await fleet.until_idle()
        assert not fleet.prefill[1].received
        assert not fleet.decode[0].received
        assert await fleet.handoffs("failed") == 1


async def test_a_client_that_leaves_before_a_refusal_leaves_nothing() -> None:
    async with pd_fleet() as fleet:
        fleet.prefill[0].debugging.fail_next(status=400, delay_s=0.1)
        await leave(fleet, lambda: fleet.prefill[0].received)
        await fleet.until_idle()
        assert await fleet.handoffs("refused") == 1


async def test_a_release_that_is_refused_goes_to_another_decode_instance() -> None:
    async with pd_fleet(
        decode=2, prefill_config={"profile": SLOW_PREFILL}, policy=TAKING_TURNS
    ) as fleet:
        await leave(fleet, lambda: usage(fleet.prefill[0]) > 0)
        await fleet.decode[0].crash()
        await until(lambda: usage(fleet.prefill[0]) == 0.0 and fleet.gateway.inflight() == 0)
        assert [leg.body["max_tokens"] for leg in fleet.decode[1].received] == [1]
        assert await fleet.handoffs("released") == 1


async def test_a_gateway_that_stops_brings_hand_offs_to_their_end() -> None:
    async with pd_fleet(prefill_config={"profile": SLOW_PREFILL}) as fleet:
        async with live_gateway([], instances=instances_of(fleet)) as gateway:
            other = dataclasses.replace(fleet, gateway=gateway)
            await leave(other, lambda: usage(fleet.prefill[0]) > 0)
            await until(lambda: adopted(gateway))
        assert fleet.held() == 0.0
        assert len(fleet.decode[0].received) == 1
        assert adopted(gateway) == set()


async def test_a_gateway_that_stops_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moongate.gateway.proxy.hotpath.ADOPTED_S", 0.1)
    async with pd_fleet() as fleet:
        fleet.prefill[0].debugging.fail_next(status=None, delay_s=1.0)
        before = asyncio.all_tasks()
        async with live_gateway([], instances=instances_of(fleet)) as gateway:
            other = dataclasses.replace(fleet, gateway=gateway)
            await leave(other, lambda: fleet.prefill[0].received)
        assert adopted(gateway) == set()
        names = {task.get_coro().__qualname__ for task in asyncio.all_tasks() - before}  # type: ignore[union-attr]
        assert not [name for name in names if "Handoff" in name]
