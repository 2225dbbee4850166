"""Responses and Messages are read as the chats that the engine makes of them: the same token ids."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from processes import EngineProcess
from request_bodies import MESSAGES, RESPONSES

from moongate.engine_plugins.vllm_messages import messages_as_chat
from moongate.engine_plugins.vllm_render import ModelRenderer
from moongate.engine_plugins.vllm_responses import responses_as_chat

EnginePair = tuple[EngineProcess, EngineProcess]


@pytest.fixture(scope="module")
def renderer(tiny_model: Path) -> ModelRenderer:
    return ModelRenderer.load(tiny_model)


def rendered(engine: EngineProcess, path: str, body: Mapping[str, Any]) -> list[int]:
    """Return the ids that the engine says it would compute."""
    url = f"{engine.url}{path}/render"
    answer = httpx.post(url, json={"model": "tiny", **body}, timeout=30, trust_env=False)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["token_ids"]
    return ids


@pytest.mark.parametrize("name", RESPONSES)
def test_responses_have_the_engines_own_token_ids(
    name: str, engines: EnginePair, renderer: ModelRenderer
) -> None:
    theirs = rendered(engines[0], "/v1/responses", RESPONSES[name])
    assert renderer.chat_token_ids(responses_as_chat(RESPONSES[name])) == theirs


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_have_the_engines_own_token_ids(
    name: str, engines: EnginePair, renderer: ModelRenderer
) -> None:
    body = {"max_tokens": 1, **MESSAGES[name]}
    theirs = rendered(engines[0], "/v1/messages", body)
    assert renderer.chat_token_ids(messages_as_chat(body, renderer.manners)) == theirs
