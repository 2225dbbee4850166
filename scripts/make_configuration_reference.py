#!/usr/bin/env python3
"""Write docs/configuration-reference.md from the settings themselves: every key with its kind, default,
unit and meaning.

Kinds, limits and defaults are those of the models that `gateway/config/settings.py` puts together; a key's
meaning is the comment behind it in its model, or the comment lines above it. A key without one is an error.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import io
import json
import sys
import textwrap
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from moongate.gateway.config.reloadable import EFFECTS
from moongate.gateway.config.routing_settings import PolicySettings
from moongate.gateway.config.settings import Settings
from moongate.router.cost import CostWeights
from moongate.router.policy import BUILT_IN, KvCost

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration-reference.md"

HEAD = """# Configuration reference

Every key of the configuration file. This page is written by `scripts/make_configuration_reference.py` from the
settings themselves, and a test fails where they differ: change the section's module in `gateway/config/` (`auth`: in
`gateway/auth/`), then run the script.
What belongs together and why is in [configuration.md](configuration.md); `moongate check -c FILE` tells what is wrong
with a file. A default of *none* is what `null` or leaving the key out gives; what that means stands behind "none:".
*Reload* says when a changed value holds while the gateway runs ([operations.md](operations.md#reloading)): `at once`; `as another instance`,
that is checked before it gets work; or only after a `restart`.
"""

UNITS = {
    "s": "s",
    "ms": "ms",
    "bytes": "bytes",
    "tokens": "tokens",
    "blocks": "blocks",
    "requests": "requests",
}
RATES = {"per_s": "1/s", "per_minute": "1/minute"}
QUALIFIERS = ("max", "min")


class NoMeaning(ValueError):
    """A key has no comment that says what it means."""


def main() -> int:
    """Write the page, or (`--check`) compare it. Return 1 if it differs or a key has no meaning."""
    parser = argparse.ArgumentParser(description="Write the reference of the configuration file.")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="where it is")
    parser.add_argument("--check", action="store_true", help="only tell whether it is up to date")
    options = parser.parse_args()
    try:
        wanted = make_page()
    except NoMeaning as error:
        print(error, file=sys.stderr)
        return 1
    if not options.check:
        options.page.write_text(wanted, encoding="utf-8")
        return 0
    there = options.page.read_text(encoding="utf-8") if options.page.exists() else ""
    if there == wanted:
        return 0
    lines = difflib.unified_diff(there.splitlines(), wanted.splitlines(), "page", "settings")
    print("\n".join(lines))
    print(f"run: {sys.executable} scripts/make_configuration_reference.py", file=sys.stderr)
    return 1


def make_page() -> str:
    """Return the page. Raises: NoMeaning."""
    parts = [HEAD]
    for path, model in _sections("", Settings):
        parts.append(f"## `{path}`\n\n{_docstring(model)}\n\n{_table(path, model)}")
    names = " and ".join(f"`{n}`" for n, cls in BUILT_IN.items() if issubclass(cls, KvCost))
    parts.append(
        f"## `policy.options` of {names}\n\nNumbers of 0 and more; the other built-in policies have no "
        "options. What they are for: [policies.md](policies.md).\n\n" + _weights_table()
    )
    return "\n".join(parts)


def _sections(prefix: str, model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Return each section's path and model, those inside others behind them."""
    for name, field in model.model_fields.items():
        nested = _nested(field.annotation)
        if nested is not None:
            is_list = nested is not field.annotation and "list" in str(field.annotation)
            path = f"{prefix}{name}{'[]' if is_list else ''}"
            yield path, nested
            yield from _sections(f"{path}.", nested)


def _nested(annotation: Any) -> type[BaseModel] | None:
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _docstring(model: type[BaseModel]) -> str:
    return " ".join(inspect.cleandoc(model.__doc__ or "").split())


def _table(path: str, model: type[BaseModel]) -> str:
    meanings = read_meanings(model)
    schema = model.model_json_schema()
    rows = ["| key | kind | default | unit | reload | meaning |", "|---|---|---|---|---|---|"]
    for name, field in model.model_fields.items():
        is_section = _nested(field.annotation) is not None
        kind = "section, below" if is_section else _kind(schema["properties"][name])
        if name == "name" and model is PolicySettings:
            kind = ", ".join(f"`{choice}`" for choice in [*BUILT_IN, "module:Class"])
        cells = (f"`{name}`", kind, _default(field.get_default(call_default_factory=True)))
        effect = "" if is_section else EFFECTS[f"{path}.{name}"].value
        rows.append(f"| {' | '.join(cells)} | {_unit(name)} | {effect} | {_cell(meanings[name])} |")
    return "\n".join(rows) + "\n"


def _weights_table() -> str:
    meanings = read_meanings(CostWeights)
    rows = ["| option | default | unit | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(CostWeights):
        cells = (f"`{field.name}`", _default(field.default), _unit(field.name))
        rows.append(f"| {' | '.join(cells)} | {_cell(meanings[field.name])} |")
    return "\n".join(rows) + "\n"


# --- cells ----------------------------------------------------------------------------------------


def _kind(schema: Mapping[str, Any]) -> str:
    """Return what a key takes, by its JSON schema."""
    if "anyOf" in schema:
        kinds = [_kind(one) for one in schema["anyOf"] if one.get("type") != "null"]
        return ", or ".join(kinds)
    if "enum" in schema:
        return ", ".join(f"`{choice}`" for choice in schema["enum"])
    if schema["type"] == "array":
        return f"list of {_kind(schema['items'])}"
    if schema["type"] == "object":
        return "keys and values"
    plain = {"string": "text", "boolean": "true or false", "integer": "whole number"}
    kind: str = schema["type"]
    return plain.get(kind, kind) + _limits(schema)


def _limits(schema: Mapping[str, Any]) -> str:
    least, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    most = schema.get("maximum")
    if above is not None:
        return f" above {above}" + (f", {most} at most" if most is not None else "")
    if least is not None and most is not None:
        return f" from {least} to {most}"
    return f", {least} or more" if least is not None else ""


def _default(value: object) -> str:
    if value is PydanticUndefined:
        return "must be given"
    if value is None:
        return "*none*"
    if isinstance(value, BaseModel):
        return "as below"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return f"`{value}`" if value and isinstance(value, str) else f"`{json.dumps(value)}`"


def _unit(name: str) -> str:
    """Return a key's unit, which stands last in its name but for `max` and `min`."""
    words = [word for word in name.split("_") if word not in QUALIFIERS]
    return RATES.get("_".join(words[-2:])) or ("" if "per" in words else UNITS.get(words[-1], ""))


def _cell(text: str) -> str:
    """Return a comment as a cell: comments above a key are sentences, those behind it are not."""
    is_capital = text[:1].isupper() and not text[1:2].isupper()
    text = text[:1].lower() + text[1:] if is_capital else text
    return (
        text.removesuffix(".")
        .replace("null:", "none:")
        .replace("None:", "none:")
        .replace("|", "\\|")
    )


# --- meanings -------------------------------------------------------------------------------------


def read_meanings(cls: type) -> dict[str, str]:
    """Return each field's comment in the source: behind it, or the lines just above it.

    Raises: NoMeaning naming the fields that have none.
    """
    source = textwrap.dedent(inspect.getsource(cls))
    comments, alone = _comments(source)
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef), body
    meanings: dict[str, str] = {}
    for statement in body.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
        own = [comments[line] for line in lines if line in comments]
        above: list[str] = []
        line = statement.lineno - 1
        while line in alone:
            above.insert(0, comments[line])
            line -= 1
        meanings[statement.target.id] = " ".join([*above, *own])
    silent = [name for name, meaning in meanings.items() if not meaning]
    if silent and cls is not Settings:
        raise NoMeaning(f"{cls.__name__}: no comment says what {', '.join(silent)} means")
    return meanings


def _comments(source: str) -> tuple[dict[int, str], Sequence[int]]:
    """Return the comments by line, and the lines that have nothing else."""
    lines = source.splitlines()
    comments: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string.lstrip("# ").split("  #")[0]
    alone = [number for number in comments if lines[number - 1].lstrip().startswith("#")]
    return comments, alone


if __name__ == "__main__":
    sys.exit(main())
