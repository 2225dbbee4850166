"""Usage asked for on a client's behalf, and kept from it again."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moongate.gateway.dialects.stream_usage import (
    asks_for_usage,
    with_usage_asked,
    without_usage_events,
)


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


USAGE = {"prompt_tokens": 3, "completion_tokens": 1}
TEXT = event(choices=[{"index": 0, "delta": {"content": "a"}}])
USAGE_ONLY = event(id="c", choices=[], usage=USAGE)
DONE = b"data: [DONE]\n\n"

# --- asking ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "asks"),
    [
        ({"include_usage": True}, True),
        ({"include_usage": True, "x": 1}, True),
        ({"include_usage": False}, False),
        ({"include_usage": 1}, True),  # as the engine takes it
        ({"include_usage": "true"}, True),
        ({"include_usage": None}, False),
        ({}, False),
        (None, False),
        ([], False),
        ("include_usage", False),
    ],
)
def test_a_client_asks_by_its_options(options: object, asks: bool) -> None:
    assert asks_for_usage({"stream_options": options}) is asks


def test_a_client_without_options_does_not_ask() -> None:
    assert not asks_for_usage({"stream": True})


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'{"a":1}', b'{"a":1,"stream_options":{"include_usage":true}}'),
        (
            b'{"stream_options":{"include_usage":false}, "a":1.0}',
            b'{ "a":1.0,"stream_options":{"include_usage":true}}',
        ),
        (
            b'{"a":1,"stream_options":{"x":[1],"include_usage":null}}',
            b'{"a":1,"stream_options":{"x":[1],"include_usage":true}}',
        ),
        (b'{"a":1,"stream_options":null}', b'{"a":1,"stream_options":{"include_usage":true}}'),
        (
            b'{"a":1,"stream\\u005foptions":{"x":1}}',
            b'{"a":1,"stream_options":{"x":1,"include_usage":true}}',
        ),
    ],
)
def test_usage_is_asked_for_and_all_else_stays(raw: bytes, expected: bytes) -> None:
    assert with_usage_asked(raw, json.loads(raw)) == expected


def test_usage_in_each_event_does_not_begin_because_we_asked() -> None:
    raw = b'{"a":1,"stream_options":{"continuous_usage_stats":true}}'
    asked = with_usage_asked(raw, json.loads(raw))
    assert json.loads(asked)["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("options", [b"[]", b"7", b'"x"', b"true"])
def test_options_of_another_kind_are_left_to_the_engine(options: bytes) -> None:
    raw = b'{"a":1,"stream_options":' + options + b"}"
    assert with_usage_asked(raw, json.loads(raw)) == raw


# --- taking out -----------------------------------------------------------------------------------


def test_the_event_that_has_only_usage_is_taken_out() -> None:
    assert without_usage_events(TEXT + USAGE_ONLY + DONE) == TEXT + DONE
    assert without_usage_events(USAGE_ONLY) == b""


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_it_is_taken_out_whatever_ends_events(end: bytes) -> None:
    stream = (TEXT + USAGE_ONLY + DONE).replace(b"\n\n", end)
    assert without_usage_events(stream) == (TEXT + DONE).replace(b"\n\n", end)


@pytest.mark.parametrize(
    "kept",
    [
        TEXT,
        DONE,
        b"",
        b": ping\n\n",
        b"event: x\ndata: {}\n\n",
        event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}], usage=USAGE),
        event(choices=[]),
        event(choices=[], usage=None),
        event(choices=[], error={"message": "x"}),
        event(choices=[{"delta": {"content": '"choices":[],"usage":{}'}}]),
        b'data: {"choices":[], "usage": broken\n\n',
        b'data: ["choices", [], "usage"]\n\n',
        b'data: {"x":"choices","choices":[],"usage":-Infinity}\n\n',
    ],
)
def test_every_other_event_stays_byte_for_byte(kept: bytes) -> None:
    assert without_usage_events(kept) == kept
    assert without_usage_events(kept + USAGE_ONLY + kept) == kept + kept


def test_the_beginning_of_an_event_stays() -> None:
    beginning = b'data: {"choices":[],"us'
    assert without_usage_events(beginning) == beginning
    assert without_usage_events(USAGE_ONLY + beginning) == beginning


@given(st.lists(st.sampled_from([TEXT, DONE, USAGE_ONLY, b": c\n\n", b"data: x\r\n\r\n"])))
def test_what_is_left_is_the_stream_without_it(events: list[bytes]) -> None:
    left = [one for one in events if one != USAGE_ONLY]
    assert without_usage_events(b"".join(events)) == b"".join(left)
