"""Messages by way of chat completions, for engines that have only these: requests, whole answers, errors.

What both APIs can say is carried over; streams are in `messages_stream.py`. The prompt is the one that
`vllm_messages.py` makes, so routing knows it as that of any message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import orjson

from moongate.engine_plugins.vllm_messages import messages_as_chat
from moongate.engine_plugins.vllm_render import RenderError, TemplateManners
from moongate.gateway.dialects.routes import ApiFamily, PromptKind, Route
from moongate.gateway.errors import GatewayError, error_body

CHAT_PATH = "/v1/chat/completions"
TOKENIZE_PATH = "/tokenize"

MERGING = TemplateManners(merges_system=True, disabled_thinking_effort="low")
"""For models whose template isn't known here: what every template can take."""

_SAME = ("model", "stream", "temperature", "top_p", "top_k", "cache_salt", "chat_template_kwargs")
"""Fields that both have, and engines' own beside them."""

_PASSED = ("vllm_xargs", "kv_transfer_params", "ec_transfer_params", "priority")

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


def chat_request(fields: Mapping[str, Any], manners: TemplateManners | None) -> bytes:
    """Return the chat request for a message's. Raises: GatewayError (400)."""
    chat = _chat_of(fields, manners)
    request = {name: fields[name] for name in (*_SAME, *_PASSED) if fields.get(name) is not None}
    request |= {"messages": chat["messages"], "max_tokens": fields.get("max_tokens")}
    if chat.get("reasoning_effort") is not None:
        request["reasoning_effort"] = chat["reasoning_effort"]
    if fields.get("stop_sequences"):
        request["stop"] = fields["stop_sequences"]
    if fields.get("stream"):
        request["stream_options"] = {"include_usage": True}
    if chat.get("tools"):
        request |= {"tools": chat["tools"], **_tool_choice(fields.get("tool_choice"))}
    thinking = fields.get("thinking")
    if isinstance(thinking, dict) and thinking.get("type") == "enabled":
        request["thinking_token_budget"] = thinking.get("budget_tokens")
    config = fields.get("output_config")
    form = config.get("format") if isinstance(config, dict) else None
    if isinstance(form, dict) and form.get("schema") is not None:
        schema = {"name": "answer", "schema": form["schema"]}
        request["response_format"] = {"type": "json_schema", "json_schema": schema}
    return _dump(request)


def tokenize_request(fields: Mapping[str, Any], manners: TemplateManners | None) -> bytes:
    """Return the request for the tokens of a message's prompt. Raises: GatewayError (400)."""
    chat = _chat_of(fields, manners)
    wanted = ("messages", "tools", "chat_template_kwargs")
    return _dump(
        {"model": fields.get("model"), **{name: chat[name] for name in wanted if name in chat}}
    )


def _dump(value: object) -> bytes:
    """Return JSON as Python's own module writes it: with all that a lenient body may have."""
    try:
        return json.dumps(value, separators=(",", ":")).encode()
    except RecursionError as error:
        raise GatewayError(400, "the body is nested too deeply", "invalid_request") from error


def _chat_of(fields: Mapping[str, Any], manners: TemplateManners | None) -> dict[str, Any]:
    if fields.get("tools") == []:
        fields = {name: value for name, value in fields.items() if name != "tools"}
    try:
        chat = messages_as_chat(_with_ids(fields), manners or MERGING)
        messages = [_with_texts(message) for message in chat["messages"]]
    except (RenderError, RecursionError) as error:
        message = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise GatewayError(400, message, "invalid_request") from error
    return {**chat, "messages": messages}


def _with_ids(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a body in which each call has an id, which chats ask for."""
    messages = fields.get("messages")
    if not isinstance(messages, list):
        return fields
    return {**fields, "messages": [_with_call_ids(n, m) for n, m in enumerate(messages)]}


def _with_call_ids(number: int, message: Any) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    blocks = [
        {**block, "id": f"call_{number}_{place}"}
        if isinstance(block, dict) and block.get("type") == "tool_use" and not block.get("id")
        else block
        for place, block in enumerate(content)
    ]
    return {**message, "content": blocks}


def _with_texts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its calls' arguments as texts, and something of content, as chats want it."""
    if not message.get("tool_calls"):
        return {"content": "", **message}
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        calls.append(
            {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}}
        )
    return {"content": None, **message, "tool_calls": calls}


def _tool_choice(choice: object) -> dict[str, Any]:
    if not isinstance(choice, dict):
        return {}
    told: dict[str, Any] = {}
    if choice.get("disable_parallel_tool_use") is not None:
        told["parallel_tool_calls"] = not choice["disable_parallel_tool_use"]
    kind = choice.get("type")
    if kind == "tool":
        told["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in _CHOICES:
        told["tool_choice"] = _CHOICES[kind]
    return told


# --- answers --------------------------------------------------------------------------------------


def message_of(answer: bytes) -> bytes:
    """Return a whole chat answer as a message; what is none stays as it is."""
    try:
        value = json.loads(answer)
        choice = value["choices"][0]
        blocks = [*_blocks(choice["message"])] or [{"type": "text", "text": ""}]
        usage = usage_of(value.get("usage"))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return answer
    calls = choice["message"].get("tool_calls") or ()
    last = calls[-1]["function"].get("arguments") if calls else None
    reason, sequence = stop_of(
        choice.get("finish_reason"), choice.get("stop_reason"), bool(calls), is_json(last)
    )
    message = {
        "id": value.get("id"),
        "type": "message",
        "role": "assistant",
        "content": blocks,
        "model": value.get("model"),
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": usage,
    }
    return _dump(message)


def _blocks(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if reasoning:
        yield {"type": "thinking", "thinking": reasoning, "signature": ""}
    if message.get("content"):
        yield {"type": "text", "text": message["content"]}
    for call in message.get("tool_calls") or ():
        function = call["function"]
        yield {
            "type": "tool_use",
            "id": call["id"],
            "name": function["name"],
            "input": _input_of(function.get("arguments")),
        }


def _input_of(arguments: object) -> dict[str, Any]:
    """Return a call's arguments, which a model may have written wrongly, as an object."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def is_json(text: object) -> bool:
    """Tell whether a call's arguments are complete."""
    try:
        json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return False
    return isinstance(text, str)


def stop_of(
    finish_reason: object, stop: object, uses_tool: bool, is_call_complete: bool
) -> tuple[str | None, str | None]:
    """Return why an answer ended, and by which of the client's own sequences.

    A call that a sequence cut short must not be run; one that is complete must.
    """
    if finish_reason is None:
        return None, None
    if finish_reason == "stop" and isinstance(stop, str) and not is_call_complete:
        return "stop_sequence", stop
    if finish_reason != "length" and uses_tool:
        return "tool_use", None
    return STOP_REASONS.get(str(finish_reason), "end_turn"), None


def usage_of(usage: object) -> dict[str, int]:
    """Return what an answer used: what came from a cache is no input, as this API has it."""
    told = usage if isinstance(usage, dict) else {}
    details = told.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    counted = {
        "input_tokens": _whole(told.get("prompt_tokens")) - _whole(cached),
        "output_tokens": _whole(told.get("completion_tokens")),
    }
    return counted if cached is None else {**counted, "cache_read_input_tokens": _whole(cached)}


def _whole(value: object) -> int:
    return value if type(value) is int else 0


def count_of(answer: bytes) -> bytes:
    """Return a tokenised prompt's length as counted tokens; what is none stays as it is."""
    try:
        count = orjson.loads(answer)["count"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return answer
    return orjson.dumps({"input_tokens": count})


def error_of(status: int, answer: bytes) -> bytes:
    """Return an engine's error in the shape of this API; what is none stays as it is."""
    try:
        error = orjson.loads(answer)["error"]
        message = error["message"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return answer
    return error_body(str(message), status, None, family=ApiFamily.ANTHROPIC)


# --- one attempt ----------------------------------------------------------------------------------


class Bridge(NamedTuple):
    """How one instance is asked for what it hasn't: where, with what, and what becomes of its answer."""

    path: str
    body: bytes
    take_whole: Callable[[bytes], bytes]


def bridge_for(route: Route, fields: Mapping[str, Any], manners: TemplateManners | None) -> Bridge:
    """Return the way around for a route of messages. Raises: GatewayError (400)."""
    if route.kind is PromptKind.MESSAGES:
        return Bridge(CHAT_PATH, chat_request(fields, manners), message_of)
    return Bridge(TOKENIZE_PATH, tokenize_request(fields, manners), count_of)
