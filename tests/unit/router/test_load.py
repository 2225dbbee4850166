"""What each holder was given and has not finished."""

import pytest

from moongate.router.load import Load, LoadTable, Reservation
from moongate.router.model import Holder, RequestId

from .builders import A, B

HA, HB = Holder(A), Holder(B)
R, S = RequestId("r"), RequestId("s")


def test_a_holder_without_work_has_zeros() -> None:
    assert LoadTable().get(HA) == Load(0, 0, 0)


def test_a_load_is_the_sum_of_its_reservations() -> None:
    loads = LoadTable()
    loads.reserve(R, HA, prefill_tokens=100, blocks=7)
    loads.reserve(S, HA, prefill_tokens=20, blocks=3)
    assert loads.get(HA) == Load(active_requests=2, queued_prefill_tokens=120, active_blocks=10)
    assert loads.get(HB) == Load(0, 0, 0)


def test_the_end_of_prefill_frees_its_tokens_once() -> None:
    loads = LoadTable()
    loads.reserve(R, HA, prefill_tokens=100, blocks=7)
    loads.end_prefill(R)
    loads.end_prefill(R)
    assert loads.get(HA) == Load(1, 0, 7)
    assert loads.reservations == {R: Reservation(HA, 0, 7)}


def test_a_release_frees_all_that_is_left_and_leaves_the_others() -> None:
    loads = LoadTable()
    loads.reserve(R, HA, prefill_tokens=100, blocks=7)
    loads.reserve(S, HA, prefill_tokens=20, blocks=3)
    loads.release(R)
    assert loads.get(HA) == Load(1, 20, 3)
    loads.release(S)
    assert (loads.loads, loads.reservations) == ({}, {})


def test_releasing_without_a_reservation_does_nothing() -> None:
    loads = LoadTable()
    loads.release(R)
    assert loads.loads == {}


def test_a_request_has_one_reservation() -> None:
    loads = LoadTable()
    loads.reserve(R, HA, prefill_tokens=1, blocks=1)
    with pytest.raises(AssertionError):
        loads.reserve(R, HB, prefill_tokens=1, blocks=1)
