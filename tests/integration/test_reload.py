"""A configuration file that changes while the gateway runs: taken in as a whole, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import json
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import yaml
from fake_engine import FakeEngine, Received, chat_answer
from live_gateway import LiveGateway, live_gateway, until

from moongate.gateway.app import Gateway
from moongate.gateway.config.config_file import ConfigFile, Content
from moongate.gateway.config.reloadable import EFFECTS, Effect
from moongate.router import InstanceId
from moongate.router.admission import AdmissionLimits
from moongate.router.breaker import BreakerLimits
from moongate.simulator.engine import EngineProfile
from moongate.simulator.server import SimEngine, SimEngineConfig

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

INTERVAL_S = 1.0
"""Within which a change of the file is noticed."""

FAST = EngineProfile(prefill_tokens_per_s=200_000.0, decode_tokens_per_s=200.0)


@pytest_asyncio.fixture
async def engines() -> AsyncIterator[list[SimEngine]]:
    engines = [
        SimEngine(SimEngineConfig(model="m", profile=FAST, kv_events_port=0, kv_replay_port=0))
        for _ in range(3)
    ]
    for engine in engines:
        await engine.start()
    yield engines
    for engine in engines:
        await engine.stop()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "gateway.yaml"


def edit(file: Path, change: Callable[[Any], object]) -> None:
    """Write the file anew, changed."""
    content = yaml.safe_load(file.read_text())
    change(content)
    file.write_text(yaml.safe_dump(content))


def section(name: str, /, **fields: Any) -> Callable[[Any], object]:
    """Return the change that sets keys of a section."""
    return lambda content: content.setdefault(name, {}).update(fields)


async def reload(gateway: LiveGateway) -> Any:
    return await gateway.client.post("/admin/reload")


async def states(gateway: LiveGateway) -> dict[str, str]:
    answer = await gateway.client.get("/admin/instances")
    return {i["id"]: i["state"] for i in answer.json()["instances"]}


@contextlib.asynccontextmanager
async def traffic(gateway: LiveGateway, rate_per_s: float = 20.0) -> AsyncIterator[list[Any]]:
    """Send streams at this rate meanwhile. Each ends up in the list: what the client got, or an error."""
    seen: list[Any] = []
    tasks: list[asyncio.Task[None]] = []

    async def ask(number: int) -> None:
        answer = await gateway.chat(content=f"turn {number} " * 20, max_tokens=20, stream=True)
        is_whole = answer.text.rstrip().endswith("data: [DONE]") and '"error"' not in answer.text
        policy = answer.headers.get("x-moongate-policy")
        seen.append((answer.status_code, is_whole, policy))

    async def send() -> None:
        for number in range(10_000):
            tasks.append(asyncio.create_task(ask(number)))
            await asyncio.sleep(1 / rate_per_s)

    sending = asyncio.create_task(send())
    try:
        yield seen
    finally:
        sending.cancel()
        await asyncio.gather(*tasks)


def failures(seen: list[Any]) -> list[Any]:
    return [one for one in seen if one[:2] != (200, True)]


# --- C93: a broken file, then a good one ----------------------------------------------------------


async def test_c93_after_a_broken_edit_the_corrected_file_is_taken_at_once(
    engines: list[SimEngine], file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with live_gateway([e.url for e in engines], file=file) as gateway:
        good, core = file.read_text(), gateway.core
        hash_before = (await gateway.client.get("/ready")).json()["config_hash"]
        number_before = await gateway.metric("moongate_config_hash")
        assert int(hash_before, 16) == number_before
        async with traffic(gateway) as seen:
            file.write_text("policy: {name: [")
            await asyncio.sleep(2 * INTERVAL_S)
            assert core.policy.name == "kv_cost"
            assert await gateway.metric("moongate_config_reload_failed") == 1
            assert await gateway.metric("moongate_config_reloads_total", result="failed") == 1
            ready = (await gateway.client.get("/ready")).json()
            assert (ready["ready"], ready["degraded"]) == (True, ["configuration"])
            assert ready["config_hash"] == hash_before, "of the one in force"
            (told,) = [r for r in caplog.records if r.name == "moongate.gateway.config.reload"]
            assert told.levelno == logging.ERROR
            assert f"{file}:1: not YAML" in told.getMessage()
            file.write_text(good)
            edit(file, section("policy", name="round_robin"))
            await until(lambda: core.policy.name == "round_robin", INTERVAL_S)
            await asyncio.sleep(0.5)
        assert len(seen) > 40
        assert failures(seen) == []
        assert (seen[0][2], seen[-1][2]) == ("kv_cost", "round_robin")
        assert await gateway.metric("moongate_config_reload_failed") == 0
        assert await gateway.metric("moongate_config_reloads_total", result="ok") == 1
        ready = (await gateway.client.get("/ready")).json()
        assert "degraded" not in ready
        assert ready["config_hash"] != hash_before
        assert await gateway.metric("moongate_config_hash") == int(ready["config_hash"], 16)


async def test_c93_a_file_that_is_as_it_was_again_is_no_failure(
    engines: list[SimEngine], file: Path
) -> None:
    async with live_gateway([engines[0].url], file=file) as gateway:
        good = file.read_text()
        for broken in ("[", None):
            file.unlink() if broken is None else file.write_text(broken)
            await until(lambda: is_failed(gateway), 2 * INTERVAL_S)
            file.write_text(good)
            await until(lambda: is_in_force(gateway), 2 * INTERVAL_S)


async def test_of_a_file_that_can_not_be_read_the_latest_reason_is_told_once(
    engines: list[SimEngine], file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with live_gateway([engines[0].url], file=file) as gateway:

        async def tells(reason: str) -> bool:
            (problem,) = (await gateway.client.get("/admin/reload")).json()["problems"] or [""]
            return reason in problem

        good = file.read_bytes()
        file.unlink()
        await until(lambda: tells("No such file"), 2 * INTERVAL_S)
        file.mkdir()
        await until(lambda: tells("Is a directory"), 2 * INTERVAL_S)
        file.rmdir()
        file.write_bytes(b"\xff\xfe")
        await until(lambda: tells("can't decode"), 2 * INTERVAL_S)
        await asyncio.sleep(2 * INTERVAL_S)
        errors = [r for r in caplog.records if r.levelno == logging.ERROR]
        assert len(errors) == 3, "each reason once, however often the file is looked at"
        file.write_bytes(good)
        await until(lambda: tells(""), 2 * INTERVAL_S)


async def is_failed(gateway: LiveGateway) -> bool:
    return await gateway.metric("moongate_config_reload_failed") == 1


async def is_in_force(gateway: LiveGateway) -> bool:
    return not await is_failed(gateway)


# --- C94: half of a file --------------------------------------------------------------------------


def add_instance_and_break_policy(content: Any) -> None:
    content["instances"].append({"id": "c", "url": "http://127.0.0.1:1"})
    content["policy"] = {"name": "kv_costs"}


def change_policy_and_break_instances(content: Any) -> None:
    content["policy"] = {"name": "random"}
    content["instances"].append({"id": "a", "url": "http://127.0.0.1:1"})


@pytest.mark.parametrize(
    ("change", "key", "told"),
    [
        (add_instance_and_break_policy, "policy.name", "did you mean kv_cost?"),
        (change_policy_and_break_instances, "instances", "the id a is used twice"),
    ],
)
async def test_c94_of_a_file_that_is_half_right_nothing_holds(
    engines: list[SimEngine], file: Path, change: Callable[[Any], None], key: str, told: str
) -> None:
    async with live_gateway([e.url for e in engines[:2]], file=file) as gateway:
        before, policy = gateway.server.gateway.settings, gateway.core.policy
        edit(file, change)
        answer = await reload(gateway)
        assert answer.status_code == 400
        body = answer.json()
        assert body["error"]["code"] == "invalid_configuration"
        (problem,) = body["problems"]
        line = next(
            n
            for n, text in enumerate(file.read_text().splitlines(), 1)
            if key.split(".")[-1] in text
        )
        assert problem.startswith(f"{file}:{line}: {key}: ")
        assert told in problem
        assert gateway.server.gateway.settings is before
        assert gateway.core.policy is policy
        assert await states(gateway) == {"a": "up", "b": "up"}
        assert (await gateway.client.get("/admin/reload")).json()["problems"] == [problem]


# --- mid-traffic ----------------------------------------------------------------------------------


async def test_instances_and_policy_change_under_traffic_and_nothing_is_lost(
    engines: list[SimEngine], file: Path
) -> None:
    a, b, c = engines

    def swap(content: Any) -> None:
        content["instances"] = [
            {"id": "b", "url": b.url, "weight": 2.0},
            {"id": "c", "url": c.url},
        ]
        content["policy"] = {"name": "least_loaded"}

    async with live_gateway([a.url, b.url], file=file) as gateway:
        async with traffic(gateway) as seen:
            await asyncio.sleep(0.5)
            edit(file, swap)
            answer = await reload(gateway)
            assert answer.status_code == 200
            assert answer.json()["changed"] == [
                "policy.name", "instances[b].weight", "instances: + c", "instances: - a",
            ]  # fmt: skip
            await until(lambda: is_fleet(gateway, {"b": "up", "c": "up"}))
            await asyncio.sleep(0.5)
        assert failures(seen) == []
        assert {policy for _, _, policy in seen} == {"kv_cost", "least_loaded"}
        assert gateway.inflight() == 0
        state = gateway.core.fleet.find(InstanceId("b"))
        assert state is not None
        assert state.spec.weight == 2.0


async def test_all_instances_are_replaced_and_nobody_is_refused(
    engines: list[SimEngine], file: Path
) -> None:
    a, b, c = engines
    async with live_gateway([a.url], file=file) as gateway:
        async with traffic(gateway) as seen:
            await asyncio.sleep(0.3)
            urls = {"x": b.url, "y": c.url}
            instances = [{"id": name, "url": url} for name, url in urls.items()]
            edit(file, lambda content: content.update(instances=instances))
            assert (await reload(gateway)).status_code == 200
            await until(lambda: is_fleet(gateway, {"x": "up", "y": "up"}))
            await asyncio.sleep(0.3)
        assert failures(seen) == []


async def is_fleet(gateway: LiveGateway, wanted: dict[str, str]) -> bool:
    return await states(gateway) == wanted


async def test_what_a_removed_instance_has_under_way_ends_there(
    engines: list[SimEngine], file: Path
) -> None:
    a, b, _ = engines
    async with live_gateway([a.url], file=file, drain={"limit_s": 20.0}) as gateway:
        running = asyncio.create_task(gateway.chat(max_tokens=300, stream=True, ignore_eos=True))
        await until(lambda: gateway.inflight() == 1)
        edit(file, lambda content: content.update(instances=[{"id": "b", "url": b.url}]))
        await reload(gateway)
        await until(lambda: is_fleet(gateway, {"a": "draining", "b": "up"}))
        assert not running.done()
        assert (await gateway.chat()).headers["x-moongate-instance"] == "b"
        answer = await running
        assert answer.headers["x-moongate-instance"] == "a"
        assert answer.text.rstrip().endswith("data: [DONE]")
        await until(lambda: is_fleet(gateway, {"b": "up"}))


async def test_an_instance_of_another_address_is_another_instance(
    engines: list[SimEngine], file: Path
) -> None:
    a, b, _ = engines
    async with live_gateway([a.url], file=file) as gateway:
        await gateway.chat()
        edit(file, lambda content: content["instances"][0].update(url=b.url))
        await reload(gateway)
        await until(lambda: is_fleet(gateway, {"a": "up"}))
        links = gateway.server.gateway._links
        assert links is not None
        assert links.get(InstanceId("a")).settings.url == b.url
        assert (await gateway.chat()).status_code == 200


async def test_a_changed_weight_leaves_the_caches_known(
    engines: list[SimEngine], file: Path
) -> None:
    async with live_gateway([engines[0].url], file=file) as gateway:
        await gateway.chat(content="word " * 300, max_tokens=2)
        await until(lambda: gateway.core.index.total > 0)
        known = gateway.core.index.total
        edit(file, lambda content: content["instances"][0].update(weight=3.0))
        assert (await reload(gateway)).json()["changed"] == ["instances[a].weight"]
        assert gateway.core.index.total == known
        assert await states(gateway) == {"a": "up"}


async def test_a_request_ends_by_the_file_with_which_it_began(file: Path) -> None:
    may_answer = asyncio.Event()

    async def act(request: Received) -> None:
        await may_answer.wait()
        body = {**json.loads(chat_answer()), "kv_transfer_params": {"remote": request.json()["n"]}}
        await request.answer(200, json.dumps(body).encode())

    async with FakeEngine(act) as engine, live_gateway([engine.url], file=file) as gateway:
        first = asyncio.create_task(gateway.chat(n=1))
        await until(lambda: gateway.inflight() == 1)
        edit(file, section("limits", allow_kv_transfer_params=True))
        edit(file, section("observability", receipt_headers=False))
        assert (await reload(gateway)).status_code == 200
        second = asyncio.create_task(gateway.chat(n=2))
        may_answer.set()
        old, new = await first, await second
        assert old.json()["kv_transfer_params"] is None
        assert "x-moongate-instance" in old.headers
        assert new.json()["kv_transfer_params"] == {"remote": 2}
        assert "x-moongate-instance" not in new.headers


# --- who else says which instances there are ------------------------------------------------------


async def test_instances_that_came_at_run_time_stay(engines: list[SimEngine], file: Path) -> None:
    a, b, c = engines
    async with live_gateway([a.url], file=file) as gateway:
        await gateway.client.post("/admin/instances", json={"id": "added", "url": b.url})
        record = {"url": c.url, "lease_s": 30.0}
        await gateway.client.put("/admin/instances/told", json=record)
        edit(file, lambda content: content.update(instances=[]))
        assert (await reload(gateway)).status_code == 200
        await until(lambda: is_fleet(gateway, {"added": "up", "told": "up"}))


async def test_what_an_operator_did_to_an_instance_holds_if_the_file_says_nothing_new(
    engines: list[SimEngine], file: Path
) -> None:
    a, b, c = engines
    async with live_gateway([a.url, b.url, c.url], file=file) as gateway:
        await gateway.client.post("/admin/instances/a/drain")
        await gateway.client.post("/admin/instances/c/drain")
        await gateway.client.delete("/admin/instances/b")
        await until(lambda: is_fleet(gateway, {"a": "draining", "c": "draining"}))

        def change(content: Any) -> None:
            content["policy"] = {"name": "random"}
            content["instances"][2]["weight"] = 2.0

        edit(file, change)
        assert (await reload(gateway)).status_code == 200
        assert await states(gateway) == {"a": "draining", "c": "draining"}


async def test_the_file_takes_over_what_it_names_and_refuses_what_is_another(
    engines: list[SimEngine], file: Path
) -> None:
    a, b, c = engines
    async with live_gateway([a.url], file=file) as gateway:
        await gateway.client.post("/admin/instances", json={"id": "b", "url": b.url})
        await until(lambda: is_fleet(gateway, {"a": "up", "b": "up"}))
        edit(file, lambda content: content["instances"].append({"id": "b", "url": c.url}))
        refused = await reload(gateway)
        assert refused.status_code == 400
        assert "the id b is that of an instance that is added: b" in refused.json()["problems"][0]
        edit(file, lambda content: content["instances"][1].update(url=b.url))
        assert (await reload(gateway)).status_code == 200
        listed = (await gateway.client.get("/admin/instances")).json()["instances"]
        assert [(i["id"], i["origin"], i["state"]) for i in listed] == [
            ("a", "file", "up"),
            ("b", "file", "up"),
        ]
        edit(file, lambda content: content["instances"].pop())
        await reload(gateway)
        await until(lambda: is_fleet(gateway, {"a": "up"}))


# --- keys that need a restart ---------------------------------------------------------------------


async def test_a_key_that_needs_a_restart_lets_nothing_hold_and_is_named(
    engines: list[SimEngine], file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with live_gateway([engines[0].url], file=file) as gateway:
        good = file.read_text()
        edit(file, section("policy", name="random"))
        edit(file, section("listen", port=1))
        edit(file, section("state", timeout_ms=9.0))
        for _ in range(2):
            answer = await reload(gateway)
            assert answer.status_code == 409
            assert answer.json()["error"]["code"] == "needs_restart"
            text = file.read_text().splitlines()
            lines = [
                next(n for n, t in enumerate(text, 1) if k in t) for k in ("port", "timeout_ms")
            ]
            assert [p.split(": needs")[0] for p in answer.json()["problems"]] == [
                f"{file}:{lines[0]}: listen.port",
                f"{file}:{lines[1]}: state.timeout_ms",
            ]
        assert gateway.core.policy.name == "kv_cost"
        assert await gateway.metric("moongate_config_reload_failed") == 1
        assert await gateway.metric("moongate_config_reloads_total", result="needs_restart") == 2
        errors = [r for r in caplog.records if r.levelno == logging.ERROR]
        assert len(errors) == 2, "each key once, however often the file is looked at"
        file.write_text(good)
        assert (await reload(gateway)).json()["changed"] == []
        assert await gateway.metric("moongate_config_reload_failed") == 0


async def test_without_a_file_there_is_nothing_to_reload(engines: list[SimEngine]) -> None:
    async with live_gateway([engines[0].url]) as gateway:
        answer = await reload(gateway)
        assert answer.status_code == 409
        assert answer.json()["error"]["code"] == "no_configuration"
        gateway.server.gateway.reload_soon()
        assert "config_hash" not in (await gateway.client.get("/ready")).json()


# --- noticing -------------------------------------------------------------------------------------


async def test_a_config_map_whose_link_changes_is_noticed(
    engines: list[SimEngine], tmp_path: Path
) -> None:
    """As a kubelet does it: the file is a link into ..data, which is a link that is replaced."""
    first, second = tmp_path / "..1", tmp_path / "..2"
    first.mkdir()
    second.mkdir()
    (tmp_path / "..data").symlink_to(first.name)
    file = tmp_path / "gateway.yaml"
    file.symlink_to("..data/gateway.yaml")
    async with live_gateway([engines[0].url], file=file) as gateway:
        (second / "gateway.yaml").write_text(file.read_text())
        edit(second / "gateway.yaml", section("policy", name="random"))
        (tmp_path / "..data_tmp").symlink_to(second.name)
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")
        await until(lambda: gateway.core.policy.name == "random", INTERVAL_S + 0.3)


async def test_a_file_that_is_just_being_written_is_not_taken(
    engines: list[SimEngine], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with live_gateway([e.url for e in engines], file=file) as gateway:
        looks = itertools.count()

        def read(_: ConfigFile) -> Content:
            """Each look finds it longer; what is there would leave all instances out."""
            return Content(str(file), "instances: []\n", f"{next(looks):016x}")

        with monkeypatch.context() as patched:
            patched.setattr(ConfigFile, "read", read)
            for _ in range(4):
                await asyncio.sleep(INTERVAL_S)
        await asyncio.sleep(1.5 * INTERVAL_S)
        assert set(await states(gateway)) == {"a", "b", "c"}
        assert await gateway.metric("moongate_config_reloads_total", result="ok") == 0


async def test_variables_are_read_again(
    engines: list[SimEngine], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_POLICY", "random")
    monkeypatch.setenv("MY_KEY", "k1")
    async with live_gateway([engines[0].url], file=file) as gateway:
        edit(file, section("policy", name="${MY_POLICY}"))
        edit(file, section("auth", admin_key_env="MY_KEY"))
        edit(file, lambda content: content["instances"][0].update(api_key_env="MY_KEY"))
        assert (await reload(gateway)).status_code == 200
        assert gateway.core.policy.name == "random"
        assert (await reload(gateway)).status_code == 401, "from now on it asks for the key"
        monkeypatch.setenv("MY_POLICY", "round_robin")
        monkeypatch.setenv("MY_KEY", "k2")
        answer = await gateway.client.post("/admin/reload", headers={"authorization": "Bearer k2"})
        assert answer.json()["changed"] == ["policy.name"]
        assert gateway.core.policy.name == "round_robin"
        links = gateway.server.gateway._links
        assert links is not None
        assert links.get(InstanceId("a")).api_key == "k2"


async def test_limits_hold_for_connections_that_are_open(
    engines: list[SimEngine], file: Path
) -> None:
    async with live_gateway([engines[0].url], file=file) as gateway:
        one = httpx.AsyncClient(
            base_url=gateway.url, trust_env=False, limits=httpx.Limits(max_connections=1)
        )
        async with one:
            body = {"model": "m", "prompt": "x" * 3000, "max_tokens": 1}
            for limit, status in ((None, 200), (2048, 413), (10_000, 200)):
                if limit is not None:
                    edit(file, section("limits", body_bytes_max=limit))
                    assert (await reload(gateway)).status_code == 200
                answer = await one.post("/v1/completions", json=body)
                assert answer.status_code == status


async def test_a_policy_that_can_not_be_made_is_a_problem_of_the_file(
    engines: list[SimEngine], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file.parent / "own_policies.py").write_text(
        "class Picky:\n    def __init__(self) -> None:\n        raise KeyError('a file of mine')\n"
    )
    monkeypatch.syspath_prepend(file.parent)
    async with live_gateway([engines[0].url], file=file) as gateway:
        edit(file, section("policy", name="own_policies:Picky"))
        refused = await reload(gateway)
        assert refused.status_code == 400
        assert "a file of mine" in refused.json()["problems"][0]
        assert gateway.core.policy.name == "kv_cost"


# --- every key that takes effect does -------------------------------------------------------------


SEEDING: dict[str, float] = {
    "at_once_max": 7,
    "per_minute_max": 7,
    "demand_per_s_min": 7.0,
    "busy_requests": 7,
    "prefix_tokens_min": 7,
    "pool_use_max": 0.7,
    "kv_use_max": 0.5,
}


def limit(name: str) -> Callable[[Any], object]:
    return lambda gateway: getattr(gateway.core.seeder.limits, name)


CHANGES: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "limits.body_bytes_max": (2048, lambda g: g.settings.limits.body_bytes_max),
    "limits.headers_bytes_max": (2048, lambda g: g.settings.limits.headers_bytes_max),
    "limits.queue_requests_max": (7, lambda g: prompts(g)._waiting_max),
    "limits.upstream_timeout_s": (7.0, lambda g: link(g).upstream._read_timeout_s),
    "limits.connect_timeout_s": (
        7.0,
        lambda g: max(link(g).upstream._connect_timeout_s, g._hot_path.bootstraps.timeout_s),
    ),
    "limits.prompt_memory_bytes_max": (7, lambda g: prompts(g)._tokenizing.memory.bytes_max),
    "limits.connections_per_instance_max": (7, lambda g: link(g).upstream._connections_max),
    "limits.allow_kv_transfer_params": (
        True,
        lambda g: g._hot_path.settings.limits.allow_kv_transfer_params,
    ),
    "policy.name": ("random", lambda g: g.core.policy.name),
    "policy.options": (
        {"session_ms": 7.0},
        lambda g: {"session_ms": g.core.policy.weights.session_ms},
    ),
    "policy.allow_override": (True, lambda g: g.core.has_policy("random")),
    "tokenizer.budget_ms": (7.0, lambda g: prompts(g)._tokenizing.budget_s * 1000),
    "tokenizer.forward_ids": ("off", lambda g: g._hot_path.id_forwarding.mode),
    "pool.lookup_budget_ms": (7.0, lambda g: g._pooling.budget_s * 1000),
    "auth.forward_client_key": (True, lambda g: g._hot_path.settings.auth.forward_client_key),
    "auth.admin_key_env": ("MY_KEY", lambda g: g.settings.auth.admin_key_env),
    "session.header": ("x-mine", lambda g: g._hot_path.reader._live.current.session.header),
    "models.aliases": ({"n": "m"}, lambda g: g._hot_path._intake._aliases.served_by_alias),
    "health.interval_s": (0.1, lambda g: g.monitor._live.current.health.interval_s),
    "health.timeout_s": (0.7, lambda g: link(g).api._timeout_s),
    "health.down_after": (7, lambda g: g.core.limits.down_after),
    "health.up_after": (7, lambda g: g.core.limits.up_after),
    "drain.limit_s": (7.0, lambda g: g.settings.drain.limit_s),
    "observability.receipt_headers": (
        False,
        lambda g: g._hot_path.settings.observability.receipt_headers,
    ),
    "observability.stream_usage": (
        "always",
        lambda g: g._hot_path.settings.observability.stream_usage,
    ),
    "observability.keep_text": (
        True,
        lambda g: g._hot_path._intake._divergences._texts._keeps_text,
    ),
    "observability.decisions_max": (7, lambda g: g._hot_path.recent._ring.maxlen),
    "observability.log_format": (
        "json",
        lambda g: type(logging.getLogger().handlers[0].formatter).__name__[:4].lower(),
    ),
    "observability.sample_ratio": (0.0, lambda g: g._hot_path.observers.tracing._bound),
    "limits.retry_timeouts": (False, lambda g: g.core.limits.retries_timeouts),
    "limits.json_depth_max": (9, lambda g: g._hot_path.reader._live.current.limits.json_depth_max),
    "limits.messages_max": (9, lambda g: g._hot_path.reader._live.current.limits.messages_max),
    "limits.stop_max": (9, lambda g: g._hot_path.reader._live.current.limits.stop_max),
    "auth.salt_env": ("MY_KEY", lambda g: g.access._settings.salt_env),
    "breaker.failures_max": (7, lambda g: breaker(g).failures_max),
    "breaker.open_s": (7.0, lambda g: breaker(g).open_s),
    "breaker.open_s_max": (7.0, lambda g: breaker(g).open_s_max),
    "admission.instance_requests_max": (7, lambda g: bounds(g).instance_requests_max),
    "admission.instance_prefill_tokens_max": (7, lambda g: bounds(g).instance_prefill_tokens_max),
    "admission.wait_s_max": (7.0, lambda g: bounds(g).wait_s_max),
    **{f"pool.seeding.{name}": (value, limit(name)) for name, value in SEEDING.items()},
}


def breaker(gateway: Gateway) -> BreakerLimits:
    state = gateway.core.fleet.find(InstanceId("a"))
    assert state is not None
    return state.breaker.limits


def bounds(gateway: Gateway) -> AdmissionLimits:
    admission = gateway.core.admission
    return gateway.core.limits.admission if admission is None else admission.limits


def prompts(gateway: Gateway) -> Any:
    assert gateway._hot_path is not None
    return gateway._hot_path._intake._prompts


def link(gateway: Gateway) -> Any:
    assert gateway._links is not None
    return gateway._links.get(InstanceId("a"))


async def test_every_key_that_holds_at_once_is_seen_to(
    engines: list[SimEngine], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but those of instances and clients' keys, which are below, and of discovery (test_dns_discovery.py)."""
    at_once = {key for key, effect in EFFECTS.items() if effect is Effect.AT_ONCE}
    elsewhere = ("instances", "discovery", "auth.keys")
    assert {key for key in at_once if not key.startswith(elsewhere)} == CHANGES.keys()
    monkeypatch.setenv("MY_KEY", "k")
    headers = {"authorization": "Bearer k"}
    for handler in logging.getLogger().handlers:
        monkeypatch.setattr(handler, "formatter", handler.formatter)
    settings: dict[str, Any] = {
        "pool": {"kind": "memory"},
        "observability": {"otlp_endpoint": "http://127.0.0.1:9"},
    }
    async with live_gateway([engines[0].url], file=file, **settings) as gateway:
        good = yaml.safe_load(file.read_text())
        app: Any = gateway.server.gateway
        for key, (value, read) in CHANGES.items():
            content = copy.deepcopy(good)
            *sections, name = key.split(".")
            place = content
            for one in sections:
                place = place.setdefault(one, {})
            assert read(app) != value, key
            place[name] = value
            for wanted in (content, good):
                file.write_text(yaml.safe_dump(wanted))
                answer = await gateway.client.post("/admin/reload", headers=headers)
                assert key in answer.json().get("changed", ()), answer.text
                assert (read(app) == value) == (wanted is content), key


async def test_keys_come_change_and_go(
    engines: list[SimEngine], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GW_A", "gw-1")
    async with live_gateway([engines[0].url], file=file) as gateway:

        async def ask(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return (await gateway.chat(headers=headers)).status_code

        assert await ask("anything") == 200
        one = {"key_env": "GW_A", "tenant": "a"}
        edit(file, section("auth", keys=[one]))
        assert (await reload(gateway)).json()["changed"] == ["auth.keys"]
        assert (await ask("anything"), await ask("gw-1")) == (401, 200)
        monkeypatch.setenv("GW_A", "gw-2")  # variables are read again
        edit(file, section("auth", keys=[{**one, "requests_per_minute": 1}]))
        await reload(gateway)
        assert [await ask(key) for key in ("gw-1", "gw-2", "gw-2")] == [401, 200, 429]
        edit(file, section("auth", keys=[{**one, "key_env": "GW_NONE"}]))
        refused = await reload(gateway)
        assert refused.status_code == 400
        assert "GW_NONE" in refused.text
        assert await ask("gw-2") == 429, "what was in force stays"
        edit(file, section("auth", keys=[]))
        await reload(gateway)
        assert await ask("anything") == 200


INSTANCE_CHANGES: dict[str, Any] = {
    "role": "decode",
    "kv_events": "tcp://127.0.0.1:9",
    "kv_replay": "tcp://127.0.0.1:9",
    "kv_connector": "nixl",
    "bootstrap_url": "http://127.0.0.1:9",
    "models": ["m", "n"],
    "weight": 2.0,
    "api_key_env": "MY_KEY",
    "pool": True,
    "messages": "chat",
}
WITH_OTHERS: dict[str, dict[str, Any]] = {"kv_replay": {"kv_events": "tcp://127.0.0.1:9"}}


async def test_every_key_of_an_instance_that_holds_at_once_is_seen_to(
    engines: list[SimEngine], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = {key for key, effect in EFFECTS.items() if effect is Effect.AT_ONCE}
    keys = {key.partition(".")[2] for key in at_once if key.startswith("instances")}
    assert keys == INSTANCE_CHANGES.keys()
    monkeypatch.setenv("MY_KEY", "k")
    async with live_gateway([engines[0].url], file=file) as gateway:
        good, app = yaml.safe_load(file.read_text()), gateway.server.gateway
        state = gateway.core.fleet.find(InstanceId("a"))
        assert state is not None
        for key, value in INSTANCE_CHANGES.items():
            content = copy.deepcopy(good)
            content["instances"][0] |= {key: value, **WITH_OTHERS.get(key, {})}
            file.write_text(yaml.safe_dump(content))
            assert f"instances[a].{key}" in (await reload(gateway)).json()["changed"]
            changed = link(app)
            assert getattr(changed.settings, key) == value
            assert app.monitor._watches[InstanceId("a")].link is changed
            assert gateway.core.fleet.find(InstanceId("a")) is state, "it has not been away"
            assert state.spec == changed.spec
        assert state.is_healthy


async def test_an_event_address_that_changes_is_followed(
    engines: list[SimEngine], file: Path
) -> None:
    async with live_gateway([engines[0].url], file=file) as gateway:
        (subscriber,) = gateway.server.gateway.monitor.subscribers.values()
        known = subscriber.publisher.endpoint
        other = known.rpartition(":")[0] + ":9"
        edit(file, lambda content: content["instances"][0].update(kv_events=other))
        await reload(gateway)
        subscribers = gateway.server.gateway.monitor.subscribers
        await until(lambda: [s.publisher.endpoint for s in subscribers.values()] == [other])


async def test_events_are_followed_as_far_as_the_policy_wants_them(
    engines: list[SimEngine], file: Path
) -> None:
    async with live_gateway([engines[0].url], file=file) as gateway:
        subscribers = gateway.server.gateway.monitor.subscribers
        assert len(subscribers) == 1
        for name, count in (("prefix_affinity", 0), ("kv_cost", 1)):
            edit(file, section("policy", name=name))
            await reload(gateway)
            await until(lambda count=count: len(subscribers) == count)
