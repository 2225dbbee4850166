"""What clients say of how their requests are to wait, and of how long answers may be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moongate.gateway.dialects.body import parse_body
from moongate.gateway.dialects.routes import PROXIED
from moongate.gateway.errors import GatewayError
from moongate.gateway.proxy.waiting_wishes import (
    ANSWERS_MAX,
    COMPLETION_TOKENS_DEFAULT,
    NO_WISHES,
    PRIORITY,
    WaitingWishes,
    read_wishes,
)

COMPLETIONS, RESPONSES, MESSAGES = "/v1/completions", "/v1/responses", "/v1/messages"


def wishes(
    headers: dict[str, str], path: str = "/v1/chat/completions", **fields: Any
) -> WaitingWishes:
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 400}], **fields}
    route = PROXIED[path]
    return read_wishes(headers, parse_body(json.dumps(body).encode(), route), route, may_wait=True)


def test_who_says_nothing_wishes_nothing() -> None:
    said = wishes({})
    assert (said.priority, said.wait_s_max, said.answer_tokens_max) == (0, None, None)
    assert 100 <= said.size_tokens <= 130


@pytest.mark.parametrize(("value", "priority"), [("0", 0), ("-7", -7), ("+3", 3), (" 12 ", 12)])
def test_a_priority_is_a_whole_number(value: str, priority: int) -> None:
    assert wishes({"x-moongate-priority": value}).priority == priority


@pytest.mark.parametrize("value", ["", "high", "1.5", "1e3", "٣", "1_000", "9" * 10])
def test_what_is_none_is_refused(value: str) -> None:
    with pytest.raises(GatewayError, match="x-moongate-priority"):
        wishes({"x-moongate-priority": value})


@pytest.mark.parametrize(("value", "wait_s"), [("1500", 1.5), ("0", 0.0), ("-5", 0.0)])
def test_a_wait_is_in_milliseconds(value: str, wait_s: float) -> None:
    assert wishes({"x-moongate-max-wait-ms": value}).wait_s_max == wait_s


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"max_tokens": 7}, 7),
        ({"max_tokens": None}, None),
        ({"max_tokens": 0}, None),
        ({"max_tokens": "7"}, 7),  # as engines read them
        ({"max_tokens": 7.0}, 7),
        ({"max_tokens": True}, 1),
        ({"max_tokens": "many"}, None),
        ({"max_tokens": 7.5}, None),
        ({"max_tokens": 7, "max_completion_tokens": 5}, 5),
        ({"max_tokens": 1, "max_completion_tokens": 4000}, 4000),
        ({"max_tokens": 1, "max_completion_tokens": "4000"}, 4000),
        ({"max_tokens": 1, "max_completion_tokens": "many"}, None),
        ({"max_tokens": 7, "max_completion_tokens": None}, 7),
        ({"max_tokens": 4000, "max_output_tokens": 1}, 4000),
    ],
)
def test_the_field_that_the_engine_obeys_bounds_a_chats_answer(
    fields: dict[str, Any], tokens: int | None
) -> None:
    assert wishes({}, **fields).answer_tokens_max == tokens


@pytest.mark.parametrize(
    ("path", "tokens"), [(COMPLETIONS, 1), (RESPONSES, 3), (MESSAGES, 1), ("/v1/embeddings", None)]
)
def test_each_route_has_its_own_field(path: str, tokens: int | None) -> None:
    fields = {"max_tokens": 1, "max_completion_tokens": 2, "max_output_tokens": 3}
    assert wishes({}, path, prompt="x", input="x", **fields).answer_tokens_max == tokens


def test_a_completion_that_says_nothing_is_short_and_one_without_a_limit_is_not() -> None:
    assert wishes({}, COMPLETIONS, prompt="x").answer_tokens_max == COMPLETION_TOKENS_DEFAULT
    assert wishes({}, COMPLETIONS, prompt="x", max_tokens=None).answer_tokens_max is None
    assert wishes({}, RESPONSES, input="x").answer_tokens_max is None


@pytest.mark.parametrize(
    ("path", "fields", "answers"),
    [
        ("/v1/chat/completions", {}, 1),
        ("/v1/chat/completions", {"n": 50}, 50),
        ("/v1/chat/completions", {"n": "50"}, 50),
        ("/v1/chat/completions", {"n": 2, "best_of": 5}, 5),
        ("/v1/chat/completions", {"n": 10**18}, ANSWERS_MAX),
        ("/v1/chat/completions", {"n": -3}, 1),
        ("/v1/chat/completions", {"n": None, "prompt": ["a", "b"]}, 1),
        (COMPLETIONS, {"prompt": "a"}, 1),
        (COMPLETIONS, {"prompt": [5, 6, 7]}, 1),
        (COMPLETIONS, {"prompt": []}, 1),
        (COMPLETIONS, {"prompt": ["a", "b", "c"]}, 3),
        (COMPLETIONS, {"prompt": [[5, 6], [7]], "n": 4}, 8),
        (COMPLETIONS, {"prompt": ["x" * 9000] * 3}, 3),
        (COMPLETIONS, {"prompt": list(range(9000))}, 1),
        (COMPLETIONS, {"prompt_embeds": ["YQ==", "YQ=="]}, 2),
        (RESPONSES, {"input": "x", "n": 50}, 1),
        (MESSAGES, {"n": 50}, 1),
        ("/v1/embeddings", {"input": ["a", "b"]}, 0),
    ],
)
def test_all_answers_count(path: str, fields: dict[str, Any], answers: int) -> None:
    assert wishes({}, path, **fields).answers == answers


def test_what_computes_nothing_has_no_size() -> None:
    assert wishes({}, "/tokenize").size_tokens == 0
    assert wishes({}, "/v1/embeddings", input="x").size_tokens > 100


def test_where_nobody_waits_nothing_is_worked_out_but_bad_wishes_are_told() -> None:
    chat = PROXIED["/v1/chat/completions"]
    body = parse_body(
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"max_tokens":7}', chat
    )
    assert read_wishes({}, body, chat, may_wait=False) == NO_WISHES
    with pytest.raises(GatewayError, match=PRIORITY):
        read_wishes({PRIORITY: "x"}, body, chat, may_wait=False)
