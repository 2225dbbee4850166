"""Sessions as Codex and Claude Code send them: big system prompts, tools with schemas, results up to 40 KB.

Made for the tests, from a seed, in the shape of those agents' requests; what the model "said" is part of the
recording, so that the same bytes are sent again each time. Every request carries all that was said before.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

Body = dict[str, Any]

RESULT_BYTES = (300, 1_500, 40_000, 800, 6_000, 400, 2_500, 700, 300, 1_200, 500, 900)
"""Of each turn's tool result, in their order: mostly short, one very long."""

WORDS = [
    "def",
    "class",
    "return",
    "import",
    "while",
    "yield",
    "lambda",
    "raise",
    "with",
    "assert",
    "for",
    "in",
    "not",
    "None",
    "True",
    "self",
]


class Recording:
    """Makes texts that look like source code."""

    def __init__(self, seed: str) -> None:
        self._chance = random.Random(seed)

    def text(self, size_bytes: int) -> str:
        words: list[str] = []
        size = 0
        while size < size_bytes:
            word = self._chance.choice(WORDS) + str(self._chance.randrange(100))
            words.append(word + self._chance.choice(" \n"))
            size += len(words[-1])
        return "".join(words)[:size_bytes]

    def name(self, prefix: str) -> str:
        return f"{prefix}_{self._chance.randrange(16**12):012x}"

    def schema(self, fields: int) -> Body:
        properties = {
            f"field_{n}": {"type": "string", "description": self.text(80)} for n in range(fields)
        }
        return {"type": "object", "properties": properties, "required": ["field_0"]}


def codex_session(seed: int) -> Iterator[Body]:
    """Yield the bodies of one session for `/v1/responses`, without `model`."""
    record = Recording(f"codex {seed}")
    tools = [
        {"type": "function", "name": name, "description": record.text(300), "strict": False,
         "parameters": record.schema(4)}
        for name in ("shell", "apply_patch", "update_plan", "view_image", "web_fetch")
    ]  # fmt: skip
    fixed = {
        "instructions": record.text(9_000), "tools": tools, "tool_choice": "auto",
        "parallel_tool_calls": False, "store": False, "stream": True, "max_output_tokens": 8,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": record.name("session"),
    }  # fmt: skip
    permissions = [{"type": "input_text", "text": record.text(700)}]
    items: list[Body] = [{"type": "message", "role": "developer", "content": permissions}]
    for turn, size in enumerate(RESULT_BYTES):
        if turn % 4 == 0:
            content = [{"type": "input_text", "text": record.text(400)}]
            items.append({"type": "message", "role": "user", "content": content})
        yield {**fixed, "input": [*items]}
        thought = [{"type": "reasoning_text", "text": record.text(200)}]
        items.append({"type": "reasoning", "summary": [], "content": thought})
        call_id, arguments = record.name("call"), json.dumps({"field_0": record.text(60)})
        items.append(
            {"type": "function_call", "name": "shell", "arguments": arguments, "call_id": call_id}
        )
        output = record.text(size)
        items.append({"type": "function_call_output", "call_id": call_id, "output": output})
        if turn % 4 == 3:
            said = [{"type": "output_text", "text": record.text(300), "annotations": []}]
            items.append({"type": "message", "role": "assistant", "content": said})


def claude_code_session(seed: int) -> Iterator[Body]:
    """Yield the bodies of one session for `/v1/messages`, without `model`.

    As that agent does, each begins with a line of its own, which engines leave out of the prompt, and the
    mark of where to cache moves along.
    """
    record = Recording(f"claude code {seed}")
    tools = [
        {"name": name, "description": record.text(500), "input_schema": record.schema(3)}
        for name in ("Bash", "Read", "Edit", "Grep", "TodoWrite", "Task")
    ]
    system = [
        {"type": "text", "text": "You are an agent for the command line."},
        {"type": "text", "text": record.text(8_000), "cache_control": {"type": "ephemeral"}},
    ]
    user_id = record.name("user")
    reminder = {"type": "text", "text": "<system-reminder>" + record.text(500)}
    asked = {"type": "text", "text": record.text(300)}
    messages: list[Body] = [{"role": "user", "content": [reminder, asked]}]
    for size in RESULT_BYTES:
        header = {"type": "text", "text": f"x-anthropic-billing-header: cch={record.name('h')}"}
        yield {
            "system": [header, *system], "tools": tools, "messages": _with_mark(messages),
            "max_tokens": 8, "stream": True, "metadata": {"user_id": user_id},
            "thinking": {"type": "adaptive"}, "output_config": {"effort": "medium"},
        }  # fmt: skip
        use_id = record.name("toolu")
        thinking = {"type": "thinking", "thinking": record.text(150), "signature": record.name("s")}
        said = {"type": "text", "text": record.text(120)}
        use = {
            "type": "tool_use",
            "id": use_id,
            "name": "Bash",
            "input": {"field_0": record.text(60)},
        }
        messages.append({"role": "assistant", "content": [thinking, said, use]})
        result = {"type": "tool_result", "tool_use_id": use_id, "content": record.text(size)}
        messages.append({"role": "user", "content": [result]})


def _with_mark(messages: list[Body]) -> list[Body]:
    *before, last = messages
    *blocks, block = last["content"]
    marked = {**block, "cache_control": {"type": "ephemeral"}}
    return [*before, {**last, "content": [*blocks, marked]}]
