"""Fan-out in virtual time: 40 sessions on one system prompt of 6,000 tokens that one instance has.

The core that serves, before the engines' pure models; the same policy with seeding and without. Other
set-ups, those in which it gains nothing among them: `python -m benchmarks.hot_prefixes`.
"""

from __future__ import annotations

import pytest

from benchmarks.hot_prefixes import (
    AT_ONCE,
    FAST_4,
    GROW_BY_2,
    GROW_BY_3,
    LARGE_4,
    LARGE_8,
    SCOUTS,
    SYSTEM_PROMPT,
    Arrivals,
    Hardware,
    compare,
    make_fleet,
    measure,
)
from moongate.router import Holder, InstanceId, PoolChecked, RequestId, SeedingLimits
from moongate.router.blocks import hash_prompt, pack_tokens
from moongate.router.invariants import check
from moongate.router.model import BlockSpace
from moongate.simulator.fleet import VirtualFleet


@pytest.mark.parametrize(
    ("hardware", "arrivals"),
    [(LARGE_4, GROW_BY_3), (LARGE_4, GROW_BY_2), (LARGE_4, SCOUTS), (LARGE_8, GROW_BY_3)],
)
def test_seeding_raises_the_throughput_of_a_fan_out_by_half_and_more(
    hardware: Hardware, arrivals: Arrivals
) -> None:
    row = compare(hardware, arrivals)
    assert row.gain >= 1.5
    assert row.seeded.ttft_s_mean < row.without.ttft_s_mean / 3
    assert row.seeded.from_pool < row.without.from_pool


def test_what_comes_all_at_once_is_not_seeded_and_loses_nothing() -> None:
    row = compare(LARGE_4, AT_ONCE)
    assert row.seeded == row.without
    assert row.seeded.seedings == 0


def test_where_a_fetch_is_short_seeding_gains_little_and_costs_nothing() -> None:
    assert 0.98 <= compare(FAST_4, GROW_BY_2).gain < 1.1


def test_the_same_run_twice_is_the_same() -> None:
    first, again = (measure(make_fleet(LARGE_4, SeedingLimits()), GROW_BY_3) for _ in range(2))
    assert first == again


def holders(fleet: VirtualFleet) -> set[InstanceId]:
    """Return the instances that say they have the whole system prompt."""
    chain = hash_prompt(BlockSpace(16), pack_tokens(SYSTEM_PROMPT))
    index = fleet.core.index
    found = index.find_overlaps(chain, len(chain), index.mask(index.holders))
    return {holder.instance_id for holder, o in found.items() if o.confirmed_blocks == len(chain)}


def test_a_seeded_instance_has_the_prompt_before_any_session_goes_there() -> None:
    fleet = make_fleet(LARGE_4, SeedingLimits())
    assert len(holders(fleet)) == 1
    first: dict[InstanceId, bool] = {}  # whether the instance had it when its first session came

    def look() -> None:
        for sent in fleet.sent.values():
            if sent.instance_id is not None and sent.instance_id not in first:
                first[sent.instance_id] = sent.instance_id in holders(fleet)

    fleet.on_step = look
    measure(fleet, GROW_BY_3)
    seeded = {seed.holder.instance_id for seed in fleet.seedings.values()}
    assert len(seeded) == 3
    assert all(first[name] for name in seeded)
    assert len(holders(fleet)) == 4


@pytest.mark.parametrize(("at_once_max", "per_minute_max"), [(1, 20), (2, 2), (4, 20), (8, 1)])
def test_the_bounds_hold_at_every_moment(at_once_max: int, per_minute_max: int) -> None:
    limits = SeedingLimits(at_once_max=at_once_max, per_minute_max=per_minute_max)
    fleet = make_fleet(LARGE_8, limits)
    seeder = fleet.core.seeder
    assert seeder is not None
    most = steps = 0

    def look() -> None:
        nonlocal most, steps
        most, steps = max(most, len(seeder.running)), steps + 1
        for running in seeder.running.values():
            assert fleet.core.loads.get(running.holder).active_requests >= 1
        if steps % 50 == 0:
            check(fleet.core)

    fleet.on_step = look
    outcome = measure(fleet, GROW_BY_3)
    assert 1 <= most <= at_once_max
    assert 1 <= outcome.seedings <= per_minute_max
    assert not seeder.running
    assert len({seed.holder for seed in fleet.seedings.values()}) == outcome.seedings


@pytest.mark.parametrize("pool", [PoolChecked(is_up=True, use=0.96), PoolChecked(is_up=False)])
def test_a_pool_under_pressure_is_left_alone(pool: PoolChecked) -> None:
    fleet = make_fleet(LARGE_4, SeedingLimits(), pool=pool)
    assert measure(fleet, GROW_BY_3).seedings == 0


def test_an_instance_whose_cache_is_in_use_is_left_alone() -> None:
    fleet = make_fleet(LARGE_4, SeedingLimits())
    name = InstanceId("i1")
    capacity = fleet.profile.blocks - 1
    fleet.core.loads.reserve(RequestId("long"), Holder(name), 0, int(0.7 * capacity))
    fleet.core.candidates.touch(Holder(name))
    measure(fleet, GROW_BY_3)
    assert name not in {seed.holder.instance_id for seed in fleet.seedings.values()}
    assert len(fleet.seedings) == 2
