"""A model by another name: engines see theirs, clients see what they asked for."""

import json
from typing import Any

import pytest

from moongate.gateway.dialects.aliases import Aliases, Renaming
from moongate.gateway.dialects.body import parse_body
from moongate.gateway.dialects.routes import PROXIED, PromptKind

CHAT = PROXIED["/v1/chat/completions"]
ALIASES = Aliases({"gpt": "tiny"})
MESSAGES = '"messages":[{"role":"user","content":"x"}]'


def resolve(raw: str) -> tuple[bytes, Renaming | None]:
    body, renaming = ALIASES.resolve(parse_body(raw.encode(), CHAT), CHAT)
    return body.raw, renaming


def renaming(kind: PromptKind = PromptKind.CHAT) -> Renaming:
    return Renaming("gpt", "tiny", kind)


def test_a_served_name_passes_as_it_came() -> None:
    raw = '{ "model": "tiny", ' + MESSAGES + "}"
    assert resolve(raw) == (raw.encode(), None)


@pytest.mark.parametrize("extra", ["", ',"x":1e400', ',"x":NaN', ',"x":"\\ud800"'])
def test_an_alias_becomes_the_name_that_is_served(extra: str) -> None:
    raw, how = resolve('{"model": "gpt", ' + MESSAGES + extra + "}")
    assert json.loads(raw) | {"x": 0} == {
        **json.loads("{" + MESSAGES + "}"),
        "model": "tiny",
        "x": 0,
    }
    assert extra.encode() in raw
    assert how == renaming()


@pytest.mark.parametrize(
    ("kind", "event", "renamed"),
    [
        (
            PromptKind.CHAT,
            '{"id":1,"model":"tiny","choices":[]}',
            '{"id":1,"model":"gpt","choices":[]}',
        ),
        (PromptKind.CHAT, '{"choices":[{"delta":{"content":"\\"model\\":\\"tiny\\""}}]}', None),
        (PromptKind.CHAT, '{"model":"other"}', None),
        (PromptKind.CHAT, '{"model":"tiny"', None),
        (PromptKind.CHAT, "[DONE]", None),
        (
            PromptKind.RESPONSES,
            '{"type":"response.created","response":{"model":"tiny","tools":[{"model":"tiny"}]}}',
            '{"type":"response.created","response":{"model":"gpt","tools":[{"model":"tiny"}]}}',
        ),
        (PromptKind.RESPONSES, '{"item":{"model":"tiny"}}', None),
        (
            PromptKind.MESSAGES,
            '{"type":"message_start","message":{"content":[],"model":"tiny"}}',
            '{"type":"message_start","message":{"content":[],"model":"gpt"}}',
        ),
    ],
)
@pytest.mark.parametrize("form", ["data: {}\n\n", "event: x\ndata:{}\r\n\r\n"])
def test_an_event_names_what_was_asked_for(
    kind: PromptKind, event: str, renamed: str | None, form: str
) -> None:
    given, expected = (form.replace("{}", text) for text in (event, renamed or event))
    other = b": ping\n\n"
    whole = renaming(kind).take_events(other + given.encode() + other)
    assert whole == other + expected.encode() + other


@pytest.mark.parametrize(
    ("answer", "renamed"),
    [
        ({"id": 1, "model": "tiny", "usage": {"model": "tiny"}}, "gpt"),
        ({"model": "other"}, "other"),
        ({"model": None}, None),
    ],
)
def test_a_whole_answer_names_what_was_asked_for(answer: dict[str, Any], renamed: object) -> None:
    changed = renaming(PromptKind.MESSAGES).take_whole(json.dumps(answer).encode())
    assert json.loads(changed) == {**answer, "model": renamed}


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b'{"error":1}'])
def test_what_names_no_model_stays_as_it_is(text: bytes) -> None:
    assert renaming().take_whole(text) == text
    assert renaming().take_events(text) == text
