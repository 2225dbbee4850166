"""Instances that come, go and are drained while the gateway runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from fake_engine import FakeEngine, Received, streaming_until
from live_gateway import LiveGateway, live_gateway, until
from pd_fleet import SLOW_DECODE, running

from moongate.engine_plugins.registrar import Announcement, Announcer
from moongate.router import InstanceId
from moongate.simulator.server import SimEngine, SimEngineConfig

Pair = tuple[SimEngine, SimEngine]


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    engines = (SimEngine(SimEngineConfig()), SimEngine(SimEngineConfig()))
    for engine in engines:
        await engine.start()
    yield engines
    for engine in engines:
        await engine.stop()


def record(engine: SimEngine, **fields: Any) -> dict[str, Any]:
    return {"url": engine.url, "role": "both", "weight": 1.0, **fields}


async def names(gateway: LiveGateway) -> dict[str, str]:
    answer = await gateway.client.get("/admin/instances")
    return {i["id"]: i["state"] for i in answer.json()["instances"]}


async def ask(gateway: LiveGateway, **body: Any) -> Any:
    return await gateway.chat(model="sim", content="hello " * 40, max_tokens=4, **body)


@pytest.mark.asyncio
async def test_an_engine_announces_itself_serves_and_is_gone_when_its_lease_ends(
    pair: Pair,
) -> None:
    async with live_gateway([], instances=[], wait_ready=False) as gateway:
        assert (await gateway.client.get("/ready")).status_code == 503
        put = gateway.client.put
        came = await put("/admin/instances/e1", json=record(pair[0], lease_s=0.8))
        assert (came.status_code, came.json()) == (201, {"change": "added"})
        await until(lambda: _is(gateway, "e1", "up"))
        assert (await ask(gateway)).headers["x-moongate-instance"] == "e1"
        again = await put("/admin/instances/e1", json=record(pair[0], lease_s=0.8))
        assert (again.status_code, again.json()) == (200, {"change": "renewed"})
        await until(lambda: _is_gone(gateway, "e1"), 3.0)
        assert (await ask(gateway)).status_code == 503
        assert not list(gateway.core.sources)
        assert gateway.core.index.holders == ()


@pytest.mark.asyncio
async def test_the_registrar_of_an_engine_keeps_it_announced(pair: Pair) -> None:
    async with live_gateway([], instances=[], wait_ready=False) as gateway:
        announcer = Announcer(
            Announcement(
                gateways=(gateway.url,),
                instance_id="e1",
                record=record(pair[0]),
                health_url=f"{pair[0].url}/health",
                lease_s=1.0,
            )
        )
        announcer.start()
        await until(lambda: _is(gateway, "e1", "up"))
        await asyncio.sleep(1.3)  # longer than its lease
        assert await names(gateway) == {"e1": "up"}
        await asyncio.to_thread(announcer.withdraw)
        await until(lambda: _is_gone(gateway, "e1"), 3.0)


async def _is(gateway: LiveGateway, name: str, state: str) -> bool:
    return (await names(gateway)).get(name) == state


async def _is_gone(gateway: LiveGateway, name: str) -> bool:
    return name not in await names(gateway)


@pytest.mark.asyncio
async def test_what_an_instance_has_under_way_ends_before_it_is_removed(pair: Pair) -> None:
    async with live_gateway([e.url for e in pair], drain={"limit_s": 10.0}) as gateway:
        running = asyncio.create_task(
            gateway.chat(model="sim", content="hi " * 50, max_tokens=40, stream=True)
        )
        await until(lambda: gateway.inflight() == 1)
        (busy,) = [h for h, load in gateway.core.loads.loads.items() if load.active_requests]
        other = "b" if busy.instance_id == "a" else "a"
        left = await gateway.client.delete(f"/admin/instances/{busy.instance_id}")
        assert (left.status_code, left.json()["state"]) == (202, "draining")
        assert (await names(gateway))[busy.instance_id] == "draining"
        assert (await ask(gateway)).headers["x-moongate-instance"] == other
        answer = await running
        assert answer.status_code == 200
        assert answer.text.rstrip().endswith("data: [DONE]")
        await until(lambda: _is_gone(gateway, busy.instance_id), 3.0)
        assert (await ask(gateway)).headers["x-moongate-instance"] == other


@pytest.mark.asyncio
async def test_a_drained_instance_can_come_back(pair: Pair) -> None:
    async with live_gateway([e.url for e in pair]) as gateway:
        for path, state in (("drain", "draining"), ("undrain", "up")):
            answer = await gateway.client.post(f"/admin/instances/a/{path}")
            assert answer.status_code == 200
            assert (await names(gateway))["a"] == state
        missing = await gateway.client.post("/admin/instances/zz/drain")
        assert missing.status_code == 404


@pytest.mark.asyncio
async def test_a_record_of_another_cache_replaces_the_instance(pair: Pair) -> None:
    async with live_gateway([], instances=[], wait_ready=False) as gateway:
        await gateway.client.put("/admin/instances/e", json=record(pair[0], lease_s=30))
        await until(lambda: _is(gateway, "e", "up"))
        changed = await gateway.client.put(
            "/admin/instances/e", json=record(pair[0], lease_s=30, block_size=32)
        )
        assert changed.json() == {"change": "replaced"}


@pytest.mark.asyncio
async def test_what_may_change_under_an_instance_changes_while_it_works() -> None:
    may_end = asyncio.Event()

    drain = {"limit_s": 0.2}
    async with FakeEngine(streaming_until(may_end)) as engine:
        async with live_gateway([], instances=[], wait_ready=False, drain=drain) as gateway:

            async def put(**fields: Any) -> Any:
                body = {"url": engine.url, **fields}
                return (await gateway.client.put("/admin/instances/e", json=body)).json()

            assert await put(lease_s=30) == {"change": "added"}
            await until(lambda: _is(gateway, "e", "up"))
            asking = asyncio.create_task(gateway.chat(stream=True))
            await until(lambda: engine.received)
            assert await put(lease_s=30, weight=2) == {"change": "changed"}
            assert await put(lease_s=60, weight=2) == {"change": "changed"}
            assert await put(lease_s=60, weight=2) == {"change": "renewed"}
            assert await names(gateway) == {"e": "up"}  # it never was anything else
            found = gateway.core.fleet.find(InstanceId("e"))
            assert found is not None
            assert found.spec.weight == 2.0
            await asyncio.sleep(2 * drain["limit_s"])
            may_end.set()
            answer = await asking
            assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.asyncio
async def test_what_a_removed_instance_has_begun_may_end_within_one_drain_limit() -> None:
    async def stream(request: Received) -> None:
        await request.start_stream()
        for _ in range(100):
            await request.send_chunk(b'data: {"choices":[]}\n\n')
            await asyncio.sleep(0.1)

    async with FakeEngine(stream) as engine:
        async with live_gateway([engine.url], drain={"limit_s": 1.5}) as gateway:
            asking = asyncio.create_task(gateway.chat(stream=True))
            await until(lambda: engine.received)
            began = asyncio.get_running_loop().time()
            assert (await gateway.client.delete("/admin/instances/a")).status_code == 202
            answer = await asking
            assert "error" in answer.text
            assert 1.0 < asyncio.get_running_loop().time() - began < 2.6


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"url": None}, 400, "url"),
        ({"url": "ftp://x"}, 400, "url"),
        ({"weight": -1}, 400, "weight"),
        ({"weihgt": 1}, 400, "weihgt"),
        ({"id": "other"}, 400, "id"),
        ({"lease_s": 0}, 400, "lease_s"),
        ({"url": "http://a\0b:80"}, 400, "url"),
        ({"url": "http://\N{SNOWMAN}:80"}, 400, "url"),
        ({"api_key_env": "HOME"}, 400, "api_key_env"),
        ({"kv_events": "ipc:///run/some.socket"}, 400, "kv_events"),
        ({"kv_replay": "inproc://x", "kv_events": "tcp://127.0.0.1:9"}, 400, "kv_replay"),
    ],
)
async def test_a_bad_record_is_refused_and_changes_nothing(
    pair: Pair, fields: dict[str, Any], status: int, param: str | None
) -> None:
    async with live_gateway([pair[0].url]) as gateway:
        body = record(pair[1], **fields)
        answer = await gateway.client.put("/admin/instances/e", json=body)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["param"] == param
        assert set(await names(gateway)) == {"a"}


@pytest.mark.asyncio
async def test_an_id_or_url_of_another_instance_is_refused(pair: Pair) -> None:
    async with live_gateway([pair[0].url]) as gateway:
        taken = await gateway.client.put("/admin/instances/a", json=record(pair[1]))
        assert taken.status_code == 409
        same = await gateway.client.post("/admin/instances", json={"id": "e", **record(pair[0])})
        assert (same.status_code, same.json()["error"]["param"]) == (409, "url")


@pytest.mark.asyncio
@pytest.mark.parametrize("lease", [{"lease_s": 30}, {}])
async def test_two_engines_of_one_id_do_not_take_turns(pair: Pair, lease: dict[str, Any]) -> None:
    async with live_gateway([], instances=[], wait_ready=False) as gateway:
        put = gateway.client.put
        assert (await put("/admin/instances/e", json=record(pair[0], **lease))).status_code == 201
        other = await put("/admin/instances/e", json=record(pair[1], lease_s=30))
        assert (other.status_code, other.json()["error"]["param"]) == (409, "id")
        again = await put("/admin/instances/e", json=record(pair[0], **lease))
        assert again.json() == {"change": "renewed"}


@pytest.mark.asyncio
async def test_an_id_is_free_for_another_address_once_its_lease_has_ended(pair: Pair) -> None:
    async with live_gateway([], instances=[], wait_ready=False) as gateway:
        put = gateway.client.put
        await put("/admin/instances/e", json=record(pair[0], lease_s=0.3))
        await asyncio.sleep(0.35)
        moved = await put("/admin/instances/e", json=record(pair[1], lease_s=30))
        assert moved.status_code in (200, 201)
        (listed,) = (await gateway.client.get("/admin/instances")).json()["instances"]
        assert listed["url"] == pair[1].url


@pytest.mark.asyncio
async def test_a_drained_engine_stays_so_whatever_it_announces(pair: Pair) -> None:
    async with live_gateway([], instances=[], wait_ready=False) as gateway:
        put, post = gateway.client.put, gateway.client.post
        await put("/admin/instances/e", json=record(pair[0], lease_s=30))
        await until(lambda: _is(gateway, "e", "up"))
        await post("/admin/instances/e/drain")
        for change, weight in (("renewed", 1.0), ("changed", 2.0), ("renewed", 2.0)):
            answer = await put(
                "/admin/instances/e", json=record(pair[0], lease_s=30, weight=weight)
            )
            assert answer.json() == {"change": change}
            assert await names(gateway) == {"e": "draining"}
        await post("/admin/instances/e/undrain")
        await until(lambda: _is(gateway, "e", "up"))


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["absence", "undrain", "withdrawal"])
async def test_an_engine_that_an_operator_removed_is_kept_out(pair: Pair, way: str) -> None:
    async with live_gateway([], instances=[], wait_ready=False) as gateway:
        path, body = "/admin/instances/e", record(pair[0], lease_s=0.6)
        await gateway.client.put(path, json=body)
        await gateway.client.delete(path)
        assert await names(gateway) == {}
        for _ in range(4):  # in all longer than its lease
            await asyncio.sleep(0.2)
            answer = await gateway.client.put(path, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (409, "id")
        match way:
            case "absence":
                await asyncio.sleep(0.65)
            case "undrain":
                assert (await gateway.client.post(f"{path}/undrain")).status_code == 200
            case _:
                assert (await gateway.client.delete(f"{path}?withdrawn=true")).status_code == 202
        assert (await gateway.client.put(path, json=body)).json() == {"change": "added"}


@pytest.mark.asyncio
async def test_a_removed_engine_that_goes_on_announcing_ends_what_it_has() -> None:
    engine = SimEngine(SimEngineConfig(profile=SLOW_DECODE, model="sim"))
    async with (
        running([engine]),
        live_gateway([], instances=[], wait_ready=False, drain={"limit_s": 10.0}) as gateway,
    ):
        path, body = "/admin/instances/e", record(engine, lease_s=0.5)
        await gateway.client.put(path, json={**body, "lease_s": 30})
        await until(lambda: _is(gateway, "e", "up"))
        asking = asyncio.create_task(gateway.chat(model="sim", max_tokens=30))
        await until(lambda: gateway.inflight() == 1)
        await gateway.client.delete(path)
        for _ in range(5):  # in all twice as long as the lease
            assert (await gateway.client.put(path, json=body)).status_code == 409
            assert await names(gateway) == {"e": "draining"}
            await asyncio.sleep(0.2)
        assert (await asking).status_code == 200
        await until(lambda: _is_gone(gateway, "e"))


@pytest.mark.asyncio
async def test_an_operator_may_add_what_was_removed_or_drained(pair: Pair) -> None:
    async with live_gateway([], instances=[], wait_ready=False) as gateway:
        path, body = "/admin/instances/e", record(pair[0], lease_s=30)
        await gateway.client.put(path, json=body)
        await gateway.client.delete(path)
        added = await gateway.client.post("/admin/instances", json={"id": "e", **body})
        assert added.json() == {"change": "added"}
        await gateway.client.post(f"{path}/drain")
        again = await gateway.client.post("/admin/instances", json={"id": "e", **body})
        assert again.json() == {"change": "renewed"}
        await until(lambda: _is(gateway, "e", "up"))


@pytest.mark.asyncio
async def test_an_engine_that_withdrew_may_come_back_at_once(pair: Pair) -> None:
    async with live_gateway([], instances=[], wait_ready=False) as gateway:
        path, body = "/admin/instances/e", record(pair[0], lease_s=30)
        await gateway.client.put(path, json=body)
        assert (await gateway.client.delete(f"{path}?withdrawn=true")).status_code == 202
        assert await names(gateway) == {}
        assert (await gateway.client.put(path, json=body)).json() == {"change": "added"}


@pytest.mark.asyncio
async def test_instances_are_listed_with_where_they_are_and_came_from(pair: Pair) -> None:
    async with live_gateway([pair[0].url]) as gateway:
        await gateway.client.put("/admin/instances/e", json=record(pair[1], lease_s=30))
        spare = {"id": "x", "url": "http://127.0.0.1:80"}
        await gateway.client.post("/admin/instances", json=spare)
        same = {"id": "y", "url": "http://127.0.0.1"}
        assert (await gateway.client.post("/admin/instances", json=same)).status_code == 409
        listed = (await gateway.client.get("/admin/instances")).json()["instances"]
        assert [(i["id"], i["url"], i["origin"]) for i in listed] == [
            ("a", pair[0].url, "file"),
            ("e", pair[1].url, "announced"),
            ("x", "http://127.0.0.1", "added"),
        ]
        assert 25 < listed[1]["lease_s_left"] <= 30
        assert listed[0]["lease_s_left"] is listed[2]["lease_s_left"] is None


@pytest.mark.asyncio
async def test_a_record_is_not_told_which_variables_there_are(pair: Pair) -> None:
    async with live_gateway([pair[0].url]) as gateway:
        told = {
            (
                await gateway.client.put(
                    "/admin/instances/e", json=record(pair[1], api_key_env=name)
                )
            ).text
            for name in ("HOME", "NOT_THERE_X")
        }
        assert len(told) == 1
        assert "configuration" in told.pop()


@pytest.mark.asyncio
@pytest.mark.parametrize("header", ["origin", "forwarded", "x-forwarded-for", "x-real-ip"])
async def test_without_a_key_changes_through_a_proxy_or_browser_are_refused(
    pair: Pair, header: str
) -> None:
    async with live_gateway([pair[0].url]) as gateway:
        headers = {header: "192.0.2.1"}
        put = await gateway.client.put("/admin/instances/e", json=record(pair[1]), headers=headers)
        drain = await gateway.client.post("/admin/instances/a/drain", headers=headers)
        dry_run = {"model": "sim", "messages": [{"role": "user", "content": "hi"}]}
        explain = await gateway.client.post("/admin/explain", json=dry_run, headers=headers)
        assert explain.status_code == 200, "it changes nothing"
        delete = await gateway.client.delete("/admin/instances/a", headers=headers)
        assert {put.status_code, drain.status_code, delete.status_code} == {403}
        assert (await gateway.client.get("/admin/instances", headers=headers)).status_code == 200
        assert await names(gateway) == {"a": "up"}


@pytest.mark.asyncio
async def test_a_body_that_says_it_is_no_json_is_refused(pair: Pair) -> None:
    async with live_gateway([pair[0].url]) as gateway:
        for kind, status in (("text/plain", 415), ("application/JSON; charset=utf-8", 201)):
            answer = await gateway.client.put(
                "/admin/instances/e",
                content=json.dumps(record(pair[1])),
                headers={"content-type": kind},
            )
            assert answer.status_code == status


@pytest.mark.asyncio
async def test_with_an_admin_key_operators_need_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONGATE_TEST_ADMIN", "s3cret")
    auth = {"admin_key_env": "MOONGATE_TEST_ADMIN"}
    async with live_gateway([pair[0].url], auth=auth) as gateway:
        refused = ("Bearer wrong", "Bearer é", "s3cret", "Bearer", "Basic s3cret")
        for headers in ({}, *({"authorization": given} for given in refused)):
            encoded = [(k.encode(), v.encode("latin-1")) for k, v in headers.items()]
            answer = await gateway.client.get("/admin/instances", headers=encoded)
            assert answer.status_code == 401
            assert "x-request-id" in answer.headers
        for scheme in ("Bearer", "bearer", "BEARER"):
            right = {"authorization": f"{scheme} s3cret", "origin": "http://here"}
            assert (await gateway.client.get("/admin/instances", headers=right)).status_code == 200
            drained = await gateway.client.post("/admin/instances/a/drain", headers=right)
            assert drained.status_code == 200
        assert (await gateway.client.get("/health")).status_code == 200
