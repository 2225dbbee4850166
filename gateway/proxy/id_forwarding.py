"""Handing token ids to the engine, so that it need not render and tokenise the prompt again.

The ids go in `kv_transfer_params.prompt_token_ids`, which the engine takes in place of the messages'
text; tool choice and parsers still follow the messages. Only ids that are beyond doubt are handed on:
made here, in whole, for an instance whose own `/tokenize` gave the same, from fields that both read in
the same way. Everything else is left to the engine.

Source: vLLM 0.32 `renderers/online_renderer.py` `_reused_prompt_token_ids`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import orjson

from moongate.gateway.dialects.body import Body, with_fields
from moongate.gateway.dialects.connector_params import KV_TRANSFER_PARAMS
from moongate.gateway.dialects.routes import PromptKind, Route
from moongate.gateway.instances.engine_api import EngineApi
from moongate.gateway.prompts.prompt import PromptPipeline, ReadPrompt

ForwardIds = Literal["auto", "on", "off"]

TOKENS_MIN = 256
"""`auto`: of shorter prompts the ids cost about as much to read as the text. Measured on a real engine,
first token with ids against without: 1.9 ms sooner at 250 tokens, 6 at 1,000, 15 at 14,000."""

"""Names another instance to fetch KV from, or token ids in place of the prompt: not for clients."""


class IdForwarding:
    """Decides for each attempt what body its instance gets."""

    def __init__(self, mode: ForwardIds, prompts: PromptPipeline) -> None:
        self.mode = mode
        self._prompts = prompts

    def ids_for(
        self,
        route: Route,
        body: Body,
        read: ReadPrompt,
        api: EngineApi,
        context_tokens: int | None,
    ) -> bytes | None:
        """Return the prompt's ids (JSON) if the engine should get them.

        `context_tokens`: the model's longest context. What exceeds it the engine should refuse by
        the text, before it begins a stream.
        """
        tokenized = read.tokenized
        if self.mode == "off" or tokenized is None or not _leaves_prompt_alone(route, body):
            return None
        assert body.model is not None
        assert read.prompt is not None
        count = read.prompt.token_count
        is_too_long = context_tokens is not None and count >= context_tokens
        is_too_short = count < TOKENS_MIN if self.mode == "auto" else count == 0
        if is_too_long or is_too_short or not self._is_trusted(body.model, api, read):
            return None
        return tokenized.ids_json()

    def _is_trusted(self, model: str, api: EngineApi, read: ReadPrompt) -> bool:
        prompts = self._prompts
        takes = self.mode == "on" or prompts.takes_ids(api)
        return takes and prompts.agrees_with(model, api, read.form) and prompts.is_repeatable(model)


def with_params(
    raw: bytes, ids: bytes | None, params: Mapping[str, Any] | None = None
) -> Sequence[bytes]:
    """Return a body in pieces, with token ids and with what its engine's connector is to be told."""
    parts = [b'"prompt_token_ids":%b' % ids] if ids is not None else []
    if params:
        parts.append(orjson.dumps(params)[1:-1])
    if not parts:
        return (raw,)
    return with_fields(raw, b'"kv_transfer_params":{%b}' % b",".join(parts))


def _leaves_prompt_alone(route: Route, body: Body) -> bool:
    """Tell whether the engine's prompt follows from what both read alike, and ids may replace it."""
    fields = body.fields
    if route.kind is not PromptKind.CHAT or KV_TRANSFER_PARAMS in fields or fields.get("echo"):
        return False
    # An engine can be told to leave tools out that may not be used; the probe can't show that.
    return not (fields.get("tool_choice") == "none" and fields.get("tools"))
