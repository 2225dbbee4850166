"""What clients say of how their requests are to wait, and of how long answers may be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moongate.gateway.dialects.body import parse_body
from moongate.gateway.dialects.routes import PROXIED
from moongate.gateway.errors import GatewayError
from moongate.gateway.proxy.waiting_wishes import WaitingWishes, read_wishes

CHAT = PROXIED["/v1/chat/completions"]


def wishes(headers: dict[str, str], **fields: Any) -> WaitingWishes:
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 400}], **fields}
    return read_wishes(headers, parse_body(json.dumps(body).encode(), CHAT))


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
        ({"max_tokens": 7, "max_completion_tokens": 5}, 5),
        ({"max_tokens": None}, None),
        ({"max_tokens": True}, None),
        ({"max_tokens": 0}, None),
        ({"max_tokens": "7"}, None),
    ],
)
def test_the_least_bound_of_an_answer_counts(fields: dict[str, Any], tokens: int | None) -> None:
    assert wishes({}, **fields).answer_tokens_max == tokens
