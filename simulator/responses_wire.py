"""The engine's Responses API: what a body asks for, and how answers and their events look. Pure.

Thoughts, a message of text and calls are what a simulated engine answers. Like vLLM's by default it
keeps nothing: `previous_response_id` is unknown, `background` refused.

Source: vLLM 0.32.0 `entrypoints/openai/responses/{protocol,serving,streaming_events}.py`.
"""

import http
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moongate.engine_plugins.vllm_responses import responses_as_chat
from moongate.simulator.openai_wire import (
    ApiError,
    CalledTool,
    Choice,
    Delta,
    GenerateOptions,
    Json,
    Usage,
    invalid,
)

_ECHOED: Mapping[str, Any] = {
    "instructions": None, "metadata": None, "parallel_tool_calls": True, "temperature": 1.0,
    "tool_choice": "auto", "tools": [], "top_p": 1.0, "background": False,
    "max_output_tokens": None, "max_tool_calls": None, "previous_response_id": None,
    "prompt": None, "reasoning": None, "service_tier": "auto", "text": None, "truncation": "disabled",
    "user": None,
}  # fmt: skip
"""Fields of a request that its response repeats, with their defaults."""


def parse_response(body: Mapping[str, Any]) -> tuple[GenerateOptions, Json]:
    """Return what a body asks for, and the chat that has the same prompt. Raises ApiError, RenderError."""
    if "input" not in body:
        raise invalid("input", "Field required")
    previous = body.get("previous_response_id")
    if previous is not None:
        raise ApiError(
            f"Response with id '{previous}' not found.",
            status=http.HTTPStatus.NOT_FOUND,
            kind="invalid_request_error",
            param="response_id",
        )
    if body.get("background"):
        raise ApiError("This engine has no store for responses.", param="background")
    limit = body.get("max_output_tokens")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ApiError(
            f"max_output_tokens must be at least 1, got {limit}.", param="max_output_tokens"
        )
    is_stream = body.get("stream") or False
    if not isinstance(is_stream, bool):
        raise invalid("stream", "Input should be a valid boolean")
    salt, session_id = body.get("cache_salt"), body.get("session_id")
    options = GenerateOptions(
        is_chat=True,
        is_stream=is_stream,
        includes_usage=False,
        has_continuous_usage=False,
        returns_token_ids=False,
        choices=1,
        max_tokens=limit,
        ignores_end=bool(body.get("ignore_eos")),
        cache_salt=salt if isinstance(salt, str) else None,
        session_id=session_id if isinstance(session_id, str) else None,
        kv_transfer_params=None,
    )
    return options, {**responses_as_chat(body), **_constraints(body)}


def _constraints(body: Mapping[str, Any]) -> Json:
    """Return what the answer must be, as a chat request says it."""
    told: Json = {
        name: body[name] for name in ("tool_choice", "parallel_tool_calls") if name in body
    }
    choice = told.get("tool_choice")
    if isinstance(choice, dict):
        del told["tool_choice"]  # others than functions are tools of the engine's own
        if choice.get("type") == "function":
            function = {"name": choice.get("name")}
            told["tool_choice"] = {"type": "function", "function": function}
    text = body.get("text")
    form = text.get("format") if isinstance(text, dict) else None
    if isinstance(form, dict) and form.get("type") == "json_schema":
        told["response_format"] = {"type": "json_schema", "json_schema": form}
    elif form is not None:
        told["response_format"] = form
    return told


@dataclass(slots=True)
class ResponseEnvelope:
    """One response while it is answered. Ids and time are given, so that it is pure.

    A stream tells item after item: thoughts, text and calls, each begun with its first delta and ended
    before the next begins.
    """

    response_id: str
    item_id: str
    """What the ids of its items are made of."""
    created_at: int
    """Seconds since the epoch."""
    model: str
    request: Mapping[str, Any]
    _sequence_number: int = field(default=0, init=False)
    _items: list[Json] = field(default_factory=list, init=False)
    """Those that have ended."""
    _open: Json | None = field(default=None, init=False)
    """The item that has begun, as it will be in the end."""

    def begin(self) -> bytes:
        """Return the events before the first item."""
        response = self._response("in_progress", [], None)
        return b"".join(
            (
                self._event("response.created", response=response),
                self._event("response.in_progress", response=response),
            )
        )

    def delta(self, delta: Delta) -> bytes:
        """Return the events of one token."""
        events = []
        if delta.reasoning:
            events += self._begin(_reasoning(self.item_id, ""))
            events += self._add("reasoning_text.delta", delta.reasoning)
        if delta.text:
            events += self._begin(_message(self.item_id, ""))
            events += self._add("output_text.delta", delta.text, logprobs=[])
        for call in delta.calls:
            if call.name is not None:
                begun = CalledTool(call.call_id or "", call.name, "")
                events += self._begin(_call(f"{self.item_id}{call.index}", begun))
            if call.arguments:
                events += self._add("function_call_arguments.delta", call.arguments)
        return b"".join(events)

    def end(self, choice: Choice, usage: Usage) -> bytes:
        """Return the events behind the last token."""
        events = self._end()
        told = _usage(usage, choice.reasoning_tokens)
        response = self._response(_status(choice), self._items, told)
        return b"".join([*events, self._event("response.completed", response=response)])

    def completed(self, choice: Choice, usage: Usage) -> Json:
        """Return the response as it is in the end."""
        items = [_reasoning(self.item_id, choice.reasoning)] if choice.reasoning else []
        if choice.text or not choice.calls:
            items.append(_message(self.item_id, choice.text or ""))
        items += [_call(f"{self.item_id}{n}", call) for n, call in enumerate(choice.calls)]
        told = _usage(usage, choice.reasoning_tokens)
        return self._response(_status(choice), items, told)

    def failed(self, message: str) -> bytes:
        """Return the event that ends a stream which the engine can't go on with."""
        return self._event("error", code="500", message=message, param=None)

    def _begin(self, item: Json) -> list[bytes]:
        """Return the events that begin an item, unless it is the one that is open."""
        if self._open is not None and self._open["id"] == item["id"]:
            return []
        events = self._end()
        self._open = item
        emptied = {**item, "status": "in_progress"}
        if "content" in item:
            emptied["content"] = []
        if item["type"] == "reasoning":
            del emptied["content"]
        events.append(
            self._event("response.output_item.added", output_index=len(self._items), item=emptied)
        )
        if "content" in item:
            part = item["content"][0]
            events.append(self._event("response.content_part.added", **self._place(), part=part))
        return events

    def _add(self, kind: str, text: str, **fields: Any) -> list[bytes]:
        assert self._open is not None, "begun before it grows"
        if "content" in self._open:
            self._open["content"][0]["text"] += text
        else:
            self._open["arguments"] += text
        return [self._event(f"response.{kind}", **self._place(), delta=text, **fields)]

    def _end(self) -> list[bytes]:
        """Return the events that end the open item, if there is one."""
        item = self._open
        if item is None:
            return []
        place = self._place()
        if item["type"] == "function_call":
            told = {"arguments": item["arguments"], "name": item["name"]}
            events = [self._event("response.function_call_arguments.done", **place, **told)]
        else:
            (part,) = item["content"]
            kind = part["type"]
            logprobs: Json = {"logprobs": []} if kind == "output_text" else {}
            events = [
                self._event(f"response.{kind}.done", **place, text=part["text"], **logprobs),
                self._event("response.content_part.done", **place, part=part),
            ]
        index = len(self._items)
        events.append(self._event("response.output_item.done", output_index=index, item=item))
        self._items.append(item)
        self._open = None
        return events

    def _place(self) -> Json:
        assert self._open is not None, "only an open item has a place"
        place = {"item_id": self._open["id"], "output_index": len(self._items)}
        return {"content_index": 0, **place} if "content" in self._open else place

    def _response(self, status: str, output: list[Json], usage: Json | None) -> Json:
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        echoed = {
            name: default if self.request.get(name) is None else self.request[name]
            for name, default in _ECHOED.items()
        }
        return {
            "id": self.response_id, "created_at": self.created_at, "incomplete_details": details,
            "model": self.model, "object": "response", "output": output, "status": status,
            "usage": usage, "kv_transfer_params": None, **echoed,
        }  # fmt: skip

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {**fields, "sequence_number": self._sequence_number, "type": kind}
        self._sequence_number += 1
        data = json.dumps(body, separators=(",", ":"))
        return f"event: {kind}\ndata: {data}\n\n".encode()


def _status(choice: Choice) -> str:
    return "incomplete" if choice.finish_reason == "length" else "completed"


def _reasoning(item_id: str, text: str) -> Json:
    content = [{"text": text, "type": "reasoning_text"}]
    return {
        "id": f"rs_{item_id}", "type": "reasoning", "summary": [], "content": content,
        "status": "completed",
    }  # fmt: skip


def _message(item_id: str, text: str) -> Json:
    part: Json = {"annotations": [], "text": text, "type": "output_text", "logprobs": None}
    return {
        "id": f"msg_{item_id}", "content": [part], "role": "assistant", "status": "completed",
        "type": "message",
    }  # fmt: skip


def _call(item_id: str, call: CalledTool) -> Json:
    return {
        "id": f"fc_{item_id}", "type": "function_call", "call_id": call.call_id, "name": call.name,
        "arguments": call.arguments, "status": "completed",
    }  # fmt: skip


def _usage(usage: Usage, reasoning_tokens: int) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
