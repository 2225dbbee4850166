"""The parity probe: does the local tokenizer give the very ids that an engine gets?

Asked for each form of prompt by itself: an engine may well differ in how it renders tools, say, and agree
on plain conversations.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from moongate.engine_plugins.vllm_render import ModelRenderer, PromptRefused, PromptUnsupported
from moongate.gateway.instances.engine_api import FACTS_S, EngineApi, EngineCallFailed


class PromptForm(Enum):
    """Forms of prompts that are rendered in different ways."""

    PLAIN = "plain"  # a chat of messages with one text each
    RESULTS = "results"  # the same, with results of tools among them
    RICH = "rich"  # a chat with tools, tool calls, or content in parts
    COMPLETION = "completion"


PROBE_BODIES: Mapping[PromptForm, Mapping[str, Any]] = {
    PromptForm.PLAIN: {
        "messages": [
            {"role": "system", "content": "You are  helpful.\n"},
            {"role": "user", "content": "Grüße, 世界 🙂\n"},
            {"role": "assistant", "content": " yes "},
            {"role": "user", "content": "and?"},
        ]
    },
    PromptForm.RESULTS: {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "tool", "tool_call_id": "call_1", "content": "<c>\n"},
            {"role": "user", "content": "d"},
        ]
    },
    PromptForm.RICH: {
        "messages": [
            {"role": "system", "content": "You are  helpful.\n"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "f", "arguments": '{"x": 1, "y": "<é>"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "done"},
            {"role": "user", "content": "and?"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "description": "d",
                    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
                },
            }
        ],
    },
    PromptForm.COMPLETION: {"prompt": " def f():\n\treturn 'x' # 🙂"},
}
"""Where local and engine ids differ, they differ on something of this."""


async def probe(
    model: str, renderer: ModelRenderer | None, api: EngineApi
) -> tuple[Mapping[PromptForm, bool], bool]:
    """Return for what forms local and engine ids agree, and whether the engine tokenises at all.

    A form that could not be compared is left out.
    """
    verdicts: dict[PromptForm, bool] = {}
    has_answered = False
    for form, body in PROBE_BODIES.items():
        try:
            theirs = await api.tokenize({"model": model, **body}, timeout_s=FACTS_S)
        except EngineCallFailed as error:
            if error.status is not None and error.status < 500 and error.status != 404:
                continue  # refused: a template without tools, say; the engine refuses it always
            return {}, has_answered
        has_answered = True
        if renderer is not None:
            verdicts[form] = _gives(renderer, body, theirs)
    return verdicts, has_answered


def _gives(renderer: ModelRenderer, body: Mapping[str, Any], theirs: list[int]) -> bool:
    try:
        return full_token_ids(renderer, body) == theirs
    except (PromptRefused, PromptUnsupported):
        return False


def form_of(fields: Mapping[str, Any]) -> PromptForm:
    """Return the form of a prompt, by the fields of its chat or completion."""
    messages = fields.get("messages")
    if messages is None:
        return PromptForm.COMPLETION
    if fields.get("tools") or not all(map(_is_plain, messages)):
        return PromptForm.RICH
    has_results = any(message.get("role") == "tool" for message in messages)
    return PromptForm.RESULTS if has_results else PromptForm.PLAIN


def _is_plain(message: object) -> bool:
    if not isinstance(message, dict):
        return False
    return isinstance(message.get("content"), str) and not message.get("tool_calls")


def full_token_ids(renderer: ModelRenderer, fields: Mapping[str, Any]) -> list[int]:
    """Return a small prompt's ids. Raises: PromptRefused, PromptUnsupported."""
    if "messages" in fields:
        return renderer.chat_token_ids(fields)
    return renderer.completion_token_ids(fields["prompt"])
