"""The routes that clients call: which there are, and what each means for routing.

Paths match exactly, so that no spelling reaches an engine that isn't in this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class PromptKind(Enum):
    """Where a body has its prompt, as far as routing reads it."""

    CHAT = "messages"
    COMPLETION = "prompt"
    RESPONSES = "input"
    MESSAGES = "blocks"  # messages too, but Anthropic's
    NONE = "none"  # by session key and load


class ApiFamily(Enum):
    """How a route's clients expect to be told of errors."""

    OPENAI = "openai"
    RESPONSES = "responses"  # the same, but for how a stream ends
    ANTHROPIC = "anthropic"


WITH_CHOICES = frozenset({PromptKind.CHAT, PromptKind.COMPLETION})
"""Of requests for one or several answers, with the options of OpenAI's older two routes."""


@dataclass(frozen=True, slots=True)
class Route:
    """One proxied route. `template` is its name in metrics, never a client's own text."""

    template: str
    kind: PromptKind = PromptKind.NONE
    needs_model: bool = True  # the engine itself lets some bodies leave the model out
    generates: bool = (
        False  # a text, about which an engine's KV connector may have something to say
    )
    family: ApiFamily = ApiFamily.OPENAI
    is_cached: bool = True  # engines may find its prompt in their caches


PROXIED: dict[str, Route] = {
    route.template: route
    for route in (
        Route("/v1/chat/completions", PromptKind.CHAT, generates=True),
        Route("/v1/completions", PromptKind.COMPLETION, generates=True),
        Route("/v1/embeddings"),
        Route("/v1/rerank"),
        Route("/v1/score"),
        Route("/v1/responses", PromptKind.RESPONSES, generates=True, family=ApiFamily.RESPONSES),
        Route("/v1/messages", PromptKind.MESSAGES, generates=True, family=ApiFamily.ANTHROPIC),
        Route("/v1/messages/count_tokens", family=ApiFamily.ANTHROPIC, is_cached=False),
        Route("/tokenize", needs_model=False, is_cached=False),
        Route("/detokenize", needs_model=False, is_cached=False),
    )
}
