"""Instances that a name in DNS leads to, as it changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
import yaml
from dns_server import NAME, DnsServer
from fake_engine import FakeEngine
from live_gateway import LiveGateway, live_gateway, until

from moongate.gateway.config.discovery_settings import DiscoverySettings
from moongate.gateway.config.reloadable import EFFECTS
from moongate.gateway.instances.dns_names import Address, LookupFailed, Resolver
from moongate.router import InstanceId
from moongate.simulator.engine import EngineProfile
from moongate.simulator.server import SimEngine, SimEngineConfig

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

DNS: dict[str, Any] = {"kind": "dns", "name": "e.test", "port": 8000, "interval_s": 0.1}


class Zone:
    """What the name leads to, as a test sets it. None: the resolver fails."""

    def __init__(self, *engines: Any) -> None:
        self.engines: tuple[Any, ...] | None = engines
        self.lookups = 0
        self.also: Address | None = None
        self.settings = DiscoverySettings()  # by which it was asked last

    async def resolve(self, settings: DiscoverySettings) -> frozenset[Address]:
        self.lookups += 1
        self.settings = settings
        if self.engines is None:
            raise LookupFailed(f"{settings.name}: no answer")
        also = [self.also] if self.also is not None else []
        return frozenset([*map(address_of, self.engines), *also])

    async def passes(self, count: int) -> None:
        """Return when the name has been looked up so many times more, and that was followed."""
        wanted = self.lookups + count + 1
        await until(lambda: self.lookups >= wanted)


def address_of(engine: Any) -> Address:
    parts = urlsplit(engine.url)
    assert parts.hostname is not None
    assert parts.port is not None
    return Address(parts.hostname, parts.port)


def id_of(engine: Any) -> str:
    return f"127.0.0.1-{address_of(engine).port}"


async def states(gateway: LiveGateway) -> dict[str, str]:
    answer = await gateway.client.get("/admin/instances")
    return {i["id"]: i["state"] for i in answer.json()["instances"]}


async def is_fleet(gateway: LiveGateway, wanted: dict[str, str]) -> bool:
    return await states(gateway) == wanted


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[tuple[FakeEngine, FakeEngine]]:
    async with FakeEngine() as a, FakeEngine() as b:
        yield a, b


Pair = tuple[FakeEngine, FakeEngine]


async def test_addresses_become_instances_that_are_checked_before_they_get_work(pair: Pair) -> None:
    a, b = pair
    b.is_healthy = False
    zone = Zone(a)
    async with live_gateway([], resolve=zone.resolve, discovery=DNS) as gateway:
        await until(lambda: is_fleet(gateway, {id_of(a): "up"}))
        zone.engines = (b, a)
        await until(lambda: is_fleet(gateway, {id_of(a): "up", id_of(b): "down"}))
        for _ in range(4):
            assert (await gateway.chat()).headers["x-moongate-instance"] == id_of(a)
        b.is_healthy = True
        await until(lambda: is_fleet(gateway, {id_of(a): "up", id_of(b): "up"}))
        answer = await gateway.client.get("/admin/instances")
        assert {i["origin"] for i in answer.json()["instances"]} == {"found"}
        assert await gateway.metric("moongate_discovery_addresses") == 2
        assert await gateway.metric("moongate_discovery_lookups_total", result="ok") > 1


async def test_one_that_is_missing_once_stays_and_one_that_is_missing_for_long_goes(
    pair: Pair,
) -> None:
    a, b = pair
    zone = Zone(a, b)
    discovery = {**DNS, "absent_after": 4}
    async with live_gateway([], resolve=zone.resolve, discovery=discovery) as gateway:
        both = {id_of(a): "up", id_of(b): "up"}
        await until(lambda: is_fleet(gateway, both))
        state = gateway.core.fleet.find(InstanceId(id_of(b)))
        zone.engines = (a,)
        await zone.passes(1)
        zone.engines = (a, b)
        await zone.passes(5)
        assert gateway.core.fleet.find(InstanceId(id_of(b))) is state, "it has not been away"
        zone.engines = (a,)
        await until(lambda: is_fleet(gateway, {id_of(a): "up"}))
        zone.engines = (a, b)
        await until(lambda: is_fleet(gateway, both))


async def test_what_one_that_vanished_has_under_way_ends_there(pair: Pair) -> None:
    profile = EngineProfile(decode_tokens_per_s=40)
    engines = [SimEngine(SimEngineConfig(model="m", profile=profile)) for _ in range(2)]
    for engine in engines:
        await engine.start()
    a, b = engines
    zone = Zone(a)
    drain = {"limit_s": 20.0}
    async with live_gateway([], resolve=zone.resolve, discovery=DNS, drain=drain) as gateway:
        await until(lambda: is_fleet(gateway, {id_of(a): "up"}))
        running = asyncio.create_task(gateway.chat(max_tokens=80, stream=True, ignore_eos=True))
        await until(lambda: gateway.inflight() == 1)
        zone.engines = (b,)
        await until(lambda: is_fleet(gateway, {id_of(a): "draining", id_of(b): "up"}))
        assert (await gateway.chat(max_tokens=1)).headers["x-moongate-instance"] == id_of(b)
        answer = await running
        assert answer.headers["x-moongate-instance"] == id_of(a)
        assert answer.text.rstrip().endswith("data: [DONE]")
        await until(lambda: is_fleet(gateway, {id_of(b): "up"}))
    for engine in engines:
        await engine.stop()


async def test_a_resolver_that_fails_changes_nothing_and_is_told_once(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = pair
    zone = Zone(a, b)
    caplog.set_level(logging.INFO)
    async with live_gateway([], resolve=zone.resolve, discovery=DNS) as gateway:
        both = {id_of(a): "up", id_of(b): "up"}
        await until(lambda: is_fleet(gateway, both))
        zone.engines = None
        await zone.passes(8)
        assert await states(gateway) == both
        assert await gateway.metric("moongate_discovery_lookups_total", result="failed") >= 8
        told = [r.getMessage() for r in caplog.records if r.name.endswith("dns_discovery")]
        assert told == ["discovery: e.test: no answer; the instances stay as they are"]
        zone.engines = (a, b)
        await zone.passes(1)
        assert "e.test is found again" in [record.getMessage() for record in caplog.records]
        assert await states(gateway) == both


@pytest.mark.parametrize("host", ["fe80::1%eth0", "", r"a\032b"])
async def test_a_record_that_is_no_address_changes_nothing(pair: Pair, host: str) -> None:
    a, _ = pair
    zone = Zone(a)
    async with live_gateway([], resolve=zone.resolve, discovery=DNS) as gateway:
        await until(lambda: is_fleet(gateway, {id_of(a): "up"}))
        zone.also = Address(host, 8000)
        await zone.passes(5)
        assert await states(gateway) == {id_of(a): "up"}
        assert await gateway.metric("moongate_discovery_lookups_total", result="failed") >= 4


async def test_one_that_an_operator_removed_stays_away_while_it_is_found(pair: Pair) -> None:
    a, b = pair
    zone = Zone(a, b)
    async with live_gateway([], resolve=zone.resolve, discovery=DNS) as gateway:
        both = {id_of(a): "up", id_of(b): "up"}
        await until(lambda: is_fleet(gateway, both))
        await gateway.client.delete(f"/admin/instances/{id_of(b)}")
        await zone.passes(12)
        assert await states(gateway) == {id_of(a): "up"}
        await gateway.client.post(f"/admin/instances/{id_of(b)}/undrain")
        await until(lambda: is_fleet(gateway, both))


async def test_what_the_file_names_or_an_operator_added_is_left_to_them(pair: Pair) -> None:
    a, b = pair
    zone = Zone(a, b)
    async with live_gateway([a.url], resolve=zone.resolve, discovery=DNS) as gateway:
        await until(lambda: is_fleet(gateway, {"a": "up", id_of(b): "up"}))
        zone.engines = (b,)
        await zone.passes(5)
        assert await states(gateway) == {"a": "up", id_of(b): "up"}


async def test_a_reload_changes_what_is_known_of_them_and_ends_looking(
    pair: Pair, tmp_path: Path
) -> None:
    a, b = pair
    zone, file = Zone(a, b), tmp_path / "gateway.yaml"
    async with live_gateway([], resolve=zone.resolve, discovery=DNS, file=file) as gateway:
        both = {id_of(a): "up", id_of(b): "up"}
        await until(lambda: is_fleet(gateway, both))
        state = gateway.core.fleet.find(InstanceId(id_of(a)))
        assert state is not None
        content = yaml.safe_load(file.read_text())
        content["discovery"] |= {"found": {"weight": 3.0}, "interval_s": 60}
        file.write_text(yaml.safe_dump(content))
        answer = await gateway.client.post("/admin/reload")
        assert answer.json()["changed"] == ["discovery.interval_s", "discovery.found.weight"]
        await until(lambda: state.spec.weight == 3.0)
        assert gateway.core.fleet.find(InstanceId(id_of(a))) is state
        content["discovery"] = {"kind": "static"}
        content["instances"] = [{"id": "other", "url": a.url}]
        file.write_text(yaml.safe_dump(content))
        refused = await gateway.client.post("/admin/reload")
        assert "an instance that is found" in refused.json()["problems"][0]
        content["instances"] = []
        file.write_text(yaml.safe_dump(content))
        assert (await gateway.client.post("/admin/reload")).status_code == 200
        await until(lambda: is_fleet(gateway, {}))


KEYS: dict[str, Any] = {
    "name": "f.test",
    "record": "srv",
    "port": 8001,
    "scheme": "https",
    "interval_s": 0.2,
    "absent_after": 7,
    "found.role": "decode",
    "found.models": ["m", "n"],
    "found.weight": 2.0,
    "found.kv_events_port": 9,
    "found.kv_replay_port": 9,
    "found.kv_connector": "nixl",
    "found.bootstrap_port": 9,
    "found.ranks": 2,
    "found.block_size": 32,
    "found.api_key_env": "MY_KEY",
    "found.pool": True,
    "found.messages": "chat",
}
WITH_OTHERS: dict[str, Any] = {
    "record": {"port": None},
    "found.kv_replay_port": {"found": {"kv_replay_port": 9, "kv_events_port": 9}},
}


async def test_every_key_of_discovery_is_seen_to_by_a_reload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read for each look-up; what becomes of what it finds is above."""
    known = {key.partition(".")[2] for key in EFFECTS if key.startswith("discovery.")}
    known = {key for key in known if not key.startswith("found.tls.")}  # files: another instance
    assert known == {"kind", *KEYS}, "what another kind does is above"
    monkeypatch.setenv("MY_KEY", "k")
    zone, file = Zone(), tmp_path / "gateway.yaml"
    zone.engines = None
    async with live_gateway([], resolve=zone.resolve, discovery=DNS, file=file) as gateway:
        good = yaml.safe_load(file.read_text())
        for key, value in KEYS.items():
            section, _, name = key.rpartition(".")
            changed = {section: {name: value}} if section else {name: value}
            content = {**good, "discovery": {**DNS, **changed, **WITH_OTHERS.get(key, {})}}
            file.write_text(yaml.safe_dump(content))
            answer = await gateway.client.post("/admin/reload")
            assert f"discovery.{key}" in answer.json().get("changed", ()), answer.text
            await until(lambda read=attrgetter(key), value=value: read(zone.settings) == value)


# --- DNS itself -----------------------------------------------------------------------------------


def srv(**fields: Any) -> DiscoverySettings:
    given = {"kind": "dns", "record": "srv", "name": NAME, **fields}
    return DiscoverySettings.model_validate(given)


async def test_srv_records_are_followed(pair: Pair) -> None:
    a, b = pair
    ports = {engine: address_of(engine).port for engine in pair}
    async with DnsServer() as server:
        server.services = [("localhost.", ports[a])]
        resolver = Resolver(server.resolver)
        discovery = {"kind": "dns", "record": "srv", "name": NAME, "interval_s": 0.1}
        async with live_gateway([], resolve=resolver.resolve, discovery=discovery) as gateway:
            name = f"localhost-{ports[a]}"
            await until(lambda: is_fleet(gateway, {name: "up"}))
            assert (await gateway.chat()).headers["x-moongate-instance"] == name
            server.services = [("localhost.", ports[b])]
            await until(lambda: is_fleet(gateway, {f"localhost-{ports[b]}": "up"}))


async def test_a_name_without_records_or_without_an_answer_leads_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moongate.gateway.instances.dns_names.LOOKUP_S", 0.5)
    async with DnsServer() as server:
        resolver = Resolver(server.resolver)
        with pytest.raises(LookupFailed, match="does not contain an answer"):
            await resolver.resolve(srv())
        with pytest.raises(LookupFailed, match="does not exist"):
            await resolver.resolve(srv(name="other.test"))
        server.services = [("e.test.", 1)] * 2
        assert await resolver.resolve(srv()) == {Address("e.test", 1)}
        server.is_silent = True
        with pytest.raises(LookupFailed):
            await resolver.resolve(srv())
        assert server.queries > 3


async def test_addresses_come_from_the_systems_resolver() -> None:
    settings = DiscoverySettings.model_validate({"kind": "dns", "name": "localhost", "port": 81})
    found = await Resolver().resolve(settings)
    assert Address("127.0.0.1", 81) in found
    assert {address.port for address in found} == {81}
    nowhere = DiscoverySettings.model_validate({"kind": "dns", "name": "no.invalid", "port": 81})
    with pytest.raises(LookupFailed, match=r"no\.invalid: "):
        await Resolver().resolve(nowhere)


async def test_a_gateway_without_a_name_asks_nobody(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    zone = Zone()
    caplog.set_level(logging.INFO)
    async with live_gateway([pair[0].url], resolve=zone.resolve) as gateway:
        await asyncio.sleep(0.3)
        assert zone.lookups == 0
        assert await states(gateway) == {"a": "up"}
