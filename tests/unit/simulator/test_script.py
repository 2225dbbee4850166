"""Scripts: which rule answers, which of its answers, and what is said of a bad file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moongate.simulator.answering import Question
from moongate.simulator.script import Script, ScriptError, load_script


def asked(**fields: Any) -> Question:
    given: dict[str, Any] = {
        "system": "", "user": "", "result": "", "last_role": "user", "turns": 0, "tools": {},
        "has_choice": True, "forced": (), "schema": None, "has_one_call": False, **fields,
    }  # fmt: skip
    return Question(**given)


def texts(script: Script, question: Question) -> list[str]:
    return [answer.text for answer in script.answers_to(question)]


def script_of(*rules: Any) -> Script:
    return Script.model_validate(list(rules))


def rule(text: str, **when: Any) -> dict[str, Any]:
    return {"when": when, "answers": [{"text": text}]}


def test_the_first_rule_that_holds_comes_first() -> None:
    script = script_of(rule("a", user="x"), rule("b", user="y"), rule("c"))
    assert texts(script, asked(user="y")) == ["b", "c"]


def test_answers_follow_the_turns_and_begin_again() -> None:
    script = script_of({"answers": [{"text": "a"}, {"text": "b"}]})
    assert [texts(script, asked(turns=turn)) for turn in range(3)] == [["a"], ["b"], ["a"]]


@pytest.mark.parametrize(
    ("when", "question"),
    [
        ({"system": "helper"}, asked(system="the helper")),
        ({"user": "/^f.x$/"}, asked(user="fox")),
        ({"result": "2 files"}, asked(result="2 files found")),
        ({"last": "tool"}, asked(last_role="tool")),
        ({"turns": 3}, asked(turns=3)),
        ({"tools": ["a"]}, asked(tools={"a": None, "b": None})),
    ],
)
def test_a_condition_holds_or_not(when: dict[str, Any], question: Question) -> None:
    script = script_of(rule("x", **when))
    assert texts(script, question) == ["x"]
    assert texts(script, asked(system="f.x", user="f.xx", result="2", turns=1)) == []


def test_all_conditions_must_hold() -> None:
    script = script_of(rule("x", user="a", turns=1))
    assert texts(script, asked(user="a")) == []


def test_a_pattern_of_one_slash_is_text() -> None:
    assert texts(script_of(rule("x", user="/")), asked(user="a/b")) == ["x"]


# --- files ----------------------------------------------------------------------------------------


def problem(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ScriptError) as caught:
        load_script(path)
    return str(caught.value).replace(str(path), "FILE")


def test_json_lines_have_a_rule_each(tmp_path: Path) -> None:
    path = tmp_path / "script.jsonl"
    path.write_text('{"answers": [{"text": "a"}]}\n\n{"answers": [{"text": "\\ud83d\\ude00"}]}\n')
    assert texts(load_script(path), asked()) == ["a", "😀"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("- answers: [\n", "FILE:2: not YAML: "),
        ("", "FILE:1: Input should be a valid list"),
        ("[]", "FILE:1: List should have at least 1 item after validation, not 0"),
        ("- when: {}\n", "FILE:1: rule 1: answers: is missing"),
        (
            "- answers:\n  - text: a\n- answers:\n  - text: b\n    calls:\n      - nmae: x\n",
            "FILE:6: rule 2: answers[0].calls[0].name: is missing",
        ),
        (
            "- answers:\n  - {}\n",
            "FILE:2: rule 1: answers[0]: expected text, calls or both",
        ),
        (
            "- when:\n    user: /(/\n  answers: [{text: a}]\n",
            "FILE:2: rule 1: when.user: not a regular expression: missing ), ",
        ),
        (
            "- answers: [{text: 3}]\n",
            "FILE:1: rule 1: answers[0].text: Input should be a valid string",
        ),
        (
            "- when:\n    turns: -1\n  answers: [{text: a}]\n",
            "FILE:2: rule 1: when.turns: Input should be greater than or equal to 0",
        ),
    ],
)
def test_a_bad_file_is_told_with_line_rule_and_key(tmp_path: Path, text: str, told: str) -> None:
    assert problem(tmp_path / "s.yaml", text).startswith(told)


def test_all_problems_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    told = problem(
        tmp_path / "s.yaml", "- answers: [{txt: a}]\n- whne: {}\n  answers: [{text: a}]\n"
    )
    assert told.splitlines() == [
        "FILE:1: rule 1: answers[0].txt: unknown key",
        "FILE:2: rule 2: whne: unknown key",
    ]


def test_an_argument_that_json_has_not_is_refused(tmp_path: Path) -> None:
    text = "- answers:\n  - calls:\n    - name: f\n      arguments:\n        day: 2026-01-01\n"
    assert "s:5: rule 1: answers[0].calls[0].arguments.day" in problem(
        tmp_path / "s", text
    ).replace("FILE", "s")


def test_a_bad_line_of_json_is_told_by_its_number(tmp_path: Path) -> None:
    good = '{"answers": [{"text": "a"}]}'
    told = problem(tmp_path / "s.jsonl", f"{good}\n\n{{")
    assert told.startswith("FILE:3: not JSON: ")
    told = problem(tmp_path / "s.jsonl", f'{good}\n\n{{"answers": []}}')
    assert told.startswith("FILE:3: rule 2: answers: List should have at least 1 item")


def test_a_file_that_is_not_there_or_not_text_is_told(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match="No such file"):
        load_script(tmp_path / "none.yaml")
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(ScriptError, match="not UTF-8"):
        load_script(tmp_path / "bytes")
