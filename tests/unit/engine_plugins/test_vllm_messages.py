"""What becomes of a Messages request; that engines see it alike is in the e2e tests."""

from typing import Any

import pytest

from moongate.engine_plugins.vllm_messages import messages_as_chat
from moongate.engine_plugins.vllm_render import PromptRefused, PromptUnsupported, TemplateManners

MANNERS = TemplateManners(merges_system=False, disabled_thinking_effort="none")
MERGING = TemplateManners(merges_system=True, disabled_thinking_effort="low")
USER = {"role": "user", "content": "hi"}
TEXT = {"type": "text", "text": "a"}
HEADER = {"type": "text", "text": "x-anthropic-billing-header: cch=1"}
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {"x": 1}}
CHAT_CALL = {"id": "t", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
CHAT_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,x"}}


def messages_of(
    *messages: Any, manners: TemplateManners | None = MANNERS, **fields: Any
) -> list[dict[str, Any]]:
    chat = messages_as_chat({"messages": [*messages], **fields}, manners)
    rendered: list[dict[str, Any]] = chat["messages"]
    return rendered


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*blocks]}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [*blocks]}


def test_texts_stay_texts() -> None:
    assert messages_of(USER) == [USER]
    assert messages_of(user(TEXT)) == [{"role": "user", "content": "a"}]
    assert messages_of(user(TEXT, TEXT)) == [user(TEXT, TEXT)]
    assert messages_of(user({"type": "text", "text": ""}, TEXT)) == [
        {"role": "user", "content": "a"}
    ]


def test_a_system_prompt_is_one_text_without_billing_headers() -> None:
    blocks = [HEADER, TEXT, {"type": "image"}, TEXT]
    assert messages_of(USER, system=blocks)[0] == {"role": "system", "content": "aa"}
    assert messages_of(USER, system="be")[0] == {"role": "system", "content": "be"}
    assert messages_of(USER, system=[HEADER]) == [USER]
    assert messages_of(USER, system="") == [USER]


def test_system_messages_stay_where_they_are_unless_the_template_wants_them_first() -> None:
    inline = {"role": "system", "content": [HEADER, TEXT]}
    dropped = {"role": "system", "content": HEADER["text"]}
    given = (USER, inline, USER, dropped)
    assert messages_of(*given, system="s") == [
        {"role": "system", "content": "s"}, USER, {"role": "system", "content": "a"}, USER,
    ]  # fmt: skip
    merged = [{"role": "system", "content": "sa"}, USER, USER]
    assert messages_of(*given, system="s", manners=MERGING) == merged


def test_an_assistants_blocks_become_fields_of_one_message() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    redacted = {"type": "redacted_thinking", "data": "x"}
    assert messages_of(assistant(thinking, redacted, thinking, TEXT, USE)) == [
        {"role": "assistant", "reasoning": "hmhm", "content": "a", "tool_calls": [CHAT_CALL]}
    ]
    assert messages_of(assistant()) == [{"role": "assistant"}]
    assert messages_of(assistant({"type": "thinking"})) == [{"role": "assistant"}]


def test_results_of_tools_come_before_what_the_user_says() -> None:
    result = {"type": "tool_result", "tool_use_id": "t"}
    texts = {**result, "content": [TEXT, TEXT, "x"]}
    assert messages_of(user(TEXT, {**result, "content": "done"}, texts)) == [
        {"role": "tool", "tool_call_id": "t", "content": "done"},
        {"role": "tool", "tool_call_id": "t", "content": "a\na"},
        {"role": "user", "content": "a"},
    ]
    assert messages_of(user(result)) == [{"role": "tool", "tool_call_id": "t", "content": ""}]


def test_images_and_references_in_results_are_messages_of_their_own() -> None:
    content = [
        TEXT,
        IMAGE,
        {"type": "tool_reference", "tool_name": "g"},
        {"type": "tool_reference"},
    ]
    result = {"type": "tool_result", "tool_use_id": "t", "content": content}
    assert messages_of(user(result, IMAGE)) == [
        {"role": "tool", "tool_call_id": "t", "content": "a"},
        {"role": "user", "content": [CHAT_IMAGE]},
        {"role": "tool", "tool_call_id": "t", "content": [{"type": "tool_reference", "name": "g"}]},
        {"role": "user", "content": [CHAT_IMAGE]},
    ]
    assert messages_of(user({"type": "image"})) == []
    linked = {"type": "image", "source": {"type": "url", "url": "http://h/x.png"}}
    (message,) = messages_of(user(linked))
    assert message["content"][0]["image_url"] == {"url": "http://h/x.png"}


def test_a_result_of_the_assistant_is_told_as_text() -> None:
    results = [{"type": "tool_result", "content": [TEXT]}, {"type": "tool_result"}]
    (message,) = messages_of(assistant(*results))
    assert [part["text"] for part in message["content"]] == [
        "Tool result: [{'type': 'text', 'text': 'a'}]",
        "Tool result: ",
    ]


def test_tools_are_functions_with_a_schema_of_an_object() -> None:
    tools = [{"name": "f", "description": "d", "input_schema": {"properties": {}}, "strict": True}]
    chat = messages_as_chat({"messages": [USER], "tools": tools}, MANNERS)
    assert chat["tools"] == [
        {
            "type": "function",
            "function": {
                "name": "f",
                "description": "d",
                "parameters": {"properties": {}, "type": "object"},
                "strict": True,
                "defer_loading": None,
            },
        }
    ]


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, None),
        ({"output_config": {"effort": "max"}}, "max"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, None),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}}, "none"),
    ],
)
def test_how_much_it_should_think_goes_to_the_template(
    fields: dict[str, Any], effort: str | None
) -> None:
    chat = messages_as_chat({"messages": [USER], **fields}, MANNERS)
    assert chat.get("reasoning_effort") == effort


def test_template_keywords_are_passed_on() -> None:
    chat = messages_as_chat({"messages": [USER], "chat_template_kwargs": {"a": 1}}, MANNERS)
    assert chat["chat_template_kwargs"] == {"a": 1}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"messages": [{"role": "system", "content": "x"}]}, "unknown_template"),
        ({"thinking": {"type": "disabled"}}, "unknown_template"),
        ({"tools": []}, "no_tools"),
        ({"messages": [assistant({**USE, "id": None})]}, "call_without_id"),
        ({"system": [{"type": "tool_addition"}]}, "tool_changes"),
    ],
)
def test_what_only_the_engine_can_tell_is_left_to_it(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(PromptUnsupported) as caught:
        messages_as_chat({"messages": [USER], **fields}, None)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": "x"},
        {"messages": ["x"]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [user("x")]},
        {"messages": [user({"type": "video"})]},
        {"messages": [user({"type": "tool_result", "content": [{"type": "text", "text": 3}]})]},
        {"system": 3},
        {"messages": [user({"type": "image", "source": "x"})]},
        {"tools": 3},
        {"tools": [3]},
        {"tools": [{"name": "f"}]},
    ],
)
def test_what_the_engine_refuses_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(PromptRefused):
        messages_as_chat({"messages": [USER], **fields}, MANNERS)


def test_without_the_template_most_is_known_all_the_same() -> None:
    assert messages_of(USER, system="s", manners=None) == [{"role": "system", "content": "s"}, USER]
