"""Prompts rendered here are the engine's own, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from processes import EngineProcess

from moongate.engine_plugins.vllm_render import ModelRenderer

EnginePair = tuple[EngineProcess, EngineProcess]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{n}",
            "description": f"Does <{n}> & more – é",
            "parameters": {
                "type": "object",
                "properties": {"b": {"type": "string"}, "a": {"enum": [1, 2.0, None, True]}},
                "required": ["b"],
            },
        },
    }
    for n in range(12)
]
USER = {"role": "user", "content": "Grüße, 世界 🙂 <|im_start|> \t x"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "type": "function",
            "id": "call_1",
            "function": {"arguments": '{"b": "<é>", "a": 1}', "name": "tool_0"},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "done\n"}

BODIES: dict[str, dict[str, Any]] = {
    "plain": {"messages": [USER]},
    "system": {"messages": [{"role": "system", "content": "  Be brief.\n"}, USER]},
    "parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
        ]
    },
    "tools": {"messages": [USER], "tools": TOOLS},
    "tools without parameters": {
        "messages": [USER],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    },
    "strict tool": {
        "messages": [USER],
        "tools": [{"type": "function", "function": {"name": "f", "strict": True, "x": 1}}],
    },
    "tool calls": {"messages": [USER, CALL, RESULT, USER], "tools": TOOLS},
    "broken arguments": {
        "messages": [
            USER,
            {**CALL, "tool_calls": [{"type": "function", "id": "c", "function": {"name": "f", "arguments": "{"}}]},
            RESULT,
        ]
    },
    "empty tool calls": {"messages": [USER, {"role": "assistant", "content": "x", "tool_calls": []}, USER]},
    "tool parts": {
        "messages": [USER, CALL, {**RESULT, "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]}]
    },
    "developer": {
        "messages": [{"role": "developer", "content": "Rules"}, USER, {"role": "system", "content": "More"}]
    },
    "reasoning": {
        "messages": [USER, {"role": "assistant", "content": "a", "reasoning_content": "think"}, USER]
    },
    "template kwargs": {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
    "no generation prompt": {"messages": [USER], "add_generation_prompt": False},
    "continued": {
        "messages": [USER, {"role": "assistant", "content": "It is"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "continued with space": {
        "messages": [USER, {"role": "assistant", "content": "It is "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "special tokens": {"messages": [USER], "add_special_tokens": True},
    "named": {"messages": [{"role": "user", "name": "bob", "content": "hi"}]},
    "billing header": {
        "messages": [
            {"role": "system", "content": "x-anthropic-billing-header: cch=1\nBe brief."},
            USER,
        ]
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def renderer(tiny_model: Path) -> ModelRenderer:
    return ModelRenderer.load(tiny_model)


@pytest.mark.parametrize("name", BODIES)
def test_c39_chat_prompts_have_the_engines_own_token_ids(
    name: str, engines: EnginePair, renderer: ModelRenderer
) -> None:
    body = BODIES[name]
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
    body = {"model": "tiny", "max_tokens": 1, **BODIES[name]}
    answer = httpx.post(
        f"{engines[0].url}/v1/chat/completions", json=body, timeout=60, trust_env=False
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == len(renderer.chat_token_ids(body))
