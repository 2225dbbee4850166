"""Prompts rendered here are the engine's own, token for token."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from processes import EngineProcess
from request_bodies import CHATS

from moongate.engine_plugins.vllm_render import ModelRenderer

EnginePair = tuple[EngineProcess, EngineProcess]


@pytest.fixture(scope="module")
def renderer(tiny_model: Path) -> ModelRenderer:
    return ModelRenderer.load(tiny_model)


@pytest.mark.parametrize("name", CHATS)
def test_c39_chat_prompts_have_the_engines_own_token_ids(
    name: str, engines: EnginePair, renderer: ModelRenderer
) -> None:
    body = CHATS[name]
    answer = httpx.post(
        f"{engines[0].url}/tokenize", json={"model": "tiny", **body}, timeout=30, trust_env=False
    )
    assert answer.status_code == 200, answer.text
    assert renderer.chat_token_ids(body) == answer.json()["tokens"]


@pytest.mark.parametrize("prompt", ["def f():\n\treturn 1", " leading", "", "<|im_end|>x", "🙂é"])
def test_completion_prompts_have_the_engines_own_token_ids(
    prompt: str, engines: EnginePair, renderer: ModelRenderer
) -> None:
    body = {"model": "tiny", "prompt": prompt}
    answer = httpx.post(f"{engines[0].url}/tokenize", json=body, timeout=30, trust_env=False)
    assert renderer.completion_token_ids(prompt) == answer.json()["tokens"]


@pytest.mark.parametrize("name", ["tools", "tool calls", "developer", "parts"])
def test_what_the_engine_counts_for_a_chat_is_what_was_rendered(
    name: str, engines: EnginePair, renderer: ModelRenderer
) -> None:
    body = {"model": "tiny", "max_tokens": 1, **CHATS[name]}
    answer = httpx.post(
        f"{engines[0].url}/v1/chat/completions", json=body, timeout=60, trust_env=False
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == len(renderer.chat_token_ids(body))
