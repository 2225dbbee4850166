"""One agent's conversation with a gateway, turn after turn."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
from agent_workload import Words

from moongate.engine_plugins.vllm_render import ModelRenderer

ANSWER_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, where it came from, and how long its first token took."""

    text: str
    headers: httpx.Headers
    first_token_s: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def instance(self) -> str:
        return self.headers["x-moongate-instance"]

    @property
    def predicted_tokens(self) -> int:
        """Return what the receipt says that need not be computed."""
        names = ("x-moongate-device-tokens", "x-moongate-pool-tokens")
        return sum(int(self.headers[name]) for name in names)


def ask(url: str, messages: list[dict[str, str]], model: str = "tiny", **options: Any) -> Reply:
    """Send a turn as a stream and read it to its end."""
    body = {
        "model": model, "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True}, **options,
    }  # fmt: skip
    began, first_token_s, text = time.perf_counter(), 0.0, ""
    usage: dict[str, Any] = {}
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=body, timeout=120.0, trust_env=False
    ) as answer:
        if answer.status_code != 200:
            raise AssertionError(f"{answer.status_code}: {answer.read()!r}")
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = orjson.loads(line[6:])
            assert "error" not in event, event
            first_token_s = first_token_s or time.perf_counter() - began
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
            usage = event.get("usage") or usage
    details = usage.get("prompt_tokens_details") or {}
    return Reply(
        text,
        answer.headers,
        first_token_s,
        usage["prompt_tokens"],
        usage["completion_tokens"],
        details.get("cached_tokens") or 0,
    )


@dataclass
class Conversation:
    """Grows by one user message a turn; every text is new, from one seed."""

    url: str
    model_directory: Path
    seed: int
    model: str = "tiny"
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        renderer = ModelRenderer.load(self.model_directory)
        self._words = Words(renderer, random.Random(f"conversation {self.seed}"))

    def text(self, tokens: int) -> str:
        """Return about so many tokens of new text."""
        return self._words.text(tokens)

    def grow(self, turns: int, tokens: int, **options: Any) -> list[Reply]:
        """Take so many turns, each of about so many new tokens."""
        replies = []
        for _ in range(turns):
            self.messages.append({"role": "user", "content": self._words.text(tokens)})
            replies.append(ask(self.url, self.messages, self.model, **options))
            self.messages.append({"role": "assistant", "content": replies[-1].text})
        return replies
