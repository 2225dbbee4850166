"""The engine's Responses API: what a body asks for, and how answers and their events look. Pure.

One message of text is all that a simulated engine answers. Like vLLM's by default it keeps nothing:
`previous_response_id` is unknown, `background` refused.

Source: vLLM 0.32.0 `entrypoints/openai/responses/{protocol,serving,streaming_events}.py`.
"""

import http
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moongate.engine_plugins.vllm_responses import responses_as_chat
from moongate.simulator.openai_wire import ApiError, Choice, GenerateOptions, Json, Usage, invalid

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
    return options, responses_as_chat(body)


@dataclass(slots=True)
class ResponseEnvelope:
    """One response while it is answered. Ids and time are given, so that it is pure."""

    response_id: str
    message_id: str
    created_at: int
    """Seconds since the epoch."""
    model: str
    request: Mapping[str, Any]
    _sequence_number: int = field(default=0, init=False)

    def begin(self) -> bytes:
        """Return the events before the first text."""
        response = self._response("in_progress", [], None)
        item = self._item("in_progress", None)
        return b"".join(
            (
                self._event("response.created", response=response),
                self._event("response.in_progress", response=response),
                self._event("response.output_item.added", output_index=0, item=item),
                self._event("response.content_part.added", **self._place(), part=_part("")),
            )
        )

    def delta(self, text: str) -> bytes:
        place = self._place()
        return self._event("response.output_text.delta", **place, delta=text, logprobs=[])

    def end(self, choice: Choice, usage: Usage) -> bytes:
        """Return the events behind the last text."""
        place, text = self._place(), choice.text
        item = self._item("completed", text)
        return b"".join(
            (
                self._event("response.output_text.done", **place, text=text, logprobs=[]),
                self._event("response.content_part.done", **place, part=_part(text)),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event("response.completed", response=self.completed(choice, usage)),
            )
        )

    def completed(self, choice: Choice, usage: Usage) -> Json:
        """Return the response as it is in the end."""
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        return self._response(status, [self._item("completed", choice.text)], usage)

    def failed(self, message: str) -> bytes:
        """Return the event that ends a stream which the engine can't go on with."""
        return self._event("error", code="500", message=message, param=None)

    def _response(self, status: str, output: list[Json], usage: Usage | None) -> Json:
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        echoed = {
            name: default if self.request.get(name) is None else self.request[name]
            for name, default in _ECHOED.items()
        }
        return {
            "id": self.response_id, "created_at": self.created_at, "incomplete_details": details,
            "model": self.model, "object": "response", "output": output, "status": status,
            "usage": None if usage is None else _usage(usage), "kv_transfer_params": None, **echoed,
        }  # fmt: skip

    def _item(self, status: str, text: str | None) -> Json:
        content = [] if text is None else [_part(text)]
        return {
            "id": self.message_id, "content": content, "role": "assistant", "status": status,
            "type": "message",
        }  # fmt: skip

    def _place(self) -> Json:
        return {"content_index": 0, "item_id": self.message_id, "output_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {**fields, "sequence_number": self._sequence_number, "type": kind}
        self._sequence_number += 1
        data = json.dumps(body, separators=(",", ":"))
        return f"event: {kind}\ndata: {data}\n\n".encode()


def _part(text: str) -> Json:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
