"""Responses and Messages are read as the chats that the engine makes of them: the same token ids."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from processes import EngineProcess

from moongate.engine_plugins.vllm_messages import messages_as_chat
from moongate.engine_plugins.vllm_render import ModelRenderer
from moongate.engine_plugins.vllm_responses import responses_as_chat

EnginePair = tuple[EngineProcess, EngineProcess]

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"enum": [1, None]}}}
TOOL = {"type": "function", "name": "f", "description": "Does <é> & more", "parameters": SCHEMA}
USER = {"role": "user", "content": "Grüße, 世界 🙂 <|im_start|> \t x"}
TYPED_USER = {
    "type": "message",
    "role": "user",
    "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
}
ANSWER = {
    "type": "message",
    "role": "assistant",
    "content": [
        {"type": "output_text", "text": "one", "annotations": []},
        {"type": "output_text", "text": "two"},
    ],
}
REASONING = {
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"b": "<é>", "a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "done\n"}

RESPONSES: dict[str, dict[str, Any]] = {
    "text": {"input": "Grüße, 世界 🙂"},
    "instructions": {"input": "x", "instructions": "  Be brief.\n"},
    "empty instructions": {"input": "x", "instructions": ""},
    "item": {"input": [USER]},
    "parts": {"input": [TYPED_USER]},
    "developer": {"input": [{"role": "developer", "content": "Rules"}, USER], "instructions": "More"},
    "answer": {"input": [USER, ANSWER, USER]},
    "answer as text": {"input": [USER, {"role": "assistant", "content": "yes"}, USER]},
    "two answers": {"input": [USER, ANSWER, ANSWER, USER]},
    "call": {"input": [USER, CALL, OUTPUT], "tools": [TOOL]},
    "reasoning, answer and calls": {
        "input": [USER, REASONING, ANSWER, CALL, {**CALL, "call_id": "c2"}, OUTPUT,
                  {**OUTPUT, "call_id": "c2"}, USER],
        "tools": [TOOL],
    },
    "answer and then reasoning": {"input": [USER, ANSWER, REASONING, CALL, OUTPUT], "tools": [TOOL]},
    "summary only": {
        "input": [USER, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}, ANSWER, USER]
    },
    "empty reasoning": {"input": [USER, {"type": "reasoning", "summary": []}, ANSWER, USER]},
    "output in parts": {
        "input": [USER, CALL, {**OUTPUT, "output": [{"type": "input_text", "text": "1"}, {"type": "input_text", "text": "2"}]}]
    },
    "strict tool": {"input": "x", "tools": [{**TOOL, "strict": True}]},
    "tool without parameters": {"input": "x", "tools": [{"type": "function", "name": "g"}]},
    "tools of the engine beside it": {"input": "x", "tools": [TOOL, {"type": "web_search_preview"}]},
    "namespace": {
        "input": [USER, {**CALL, "namespace": "n"}, OUTPUT],
        "tools": [{"type": "namespace", "name": "n", "description": "d", "tools": [TOOL]}],
    },
    "effort": {"input": "x", "reasoning": {"effort": "low"}},
    "no effort": {"input": "x", "reasoning": {"effort": "none"}},
    "kwargs": {"input": "x", "chat_template_kwargs": {"enable_thinking": False}},
    "continued": {"input": [USER, {**ANSWER, "status": "incomplete", "id": "m"}]},
    "empty items": {"input": [USER, {"role": "user", "content": ""}]},
    "codex": {
        "instructions": "You are a coding agent.\n",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
            TYPED_USER, REASONING, CALL, OUTPUT, ANSWER, TYPED_USER,
        ],
        "tools": [{**TOOL, "strict": False}, {**TOOL, "name": "g"}],
        "tool_choice": "auto", "parallel_tool_calls": False, "store": False,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k",
    },
}  # fmt: skip

CLAUDE_TOOL = {"name": "f", "description": "Does <é> & more", "input_schema": SCHEMA}
TEXT = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {"b": "<é>", "a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "done\n"}
HEADER = {"type": "text", "text": "x-anthropic-billing-header: cch=1"}

MESSAGES: dict[str, dict[str, Any]] = {
    "text": {"messages": [USER]},
    "blocks": {"messages": [{"role": "user", "content": [TEXT, {"type": "text", "text": "b"}]}]},
    "one block": {"messages": [{"role": "user", "content": [TEXT]}]},
    "system": {"system": "  Be brief.\n", "messages": [USER]},
    "system blocks": {"system": [HEADER, TEXT, {"type": "text", "text": "b"}], "messages": [USER]},
    "system header": {"system": HEADER["text"] + "\nBe brief.", "messages": [USER]},
    "inline system": {"system": "x", "messages": [USER, {"role": "system", "content": "y"}, USER]},
    "inline system blocks": {
        "messages": [USER, {"role": "system", "content": [HEADER, TEXT]}, USER,
                     {"role": "system", "content": HEADER["text"]}],
    },
    "tools": {"messages": [USER], "tools": [CLAUDE_TOOL]},
    "schema without type": {
        "messages": [USER], "tools": [{"name": "f", "input_schema": {"properties": {}}}]
    },
    "strict tool": {"messages": [USER], "tools": [{**CLAUDE_TOOL, "strict": True}]},
    "deferred tool": {"messages": [USER], "tools": [{**CLAUDE_TOOL, "defer_loading": True}]},
    "tool use": {
        "messages": [
            USER,
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"}, TEXT, USE]},
            {"role": "user", "content": [RESULT, TEXT]},
        ],
        "tools": [CLAUDE_TOOL],
    },
    "only results": {
        "messages": [USER, {"role": "assistant", "content": [USE, {**USE, "id": "t2"}]},
                     {"role": "user", "content": [RESULT, {**RESULT, "tool_use_id": "t2", "content": None}]}],
        "tools": [CLAUDE_TOOL],
    },
    "result in parts": {
        "messages": [USER, {"role": "assistant", "content": [USE]},
                     {"role": "user", "content": [
                         {**RESULT, "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]}]}],
        "tools": [CLAUDE_TOOL],
    },
    "result of the assistant": {
        "messages": [USER, {"role": "assistant", "content": [TEXT, {**RESULT, "content": [{"type": "text", "text": "é"}]}]}, USER],
    },
    "only thinking": {
        "messages": [USER, {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "h"}, {"type": "redacted_thinking", "data": "x"},
            {"type": "thinking", "thinking": "m"}]}, USER],
    },
    "empty answer": {"messages": [USER, {"role": "assistant", "content": []}, USER]},
    "empty text": {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}, TEXT]}]},
    "no thinking": {"messages": [USER], "thinking": {"type": "disabled"}},
    "effort": {"messages": [USER], "output_config": {"effort": "high"}},
    "kwargs": {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
    "claude code": {
        "system": [HEADER, TEXT, {**TEXT, "text": "You are an agent.\n"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder>"}, TEXT]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, USE]},
            {"role": "user", "content": [{**RESULT, "is_error": False, "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": [TEXT]},
            USER,
        ],
        "tools": [CLAUDE_TOOL, {**CLAUDE_TOOL, "name": "g"}],
        "thinking": {"type": "adaptive"}, "output_config": {"effort": "medium"},
        "metadata": {"user_id": "u"}, "temperature": 1,
    },
}  # fmt: skip


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
