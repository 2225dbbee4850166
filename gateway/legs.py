"""What the prefill leg of a hand-off gets to read, which requests can be handed over, what comes back.

The prefill leg is the client's request for one token, without whatever could end it otherwise than by
its length: an engine keeps the blocks of a prefill only if it ended so.

Source: vLLM 0.32 `mooncake_connector.py` `request_finished`; `entrypoints/openai/*/protocol.py` for the
fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import orjson

from moongate.gateway.body import Body
from moongate.gateway.routes import PromptKind, Route

LEFT_OUT = frozenset(
    {
        # Not of one answer without a stream.
        "stream_options", "n", "best_of", "use_beam_search", "length_penalty",
        # Could end it at its first token.
        "stop", "stop_token_ids", "include_stop_str_in_output", "min_tokens",
        "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
        "guided_grammar", "guided_decoding_backend", "guided_whitespace_pattern",
        # Nobody reads them.
        "logprobs", "top_logprobs", "return_token_ids",
        "kv_transfer_params",
    }
)  # fmt: skip

_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_ONE = msgspec.Raw(b"1")
_read_top_level = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def one_token_body(raw: bytes) -> bytes:
    """Return a request's body as one for a single token and no stream; its prompt stays as it is.

    The text has been parsed before, so it is an object.
    """
    fields = _read_top_level(raw)
    kept = {name: value for name, value in fields.items() if name not in LEFT_OUT}
    kept |= {name: _ONE for name in _LIMITS if name in fields}
    kept |= {
        "max_tokens": _ONE,
        "stream": msgspec.Raw(b"false"),
        "ignore_eos": msgspec.Raw(b"true"),
    }
    return msgspec.json.encode(kept)


def may_hand_over(route: Route, body: Body) -> bool:
    """Tell whether a request's prompt may be computed on one instance and its answer on another.

    Several answers would each fetch the blocks of one prefill, which are kept for one.
    """
    top = body.top
    if route.kind is PromptKind.NONE or body.is_lenient or top.get("kv_transfer_params"):
        return False
    if any(top.get(name) not in (None, 1) for name in ("n", "best_of")):
        return False
    if top.get("use_beam_search") or stays_whole(route, body):
        return False
    if route.kind is PromptKind.CHAT:
        return True
    prompt = body.fields.get("prompt")
    is_ids = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)
    return isinstance(prompt, str) or is_ids


def stays_whole(route: Route, body: Body) -> bool:
    """Tell whether a request wants something of its prompt that a decode instance doesn't have."""
    top = body.top
    if route.kind is PromptKind.NONE:
        return False
    return top.get("prompt_logprobs") is not None or bool(top.get("echo"))


def read_prefill(answer: bytes) -> tuple[bool, Mapping[str, Any] | None, int | None]:
    """Return of a prefill leg's answer: whether it ended by its length, its parameters for the decode
    leg, and the tokens that were cached. What can't be read is None."""
    try:
        value = orjson.loads(answer)
        choice = value["choices"][0]
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError):
        return False, None, None
    params = value.get("kv_transfer_params")
    usage = value.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return (
        isinstance(choice, dict) and choice.get("finish_reason") == "length",
        params if isinstance(params, dict) else None,
        cached if isinstance(cached, int) else None,
    )


def without_transfer_params(answer: bytes) -> bytes:
    """Return an answer without what an engine's connector tells the gateway in it."""
    if b'"kv_transfer_params"' not in answer:
        return answer
    try:
        fields = _read_top_level(answer)
    except msgspec.MsgspecError:
        return answer
    if bytes(fields.get("kv_transfer_params", b"null")) == b"null":
        return answer
    return msgspec.json.encode({**fields, "kv_transfer_params": msgspec.Raw(b"null")})
