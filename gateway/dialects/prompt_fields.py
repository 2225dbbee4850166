"""What of a body makes its prompt, and what of it keeps a prompt from being read or reused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from moongate.engine_plugins.vllm_messages import messages_as_chat
from moongate.engine_plugins.vllm_render import (
    PromptRefused,
    PromptUnsupported,
    TemplateManners,
    is_text_part,
)
from moongate.engine_plugins.vllm_responses import responses_as_chat
from moongate.gateway.dialects.body import Body
from moongate.gateway.dialects.routes import WITH_CHOICES, PromptKind, Route
from moongate.router.blocks import hash_text
from moongate.router.model import BlockHash

_TEXT_FIELDS = {
    PromptKind.CHAT: ("tools", "chat_template_kwargs", "messages"),
    PromptKind.COMPLETION: ("prompt",),
    PromptKind.RESPONSES: ("tools", "instructions", "previous_response_id", "input"),
    PromptKind.MESSAGES: ("tools", "system", "messages"),
}
"""What of a body has its prompt's text, in the order that templates mostly put it."""

TEXT_BYTES_MAX = 1 << 18
"""Of a prompt that is known by its text only: about 1,000 chunks, which take a ms."""


def prompt_fields(
    route: Route, fields: Mapping[str, Any], manners: TemplateManners | None
) -> Mapping[str, Any]:
    """Return the fields of the chat or completion that has a body's prompt.

    A completion of several is routed by its first. `manners`: of the model's templates, where known.
    Raises: PromptRefused, PromptUnsupported.
    """
    match route.kind:
        case PromptKind.RESPONSES:
            return responses_as_chat(fields)
        case PromptKind.MESSAGES:
            return messages_as_chat(fields, manners)
        case PromptKind.CHAT:
            return {name: value for name, value in fields.items() if name != "prompt"}
        case _:
            return _completion_fields(fields)


def _completion_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raises: PromptUnsupported."""
    prompt = fields.get("prompt")
    if fields.get("suffix") is not None or prompt is None:
        raise PromptUnsupported("prompt_form")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    is_ids = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)
    if not (is_ids or (isinstance(prompt, str) and prompt)):
        raise PromptUnsupported("prompt_form")
    others = {name: value for name, value in fields.items() if name != "messages"}
    return {**others, "prompt": prompt}


NO_TEXT_TAG = "MOONGATE_NO_TEXT_TAG"
"""Stands for content that can't be rendered here. Where a text has it by chance less is known."""


def with_tags(fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a chat's fields with a tag as the content of each message that has more than text.

    None: none has, or the first has already. The prompt made of it begins as the whole prompt does,
    up to the first tag. The messages that follow stay: templates render the earlier by the later.
    """
    messages = fields.get("messages")
    if messages is None:
        return None
    count = next((n for n, message in enumerate(messages) if not is_text_only(message)), 0)
    if count == 0:
        return None
    tagged = [m if is_text_only(m) else {**m, "content": NO_TEXT_TAG} for m in messages]
    return {**fields, "messages": tagged}


def is_text_only(message: object) -> bool:
    """Tell whether all of a message's content is text."""
    content = message.get("content") if isinstance(message, dict) else None
    return all(map(is_text_part, content)) if isinstance(content, list) else True


def has_given_ids(route: Route, body: Body) -> bool:
    """Tell whether the prompt is token ids already, so that no tokenizer is needed."""
    if route.kind is not PromptKind.COMPLETION:
        return False
    prompt = body.fields.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        prompt = prompt[0]
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)


def given_ids(prompt: Sequence[Any]) -> list[int]:
    """Raises: PromptRefused."""
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
        raise PromptRefused("prompt: expected token ids")
    return list(prompt)


def with_reasoning_name(message: Any) -> Any:
    """Return a message as chat requests become: `/tokenize` knows reasoning by one name only."""
    if not isinstance(message, dict) or message.get("reasoning_content") is None:
        return message
    reasoning = message.get("reasoning")
    others = {name: value for name, value in message.items() if name != "reasoning_content"}
    return {
        **others,
        "reasoning": reasoning if reasoning is not None else message["reasoning_content"],
    }


def skips_cache(route: Route, fields: Mapping[str, Any]) -> bool:
    """Tell whether the engine will compute the whole prompt, whatever it has cached.

    Source: vLLM 0.32 `KVCacheManager.prefix_cache_lookup_enabled`, and `to_sampling_params` of both
    requests: logits of the prompt are wanted.
    """
    if route.kind not in WITH_CHOICES:
        return False
    # An echoed chat has the logits of its prompt by default, an echoed completion if asked for.
    is_chat = route.kind is PromptKind.CHAT
    logprobs = fields.get("top_logprobs", 0) if is_chat else fields.get("logprobs")
    echoes_logprobs = bool(fields.get("echo")) and logprobs is not None
    return fields.get("prompt_logprobs") is not None or echoes_logprobs


def read_salt(body: Body) -> str | None:
    salt = body.top.get("cache_salt")
    return salt if isinstance(salt, str) else None


def read_text(route: Route, body: Body) -> bytes:
    """Return the prompt's text: what comes first in the engine's prompt comes first here.

    Up to `TEXT_BYTES_MAX`: where somebody begins alike for so long, it is the same conversation, and
    images are megabytes.
    """
    parts = (body.fields.get(name) for name in _TEXT_FIELDS[route.kind])
    text = bytearray()
    try:
        for piece in itertools.chain.from_iterable(_dump(p) for p in parts if p is not None):
            text += piece[: TEXT_BYTES_MAX - len(text)]
            if len(text) == TEXT_BYTES_MAX:
                break
    except orjson.JSONEncodeError:  # nested more deeply than it writes, though it can be read
        return body.raw[:TEXT_BYTES_MAX]
    return bytes(text)


def _dump(value: object, depth: int = 4) -> Iterator[bytes]:
    """Iterate over a value as JSON, in pieces: so that what is too long need not be written whole."""
    if depth and isinstance(value, list):
        for number, item in enumerate(value):
            yield b"," if number else b"["
            yield from _dump(item, depth - 1)
        yield b"]" if value else b"[]"
    elif depth and isinstance(value, dict):
        for number, (name, item) in enumerate(value.items()):
            yield (b"," if number else b"{") + orjson.dumps(name) + b":"
            yield from _dump(item, depth - 1)
        yield b"}" if value else b"{}"
    else:
        yield orjson.dumps(value)


def hash_body_text(text: bytes, body: Body) -> Sequence[BlockHash]:
    """Return the chain of a prompt that is known by its text only."""
    return hash_text(text, (body.model, read_salt(body)))
