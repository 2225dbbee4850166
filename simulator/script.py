"""Scripts: rules that say what simulated engines answer, and their files. Pure but for reading one.

A script is a list of rules. The first rule whose conditions hold answers a request: of its answers the
k-th, where k is how many turns the assistant has had in the conversation, and after the last the first
again. So one rule with N answers is a loop of N turns. Whom no rule answers gets what an engine without
a script would say.
"""

import functools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import pydantic
import yaml
from pydantic_core import ErrorDetails

FILE_BYTES_MAX = 10_000_000
"""Larger files are refused: their answers would not fit a context."""

LINES_SUFFIXES = (".jsonl", ".ndjson")
"""Files with one rule, as JSON, in each line. All others are YAML, of which JSON is a part."""

PROBLEMS_MAX = 10
"""Problems of one file that are told."""


_WORDS = {"extra_forbidden": "unknown key", "missing": "is missing"}
"""What is said of problems that the library puts otherwise."""


class ScriptError(ValueError):
    """A script that can't be used; the text says which file, where in it and why."""


class Asked(Protocol):
    """What conditions look at of a request."""

    @property
    def system(self) -> str:
        """All system messages."""

    @property
    def user(self) -> str:
        """The last of the user's messages."""

    @property
    def result(self) -> str:
        """The last result of a tool."""

    @property
    def last_role(self) -> str: ...

    @property
    def turns(self) -> int:
        """How many the assistant has had."""

    @property
    def tool_names(self) -> Sequence[str]:
        """Of all that are offered."""


def _check_pattern(pattern: str) -> str:
    expression = _expression_of(pattern)
    if expression is not None:
        try:
            re.compile(expression)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
    return pattern


Pattern = Annotated[str, pydantic.Field(min_length=1), pydantic.AfterValidator(_check_pattern)]
"""Text that has to occur, or, between slashes, a regular expression that has to be found."""


class _Part(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)


class Call(_Part):
    """One call of a tool."""

    name: str = pydantic.Field(min_length=1)
    arguments: dict[str, pydantic.JsonValue] | None = None
    """None: made from the schema of the tool, as it is offered."""


class Answer(_Part):
    """What is said in one turn."""

    reasoning: str = ""
    text: str = ""
    calls: list[Call] = []
    finish: Literal["stop", "length"] = "stop"
    """`length`: as if the limit of tokens had been reached behind it."""

    @pydantic.model_validator(mode="after")
    def _check_says_something(self) -> "Answer":
        if not self.text and not self.calls:
            raise ValueError("expected text, calls or both")
        return self


class When(_Part):
    """Conditions of a rule; all that are given must hold."""

    system: Pattern | None = None
    user: Pattern | None = None
    result: Pattern | None = None
    last: Literal["user", "tool", "assistant", "system"] | None = None
    turns: int | None = pydantic.Field(default=None, ge=0)
    tools: list[str] = []

    def holds(self, asked: Asked) -> bool:
        texts = ((self.system, asked.system), (self.user, asked.user), (self.result, asked.result))
        return (
            all(pattern is None or _is_in(pattern, text) for pattern, text in texts)
            and self.last in (None, asked.last_role)
            and self.turns in (None, asked.turns)
            and set(self.tools) <= set(asked.tool_names)
        )


class Rule(_Part):
    when: When = When()
    answers: list[Answer] = pydantic.Field(min_length=1)


class Script(pydantic.RootModel[list[Rule]]):
    """The rules in their order."""

    root: Annotated[list[Rule], pydantic.Field(min_length=1)]

    def answers_to(self, asked: Asked) -> Iterator[Answer]:
        """Yield the answers of the rules that hold, the one to be taken first."""
        for rule in self.root:
            if rule.when.holds(asked):
                yield rule.answers[asked.turns % len(rule.answers)]


def load_script(path: Path) -> Script:
    """Read and check a script. Raises: ScriptError."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ScriptError(f"{path}: larger than {FILE_BYTES_MAX:,} bytes")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ScriptError(f"{path}: {reason}") from error
    has_lines = path.suffix in LINES_SUFFIXES
    value, lines = _read_lines(path, text) if has_lines else _read_yaml(path, text)
    try:
        return Script.model_validate(value)
    except pydantic.ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        told = [_tell(path, lines, problem) for problem in problems[:PROBLEMS_MAX]]
        raise ScriptError("\n".join(told)) from error


class _Lines(Protocol):
    """Finds the line of a place in a file, counted from 1."""

    def __call__(self, place: Sequence[int | str]) -> int: ...


def _read_lines(path: Path, text: str) -> tuple[list[Any], _Lines]:
    """Raises: ScriptError."""
    lines = [(n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
    rules = []
    for number, line in lines:
        try:
            rules.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise ScriptError(f"{path}:{number}: not JSON: {error}") from error

    def line_of(place: Sequence[int | str]) -> int:
        first = place[0] if place else 0
        return lines[first][0] if isinstance(first, int) and first < len(lines) else 1

    return rules, line_of


def _read_yaml(path: Path, text: str) -> tuple[Any, _Lines]:
    """Raises: ScriptError."""
    try:
        value = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = 1 if error.problem_mark is None else error.problem_mark.line + 1
        raise ScriptError(f"{path}:{line}: not YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ScriptError(f"{path}: not YAML: {error}") from error

    @functools.cache
    def root() -> yaml.Node | None:
        return yaml.compose(text, Loader=yaml.SafeLoader)

    return value, lambda place: _line_in(root(), place)


def _line_in(node: yaml.Node | None, place: Sequence[int | str]) -> int:
    """Return the line of the innermost part of `place` that is there."""
    line = 1 if node is None else node.start_mark.line + 1
    for step in place:
        if isinstance(node, yaml.SequenceNode) and isinstance(step, int):
            node = node.value[step] if step < len(node.value) else None
        elif isinstance(node, yaml.MappingNode):
            pair = next((pair for pair in node.value if pair[0].value == step), None)
            if pair is None:
                return line
            line, node = pair[0].start_mark.line + 1, pair[1]
            continue
        else:
            return line
        if node is None:
            return line
        line = node.start_mark.line + 1
    return line


def _tell(path: Path, lines: _Lines, problem: ErrorDetails) -> str:
    """Return a problem with its file, line, rule and key."""
    place, text = problem["loc"], problem["msg"].removeprefix("Value error, ")
    text = _WORDS.get(problem["type"], text)
    rule = [f"rule {step + 1}" for step in place[:1] if isinstance(step, int)]
    keys = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place[1:])
    parts = [f"{path}:{lines(place)}", *rule, *([keys.lstrip(".")] if keys else []), text]
    return ": ".join(parts)


# --- patterns -------------------------------------------------------------------------------------


def _expression_of(pattern: str) -> str | None:
    """Return the regular expression of a pattern, None for plain text."""
    is_expression = len(pattern) > 2 and pattern.startswith("/") and pattern.endswith("/")
    return pattern[1:-1] if is_expression else None


def _is_in(pattern: str, text: str) -> bool:
    expression = _expression_of(pattern)
    return pattern in text if expression is None else re.search(expression, text) is not None
