"""Requests of every API, as clients write them: what shapes their prompts in one way or another."""

from __future__ import annotations

from typing import Any

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
CHAT_CALL = {
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
CHAT_RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "done\n"}

CHATS: dict[str, dict[str, Any]] = {
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
    "tool calls": {"messages": [USER, CHAT_CALL, CHAT_RESULT, USER], "tools": TOOLS},
    "broken arguments": {
        "messages": [
            USER,
            {**CHAT_CALL, "tool_calls": [{"type": "function", "id": "c", "function": {"name": "f", "arguments": "{"}}]},
            CHAT_RESULT,
        ]
    },
    "empty tool calls": {"messages": [USER, {"role": "assistant", "content": "x", "tool_calls": []}, USER]},
    "tool parts": {
        "messages": [USER, CHAT_CALL, {**CHAT_RESULT, "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]}]
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

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"enum": [1, None]}}}
TOOL = {"type": "function", "name": "f", "description": "Does <é> & more", "parameters": SCHEMA}
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
