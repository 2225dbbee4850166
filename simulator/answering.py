"""What a request asks for, and which answer it gets: a script's, or what its constraints leave. Pure.

A request that must call a tool (`tool_choice`: a name, or `required`) is answered with a call whose
arguments satisfy the tool's schema, and one that wants JSON (`response_format`) with such JSON, as by an
engine with guided decoding. A script counts more, where its answer is one that the request allows.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moongate.simulator.openai_wire import ApiError
from moongate.simulator.schema_sample import SchemaUnsupported, sample
from moongate.simulator.script import Answer, Call, Script

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Question:
    """A chat as scripts and constraints see it."""

    system: str
    user: str
    result: str
    last_role: str
    turns: int
    tools: Mapping[str, Any]
    """What can be called, each with the schema of its arguments."""
    has_choice: bool
    """Whether the model may call a tool or not, as it likes."""
    forced: tuple[str, ...]
    """Tools of which it must call some; empty: of none."""
    schema: Any
    """What its text must satisfy; None: nothing."""
    has_one_call: bool
    """At most one call."""

    @property
    def tool_names(self) -> Sequence[str]:
        return tuple(self.tools)


def read_question(chat: Mapping[str, Any]) -> Question:
    """Return what a chat request asks for; what can't be read of it says nothing. Raises: ApiError."""
    messages = [message for message in chat["messages"] if isinstance(message, dict)]
    told_roles = [str(message.get("role")) for message in messages]
    roles = ["system" if role == "developer" else role for role in told_roles]
    texts: dict[str, list[str]] = {}
    for role, message in zip(roles, messages, strict=True):
        texts.setdefault(role, []).append(_text_of(message.get("content")))
    turns = [n for n, role in enumerate(roles) if role == "assistant"]
    tools = _tools_of(chat)
    forced = _forced_tools(chat.get("tool_choice"), tools)
    return Question(
        system="\n".join(texts.get("system", ())),
        user=texts.get("user", [""])[-1],
        result=texts.get("tool", [""])[-1],
        last_role=roles[-1] if roles else "",
        # Several messages in a row are one turn: some clients send text and calls apart.
        turns=sum(n == 0 or roles[n - 1] != "assistant" for n in turns),
        tools=tools,
        has_choice=bool(tools) and not forced and chat.get("tool_choice") != "none",
        forced=forced,
        schema=_schema_of(chat.get("response_format")),
        has_one_call=chat.get("parallel_tool_calls") is False,
    )


def find_answer(script: Script | None, question: Question) -> Answer | None:
    """Return what is to be said. None: nothing in particular. Raises: ApiError."""
    for answer in () if script is None else script.answers_to(question):
        if _is_allowed(answer, question):
            return _completed(answer, question)
    if question.forced:
        return _completed(Answer(calls=[Call(name=question.forced[0])]), question)
    if question.schema is not None:
        return Answer(text=json.dumps(_sample(question.schema), ensure_ascii=False))
    return None


def _is_allowed(answer: Answer, question: Question) -> bool:
    """Tell whether an engine that keeps to what the request demands could say this."""
    names = {call.name for call in answer.calls}
    if question.forced:
        return bool(names) and names <= set(question.forced)
    if names:
        return question.has_choice
    return question.schema is None or _is_json(answer.text)


def _completed(answer: Answer, question: Question) -> Answer:
    """Return an answer with all its arguments, and with no more calls than the request wants."""
    calls = answer.calls[:1] if question.has_one_call else answer.calls
    made = [
        call
        if call.arguments is not None
        else Call(name=call.name, arguments=_arguments(call.name, question))
        for call in calls
    ]
    return answer.model_copy(update={"calls": made})


def _arguments(name: str, question: Question) -> dict[str, Any]:
    arguments = _sample(question.tools.get(name) or ANY_OBJECT)
    return arguments if isinstance(arguments, dict) else {}


def _sample(schema: Any) -> Any:
    try:
        return sample(schema)
    except SchemaUnsupported as error:
        raise ApiError(f"A simulated engine can't answer by this JSON schema: {error}") from error


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


# --- reading --------------------------------------------------------------------------------------


def _text_of(content: object) -> str:
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        return "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


def _tools_of(chat: Mapping[str, Any]) -> dict[str, Any]:
    tools = chat.get("tools")
    functions = [
        tool.get("function")
        for tool in (tools if isinstance(tools, list) else ())
        if isinstance(tool, dict)
    ]
    return {
        str(one.get("name")): one.get("parameters") for one in functions if isinstance(one, dict)
    }


def _forced_tools(choice: object, tools: Mapping[str, Any]) -> tuple[str, ...]:
    """Raises: ApiError."""
    if choice in (None, "auto", "none"):
        return ()
    if not tools:
        raise _misused("When using `tool_choice`, `tools` must be set.")
    if choice == "required":
        return tuple(tools)
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise _misused(
            f'Invalid value for `tool_choice`: {choice!r:.200}! Only named tools, "none", "auto" or '
            '"required" are supported.'
        )
    if name not in tools:
        raise _misused(
            "The tool specified in `tool_choice` does not match any of the specified `tools`"
        )
    return (name,)


def _misused(problem: str) -> ApiError:
    return ApiError(f"{problem} (parameter=tool_choice)", param="tool_choice")


def _schema_of(form: object) -> Any:
    """Return the schema that a `response_format` names, if it does."""
    if not isinstance(form, dict):
        return None
    if form.get("type") == "json_object":
        return ANY_OBJECT
    named = form.get("json_schema")
    return named.get("schema") if isinstance(named, dict) else None
