"""What a client says of how its request is to wait, and how much it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from moongate.gateway.dialects.body import Body
from moongate.gateway.dialects.routes import WITH_CHOICES, PromptKind, Route
from moongate.gateway.errors import GatewayError
from moongate.router.model import BYTES_PER_TOKEN

PRIORITY = "x-moongate-priority"
MAX_WAIT = "x-moongate-max-wait-ms"

_LIMITS = {
    PromptKind.CHAT: ("max_completion_tokens", "max_tokens"),
    PromptKind.COMPLETION: ("max_tokens",),
    PromptKind.RESPONSES: ("max_output_tokens",),
    PromptKind.MESSAGES: ("max_tokens",),
}
"""The fields that bound an answer; the first one that isn't null is obeyed, and all others are ignored.

*Source:* vLLM 0.32, `to_sampling_params` of each route's protocol.
"""

COMPLETION_TOKENS_DEFAULT = 16
"""*Source:* vLLM 0.32, `CompletionRequest.max_tokens`. On the other routes an answer may fill the context."""

ANSWERS_MAX = 128
"""Answers that count beforehand: OpenAI allows as many. What more there are counts once they are there."""

_INTEGER = re.compile(r"[+-]?[0-9]{1,9}", re.ASCII)


class WaitingWishes(NamedTuple):
    """See `Request`."""

    priority: int
    wait_s_max: float | None
    answers: int
    answer_tokens_max: int | None
    size_tokens: int


NO_WISHES = WaitingWishes(0, None, 1, None, 0)


def read_wishes(
    headers: Mapping[str, str], body: Body, route: Route, *, may_wait: bool
) -> WaitingWishes:
    """Return what is said, in headers and in the body. Raises: GatewayError (400).

    `may_wait`: requests wait here, so that it matters how large they are.
    """
    priority, wait = headers.get(PRIORITY), headers.get(MAX_WAIT)
    if priority is None and wait is None and not may_wait:
        return NO_WISHES
    return WaitingWishes(
        _integer(PRIORITY, priority) if priority is not None else 0,
        max(_integer(MAX_WAIT, wait), 0) / 1000 if wait is not None else None,
        _answers(body, route),
        _answer_tokens_max(body, route),
        len(body.raw) // BYTES_PER_TOKEN if route.is_cached else 0,
    )


def _answers(body: Body, route: Route) -> int:
    """Return how many answers are asked for, at most `ANSWERS_MAX`; 0 where none is generated."""
    if not route.generates:
        return 0
    if route.kind not in WITH_CHOICES:
        return 1
    # 0.32 ignores `best_of`. Engines that obey it compute so many, and report only those that they return.
    choices = max(_whole(body.top.get(name)) or 1 for name in ("n", "best_of"))
    prompts = _prompts(body) if route.kind is PromptKind.COMPLETION else 1
    return min(max(choices, 1) * prompts, ANSWERS_MAX)


def _prompts(body: Body) -> int:
    """Return how many prompts a completion has: texts, lists of token ids, or embeddings."""
    count = 0
    for name in ("prompt", "prompt_embeds"):
        value = body.top.get(name)
        if isinstance(value, list) and body.is_outlined:
            value = body.fields[name]
        is_ids = isinstance(value, list) and bool(value) and isinstance(value[0], int)
        count += len(value) if isinstance(value, list) and not is_ids else value is not None
    return max(count, 1)


def _answer_tokens_max(body: Body, route: Route) -> int | None:
    """Return how long each answer may be, by what an engine obeys. None: no limit, or none that can be read."""
    names = _LIMITS.get(route.kind, ())
    if route.kind is PromptKind.COMPLETION and "max_tokens" not in body.top:
        return COMPLETION_TOKENS_DEFAULT
    said = next((body.top[name] for name in names if body.top.get(name) is not None), None)
    limit = _whole(said)
    return limit if limit is not None and limit > 0 else None


def _whole(value: object) -> int | None:
    """Return what engines take for a whole number, which they read from text and from 7.0, too. None: none."""
    if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return int(value) if isinstance(value, int) else None


def _integer(name: str, value: str) -> int:
    if not _INTEGER.fullmatch(value.strip()):
        raise GatewayError(400, f"{name}: expected a whole number", "invalid_request")
    return int(value)
