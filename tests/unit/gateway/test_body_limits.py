"""What a body may have at most: just as much passes, one more is told by name."""

import json
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moongate.gateway.config.process_settings import LimitsSettings
from moongate.gateway.dialects import body_limits
from moongate.gateway.dialects.body import parse_body
from moongate.gateway.dialects.body_limits import (
    PARTS_MAX,
    VALUES_MAX,
    check_limits,
    check_parts,
)
from moongate.gateway.dialects.routes import PROXIED
from moongate.gateway.errors import GatewayError

LIMITS = LimitsSettings(json_depth_max=8, messages_max=3, stop_max=2)


def nested(levels: int, *, by: str = "list") -> Any:
    value: Any = []
    for _ in range(levels - 1):
        value = [value, "x"] if by == "list" else {"a": 1, "b": value}
    return value


def refusal(fields: dict[str, Any]) -> tuple[str, str | None]:
    with pytest.raises(GatewayError) as caught:
        check_limits(fields, 1000, LIMITS)
    assert (caught.value.status, caught.value.code) == (400, "invalid_request")
    return caught.value.message, caught.value.param


@pytest.mark.parametrize("by", ["list", "object"])
def test_so_many_levels_and_no_more(by: str) -> None:
    check_limits({"model": "m", "x": 1, "y": nested(7, by=by)}, 1000, LIMITS)
    message = "y: nested too deeply; limits.json_depth_max is 8"
    assert refusal({"model": "m", "x": [], "y": nested(8, by=by)}) == (message, "y")


def test_what_is_too_short_to_be_too_deep_is_not_looked_into() -> None:
    check_limits({"y": nested(20)}, 16, LIMITS)


@pytest.mark.parametrize("name", ["messages", "input", "prompt", "documents"])
def test_so_many_items_and_no_more(name: str) -> None:
    check_limits({name: ["x"] * 3}, 1000, LIMITS)
    assert refusal({name: ["x"] * 4}) == (f"{name}: 4 items; limits.messages_max is 3", name)


def test_token_ids_are_one_prompt() -> None:
    check_limits({"prompt": [1] * 100, "input": [1] * 100}, 1000, LIMITS)
    assert refusal({"prompt": [[1]] * 4})[1] == "prompt"


@pytest.mark.parametrize("name", ["stop", "stop_sequences"])
def test_so_many_stop_strings_and_no_more(name: str) -> None:
    check_limits({name: ["x"] * 2}, 1000, LIMITS)
    assert refusal({name: ["x"] * 3}) == (f"{name}: 3 stop strings; limits.stop_max is 2", name)
    check_limits({name: "a long string"}, 1000, LIMITS)


def test_of_other_kinds_the_engine_says_what_is_wrong() -> None:
    check_limits({"messages": "x", "stop": 3, "input": {}, "prompt": []}, 1000, LIMITS)


def test_what_engines_take_is_within_the_defaults() -> None:
    """vLLM answers a body with a field that is nested 200 levels deep (tests/e2e/test_differential.py)."""
    nested: list[object] = []
    for _ in range(200):
        nested = [nested]
    check_limits({"x": nested}, 500_000, LimitsSettings())


# --- parts, counted before they are made ----------------------------------------------------------


def parts_refusal(raw: bytes) -> str | None:
    try:
        check_parts(raw)
    except GatewayError as error:
        return error.message if (error.status, error.param) == (400, None) else "another"
    return None


TOO_MANY_PARTS = f"the body has more than {PARTS_MAX} lists, objects, names and texts"


@pytest.mark.parametrize("part", [b"[],", b"{},", b'"a",', b'"\\\\",', b'"\\"",'])
def test_so_many_parts_and_no_more(part: bytes) -> None:
    most = PARTS_MAX - 2  # the list, and the text
    text = b'"' + b'[{,\\"' * 1_000_000 + b'"'
    assert parts_refusal(b"[" + part * most + text + b"]") is None
    assert parts_refusal(b"[" + part * (most + 1) + text + b"]") == TOO_MANY_PARTS


def test_so_many_token_ids_and_no_more() -> None:
    assert parts_refusal(b'{"prompt":[' + b"1," * VALUES_MAX + b"1]}") is None
    message = f"the body has more than {VALUES_MAX} values"
    assert parts_refusal(b'{"prompt":[' + b"1," * VALUES_MAX + b'1],"n":1}') == message


def test_a_chat_of_as_many_messages_as_may_be_has_not_too_many_parts() -> None:
    message = b'{"role":"user","content":"a"}'
    messages = b",".join([message] * LimitsSettings().messages_max)
    assert parts_refusal(b'{"model":"m","messages":[' + messages + b'],"stream":true}') is None


TEXTS = st.text(st.sampled_from('a"\\[{,:\n'), max_size=6)
VALUES = st.recursive(
    TEXTS | st.integers(0, 3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


def count_parts(value: Any) -> int:
    match value:
        case str():
            return 1
        case dict():
            return 1 + sum(1 + count_parts(inner) for inner in value.values())
        case list():
            return 1 + sum(map(count_parts, value))
    return 0


@given(value=VALUES, chunk_bytes=st.integers(2, 9))
def test_parts_are_counted_whatever_is_in_texts_and_wherever_chunks_end(
    value: Any, chunk_bytes: int
) -> None:
    raw = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_limits, "_CHUNK_BYTES", chunk_bytes)
        count = count_parts(value)
        patch.setattr(body_limits, "PARTS_MAX", count)
        assert parts_refusal(raw) is None
        if count:
            patch.setattr(body_limits, "PARTS_MAX", count - 1)
            # What is as short as that can't have more.
            assert (parts_refusal(raw) is None) == (len(raw) <= count - 1)


@pytest.mark.parametrize("unit", [b"[],", b'",[",', b'\\"', b"\\\\", b"a, "])
def test_counting_eight_times_as_much_costs_about_eight_times_as_much(unit: bytes) -> None:
    def seconds(size: int) -> float:
        raw = b'{"x":["' + unit * (size // len(unit)) + b'"]}'
        began = time.process_time()
        parts_refusal(raw)
        return time.process_time() - began

    short = min(seconds(2_000_000) for _ in range(5))
    assert min(seconds(16_000_000) for _ in range(3)) < 24 * short


@pytest.mark.parametrize(
    "key", [b'"messages"', b'"mess\\u0061ges"', b'"messages":[1],"messages"', b'"z":NaN,"messages"']
)
def test_a_body_of_lists_only_is_refused_before_they_are_made(key: bytes) -> None:
    raw = b'{"model":"m",' + key + b":[" + b"[]," * 13_000_000 + b"1]}"
    tracemalloc.start()
    try:
        with pytest.raises(GatewayError) as caught:
            parse_body(raw, PROXIED["/v1/chat/completions"])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.message == TOO_MANY_PARTS
    assert peak < 2 * len(raw)  # without the objects, which would be 25 times as much
