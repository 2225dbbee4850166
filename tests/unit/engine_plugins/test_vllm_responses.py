"""What becomes of a Responses request; that engines see it alike is in the e2e tests."""

from typing import Any

import pytest

from moongate.engine_plugins.vllm_render import PromptRefused, PromptUnsupported
from moongate.engine_plugins.vllm_responses import responses_as_chat

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
CHAT_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
REASONING = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
ANSWER = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}


def messages_of(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = responses_as_chat({"input": [*items], **fields})["messages"]
    return messages


def test_a_text_is_what_the_user_says() -> None:
    assert responses_as_chat({"input": "hi"}) == {
        "messages": [USER],
        "add_generation_prompt": True,
        "continue_final_message": False,
        "add_special_tokens": True,
    }


def test_instructions_come_first() -> None:
    assert messages_of(USER, instructions="be") == [{"role": "system", "content": "be"}, USER]
    assert messages_of(USER, instructions="") == [USER]
    assert messages_of(USER, instructions=None) == [USER]


def test_what_belongs_to_one_turn_becomes_one_message() -> None:
    turn = {"role": "assistant", "reasoning": "hm", "content": "a", "tool_calls": [CHAT_CALL] * 2}
    assert messages_of(USER, REASONING, ANSWER, CALL, CALL) == [USER, turn]
    assert messages_of(ANSWER, REASONING) == [
        {"role": "assistant", "content": "a", "reasoning": "hm"}
    ]
    assert messages_of(CALL, ANSWER) == [
        {"role": "assistant", "tool_calls": [CHAT_CALL], "content": "a"}
    ]


def test_a_second_of_its_kind_begins_another_message() -> None:
    answer = {"role": "assistant", "content": "a"}
    assert messages_of(ANSWER, ANSWER) == [answer, answer]
    reasoning = {"role": "assistant", "reasoning": "hm"}
    assert messages_of(REASONING, REASONING) == [reasoning, reasoning]
    assert messages_of(USER, CALL) == [USER, {"role": "assistant", "tool_calls": [CHAT_CALL]}]


def test_the_callers_items_stay_as_they_are() -> None:
    item = {"role": "assistant", "content": []}
    messages_of(item, CALL)
    assert item == {"role": "assistant", "content": []}


@pytest.mark.parametrize("kind", ["function_call_output", "custom_tool_call_output"])
def test_outputs_are_results_of_tools(kind: str) -> None:
    item = {"type": kind, "call_id": "c", "output": "done"}
    assert messages_of(item) == [{"role": "tool", "content": "done", "tool_call_id": "c"}]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"content": [{"text": "a"}, {"text": "b"}], "summary": [{"text": "s"}]}, "a"),
        ({"summary": [{"text": "s"}]}, "s"),
        ({"summary": [], "content": None}, ""),
    ],
)
def test_reasoning_is_its_first_text(fields: dict[str, Any], text: str) -> None:
    assert messages_of({"type": "reasoning", **fields}) == [
        {"role": "assistant", "reasoning": text}
    ]


@pytest.mark.parametrize(
    ("last", "continues"),
    [
        ({**ANSWER, "status": "incomplete"}, True),
        ({**ANSWER, "status": "in_progress"}, True),
        ({**ANSWER, "status": "completed"}, False),
        ({**USER, "status": "incomplete"}, True),
        ({**CALL, "status": "in_progress"}, False),
        (USER, False),
    ],
)
def test_an_unfinished_item_is_continued(last: dict[str, Any], continues: bool) -> None:
    chat = responses_as_chat({"input": [last]})
    assert chat["continue_final_message"] is continues
    assert chat["add_generation_prompt"] is not continues


def test_functions_are_shown_and_the_engines_own_tools_are_not() -> None:
    inner = {"type": "function", "name": "g", "parameters": {}}
    tools = [
        {"type": "function", "name": "f", "strict": True},
        {"type": "web_search_preview"},
        {"type": "namespace", "name": "n", "tools": [inner, {"type": "custom", "name": "h"}]},
        {"type": "namespace", "name": "m"},
    ]
    assert responses_as_chat({"input": "x", "tools": tools})["tools"] == [
        {"type": "function", "function": {"name": "f", "strict": True}},
        {"type": "function", "function": {"name": "n__g", "parameters": {}}},
    ]
    assert messages_of({**CALL, "namespace": "n"})[0]["tool_calls"][0]["function"]["name"] == "n__f"
    assert "tools" not in responses_as_chat({"input": "x", "tools": []})


def test_what_else_shapes_the_prompt_is_passed_on() -> None:
    fields = {
        "reasoning": {"effort": "low"},
        "chat_template_kwargs": {"a": 1},
        "truncation": "auto",
    }
    chat = responses_as_chat({"input": "x", **fields})
    assert chat["reasoning_effort"] == "low"
    assert chat["chat_template_kwargs"] == {"a": 1}
    assert chat["truncate_prompt_tokens"] == -1
    assert "truncate_prompt_tokens" not in responses_as_chat(
        {"input": "x", "truncation": "disabled"}
    )


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response"),
        ({"previous_input_messages": []}, "previous_messages"),
        ({"tools": [{"type": "custom", "name": "f"}]}, "custom_tool"),
        ({"tools": [{"type": "web_search_preview"}]}, "tools_of_the_engine"),
        ({"input": [{"type": "custom_tool_call", "name": "f"}]}, "custom_tool"),
    ],
)
def test_what_only_the_engine_can_tell_is_left_to_it(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(PromptUnsupported) as caught:
        responses_as_chat({"input": "x", **fields})
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "fields",
    [
        {"input": None},
        {"input": 3},
        {"input": ["x"]},
        {"input": [{"type": "item_reference", "id": "m"}]},
        {"input": [{}]},
        {"input": [{**CALL, "arguments": None}]},
        {"input": [{**CALL, "call_id": None}]},
        {"input": [{"type": "reasoning", "encrypted_content": "x"}]},
        {"input": [{"type": "reasoning", "content": [{}]}]},
        {"input": [{"type": "reasoning", "content": ["x"]}]},
        {"instructions": 3},
        {"tools": "x"},
        {"tools": [{"type": "namespace", "name": "x", "tools": 5}]},
        {"input": [{"role": "assistant", "tool_calls": 5}, CALL]},
        {"tools": [3]},
    ],
)
def test_what_the_engine_refuses_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(PromptRefused):
        responses_as_chat({"input": "x", **fields})


def test_an_answer_without_a_text_is_left_as_it_is() -> None:
    """The engine may refuse it, or the template."""
    item = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    assert messages_of(item, {"role": "assistant"}) == [item, {"role": "assistant"}]
