"""A streamed chat answer, line by line: when its tokens came, and what the engine says of its work.

Sans-IO: lines and times are arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

_TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")


class AnswerReader:
    """Give it each line of an event stream with the time at which it came (s)."""

    def __init__(self) -> None:
        self.first_s: float | None = None
        """When the first chunk with something in it came; the one that only names the role has nothing."""
        self.gaps_ms: list[float] = []
        """Between such chunks."""
        self.usage: Mapping[str, Any] = {}
        self.error: str | None = None
        """What the stream says went wrong."""
        self.is_complete = False
        self._latest_s = 0.0
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def feed(self, line: bytes, now_s: float) -> None:
        """Take one line, with or without its end."""
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            self.is_complete = True
            return
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            self.error = f"not JSON: {data[:100]!r}"
            return
        if not isinstance(event, dict):
            self.error = f"no object: {data[:100]!r}"
            return
        if event.get("error"):
            self.error = str(event["error"])
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            self._take(choice.get("delta") or {}, now_s)

    def _take(self, delta: Mapping[str, Any], now_s: float) -> None:
        if not any(delta.get(name) for name in _TEXT_FIELDS):
            return
        if self.first_s is None:
            self.first_s = now_s
        else:
            self.gaps_ms.append((now_s - self._latest_s) * 1000)
        self._latest_s = now_s
        self._texts.append(delta.get("content") or "")

    def usage_tokens(self, name: str) -> int | None:
        value = self.usage.get(name)
        return value if isinstance(value, int) else None

    def cached_tokens(self) -> int | None:
        """Return the prompt tokens that weren't computed. None: not said."""
        details = self.usage.get("prompt_tokens_details")
        value = details.get("cached_tokens") if isinstance(details, dict) else None
        return value if isinstance(value, int) else None
