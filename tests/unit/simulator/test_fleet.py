"""The fleet in virtual time: exact times, and what crosses between the core and the engines."""

from __future__ import annotations

from moongate.kvpool.memory import MemoryPool
from moongate.router import Holder, InstanceId, Reason, RouterCore, Tier, make_policy
from moongate.router.invariants import check
from moongate.simulator.engine import EngineProfile
from moongate.simulator.fleet import Sent, VirtualFleet

A, B = InstanceId("a"), InstanceId("b")
PROFILE = EngineProfile(
    blocks=101,
    block_size_tokens=4,
    max_model_len_tokens=400,
    prefill_tokens_per_s=1000.0,
    decode_tokens_per_s=100.0,
    step_overhead_ms=0.0,
    kv_bytes_per_token=100,
    kv_link_bytes_per_s=10_000.0,  # 10 ms a token
)
PROMPT = range(21)  # 5 blocks and a token


def make_fleet(*names: InstanceId, pool: MemoryPool | None = None) -> VirtualFleet:
    core = RouterCore(make_policy("kv_cost"), lambda n: n - 1)
    fleet = VirtualFleet(core, names, PROFILE, pool)
    fleet.on_step = lambda: check(core)
    return fleet


def test_an_answer_takes_its_prefill_and_a_step_for_each_further_token() -> None:
    fleet = make_fleet(A)
    sent = fleet.arrive(PROMPT, max_tokens=3)
    fleet.run()
    assert sent.first_token_at == 0.021
    assert sent.ended_at == 0.041
    assert len(sent.output_ids) == 3
    assert fleet.core.loads.reservations == {}
    assert fleet.core.index.count(Holder(A), Tier.DEVICE) == 5


def test_what_comes_together_shares_a_step_and_what_is_cached_already() -> None:
    fleet = make_fleet(A)
    first, second = (fleet.arrive(PROMPT, max_tokens=1) for _ in range(2))
    fleet.run()
    assert first.first_token_at == second.first_token_at == 0.022
    assert (first.cached_tokens, second.cached_tokens) == (0, 20)


def test_what_follows_an_answer_comes_at_its_end_and_goes_home() -> None:
    fleet = make_fleet(A, B)
    turns: list[Sent] = []

    def again(sent: Sent) -> None:
        turns.append(sent)
        if len(turns) < 3:
            fleet.arrive([*sent.tokens, *sent.output_ids, 5], 2, again)

    fleet.at(1.0, lambda: fleet.arrive(PROMPT, 2, again))
    fleet.run()
    assert [sent.arrived_at for sent in turns] == [1.0, turns[0].ended_at, turns[1].ended_at]
    assert {sent.instance_id for sent in turns} == {A}
    assert turns[1].reason is Reason.DEVICE_PREFIX
    assert turns[1].cached_tokens == 20


def test_another_instance_fetches_from_the_pool_what_one_has_computed() -> None:
    pool = MemoryPool(1 << 20)
    fleet = make_fleet(A, B, pool=pool)
    fleet.arrive(PROMPT, max_tokens=1)
    fleet.run(until=10.0)
    assert (fleet.now, len(pool)) == (10.0, 5)
    fleet.warm(B, PROMPT)
    assert fleet.now == 10.0 + 0.2 + 0.001  # 20 tokens over the link, and one computed
    assert fleet.core.index.count(Holder(B), Tier.DEVICE) == 5
    assert fleet.model(B).statistics().external_hits_tokens == 20
    assert len(fleet.sent) == 1


def test_the_core_is_told_what_the_pool_holds() -> None:
    fleet = make_fleet(A, B, pool=MemoryPool(1 << 20))
    fleet.arrive(PROMPT, max_tokens=1)
    fleet.run()
    asked = fleet._as_request(
        Sent(next(iter(fleet.sent)), [*PROMPT[:16], *range(50, 80)], 0.0, None)
    )
    (part,) = asked.pool.values()
    assert (part.tokens, part.bytes_per_token) == (16, 100)
