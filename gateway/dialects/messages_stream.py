"""A chat's stream as a message's: events in, events out; sans-IO.

Blocks follow each other: thinking, text, calls, each begun and ended. A chat names a call once and then goes on
with its index; here it is the block that is open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from moongate.gateway.dialects.messages_bridge import is_json, stop_of, usage_of
from moongate.gateway.dialects.routes import ApiFamily
from moongate.gateway.dialects.sse import split_events
from moongate.gateway.errors import stream_error_events


class MessageStream:
    """One answer. Give it whole events; it returns the message's."""

    def __init__(self) -> None:
        self._has_started = False
        self._open: str | None = None  # the kind of the block that is open, or the call's id
        self._index = -1
        self._uses_tool = False
        self._arguments = ""  # of the last call
        self._pending = ""  # text that came while a call was open, which comes behind it
        self._has_failed = False
        self._stop: tuple[object, object] = (None, None)
        self._usage: object = None

    def take_events(self, events: bytes) -> bytes:
        whole, _ = split_events(events)
        return b"".join(part for event in whole for part in self._take_safely(event))

    def _take_safely(self, event: bytes) -> list[bytes]:
        """Return what becomes of one event; of one that no chat has, nothing."""
        if self._has_failed:
            return []
        try:
            return [*self._take(event)]
        except (TypeError, AttributeError, KeyError):
            return []

    def _take(self, event: bytes) -> Iterator[bytes]:
        text = event.partition(b"data:")[2].strip()
        if text == b"[DONE]":
            yield from self._end()
            return
        try:
            chunk = orjson.loads(text)
        except orjson.JSONDecodeError:
            return  # a comment, or what nobody could read
        if not isinstance(chunk, dict):
            return
        if isinstance(chunk.get("error"), dict):
            message = str(chunk["error"].get("message"))
            self._has_failed = True
            yield stream_error_events(message, "engine_error", ApiFamily.ANTHROPIC)
            return
        if not self._has_started:
            self._has_started = True
            yield self._start(chunk)
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or ():
            yield from self._delta(choice.get("delta") or {})
            if choice.get("finish_reason") is not None:
                self._stop = choice["finish_reason"], choice.get("stop_reason")

    def _start(self, chunk: Mapping[str, Any]) -> bytes:
        message: dict[str, Any] = {
            "id": chunk.get("id"), "type": "message", "role": "assistant", "content": [],
            "model": chunk.get("model"), "stop_reason": None, "stop_sequence": None,
            "usage": usage_of(chunk.get("usage")),
        }  # fmt: skip
        return _event("message_start", message=message)

    def _delta(self, delta: Mapping[str, Any]) -> Iterator[bytes]:
        reasoning = delta.get("reasoning") or delta.get("reasoning_content")
        if reasoning:
            yield from self._ensure("thinking", {"type": "thinking", "thinking": ""})
            yield self._add({"type": "thinking_delta", "thinking": reasoning})
        if delta.get("content") and self._is_in_call:
            self._pending += delta["content"]
        elif delta.get("content"):
            yield from self._text(delta["content"])
        for call in delta.get("tool_calls") or ():
            yield from self._call(call)

    @property
    def _is_in_call(self) -> bool:
        return self._open is not None and self._open.startswith("call ")

    def _text(self, text: str) -> Iterator[bytes]:
        yield from self._ensure("text", {"type": "text", "text": ""})
        yield self._add({"type": "text_delta", "text": text})

    def _call(self, call: Mapping[str, Any]) -> Iterator[bytes]:
        function = call.get("function") or {}
        name = f"call {call.get('index')}"
        if self._open != name and function.get("name"):
            self._uses_tool, self._arguments = True, ""
            block = {
                "type": "tool_use",
                "id": call.get("id"),
                "name": function["name"],
                "input": {},
            }
            yield from self._ensure(name, block)
        if function.get("arguments") and self._open == name:
            self._arguments += function["arguments"]
            yield self._add({"type": "input_json_delta", "partial_json": function["arguments"]})

    def _ensure(self, kind: str, block: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield what ends the open block and begins one of this kind, if that isn't open."""
        if self._open == kind:
            return
        yield from self._close()
        if self._pending:
            text, self._pending = self._pending, ""
            yield from self._text(text)
            yield from self._close()
        self._open = kind
        self._index += 1
        yield _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> Iterator[bytes]:
        if self._open is not None:
            self._open = None
            yield _event("content_block_stop", index=self._index)

    def _add(self, delta: Mapping[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _end(self) -> Iterator[bytes]:
        if not self._has_started:
            yield self._start({})
        yield from self._close()
        text, self._pending = self._pending, ""
        if text:
            yield from self._text(text)
            yield from self._close()
        reason, sequence = stop_of(*self._stop, self._uses_tool, is_json(self._arguments))
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield _event("message_delta", delta=delta, usage=usage_of(self._usage))
        yield _event("message_stop")


def _event(kind: str, **fields: Any) -> bytes:
    return (
        b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"
    )
