"""What the samples of a side-by-side run add up to: spreads, ratios, bounds, and their tables.

Pure but for the command line, which prints the tables of an earlier run again. A ratio is formed of
two samples of one round and then summarised: what slows a whole round down, cancels out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.routers import (
    CACHE_AWARE_NO_RENDER,
    KV_AWARE,
    OURS_KV_COST,
    OURS_KV_COST_IDS,
    OURS_ROUND_ROBIN,
    ROUND_ROBIN,
)
from benchmarks.sample import Sample

TOLERANCE = 1.10
"""A bound missed by less counts as met: medians of five rounds differ by as much."""
SHARE_TOLERANCE = 0.01
"""Cached-token shares that differ by less are equal."""


class BenchRun(msgspec.Struct, frozen=True):
    """The file that a run writes."""

    date: str
    command: str
    commit: str
    machine: Mapping[str, str | int]
    versions: Mapping[str, str]
    samples: tuple[Sample, ...]
    failures: tuple[str, ...]
    """Routers that did not start or did not finish, in words."""
    skipped: tuple[str, ...]
    summary: Mapping[str, Mapping[str, RouterSummary]] = {}
    """By workload and router."""


class Spread(msgspec.Struct, frozen=True):
    """Smallest, middle and largest of a few values."""

    min: float
    median: float
    max: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(min(values), statistics.median(values), max(values), len(values))


class RouterSummary(msgspec.Struct, frozen=True):
    """All rounds of one router on one workload. Units as in `Sample`."""

    router_cpu_ms: Spread
    cpu_ratios: Mapping[str, Spread]
    """To each other router, within rounds."""
    requests_per_s: Spread
    e2e_ms_p50: Spread
    e2e_ms_p99: Spread
    first_byte_ms_p50: Spread
    router_resident_mib: Spread
    foreign_cores: Spread
    engine_cpu_ms: Spread
    engine_render_cpu_ms: Spread | None
    cached_token_share: Spread | None
    requests: int
    forwarded: int
    requests_with_ids: int
    errors: Mapping[str, int]


# --- summaries ------------------------------------------------------------------------------------


def summarise(samples: Sequence[Sample]) -> dict[str, dict[str, RouterSummary]]:
    """Return the summaries by workload and router, each in the order of the samples."""
    return {
        workload: {
            router: _summarise_router(router, of_workload)
            for router in _distinct(sample.router for sample in of_workload)
        }
        for workload, of_workload in _group(samples, lambda sample: sample.workload).items()
    }


def _summarise_router(router: str, of_workload: Sequence[Sample]) -> RouterSummary:
    own = [sample for sample in of_workload if sample.router == router]
    others = [name for name in _distinct(s.router for s in of_workload) if name != router]
    ratios = {name: find_ratio(of_workload, router, name) for name in others}
    errors = {kind for sample in own for kind in sample.errors}
    return RouterSummary(
        router_cpu_ms=Spread.of([sample.router_cpu_ms for sample in own]),
        cpu_ratios={name: ratio for name, ratio in ratios.items() if ratio is not None},
        requests_per_s=Spread.of([sample.requests_per_s for sample in own]),
        e2e_ms_p50=Spread.of([sample.e2e_ms_p50 for sample in own]),
        e2e_ms_p99=Spread.of([sample.e2e_ms_p99 for sample in own]),
        first_byte_ms_p50=Spread.of([sample.first_byte_ms_p50 for sample in own]),
        router_resident_mib=Spread.of([sample.router_resident_mib for sample in own]),
        foreign_cores=Spread.of([sample.foreign_cores for sample in own]),
        engine_cpu_ms=Spread.of([sample.engine_cpu_ms for sample in own]),
        engine_render_cpu_ms=_spread_of_known(sample.engine_render_cpu_ms for sample in own),
        cached_token_share=_spread_of_known(sample.cached_token_share for sample in own),
        requests=sum(sample.requests for sample in own),
        forwarded=sum(sample.forwarded for sample in own),
        requests_with_ids=sum(sample.requests_with_ids for sample in own),
        errors={kind: sum(s.errors.get(kind, 0) for s in own) for kind in sorted(errors)},
    )


Cost = Callable[[Sample], float | None]


def router_cost(sample: Sample) -> float | None:
    return sample.router_cpu_ms


def router_and_render_cost(sample: Sample) -> float | None:
    return sample.cpu_with_render_ms


def find_ratio(
    samples: Iterable[Sample],
    router: str,
    reference: str,
    cost: Cost = router_cost,
) -> Spread | None:
    """Return the spread of `router`'s cost over `reference`'s, of rounds that have both."""
    costs: dict[tuple[str, int], float] = {}
    for sample in samples:
        value = cost(sample)
        if value is not None:
            costs[sample.router, sample.round] = value
    ratios = [
        value / costs[reference, number]
        for (name, number), value in costs.items()
        if name == router and costs.get((reference, number))
    ]
    return Spread.of(ratios) if ratios else None


def _spread_of_known(values: Iterable[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return Spread.of(known) if known else None


def _distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _group(samples: Iterable[Sample], key: Callable[[Sample], str]) -> dict[str, list[Sample]]:
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(key(sample), []).append(sample)
    return groups


# --- bounds ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bound:
    """What the project asks of itself: a router costs at most so many times another one."""

    workload: str
    router: str
    factor: float
    reference: str
    cost: Cost = router_cost


@dataclass(frozen=True, slots=True)
class Verdict:
    """A bound next to what was measured, in words."""

    workload: str
    router: str
    asked: str
    measured: str
    outcome: str


def _make_bounds() -> tuple[Bound, ...]:
    bounds = [
        Bound("small", OURS_ROUND_ROBIN, 1.0, ROUND_ROBIN),
        Bound("agent320k", OURS_ROUND_ROBIN, 0.7, ROUND_ROBIN),
        Bound("turn320k", OURS_ROUND_ROBIN, 0.7, ROUND_ROBIN),
        Bound("stream200", OURS_ROUND_ROBIN, 1.0, ROUND_ROBIN),
        Bound("session", OURS_ROUND_ROBIN, 1.0, ROUND_ROBIN),
    ]
    for router in (OURS_KV_COST, OURS_KV_COST_IDS):
        bounds += [
            Bound("small", router, 1.2, CACHE_AWARE_NO_RENDER),
            Bound("agent320k", router, 1.3, ROUND_ROBIN),
            Bound("agent320k", router, 0.15, KV_AWARE),
            Bound("turn320k", router, 0.2, KV_AWARE),
            Bound("stream200", router, 1.1, ROUND_ROBIN),
            Bound("session", router, 2.0, KV_AWARE),
            Bound("session", router, 0.12, KV_AWARE, router_and_render_cost),
        ]
    return tuple(bounds)


BOUNDS = _make_bounds()


def judge(samples: Sequence[Sample]) -> list[Verdict]:
    """Return a verdict for each bound, and for the cached share of `session`."""
    verdicts = [_judge_bound(bound, samples) for bound in BOUNDS]
    verdicts += [_judge_share(router, samples) for router in (OURS_KV_COST, OURS_KV_COST_IDS)]
    order = _distinct(bound.workload for bound in BOUNDS)
    return sorted(verdicts, key=lambda verdict: order.index(verdict.workload))


def _judge_bound(bound: Bound, samples: Sequence[Sample]) -> Verdict:
    of_workload = [sample for sample in samples if sample.workload == bound.workload]
    ratio = find_ratio(of_workload, bound.router, bound.reference, bound.cost)
    reference = bound.reference
    if bound.cost is router_and_render_cost:
        reference += " with its engines' rendering"
    return Verdict(
        workload=bound.workload,
        router=bound.router,
        asked=f"at most {bound.factor:g} x {reference}",
        measured=_format_ratio(ratio),
        outcome=_name_outcome(ratio.median, bound.factor) if ratio else "not measured",
    )


def _name_outcome(ratio: float, factor: float) -> str:
    if ratio <= factor:
        return "met"
    return "met (within 10 %)" if ratio <= factor * TOLERANCE else "**not met**"


def _judge_share(router: str, samples: Sequence[Sample]) -> Verdict:
    medians = {
        name: spread.median
        for name, own in _group(samples, lambda sample: sample.router).items()
        if (
            spread := _spread_of_known(s.cached_token_share for s in own if s.workload == "session")
        )
    }
    best = max(medians, key=medians.__getitem__, default=None)
    if best is None or router not in medians:
        return Verdict("session", router, "the best cached share", "-", "not measured")
    is_met = medians[router] >= medians[best] - SHARE_TOLERANCE
    return Verdict(
        workload="session",
        router=router,
        asked=f"the best cached share ({medians[best]:.1%}, {best})",
        measured=f"{medians[router]:.1%}",
        outcome="met" if is_met else "**not met**",
    )


# --- tables ---------------------------------------------------------------------------------------

COLUMNS = (
    "router", "CPU ms/request, min / **median** / max", "ratio, median (min-max)", "req/s",
    "p50 ms", "p99 ms", "first byte ms", "RSS MiB", "engine render ms", "cached", "with ids",
    "foreign cores", "forwarded",
)  # fmt: skip


def format_report(run: BenchRun, baseline: str = ROUND_ROBIN) -> str:
    """Return all tables of a run as Markdown."""
    samples = run.samples
    parts = [f"{run.date}, commit {run.commit}. `{run.command}`. Ratios are to {baseline}."]
    for workload, routers in summarise(samples).items():
        rows = [_format_row(name, summary, baseline) for name, summary in routers.items()]
        parts.append(f"### {workload}\n\n{format_table(COLUMNS, rows)}")
    verdicts = [(v.workload, v.router, v.asked, v.measured, v.outcome) for v in judge(samples)]
    titles = ("workload", "router", "asked", "measured, median (min-max)", "outcome")
    parts.append(f"### Bounds\n\n{format_table(titles, verdicts)}")
    notes = [f"skipped: {text}" for text in run.skipped]
    notes += [f"failed: {text.splitlines()[0]}" for text in run.failures]
    notes += find_faults(samples)
    return "\n\n".join([*parts, *notes])


def find_faults(samples: Iterable[Sample]) -> list[str]:
    """Return a line for each sample that is not clean."""
    return [
        f"not clean: round {s.round}, {s.router}, {s.workload}: sent {s.requests},"
        f" forwarded {s.forwarded}, errors {dict(s.errors)}"
        for s in samples
        if not s.is_clean
    ]


def format_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _format_row(name: str, summary: RouterSummary, baseline: str) -> list[str]:
    cpu = summary.router_cpu_ms
    render, share = summary.engine_render_cpu_ms, summary.cached_token_share
    forwarded = f"{summary.forwarded}/{summary.requests}"
    if summary.errors:
        forwarded += f", errors: {', '.join(summary.errors)}"
    return [
        name,
        f"{cpu.min:.3f} / **{cpu.median:.3f}** / {cpu.max:.3f}",
        "1" if name == baseline else _format_ratio(summary.cpu_ratios.get(baseline)),
        f"{summary.requests_per_s.median:.0f}",
        f"{summary.e2e_ms_p50.median:.1f}",
        f"{summary.e2e_ms_p99.median:.1f}",
        f"{summary.first_byte_ms_p50.median:.1f}",
        f"{summary.router_resident_mib.median:.0f}",
        f"{render.median:.1f}" if render is not None and render.median else "-",
        f"{share.median:.1%}" if share is not None else "-",
        f"{summary.requests_with_ids}" if summary.requests_with_ids else "-",
        f"{summary.foreign_cores.median:.2f}",
        forwarded,
    ]


def _format_ratio(ratio: Spread | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio.median:.2f} ({ratio.min:.2f}-{ratio.max:.2f})"


# --- command line ---------------------------------------------------------------------------------


def main() -> int:
    """Print the tables of an earlier run; return the exit code."""
    parser = argparse.ArgumentParser(description="Print the tables of a side-by-side run again.")
    parser.add_argument("file", type=Path, help="what --json of benchmarks.side_by_side wrote")
    parser.add_argument("--baseline", default=ROUND_ROBIN, help="the router that is 1")
    arguments = parser.parse_args()
    run = msgspec.json.decode(arguments.file.read_bytes(), type=BenchRun)
    print(format_report(run, arguments.baseline))
    return 0


if __name__ == "__main__":
    sys.exit(main())
