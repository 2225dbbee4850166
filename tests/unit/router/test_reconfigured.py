"""What an operator changes while requests run: how is routed, and what an instance is for."""

from __future__ import annotations

import dataclasses
from typing import Any

from moongate.router import (
    Holder,
    InstanceChanged,
    InstanceProbed,
    InstanceSpec,
    Outcome,
    Reconfigured,
    RequestFinished,
    RequestId,
    Role,
    RouterLimits,
    SeedingLimits,
    make_policy,
)
from moongate.router.invariants import check

from .builders import A, B, add, arrived, facts, feed, make_core, send

PROMPT = range(4000)
"""Long enough to be worth a busy instance."""


def reconfigured(policy: str, **limits: Any) -> Reconfigured:
    return Reconfigured(make_policy(policy), (), RouterLimits(**limits), None)


def test_another_policy_finds_index_and_loads_as_they_were() -> None:
    core = make_core(A, B, policy="round_robin")
    first = send(core, arrived("r1", *PROMPT))
    assert first == Holder(A)
    feed(core, reconfigured("kv_cost"))
    assert send(core, arrived("r2", *PROMPT)) == first, "it holds the prefix"
    assert core.loads.get(first).active_requests == 2
    feed(core, RequestFinished(RequestId("r1"), Outcome.ANSWERED))
    assert core.loads.get(first).active_requests == 1
    check(core)


def test_only_what_may_be_named_may_be_named() -> None:
    core = make_core(A, others=[make_policy("random")])
    assert core.has_policy("random")
    feed(core, reconfigured("least_loaded"))
    assert not core.has_policy("random")
    assert core.get_policy(None).name == "least_loaded"


def test_thresholds_of_health_hold_at_once_and_the_index_keeps_its_size() -> None:
    core = make_core(A)
    size = core.limits.index_blocks_max
    feed(core, reconfigured("kv_cost", down_after=3, index_blocks_max=1))
    assert core.limits.index_blocks_max == size
    for is_up in (True, True, False):
        feed(core, InstanceProbed(A, is_healthy=False))
        state = core.fleet.find(A)
        assert state is not None
        assert state.is_healthy == is_up


def test_limits_of_seedings_hold_where_there_are_any() -> None:
    seeding = SeedingLimits(at_once_max=9)
    core = make_core(A)
    feed(core, dataclasses.replace(reconfigured("kv_cost"), seeding=seeding))
    assert core.seeder is None


def test_an_instance_that_changes_keeps_its_cache_its_health_and_its_load() -> None:
    core = make_core(A, B)
    home = send(core, arrived("r1", *PROMPT))
    feed(core, InstanceChanged(InstanceSpec(home.instance_id, Role.BOTH, weight=2.0)))
    assert send(core, arrived("r2", *PROMPT)) == home
    assert core.loads.get(home).active_requests == 2
    check(core)


def test_an_instance_that_is_to_prefill_only_gets_no_whole_requests_any_more() -> None:
    core = make_core(A, B, policy="round_robin")
    feed(core, InstanceChanged(InstanceSpec(A, Role.PREFILL)))
    assert core.fleet.has_prefill("m")
    assert {send(core, arrived(name)) for name in ("r1", "r2")} == {Holder(B)}
    feed(core, InstanceChanged(InstanceSpec(A, Role.BOTH)))
    assert not core.fleet.has_prefill("m")
    assert {send(core, arrived(name)) for name in ("r3", "r4")} == {Holder(A), Holder(B)}
    check(core)


def test_an_instance_that_is_gone_does_not_change() -> None:
    core = make_core(A)
    add(core, B, described=facts())
    assert feed(core, InstanceChanged(InstanceSpec("c"))) == []  # type: ignore[arg-type]
