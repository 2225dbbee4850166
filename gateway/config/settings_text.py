"""From the configuration file's text to the settings, and errors that name file, line and key.

One YAML file, checked as a whole: unknown keys are errors, and nothing takes effect unless all of it
is right. `${NAME}` and `${NAME:-default}` in strings are replaced from the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from moongate.gateway.config.setting_kinds import nearest
from moongate.gateway.config.settings import Settings

Path_ = tuple[str | int, ...]

NESTING_MAX = 32
"""Deeper than any key; an alias that contains itself has no bottom."""


class SettingsError(ValueError):
    """The configuration can't be used. `problems` has a line of text for each thing wrong."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def load_settings(file: Path, environment: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings of a configuration file.

    Raises: SettingsError, with one line for each problem: file, line, key, reason.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError([f"{file}: can't be read: {error}"]) from error
    return parse_settings(text, str(file), environment)


def parse_settings(text: str, file: str, environment: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings in a YAML text; `file` is the name that errors give it.

    Raises: SettingsError.
    """
    document = _Document.parse(text, file, environment)
    try:
        return Settings.model_validate(document.value)
    except ValidationError as error:
        raise SettingsError([document.describe(detail) for detail in error.errors()]) from error


def point_out(text: str, file: str, path: Path_, message: str) -> str:
    """Return one line about a key of a YAML text that can be read: file, line, key, message."""
    document = _Document.parse(text, file, os.environ)
    return document._line(path, message)  # noqa: SLF001 - of this module


class _Document:
    """A YAML document with the line of each key."""

    def __init__(self, file: str, value: dict[str, Any], lines: dict[Path_, int]) -> None:
        self.file = file
        self.value = value
        self._lines = lines

    @classmethod
    def parse(cls, text: str, file: str, environment: Mapping[str, str]) -> _Document:
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = mark.line + 1 if mark is not None else 1
            hint = " (YAML wants spaces, not tabs)" if "\\t" in str(error.problem) else ""
            raise SettingsError([f"{file}:{line}: not YAML: {error.problem}{hint}"]) from error
        except yaml.YAMLError as error:
            raise SettingsError([f"{file}: not YAML: {' '.join(str(error).split())}"]) from error
        if not isinstance(root, yaml.MappingNode):
            raise SettingsError([f"{file}:1: expected keys and values, such as instances: [...]"])
        reader = _NodeReader(file, environment)
        value = reader.read(root, ())
        if reader.problems:
            raise SettingsError(reader.problems)
        return cls(file, value, reader.lines)

    def describe(self, detail: ErrorDetails) -> str:
        """Return one line: file, line, key, what is wrong, what would be right."""
        # Pydantic names the branch of a union in the path, which is no key of the file.
        names_key = detail["type"] in ("extra_forbidden", "missing")
        path = tuple(
            part
            for part in detail["loc"]
            if self._is_key(part) or (names_key and part == detail["loc"][-1])
        )
        if detail["type"] == "extra_forbidden":
            known = _fields_at(path[:-1])
            if path[-1] in known:
                return self._line(path, "expected keys and values, such as {kind: none}")
            return self._line(path, f"unknown key{nearest(str(path[-1]), known)}")
        if detail["type"] == "missing":
            return self._line(path, "missing; it must be given")
        if detail["type"] == "model_type":
            names = ", ".join(_fields_at(path))
            return self._line(path, f"expected keys and values; known here: {names}")
        message = detail["msg"].removeprefix("Value error, ")
        given = detail["input"]
        if isinstance(given, str | int | float | bool):
            message += f"; got {given!r}"
            choices = _choices(detail)
            if choices:
                message += nearest(str(given), choices, known=False)
        return self._line(path, message)

    def _is_key(self, part: str | int) -> bool:
        return isinstance(part, int) or any(part in path for path in self._lines)

    def _line(self, path: Path_, message: str) -> str:
        line = next(
            (
                self._lines[path[:end]]
                for end in range(len(path), 0, -1)
                if path[:end] in self._lines
            ),
            1,
        )
        key = ".".join(f"{part}" for part in path).replace(".[", "[")
        return f"{self.file}:{line}: {key}: {message}" if key else f"{self.file}:{line}: {message}"


class _NodeReader:
    """Builds plain values from YAML nodes: lines noted, duplicates refused, variables expanded."""

    def __init__(self, file: str, environment: Mapping[str, str]) -> None:
        self._file = file
        self._environment = environment
        self._scalars = yaml.SafeLoader("")
        self.lines: dict[Path_, int] = {}
        self.problems: list[str] = []

    def read(self, node: yaml.Node, path: Path_) -> Any:
        self.lines.setdefault(path, node.start_mark.line + 1)
        if len(path) > NESTING_MAX:
            self._note(node, path, "nested too deeply")
            return None
        if isinstance(node, yaml.MappingNode):
            return self._read_mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode), node
        try:
            value = self._scalars.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:  # a tag of its own, the 99th of a month
            reason = error.problem if isinstance(error, yaml.MarkedYAMLError) else error
            self._note(node, path, f"can't be read: {reason}")
            return None
        return self._expand(value, node, path) if isinstance(value, str) else value

    def _read_mapping(self, node: yaml.MappingNode, path: Path_) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            line = key_node.start_mark.line + 1
            if key in result:
                self._note(key_node, (*path, key), "given twice")
            self.lines[(*path, key)] = line
            result[key] = self.read(value_node, (*path, key))
        return result

    def _note(self, node: yaml.Node, path: Path_, problem: str) -> None:
        where = ".".join(str(part) for part in path[:NESTING_MAX])
        self.problems.append(f"{self._file}:{node.start_mark.line + 1}: {where}: {problem}")

    def _expand(self, text: str, node: yaml.ScalarNode, path: Path_) -> Any:
        def replace(match: re.Match[str]) -> str:
            name, default = match["name"], match["default"]
            value = self._environment.get(name)
            if value:
                return value
            if default is None and value is None:
                hint = f"(give a default with ${{{name}:-value}})"
                self._note(node, path, f"the variable {name} is not set {hint}")
            return default or ""

        if "${" in _VARIABLE.sub("", text):
            self._note(node, path, "${ begins a variable: expected ${NAME} or ${NAME:-default}")
            return text
        expanded = _VARIABLE.sub(replace, text)
        if expanded == text:
            return text
        # The value keeps the type that it would have had if it stood in the file itself.
        try:
            resolved = yaml.safe_load(expanded) if node.style is None else expanded
        except (yaml.YAMLError, ValueError):
            return expanded  # a text that only looks like the beginning of something else
        return resolved if isinstance(resolved, str | int | float | bool) else expanded


_VARIABLE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")


def _fields_at(path: Path_) -> list[str]:
    """Return the keys that are known at a place of the file."""
    model: type[BaseModel] = Settings
    for part in path:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        inner = [annotation, *get_args(annotation)]
        nested = [a for a in inner if isinstance(a, type) and issubclass(a, BaseModel)]
        if not nested:
            return []
        model = nested[0]
    return list(model.model_fields)


def _choices(detail: ErrorDetails) -> list[str]:
    expected = detail.get("ctx", {}).get("expected")
    return re.findall(r"'([^']+)'", expected) if isinstance(expected, str) else []
