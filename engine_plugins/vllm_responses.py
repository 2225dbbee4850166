"""A Responses request as the chat that vLLM makes of it before it renders the prompt: pure.

Items that belong to one turn of the model (reasoning, text, calls) become one assistant message. What only
the engine can tell (what another response held, how it describes a free-form tool) is `PromptUnsupported`;
what it would refuse is `PromptRefused`.

Source: vLLM 0.32 `entrypoints/openai/responses/` (`utils.py` `construct_input_messages`, `protocol.py`
`ResponsesRequest`), `tool_parsers/utils.py` `get_function_tools`. Checked against its
`/v1/responses/render` in `tests/e2e/test_dialects.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moongate.engine_plugins.vllm_render import PromptRefused, PromptUnsupported

Message = dict[str, Any]

NAMESPACE_SEPARATOR = "__"
"""Between the name of a namespace of tools and that of a tool in it."""

_UNFINISHED = ("in_progress", "incomplete")
_CALL_OUTPUTS = ("function_call_output", "custom_tool_call_output")


def responses_as_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the chat request that has the same prompt.

    Raises: RenderError.
    """
    if body.get("previous_response_id") is not None:
        raise PromptUnsupported("previous_response")
    if body.get("previous_input_messages") is not None:
        raise PromptUnsupported("previous_messages")
    items = body.get("input")
    if not isinstance(items, str | list):
        raise PromptRefused("input: expected a text or a list of items")
    continues = _continues_last_item(items)
    chat: dict[str, Any] = {
        "messages": [*_instructions(body.get("instructions")), *_messages(items)],
        "add_generation_prompt": not continues,
        "continue_final_message": continues,
        "add_special_tokens": True,  # unlike a chat
    }
    tools = _tools(body.get("tools"))
    if tools is not None:
        chat["tools"] = tools
    reasoning = body.get("reasoning")
    if isinstance(reasoning, dict):
        chat["reasoning_effort"] = reasoning.get("effort")
    if body.get("truncation", "disabled") != "disabled":
        chat["truncate_prompt_tokens"] = -1
    if body.get("chat_template_kwargs") is not None:
        chat["chat_template_kwargs"] = body["chat_template_kwargs"]
    return chat


def _instructions(instructions: object) -> list[Message]:
    if instructions is not None and not isinstance(instructions, str):
        raise PromptRefused("instructions: expected a text")
    return [{"role": "system", "content": instructions}] if instructions else []


def _continues_last_item(items: str | list[Any]) -> bool:
    """Tell whether the model is to go on with the last item instead of beginning a turn."""
    last = items[-1] if isinstance(items, list) and items else None
    if not isinstance(last, dict) or last.get("type", "message") not in ("message", "reasoning"):
        return False
    return last.get("status") in _UNFINISHED


# --- items ----------------------------------------------------------------------------------------


def _messages(items: str | list[Any]) -> list[Message]:
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Message] = []
    for item in items:
        if not isinstance(item, dict):
            raise PromptRefused("input: expected objects")
        _add_item(messages, item)
    return messages


def _add_item(messages: list[Message], item: Mapping[str, Any]) -> None:
    """Add an item as a message of its own, or to the assistant's message before it."""
    kind, role = item.get("type"), item.get("role")
    if kind == "function_call":
        _add_call(messages, _call(item))
    elif kind == "custom_tool_call":
        raise PromptUnsupported("custom_tool")
    elif kind == "reasoning":
        _add_field(messages, "reasoning", _reasoning(item))
    elif kind in _CALL_OUTPUTS:
        call_id, output = item.get("call_id"), item.get("output")
        messages.append({"role": "tool", "content": output, "tool_call_id": call_id})
    elif role == "assistant":
        text = _first_text(item.get("content"))
        if text is None:
            messages.append(dict(item))
        else:
            _add_field(messages, "content", text)
    elif isinstance(role, str):
        messages.append(dict(item))
    else:
        raise PromptRefused(f"input: items of type {kind!r} are unknown")


def _add_field(messages: list[Message], name: str, text: str) -> None:
    """Add a text to the assistant's message that comes last, if it has none of this kind yet."""
    last = messages[-1] if messages else None
    if last is not None and last["role"] == "assistant" and last.get(name) is None:
        last[name] = text
    else:
        messages.append({"role": "assistant", name: text})


def _add_call(messages: list[Message], call: dict[str, Any]) -> None:
    last = messages[-1] if messages else None
    if last is not None and last["role"] == "assistant":
        calls = last.get("tool_calls") or []
        if not isinstance(calls, list):
            raise PromptRefused("input: expected tool_calls to be a list")
        last["tool_calls"] = [*calls, call]
    else:
        messages.append({"role": "assistant", "tool_calls": [call]})


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    name, call_id, arguments = item.get("name"), item.get("call_id"), item.get("arguments")
    if not isinstance(name, str) or not isinstance(call_id, str) or not isinstance(arguments, str):
        raise PromptRefused("input: a function_call needs name, call_id and arguments, all texts")
    if item.get("namespace"):
        name = f"{item['namespace']}{NAMESPACE_SEPARATOR}{name}"
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _reasoning(item: Mapping[str, Any]) -> str:
    if item.get("encrypted_content"):
        raise PromptRefused("input: encrypted reasoning can't be read")
    for name in ("content", "summary"):
        texts = item.get(name)
        if isinstance(texts, list) and texts:
            text = texts[0].get("text") if isinstance(texts[0], dict) else None
            if not isinstance(text, str):
                raise PromptRefused(f"input: a reasoning's {name} needs a text")
            return text
    return ""


def _first_text(content: object) -> str | None:
    """Return the text of an assistant's item, of several parts only the first: so does the engine."""
    if isinstance(content, list) and content:
        content = content[0].get("text") if isinstance(content[0], dict) else None
    return content if isinstance(content, str) else None


# --- tools ----------------------------------------------------------------------------------------


def _tools(tools: object) -> list[dict[str, Any]] | None:
    """Return the tools that the model is shown, as a chat has them."""
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise PromptRefused("tools: expected a list")
    shown = [{"type": "function", "function": function} for function in _functions(tools)]
    if not shown:
        raise PromptUnsupported("tools_of_the_engine")
    return shown


def _functions(tools: list[Any]) -> Iterator[Mapping[str, Any]]:
    """Iterate over the functions; tools that the engine runs itself are not shown to the model."""
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "function":
            yield _without_type(tool)
        elif kind == "namespace":
            inner_tools = tool.get("tools") or []
            if not isinstance(inner_tools, list):
                raise PromptRefused("tools: expected a namespace's tools to be a list")
            for inner in inner_tools:
                if isinstance(inner, dict) and inner.get("type") == "function":
                    name = f"{tool.get('name')}{NAMESPACE_SEPARATOR}{inner.get('name')}"
                    yield {**_without_type(inner), "name": name}
        elif kind == "custom":
            raise PromptUnsupported("custom_tool")
        elif not isinstance(kind, str):
            raise PromptRefused("tools: expected objects with a type")


def _without_type(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in tool.items() if name != "type"}
