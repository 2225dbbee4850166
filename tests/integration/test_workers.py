"""`moongate serve --workers N`: several processes that are one gateway to whoever asks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fake_engine import FakeEngine, Received, chat_answer
from live_gateway import until
from processes import MOONGATE, Child, free_port
from redis_process import RedisProcess, needs_redis

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(90)]

START_S = 40.0


class Held:
    """An engine's handler that answers once it may; responses too."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.waiting = 0

    async def __call__(self, request: Received) -> None:
        self.waiting += 1
        await self.may_answer.wait()
        self.waiting -= 1
        if request.path == "/v1/responses":
            name = request.json().get("request_id", "resp_1")
            answer = {
                "id": name, "object": "response", "status": "completed", "output": [],
                "previous_response_id": None, "background": False,
            }  # fmt: skip
            await request.answer(200, httpx.Response(200, json=answer).content)
        else:
            await request.answer(200, chat_answer("m"))


class Served:
    """A gateway of several workers."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.url = child.url

    def pids(self) -> list[int]:
        """Return the workers' process ids, the oldest first."""
        pid = self.child.process.pid
        told = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return sorted(map(int, told))

    async def get(self, path: str) -> httpx.Response:
        """Ask over a connection of its own, so any worker may answer."""
        async with httpx.AsyncClient(
            base_url=self.url, trust_env=False, verify=False, timeout=20
        ) as client:
            return await client.get(path)

    async def post(self, path: str, body: Any = None) -> httpx.Response:
        async with httpx.AsyncClient(
            base_url=self.url, trust_env=False, verify=False, timeout=60
        ) as client:
            return await client.post(path, json=body)

    async def chat(self, content: str = "x") -> httpx.Response:
        body = {"model": "m", "messages": [{"role": "user", "content": content}]}
        return await self.post("/v1/chat/completions", body)

    async def metrics(self) -> dict[str, float]:
        lines = (await self.get("/metrics")).text.splitlines()
        return {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
            for line in lines
            if not line.startswith("#")
        }

    async def inflight(self) -> dict[str, int]:
        """Return the requests under way as this worker sees them, whoever has them."""
        listed = (await self.get("/admin/instances")).json()["instances"]
        return {i["id"]: i["caches"][0]["active_requests"] for i in listed}


@contextlib.asynccontextmanager
async def served(
    directory: Path, urls: list[str], workers: int = 2, **settings: Any
) -> AsyncIterator[Served]:
    port = free_port()
    config = directory / f"gateway-{port}.yaml"
    instances = [{"id": "abcd"[n], "url": url} for n, url in enumerate(urls)]
    health = {"interval_s": 0.5}
    config.write_text(yaml.safe_dump({"instances": instances, "health": health, **settings}))
    argv = [*MOONGATE, "serve", "-c", str(config), "--port", str(port), "--workers", f"{workers}"]
    child = Child.start(argv, f"http://127.0.0.1:{port}", directory / f"gateway-{port}.log")
    gateway = Served(child)
    try:
        await asyncio.to_thread(child.wait_until, "/ready", START_S)
        # Each worker has connected to every instance, and said so.
        await until(lambda: _are_all_ready(gateway, workers * len(urls)), START_S)
        await asyncio.sleep(0.3)
        yield gateway
    finally:
        code = await asyncio.to_thread(child.stop)
        assert code in (0, -signal.SIGKILL), child.tail()


async def _are_all_ready(gateway: Served, count: int) -> bool:
    return gateway.child.log.read_text().count("is well") >= count


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisProcess]:
    with RedisProcess(tmp_path) as running:
        yield running


async def test_a_reload_that_is_asked_of_one_worker_holds_at_all(tmp_path: Path) -> None:
    async with FakeEngine(Held()) as a, FakeEngine(Held()) as b:
        async with served(tmp_path, [a.url, b.url]) as gateway:
            (config,) = tmp_path.glob("gateway-*.yaml")
            content = yaml.safe_load(config.read_text())
            content["policy"] = {"name": "round_robin"}
            config.write_text(yaml.safe_dump(content))
            told = await gateway.post("/admin/reload")
            assert told.status_code == 200, told.text
            for _ in range(8):  # any worker may answer
                shown = (await gateway.get("/admin/reload")).json()
                assert shown == {"config_hash": told.json()["config_hash"], "problems": []}
                answer = await gateway.chat()
                assert answer.headers["x-moongate-policy"] == "round_robin"


async def test_workers_start_without_engines_and_share_where_no_responses_are_kept(
    tmp_path: Path,
) -> None:
    began = asyncio.get_running_loop().time()
    port, config = free_port(), tmp_path / "gateway.yaml"
    config.write_text(yaml.safe_dump({"instances": [], "responses": {"bytes_max": 0}}))
    argv = [*MOONGATE, "serve", "-c", str(config), "--port", str(port), "--workers", "2"]
    child = Child.start(argv, f"http://127.0.0.1:{port}", tmp_path / "gateway.log")
    gateway = Served(child)
    try:
        await asyncio.to_thread(child.wait_until, "/health", START_S)
        assert asyncio.get_running_loop().time() - began < 9.0, "WORKER_READY_S would be 10 s more"
        async with FakeEngine(Held()) as engine:
            record = {"id": "x", "url": engine.url, "lease_s": 30}
            async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as client:
                assert (await client.put("/admin/instances/x", json=record)).status_code == 201

            async def is_seen() -> bool:
                told = [(await gateway.get("/admin/instances")).json() for _ in range(8)]
                return all([i["id"] for i in one["instances"]] == ["x"] for one in told)

            await until(is_seen, 5.0)
    finally:
        assert await asyncio.to_thread(child.stop) == 0, child.tail()


async def test_any_worker_answers_for_all(tmp_path: Path) -> None:
    held = Held()
    async with FakeEngine(held) as a, FakeEngine(held) as b:
        async with served(tmp_path, [a.url, b.url]) as gateway:
            answers = [await gateway.chat(f"{n}") for n in range(30)]
            assert {answer.status_code for answer in answers} == {200}
            name = 'moongate_requests_total{code="200",model="m",route="/v1/chat/completions"}'
            for _ in range(6):
                found = await gateway.metrics()
                assert found[name] == 30
                assert found["moongate_e2e_seconds_count"] == 30
                assert found['moongate_instance_up{instance="a"}'] == 1
                assert "moongate_redis_up" not in found
            listed = (await gateway.get("/admin/decisions?limit=100")).json()["decisions"]
            assert len(listed) == 30
            began = [one["began_at_s"] for one in listed]
            assert began == sorted(began, reverse=True)
            assert len((await gateway.get("/admin/decisions?limit=7")).json()["decisions"]) == 7

            held.may_answer.clear()
            before = {"a": len(a.received), "b": len(b.received)}
            tasks = [asyncio.create_task(gateway.chat(f"{n}")) for n in range(12)]
            await until(lambda: held.waiting == 12)

            # Sent at once, so that a worker may not have heard of the other's last ones.
            sent = {"a": len(a.received) - before["a"], "b": len(b.received) - before["b"]}
            assert min(sent.values()) >= 3

            async def are_all_seen() -> bool:
                return await gateway.inflight() == sent

            for _ in range(4):
                await until(are_all_seen)
            found = await gateway.metrics()
            assert found['moongate_inflight_requests{instance="a"}'] == sent["a"]
            held.may_answer.set()
            await asyncio.gather(*tasks)
            assert gateway.child.process.poll() is None
        assert gateway.child.process.returncode == 0


async def test_what_is_drained_added_or_stored_at_one_is_so_at_all(tmp_path: Path) -> None:
    held = Held()
    async with FakeEngine(held) as a, FakeEngine(held) as b:
        async with served(tmp_path, [a.url]) as gateway:

            async def states() -> set[str]:
                """Return what several connections tell: most likely every worker's view."""
                told = [(await gateway.get("/admin/instances")).json() for _ in range(8)]
                return {" ".join(i["state"] for i in one["instances"]) for one in told}

            async def are(*wanted: str) -> bool:
                return await states() == set(wanted)

            added = await gateway.post("/admin/instances", {"id": "b", "url": b.url})
            assert added.status_code == 201
            await until(lambda: are("up up"), 10.0)
            assert (await gateway.post("/admin/instances/a/drain")).status_code == 200
            await until(lambda: are("draining up"))
            answers = [await gateway.chat(f"{n}") for n in range(10)]
            assert {answer.headers["x-moongate-instance"] for answer in answers} == {"b"}
            assert (await gateway.post("/admin/instances/a/undrain")).status_code == 200
            await until(lambda: are("up up"))

            first = (await gateway.post("/v1/responses", {"model": "m", "input": "1"})).json()
            for _ in range(8):
                told = await gateway.get(f"/v1/responses/{first['id']}")
                assert told.status_code == 200, told.text


async def test_a_worker_that_crashes_comes_again_and_its_load_is_free_at_once(
    tmp_path: Path,
) -> None:
    held = Held()
    async with FakeEngine(held) as engine, served(tmp_path, [engine.url]) as gateway:
        assert {(await gateway.chat()).status_code for _ in range(10)} == {200}
        before = (await gateway.metrics())["moongate_e2e_seconds_count"]
        assert before == 10
        held.may_answer.clear()
        tasks = [asyncio.create_task(gateway.chat(f"{n}")) for n in range(16)]
        await until(lambda: held.waiting == 16)
        victim, other = gateway.pids()
        os.kill(victim, signal.SIGKILL)
        lost = 0

        async def is_freed() -> bool:
            try:
                found = (await gateway.inflight())["a"]
            except httpx.HTTPError:
                return False  # it came to the one that has just been killed
            return 0 < found < 16

        await until(is_freed, 2.0)
        held.may_answer.set()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            lost += isinstance(outcome, httpx.HTTPError)
        assert 0 < lost < 16

        async def is_back() -> bool:
            pids = gateway.pids()
            assert (await gateway.metrics())['moongate_instance_up{instance="a"}'] == 1
            is_other = len(pids) == 2 and victim not in pids and other in pids
            return is_other and await _are_all_ready(gateway, 3)

        await until(is_back, START_S)
        found = await gateway.metrics()
        assert found["moongate_e2e_seconds_count"] >= before + 16 - lost
        assert found['moongate_inflight_requests{instance="a"}'] == 0
        assert {(await gateway.chat()).status_code for _ in range(10)} == {200}


async def test_sigterm_drains_all_workers(tmp_path: Path) -> None:
    held = Held()
    held.may_answer.clear()
    async with FakeEngine(held) as engine:
        async with served(tmp_path, [engine.url]) as gateway:
            tasks = [asyncio.create_task(gateway.chat(f"{n}")) for n in range(12)]
            await until(lambda: held.waiting == 12)
            gateway.child.process.terminate()
            await asyncio.sleep(1.0)
            assert gateway.child.process.poll() is None
            with pytest.raises(httpx.ConnectError):
                await gateway.chat()
            held.may_answer.set()
            answers = await asyncio.gather(*tasks)
            assert {answer.status_code for answer in answers} == {200}
            assert await asyncio.to_thread(gateway.child.process.wait, 10) == 0


async def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    async with FakeEngine(Held()) as engine, served(tmp_path, [engine.url]) as gateway:
        pids = gateway.pids()
        os.kill(gateway.child.process.pid, signal.SIGKILL)
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 10.0)


async def test_what_can_t_start_says_so_once_and_ends(tmp_path: Path) -> None:
    config = tmp_path / "gateway.yaml"
    config.write_text("instances: []\nlisten: {prot: 1}\n")
    argv = [*MOONGATE, "serve", "-c", str(config), "--workers", "2"]
    child = Child.start(argv, "", tmp_path / "log")
    assert await asyncio.to_thread(child.process.wait, 20) == 1
    assert child.tail().count("listen.prot") == 1


@needs_redis
async def test_c84_two_gateways_of_two_workers_spread_load_as_one_process(
    tmp_path: Path, redis_server: RedisProcess
) -> None:
    """All clients of the hot prefix use the first, all others the second."""
    held = Held()
    state = {"kind": "redis", "url": redis_server.url}
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeEngine(held)) for _ in range(3)]
        urls = [engine.url for engine in engines]
        one = await stack.enter_async_context(served(tmp_path, urls, state=state))
        other = await stack.enter_async_context(served(tmp_path, urls, state=state))
        held.may_answer.clear()
        hot = " ".join(f"word{n}" for n in range(100))
        tasks: list[asyncio.Task[httpx.Response]] = []
        for n in range(24):
            for gateway, content in ((one, f"{hot} {n}"), (other, f"{n}")):
                tasks.append(asyncio.create_task(gateway.chat(content)))
                await asyncio.sleep(0.03)
        await until(lambda: held.waiting == 48)

        async def are_all_known() -> bool:
            told = [await gateway.inflight() for gateway in (one, other)]
            return all(sum(counts.values()) == 48 for counts in told)

        await until(are_all_known)
        counts = await other.inflight()
        assert max(counts.values()) - min(counts.values()) <= 3, counts

        for pid in [*one.pids(), one.child.process.pid]:
            os.kill(pid, signal.SIGKILL)

        async def are_freed() -> bool:
            return sum((await other.inflight()).values()) == 24

        await until(are_freed, 8.0)
        held.may_answer.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        kinds = Counter(type(outcome).__name__ for outcome in outcomes)
        assert kinds["Response"] == 24, kinds
