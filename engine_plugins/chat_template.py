"""A model's chat template: compile it as the engine does, and find out how it wants content.

Chat templates are Jinja programs that come with a model; they run in Jinja's immutable sandbox with
the environment that transformers gives them.
Source: transformers 5 `utils/chat_template_utils.py` (environment), vLLM 0.32 `renderers/hf.py`
(content format).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Literal

import jinja2
import jinja2.ext
import jinja2.nodes as ast
import jinja2.parser
import jinja2.sandbox

ContentFormat = Literal["string", "openai"]
"""How a template takes a message's content: as one text, or as a list of parts."""


class TemplateRefused(ValueError):
    """The template itself rejects the conversation (`raise_exception`), or can't take it."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; for rendering it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[ast.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialise without Jinja's HTML escapes, which would change what the model reads."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(form: str) -> str:
    # The engine's local time, as the template's author wrote it; a gateway in another time zone
    # differs around midnight, and then only reuse is misjudged.
    return datetime.now().strftime(form)  # noqa: DTZ005


def _make_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled chat template. Thread-safe: Jinja keeps no state between renderings."""

    def __init__(self, source: str) -> None:
        """Raises: jinja2.TemplateSyntaxError."""
        environment = _make_environment()
        self._compiled = environment.from_string(source)
        self.source = source
        self.content_format: ContentFormat = (
            "openai" if _loops_over_content(environment.parse(source)) else "string"
        )
        self.knows_developer = '"developer"' in source or "'developer'" in source

    def render(self, variables: dict[str, Any]) -> str:
        """Raises: TemplateRefused."""
        try:
            return self._compiled.render(variables)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise TemplateRefused(str(error)) from error


# --- content format -------------------------------------------------------------------------------


def _loops_over_content(root: ast.Template) -> bool:
    """Tell whether the template iterates over the parts of a message's content.

    It does if a loop runs over `message.content` of a loop variable over the messages, over a macro
    parameter to which that is passed, or, outside macros, over a variable called `content`.
    """
    messages = set(_message_variables(root))
    in_macros: set[int] = set()
    for macro in root.find_all(ast.Macro):
        fed = _content_parameters(root, macro, messages)
        for loop in macro.find_all(ast.For):
            in_macros.add(id(loop))
            if isinstance(loop.iter, ast.Name) and loop.iter.name in fed:
                return True
    for loop in root.find_all(ast.For):
        if any(_is_content_of(loop.iter, name) for name in messages):
            return True
        is_called_content = isinstance(loop.iter, ast.Name) and loop.iter.name == "content"
        if is_called_content and id(loop) not in in_macros:
            return True
    return False


def _message_variables(root: ast.Template) -> Iterator[str]:
    """Iterate over the loop variables that run over the messages or an alias of them."""
    aliases = {"messages"}
    while True:
        more = {
            assignment.target.name
            for assignment in root.find_all(ast.Assign)
            if isinstance(assignment.target, ast.Name)
            and any(_is_variable(assignment.node, alias) for alias in aliases)
        }
        if more <= aliases:
            break
        aliases |= more
    for loop in root.find_all(ast.For):
        if isinstance(loop.target, ast.Name) and any(_is_variable(loop.iter, a) for a in aliases):
            yield loop.target.name


def _content_parameters(root: ast.Template, macro: ast.Macro, messages: set[str]) -> set[str]:
    """Return the macro's parameters that some call fills with a message's content."""
    names = [parameter.name for parameter in macro.args]
    fed: set[str] = set()
    for call in root.find_all(ast.Call):
        if not (isinstance(call.node, ast.Name) and call.node.name == macro.name):
            continue
        given = [*zip(names, call.args, strict=False), *((k.key, k.value) for k in call.kwargs)]
        fed |= {
            name
            for name, value in given
            if name in names and any(_is_content_of(value, message) for message in messages)
        }
    return fed


def _is_variable(node: ast.Node, name: str) -> bool:
    node = _strip(node)
    return isinstance(node, ast.Name) and node.ctx == "load" and node.name == name


def _is_content_of(node: ast.Node, message: str) -> bool:
    node = _strip(node)
    if isinstance(node, ast.Getattr):
        return node.attr == "content" and _is_name(node.node, message)
    if isinstance(node, ast.Getitem) and isinstance(node.arg, ast.Const):
        return node.arg.value == "content" and _is_name(node.node, message)
    return False


def _is_name(node: ast.Node, name: str) -> bool:
    return isinstance(node, ast.Name) and node.name == name


def _strip(node: ast.Node) -> ast.Node:
    """Return what filters, tests and slices are applied to."""
    inner: ast.Node | None = None
    if isinstance(node, ast.Filter | ast.Test) or (
        isinstance(node, ast.Getitem) and isinstance(node.arg, ast.Slice)
    ):
        inner = node.node
    return node if inner is None else _strip(inner)
