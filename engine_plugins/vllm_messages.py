"""A Messages request as the chat that vLLM makes of it before it renders the prompt: pure.

Results of tools become messages of their own in front of the user's, thinking becomes reasoning, and a
system prompt's blocks one text. Two things follow from the model's template (`TemplateManners`).

Source: vLLM 0.32 `entrypoints/anthropic/serving.py` `to_chat_completion_request`. Checked against its
`/v1/messages/render` in `tests/e2e/test_dialects.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moongate.engine_plugins.vllm_render import (
    BILLING_HEADER,
    PromptRefused,
    PromptUnsupported,
    TemplateManners,
)

Message = dict[str, Any]

_TOOL_CHANGES = ("tool_addition", "tool_removal")


def messages_as_chat(body: Mapping[str, Any], manners: TemplateManners | None) -> dict[str, Any]:
    """Return the fields of the chat request that has the same prompt.

    `manners` None: the template isn't known here, so where they matter the prompt is `PromptUnsupported`.
    Raises: RenderError.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise PromptRefused("messages: expected a list with at least one message")
    merges_system = _merges_system(messages, manners)
    chat: dict[str, Any] = {"messages": [*_system(body, messages, merges_system=merges_system)]}
    for message in messages:
        chat["messages"] += _message(message, merges_system=merges_system)
    tools = _tools(body.get("tools"))
    if tools is not None:
        chat["tools"] = tools
    effort = _effort(body, manners)
    if effort is not None:
        chat["reasoning_effort"] = effort
    if body.get("chat_template_kwargs") is not None:
        chat["chat_template_kwargs"] = body["chat_template_kwargs"]
    return chat


def _merges_system(messages: list[Any], manners: TemplateManners | None) -> bool:
    if not all(isinstance(message, dict) for message in messages):
        raise PromptRefused("messages: expected objects")
    if manners is not None:
        return manners.merges_system
    if any(message.get("role") == "system" for message in messages):
        raise PromptUnsupported("unknown_template")
    return False


def _effort(body: Mapping[str, Any], manners: TemplateManners | None) -> Any:
    thinking, config = body.get("thinking"), body.get("output_config")
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        if manners is None:
            raise PromptUnsupported("unknown_template")
        return manners.disabled_thinking_effort
    return config.get("effort") if isinstance(config, dict) else None


# --- system prompts -------------------------------------------------------------------------------


def _system(
    body: Mapping[str, Any], messages: list[Any], *, merges_system: bool
) -> Iterator[Message]:
    """Yield the system message, if there is one: of all system prompts, where they may only come first."""
    system = body.get("system")
    parts = [system] if isinstance(system, str) else [*_system_texts(system)]
    if merges_system:
        parts += (_system_text(m) for m in messages if m.get("role") == "system")
    parts = [part for part in parts if part]
    if parts:
        yield {"role": "system", "content": "".join(parts)}


def _system_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return "" if content.startswith(BILLING_HEADER) else content
    return "".join(_system_texts(content))


def _system_texts(blocks: object) -> Iterator[str]:
    """Iterate over the texts of blocks, without the line by which Claude Code makes each request unique."""
    for block in _blocks(blocks):
        text = block.get("text") if block.get("type") == "text" else None
        if block.get("type") in _TOOL_CHANGES:
            raise PromptUnsupported("tool_changes")
        if isinstance(text, str) and not text.startswith(BILLING_HEADER):
            yield text


def _blocks(content: object) -> list[dict[str, Any]]:
    if content is None:
        return []
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise PromptRefused("content: expected a text or a list of blocks")
    return content


# --- messages -------------------------------------------------------------------------------------


def _message(message: Mapping[str, Any], *, merges_system: bool) -> Iterator[Message]:
    """Yield what one message becomes: the results of tools in it, then itself."""
    role, content = message.get("role"), message.get("content")
    if role == "system":
        text = "" if merges_system else _system_text(message)
        if text:
            yield {"role": "system", "content": text}
        return
    if role not in ("user", "assistant"):
        raise PromptRefused("messages: expected the role user, assistant or system")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    rendered: Message = {"role": role}
    for block in _blocks(content):
        if role == "user" and block.get("type") == "tool_result":
            yield from _results(block)
        else:
            _add_block(rendered, block)
    parts = rendered.get("content")
    if parts is not None and len(parts) == 1 and parts[0]["type"] == "text":
        rendered["content"] = parts[0]["text"]
    if role == "assistant" or parts:
        yield rendered


def _add_block(rendered: Message, block: Mapping[str, Any]) -> None:
    """Add what a block says to the message it is in."""
    kind = block.get("type")
    if kind == "text":
        if block.get("text"):
            rendered.setdefault("content", []).append({"type": "text", "text": block["text"]})
    elif kind == "image":
        if block.get("source"):
            rendered.setdefault("content", []).append(_image(block["source"]))
    elif kind == "thinking":
        if isinstance(block.get("thinking"), str):
            rendered["reasoning"] = rendered.get("reasoning", "") + block["thinking"]
    elif kind == "tool_use":
        rendered.setdefault("tool_calls", []).append(_call(block))
    elif kind == "tool_result":  # of the assistant, oddly: told as a text
        text = f"Tool result: {block.get('content') or ''}"
        rendered.setdefault("content", []).append({"type": "text", "text": text})
    elif kind not in ("redacted_thinking", "tool_reference"):  # these two are not shown
        raise PromptRefused(f"content: blocks of type {kind!r} are unknown")


def _image(source: object) -> dict[str, Any]:
    if not isinstance(source, dict):
        raise PromptRefused("content: an image needs a source")
    url = source.get("url", "")
    if source.get("type") != "url":
        url = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    if not block.get("id"):
        raise PromptUnsupported("call_without_id")  # the engine makes one up, of the time
    arguments = block.get("input") or {}
    function = {"name": block.get("name") or "", "arguments": arguments}
    return {"id": block["id"], "type": "function", "function": function}


def _results(block: Mapping[str, Any]) -> Iterator[Message]:
    """Yield the messages that a tool's result becomes: its text, its images, the tools it names."""
    content, call_id = block.get("content"), block.get("tool_use_id") or ""
    items = content if isinstance(content, list) else []
    items = [item for item in items if isinstance(item, dict)]
    texts = [item.get("text", "") for item in items if item.get("type") == "text"]
    if not all(isinstance(text, str) for text in texts):
        raise PromptRefused("content: expected a result's text to be a string")
    text = content if isinstance(content, str) else "\n".join(texts)
    yield {"role": "tool", "tool_call_id": call_id, "content": text}
    images = [_image(item.get("source")) for item in items if item.get("type") == "image"]
    if images:
        yield {"role": "user", "content": images}
    names = (
        item.get("tool_name") or item.get("name")
        for item in items
        if item.get("type") == "tool_reference"
    )
    references = [{"type": "tool_reference", "name": name} for name in names if name]
    if references:
        yield {"role": "tool", "tool_call_id": call_id, "content": references}


def _tools(tools: object) -> list[dict[str, Any]] | None:
    """Return the tools as a chat has them."""
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise PromptRefused("tools: expected a list of objects")
    if not tools:
        raise PromptUnsupported("no_tools")  # but a list of them, which templates may tell apart
    return [{"type": "function", "function": _function(tool)} for tool in tools]


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise PromptRefused("tools: expected an input_schema")
    return {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": schema if "type" in schema else {**schema, "type": "object"},
        "strict": tool.get("strict"),
        "defer_loading": tool.get("defer_loading"),
    }
