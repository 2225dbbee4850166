"""What is told of one request: counted for Prometheus, noted for operators, traced.

The hot path says what happens, and here is where that is written. Nothing of it changes what a client
gets, but for the headers by which a trace is passed on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moongate.gateway.dialects.routes import Route
from moongate.gateway.telemetry.metrics import UNKNOWN_MODEL, Metrics
from moongate.gateway.telemetry.otlp import SpanForm
from moongate.gateway.telemetry.receipt import Receipt
from moongate.gateway.telemetry.recent import RecentReceipts
from moongate.gateway.telemetry.recent_turns import RecentTurns, Turn
from moongate.gateway.telemetry.tracing import QUEUE, STREAM, Tracing
from moongate.router import Decision, Forward, Request
from moongate.router.model import InstanceId


@dataclass(frozen=True, slots=True)
class Observers:
    """Who is told. `tracing`: None where nobody takes traces. `clock`: monotonic seconds."""

    metrics: Metrics
    recent: RecentReceipts
    seen: RecentTurns
    tracing: Tracing | None
    clock: Callable[[], float]


class Account:
    """One request's. `is_counted` once: whatever ends it, it is one request."""

    def __init__(
        self,
        observers: Observers,
        route: Route,
        request_id: str,
        headers: Mapping[str, str],
        opened_at: float,
    ) -> None:
        self._observers = observers
        self._route = route
        self._began = observers.clock()
        self._noted: Turn | None = None  # for those who look; once it was forwarded
        self._input_tokens: int | None = None  # as the engine counted them, for the trace
        tracing = observers.tracing
        self.trace = tracing.begin(headers, opened_at) if tracing is not None else None
        self.request_id = request_id
        self.model_label = UNKNOWN_MODEL
        self.session_key: str | None = None
        self.tenant = ""
        self.receipt: Receipt | None = None  # once it is forwarded
        self.queue_ms: float | None = (
            None  # that it waited for an instance with room; None: it didn't
        )
        self.has_first_byte = False
        self.is_counted = False

    def phase_ended(self, phase: SpanForm) -> None:
        if self.trace is not None:
            self.trace.note(phase, self._observers.clock())

    def waited(self, seconds: float) -> None:
        """It waited for an instance with room."""
        self.queue_ms = seconds * 1000
        self._observers.metrics.queue_seconds.observe(seconds)
        self.phase_ended(QUEUE)

    def forwarded(self, forward: Forward, request: Request, *, is_stream: bool) -> None:
        """It is sent somewhere, for the first time or again."""
        metrics, decision = self._observers.metrics, forward.decision
        metrics.routed.add(1, forward.holder.instance_id, decision.policy, decision.reason.value)
        self._note_decision(decision, request, is_stream=is_stream)
        if decision.prompt_tokens is not None and not forward.is_redelivery:
            metrics.prompt_tokens.add(decision.device_tokens, "device")
            if decision.pool_tokens:
                metrics.prompt_tokens.add(decision.pool_tokens, "pool")
            metrics.prompt_tokens.add(decision.recompute_tokens, "recompute")

    def _note_decision(self, decision: Decision, request: Request, *, is_stream: bool) -> None:
        """Begin the receipt, or note that there is another attempt."""
        if self.receipt is not None:
            self.receipt.decision = decision
            self.receipt.attempts += 1
            if self._noted is not None:
                self._observers.seen.forward_again(self._noted)
            return
        trace = self.trace
        self.receipt = Receipt(
            self.request_id,
            self._route.template,
            self.model_label,
            self.session_key,
            is_stream,
            time.time(),
            decision,
            self.tenant,
            trace.trace_id if trace is not None and trace.is_recorded else None,
            queue_ms=self.queue_ms,
        )
        self._observers.recent.add(self.receipt)
        now = self._observers.clock()
        self._noted = self._observers.seen.begin(request, self.receipt, now)

    def attempted(self, forward: Forward, error: str | None) -> None:
        """An attempt has its answer's first byte, or failed."""
        if self.trace is not None:
            self.trace.note_attempt(self._observers.clock(), str(forward.holder), error)

    def first_byte(self, instance: InstanceId) -> None:
        self.has_first_byte = True
        elapsed_s = self._observers.clock() - self._began
        if self.receipt is not None:
            self.receipt.ttft_ms = elapsed_s * 1000
        self._observers.metrics.ttft_seconds.observe(elapsed_s, instance)

    def answered(
        self,
        *,
        prompt_tokens: int | None,
        cached_tokens: int | None,
        pool_tokens: int | None,
        output_tokens: int | None,
    ) -> None:
        """Its answer is complete, and this is what the engine reported. None: it didn't."""
        self._input_tokens = prompt_tokens
        metrics = self._observers.metrics
        if cached_tokens is not None:
            metrics.delivered_cached_tokens.add(cached_tokens)
        if pool_tokens is not None:
            metrics.delivered_pool_tokens.add(pool_tokens)
        if self.receipt is not None:
            self.receipt.cached_tokens = cached_tokens
            self.receipt.pool_tokens = pool_tokens
            self.receipt.output_tokens = output_tokens

    def broken_off(self) -> None:
        """Its answer ends before it is complete."""
        if self.receipt is not None:
            self.receipt.is_broken_off = True

    def count(self, status: int) -> None:
        """It has ended, or nobody waits for its end. 499: its client has left."""
        observers, receipt = self._observers, self.receipt
        self.is_counted = True
        observers.metrics.requests.add(1, self._route.template, self.model_label, str(status))
        elapsed_s = observers.clock() - self._began
        observers.metrics.e2e_seconds.observe(elapsed_s)
        if receipt is not None:
            receipt.status, receipt.e2e_ms = status, elapsed_s * 1000
            observers.metrics.note_reuse(receipt)
        if self.trace is not None and observers.tracing is not None:
            if self.has_first_byte:
                self.phase_ended(STREAM)
            observers.tracing.end(
                self.trace, self._route, status, self.request_id, receipt, self._input_tokens
            )
