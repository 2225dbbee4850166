"""What the prefill leg of a hand-off gets to read, which requests can be handed over, what comes back.

The prefill leg is the client's request for one token, without whatever could end it otherwise than by
its length: an engine keeps the blocks of a prefill only if it ended so. What shapes the prompt stays
byte for byte, since both legs have to be the same prompt.

Source: vLLM 0.32 `mooncake_connector.py` `request_finished`; `entrypoints/openai/*/protocol.py` for the
fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import orjson

from moongate.gateway.dialects.body import Body
from moongate.gateway.dialects.json_edits import read_top_level
from moongate.gateway.dialects.routes import WITH_CHOICES, PromptKind, Route
from moongate.gateway.errors import GatewayError

LEFT_OUT = frozenset(
    {
        # Not of one answer without a stream.
        "stream_options", "n", "best_of", "use_beam_search", "length_penalty",
        # Could end it at its first token, or be refused since there is no second.
        "stop", "stop_token_ids", "include_stop_str_in_output", "min_tokens", "repetition_detection",
        "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
        "guided_grammar", "guided_decoding_backend", "guided_whitespace_pattern",
        # Nobody reads them; engines refuse some of these without others.
        "logprobs", "top_logprobs", "logprob_token_ids", "return_token_ids", "return_token_offsets",
        "return_prompt_text",
        "kv_transfer_params",
        # The same of responses (`text` is the form of the answer) and of messages.
        "text", "background", "max_tool_calls", "stop_sequences",
    }
)  # fmt: skip

_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_ONE, _FALSE, _TRUE = msgspec.Raw(b"1"), msgspec.Raw(b"false"), msgspec.Raw(b"true")
_OF_CHOICES = {"max_tokens": _ONE, "stream": _FALSE, "ignore_eos": _TRUE}
_FIXED: Mapping[PromptKind, Mapping[str, msgspec.Raw]] = {
    PromptKind.CHAT: _OF_CHOICES,
    PromptKind.COMPLETION: _OF_CHOICES,
    PromptKind.RESPONSES: {
        "max_output_tokens": _ONE, "stream": _FALSE, "store": _FALSE, "ignore_eos": _TRUE,
    },
    PromptKind.MESSAGES: {"max_tokens": _ONE, "stream": _FALSE},
}  # fmt: skip

_BY_LENGTH = ("length", "tool_calls")
_BY_LENGTH_OF_MESSAGES = ("max_tokens", "tool_use")
"""How an answer ends that nothing else could end; an engine that found a call in it says so instead."""

_OWN_TOOLS = ("function", "custom", "namespace")
"""Tools of responses that the client runs. With others the engine computes several answers in a row."""


def one_token_body(raw: bytes, kind: PromptKind) -> bytes:
    """Return a request's body as one for a single token and no stream; its prompt stays as it is.

    The text has been parsed before, so it is an object. Raises: GatewayError (400).
    """
    try:
        fields = read_top_level(raw)
    except RecursionError as error:  # here a little earlier than where it was parsed
        raise GatewayError(400, "the body is nested too deeply", "invalid_request") from error
    kept = {name: value for name, value in fields.items() if name not in LEFT_OUT}
    kept |= {name: _ONE for name in _LIMITS if name in fields}
    return msgspec.json.encode({**kept, **_FIXED[kind]})


def may_hand_over(route: Route, body: Body) -> bool:
    """Tell whether a request's prompt may be computed on one instance and its answer on another.

    Several answers would each fetch the blocks of one prefill, which are kept for one.
    """
    top = body.top
    if route.kind not in _FIXED or body.is_lenient or top.get("kv_transfer_params"):
        return False
    if route.kind is PromptKind.RESPONSES:
        return _has_own_tools(body)
    if any(top.get(name) not in (None, 1) for name in ("n", "best_of")):
        return False
    if top.get("use_beam_search") or stays_whole(route, body):
        return False
    return route.kind is not PromptKind.COMPLETION or _has_one_prompt(body)


def _has_own_tools(body: Body) -> bool:
    tools = body.fields.get("tools")
    if not isinstance(tools, list):
        return True  # there are none, or the engine says what is wrong
    kinds = (tool.get("type") if isinstance(tool, dict) else None for tool in tools)
    return all(kind in _OWN_TOOLS for kind in kinds)


def _has_one_prompt(body: Body) -> bool:
    fields = body.fields
    prompt = fields.get("prompt")
    is_ids = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)
    return (isinstance(prompt, str) or is_ids) and fields.get("prompt_embeds") is None


def stays_whole(route: Route, body: Body) -> bool:
    """Tell whether a request wants something of its prompt that a decode instance doesn't have."""
    top = body.top
    if route.kind not in WITH_CHOICES:
        return False
    return top.get("prompt_logprobs") is not None or bool(top.get("echo"))


class PrefillReport(NamedTuple):
    """What a prefill leg's answer says. What can't be read is None."""

    is_held: bool  # it ended by its length
    params: Mapping[str, Any] | None = None  # for the decode leg
    cached_tokens: int | None = None


def read_prefill(answer: bytes) -> PrefillReport:
    """Return what a prefill leg's answer says, of whichever API it is."""
    try:
        value = orjson.loads(answer)
        is_held = _ended_by_length(value)
    except (orjson.JSONDecodeError, AttributeError, KeyError, IndexError, TypeError):
        return PrefillReport(is_held=False)
    params = value.get("kv_transfer_params")
    return PrefillReport(
        is_held, params if isinstance(params, dict) else None, _cached_tokens(value.get("usage"))
    )


def _cached_tokens(usage: Any) -> int | None:
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    cached = usage.get("cache_read_input_tokens") if cached is None else cached
    return cached if type(cached) is int and cached >= 0 else None


def _ended_by_length(answer: Any) -> bool:
    if answer.get("object") == "response":
        details = answer.get("incomplete_details") or {}
        return bool(details.get("reason") == "max_output_tokens")
    if answer.get("type") == "message":
        return answer.get("stop_reason") in _BY_LENGTH_OF_MESSAGES
    return answer["choices"][0].get("finish_reason") in _BY_LENGTH
