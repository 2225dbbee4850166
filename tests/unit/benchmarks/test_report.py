"""Spreads, ratios within rounds, bounds and tables, of samples made up by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from benchmarks.report import (
    BOUNDS,
    BenchRun,
    Spread,
    find_faults,
    find_ratio,
    format_report,
    judge,
    router_and_render_cost,
    summarise,
)
from benchmarks.routers import KV_AWARE, OURS_KV_COST, OURS_ROUND_ROBIN, ROUND_ROBIN, ROUTERS
from benchmarks.sample import Sample
from benchmarks.workloads import WORKLOADS


def sample(router: str, round_number: int, cpu_ms: float, **other: Any) -> Sample:
    values: dict[str, Any] = {
        "workload": "small",
        "requests": 10,
        "forwarded": 10,
        "errors": {},
        "engine_cpu_ms": 0.1,
        "engine_render_cpu_ms": 0.0,
        "client_cpu_ms": 0.1,
        "foreign_cores": 0.0,
        "requests_per_s": 1_000.0,
        "e2e_ms_p50": 2.0,
        "e2e_ms_p99": 9.0,
        "first_byte_ms_p50": 1.0,
        "router_resident_mib": 80.0,
        "body_bytes_mean": 1_740.0,
        "split": (5, 5),
        "renders": 0,
        "requests_with_ids": 0,
        "cached_token_share": None,
        "cached_share_mean": None,
    }
    return Sample(router=router, round=round_number, router_cpu_ms=cpu_ms, **{**values, **other})


def test_a_ratio_is_formed_within_a_round() -> None:
    """The machine was twice as slow in round 1: the ratio of medians would be 0.75."""
    samples = [
        sample("a", 0, 1.0),
        sample("b", 0, 2.0),
        sample("a", 1, 2.0),
        sample("b", 1, 4.0),
        sample("b", 2, 1.0),
    ]
    assert find_ratio(samples, "a", "b") == Spread(0.5, 0.5, 0.5, count=2)
    assert find_ratio(samples, "b", "a") == Spread(2.0, 2.0, 2.0, count=2)


def test_there_is_no_ratio_without_a_common_round() -> None:
    assert find_ratio([sample("a", 0, 1.0), sample("b", 1, 1.0)], "a", "b") is None


def test_rendering_for_the_router_counts_where_it_is_asked_for() -> None:
    samples = [
        sample("a", 0, 30.0),
        sample("b", 0, 20.0, engine_render_cpu_ms=280.0),
        sample("a", 1, 30.0),
        sample("b", 1, 20.0, engine_render_cpu_ms=None),
    ]
    assert find_ratio(samples, "a", "b", router_and_render_cost) == Spread(0.1, 0.1, 0.1, count=1)


def test_a_summary_has_the_spread_of_rounds_and_the_sum_of_requests() -> None:
    samples = [
        sample("a", 0, 3.0, errors={"status 502": 1}),
        sample("a", 1, 1.0, forwarded=9),
        sample("a", 2, 8.0, errors={"status 502": 2}, cached_token_share=0.5),
    ]
    summary = summarise(samples)["small"]["a"]
    assert summary.router_cpu_ms == Spread(1.0, 3.0, 8.0, count=3)
    assert (summary.forwarded, summary.requests) == (29, 30)
    assert summary.errors == {"status 502": 3}
    assert summary.cached_token_share == Spread(0.5, 0.5, 0.5, count=1)
    assert len(find_faults(samples)) == 3


@pytest.mark.parametrize(
    ("ratio", "outcome"), [(1.0, "met"), (1.09, "met (within 10 %)"), (1.11, "**not met**")]
)
def test_a_bound_missed_by_a_tenth_counts_as_met(ratio: float, outcome: str) -> None:
    samples = [sample(OURS_ROUND_ROBIN, 0, 0.2 * ratio), sample(ROUND_ROBIN, 0, 0.2)]
    (verdict,) = (v for v in judge(samples) if v.router == OURS_ROUND_ROBIN and v.measured != "-")
    assert verdict.outcome == outcome


@pytest.mark.parametrize(("share", "outcome"), [(0.845, "met"), (0.83, "**not met**")])
def test_the_cached_share_is_compared_with_the_best(share: float, outcome: str) -> None:
    samples = [
        sample(KV_AWARE, 0, 20.0, workload="session", cached_token_share=0.853),
        sample(OURS_KV_COST, 0, 10.0, workload="session", cached_token_share=share),
    ]
    (verdict,) = (v for v in judge(samples) if "cached share" in v.asked and v.measured != "-")
    assert (verdict.router, verdict.outcome) == (OURS_KV_COST, outcome)


def test_bounds_name_routers_and_workloads_that_there_are() -> None:
    names = {router.name for router in ROUTERS}
    assert {bound.router for bound in BOUNDS} | {bound.reference for bound in BOUNDS} <= names
    assert {bound.workload for bound in BOUNDS} == set(WORKLOADS)


def test_a_stored_run_gives_the_same_report() -> None:
    samples = (sample("a", 0, 1.0), sample(ROUND_ROBIN, 0, 2.0, forwarded=8))
    run = BenchRun(
        date="today",
        command="python -m benchmarks.side_by_side",
        commit="c0ffee",
        machine={"cores": 2},
        versions={"python": "3.11"},
        samples=samples,
        failures=("round 1/1, b: not ready after 30 s: log\nmore log",),
        skipped=(),
        summary=summarise(samples),
    )
    stored = msgspec.json.decode(msgspec.json.encode(run), type=BenchRun)
    report = format_report(stored)
    assert report == format_report(run)
    assert "| a | 1.000 / **1.000** / 1.000 | 0.50 (0.50-0.50) |" in report
    assert "failed: round 1/1, b: not ready after 30 s: log\n" in report
    assert f"not clean: round 0, {ROUND_ROBIN}, small: sent 10, forwarded 8" in report
