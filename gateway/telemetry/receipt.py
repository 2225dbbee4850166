"""The receipt of a request: where it went and why, and what became of it.

One structure, from which everything that explains a turn is made: response headers, `/admin/decisions`,
`/admin/explain` (which has no outcome), the attributes of a trace's spans, and the error of predictions.
It holds no text of a prompt, and of a session's key only shows its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moongate.gateway.dialects.body import name_session
from moongate.router import Decision
from moongate.router.policy import Ranked


@dataclass(slots=True, eq=False)
class Receipt:
    """One request's. Made when it is first forwarded, filled in until `status` is there.

    Tokens behind `status` are what the engine reported; None: it didn't.
    """

    request_id: str
    route: str  # its template
    model: str
    session_key: str | None
    is_stream: bool
    began_at_s: float  # unix time
    decision: Decision  # the last one; there are several where an attempt failed
    tenant: str = ""  # whose it is; "" where no keys are asked for
    trace_id: str | None = None  # of the trace that it is in, if that is recorded
    number: int = 0  # rises from receipt to receipt of one gateway
    attempts: int = 1
    queue_ms: float | None = None  # that it waited for an instance with room; None: it didn't
    ttft_ms: float | None = None  # from the whole request to its answer's first byte
    status: int | None = None  # None: under way
    e2e_ms: float | None = None
    is_broken_off: bool = False  # by the engine, after the status
    cached_tokens: int | None = None
    pool_tokens: int | None = None  # of these, from the shared pool
    output_tokens: int | None = None

    @property
    def reuse_error_tokens(self) -> int | None:
        """Return by how much more than expected was reused, negative: less. None: not known.

        *Missing data:* of a prompt that could not be read nothing was expected, which is no error.
        """
        if self.cached_tokens is None or self.decision.prompt_tokens is None or self.status != 200:
            return None
        return self.cached_tokens - self.decision.reused_tokens


def receipt_headers(decision: Decision) -> dict[str, str]:
    """Return the headers that tell a client where its request went, and why."""
    chosen, runner_up = decision.chosen, decision.runner_up
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
    if runner_up is not None:
        cost = f"{runner_up.cost_ms:.1f}" if runner_up.cost_ms is not None else ""
        headers["x-moongate-runner-up"] = f"{runner_up.holder};{cost}"
    return headers


def receipt_as_json(receipt: Receipt) -> dict[str, Any]:
    """Return all that is known of a request. `outcome` None: it is under way."""
    session_key = receipt.session_key
    return {
        "number": receipt.number,
        "began_at_s": receipt.began_at_s,
        "request_id": receipt.request_id,
        "trace_id": receipt.trace_id,
        "route": receipt.route,
        "model": receipt.model,
        "session": name_session(session_key) if session_key is not None else None,
        "tenant": receipt.tenant or None,
        "is_stream": receipt.is_stream,
        "attempts": receipt.attempts,
        "queue_ms": _rounded(receipt.queue_ms),
        "ttft_ms": _rounded(receipt.ttft_ms),
        **decision_as_json(receipt.decision),
        "outcome": _outcome_as_json(receipt) if receipt.status is not None else None,
    }


def _outcome_as_json(receipt: Receipt) -> dict[str, Any]:
    return {
        "status": receipt.status,
        "is_broken_off": receipt.is_broken_off,
        "e2e_ms": _rounded(receipt.e2e_ms),
        "cached_tokens": receipt.cached_tokens,
        "pool_tokens": receipt.pool_tokens,
        "output_tokens": receipt.output_tokens,
        "reuse_error_tokens": receipt.reuse_error_tokens,
    }


def decision_as_json(decision: Decision) -> dict[str, Any]:
    """Return a decision with all candidates, best first. Tokens and milliseconds."""
    chosen, runner_up, prefill = decision.chosen, decision.runner_up, decision.prefill
    return {
        "policy": decision.policy,
        "reason": decision.reason.value,
        "instance": str(chosen.holder),
        "prefill_instance": str(prefill.holder) if prefill is not None else None,
        "runner_up": str(runner_up.holder) if runner_up is not None else None,
        "prompt_tokens": decision.prompt_tokens,
        "device_tokens": decision.device_tokens,
        "pool_tokens": decision.pool_tokens,
        "cost_ms": chosen.cost_ms,
        "prefill": _candidate_as_json(prefill) if prefill is not None else None,
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


def _rounded(milliseconds: float | None) -> float | None:
    return round(milliseconds, 3) if milliseconds is not None else None
