"""From a run's turns to `report.json`: totals, percentiles, who did what, and what to be wary of.

Pure. Times are milliseconds unless a name says otherwise; percentiles are nearest-rank, so each is a
value that occurred, but for gaps between tokens (see `GapHistogram`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moongate.loadtest.gateway_totals import GatewayTotals
from moongate.loadtest.records import LOG_FILE, NOT_SENT, GapHistogram, TurnRecord
from moongate.loadtest.settings import WorkloadSettings

Json = dict[str, Any]

CPU_SHARE_MAX = 0.8
"""A generator that needs more of its core, on average, may be what limits the load."""
LATE_MS_MAX = 25.0
"""One that wakes up later than this, for one nap in a hundred, measures too long times."""
DISAGREEMENT_MAX = 0.01
"""Totals that differ by more from the gateway's own are worth a warning."""

PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What is known of a run beside its turns."""

    settings: WorkloadSettings
    url: str
    users: int | None
    duration_s: float
    started_at: str
    """ISO 8601, UTC."""
    has_receipts: bool
    notes: Sequence[str]
    generator: Mapping[str, Any]
    """What the generator wrote of itself; empty if it ended before."""
    before: GatewayTotals | None
    after: GatewayTotals | None
    name: str = ""
    was_interrupted: bool = False


def summarise(records: Sequence[TurnRecord], facts: RunFacts) -> Json:
    """Return the report as it is written."""
    sent = [record for record in records if record.outcome != NOT_SENT]
    good = [record for record in sent if record.is_ok]
    gaps = GapHistogram.from_json(facts.generator.get("gaps", {}))
    measured_s = float(facts.generator.get("measured_s") or facts.duration_s)
    prompt_tokens = _sum(sent, lambda record: record.prompt_tokens)
    cached_tokens = _sum(sent, lambda record: record.cached_tokens)
    report: Json = {
        "name": facts.name,
        "preset": facts.settings.preset.value,
        "requests": len(sent),
        "failures": len(sent) - len(good),
        "failures_by_kind": dict(Counter(r.outcome for r in sent if not r.is_ok)),
        "unsent": len(records) - len(sent),
        "sessions": len({record.session for record in sent}),
        "ttft_ms": percentiles(record.ttft_ms for record in good),
        "ttft_due_ms": percentiles(record.ttft_due_ms for record in good),
        "itl_ms": {name: gaps.percentile(share) for name, share in PERCENTILES.items()},
        "e2e_ms": percentiles(record.e2e_ms for record in good),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "output_tokens": _sum(sent, lambda record: record.output_tokens),
        "hit_rate": cached_tokens / prompt_tokens if prompt_tokens else None,
        "requests_per_s": len(good) / measured_s if measured_s else None,
        "tokens_by_source": tokens_by_source(sent),
        "ttft_ms_by_source": _ttft_by(good, TurnRecord.main_source),
        "ttft_ms_by_reason": _ttft_by(good, lambda record: record.reason),
        "per_instance": _per_instance(sent),
        "duration_s": facts.duration_s,
        "interrupted": facts.was_interrupted,
        "measured_s": measured_s,
        "started_at": facts.started_at,
        "url": facts.url,
        "model": facts.settings.model,
        "users": facts.users,
        "seed": facts.settings.seed,
        "settings": _settings_as_json(facts.settings),
        "receipts": facts.has_receipts,
        "generator": _generator(facts.generator, len(records) - len(sent)),
        "gateway": _gateway(sent, facts),
    }
    report["load_max_over_mean"] = _load_max_over_mean(report["per_instance"])
    report["warnings"] = [*facts.notes, *find_warnings(report)]
    return report


def percentiles(values: Iterable[float | None]) -> dict[str, float | None]:
    """Return p50, p90 and p99 of what is known; None where nothing is."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return dict.fromkeys(PERCENTILES)
    return {
        name: known[max(math.ceil(share * len(known)) - 1, 0)]
        for name, share in PERCENTILES.items()
    }


def tokens_by_source(records: Iterable[TurnRecord]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for record in records:
        total.update(record.tokens_by_source())
    return dict(total)


def group(
    records: Iterable[TurnRecord], key: Callable[[TurnRecord], str | None]
) -> dict[str, list[TurnRecord]]:
    """Return turns by a name, in the names' order; those without one are left out."""
    groups: dict[str, list[TurnRecord]] = {}
    for record in records:
        name = key(record)
        if name is not None:
            groups.setdefault(name, []).append(record)
    return dict(sorted(groups.items()))


def find_warnings(report: Json) -> list[str]:
    """Return what a reader of these figures should know, as sentences."""
    found = list(report["generator"]["reasons"])
    if report["interrupted"]:
        found.append(f"The run was ended early, after {report['measured_s']:.0f} s.")
    if not report["requests"]:
        found.append("Nothing was sent.")
    elif report["failures"]:
        kinds = ", ".join(f"{n} {kind}" for kind, n in report["failures_by_kind"].items())
        found.append(f"{report['failures']} of {report['requests']} turns failed: {kinds}.")
    if not report["receipts"]:
        found.append(
            "Answers have no route receipt: it is no moongate gateway, or its receipt headers are off. "
            "Instances and reasons are unknown."
        )
    agreement = (report["gateway"] or {}).get("agreement", {})
    for name, compared in agreement.items():
        difference = compared["difference"]
        if difference is None or abs(difference) > DISAGREEMENT_MAX:
            found.append(
                f"The gateway counts {compared['gateway']:,} {name.replace('_', ' ')}, this report "
                f"{compared['report']:,}: others may have used it meanwhile."
            )
    return found


# --- parts ----------------------------------------------------------------------------------------


def _sum(records: Iterable[TurnRecord], value: Callable[[TurnRecord], int | None]) -> int:
    return sum(value(record) or 0 for record in records)


def _ttft_by(
    records: Sequence[TurnRecord], key: Callable[[TurnRecord], str | None]
) -> dict[str, Json]:
    return {
        name: {"requests": len(own), **percentiles(record.ttft_ms for record in own)}
        for name, own in group(records, key).items()
    }


def _per_instance(sent: Sequence[TurnRecord]) -> dict[str, Json]:
    return {
        name: {
            "requests": len(own),
            "failures": sum(not record.is_ok for record in own),
            "prompt_tokens": _sum(own, lambda record: record.prompt_tokens),
            "cached_tokens": _sum(own, lambda record: record.cached_tokens),
            "output_tokens": _sum(own, lambda record: record.output_tokens),
            "computed_tokens": tokens_by_source(own).get("recompute", 0),
            "ttft_ms": percentiles(record.ttft_ms for record in own if record.is_ok),
            "busy_s": sum(record.e2e_ms or 0.0 for record in own) / 1000,
            "reasons": dict(Counter(record.reason for record in own if record.reason)),
        }
        for name, own in group(sent, lambda record: record.instance).items()
    }


def _load_max_over_mean(per_instance: Mapping[str, Json]) -> float | None:
    """Return the prompt tokens that the busiest instance computed over the mean. Those without any
    turn aren't known of."""
    computed = [float(own["computed_tokens"]) for own in per_instance.values()]
    mean = sum(computed) / len(computed) if computed else 0.0
    return max(computed) / mean if mean else None


def _settings_as_json(settings: WorkloadSettings) -> Json:
    return {
        **asdict(settings),
        "preset": settings.preset.value,
        "trace_format": settings.trace_format.value if settings.trace_format else None,
        "traces": str(settings.traces) if settings.traces else None,
    }


def _generator(facts: Mapping[str, Any], unsent: int) -> Json:
    told = {name: value for name, value in facts.items() if name not in ("gaps", "measured_s")}
    reasons = []
    if not facts:
        reasons.append(
            f"The load generator ended early and told nothing of itself: see {LOG_FILE}."
        )
    elif told["cpu_share_mean"] > CPU_SHARE_MAX:
        reasons.append(
            f"The load generator used {told['cpu_share_mean']:.0%} of its core: it may be the bottleneck."
        )
    late_ms = told.get("late_ms_p99")
    if late_ms is not None and late_ms > LATE_MS_MAX:
        reasons.append(
            f"The load generator woke up late (P99 {late_ms:.0f} ms), for want of CPU time on its "
            f"machine: times are too long by as much, and it may be the bottleneck."
        )
    if unsent:
        reasons.append(
            f"{unsent} conversations were due and not begun: too many were open. The server is slower "
            f"than the rate, and from there on the load is less than asked for."
        )
    return {**told, "is_bottleneck": bool(reasons), "reasons": reasons}


def _gateway(sent: Sequence[TurnRecord], facts: RunFacts) -> Json | None:
    if facts.before is None or facts.after is None:
        return None
    delta = facts.after.since(facts.before)
    reached = [record for record in sent if record.outcome != "connection"]
    # The gateway counts tokens of prompts that its policy looked at, which receipts tell.
    read = [r for r in reached if r.routed_prompt_tokens is not None or not facts.has_receipts]
    own = {
        "requests": len(reached),
        "prompt_tokens": _sum(read, lambda record: record.prompt_tokens),
        "cached_tokens": _sum(reached, lambda record: record.cached_tokens),
    }
    return {
        "before": facts.before.as_json(),
        "after": facts.after.as_json(),
        "delta": delta.as_json(),
        "agreement": {
            name: _compare(count, getattr(delta, name)) for name, count in own.items()
        },
    }  # fmt: skip


def _compare(report: int, gateway: int) -> Json:
    if gateway:
        difference: float | None = (report - gateway) / gateway
    else:
        difference = 0.0 if report == 0 else None
    return {"report": report, "gateway": gateway, "difference": difference}
