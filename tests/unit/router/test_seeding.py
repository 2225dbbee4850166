"""Hot prefixes: what is seeded onto whom, and what keeps it within its bounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import pytest
from home_policy import Home
from hypothesis import given
from hypothesis import strategies as st

from moongate.router import (
    FailureKind,
    Holder,
    InstanceDescribed,
    InstanceId,
    InstancePooled,
    KeySpace,
    Outcome,
    PoolChecked,
    PoolPart,
    Request,
    RequestArrived,
    RequestFailed,
    RequestFinished,
    RequestFirstByte,
    RequestId,
    RouterCore,
    Seed,
    SeedingEnded,
    SeedingLimits,
    SourceOpened,
    make_policy,
)
from moongate.router.invariants import check
from moongate.router.model import BlockHash, BlockSpace
from moongate.router.seeding import (
    DEMAND_S,
    RECENT_S,
    Demand,
    Running,
    Seeder,
    Site,
    find_target,
)

from .builders import MODEL, SOURCE_A, A, B, C, add, batch, facts, feed, last_of_n, prompt, stored

HA, HB, HC = Holder(A), Holder(B), Holder(C)
LIMITS = SeedingLimits(
    at_once_max=2, per_minute_max=3, demand_per_s_min=0.1, busy_requests=2, prefix_tokens_min=4
)
SPACE_NAME = KeySpace("k")

# --- the decision ---------------------------------------------------------------------------------

BUSY = Site(HA, lacking_tokens=0, pooled_tokens=0, busyness=2.0, queue_ms=0, fetch_ms=9, kv_use=0.5)
IDLE = Site(HB, lacking_tokens=8, pooled_tokens=8, busyness=0.0, queue_ms=0, fetch_ms=9, kv_use=0.5)


def test_an_idle_instance_is_seeded_when_the_only_holder_is_busy() -> None:
    assert find_target([BUSY, IDLE], 0.1, LIMITS) == IDLE


def test_a_holder_is_busy_too_when_its_queue_is_longer_than_a_fetch() -> None:
    waiting = BUSY._replace(busyness=1.0, queue_ms=10.0)
    assert find_target([waiting, IDLE], 0.1, LIMITS) == IDLE
    assert find_target([waiting._replace(queue_ms=9.0), IDLE], 0.1, LIMITS) is None


@pytest.mark.parametrize(
    "sites",
    [
        [],
        [IDLE],  # nobody has it: whoever comes first computes it
        [BUSY],
        [BUSY._replace(busyness=1.0), IDLE],
        [BUSY, IDLE._replace(holder=HC, lacking_tokens=3), IDLE],  # an idle holder, but for a rest
        [BUSY, IDLE._replace(pooled_tokens=3)],
        [BUSY, IDLE._replace(kv_use=0.71)],
        [BUSY, IDLE._replace(kv_use=None)],
        [BUSY, IDLE._replace(is_barred=True)],
        [BUSY, IDLE._replace(is_seeded=True)],
        [BUSY, IDLE._replace(busyness=2.0)],
        [BUSY, IDLE._replace(queue_ms=10.0)],
        [BUSY._replace(busyness=1.0, queue_ms=10.0), IDLE._replace(busyness=1.0)],
    ],
)
def test_nothing_is_seeded_that_would_not_help(sites: list[Site]) -> None:
    assert find_target(sites, 0.1, LIMITS) is None


def test_each_holder_and_each_seeding_under_way_needs_demand_of_its_own() -> None:
    seeded = IDLE._replace(holder=HC, is_seeded=True, is_barred=True)
    assert find_target([BUSY, seeded, IDLE], 0.19, LIMITS) is None
    assert find_target([BUSY, seeded, IDLE], 0.2, LIMITS) == IDLE
    assert find_target([BUSY, IDLE], 0.09, LIMITS) is None


def test_the_least_busy_is_seeded_and_of_equals_the_first_by_name() -> None:
    other = IDLE._replace(holder=HC)
    assert find_target([BUSY, IDLE._replace(busyness=1.0), other], 1.0, LIMITS) == other
    assert find_target([BUSY, other, IDLE], 1.0, LIMITS) == IDLE


SITES = st.builds(
    Site,
    st.sampled_from([HA, HB, HC]),
    lacking_tokens=st.integers(0, 8),
    pooled_tokens=st.integers(-8, 8),
    busyness=st.sampled_from([0.0, 0.5, 1.0, 2.0, 5.0]),
    queue_ms=st.sampled_from([0.0, 5.0, 50.0]),
    fetch_ms=st.sampled_from([0.0, 9.0]),
    kv_use=st.sampled_from([None, 0.1, 0.7, 0.9]),
    is_seeded=st.booleans(),
    is_barred=st.booleans(),
)


@given(st.lists(SITES, max_size=6), st.floats(0, 2))
def test_only_what_lacks_it_and_has_room_is_seeded_and_only_by_demand(
    sites: list[Site], demand_per_s: float
) -> None:
    target = find_target(sites, demand_per_s, LIMITS)
    if target is None:
        return
    holders = [s for s in sites if s.lacking_tokens < LIMITS.prefix_tokens_min]
    assert holders
    assert all(holder.busyness > target.busyness for holder in holders)
    assert target.lacking_tokens >= LIMITS.prefix_tokens_min <= target.pooled_tokens
    assert not target.is_barred
    assert not target.is_seeded
    assert target.kv_use is not None
    assert target.kv_use <= LIMITS.kv_use_max
    assert demand_per_s >= LIMITS.demand_per_s_min * len(holders)


# --- demand ---------------------------------------------------------------------------------------


def test_demand_is_a_rate_that_fades() -> None:
    demand, point = Demand(), BlockHash(b"p")
    assert demand.rate_per_s(point, 0.0) == 0
    for _ in range(3):
        demand.note(point, 0.0)
    assert demand.rate_per_s(point, 0.0) == 3 / DEMAND_S
    assert demand.rate_per_s(point, 10 * DEMAND_S) < 0.0001


def test_of_too_many_points_the_least_recent_is_forgotten() -> None:
    demand = Demand(points_max=2)
    for name in (b"a", b"b", b"a", b"c"):
        demand.note(BlockHash(name), 0.0)
    assert len(demand) == 2
    assert demand.rate_per_s(BlockHash(b"b"), 0.0) == 0
    assert demand.rate_per_s(BlockHash(b"a"), 0.0) == 2 / DEMAND_S


# --- in the core ----------------------------------------------------------------------------------

SYSTEM = tuple(range(1, 9))  # 4 blocks
POOLED = PoolPart(8, 1.0)


class Fleet:
    """A core with A, which holds the system prompt, and others, and what arrives there."""

    def __init__(
        self,
        *others: InstanceId,
        limits: SeedingLimits = LIMITS,
        pool: PoolChecked | None = PoolChecked(is_up=True, use=0.5),  # noqa: B008 -- frozen
        capacity_blocks: int | None = 1000,
    ) -> None:
        self.core = RouterCore(Home(), last_of_n, seeding=limits)
        self.now, self.count = 0.0, 0
        add(self.core, A, *others, described=facts(capacity_blocks=capacity_blocks))
        for name in (A, *others):
            feed(self.core, InstancePooled(name, SPACE_NAME))
        feed(self.core, SourceOpened(SOURCE_A, has_replay=False))
        feed(self.core, batch(0, stored(1, 2, 3, 4, tokens=SYSTEM)))
        if pool is not None:
            feed(self.core, pool)
        self.answer(self.ask(pool={}))  # departs from what others never went on from
        self.now = 1.0

    def ask(
        self, *tokens: int, pool: Mapping[KeySpace, PoolPart] | None = None, exact: bool = True
    ) -> RequestId:
        """Let a request arrive; without tokens the system prompt and a question of its own."""
        self.count += 1
        name = RequestId(f"r{self.count}")
        question = tokens or (*SYSTEM, 100 + self.count, 200 + self.count, 300)
        known = dataclasses.replace(prompt(*question), is_exact=exact)
        parts = {SPACE_NAME: POOLED} if pool is None else pool
        self.core.handle(RequestArrived(Request(name, MODEL, known, pool=parts)), self.now)
        check(self.core)
        return name

    def begin(self, *names: RequestId) -> list[Seed]:
        """Let answers begin, and return what is seeded then."""
        commands = [c for n in names for c in self.core.handle(RequestFirstByte(n), self.now)]
        check(self.core)
        return [command for command in commands if isinstance(command, Seed)]

    def answer(self, name: RequestId, outcome: Outcome = Outcome.ANSWERED) -> list[Seed]:
        commands = self.core.handle(RequestFinished(name, outcome), self.now)
        check(self.core)
        return [command for command in commands if isinstance(command, Seed)]

    def end(self, seed: Seed, *, is_done: bool = True) -> None:
        self.core.handle(SeedingEnded(seed.seeding_id, is_done), self.now)
        check(self.core)

    def load(self, holder: Holder) -> tuple[int, int]:
        load = self.core.loads.get(holder)
        return load.active_requests, load.active_blocks


def test_a_busy_holders_prefix_is_seeded_when_an_answer_begins() -> None:
    fleet = Fleet(B)
    first, second = fleet.ask(), fleet.ask()
    assert fleet.load(HA) == (2, 10)
    assert fleet.begin(first) == [Seed(RequestId("seeding/1"), HB, first, MODEL, tokens=8)]
    assert fleet.load(HB) == (1, 4)
    assert fleet.begin(second) == []  # B is being seeded
    assert fleet.answer(second) == []


def test_a_holder_that_is_not_busy_or_demand_for_one_only_is_no_reason() -> None:
    fleet = Fleet(B)
    fleet.answer(fleet.ask())
    assert fleet.begin(fleet.ask()) == []
    fleet = Fleet(B, limits=dataclasses.replace(LIMITS, demand_per_s_min=1.0))
    assert fleet.begin(fleet.ask(), fleet.ask()) == []


def test_a_whole_answer_begins_with_its_end() -> None:
    fleet = Fleet(B)
    first, _ = fleet.ask(), fleet.ask()
    third = fleet.ask()
    assert fleet.answer(first, Outcome.CLIENT_LEFT) == []
    (seed,) = fleet.answer(third)
    assert seed.holder == HB


def test_the_load_of_a_seeding_ends_with_it_whatever_came_of_it() -> None:
    for is_done in (True, False):
        fleet = Fleet(B)
        (seed,) = fleet.begin(fleet.ask(), fleet.ask())
        fleet.end(seed, is_done=is_done)
        assert fleet.load(HB) == (0, 0)
        assert all(instance.breaker.is_closed for instance in fleet.core.fleet)


def test_the_same_is_not_seeded_on_the_same_instance_again_within_a_minute() -> None:
    fleet = Fleet(B)
    (seed,) = fleet.begin(fleet.ask(), fleet.ask())
    fleet.end(seed)  # and B says nothing: it has lost it already
    assert fleet.begin(fleet.ask(), fleet.ask()) == []
    fleet.now += RECENT_S
    assert len(fleet.begin(fleet.ask(), fleet.ask())) == 1


def test_an_instance_that_failed_is_seeded_with_nothing_for_a_minute() -> None:
    fleet = Fleet(B)
    (seed,) = fleet.begin(fleet.ask(), fleet.ask())
    fleet.end(seed, is_done=False)
    other = tuple(range(50, 58))
    feed(fleet.core, batch(1, stored(11, 12, 13, 14, tokens=other)), now=fleet.now)
    fleet.answer(fleet.ask(*other, 1, 2, 3, pool={}))
    assert fleet.begin(fleet.ask(*other, 3, 4, 5), fleet.ask(*other, 6, 7, 8)) == []
    fleet.now += RECENT_S
    assert fleet.begin(fleet.ask(*other, 9, 9, 9), fleet.ask(*other, 8, 8, 8))


def test_the_bounds_of_a_fleet_hold_however_hot_it_is() -> None:
    others = [InstanceId(f"x{n}") for n in range(9)]
    fleet = Fleet(*others)
    hot = [fleet.ask() for _ in range(12)]
    seeds = fleet.begin(*hot)
    assert len(seeds) == LIMITS.at_once_max == len({seed.holder for seed in seeds})
    for seed in seeds:
        fleet.end(seed)
    seeds = fleet.begin(*(fleet.ask() for _ in range(12)))
    assert len(seeds) == LIMITS.per_minute_max - LIMITS.at_once_max
    fleet.end(seeds[0])
    fleet.now += RECENT_S - 0.1
    assert fleet.begin(*(fleet.ask() for _ in range(12))) == []
    fleet.now += 0.1
    assert fleet.begin(*(fleet.ask() for _ in range(12)))


@pytest.mark.parametrize(
    "pool",
    [None, PoolChecked(is_up=False), PoolChecked(is_up=True, use=0.96), PoolChecked(is_up=True)],
)
def test_nothing_is_seeded_from_a_pool_that_is_down_or_nearly_full(pool: PoolChecked) -> None:
    fleet = Fleet(B, pool=pool)
    assert fleet.begin(fleet.ask(), fleet.ask()) == []


def test_a_pool_that_does_not_say_how_full_it_is_will_do_where_the_operator_says_so() -> None:
    limits = dataclasses.replace(LIMITS, needs_pool_use=False)
    fleet = Fleet(B, limits=limits, pool=PoolChecked(is_up=True))
    assert len(fleet.begin(fleet.ask(), fleet.ask())) == 1


@pytest.mark.parametrize(
    "pool",
    [
        {},
        {SPACE_NAME: PoolPart(2, 1.0)},
        {SPACE_NAME: PoolPart(8, 1.0, weight=0.8)},  # announced, not seen
        {KeySpace("other"): POOLED},
    ],
)
def test_nothing_is_seeded_that_the_pool_is_not_known_to_have(
    pool: Mapping[KeySpace, PoolPart],
) -> None:
    fleet = Fleet(B)
    assert fleet.begin(fleet.ask(pool=pool), fleet.ask(pool=pool)) == []


def test_what_the_pool_has_of_the_beginning_is_seeded() -> None:
    fleet, part = Fleet(B), {SPACE_NAME: PoolPart(6, 1.0)}
    (seed,) = fleet.begin(fleet.ask(pool=part), fleet.ask(pool=part))
    assert seed.tokens == 6


@pytest.mark.parametrize("capacity_blocks", [None, 5])
def test_an_instance_without_room_is_left_alone(capacity_blocks: int | None) -> None:
    fleet = Fleet(B, capacity_blocks=capacity_blocks)
    assert fleet.begin(fleet.ask(), fleet.ask()) == []


def test_what_is_not_known_exactly_is_never_seeded() -> None:
    fleet = Fleet(B)
    assert fleet.begin(fleet.ask(exact=False), fleet.ask(exact=False)) == []


def test_instances_without_a_pool_or_with_other_blocks_are_left_alone() -> None:
    fleet = Fleet()
    add(fleet.core, B, described=facts(capacity_blocks=1000))
    add(fleet.core, C, described=facts(size=4, capacity_blocks=1000))
    feed(fleet.core, InstancePooled(C, SPACE_NAME))
    assert fleet.begin(fleet.ask(), fleet.ask()) == []


def test_a_request_that_is_given_up_or_refused_leaves_nothing_behind() -> None:
    fleet = Fleet(B)
    name = fleet.ask()
    seeder = fleet.core.seeder
    assert seeder is not None
    assert list(seeder.watched) == [name]
    for _ in range(2):
        fleet.core.handle(RequestFailed(name, FailureKind.STATUS, 500), fleet.now)
        check(fleet.core)
    assert not seeder.watched


def test_a_hand_off_is_no_demand() -> None:
    fleet = Fleet(B)
    seeder = fleet.core.seeder
    assert seeder is not None
    known = prompt(*SYSTEM, 1, 2, 3)
    request = Request(RequestId("x"), MODEL, known, pool={SPACE_NAME: POOLED})
    choice = fleet.core._choose(request, fleet.now, last_of_n)
    assert choice is not None
    place = choice._replace(prefill=object())  # type: ignore[arg-type]
    seeder.placed(request, place, fleet.now)
    assert not seeder.watched
    seeder.placed(request, choice, fleet.now)
    assert list(seeder.watched) == ["x"]


def test_a_core_without_seeding_takes_the_events_and_does_nothing() -> None:
    core = RouterCore(make_policy("kv_cost"), last_of_n)
    assert core.seeder is None
    assert feed(core, PoolChecked(is_up=True), SeedingEnded(RequestId("x"), is_done=True)) == []


def test_an_adapters_beginning_is_of_its_own_space() -> None:
    space = BlockSpace(2, "ad")
    fleet = Fleet(B)
    described = facts(adapters=("ad",), capacity_blocks=1000)
    feed(fleet.core, InstanceDescribed(A, described), InstanceDescribed(B, described), now=1.0)
    feed(fleet.core, batch(1, stored(5, 6, 7, 8, tokens=SYSTEM, lora="ad")), now=1.0)
    seeds: list[object] = []
    for number in range(4):
        known = prompt(*SYSTEM, number, number, 3, spaces=(space,))
        request = Request(RequestId(f"x{number}"), "ad", known, pool={SPACE_NAME: POOLED})
        feed(fleet.core, RequestArrived(request), now=1.0)
        seeds += feed(fleet.core, RequestFirstByte(request.id), now=1.0)
    assert seeds == [Seed(RequestId("seeding/1"), HB, RequestId("x1"), "ad", tokens=8)]


# --- invariants -----------------------------------------------------------------------------------


def _lose_its_reservation(seeder: Seeder, seed: Seed) -> None:
    seeder.loads.release(seed.seeding_id)


def _run_where_nothing_is_reserved(seeder: Seeder, seed: Seed) -> None:
    seeder.running[seed.seeding_id] = Running(HC, BlockHash(b"p"))


def _run_two_on_one(seeder: Seeder, seed: Seed) -> None:
    seeder.running[RequestId("s")] = seeder.running[seed.seeding_id]
    seeder.loads.reserve(RequestId("s"), HB, 0, 1)
    seeder.candidates.touch(HB)


def _run_too_many(seeder: Seeder, seed: Seed) -> None:
    for number in range(LIMITS.at_once_max):
        name, holder = RequestId(f"s{number}"), Holder(InstanceId(f"x{number}"))
        seeder.running[name] = Running(holder, BlockHash(b"p"))
        seeder.loads.reserve(name, holder, 0, 1)


def _watch_what_has_ended(seeder: Seeder, seed: Seed) -> None:
    seeder.watched[RequestId("gone")] = next(iter(seeder.watched.values()))


@pytest.mark.parametrize(
    "break_it",
    [
        _lose_its_reservation,
        _run_where_nothing_is_reserved,
        _run_two_on_one,
        _run_too_many,
        _watch_what_has_ended,
    ],
)
def test_what_is_wrong_with_a_seeding_is_found(
    break_it: Callable[[Seeder, Seed], None],
) -> None:
    fleet = Fleet(B)
    first, _ = fleet.ask(), fleet.ask()
    (seed,) = fleet.begin(first)
    assert fleet.core.seeder is not None
    break_it(fleet.core.seeder, seed)
    with pytest.raises(AssertionError):
        check(fleet.core)
