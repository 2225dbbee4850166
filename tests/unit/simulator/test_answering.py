"""What a request asks for, and which answer it gets."""

from __future__ import annotations

from typing import Any

import pytest

from moongate.simulator.answering import find_answer, read_question
from moongate.simulator.openai_wire import ApiError
from moongate.simulator.script import Answer, Script

SCHEMA = {"type": "object", "properties": {"n": {"minimum": 2}}, "required": ["n"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")
]
NAMED = {"type": "function", "function": {"name": "g"}}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def chat(*roles: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": role, "content": f"{role} {n}"} for n, role in enumerate(roles or "u")]
    return {"messages": messages, **fields}


def script(*answers: dict[str, Any]) -> Script:
    return Script.model_validate([{"answers": [answer]} for answer in answers])


def answered(chat: dict[str, Any], script: Script | None = None) -> Answer | None:
    return find_answer(script, read_question(chat))


def calls(answer: Answer | None) -> list[tuple[str, Any]]:
    assert answer is not None
    return [(call.name, call.arguments) for call in answer.calls]


def test_a_question_has_the_last_text_of_each_kind() -> None:
    question = read_question(
        chat("developer", "user", "assistant", "tool", "system", "user", "assistant", "assistant")
    )
    assert question.system == "developer 0\nsystem 4"
    assert (question.user, question.result) == ("user 5", "tool 3")
    assert (question.last_role, question.turns) == ("assistant", 2)


def test_parts_of_a_message_are_one_text() -> None:
    content = [{"type": "input_text", "text": "a"}, "b", {"type": "image_url"}]
    assert read_question({"messages": [{"role": "user", "content": content}]}).user == "a\nb"


def test_whom_nothing_is_demanded_of_anything_is_said() -> None:
    assert answered(chat(tools=TOOLS)) is None


def test_a_named_tool_is_called_with_arguments_after_its_schema() -> None:
    assert calls(answered(chat(tools=TOOLS, tool_choice=NAMED))) == [("g", {"n": 2})]


def test_if_a_tool_is_required_it_is_the_first() -> None:
    assert calls(answered(chat(tools=TOOLS, tool_choice="required"))) == [("f", {"n": 2})]


def test_json_is_made_after_its_schema() -> None:
    answer = answered(chat(response_format=FORM))
    assert answer is not None
    assert answer.text == '{"n": 2}'
    anything = answered(chat(response_format={"type": "json_object"}))
    assert anything is not None
    assert anything.text == "{}"


def test_a_script_counts_more_as_long_as_it_says_what_is_allowed() -> None:
    text, call_f, call_g = {"text": "x"}, {"calls": [{"name": "f"}]}, {"calls": [{"name": "g"}]}
    rules = script(text, call_f, call_g)
    both = {"tools": TOOLS, "tool_choice": NAMED}
    assert calls(answered(chat(**both), rules)) == [("g", {"n": 2})]
    assert calls(answered(chat(tools=TOOLS, tool_choice="required"), rules)) == [("f", {"n": 2})]
    only_calls = script(call_f)
    assert answered(chat(tools=TOOLS, tool_choice="none"), only_calls) is None
    assert answered(chat(), only_calls) is None
    assert calls(answered(chat(tools=TOOLS), only_calls)) == [("f", {"n": 2})]


def test_text_that_is_no_json_is_passed_over_where_json_is_wanted() -> None:
    said = answered(chat(response_format=FORM), script({"text": "x"}, {"text": '{"n": 3}'}))
    assert said is not None
    assert said.text == '{"n": 3}'


def test_without_parallel_calls_only_the_first_is_made() -> None:
    rules = script({"calls": [{"name": "f", "arguments": {}}, {"name": "g"}]})
    told = answered(chat(tools=TOOLS, parallel_tool_calls=False), rules)
    assert calls(told) == [("f", {})]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": "required"}, "`tools` must be set"),
        ({"tool_choice": "always", "tools": TOOLS}, "Invalid value for `tool_choice`: 'always'"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "h"}}, "tools": TOOLS},
            "does not match any of the specified",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "'not' is unknown here",
        ),
    ],
)
def test_what_nobody_could_answer_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message):
        answered(chat(**fields))
