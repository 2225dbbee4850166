"""What a shared pool has of a prompt: in costs, in decisions, and what is learned from fetches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moongate.router import (
    Forward,
    Holder,
    InstanceId,
    InstancePooled,
    InstanceProbed,
    KeySpace,
    NotePooled,
    PoolPart,
    RequestArrived,
    RequestFirstByte,
    RequestId,
    RouterCore,
    SourceOpened,
    Tier,
)
from moongate.router.cost import (
    DISK_BYTES_PER_MS_PRIOR,
    FETCH_BYTES_PER_MS_PRIOR,
    CostWeights,
    Pricing,
)
from moongate.router.fleet import Fleet
from moongate.router.model import InstanceFacts, InstanceSpec, Reason, Request, Role, Trust
from moongate.router.policy import Candidate, KvCost, Situation

from .builders import (
    SOURCE_A,
    A,
    B,
    C,
    add,
    batch,
    chain,
    feed,
    forward_in,
    last_of_n,
    make_core,
    request,
    stored,
)

SPACE_OF_KEYS = KeySpace("k")
OTHER_KEYS = KeySpace("other")
PART = PoolPart(tokens=800, bytes_per_token=20_000.0)
TOKENS = list(range(100, 120))  # ten blocks of two


# --- costs ----------------------------------------------------------------------------------------


def candidate(
    name: str, *, overlap: int = 0, pool: PoolPart | None = None, trust: Trust = Trust.EXACT,
    ms_per_token: float = 0.01,
) -> Candidate:  # fmt: skip
    found = Candidate(Holder(InstanceId(name)), Role.BOTH, 1.0, trust, 0, 0, 0).having(
        overlap, overlap
    )
    return found if pool is None else found.fetching(pool, ms_per_token)


def rank(
    *candidates: Candidate, history_tokens: int = 0
) -> dict[str, tuple[Reason, dict[str, float]]]:
    """Return the reason and the terms that are not 0 of each candidate, the best first."""
    asked = Request(RequestId("r"), "m", pool={SPACE_OF_KEYS: PART})  # that there is one is read
    situation = Situation(asked, 1_000, history_tokens, 0, 10.0, len(candidates))
    ranked = KvCost(CostWeights(history_weight=2.0)).rank(situation, candidates, last_of_n)
    return {
        str(r.holder): (r.reason, {name: ms for name, ms in r.terms_ms.items() if ms})
        for r in ranked
    }


def test_what_the_pool_has_is_fetched_and_not_computed() -> None:
    assert rank(candidate("a", pool=PART)) == {
        "a": (Reason.POOL_PREFIX, {"prefill": 20.0, "fetch": 5.0 + 8.0})
    }


def test_only_what_lies_beyond_the_overlap_is_fetched() -> None:
    found = rank(candidate("a", overlap=300, pool=PART))
    assert found == {"a": (Reason.POOL_PREFIX, {"prefill": 20.0, "fetch": 5.0 + 5.0})}
    assert rank(candidate("a", overlap=500, pool=PART))["a"][0] is Reason.DEVICE_PREFIX
    covered = rank(candidate("a", overlap=800, pool=PART))
    assert covered == {"a": (Reason.DEVICE_PREFIX, {"prefill": 20.0})}


def test_a_disk_has_a_term_of_its_own() -> None:
    terms = rank(candidate("a", pool=PART._replace(on_disk=True), ms_per_token=0.05))["a"][1]
    assert terms == {"prefill": 20.0, "fetch_disk": 5.0 + 40.0}


def test_a_history_that_the_pool_has_is_not_charged_as_lost() -> None:
    found = rank(candidate("a", pool=PART), candidate("b"), history_tokens=900)
    assert found["a"][1]["history"] == 2.0 * 100 / 10
    assert found["b"][1]["history"] == 2.0 * 900 / 10
    assert list(found) == ["a", "b"]


def test_what_was_only_announced_is_worth_less() -> None:
    hint = PART._replace(weight=0.8)
    assert rank(candidate("a", pool=hint))["a"][1] == {"prefill": 36.0, "fetch": 5.0 + 6.4}
    beyond = rank(candidate("a", overlap=700, pool=hint))["a"][1]
    assert beyond["prefill"] == pytest.approx((1_000 - 700 - 80) / 10)


def test_the_pool_stands_in_for_an_overlap_that_is_not_sure() -> None:
    found = rank(candidate("a", overlap=800, pool=PART, trust=Trust.DEGRADED))["a"]
    assert found == (Reason.DEVICE_PREFIX, {"prefill": 20.0, "fetch": 5.0 + 1.6})


def test_a_holder_goes_before_one_that_would_fetch_until_it_is_busy() -> None:
    holder, other = candidate("b", overlap=800), candidate("a", pool=PART)
    assert list(rank(holder, other)) == ["b", "a"]
    assert list(rank(holder._replace(queued_prefill_tokens=200), other)) == ["a", "b"]


def test_nothing_to_fetch_costs_nothing() -> None:
    pricing = Pricing(CostWeights(), 10.0, 1_000, 0, 0, 0)
    assert (pricing.fetch_ms(0, 1.0), pricing.fetch_ms(-5, 1.0)) == (0.0, 0.0)
    assert pricing.fetch_ms(10, 0.5) == 10.0


# --- decisions ------------------------------------------------------------------------------------


def with_pool(
    name: str, tokens: int, key_space: KeySpace = SPACE_OF_KEYS, **more: float
) -> Request:
    part = PoolPart(tokens=tokens, bytes_per_token=more.pop("bytes_per_token", 10.0), **more)  # type: ignore[arg-type]
    return replace(request(name, *TOKENS), pool={key_space: part})


def pooled_core(*names: InstanceId) -> RouterCore:
    core = make_core(*names)
    feed(core, *(InstancePooled(name, SPACE_OF_KEYS) for name in names))
    return core


def forward(core: RouterCore, asked: Request, now: float = 0.0) -> Forward:
    return forward_in(core.handle(RequestArrived(asked), now))


def test_a_decision_says_what_is_fetched_and_only_the_rest_is_expected_to_be_computed() -> None:
    core = pooled_core(A, B)
    found = forward(core, with_pool("r", 16)).decision
    assert (found.reason, found.device_tokens, found.pool_tokens) == (Reason.POOL_PREFIX, 0, 16)
    assert core.loads.get(Holder(A)).queued_prefill_tokens == 4


def test_an_instance_of_another_key_space_or_of_none_has_nothing_from_it() -> None:
    core = make_core(A, B)
    feed(core, InstancePooled(A, OTHER_KEYS))
    found = forward(core, with_pool("r", 16)).decision
    assert found.pool_tokens == 0
    feed(core, InstancePooled(B, SPACE_OF_KEYS))
    assert forward(core, with_pool("s", 16)).holder == Holder(B)
    feed(core, InstancePooled(B, None))
    assert forward(core, with_pool("t", 16)).decision.pool_tokens == 0
    assert feed(core, InstancePooled(InstanceId("unknown"), SPACE_OF_KEYS)) == []


def test_the_only_choice_is_told_apart_from_what_it_fetches() -> None:
    core = pooled_core(A)
    assert forward(core, with_pool("r", 16)).decision.reason is Reason.POOL_PREFIX
    assert forward(core, request("s", 1, 2, 3)).decision.reason is Reason.ONLY_CHOICE


# --- whether it can matter ------------------------------------------------------------------------


def holding_core(blocks: int) -> RouterCore:
    """Return a core in which A holds so many leading blocks of `TOKENS`."""
    core = pooled_core(A, B)
    names = range(1, blocks + 1)
    feed(core, SourceOpened(SOURCE_A, has_replay=False))
    feed(core, batch(0, stored(*names, tokens=TOKENS[: 2 * blocks])))
    return core


@pytest.mark.parametrize(("blocks", "covers"), [(10, True), (9, True), (8, True), (7, False)])
def test_a_new_prompt_is_covered_by_a_holder_of_all_but_a_block(
    blocks: int, *, covers: bool
) -> None:
    core = holding_core(blocks)
    assert core.covers(request("r", *TOKENS), 0.0) is covers


def test_a_turn_is_covered_by_a_holder_of_its_history() -> None:
    core = holding_core(6)
    forward(core, request("r", *TOKENS[:12]))
    assert core.covers(request("s", *TOKENS), 0.0)
    assert core.covers(request("t", *TOKENS[:12]), 0.0), "asked again, all of it is its history"


def test_a_holder_that_is_busy_down_or_unsure_covers_nothing() -> None:
    core = holding_core(10)
    for first in (1_000, 3_000):  # one for each
        forward(core, request(f"big {first}", *range(first, first + 1_000)))
    assert not core.covers(request("r", *TOKENS), 0.0)
    core = holding_core(10)
    feed(core, InstanceProbed(A, is_healthy=False, is_gone=True))
    assert not core.covers(request("r", *TOKENS), 0.0)
    core = pooled_core(A)
    forward(core, request("r", *TOKENS))
    assert not core.covers(request("s", *TOKENS), 0.0), "it is only assumed"


def test_of_a_prompt_that_is_not_known_exactly_nothing_can_matter() -> None:
    core = pooled_core(A)
    assert core.covers(request("r"), 0.0)
    asked = request("s", *TOKENS)
    assert asked.prompt is not None
    assert core.covers(replace(asked, prompt=replace(asked.prompt, is_exact=False)), 0.0)


# --- what is learned ------------------------------------------------------------------------------


def learned(part: PoolPart, elapsed_s: float) -> float:
    """Return the ms that 1 MB takes after a fetch of 10 tokens that took so long."""
    core = pooled_core(A)
    asked = replace(request("r", *TOKENS[:12]), pool={SPACE_OF_KEYS: part})
    forward(core, asked)
    core.handle(RequestFirstByte(RequestId("r"), shows_prefill=True), elapsed_s)
    instance = core.fleet.find(A)
    assert instance is not None
    return core.fleet.fetch_ms_per_token(part._replace(bytes_per_token=1e6), instance)


PRIOR_MS = 1e6 / FETCH_BYTES_PER_MS_PRIOR


def test_the_rate_of_fetches_is_learned_from_what_the_prefill_did_not_take() -> None:
    part = PoolPart(tokens=10, bytes_per_token=1e6)
    # 2 tokens at 8 a ms; 10 MB in the rest of 20.25 ms.
    assert learned(part, 0.02025) == pytest.approx(2.0)


def test_a_fetch_from_disk_is_learned_apart() -> None:
    part = PoolPart(tokens=10, bytes_per_token=1e6, on_disk=True)
    assert learned(part, 0.05025) == pytest.approx(5.0)
    core = pooled_core(A)
    instance = core.fleet.find(A)
    assert instance is not None
    assert core.fleet.fetch_ms_per_token(part, instance) == 1e6 / DISK_BYTES_PER_MS_PRIOR


@pytest.mark.parametrize(
    ("part", "elapsed_s"),
    [
        (PoolPart(tokens=10, bytes_per_token=1e6, weight=0.8), 0.02),
        (PoolPart(tokens=10, bytes_per_token=100.0), 0.02),
        (PoolPart(tokens=10, bytes_per_token=1e6), 0.0001),
    ],
    ids=["announced only", "too small", "faster than its prefill"],
)
def test_a_fetch_that_proves_nothing_teaches_nothing(part: PoolPart, elapsed_s: float) -> None:
    assert learned(part, elapsed_s) == pytest.approx(PRIOR_MS)


def test_what_lies_on_the_instance_s_own_host_comes_faster() -> None:
    fleet = Fleet(8.0)
    near = fleet.add(InstanceSpec(A, host="10.0.0.1"))
    far = fleet.add(InstanceSpec(B, host="10.0.0.2"))
    part = PoolPart(tokens=10, bytes_per_token=1e6, host="10.0.0.1")
    assert fleet.fetch_ms_per_token(part, near) * 2 == fleet.fetch_ms_per_token(part, far)
    named = fleet.add(InstanceSpec(C, host="engine-3"))
    assert fleet.fetch_ms_per_token(part, named) == fleet.fetch_ms_per_token(part, far)
    fleet.describe(named, InstanceFacts((), address="10.0.0.1"))
    assert fleet.fetch_ms_per_token(part, named) == fleet.fetch_ms_per_token(part, near)
    unknown = part._replace(host="")
    assert fleet.fetch_ms_per_token(unknown, near) == fleet.fetch_ms_per_token(unknown, far)


# --- what is announced ----------------------------------------------------------------------------


def announcing_core() -> RouterCore:
    core = make_core()
    add(core, A)
    feed(core, SourceOpened(SOURCE_A, has_replay=False))
    feed(core, batch(0, stored(1, 2, tokens=[1, 2, 3, 4])))
    return core


def test_what_an_engine_stored_in_the_pool_is_told_by_our_names() -> None:
    core = announcing_core()
    event = stored(1, 2, tokens=[1, 2, 3, 4], tier=Tier.POOL)
    assert feed(core, batch(1, event)) == [NotePooled(A, chain(1, 2, 3, 4))]
    nameless = stored(1, tokens=[], tier=Tier.POOL)
    assert feed(core, batch(2, nameless)) == [NotePooled(A, chain(1, 2))], "its ids may be left out"


def test_a_block_that_the_device_has_forgotten_follows_from_its_parent() -> None:
    core = announcing_core()
    event = stored(3, tokens=[5, 6], parent=2, tier=Tier.POOL)
    assert feed(core, batch(1, event)) == [NotePooled(A, chain(1, 2, 3, 4, 5, 6)[2:])]
    orphan = stored(9, tokens=[5, 6], parent=8, tier=Tier.POOL)
    first = stored(9, tokens=[5, 6], tier=Tier.POOL)
    assert feed(core, batch(2, orphan, first)) == []


def test_what_is_replayed_says_nothing_of_now() -> None:
    core = make_core(A)
    opened = feed(core, SourceOpened(SOURCE_A, has_replay=True))
    replay_id = next(c.replay_id for c in opened if hasattr(c, "replay_id"))
    events = (stored(1, tokens=[1, 2]), stored(1, tokens=[1, 2], tier=Tier.POOL))
    commands = feed(core, batch(0, *events, replay_id=replay_id))
    assert not any(isinstance(command, NotePooled) for command in commands)
