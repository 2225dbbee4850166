"""The parity probe: does the local tokenizer give the very ids that an engine gets?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moongate.engine_plugins.vllm_render import ModelRenderer, PromptRefused, PromptUnsupported
from moongate.gateway.engine_api import FACTS_S, EngineApi, EngineCallFailed

PROBE_BODIES: tuple[Mapping[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "Grüße, 世界 🙂\n"}]},
    {
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
    {"prompt": " def f():\n\treturn 'x' # 🙂"},
)
"""Where local and engine ids differ, they differ on something of this."""


async def probe(
    model: str,
    renderer: ModelRenderer | None,
    api: EngineApi,
) -> tuple[bool | None, bool]:
    """Return whether local and engine ids agree, and whether the engine tokenises at all.

    None: there was nothing to compare.
    """
    compared = answered = 0
    for body in PROBE_BODIES:
        try:
            theirs = await api.tokenize({"model": model, **body}, timeout_s=FACTS_S)
        except EngineCallFailed as error:
            if error.status is not None and error.status < 500 and error.status != 404:
                continue  # refused: a template without tools, say; the engine refuses it always
            return None, answered > 0
        answered += 1
        if renderer is None:
            continue
        try:
            ours = full_token_ids(renderer, body)
        except (PromptRefused, PromptUnsupported):
            return False, True
        if ours != theirs:
            return False, True
        compared += 1
    return True if compared > 0 else None, answered > 0


def full_token_ids(renderer: ModelRenderer, fields: Mapping[str, Any]) -> list[int]:
    """Return a small prompt's ids. Raises: PromptRefused, PromptUnsupported."""
    if "messages" in fields:
        return renderer.chat_token_ids(fields)
    return renderer.completion_token_ids(fields["prompt"])
