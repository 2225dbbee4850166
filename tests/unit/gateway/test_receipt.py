"""The route receipt, from decisions written out by hand."""

from moongate.gateway.telemetry.receipt import decision_as_json, receipt_headers
from moongate.router import Decision
from moongate.router.model import Holder, InstanceId, PoolPart, Reason, Role, Trust
from moongate.router.policy import Candidate, Ranked

FIRST = Ranked(
    Candidate(
        holder=Holder(InstanceId("a"), 1),
        role=Role.BOTH,
        weight=1.0,
        trust=Trust.EXACT,
        active_requests=2,
        queued_prefill_tokens=300,
        last_chosen=1,
        overlap_tokens=96,
        confirmed_tokens=64,
    ),
    Reason.DEVICE_PREFIX,
    cost_ms=12.34,
    terms_ms={"prefill": 10.0, "queue": 2.34},
)
SECOND = Ranked(
    Candidate(
        holder=Holder(InstanceId("b")),
        role=Role.BOTH,
        weight=1.0,
        trust=Trust.APPROXIMATE,
        active_requests=0,
        queued_prefill_tokens=0,
        last_chosen=0,
    ),
    Reason.LOAD,
    cost_ms=20.0,
)
DECISION = Decision("kv_cost", Reason.DEVICE_PREFIX, 128, 96, 0, (FIRST, SECOND))


def test_the_headers_of_a_decision() -> None:
    assert receipt_headers(DECISION) == {
        "x-moongate-instance": "a@1",
        "x-moongate-policy": "kv_cost",
        "x-moongate-reason": "device_prefix",
        "x-moongate-device-tokens": "96",
        "x-moongate-pool-tokens": "0",
        "x-moongate-prompt-tokens": "128",
        "x-moongate-cost-ms": "12.3",
        "x-moongate-runner-up": "b;20.0",
    }


def test_what_is_not_known_has_no_header() -> None:
    only = SECOND._replace(cost_ms=None)
    assert receipt_headers(Decision("random", Reason.ONLY_CHOICE, None, 0, 0, (only,))) == {
        "x-moongate-instance": "b",
        "x-moongate-policy": "random",
        "x-moongate-reason": "only_choice",
        "x-moongate-device-tokens": "0",
        "x-moongate-pool-tokens": "0",
    }


def test_a_runner_up_without_a_cost_is_named_all_the_same() -> None:
    ranking = (SECOND._replace(cost_ms=None), FIRST._replace(cost_ms=None))
    decision = Decision("random", Reason.LOAD, None, 0, 0, ranking)
    assert receipt_headers(decision)["x-moongate-runner-up"] == "a@1;"


def test_a_decision_as_json_has_every_candidate_and_cost_term() -> None:
    assert decision_as_json(DECISION) == {
        "policy": "kv_cost",
        "reason": "device_prefix",
        "instance": "a@1",
        "prefill_instance": None,
        "runner_up": "b",
        "prompt_tokens": 128,
        "device_tokens": 96,
        "pool_tokens": 0,
        "cost_ms": 12.34,
        "prefill": None,
        "candidates": [
            {
                "instance": "a",
                "rank": 1,
                "trust": "exact",
                "overlap_tokens": {"device": 96, "confirmed": 64, "pool": 0},
                "active_requests": 2,
                "queued_prefill_tokens": 300,
                "cost_ms": 12.34,
                "cost_terms_ms": {"prefill": 10.0, "queue": 2.34},
            },
            {
                "instance": "b",
                "rank": None,
                "trust": "approximate",
                "overlap_tokens": {"device": 0, "confirmed": 0, "pool": 0},
                "active_requests": 0,
                "queued_prefill_tokens": 0,
                "cost_ms": 20.0,
                "cost_terms_ms": {},
            },
        ],
    }


def test_a_pair_is_named_and_the_pool_counts_for_the_one_that_computes() -> None:
    prefill = FIRST._replace(
        candidate=FIRST.candidate.fetching(PoolPart(128, 100.0, on_disk=True), 0.1)
    )
    decision = Decision("kv_cost", Reason.POOL_PREFIX, 128, 96, 32, (SECOND,), prefill)
    headers = receipt_headers(decision)
    assert headers["x-moongate-instance"] == "b"
    assert headers["x-moongate-prefill-instance"] == "a@1"
    assert headers["x-moongate-pool-disk-tokens"] == "32"
    assert decision_as_json(decision)["prefill_instance"] == "a@1"
