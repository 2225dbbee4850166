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


_TEMPLATE_ERRORS = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError),
    *(ArithmeticError, RecursionError),
)
"""What a template, being a program, may come to. The engine answers 400 to all of it."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; for rendering it is but a scope."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> ast.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return ast.Scope(body, lineno=line)


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
        self.content_format = _find_content_format(environment.parse(source))
        self.knows_developer = '"developer"' in source or "'developer'" in source

    @property
    def wants_system_first(self) -> bool:
        """Tell whether the engine takes the template to allow no system message but the first.

        It tries in an environment without what transformers adds, so that some templates fail there
        for other reasons. Source: vLLM 0.32 `entrypoints/anthropic/serving.py`.
        """
        bare = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        messages = [{"role": role, "content": "t"} for role in ("system", "user") * 2]
        try:
            bare.from_string(self.source).render(messages=messages, add_generation_prompt=False)
        except jinja2.TemplateError:
            return True
        except _TEMPLATE_ERRORS:
            return False  # the engine does not even start
        return False

    def render(self, variables: dict[str, Any]) -> str:
        """Raises: TemplateRefused."""
        try:
            return self._compiled.render(variables)
        except _TEMPLATE_ERRORS as error:
            raise TemplateRefused(str(error)) from error


# --- content format -------------------------------------------------------------------------------


class _Untraceable(Exception):
    """What is followed goes into anything but a plain variable; the engine gives up there too."""


def _find_content_format(root: ast.Template) -> ContentFormat:
    try:
        loop = next(_content_loops(root), None)
        return "string" if loop is None or not _name_of(loop.target) else "openai"
    except _Untraceable:
        return "string"


def _content_loops(root: ast.Template) -> Iterator[ast.For]:
    """Iterate over the loops that run over the parts of a message's content.

    Such a loop runs over `message.content` of a loop variable over the messages, over a macro
    parameter to which that is passed, or, outside macros, over a variable called `content`.
    Raises: _Untraceable.
    """
    messages = set(_message_variables(root))
    in_macros: dict[int, set[str]] = {}
    for macro in root.find_all(ast.Macro):
        fed = _content_parameters(root, macro, messages)
        for loop in macro.find_all(ast.For):
            in_macros[id(loop)] = fed or in_macros.get(id(loop), set())
    for loop in root.find_all(ast.For):
        names = in_macros.get(id(loop), {"content"})
        is_of_message = any(_is_content_of(loop.iter, message) for message in messages)
        if is_of_message or (isinstance(loop.iter, ast.Name) and loop.iter.name in names):
            yield loop


def _message_variables(root: ast.Template) -> Iterator[str]:
    """Iterate over the loop variables that run over the messages or an alias of them."""
    aliases = {"messages"}
    while True:
        more = {
            _name_of(assignment.target)
            for assignment in root.find_all(ast.Assign)
            if any(_is_variable(assignment.node, alias) for alias in aliases)
        }
        if more <= aliases:
            break
        aliases |= more
    for loop in root.find_all(ast.For):
        if any(_is_variable(loop.iter, alias) for alias in aliases):
            yield _name_of(loop.target)


def _name_of(target: ast.Node) -> str:
    if not isinstance(target, ast.Name):
        raise _Untraceable
    return target.name


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
