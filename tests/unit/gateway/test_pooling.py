"""Asking the pool, with a clock of the test: what is asked, believed, compared and told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from moongate.gateway.driver import Driver
from moongate.gateway.pool.pool_health import HOLES_S
from moongate.gateway.pool.pooling import HINT_WEIGHT, SAMPLE_INTERVAL_S, Pooling, PromptTokens
from moongate.kvpool.digests import ALGORITHMS, DEFAULT_SEED, DigestKeys, digest_blocks
from moongate.kvpool.keys import KeyLayout, Shard
from moongate.kvpool.members import KeyRules, Member
from moongate.kvpool.memory import MemoryPool
from moongate.kvpool.store import PoolState, PoolUnavailable, Replica
from moongate.router import (
    BatchReceived,
    BlockSpace,
    InstanceAdded,
    InstanceDescribed,
    InstanceFacts,
    InstanceId,
    InstanceProbed,
    InstanceSpec,
    KeySpace,
    ModelCard,
    PoolPart,
    Prompt,
    Request,
    RequestId,
    Role,
    RouterCore,
    SourceId,
    SourceOpened,
    Tier,
    make_policy,
)
from moongate.router.blocks import hash_prompt, pack_tokens
from moongate.router.events import BlocksStored, KvEvent
from moongate.router.model import EngineHash

pytestmark = pytest.mark.asyncio

A, B = InstanceId("a"), InstanceId("b")
SIZE = 4
USUAL = KeySpace(f"m/sha256/{DEFAULT_SEED}/4")
LAYOUT = KeyLayout("m")
ADAPTER = ModelCard("ad", is_adapter=True, root="/adapters/ad")


class ScriptedPool(MemoryPool):
    """A pool that can be slow, refuse, hang after some answers, and fail in ways that are bugs."""

    def __init__(self) -> None:
        super().__init__(1 << 30)
        self.questions: list[Sequence[str]] = []
        self.answers_left: int | None = None  # then it hangs
        self.refusal: Exception | None = None
        self.states: list[PoolState | Exception] = []  # what checks say; then the truth
        self.asking = self.asking_max = 0

    async def look_up(self, keys: Sequence[str]) -> Mapping[str, Replica]:
        self.questions.append(keys)
        self.asking += 1
        self.asking_max = max(self.asking_max, self.asking)
        try:
            await asyncio.sleep(0)
            if self.refusal is not None:
                raise self.refusal
            if self.answers_left is not None:
                if self.answers_left == 0:
                    await asyncio.Event().wait()
                self.answers_left -= 1
            return await super().look_up(keys)
        finally:
            self.asking -= 1

    async def check(self) -> PoolState:
        if not self.states:
            return await super().check()
        state = self.states.pop(0)
        if isinstance(state, Exception):
            raise state
        return state


@dataclass
class World:
    """A core with instances, and a pooling before a scripted pool."""

    pool: ScriptedPool = field(default_factory=ScriptedPool)
    rules: KeyRules = field(default_factory=KeyRules)
    budget_s: float = 5.0
    now: float = 100.0
    batches: dict[InstanceId, int] = field(default_factory=dict)
    looked_up_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.core = RouterCore(make_policy("kv_cost"), lambda n: n - 1)
        self.driver = Driver(self.core, lambda: self.now)
        self.driver.on_probe = lambda _: None
        self.pooling = Pooling(
            self.pool, self.driver, lambda: self.now, budget_s=self.budget_s, rules=self.rules,
            on_lookup=self.looked_up_s.append, stored_within_s=0.0,
        )  # fmt: skip

    def join(
        self, *names: InstanceId, role: Role = Role.BOTH, root: str | None = "/models/m"
    ) -> None:
        for name in names:
            cards = (ModelCard("m", root=root), ADAPTER)
            self.driver.handle(InstanceAdded(InstanceSpec(name, role)))
            self.driver.handle(InstanceDescribed(name, InstanceFacts(cards, SIZE)))
            self.driver.handle(InstanceProbed(name, is_healthy=True))
            self.driver.handle(SourceOpened(SourceId(name), has_replay=False))
            self.pooling.describe(name, root, SIZE, None)

    def announce(self, name: InstanceId, *events: KvEvent) -> None:
        sequence = self.batches.get(name, 0)
        self.batches[name] = sequence + 1
        digest = f"{name}{sequence}".encode()
        self.driver.handle(BatchReceived(SourceId(name), sequence, events, digest))

    async def ask(self, known: PromptTokens, model: str = "m") -> Mapping[KeySpace, PoolPart]:
        """Return what the pool adds to a request."""
        request = Request(RequestId("r"), model, known.prompt)
        return (await self.pooling.enrich(request, known)).pool

    async def sampled(self) -> None:
        await asyncio.gather(*self.pooling._sampling)

    def index(self, name: InstanceId = A) -> dict[str, Any]:
        members: Any = self.pooling.as_json()["members"]
        (member,) = (m for m in members if m["instance"] == name)
        return dict(member)


@contextlib.asynccontextmanager
async def world(*names: InstanceId, **options: Any) -> AsyncIterator[World]:
    """Yield one whose instances have shown that they name blocks as usual."""
    one = World(**options)
    # Not started: checks are the test's to make.
    one.driver.on_batch, one.driver.on_pooled = one.pooling._observe, one.pooling._note_pooled
    try:
        await one.pooling.health.check()
        one.join(*names)
        for name in names:
            one.announce(name, stored(tokens(1, 9_000), digests(tokens(1, 9_000))))
        yield one
    finally:
        one.driver.close()
        await one.pooling.close()


def tokens(blocks: int, first: int = 0) -> list[int]:
    return list(range(first, first + blocks * SIZE))


def digests(
    ids: list[int], *, first: DigestKeys | None = None, every: DigestKeys | None = None,
    algorithm: str = "sha256", seed: str = DEFAULT_SEED,
) -> list[bytes]:  # fmt: skip
    root = ALGORITHMS[algorithm](seed)
    return digest_blocks(algorithm, root, pack_tokens(ids), SIZE, first, every)


def stored(
    ids: list[int], names: Sequence[EngineHash], parent: EngineHash | None = None,
    tier: Tier = Tier.DEVICE,
) -> BlocksStored:  # fmt: skip
    return BlocksStored(tuple(names), parent, pack_tokens(ids), SIZE, tier)


def prompt(
    ids: list[int], *, salt: str | None = None, card: ModelCard | None = None
) -> PromptTokens:
    """Return a prompt of these ids and one more."""
    lora = card.name if card is not None else None
    space = BlockSpace(SIZE, lora)
    packed = pack_tokens([*ids, 1])
    known = Prompt(len(ids) + 1, {space: hash_prompt(space, packed, salt)})
    return PromptTokens(known, lambda: packed, salt, card)


def fill(pool: MemoryPool, made: Sequence[bytes], layout: KeyLayout = LAYOUT) -> None:
    for digest in made:
        for key in layout.keys(digest):
            pool.put(key, 80, "10.0.0.1:15000")


# --- asking ---------------------------------------------------------------------------------------


async def test_what_the_pool_has_becomes_part_of_the_request() -> None:
    async with world(A, B) as one:
        ids = tokens(10)
        fill(one.pool, digests(ids)[:7])
        part = PoolPart(tokens=28, bytes_per_token=20.0, host="10.0.0.1")
        assert await one.ask(prompt(ids)) == {USUAL: part}
        assert len(one.pool.questions) == 1, "both are of one key space"
        assert len(one.looked_up_s) == 1


async def test_the_last_token_is_always_computed() -> None:
    async with world(A) as one:
        ids = tokens(3)
        fill(one.pool, digests(ids))
        whole = PromptTokens(
            Prompt(12, {BlockSpace(SIZE): hash_prompt(BlockSpace(SIZE), pack_tokens(ids))}),
            lambda: pack_tokens(ids),
        )
        assert (await one.ask(whole))[USUAL].tokens == 8
        assert await one.ask(prompt([])) == {}


async def test_an_answer_is_good_for_two_seconds_and_then_a_place_to_start_from() -> None:
    async with world(A) as one:
        ids = tokens(100)
        fill(one.pool, digests(ids)[:50])
        for now, lookups in ((100.0, 1), (101.9, 1), (102.0, 2)):
            one.now = now
            one.pool.questions.clear()
            assert (await one.ask(prompt(ids)))[USUAL].tokens == 200
            assert one.pooling.counts.lookups == lookups
        assert len(one.pool.questions) == 1


async def test_what_one_session_was_told_is_not_believed_of_another() -> None:
    async with world(A) as one:
        shared = tokens(10)
        short, long = [*shared, *tokens(5, 500)], [*shared, *tokens(30, 700)]
        fill(one.pool, digests(shared))
        assert (await one.ask(prompt(short)))[USUAL].tokens == 40
        fill(one.pool, digests(long))
        assert (await one.ask(prompt(long)))[USUAL].tokens == 160


async def test_what_was_computed_since_is_asked_for_again() -> None:
    async with world(A) as one:
        ids = tokens(10)
        fill(one.pool, digests(ids)[:4])
        await one.ask(prompt(ids))
        one.pooling.answered(A, prompt(ids), 0, 16)
        fill(one.pool, digests(ids))
        assert (await one.ask(prompt(ids)))[USUAL].tokens == 40


async def test_a_prompt_that_is_not_known_exactly_is_not_looked_up() -> None:
    async with world(A) as one:
        known = prompt(tokens(5))
        inexact = Prompt(known.prompt.token_count, known.prompt.chains, is_exact=False)
        assert await one.ask(PromptTokens(inexact, known.tokens)) == {}
        assert one.pool.questions == []


async def test_a_salt_and_an_adapter_are_in_the_keys() -> None:
    async with world(A) as one:
        ids = tokens(6)
        salt, lora = ("cache_salt", "s"), ("lora", "ad", "/adapters/ad")
        fill(one.pool, digests(ids, first=(salt,))[:2])
        fill(one.pool, digests(ids, first=(lora,), every=(lora,))[:3])
        fill(one.pool, digests(ids, first=(lora, salt), every=(lora,))[:4])
        assert await one.ask(prompt(ids)) == {}
        assert (await one.ask(prompt(ids, salt="s")))[USUAL].tokens == 8
        assert await one.ask(prompt(ids, salt="t")) == {}
        assert (await one.ask(prompt(ids, card=ADAPTER), "ad"))[USUAL].tokens == 12
        assert (await one.ask(prompt(ids, salt="s", card=ADAPTER), "ad"))[USUAL].tokens == 16


# --- hints ----------------------------------------------------------------------------------------


async def test_what_was_announced_counts_at_a_discount_for_ten_seconds_where_nothing_is_asked() -> (
    None
):
    async with world(A, B) as one:
        ids = tokens(6)
        made = digests(ids)
        one.announce(A, stored(ids, made))  # its device covers the turn
        one.announce(A, stored(ids[:16], made[:4], tier=Tier.POOL))
        part = (await one.ask(prompt(ids)))[USUAL]
        assert (part.tokens, part.weight) == (16, HINT_WEIGHT)
        one.now += 9.9
        assert USUAL in await one.ask(prompt(ids))
        one.now += 0.1
        assert await one.ask(prompt(ids)) == {}
        assert one.pool.questions == []


async def test_what_was_announced_is_verified_where_it_can_matter() -> None:
    async with world(A) as one:
        ids = tokens(6)
        made = digests(ids)
        one.announce(A, stored(ids[:16], made[:4]))
        one.announce(A, stored(ids[:16], made[:4], tier=Tier.POOL))
        fill(one.pool, made[:2])
        part = (await one.ask(prompt(ids)))[USUAL]
        assert (part.tokens, part.weight) == (8, 1.0)
        assert one.index()["announced_blocks"] == 2


# --- key spaces -----------------------------------------------------------------------------------


def random_root(ids: list[int], seed: str) -> BlocksStored:
    return stored(ids, digests(ids, algorithm="xxhash", seed=seed))


async def test_key_spaces_are_asked_at_the_same_time() -> None:
    async with world() as one:
        one.join(A, B)
        ids = tokens(6)
        one.announce(A, random_root(ids, "chance a"))
        one.announce(B, random_root(ids, "chance b"))
        fill(one.pool, digests(ids, algorithm="xxhash", seed="chance a")[:3])
        fill(one.pool, digests(ids, algorithm="xxhash", seed="chance b")[:5])
        known = prompt([*ids, *tokens(4, 800)])
        assert {s.name: p.tokens for s, p in (await one.ask(known)).items()} == {
            "m/xxhash/a#0/4": 12,
            "m/xxhash/b#1/4": 20,
        }
        assert one.pool.asking_max == 2
        one.driver.handle(InstanceProbed(B, is_healthy=False, is_gone=True))
        one.now += 5.0
        assert len(await one.ask(known)) == 1, "nobody is there who would name them so"
        other = prompt(tokens(6, 800))
        assert await one.ask(other) == {}, "its first block was announced by nobody"


async def test_a_key_space_is_kept_as_long_as_a_member_has_it() -> None:
    async with world() as one:
        one.join(A, B)
        ids = tokens(6)
        for name in (A, B):
            one.announce(name, random_root(ids, f"chance {name}"))
        assert {s.name for s in one.pooling._spaces} == {"m/xxhash/a#0/4", "m/xxhash/b#1/4"}
        one.pooling.restarted(A)
        one.pooling.describe(A, "/models/m", SIZE, None)
        assert {s.name for s in one.pooling._spaces} == {"m/xxhash/b#1/4"}
        one.announce(A, random_root(ids, "chance 3"))
        assert {s.name for s in one.pooling._spaces} == {"m/xxhash/a#2/4", "m/xxhash/b#1/4"}
        one.pooling.forget(A)
        one.pooling.forget(B)
        assert one.pooling._spaces == {}
        one.pooling.describe(A, "/models/m", SIZE, None)
        one.announce(A, random_root(ids, "chance 4"))
        assert {s.name for s in one.pooling._spaces} == {"m/xxhash/a#3/4"}


async def test_what_another_process_names_is_not_mixed_with_what_its_predecessor_named() -> None:
    async with world() as one:
        one.join(A)
        ids = tokens(6)
        one.announce(A, random_root(ids, "chance 1"))
        known = prompt([*ids, *tokens(4, 800)])
        fill(one.pool, digests(ids, algorithm="xxhash", seed="chance 1")[:5])
        assert [part.tokens for part in (await one.ask(known)).values()] == [20]
        # A publisher that begins anew, without anybody having seen the first one go.
        again = (random_root(ids, "chance 2"),)
        one.driver.handle(BatchReceived(SourceId(A), 0, again, b"of another process"))
        assert one.index()["key_space"] == "m/xxhash/a#1/4"
        assert await one.ask(known) == {}
        fill(one.pool, digests(ids, algorithm="xxhash", seed="chance 2")[:3])
        one.now += 5.0
        assert [part.tokens for part in (await one.ask(known)).values()] == [12]


async def test_peers_are_looked_at_only_when_one_has_just_shown_its_scheme(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [InstanceId(f"i{number}") for number in range(30)]
    async with world() as one:
        one.join(*names)
        presumed: list[InstanceId] = []
        really_presume = one.pooling._presume

        def presume(member: Member) -> None:
            presumed.append(member.instance_id)
            really_presume(member)

        monkeypatch.setattr(one.pooling, "_presume", presume)
        one.announce(names[0])
        one.announce(names[0], stored(tokens(1), [12_345]))
        assert presumed == []
        one.announce(names[1], stored(tokens(1), digests(tokens(1))))
        assert presumed == names
        one.announce(names[1], stored(tokens(1, 50), digests(tokens(1, 50))))
        assert presumed == names
        assert one.index(names[2])["key_space"] == USUAL.name


async def test_one_is_presumed_to_name_blocks_as_its_peers_until_it_shows_otherwise() -> None:
    async with world(A) as one:
        one.join(B)
        assert one.index(B)["key_space"] == USUAL.name
        one.announce(B, stored(tokens(1), [b"another"]))
        assert one.index(B)["key_space"] is None
        instance = one.core.fleet.find(B)
        assert instance is not None
        assert instance.key_space is None


async def test_a_scheme_that_an_instance_says_it_has_is_believed_until_it_shows_otherwise() -> None:
    async with world() as one:
        one.join(A)
        said = {"hash_algorithm": "sha256_cbor", "hash_seed": 7}
        one.pooling.describe(A, "/models/m", SIZE, None, said)
        assert one.index()["key_space"] == "m/sha256_cbor/7/4"
        one.announce(A, stored(tokens(1), digests(tokens(1))))
        assert one.index()["key_space"] == USUAL.name
        one.pooling.describe(A, "/models/m", SIZE, None, {"hash_algorithm": "md5", "hash_seed": 7})
        assert one.index()["key_space"] == USUAL.name


@pytest.mark.parametrize(
    ("said", "because"),
    [
        ({"pool_master": "h:1", "pool_prefix": "ours"}, None),
        ({}, None),
        (
            {"pool_master": "h:2"},
            "it uses another pool: its pool_master is h:2, and pool.master is h:1",
        ),
        (
            {"pool_master": "h:1", "pool_prefix": "theirs"},
            "it uses another pool: its pool_prefix is theirs, and pool.cache_prefix is ours",
        ),
    ],
)
async def test_who_announces_another_pool_is_left_out(
    said: dict[str, str], because: str | None
) -> None:
    async with world(rules=KeyRules(cache_prefix="ours", master="h:1")) as one:
        one.join(A)
        scheme = {"hash_algorithm": "sha256", "hash_seed": "0"}
        one.pooling.describe(A, "/models/m", SIZE, True, {**scheme, **said})
        assert one.index()["unknown_because"] == because
        assert one.index()["key_space"] == ("m/sha256/0/4" if because is None else None)
    async with world() as one:
        one.join(A)
        one.pooling.describe(A, "/models/m", SIZE, True, {**scheme, **said})
        assert one.index()["unknown_because"] is None, "nothing is given to compare it with"


async def test_announced_sizes_are_the_parts_of_a_block_until_they_are_learned() -> None:
    async with world() as one:
        one.join(A)
        said = {"hash_algorithm": "sha256", "hash_seed": DEFAULT_SEED}
        sizes = {"tensor_parallel": 4, "pipeline_parallel": 2}
        one.pooling.describe(A, "/models/m", SIZE, True, {**said, **sizes})
        assert one.index()["shards"] == 8
        ids = tokens(6)
        fill(one.pool, digests(ids)[:5])  # of the first rank only
        assert await one.ask(prompt(ids)) == {}
        one.pooling.answered(A, prompt(ids), 0, 0)
        await one.sampled()
        assert one.index()["shards"] == 1
        one.pooling.describe(A, "/models/m", SIZE, True, {**said, **sizes})
        assert one.index()["shards"] == 1


async def test_a_model_whose_name_has_a_comma_can_t_be_asked_for() -> None:
    async with world() as one:
        one.join(A, root="/models/a,b")
        one.announce(A, stored(tokens(1), digests(tokens(1))))
        assert one.index()["key_space"] is None
        assert one.index()["unknown_because"] == (
            "the name of its model's directory has a comma, at which keys are split: a,b"
        )


async def test_a_restarted_instance_is_described_anew() -> None:
    async with world(A) as one:
        one.pooling.restarted(A)
        one.pooling.restarted(InstanceId("unknown"))
        one.pooling.describe(A, "/models/m", 8, None)
        assert one.index()["key_space"] == f"m/sha256/{DEFAULT_SEED}/8"
        one.pooling.forget(A)
        assert one.pooling.as_json()["members"] == []
        assert await one.ask(prompt(tokens(5))) == {}


async def test_it_is_said_why_an_instance_gets_nothing_from_the_pool() -> None:
    async with world() as one:
        one.join(A, root=None)
        assert "loaded its model" in one.index()["unknown_because"]
        one.pooling.describe(A, "/models/m", None, None)
        assert one.index()["unknown_because"] == "it has announced no first block of a prompt yet"
        one.pooling.restarted(A)
        assert "block size" in one.index()["unknown_because"]
        one.pooling.describe(A, "/models/m", SIZE, True)
        for first in (0, 100, 200):
            assert one.pooling.counts.key_mismatches == 0
            one.announce(A, stored(tokens(1, first), [12_345 + first]))
        assert "3 tried" in one.index()["unknown_because"]
        assert one.pooling.counts.key_mismatches == 1
        one.announce(A, stored(tokens(1, 300), [99]))
        assert one.pooling.counts.key_mismatches == 1, "said once"
        one.pooling.describe(A, "/models/m", SIZE, False)
        assert one.index()["unknown_because"] == "the engine uses no pool"


# --- a pool that doesn't answer -------------------------------------------------------------------


async def test_what_was_seen_within_the_budget_counts() -> None:
    async with world(A, budget_s=0.05) as one:
        ids = tokens(400)
        fill(one.pool, digests(ids)[:380])
        one.pool.answers_left = 1
        part = (await one.ask(prompt(ids)))[USUAL]
        assert 4 * 300 < part.tokens < 4 * 380
        assert one.pooling.health.counts.overruns == 1
        assert not one.pooling.health.may_ask
        assert one.index()["known_prefixes"] == 0, "it is no answer"
        one.pool.answers_left = None
        await one.pooling.health.check()
        assert (await one.ask(prompt(ids)))[USUAL].tokens == 4 * 380


async def test_until_it_has_said_that_it_is_well_nobody_waits_for_it() -> None:
    async with world(A, budget_s=0.05) as one:
        one.pool.answers_left = 0
        assert await one.ask(prompt(tokens(5))) == {}
        for first in (100, 200):
            await one.ask(prompt(tokens(5, first)))
        assert (one.pooling.counts.lookups, one.pooling.health.is_up) == (1, True)


async def test_a_refusal_means_down_and_what_is_known_stays_if_it_is_well_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with world(A) as one:
        ids = tokens(5)
        fill(one.pool, digests(ids))
        await one.ask(prompt(ids))
        one.pool.refusal = PoolUnavailable("no route")
        assert await one.ask(prompt(tokens(5, 500))) == {}
        assert not one.pooling.health.is_up
        assert await one.ask(prompt(ids)) == {}
        assert "can't be asked: no route" in caplog.text
        await one.pooling.health.check()
        assert (await one.ask(prompt(ids)))[USUAL].tokens == 20
        assert one.pooling.counts.lookups == 2


@pytest.mark.parametrize(
    "state", [PoolUnavailable("gone"), PoolState("another process", 0)], ids=["down", "restarted"]
)
async def test_all_is_forgotten_when_it_is_down_or_restarted(
    state: PoolState | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(A) as one:
        ids = tokens(5)
        fill(one.pool, digests(ids))
        await one.ask(prompt(ids))
        assert one.index()["known_prefixes"] == 1
        one.pool.states = [state]
        await one.pooling.health.check()
        assert one.index()["known_prefixes"] == 0
        is_down = isinstance(state, Exception)
        assert one.pooling.health.is_up is not is_down
        assert ("restarted" in caplog.text) is not is_down
        assert one.pooling.health.counts.restarts == (not is_down)


async def test_a_pool_that_is_down_from_the_start_is_told_once_and_checked_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = World()
    one.pool.states = [PoolUnavailable("refused")] * 3
    for _ in range(3):
        await one.pooling.health.check()
    assert caplog.text.count("does not answer") == 1
    assert one.pooling.as_json()["keys"] is None
    await one.pooling.health.check()
    assert one.pooling.health.is_up


async def test_a_check_that_fails_by_a_bug_is_not_the_last(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = World()
    one.pool.states = [RuntimeError("a bug")]
    monkeypatch.setattr(one.pooling.health, "_interval_s", 0.001)
    one.pooling.start()
    async with asyncio.timeout(5.0):
        while not one.pooling.health.is_up:
            await asyncio.sleep(0.001)
    await one.pooling.close()
    assert "could not be checked" in caplog.text


@pytest.mark.parametrize(
    ("before", "now", "has_holes"),
    [
        (PoolState("0", 5, 50, 100, 0), PoolState("0", 9, 90, 100, 0), False),
        (PoolState("0", 5, 50, 100, 0), PoolState("0", 9, 90, 100, 2), True),
        (PoolState("0", 5, 50, 100, 0), PoolState("0", 4, 40, 100, 0), True),
        (PoolState("0", 5, 50, 100, 0), PoolState("0", 5, 50, 80, 0), True),
        (PoolState("0", 5, 50, 100, 7), PoolState("1", 0, 0, 100, 0), False),
        (PoolState("0"), PoolState("0"), False),
    ],
)
async def test_keys_that_went_leave_holes_for_a_minute(
    before: PoolState, now: PoolState, *, has_holes: bool
) -> None:
    one = World()
    one.pool.states = [before, now]
    await one.pooling.health.check()
    one.now += HOLES_S
    assert not one.pooling.health.has_holes
    await one.pooling.health.check()
    assert one.pooling.health.has_holes is has_holes
    one.now += HOLES_S
    assert not one.pooling.health.has_holes


async def test_a_pool_with_holes_is_asked_for_all_of_a_short_chain() -> None:
    async with world(A) as one:
        ids = tokens(150)
        made = digests(ids)
        fill(one.pool, [*made[:70], *made[71:]])
        one.pool.states = [PoolState("0", 149, evicted_keys=1)]
        await one.pooling.health.check()
        assert (await one.ask(prompt(ids)))[USUAL].tokens == 280
        assert [len(keys) for keys in one.pool.questions] == [150]


# --- afterwards -----------------------------------------------------------------------------------


async def test_an_engine_that_got_less_than_was_there_is_counted_and_no_more_is_believed() -> None:
    async with world(A) as one:
        ids = tokens(10)
        fill(one.pool, digests(ids))
        await one.ask(prompt(ids))
        one.pooling.answered(A, prompt(ids), 40, 36)
        one.pooling.answered(A, prompt(ids), 40, None)
        assert (one.pooling.counts.shortfalls, one.index()["known_prefixes"]) == (0, 1)
        one.pooling.answered(A, prompt(ids), 40, 35)
        assert (one.pooling.counts.shortfalls, one.index()["known_prefixes"]) == (1, 0)
        one.pooling.answered(InstanceId("unknown"), prompt(ids), 40, 0)
        one.pooling.answered(A, prompt([]), 40, 0)
        assert one.pooling.counts.shortfalls == 1


async def test_c78_the_parts_of_a_block_are_learned_from_what_an_engine_has_just_stored() -> None:
    async with world(A) as one:
        ids = tokens(10)
        four = KeyLayout("m", [Shard(tp=rank) for rank in range(4)])
        made = digests(ids)
        fill(one.pool, made, four)
        one.pooling.answered(A, prompt(ids), 0, 0)
        await one.sampled()
        assert (one.index()["shards"], one.index()["keys_confirmed"]) == (4, True)
        del one.pool._replicas[four.key(Shard(tp=2), made[5])]
        part = (await one.ask(prompt(ids)))[USUAL]
        assert (part.tokens, part.bytes_per_token) == (5 * SIZE, 80.0)


async def test_parts_that_the_operator_named_are_not_learned() -> None:
    two = [Shard(), Shard(tp=1)]
    async with world(A, rules=KeyRules(shards=two)) as one:
        ids = tokens(3)
        fill(one.pool, digests(ids), KeyLayout("m", [*two, Shard(tp=2)]))
        one.pooling.answered(A, prompt(ids), 0, 0)
        await one.sampled()
        await one.ask(prompt(ids))
        assert len(one.pool.questions[-1]) == 6


@pytest.mark.parametrize("name", ["{digest}_0_k", "team@" + "{key}", "{model}@{digest}"])
async def test_c79_keys_of_another_making_are_told_within_a_minute_of_traffic(name: str) -> None:
    async with world(A) as one:
        began, ids = one.now, tokens(5)
        for digest in digests(ids):
            key = LAYOUT.key(Shard(), digest)
            one.pool.put(name.format(digest=digest.hex(), key=key, model="m"), 10)
        while one.pooling.counts.key_mismatches == 0:
            one.pooling.answered(A, prompt(ids), 0, 0)
            await one.sampled()
            one.now += 1.0
        assert one.now - began <= 60.0
        assert len(one.pool.questions) == 3
        assert one.index()["keys_confirmed"] is False


async def test_a_block_is_looked_for_every_twenty_seconds_and_one_that_is_there_is_enough() -> None:
    async with world(A) as one:
        ids = tokens(5)
        for is_there in (False, False, True, False, False):
            one.pool.clear()
            fill(one.pool, digests(ids)[:1] if is_there else [])
            for _ in range(3):
                one.pooling.answered(A, prompt(ids), 0, 0)
            await one.sampled()
            one.now += SAMPLE_INTERVAL_S
        assert len(one.pool.questions) == 5
        assert one.pooling.counts.key_mismatches == 0
        assert one.index()["keys_confirmed"] is True


async def test_a_pool_that_evicts_proves_nothing_against_keys_that_were_right() -> None:
    async with world(A) as one:
        ids = tokens(5)
        fill(one.pool, digests(ids))
        for _ in range(6):
            one.pooling.answered(A, prompt(ids), 0, 0)
            await one.sampled()
            one.now += SAMPLE_INTERVAL_S
            one.pool.clear()
            evicted = int(one.now)
            one.pool.states = [PoolState("0", 0, 0, 100, evicted)]
            await one.pooling.health.check()
        assert one.pooling.counts.key_mismatches == 0


async def test_nothing_is_looked_for_of_who_stores_nothing() -> None:
    async with world() as one:
        one.join(A, role=Role.DECODE)
        one.announce(A, stored(tokens(1), digests(tokens(1))))
        one.pooling.answered(A, prompt(tokens(5)), 0, 0)
        assert one.pooling._sampling == set()


async def test_a_salted_prompt_or_one_whose_keys_can_t_be_told_is_no_sample() -> None:
    async with world() as one:
        one.join(A)
        one.announce(A, random_root(tokens(5), "chance"))
        one.pooling.answered(A, prompt(tokens(5), salt="s"), 0, 0)
        assert one.pooling._sampling == set()
        one.pooling.answered(A, prompt(tokens(5, 500)), 0, 0)
        await one.sampled()
        assert one.pool.questions == []


async def test_a_sample_of_a_pool_that_does_not_answer_says_nothing() -> None:
    async with world(A) as one:
        one.pool.refusal = PoolUnavailable("gone")
        for _ in range(4):
            one.pooling.answered(A, prompt(tokens(5)), 0, 0)
            await one.sampled()
            one.now += SAMPLE_INTERVAL_S
        assert one.pooling.counts.key_mismatches == 0
        assert one.pooling.health.is_up
