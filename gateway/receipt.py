"""The route receipt: a decision as response headers and as JSON, from one structure."""

from __future__ import annotations

from typing import Any

from moongate.router import Decision
from moongate.router.policy import Ranked


def receipt_headers(decision: Decision) -> dict[str, str]:
    """Return the headers that tell a client where its request went, and why."""
    chosen = decision.ranking[0]
    headers = {
        "x-moongate-instance": str(chosen.holder),
        "x-moongate-policy": decision.policy,
        "x-moongate-reason": decision.reason.value,
        "x-moongate-device-tokens": str(decision.device_tokens),
        "x-moongate-pool-tokens": str(decision.pool_tokens),
    }
    if decision.prefill is not None:
        headers["x-moongate-prefill-instance"] = str(decision.prefill.holder)
    if decision.prompt_tokens is not None:
        headers["x-moongate-prompt-tokens"] = str(decision.prompt_tokens)
    pool = (decision.prefill or chosen).candidate.pool
    if pool is not None and pool.on_disk:
        headers["x-moongate-pool-disk-tokens"] = str(decision.pool_tokens)
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
        "prefill_instance": str(decision.prefill.holder) if decision.prefill is not None else None,
        "prompt_tokens": decision.prompt_tokens,
        "device_tokens": decision.device_tokens,
        "pool_tokens": decision.pool_tokens,
        "prefill": _candidate_as_json(decision.prefill) if decision.prefill is not None else None,
        "candidates": [_candidate_as_json(ranked) for ranked in decision.ranking],
    }


def _candidate_as_json(ranked: Ranked) -> dict[str, Any]:
    candidate = ranked.candidate
    return {
        "instance": candidate.holder.instance_id,
        "rank": candidate.holder.rank,
        "trust": candidate.trust.name.lower(),
        "overlap_tokens": {
            "device": candidate.overlap_tokens,
            "confirmed": candidate.confirmed_tokens,
            "pool": candidate.pool_tokens,
        },
        "active_requests": candidate.active_requests,
        "queued_prefill_tokens": candidate.queued_prefill_tokens,
        "cost_ms": ranked.cost_ms,
        "cost_terms_ms": dict(ranked.terms_ms),
    }
