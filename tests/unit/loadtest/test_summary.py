"""From turns to a report."""

from __future__ import annotations

import json
from typing import Any

import pytest
from made_runs import GENERATOR, make_facts, make_totals, make_turn

from moongate.loadtest.gateway_totals import read_totals
from moongate.loadtest.records import NOT_SENT
from moongate.loadtest.summary import percentiles, summarise


def test_a_report_has_what_the_contract_says() -> None:
    report = summarise([make_turn(n) for n in range(10)], make_facts())
    assert json.loads(json.dumps(report)) == report
    assert (report["requests"], report["failures"]) == (10, 0)
    assert report["ttft_ms"] == {"p50": 50.0, "p90": 90.0, "p99": 100.0}
    assert set(report["itl_ms"]) == {"p50", "p90", "p99"}
    assert (report["prompt_tokens"], report["cached_tokens"]) == (1000, 600)
    assert set(report["per_instance"]) == {"a", "b"}
    assert report["per_instance"]["a"]["requests"] == 5
    assert report["hit_rate"] == 0.6
    assert report["requests_per_s"] == 1.0
    assert report["tokens_by_source"] == {"device": 600, "pool": 0, "recompute": 400}
    assert report["load_max_over_mean"] == 1.0
    assert report["warnings"] == []


def test_failures_are_counted_by_kind_and_not_timed() -> None:
    bad = make_turn(99, outcome="http_500", instance=None, prompt_tokens=None, cached_tokens=None)
    report = summarise([make_turn(0), bad], make_facts())
    assert (report["requests"], report["failures"]) == (2, 1)
    assert report["failures_by_kind"] == {"http_500": 1}
    assert report["ttft_ms"]["p99"] == 10.0
    assert report["warnings"] == ["1 of 2 turns failed: 1 http_500."]


def test_a_run_without_turns_is_a_report_all_the_same() -> None:
    report = summarise([], make_facts(generator={}))
    assert report["requests"] == 0
    assert report["ttft_ms"] == {"p50": None, "p90": None, "p99": None}
    assert report["hit_rate"] is None
    assert "Nothing was sent." in report["warnings"]


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"cpu_share_mean": 0.95}, "used 95% of its core"),
        ({"late_ms_p99": 80.0}, "woke up late (P99 80 ms)"),
    ],
)
def test_a_generator_under_strain_says_so(told: dict[str, Any], expected: str) -> None:
    report = summarise([make_turn(0)], make_facts(generator=GENERATOR | told))
    assert report["generator"]["is_bottleneck"]
    assert expected in report["warnings"][0]


def test_what_was_due_and_not_sent_is_the_generator_s_and_no_request() -> None:
    report = summarise([make_turn(0), make_turn(1, outcome=NOT_SENT)], make_facts())
    assert (report["requests"], report["unsent"], report["failures"]) == (1, 1, 0)
    assert report["generator"]["is_bottleneck"]
    assert "1 conversations were due and not begun" in report["warnings"][0]


def test_totals_stand_beside_the_gateway_s_and_a_difference_is_said() -> None:
    turns = [make_turn(0), make_turn(1), make_turn(2, outcome="connection", prompt_tokens=None)]
    before = make_totals(5, 500, 50)
    same = summarise(turns, make_facts(before=before, after=make_totals(7, 700, 170)))
    assert same["gateway"]["agreement"]["requests"] == {
        "report": 2,
        "gateway": 2,
        "difference": 0.0,
    }
    assert same["gateway"]["agreement"]["cached_tokens"]["difference"] == 0.0
    assert len(same["warnings"]) == 1  # the failure
    other = summarise(turns, make_facts(before=before, after=make_totals(15, 1700, 170)))
    assert other["gateway"]["agreement"]["requests"]["difference"] == -0.8
    assert sum("others may have used it" in text for text in other["warnings"]) == 2


def test_prompts_that_a_policy_does_not_look_at_are_not_compared() -> None:
    turns = [make_turn(0, routed_prompt_tokens=None), make_turn(1, routed_prompt_tokens=None)]
    facts = make_facts(before=make_totals(0, 0, 0), after=make_totals(2, 0, 120))
    report = summarise(turns, facts)
    assert report["gateway"]["agreement"]["prompt_tokens"]["difference"] == 0.0
    assert report["warnings"] == []
    assert report["prompt_tokens"] == 200


def test_a_server_without_receipts_is_said() -> None:
    turn = make_turn(0, routed_prompt_tokens=None, instance=None, reason=None)
    report = summarise([turn], make_facts(has_receipts=False))
    assert report["per_instance"] == {}
    assert report["tokens_by_source"] == {"cached": 60, "recompute": 40}
    assert "no route receipt" in report["warnings"][0]


def test_percentiles_are_values_that_occurred() -> None:
    assert percentiles([3.0, None, 1.0]) == {"p50": 1.0, "p90": 3.0, "p99": 3.0}


def test_a_gateway_s_totals_are_read_from_its_metrics() -> None:
    text = """# TYPE moongate_requests counter
moongate_requests_total{route="/v1/chat/completions",model="m",code="200"} 4
moongate_requests_total{route="/v1/chat/completions",model="unknown",code="404"} 1
moongate_requests_total{route="/v1/embeddings",model="m",code="200"} 9
# TYPE moongate_prompt_tokens counter
moongate_prompt_tokens_total{source="device"} 30
moongate_prompt_tokens_total{source="recompute"} 12
# TYPE moongate_delivered_cached_tokens counter
moongate_delivered_cached_tokens_total 28
# TYPE moongate_retries counter
moongate_retries_total{reason="unreachable"} 2
"""
    totals = read_totals(text)
    assert (totals.requests, totals.requests_by_code) == (5, {"200": 4, "404": 1})
    assert (totals.prompt_tokens, totals.cached_tokens, totals.retries) == (42, 28, 2)
    assert totals.since(totals).requests_by_code == {"200": 0, "404": 0}
