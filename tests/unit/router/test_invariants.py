"""The checks that simulation runs after each step find what they are for."""

import dataclasses
from collections.abc import Callable

import pytest

from moongate.router import Holder, RequestArrived, Role, RouterCore, SourceOpened, Tier
from moongate.router.events import BlocksCleared
from moongate.router.invariants import check
from moongate.router.model import InstanceId, RequestId, SideGroup

from .builders import (
    MODEL,
    SOURCE_A,
    SPACE,
    A,
    B,
    add,
    arrived,
    batch,
    chain,
    feed,
    make_core,
    request,
    side_stored,
    stored,
)

HA, ELSEWHERE = Holder(A), Holder(InstanceId("elsewhere"))
R = RequestId("r")
WINDOW = SideGroup(1, 1, 1)


def make_busy_core() -> RouterCore:
    """Return a core with one instance, one source, one confirmed block and one open request.

    The block is held in a side group as well.
    """
    core = make_core(A)
    feed(core, SourceOpened(SOURCE_A, has_replay=False), batch(0, BlocksCleared()))
    feed(core, arrived("r", 1, 2, 3, 4, 5))
    feed(core, batch(1, stored(71, tokens=[1, 2]), stored(72, tokens=[1, 2])))
    feed(core, batch(2, side_stored(71, group=1, needed_tokens=2)))
    return core


def test_all_holds_for_a_core_in_use() -> None:
    check(make_busy_core())


def _hold_for_a_stranger(core: RouterCore) -> None:
    core.index.add_holder(ELSEWHERE)


def _forget_an_instance(core: RouterCore) -> None:
    core.fleet.remove(A)


def _lose_a_reservation(core: RouterCore) -> None:
    core.loads.release(R)


def _miscount_a_load(core: RouterCore) -> None:
    core.loads.loads[HA].active_requests += 1


def _try_one_instance_twice(core: RouterCore) -> None:
    core.requests[R].tried.append(A)


def _try_too_often(core: RouterCore) -> None:
    core.requests[R].attempt = 3


def _hold_what_nobody_announced(core: RouterCore) -> None:
    core.index.store(HA, Tier.DEVICE, chain(8, 9))


def _hold_a_window_that_nobody_announced(core: RouterCore) -> None:
    core.index.store(HA, Tier.DEVICE, chain(8, 9), WINDOW)


def _lose_a_window(core: RouterCore) -> None:
    core.index.remove(HA, Tier.DEVICE, chain(1, 2), WINDOW)


def _need_a_group_that_nobody_announced(core: RouterCore) -> None:
    core.index.join(HA, SideGroup(2, 1, 1))


def _need_a_group_no_more(core: RouterCore) -> None:
    core.index.remove(HA, Tier.DEVICE, chain(1, 2), WINDOW)
    core.index.leave(HA, WINDOW)


def _count_an_announcement_twice(core: RouterCore) -> None:
    core.index.store(HA, Tier.DEVICE, chain(1, 2))


def _forget_who_predicts(core: RouterCore) -> None:
    core.predicting.clear()


def _change_a_load_silently(core: RouterCore) -> None:
    core.explain(request("x"), now=0.0)  # keeps the candidates
    core.loads.end_prefill(R)


def _lose_an_instance_silently(core: RouterCore) -> None:
    core.explain(request("x"), now=0.0)
    next(iter(core.fleet)).is_healthy = False


def _suspend_an_instance_silently(core: RouterCore) -> None:
    add(core, B)
    core.explain(request("x"), now=0.0)
    next(iter(core.fleet)).breaker.failed(RequestId("r"), now=0.0)


def _learn_a_block_size_silently(core: RouterCore) -> None:
    assert core.spaces(MODEL) == {SPACE}
    next(iter(core.sources))[1].ledger.block_size_tokens = 7


def _leave_a_trial_behind(core: RouterCore) -> None:
    next(iter(core.fleet)).breaker.trial = RequestId("long gone")


@pytest.mark.parametrize(
    "break_it",
    [
        _hold_for_a_stranger,
        _forget_an_instance,
        _lose_a_reservation,
        _miscount_a_load,
        _try_one_instance_twice,
        _try_too_often,
        _hold_what_nobody_announced,
        _hold_a_window_that_nobody_announced,
        _lose_a_window,
        _need_a_group_that_nobody_announced,
        _need_a_group_no_more,
        _count_an_announcement_twice,
        _forget_who_predicts,
        _change_a_load_silently,
        _lose_an_instance_silently,
        _suspend_an_instance_silently,
        _learn_a_block_size_silently,
        _leave_a_trial_behind,
    ],
)
def test_what_is_wrong_is_found(break_it: Callable[[RouterCore], None]) -> None:
    core = make_busy_core()
    break_it(core)
    with pytest.raises(AssertionError):
        check(core)


def make_core_with_a_pair() -> RouterCore:
    """Return a core that prefills a request on A, to be decoded on B."""
    core = make_core()
    add(core, A, role=Role.PREFILL)
    add(core, B, role=Role.DECODE)
    handed_over = dataclasses.replace(request("r", 1, 2, 3, 4, 5), may_hand_over=True)
    feed(core, RequestArrived(handed_over))
    return core


def _compute_it_twice(core: RouterCore) -> None:
    leg = core.requests[R].leg
    assert leg is not None
    leg.prefill_tokens = 1


def _keep_what_is_not_computed(core: RouterCore) -> None:
    core.requests[R].handed_over_tokens = 5


def _hand_over_what_may_not_be(core: RouterCore) -> None:
    tracked = core.requests[R]
    tracked.request = dataclasses.replace(tracked.request, may_hand_over=False)


def _hand_over_to_itself(core: RouterCore) -> None:
    tracked = core.requests[R]
    assert tracked.leg is not None
    assert tracked.prefill is not None
    tracked.leg.place, tracked.leg.holder = tracked.prefill.place, tracked.prefill.holder
    core.loads.release(R)
    core.loads.reserve(R, HA, 0, 2)


def _forget_where_it_was_sent(core: RouterCore) -> None:
    core.requests[R].tried.clear()


@pytest.mark.parametrize(
    "break_it",
    [
        _compute_it_twice,
        _keep_what_is_not_computed,
        _hand_over_what_may_not_be,
        _hand_over_to_itself,
        _forget_where_it_was_sent,
    ],
)
def test_what_is_wrong_with_a_pair_is_found(break_it: Callable[[RouterCore], None]) -> None:
    core = make_core_with_a_pair()
    check(core)
    break_it(core)
    with pytest.raises(AssertionError):
        check(core)
