"""The gateway and a pool that simulated engines share: where turns go, and what is said of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from live_gateway import LiveGateway, live_gateway, until

from moongate.gateway.instances.engine_api import EngineApi, EngineCallFailed
from moongate.gateway.pool import pooling as pooling_module
from moongate.gateway.pool.pooling import Pooling
from moongate.kvpool.memory import MemoryPool
from moongate.kvpool.mooncake import MooncakeMaster
from moongate.simulator.engine import EngineProfile
from moongate.simulator.master import PoolMaster
from moongate.simulator.server import PoolSegment, SimEngine, SimEngineConfig

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

PROFILE = EngineProfile(
    prefill_tokens_per_s=100_000.0, decode_tokens_per_s=2_000.0, kv_bytes_per_token=100
)
CONFIG = SimEngineConfig(
    profile=PROFILE, model="m", kv_events_port=0, kv_replay_port=0,
    pool_segment=PoolSegment.STANDALONE,
)  # fmt: skip
SIZE = PROFILE.block_size_tokens
LOOK_UP_S = 60.0
"""A look-up's budget where the time isn't what is tested: this machine may be busy."""


def text(seed: int, words: int = 300) -> str:
    return " ".join(f"word{seed}x{n}" for n in range(words))


@dataclass
class Rig:
    """A gateway before engines that share a pool, and the pool's master."""

    gateway: LiveGateway
    engines: list[SimEngine]
    pool: MemoryPool
    master: PoolMaster

    @property
    def pooling(self) -> Pooling:
        pooling = self.gateway.server.gateway._pooling
        assert pooling is not None
        return pooling

    def engine(self, answer: httpx.Response) -> SimEngine:
        """Return the engine that an answer came from."""
        return self.engines["abcdefgh".index(answer.headers["x-moongate-instance"][0])]

    def others(self, engine: SimEngine) -> list[SimEngine]:
        return [one for one in self.engines if one is not engine]

    def forget_questions(self) -> None:
        self.master.requests.clear()

    async def crash(self, engine: SimEngine) -> None:
        """End an engine, and wait until the gateway knows."""
        await engine.crash()
        name = "abcdefgh"[self.engines.index(engine)]
        fleet = self.gateway.core.fleet
        await until(lambda: any(i.spec.id == name and not i.is_healthy for i in fleet))

    async def settle(self, keys: int | None = None) -> None:
        """Wait until all that was computed is in the pool, and announced."""
        before = -1
        while before != len(self.pool):
            before = len(self.pool)
            await asyncio.sleep(0.05)
        assert keys is None or len(self.pool) >= keys

    async def index(self) -> dict[str, Any]:
        answer: dict[str, Any] = (await self.gateway.client.get("/admin/index")).json()["pool"]
        return answer

    async def explain(self, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
        """Return the candidates that a dry run ranks, by instance."""
        body = {"model": "m", "messages": messages, **fields}
        answer = (await self.gateway.client.post("/admin/explain", json=body)).json()
        return {candidate["instance"]: candidate for candidate in answer["candidates"]}


@contextlib.asynccontextmanager
async def rig(
    count: int = 2,
    *,
    pool_bytes: int = 1 << 26,
    kind: str = "mooncake",
    config: SimEngineConfig = CONFIG,
    configs: list[SimEngineConfig] | None = None,
    stored_within_s: float = 1_000.0,
    pool: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Rig]:
    """`stored_within_s`: after which a sample is looked for; late, so that it is no question here."""
    shared = MemoryPool(pool_bytes)
    engines = [SimEngine(one, shared) for one in configs or [config] * count]
    master = PoolMaster(shared)
    await master.start()
    await asyncio.gather(*(engine.start() for engine in engines))
    section: dict[str, Any] = {"kind": kind, "lookup_budget_ms": 1_000, **(pool or {})}
    if kind == "mooncake":
        section["admin_url"] = master.url
    try:
        async with live_gateway(
            [engine.url for engine in engines], memory_pool=shared, pool=section, **settings
        ) as gateway:
            one = Rig(gateway, engines, shared, master)
            one.pooling._stored_within_s = stored_within_s
            await until(lambda: one.pooling.health.is_up)
            yield one
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines), return_exceptions=True)
        await master.stop()


@dataclass
class Session:
    """A conversation that grows by one user message a turn."""

    rig: Rig
    seed: int = 1
    fields: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)

    async def turn(self, words: int = 300) -> httpx.Response:
        content = text(self.seed * 1_000 + len(self.messages), words)
        self.messages.append({"role": "user", "content": content})
        answer = await self.rig.gateway.chat(messages=self.messages, max_tokens=4, **self.fields)
        assert answer.status_code == 200, answer.text
        reply = answer.json()["choices"][0]["message"]["content"]
        self.messages.append({"role": "assistant", "content": reply})
        return answer


def said(answer: httpx.Response, name: str) -> int:
    return int(answer.headers[f"x-moongate-{name}-tokens"])


def cached(answer: httpx.Response) -> int:
    tokens: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def is_wrong(answer: httpx.Response) -> bool:
    """Tell whether the receipt promised another reuse than the engine reports."""
    return abs(said(answer, "device") + said(answer, "pool") - cached(answer)) >= SIZE


def external_hits(engine: SimEngine) -> int:
    return sum(r.model.statistics().external_hits_tokens for r in engine.runners.values())


# --- what is asked --------------------------------------------------------------------------------


async def test_nothing_is_asked_while_the_holder_s_device_covers_the_turn() -> None:
    async with rig() as one:
        session = Session(one)
        home = (await session.turn()).headers["x-moongate-instance"]
        await one.settle()
        one.forget_questions()
        for _ in range(4):
            answer = await session.turn()
            assert answer.headers["x-moongate-instance"] == home
            assert answer.headers["x-moongate-reason"] == "device_prefix"
            assert not is_wrong(answer)
        assert one.master.queries == []
        assert (await one.index())["lookups"] == one.pooling.counts.lookups <= 1


@pytest.mark.parametrize("kind", ["mooncake", "memory"])
async def test_when_its_home_dies_a_session_goes_on_from_the_pool(kind: str) -> None:
    async with rig(kind=kind) as one:
        session = Session(one)
        for _ in range(3):
            answer = await session.turn()
        home = one.engine(answer)
        (survivor,) = one.others(home)
        await one.settle()
        await one.crash(home)
        one.forget_questions()
        turn = await session.turn(words=20)
        assert one.engine(turn) is survivor
        assert turn.headers["x-moongate-reason"] == "pool_prefix"
        assert said(turn, "pool") == external_hits(survivor) == cached(turn) > 1_000
        assert said(turn, "device") == 0
        metric = one.gateway.metric
        assert await metric("moongate_prompt_tokens_total", source="pool") == said(turn, "pool")
        if kind == "mooncake":
            assert sum(map(len, one.master.queries)) == one.pooling.counts.asked_keys <= 48
            assert len(one.master.queries) <= 4


async def test_a_dry_run_shows_what_the_pool_has_and_what_a_fetch_costs() -> None:
    async with rig(3) as one:
        session = Session(one)
        answer = await session.turn()
        home = answer.headers["x-moongate-instance"]
        await one.settle()
        await one.crash(one.engine(answer))
        candidates = await one.explain(session.messages)
        assert home not in candidates
        for candidate in candidates.values():
            blocks = answer.json()["usage"]["prompt_tokens"] // SIZE
            assert candidate["overlap_tokens"]["pool"] == blocks * SIZE
            assert candidate["cost_terms_ms"]["fetch"] >= 5.0
            assert "fetch_disk" not in candidate["cost_terms_ms"]


async def test_copies_on_a_disk_cost_more_and_are_told() -> None:
    async with rig() as one:
        session = Session(one)
        answer = await session.turn()
        await one.settle()
        one.master.disk_keys.update(one.pool)
        await one.crash(one.engine(answer))
        (candidate,) = (await one.explain(session.messages)).values()
        assert candidate["cost_terms_ms"]["fetch_disk"] > 5.0
        turn = await session.turn(words=10)
        assert said(turn, "pool-disk") == said(turn, "pool") == cached(turn) > 0


async def test_what_engines_announced_is_credited_unasked_at_a_discount() -> None:
    async with rig() as one:
        session = Session(one)
        await session.turn()
        answer = await session.turn()
        await one.settle()
        await until(lambda: next(iter(one.pooling._spaces.values())).directory.hints > 0)
        one.forget_questions()
        candidates = await one.explain(session.messages)
        assert one.master.queries == []
        other = candidates["b" if answer.headers["x-moongate-instance"] == "a" else "a"]
        tokens = other["overlap_tokens"]["pool"]
        assert tokens == answer.json()["usage"]["prompt_tokens"] // SIZE * SIZE
        # The rest of them is expected to be computed.
        prompt_tokens = int(answer.headers["x-moongate-prompt-tokens"])
        rate = one.gateway.core.fleet.tokens_per_ms
        uncached_ms = other["cost_terms_ms"]["prefill"]
        assert uncached_ms * rate > prompt_tokens - pooling_module.HINT_WEIGHT * tokens - SIZE


async def test_a_popular_beginning_does_not_hide_how_much_more_there_is() -> None:
    """What was just asked of one session says nothing of another that begins alike."""
    async with rig(3) as one:
        shared = {"role": "system", "content": text(7)}
        long = Session(one, 1, messages=[shared])
        answer = await long.turn()
        await long.turn()
        await one.settle()
        await one.crash(one.engine(answer))
        await asyncio.sleep(0)
        for seed in (2, 3):
            await Session(one, seed, messages=[dict(shared)]).turn()
        turn = await long.turn(words=10)
        assert not is_wrong(turn)
        assert cached(turn) > 2 * said(await Session(one, 4, messages=[shared]).turn(), "device")


async def test_a_salt_isolates_a_prompt_in_the_pool() -> None:
    async with rig() as one:
        plain = await Session(one, 1).turn()
        salted = Session(one, 2, {"cache_salt": "tenant a"})
        await salted.turn()
        await one.settle()
        other_salt = {"cache_salt": "tenant b"}
        await one.crash(one.engine(plain))
        messages = salted.messages
        survivor = "a" if one.engines[1] is one.engine(plain) else "b"
        assert (await one.explain(messages, **other_salt))[survivor]["overlap_tokens"]["pool"] == 0
        assert (await one.explain(messages))[survivor]["overlap_tokens"]["pool"] == 0
        turn = await salted.turn(words=10)
        assert not is_wrong(turn)
        assert cached(turn) > 300


async def test_an_instance_that_is_told_not_to_use_the_pool_has_nothing_from_it() -> None:
    async with contextlib.AsyncExitStack() as stack:
        pool = MemoryPool(1 << 26)
        engines = [SimEngine(CONFIG, pool), SimEngine(CONFIG, pool), SimEngine(CONFIG, pool)]
        master = PoolMaster(pool)
        await master.start()
        stack.push_async_callback(master.stop)
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
        instances = [{"id": "abc"[n], "url": engine.url} for n, engine in enumerate(engines)]
        instances[2]["pool"] = False  # type: ignore[assignment]
        gateway = await stack.enter_async_context(
            live_gateway(
                [], instances=instances,
                pool={"kind": "mooncake", "admin_url": master.url, "lookup_budget_ms": 1_000},
            )
        )  # fmt: skip
        one = Rig(gateway, engines, pool, master)
        await until(lambda: one.pooling.health.is_up)
        for seed in range(3):  # each announces how it names blocks
            answer = await Session(one, seed).turn()
        session = Session(one, 9)
        answer = await session.turn()
        await one.settle()
        if one.engine(answer) is not engines[2]:
            await one.crash(one.engine(answer))
        candidates = await one.explain(session.messages)
        assert candidates["c"]["overlap_tokens"]["pool"] == 0
        members = {member["instance"]: member for member in (await one.index())["members"]}
        assert members["c"]["unknown_because"] == "the engine uses no pool"
        assert members["a"]["unknown_because"] is None
        assert members["a"]["key_space"] == members["b"]["key_space"]


@pytest.mark.parametrize(("is_gone", "epochs"), [(False, [0, 1]), (True, [2, 3])])
async def test_a_refused_connection_is_a_restart_and_a_late_answer_to_a_check_is_none(
    monkeypatch: pytest.MonkeyPatch, is_gone: bool, epochs: list[int]
) -> None:
    async def fail(_: EngineApi) -> None:
        raise EngineCallFailed("/health", is_gone=is_gone)

    async with rig(2) as one:
        fleet, members = one.gateway.core.fleet, one.pooling._members
        with monkeypatch.context() as failing:
            failing.setattr(EngineApi, "check_health", fail)
            await until(lambda: not any(i.is_healthy for i in fleet))
        await until(lambda: all(i.is_healthy for i in fleet))
        assert sorted(member.epoch for member in members.values()) == epochs


async def test_models_with_other_hash_seeds_have_key_spaces_of_their_own() -> None:
    other = dataclasses.replace(CONFIG, model="n", hash_seed="mine")
    configs = [CONFIG, CONFIG, other, other]
    async with rig(configs=configs, pool={"hash_seeds": ["mine"]}) as one:
        sessions = [Session(one, 1), Session(one, 1, {"model": "n"})]
        answers = [await session.turn() for session in sessions]
        await one.settle()
        members = (await one.index())["members"]
        assert len({member["key_space"] for member in members}) == 2
        for session, answer in zip(sessions, answers, strict=True):
            await one.crash(one.engine(answer))
            one.forget_questions()
            turn = await session.turn(words=10)
            assert not is_wrong(turn)
            assert said(turn, "pool") == cached(turn) > 300
            assert len(one.master.queries) == 1, "one key space is asked"


async def test_ranks_find_each_other_s_blocks() -> None:
    config = dataclasses.replace(CONFIG, data_parallel_size=2)
    async with rig(config=config) as one:
        session = Session(one)
        answer = await session.turn()
        await one.settle()
        await one.crash(one.engine(answer))
        turn = await session.turn(words=10)
        assert turn.headers["x-moongate-instance"][0] != answer.headers["x-moongate-instance"][0]
        assert turn.headers["x-moongate-reason"] == "pool_prefix"
        assert said(turn, "pool") == cached(turn) > 300


# --- what is lost ---------------------------------------------------------------------------------


async def test_an_embedded_segment_is_lost_with_its_engine() -> None:
    config = dataclasses.replace(CONFIG, pool_segment=PoolSegment.EMBEDDED)
    async with rig(config=config) as one:
        session = Session(one)
        await session.turn()
        answer = await session.turn()
        await one.settle()
        await one.crash(one.engine(answer))
        await until(lambda: len(one.pool) == 0)
        turn = await session.turn(words=10)
        assert (said(turn, "pool"), cached(turn)) == (0, 0)


async def test_a_pool_that_is_too_small_is_not_counted_on() -> None:
    # Devices of 2,400 tokens and a pool of 19,000, for sessions of 24,000 at the end.
    profile = dataclasses.replace(PROFILE, blocks=150, max_model_len_tokens=2_300)
    config = dataclasses.replace(CONFIG, profile=profile)
    async with rig(config=config, pool_bytes=19_000 * 100) as one:
        sessions = [Session(one, seed) for seed in range(12)]
        answers = [await session.turn(words=40) for _ in range(7) for session in sessions]
        late = answers[36:]
        wrong = [answer for answer in late if is_wrong(answer)]
        assert one.pool.evicted_keys > 0
        assert any(said(answer, "pool") for answer in late), "nothing was fetched"
        assert len(wrong) <= 0.05 * len(late)
        assert one.pooling.health.counts.restarts == 0


# --- C76: a master that is restarted --------------------------------------------------------------


async def test_c76_what_a_restarted_master_has_lost_earns_no_credit_and_fails_no_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with rig(3) as one:
        session = Session(one)
        for _ in range(4):
            answer = await session.turn(words=400)
        await one.settle(keys=200)
        await one.crash(one.engine(answer))

        async def pool_tokens() -> int:
            candidates = await one.explain(session.messages)
            return max(int(c["overlap_tokens"]["pool"]) for c in candidates.values())

        assert await pool_tokens() >= 200 * SIZE
        # The gateway has seen that the master counts.
        await until(lambda: (state := one.pooling.health.state) and (state.key_count or 0) >= 200)
        await one.master.restart()
        began = time.monotonic()
        while await pool_tokens():
            assert time.monotonic() - began < 10.0
            await asyncio.sleep(0.05)
        await until(lambda: one.pooling.health.counts.restarts == 1)
        assert "the pool was restarted" in caplog.text

        turn = await session.turn(words=10)
        assert (said(turn, "pool"), cached(turn)) == (0, 0)
        await one.settle(keys=200)
        assert await pool_tokens() >= 200 * SIZE, "it comes back as keys do"


async def test_c76_a_miss_is_enough_to_stop_the_credit() -> None:
    async with rig(3) as one:
        session = Session(one)
        await session.turn()
        answer = await session.turn()
        await one.settle()
        await one.crash(one.engine(answer))
        candidates = await one.explain(session.messages)
        assert all(c["overlap_tokens"]["pool"] > 0 for c in candidates.values())
        one.pool.clear()  # unnoticed, and the answer just given counts for two seconds
        turn = await session.turn(words=10)
        assert cached(turn) == 0
        if said(turn, "pool"):
            assert one.pooling.counts.shortfalls == 1
        assert not is_wrong(await session.turn(words=10))


# --- C77: a master that is gone, or silent --------------------------------------------------------


@pytest.mark.parametrize("is_silent", [False, True])
async def test_c77_without_a_master_serving_goes_on_and_it_is_found_again(
    monkeypatch: pytest.MonkeyPatch, *, is_silent: bool
) -> None:
    waited: list[float] = []
    enrich = Pooling.enrich

    async def timed(self: Pooling, *arguments: Any) -> Any:
        began = time.monotonic()
        try:
            return await enrich(self, *arguments)
        finally:
            waited.append(time.monotonic() - began)

    monkeypatch.setattr(Pooling, "enrich", timed)
    async with rig(pool={"lookup_budget_ms": 20}) as one:
        await Session(one, 1_000).turn()  # how blocks are named is known
        waited.clear()
        asked_before = one.pooling.counts.lookups
        if is_silent:
            one.master.is_silent = True
        else:
            await one.master.stop()
        for seed in range(50):
            await Session(one, seed).turn(words=30)
        assert len(waited) == 50
        late = sorted(waited[1:])
        assert late[40] < 0.01, "most wait for nothing"
        assert one.pooling.counts.lookups - asked_before <= 3
        await until(lambda: not one.pooling.health.is_up)
        assert await one.gateway.metric("moongate_pool_up") == 0
        health = await one.gateway.client.get("/health")
        assert (health.status_code, health.json()["degraded"]) == (200, ["pool"])

        one.master.is_silent = False
        if not is_silent:
            await one.master.start()
        await until(lambda: one.pooling.health.is_up, 30.0)
        assert await one.gateway.metric("moongate_pool_up") == 1
        assert "degraded" not in (await one.gateway.client.get("/health")).json()


async def test_a_master_that_takes_longer_than_the_budget_costs_one_turn_its_budget() -> None:
    async with rig(pool={"lookup_budget_ms": 20}) as one:
        await Session(one, 1_000).turn()
        store = one.pooling._store
        assert isinstance(store, MooncakeMaster)
        look_up = store.look_up

        async def slowly(keys: Any) -> Any:
            await asyncio.sleep(0.5)
            return await look_up(keys)

        store.look_up = slowly  # type: ignore[method-assign]
        await Session(one, 1).turn()
        assert one.pooling.health.counts.overruns == 1
        await until(lambda: one.pooling.health.may_ask)
        assert one.pooling.health.is_up, "it is slow, and not down"


# --- C79: keys that are made otherwise ------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "mismatches"),
    [({}, 0), ({"cache_prefix": "team"}, 1), ({"namespace": "@store_tp:2@store_pp:1"}, 1)],
)
async def test_c79_keys_under_which_nothing_is_ever_found_are_told(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    mismatches: int,
) -> None:
    monkeypatch.setattr(pooling_module, "SAMPLE_INTERVAL_S", 0.0)
    async with rig(pool=settings, stored_within_s=0.2) as one:
        for seed in range(5):
            await Session(one, seed).turn()
        await until(lambda: not one.pooling._sampling)
        assert await one.gateway.metric("moongate_pool_key_mismatch_total") == mismatches
        members = (await one.index())["members"]
        assert all(member["keys_confirmed"] is (not mismatches) for member in members)
        assert ("under the keys that are looked for" in caplog.text) is bool(mismatches)


async def test_c79_blocks_that_no_scheme_names_are_told_and_never_credited(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = dataclasses.replace(CONFIG, hash_seed="nobody knows")
    async with rig(config=config) as one:
        for seed in range(8):
            answer = await Session(one, seed).turn()
        await until(lambda: one.pooling.counts.key_mismatches == 2)  # one a process
        members = (await one.index())["members"]
        assert all(member["key_space"] is None for member in members)
        assert all("hash_seeds" in member["unknown_because"] for member in members)
        assert "none of the known hash algorithms and seeds" in caplog.text
        assert said(answer, "pool") == 0
        assert one.master.queries == []
