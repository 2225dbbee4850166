"""How answers are judged, and how counters become a sample."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.client import Answer
from benchmarks.cpu import CpuReading
from benchmarks.load import Clocks, Played, Timing, find_problem, make_sample, percentile
from benchmarks.sample import EngineStats
from benchmarks.workloads import Workload

DONE = b"data: [DONE]\n\n"
EVENT = b'data: {"choices": []}\n\n'


@pytest.mark.parametrize(
    ("status", "body", "events", "problem"),
    [
        (200, b'{"object":"chat.completion"}', None, None),
        (200, b'{"object":"error"}', None, "not a completion"),
        (503, b'{"object":"chat.completion"}', None, "status 503"),
        (200, EVENT * 2 + DONE, 3, None),
        (200, EVENT + DONE, 3, "2 events instead of 3"),
        (200, EVENT * 3, 3, "stream without its end"),
    ],
)
def test_an_answer_must_be_whole(
    status: int, body: bytes, events: int | None, problem: str | None
) -> None:
    assert find_problem(Answer(status, body, 0.0, 0.0), events) == problem


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([float(n) for n in range(100)], 0.99) == 99.0
    assert percentile([], 0.5) == 0.0


def reading(run_ns: int) -> CpuReading:
    return CpuReading({(1, 1): run_ns}, ticks=0, resident_bytes=2**20, processes=1)


def clocks(router_ns: int, engine_ns: int, client_s: float, machine_s: float, **a: float) -> Clocks:
    engines = (EngineStats(pid=7, **a), EngineStats(pid=8))  # type: ignore[arg-type]
    return Clocks(
        reading(router_ns), (reading(engine_ns), reading(0)), client_s, machine_s, engines
    )


def test_a_sample_is_what_clocks_and_counters_gained() -> None:
    workload = Workload("small", ((b"1234",), (b"12",)), clients=1)
    before = clocks(10_000_000, 0, 1.0, 50.0, requests=5, prompt_tokens=90, renders=1)
    after = clocks(
        14_000_000, 2_000_000, 1.01, 50.116, requests=7, prompt_tokens=290, cached_tokens=150,
        cached_share_sum=1.5, renders=5, render_bytes=400, measured_render_bytes=100,
        measured_render_s=0.05,
    )  # fmt: skip
    played = Played((Timing(0.001, 0.002), Timing(0.003, 0.004)), Counter(), wall_s=0.1)
    sample = make_sample("a", 3, workload, played, before, after)
    assert (sample.router_cpu_ms, sample.engine_cpu_ms) == pytest.approx((2.0, 1.0))
    assert sample.engine_render_cpu_ms == pytest.approx(100.0)
    assert sample.client_cpu_ms == pytest.approx(5.0)
    assert sample.foreign_cores == pytest.approx(1.0)
    assert sample.cached_token_share == pytest.approx(0.75)
    assert sample.cached_share_mean == pytest.approx(0.75)
    assert (sample.requests_per_s, sample.body_bytes_mean) == pytest.approx((20.0, 3.0))
    assert (sample.forwarded, sample.split, sample.is_clean) == (2, (2, 0), True)


def test_what_engines_complain_about_makes_a_sample_unclean() -> None:
    workload = Workload("small", ((b"{}",),), clients=1)
    after = clocks(0, 0, 0.0, 0.0, requests=1, requests_with_wrong_ids=1)
    played = Played((), Counter({"status 502": 1}), wall_s=1.0)
    sample = make_sample("a", 0, workload, played, clocks(0, 0, 0.0, 0.0), after)
    assert sample.errors == {"status 502": 1, "token ids that are not the prompt's": 1}
    assert sample.cached_token_share is None
    assert not sample.is_clean
