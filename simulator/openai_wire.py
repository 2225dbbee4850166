"""The engine's OpenAI-compatible JSON: what a body asks for, and how answers and errors look.

Responsible for reading request bodies (with vLLM's defaults and its refusals) and for the shape of
responses, stream chunks and errors. Not for sockets, tokenising or generating. Pure: ids and times
are arguments. Fields that the simulated engine has no use for are accepted and ignored.

Source: vLLM 0.32.0 `entrypoints/openai/{chat_completion,completion}/{protocol,serving}.py`,
`entrypoints/serve/exception_handling/`.
"""

import http
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

COMPLETION_TOKENS_DEFAULT = 16
"""`max_tokens` of a completion that names none, as in OpenAI's API."""

CHOICES_MAX = 128
"""`n` at most, as in OpenAI's API. vLLM's own limit, 16,384, is more than a model runs at once."""

Json = dict[str, Any]


class ApiError(Exception):
    """What the engine refuses, with the status and body that it refuses it with."""

    def __init__(
        self,
        message: str,
        *,
        status: http.HTTPStatus = http.HTTPStatus.BAD_REQUEST,
        kind: str = "BadRequestError",
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> Json:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": int(self.status),
            }
        }


def invalid(field: str, problem: str) -> ApiError:
    """Return what a body that does not fit the schema is answered with."""
    location = f"body.{field}" if field else "body"
    message = f"1 validation error:\n  {{'loc': '{location}', 'msg': '{problem}'}}"
    return ApiError(message, kind=http.HTTPStatus.BAD_REQUEST.phrase, param=location)


def unknown_model(model: object, served: str) -> ApiError:
    return ApiError(
        f"The model `{model}` does not exist. Valid aliases: {served}.",
        status=http.HTTPStatus.NOT_FOUND,
        kind="NotFoundError",
        param="model",
    )


def prompt_too_long(prompt_tokens: int, max_model_len_tokens: int) -> ApiError:
    return ApiError(
        f"This model's maximum context length is {max_model_len_tokens} tokens. However, your "
        f"prompt contains {prompt_tokens} input tokens, which exceeds this limit even without any "
        "output tokens. Please reduce the length of the input prompt.",
        param="input_tokens",
    )


# -- requests -----------------------------------------------------------------------------------


def parse_body(content_type: str, raw: bytes) -> Json:
    """Return the JSON object in `raw`; lenient like the engine (lone surrogates and NaN pass)."""
    if content_type.split(";", maxsplit=1)[0].strip().lower() != "application/json":
        raise invalid("", "Unsupported Media Type: Only application/json is allowed")
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise invalid("", f"JSON decode error: {error}") from error
    if not isinstance(body, dict):
        raise invalid("", "Input should be a valid dictionary")
    return body


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """What a chat or completion body asks for, besides its prompt."""

    is_chat: bool
    is_stream: bool
    includes_usage: bool
    """Of a stream: a last chunk with usage."""
    has_continuous_usage: bool
    """Of a stream: usage in every chunk."""
    returns_token_ids: bool
    choices: int
    """Answers to each prompt (`n`)."""
    max_tokens: int | None
    """None: as long as the answer and the model's length go."""
    ignores_end: bool
    """The answer doesn't end by itself (`ignore_eos`)."""
    cache_salt: str | None
    session_id: str | None
    """From the body; a header comes after it."""
    kv_transfer_params: Mapping[str, Any] | None
    """What a request's prefill and decode by two engines needs."""


def parse_options(body: Mapping[str, Any], *, is_chat: bool) -> GenerateOptions:
    """Read and check the options that both endpoints share. Raises ApiError."""
    is_stream = _optional(body, "stream", bool, "a valid boolean") or False
    stream_options = _optional(body, "stream_options", dict, "a valid dictionary")
    if stream_options is not None and not is_stream:
        raise ApiError(
            "Stream options can only be defined when `stream=True`.",
            kind=http.HTTPStatus.BAD_REQUEST.phrase,
            param="stream_options",
        )
    max_tokens = _max_tokens(body, is_chat=is_chat)
    _check_min_tokens(body, max_tokens)
    includes_usage = bool((stream_options or {}).get("include_usage"))
    continuous = bool((stream_options or {}).get("continuous_usage_stats"))
    return GenerateOptions(
        is_chat=is_chat,
        is_stream=is_stream,
        includes_usage=includes_usage,
        has_continuous_usage=includes_usage and continuous,
        returns_token_ids=bool(body.get("return_token_ids")),
        choices=_choices(body),
        max_tokens=max_tokens,
        ignores_end=bool(body.get("ignore_eos")),
        cache_salt=_optional(body, "cache_salt", str, "a valid string"),
        session_id=_session_id(body),
        kv_transfer_params=_optional(body, "kv_transfer_params", dict, "a valid dictionary"),
    )


def _optional(body: Mapping[str, Any], name: str, kind: type, expected: str) -> Any:
    value = body.get(name)
    if value is not None and not (type(value) is kind if kind is int else isinstance(value, kind)):
        raise invalid(name, f"Input should be {expected}")
    return value


def _choices(body: Mapping[str, Any]) -> int:
    value = _optional(body, "n", int, "a valid integer")
    choices = 1 if value is None else int(value)
    if choices < 1:
        raise ApiError(f"n must be at least 1, got {choices}.", param="n")
    if choices > CHOICES_MAX:
        raise ApiError(f"n must be at most {CHOICES_MAX}, got {choices}.", param="n")
    return choices


def _max_tokens(body: Mapping[str, Any], *, is_chat: bool) -> int | None:
    names = ("max_completion_tokens", "max_tokens") if is_chat else ("max_tokens",)
    for name in names:
        value = _optional(body, name, int, "a valid integer")
        if value is not None:
            if value < 1:
                raise ApiError(f"max_tokens must be at least 1, got {value}.", param="max_tokens")
            return int(value)
    return None if is_chat or "max_tokens" in body else COMPLETION_TOKENS_DEFAULT


def _check_min_tokens(body: Mapping[str, Any], max_tokens: int | None) -> None:
    min_tokens = _optional(body, "min_tokens", int, "a valid integer") or 0
    if min_tokens < 0:
        raise ApiError(f"min_tokens must be greater than or equal to 0, got {min_tokens}.")
    if max_tokens is not None and min_tokens > max_tokens:
        raise ApiError(
            f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}."
        )


def _session_id(body: Mapping[str, Any]) -> str | None:
    extra = body.get("vllm_xargs")
    extra_id = extra.get("session_id") if isinstance(extra, dict) else None
    for value in (body.get("session_id"), extra_id):
        if isinstance(value, str) and value:
            return value
    return None


def check_messages(body: Mapping[str, Any]) -> None:
    """Raises ApiError unless the body has messages; what is in them is the renderer's business."""
    if "messages" not in body:
        raise invalid("messages", "Field required")
    if not isinstance(body["messages"], list):
        raise invalid("messages", "Input should be a valid list")


def reused_token_ids(body: Mapping[str, Any]) -> list[int] | None:
    """Return the prompt that a gateway has tokenised already, None if it sent none.

    Such ids (`kv_transfer_params.prompt_token_ids`) replace what the messages would give.
    """
    parameters = body.get("kv_transfer_params")
    ids = parameters.get("prompt_token_ids") if isinstance(parameters, dict) else None
    if ids is None or body.get("echo"):
        return None
    if not ids or not is_token_ids(ids):
        raise ApiError(
            "`kv_transfer_params['prompt_token_ids']` must be a non-empty list "
            "of non-negative integers.",
            param="kv_transfer_params.prompt_token_ids",
        )
    return list(ids)


def parse_prompts(body: Mapping[str, Any]) -> list[str | list[int]]:
    """Return the prompts of a completion, each as text or as token ids. Raises ApiError."""
    prompt = body.get("prompt")
    if prompt is None or prompt == "":
        raise ApiError(
            "Either prompt or prompt_embeds must be provided and non-empty.",
            kind=http.HTTPStatus.BAD_REQUEST.phrase,
            param="prompt",
        )
    if isinstance(prompt, str):
        return [prompt]
    if prompt and is_token_ids(prompt):
        return [list(prompt)]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(one, str) for one in prompt):
            return list(prompt)
        if all(one and is_token_ids(one) for one in prompt):
            return [list(one) for one in prompt]
    raise invalid("prompt", "Input should be a valid string, list of strings or of token ids")


def is_token_ids(value: object) -> TypeGuard[list[int]]:
    """Return whether `value` is a list of ids, which may be empty."""
    return isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)


# -- answers ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    """None: not told (the running usage of a stream)."""

    def body(self) -> Json:
        usage: Json = {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
        }
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return usage


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A call in a finished answer."""

    call_id: str
    name: str
    arguments: str
    """JSON."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer."""

    prompt_token_ids: Sequence[int]
    text: str | None
    """None: it has calls only."""
    token_ids: Sequence[int]
    finish_reason: str
    reasoning: str = ""
    reasoning_tokens: int = 0
    calls: tuple[CalledTool, ...] = ()


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What a stream adds to one call."""

    index: int
    arguments: str
    call_id: str | None = None
    """Of the first delta of a call, as `name`; None in the others."""
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What a stream adds to one answer."""

    index: int
    text: str
    token_id: int
    finish_reason: str | None
    prompt_token_ids: Sequence[int] | None
    """Of the first delta of an answer; None in the others."""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all chunks of one response have in common."""

    response_id: str
    created: int
    """Seconds since the epoch."""
    model: str
    options: GenerateOptions

    def response(
        self, choices: Sequence[Choice], usage: Usage, kv_transfer_params: Json | None = None
    ) -> Json:
        """Return the whole answer of a request without streaming.

        `kv_transfer_params`: what a decoder needs to get the prompt's KV (NIXL).
        """
        as_choice = self._chat_choice if self.options.is_chat else self._completion_choice
        body: Json = {
            "id": self.response_id,
            "object": "chat.completion" if self.options.is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [as_choice(index, choice) for index, choice in enumerate(choices)],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": usage.body(),
            "kv_transfer_params": kv_transfer_params,
        }
        if self.options.is_chat:
            ids = list(choices[0].prompt_token_ids) if self.options.returns_token_ids else None
            body |= {"prompt_logprobs": None, "prompt_token_ids": ids}
        return body

    def role_chunk(self, index: int, prompt_token_ids: Sequence[int], usage: Usage) -> Json:
        """Return the chunk that opens answer `index` of a chat; no tokens are sampled for it."""
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        chunk = self._chunk([choice], usage)
        chunk["prompt_token_ids"] = (
            list(prompt_token_ids) if self.options.returns_token_ids else None
        )
        return chunk

    def skips(self, delta: Delta) -> bool:
        """Tell whether a token needs no chunk: it holds a call's parts together and is not told."""
        has_parts = delta.text or delta.reasoning or delta.calls
        is_told = has_parts or delta.finish_reason is not None or self.options.returns_token_ids
        return self.options.is_chat and not is_told

    def delta_chunk(self, delta: Delta, usage: Usage) -> Json:
        choice: Json = {"index": delta.index}
        if self.options.is_chat:
            choice["delta"] = _chat_delta(delta)
        else:
            choice["text"] = delta.text
        choice |= {"logprobs": None, "finish_reason": delta.finish_reason}
        if delta.finish_reason is not None or not self.options.is_chat:
            choice["stop_reason"] = None
        with_ids = self.options.returns_token_ids
        if not self.options.is_chat:
            ids = delta.prompt_token_ids if with_ids else None
            choice["prompt_token_ids"] = None if ids is None else list(ids)
        choice["token_ids"] = [delta.token_id] if with_ids else None
        return self._chunk([choice], usage)

    def usage_chunk(self, usage: Usage) -> Json:
        """Return the last chunk of a stream that was asked for usage."""
        return {**self._chunk([], None), "usage": usage.body()}

    def _chunk(self, choices: list[Json], usage: Usage | None) -> Json:
        chunk: Json = {
            "id": self.response_id,
            "object": "chat.completion.chunk" if self.options.is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if usage is not None and self.options.has_continuous_usage:
            chunk["usage"] = usage.body()
        return chunk

    def _chat_choice(self, index: int, choice: Choice) -> Json:
        message = {
            "role": "assistant",
            "content": choice.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            **({"tool_calls": [_tool_call(call) for call in choice.calls]} if choice.calls else {}),
            "reasoning": choice.reasoning or None,
        }
        return {
            "index": index,
            "message": message,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": None,
            "token_ids": self._token_ids(choice),
        }

    def _completion_choice(self, index: int, choice: Choice) -> Json:
        with_ids = self.options.returns_token_ids
        return {
            "index": index,
            "text": choice.text,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": None,
            "token_ids": self._token_ids(choice),
            "prompt_logprobs": None,
            "prompt_token_ids": list(choice.prompt_token_ids) if with_ids else None,
        }

    def _token_ids(self, choice: Choice) -> list[int] | None:
        return list(choice.token_ids) if self.options.returns_token_ids else None


def _chat_delta(delta: Delta) -> Json:
    told: Json = {}
    if delta.reasoning:
        told["reasoning"] = delta.reasoning
    if delta.text:
        told["content"] = delta.text
    if delta.calls:
        told["tool_calls"] = [_call_delta(call) for call in delta.calls]
    return told


def _call_delta(call: CallDelta) -> Json:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "index": call.index, "function": function}


def _tool_call(call: CalledTool) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def model_list(model: str, root: str, max_model_len_tokens: int, created: int) -> Json:
    card = {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": root,
        "parent": None,
        "max_model_len": max_model_len_tokens,
        "permission": [],
    }
    return {"object": "list", "data": [card]}
