"""A request and its receipt as attributes of its span.

Names follow OpenTelemetry's semantic conventions for HTTP servers and for generative AI (1.37); what
those don't have is under `moongate.`. No text of a prompt is among them, and no session key.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from moongate.gateway.dialects.body import name_session
from moongate.gateway.dialects.routes import PromptKind, Route
from moongate.gateway.telemetry.otlp import Key, decimals
from moongate.gateway.telemetry.receipt import Receipt
from moongate.router import Holder

WORDS_MAX = 4096
"""Attributes that are kept as they are encoded: routes, models, instances, policies and reasons."""

OPERATIONS: Mapping[PromptKind, str] = {
    PromptKind.CHAT: "chat",
    PromptKind.RESPONSES: "chat",
    PromptKind.MESSAGES: "chat",
    PromptKind.COMPLETION: "text_completion",
}

_REQUEST_ID = Key("moongate.request_id")
_CONVERSATION = Key("gen_ai.conversation.id")
_DEVICE_TOKENS = Key("moongate.device_tokens")
_POOL_TOKENS = Key("moongate.pool_tokens")
_INPUT_TOKENS = Key("gen_ai.usage.input_tokens")
_CACHED_TOKENS = Key("gen_ai.usage.cache_read.input_tokens")
_OUTPUT_TOKENS = Key("gen_ai.usage.output_tokens")
_REUSE_ERROR = Key("moongate.reuse_error_tokens")
_ATTEMPTS = Key("moongate.attempts")


def request_attributes(
    route: Route,
    status: int,
    request_id: str,
    receipt: Receipt | None,
    error: str | None,
    input_tokens: int | None,
) -> bytes:
    """Return all attributes of a request. `receipt` None: it was not forwarded.

    `input_tokens`: as the engine counted them, if it said so.
    """
    if receipt is None:
        return _route_words(route, status, error) + _REQUEST_ID.text(request_id)
    decision = receipt.decision
    runner_up, prefill = decision.runner_up, decision.prefill
    words = _decision_words(
        receipt.model,
        decision.policy,
        decision.reason.value,
        decision.chosen.holder,
        runner_up.holder if runner_up is not None else None,
        prefill.holder if prefill is not None else None,
    )
    parts = [_route_words(route, status, error), words, _REQUEST_ID.text(request_id)]
    if receipt.session_key is not None:
        parts.append(_CONVERSATION.text(name_session(receipt.session_key)))
    parts.append(_DEVICE_TOKENS.number(decision.device_tokens))
    if decision.pool_tokens:
        parts.append(_POOL_TOKENS.number(decision.pool_tokens))
    if receipt.attempts > 1:
        parts.append(_ATTEMPTS.number(receipt.attempts))
    for key, number in (
        (_INPUT_TOKENS, decision.prompt_tokens if input_tokens is None else input_tokens),
        (_CACHED_TOKENS, receipt.cached_tokens),
        (_OUTPUT_TOKENS, receipt.output_tokens),
        (_REUSE_ERROR, receipt.reuse_error_tokens),
    ):
        if number is not None:
            parts.append(key.number(number))
    parts.append(_milliseconds(receipt))
    return b"".join(parts)


def _milliseconds(receipt: Receipt) -> bytes:
    """Return costs and times. Of cost terms the chosen one's; `/admin/decisions` has the others'."""
    chosen, runner_up = receipt.decision.chosen, receipt.decision.runner_up
    names: tuple[str, ...] = ()
    values: list[float] = []
    if chosen.cost_ms is not None:
        names = _cost_names(tuple(chosen.terms_ms))
        values = [chosen.cost_ms, *chosen.terms_ms.values()]
        if runner_up is not None and runner_up.cost_ms is not None:
            names = (*names, "moongate.runner_up_cost_ms")
            values.append(runner_up.cost_ms)
    if receipt.ttft_ms is not None:
        names = (*names, "moongate.ttft_ms")
        values.append(receipt.ttft_ms)
    return decimals(names, values)


@lru_cache(WORDS_MAX)
def _cost_names(terms: tuple[str, ...]) -> tuple[str, ...]:
    return "moongate.cost_ms", *(f"moongate.cost.{term}_ms" for term in terms)


@lru_cache(WORDS_MAX)
def _route_words(route: Route, status: int, error: str | None) -> bytes:
    operation = OPERATIONS.get(route.kind, route.template.rpartition("/")[2])
    words = {
        "http.request.method": "POST",
        "http.route": route.template,
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "vllm",
        **({"error.type": error} if error is not None else {}),
    }
    return _encoded(words) + Key("http.response.status_code").number(status)


@lru_cache(WORDS_MAX)
def _decision_words(
    model: str,
    policy: str,
    reason: str,
    chosen: Holder,
    runner_up: Holder | None,
    prefill: Holder | None,
) -> bytes:
    words = {
        "gen_ai.request.model": model,
        "moongate.policy": policy,
        "moongate.reason": reason,
        "moongate.instance": str(chosen),
        **({"moongate.runner_up": str(runner_up)} if runner_up is not None else {}),
        **({"moongate.prefill_instance": str(prefill)} if prefill is not None else {}),
    }
    return _encoded(words)


@lru_cache(WORDS_MAX)
def attempt_words(instance: str, error: str | None) -> bytes:
    """Return the attributes of an attempt at an instance."""
    failed = {"error.type": error} if error is not None else {}
    return _encoded({"moongate.instance": instance, **failed})


def _encoded(words: Mapping[str, str]) -> bytes:
    return b"".join(Key(name).text(value) for name, value in words.items())
