"""What an engine's connector says in an answer is blanked, and every other byte is passed on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moongate.gateway.dialects.connector_params import CONNECTOR_FIELDS
from moongate.gateway.proxy.transfer_params import TransferParamsFilter, tells_nothing

SECRET = {
    "remote_host": "10.0.0.7",
    "ids": [[1, 2], [3]],
    "text": 'a "brace}" \\',
    "deep": {"x": {}},
}


def passed_on(*pieces: bytes) -> bytes:
    filtering = TransferParamsFilter()
    return b"".join([*(filtering.feed(piece) for piece in pieces), filtering.rest()])


def body_of(params: Any, **after: Any) -> bytes:
    return json.dumps({"id": "x", "kv_transfer_params": params, **after}).encode()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b'{"kv_transfer_params":null}',
        b'{"kv_transfer_params" : null , "x": 1}',
        b'{"kv_transfer_params":{}}',
        b'{"kv_transfer_params":[ ],"x":{"a":1}}',
        b'{"kv_transfer_params":1}',
        b'{"kv_transfer_params":"{a text}","x":{}}',
        b'{"text":"the key is \\"kv_transfer_params\\": {\\"a\\": 1}"}',
        b'{"name":"kv_transfer_params","x":{"a":1}}',
        b'["kv_transfer_params",{"a":1}]',
        b'{"x":"kv_trans',
        b'{"x":"ec_trans',
        b'{"kv_transfer_params"',
        b'{"kv_transfer_params":',
        b'{"kv_transfer_params"   ',
        b'{"kv_transfer_params_of_mine":{"a":1}}',
        b"no JSON at all " * 10,
    ],
)
def test_what_says_nothing_of_them_is_passed_on_as_it_is(body: bytes) -> None:
    for size in (1, 2, 3, 7, 1000):
        assert passed_on(*(body[n : n + size] for n in range(0, len(body), size))) == body


@pytest.mark.parametrize(
    "params", [SECRET, {"a": 1}, [1, 2], [[]], {"": ""}, {"t": "\\"}, {"t": '"}'}, [{"a": {}}]]
)
@pytest.mark.parametrize("size", [1, 2, 5, 19, 20, 21, 1000])
def test_they_are_blanked_at_their_own_length(params: Any, size: int) -> None:
    body = body_of(params, usage={"n": 1}, kv={"a": {"b": [1]}})
    got = passed_on(*(body[n : n + size] for n in range(0, len(body), size)))
    assert len(got) == len(body)
    assert json.loads(got) == {**json.loads(body), "kv_transfer_params": None}
    assert got.endswith(body[-40:])


def test_it_is_blanked_wherever_it_stands_and_however_often() -> None:
    body = b'{"kv_transfer_params":{"a":1},"b":{"kv_transfer_params" :\n{"c":[{}]}},"d":{"e":2}}'
    assert passed_on(body.replace(b"kv", b"ec")) == passed_on(body).replace(b"kv", b"ec")
    got = json.loads(passed_on(body))
    assert got == {"kv_transfer_params": None, "b": {"kv_transfer_params": None}, "d": {"e": 2}}


def test_pieces_without_it_are_passed_on_at_once_and_as_they_are() -> None:
    filtering, piece = TransferParamsFilter(), b'{"content":"' + b"x" * 1000
    assert filtering.feed(piece) is piece
    assert filtering.feed(b'more","') == b'more","'[:-1]  # the quote may begin the key
    assert filtering.feed(b'z":1}') == b'"z":1}'
    assert filtering.rest() == b""


def test_a_broken_answer_is_passed_on_up_to_where_it_broke() -> None:
    got = passed_on(b'{"kv_transfer_params":{"a":[1,2')
    assert got == b'{"kv_transfer_params":null     '


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just('"\\{}[]'),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(
            st.text(max_size=3) | st.sampled_from(CONNECTOR_FIELDS), children, max_size=3
        )
    ),
    max_leaves=8,
)


def blanked(value: Any) -> Any:
    """Return a value as it should be passed on, told by its parts."""
    if isinstance(value, list):
        return [blanked(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: None
        if name in CONNECTOR_FIELDS and isinstance(item, dict | list) and len(_text(item)) >= 4
        else blanked(item)
        for name, item in value.items()
    }


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(json_values, st.lists(st.integers(1, 60), max_size=8))
def test_any_answer_in_any_pieces(value: Any, cuts: list[int]) -> None:
    body = _text(value).encode()
    pieces, begin = [], 0
    for cut in cuts:
        pieces.append(body[begin : begin + cut])
        begin += cut
    got = passed_on(*pieces, body[begin:])
    assert len(got) == len(body)
    assert json.loads(got) == blanked(json.loads(body))
    assert any(f'"{name}"' in _text(value) for name in CONNECTOR_FIELDS) or got == body


def test_an_answer_of_vllms_is_passed_on_without_being_taken_apart() -> None:
    assert tells_nothing(b'{"id":"x","kv_transfer_params":null,"ec_transfer_params":null,"n":1}')
    assert not tells_nothing(b'{"id":"x","kv_transfer_params":null,"ec_transfer_params":{"a":1}}')
