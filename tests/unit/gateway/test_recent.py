"""Receipts that operators ask for."""

from __future__ import annotations

import pytest

from moongate.gateway.dialects.body import name_session
from moongate.gateway.telemetry.receipt import Receipt, receipt_as_json
from moongate.gateway.telemetry.recent import RecentReceipts, Wanted
from moongate.router import Decision
from moongate.router.model import Holder, InstanceId, Reason, Role, Trust
from moongate.router.policy import Candidate, Ranked


def place(instance: str) -> Ranked:
    candidate = Candidate(Holder(InstanceId(instance)), Role.BOTH, 1.0, Trust.EXACT, 0, 0, 0)
    return Ranked(candidate, Reason.LOAD, 1.0)


def receipt(
    request_id: str = "r", instance: str = "a", session_key: str | None = None,
    ttft_ms: float | None = None, prefill: str | None = None,
) -> Receipt:  # fmt: skip
    pair = place(prefill) if prefill is not None else None
    decision = Decision("kv_cost", Reason.LOAD, 100, 64, 16, (place(instance),), pair)
    return Receipt(request_id, "/v1/x", "m", session_key, False, 1.0, decision, ttft_ms=ttft_ms)


def found(recent: RecentReceipts, wanted: Wanted, limit: int = 9, slowest: str | None = None) -> list[int]:  # fmt: skip
    return [receipt.number for receipt in recent.find(wanted, limit, slowest)]


def test_the_newest_come_first_and_the_oldest_go() -> None:
    recent = RecentReceipts(3)
    for _ in range(5):
        recent.add(receipt())
    assert found(recent, Wanted()) == [5, 4, 3]
    assert found(recent, Wanted(), limit=2) == [5, 4]
    assert found(recent, Wanted(after=4)) == [5]


def test_the_slowest_come_first_where_they_are_asked_for() -> None:
    recent = RecentReceipts(9)
    for ttft_ms in (5.0, None, 70.0, 20.0):
        recent.add(receipt(ttft_ms=ttft_ms))
    assert found(recent, Wanted(), slowest="ttft") == [3, 4, 1, 2]
    assert found(recent, Wanted(), limit=1, slowest="ttft") == [3]


def test_a_session_is_found_by_its_key_and_by_its_name() -> None:
    recent = RecentReceipts(9)
    for key in ("s1", None, "s2", "s1"):
        recent.add(receipt(session_key=key))
    assert found(recent, Wanted(session="s1")) == [4, 1]
    assert found(recent, Wanted(session=name_session("s1"))) == [4, 1]
    assert found(recent, Wanted(session="s3")) == []


def test_requests_and_instances_are_found_by_name() -> None:
    recent = RecentReceipts(9)
    recent.add(receipt("r1", "a"))
    recent.add(receipt("r2", "b", prefill="a"))
    recent.add(receipt("r3", "b"))
    assert found(recent, Wanted(request_id="r2")) == [2]
    assert found(recent, Wanted(instance="a")) == [2, 1]
    assert found(recent, Wanted(instance="b")) == [3, 2]


def test_a_receipt_says_what_became_of_its_request() -> None:
    told = receipt(session_key="secret", ttft_ms=12.34567)
    assert receipt_as_json(told)["outcome"] is None
    told.status, told.e2e_ms, told.cached_tokens, told.output_tokens = 200, 20.0, 64, 7
    shown = receipt_as_json(told)
    assert shown["ttft_ms"] == 12.346
    assert shown["session"] == name_session("secret")
    assert "secret" not in str(shown)
    assert shown["outcome"] == {
        "status": 200, "is_broken_off": False, "e2e_ms": 20.0, "cached_tokens": 64,
        "pool_tokens": None, "output_tokens": 7, "reuse_error_tokens": -16,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("status", "cached_tokens", "prompt_tokens", "error_tokens"),
    [
        (200, 80, 100, 0),
        (200, 96, 100, 16),
        (200, None, 100, None),  # not reported
        (400, 0, 100, None),
        (200, 0, None, None),  # nothing was expected
    ],
)
def test_what_was_not_expected_or_not_reported_is_no_error(
    status: int, cached_tokens: int | None, prompt_tokens: int | None, error_tokens: int | None
) -> None:
    told = receipt()
    told.status, told.cached_tokens = status, cached_tokens
    told.decision = told.decision._replace(prompt_tokens=prompt_tokens)
    assert told.reuse_error_tokens == error_tokens
