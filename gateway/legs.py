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

from moongate.gateway.body import Body
from moongate.gateway.errors import GatewayError
from moongate.gateway.json_edits import read_top_level
from moongate.gateway.routes import WITH_CHOICES, PromptKind, Route

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
    }
)  # fmt: skip

_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_ONE = msgspec.Raw(b"1")
_FIXED = {"max_tokens": _ONE, "stream": msgspec.Raw(b"false"), "ignore_eos": msgspec.Raw(b"true")}

_BY_LENGTH = ("length", "tool_calls")
"""How an answer ends that nothing else could end; an engine that found a call in it says so instead."""


def one_token_body(raw: bytes) -> bytes:
    """Return a request's body as one for a single token and no stream; its prompt stays as it is.

    The text has been parsed before, so it is an object. Raises: GatewayError (400).
    """
    try:
        fields = read_top_level(raw)
    except RecursionError as error:  # here a little earlier than where it was parsed
        raise GatewayError(400, "the body is nested too deeply", "invalid_request") from error
    kept = {name: value for name, value in fields.items() if name not in LEFT_OUT}
    kept |= {name: _ONE for name in _LIMITS if name in fields}
    return msgspec.json.encode(kept | _FIXED)


def may_hand_over(route: Route, body: Body) -> bool:
    """Tell whether a request's prompt may be computed on one instance and its answer on another.

    Several answers would each fetch the blocks of one prefill, which are kept for one.
    """
    top = body.top
    if route.kind not in WITH_CHOICES or body.is_lenient or top.get("kv_transfer_params"):
        return False
    if any(top.get(name) not in (None, 1) for name in ("n", "best_of")):
        return False
    if top.get("use_beam_search") or stays_whole(route, body):
        return False
    return route.kind is PromptKind.CHAT or _has_one_prompt(body)


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
    """Return what a prefill leg's answer says."""
    try:
        value = orjson.loads(answer)
        choice = value["choices"][0]
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError):
        return PrefillReport(is_held=False)
    params = value.get("kv_transfer_params")
    usage = value.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return PrefillReport(
        isinstance(choice, dict) and choice.get("finish_reason") in _BY_LENGTH,
        params if isinstance(params, dict) else None,
        cached if type(cached) is int and cached >= 0 else None,
    )
