"""The route receipt: a decision as response headers and as JSON, from one structure."""

from __future__ import annotations

from typing import Any

from moongate.router import Decision
from moongate.router.commands import CandidateReport


def receipt_headers(decision: Decision) -> dict[str, str]:
    """Return the headers that tell a client where its request went, and why."""
    chosen = decision.ranking[0]
    headers = {
        "x-moongate-instance": str(chosen.holder),
        "x-moongate-policy": decision.policy,
        "x-moongate-reason": decision.reason.value,
        "x-moongate-device-tokens": str(decision.device_tokens),
        "x-moongate-pool-tokens": "0",
    }
    if decision.prompt_tokens is not None:
        headers["x-moongate-prompt-tokens"] = str(decision.prompt_tokens)
    if chosen.cost_ms is not None:
        headers["x-moongate-cost-ms"] = f"{chosen.cost_ms:.1f}"
    if len(decision.ranking) > 1:
        runner_up = decision.ranking[1]
        cost = f"{runner_up.cost_ms:.1f}" if runner_up.cost_ms is not None else ""
        headers["x-moongate-runner-up"] = f"{runner_up.holder};{cost}"
    return headers


def decision_as_json(decision: Decision) -> dict[str, Any]:
    """Return a decision with all candidates, best first. Tokens and milliseconds."""
    return {
        "policy": decision.policy,
        "reason": decision.reason.value,
        "instance": str(decision.ranking[0].holder),
        "prompt_tokens": decision.prompt_tokens,
        "device_tokens": decision.device_tokens,
        "pool_tokens": 0,
        "candidates": [_candidate_as_json(report) for report in decision.ranking],
    }


def _candidate_as_json(report: CandidateReport) -> dict[str, Any]:
    return {
        "instance": report.holder.instance_id,
        "rank": report.holder.rank,
        "trust": report.trust.name.lower(),
        "overlap_tokens": {
            "device": report.overlap_tokens,
            "confirmed": report.confirmed_tokens,
            "pool": 0,
        },
        "active_requests": report.active_requests,
        "queued_prefill_tokens": report.queued_prefill_tokens,
        "cost_ms": report.cost_ms,
        "cost_terms_ms": dict(report.cost_terms_ms),
    }
