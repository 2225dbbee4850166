"""A load test's turns and facts, made up."""

from __future__ import annotations

from typing import Any

from moongate.loadtest.gateway_totals import GatewayTotals
from moongate.loadtest.records import TurnRecord
from moongate.loadtest.settings import SHAPES, Preset, WorkloadSettings
from moongate.loadtest.summary import RunFacts

GENERATOR = {
    "measured_s": 10.0, "gaps": {"490": 3}, "cpu_share_mean": 0.1, "cpu_share_max": 0.2,
    "late_ms_p50": 0.2, "late_ms_p99": 2.0,
}  # fmt: skip


def make_turn(number: int, **changes: Any) -> TurnRecord:
    """Return a good turn of 100 prompt tokens, 60 of them cached, sent `number` seconds in."""
    fields: dict[str, Any] = {
        "session": f"s{number}", "turn": 1, "due_s": float(number), "sent_s": float(number),
        "status": 200, "instance": "ab"[number % 2], "reason": "load", "policy": "kv_cost",
        "prompt_tokens": 100, "routed_prompt_tokens": 100, "cached_tokens": 60, "device_tokens": 60, "pool_tokens": 0,
        "output_tokens": 10, "ttft_ms": 10.0 * (number + 1), "ttft_due_ms": 10.0 * (number + 1),
        "itl_ms_mean": 5.0, "itl_ms_max": 6.0, "e2e_ms": 100.0,
    } | changes  # fmt: skip
    return TurnRecord(**fields)


def make_facts(**changes: Any) -> RunFacts:
    fields: dict[str, Any] = {
        "settings": WorkloadSettings(Preset.AGENTS, 7, SHAPES[Preset.AGENTS], model="m"),
        "url": "http://127.0.0.1:1", "users": 5, "duration_s": 9.0,
        "started_at": "2026-01-01T00:00:00+00:00", "has_receipts": True, "notes": (),
        "generator": GENERATOR, "before": None, "after": None,
    } | changes  # fmt: skip
    return RunFacts(**fields)


def make_totals(requests: int, prompt_tokens: int, cached_tokens: int) -> GatewayTotals:
    return GatewayTotals(
        requests=requests, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens
    )
