"""Bodies: what is read of them, and which are refused before any engine is asked."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moongate.gateway.dialects.body import (
    OUTLINED_BYTES_MIN,
    READ_WHOLE_BYTES_MAX,
    SESSION_HEADERS,
    SESSION_KEY_CHARS_MAX,
    Body,
    find_session_key,
    find_user,
    parse_body,
    with_fields,
    without_key,
)
from moongate.gateway.dialects.routes import PROXIED
from moongate.gateway.errors import GatewayError

CHAT = PROXIED["/v1/chat/completions"]
COMPLETION = PROXIED["/v1/completions"]
TOKENIZE = PROXIED["/tokenize"]
RESPONSES = PROXIED["/v1/responses"]

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT_BYTES = b'"messages":[{"role":"user","content":"hi"}]'


def chat(**fields: object) -> Body:
    return parse_body(orjson.dumps({"model": "m", "messages": MESSAGES, **fields}), CHAT)


def refusal_of(raw: bytes, route: Any = CHAT) -> tuple[int, str, str | None]:
    with pytest.raises(GatewayError) as refused:
        parse_body(raw, route)
    assert refused.value.code == "invalid_request"
    return refused.value.status, refused.value.message, refused.value.param


# --- what is read ---------------------------------------------------------------------------------


def test_c16_the_bytes_and_every_field_are_kept() -> None:
    raw = b'{"model":"m", "x_new_2027":[1, 1.0], ' + CHAT_BYTES + b"}"
    body = parse_body(raw, CHAT)
    assert body == Body(
        raw, {"model": "m", "x_new_2027": [1, 1.0], "messages": MESSAGES}, "m", is_stream=False
    )
    assert [type(value) for value in body.fields["x_new_2027"]] == [int, float]


@pytest.mark.parametrize(("stream", "is_stream"), [(True, True), (False, False), (None, False)])
def test_a_stream_is_asked_for_with_true(stream: bool | None, is_stream: bool) -> None:
    assert chat(stream=stream).is_stream is is_stream


@pytest.mark.parametrize("prompt", ["", "a", [1, 2], ["a", "b"], [[1], [2]]])
def test_a_completion_takes_every_form_of_prompt(prompt: object) -> None:
    raw = orjson.dumps({"model": "m", "prompt": prompt})
    assert parse_body(raw, COMPLETION).fields["prompt"] == prompt


def test_a_completion_may_have_embeddings_for_a_prompt() -> None:
    assert parse_body(b'{"model":"m","prompt_embeds":"x"}', COMPLETION).model == "m"


def test_some_routes_do_without_a_model() -> None:
    assert parse_body(b'{"prompt":"a"}', TOKENIZE).model is None


def test_routes_that_routing_does_not_read_are_not_checked() -> None:
    assert parse_body(b'{"model":"m","input":7}', RESPONSES).model == "m"


# --- what only a lenient parser takes -------------------------------------------------------------


@pytest.mark.parametrize("value", [b'"x \\ud83d y"', b"NaN", b"-Infinity", b"1e999", b"9" * 400])
def test_c19_a_body_that_only_a_lenient_parser_takes_passes(value: bytes) -> None:
    body = parse_body(b'{"model":"m",' + CHAT_BYTES + b',"x":' + value + b"}", CHAT)
    assert (body.model, body.is_lenient) == ("m", True)


def test_c19_a_pair_of_surrogates_is_an_ordinary_character() -> None:
    body = parse_body(b'{"model":"m",' + CHAT_BYTES + b',"x":"\\ud83d\\ude42"}', CHAT)
    assert (body.fields["x"], body.is_lenient) == ("🙂", False)


@pytest.mark.parametrize("name", ["prompt_cache_key", "user"])
def test_c19_a_key_with_a_lone_surrogate_can_be_hashed(name: str) -> None:
    raw = b'{"model":"m",' + CHAT_BYTES + b',"' + name.encode() + b'":"k\\ud83d"}'
    body = parse_body(raw, CHAT)
    key = find_session_key({}, body, None) if name == "prompt_cache_key" else find_user(body)
    assert key == "k\\ud83d"


# --- C30: what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"model":', "the body is not JSON: "),
        (b"", "the body is empty; expected a JSON object"),
        (b"[]", "the body must be a JSON object, got a list"),
        (b"7", "the body must be a JSON object, got a number"),
        (b"null", "the body must be a JSON object, got nothing"),
        (b'{"model":"\xff"}', "the body is not UTF-8: invalid start byte at byte 10"),
        (b'{"model":"\xed\xa0\xbd"}', "the body is not UTF-8: "),
        (b"[" * 100_000, "the body is nested too deeply"),
        (b'{"model":"m"} x', "the body is not JSON: "),
    ],
)
def test_c30_a_body_that_is_no_json_object_is_refused(raw: bytes, message: str) -> None:
    status, text, param = refusal_of(raw)
    assert (status, text[: len(message)], param) == (400, message, None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "model: missing; name one of the models of /v1/models"),
        ({"model": None}, "model: missing; name one of the models of /v1/models"),
        ({"model": 7}, "model: expected a string, got a number"),
        ({"model": ["m"]}, "model: expected a string, got a list"),
        ({"model": "m", "stream": "true"}, "stream: expected true or false, got a string"),
        ({"model": "m", "stream": 1}, "stream: expected true or false, got a number"),
        ({"model": "m"}, "messages: expected a list of messages, got nothing"),
        ({"model": "m", "messages": {}}, "messages: expected a list of messages, got an object"),
        ({"model": "m", "messages": []}, "messages: empty; expected at least one message"),
    ],
)
def test_c30_a_chat_without_what_it_needs_is_refused_by_name(
    fields: dict[str, object], message: str
) -> None:
    assert refusal_of(orjson.dumps(fields)) == (400, message, message.partition(":")[0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "prompt: missing; expected a text, token ids, or a list of these"),
        ({"prompt": True}, "prompt: expected a text or a list, got true or false"),
    ],
)
def test_c30_a_completion_without_a_prompt_is_refused(
    fields: dict[str, object], message: str
) -> None:
    raw = orjson.dumps({"model": "m", **fields})
    assert refusal_of(raw, COMPLETION) == (400, message, "prompt")


# --- keys given twice -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"),
    [(b'"model":"m"', b'"model":"n"'), (b'"model":"m"', b'"m\\u006fdel":"n"'),
     (b'"model":"m","stream":true', b'"stream":true')],
)  # fmt: skip
def test_a_key_that_decides_may_not_be_given_twice(first: bytes, second: bytes) -> None:
    raw = b"{" + first + b"," + CHAT_BYTES + b"," + second + b"}"
    status, message, param = refusal_of(raw)
    assert (status, message) == (400, f"{param}: given twice")


def test_the_same_key_further_inside_is_another() -> None:
    assert chat(metadata={"model": "x", "stream": 1}, x=[{"model": "y"}]).model == "m"


def test_a_key_in_a_text_is_no_key() -> None:
    assert chat(x='"model" "model" \\u006f').model == "m"


PARAMETERS = {
    "type": "object",
    "properties": {"model": {"type": "string"}, "stream": {"type": "boolean"}},
    "required": ["model", "stream"],
}
TOOLS = [{"type": "function", "function": {"name": f"f{n}", "parameters": PARAMETERS}}
         for n in range(200)]  # fmt: skip


def test_the_parameters_of_tools_may_have_any_name() -> None:
    body = chat(tools=TOOLS, stream=True)
    assert (body.model, body.is_stream, body.is_lenient) == ("m", True, False)


@pytest.mark.parametrize(
    "second",
    [
        b'"model":"n"',
        b'"model" : "n"',
        b'"m\\u006fdel":"n"',
        b'"\\u006d\\u006F\\u0064\\u0065\\u006c":"n"',
        b'"x":{"model":1},"model":"n"',
        b'"model":{"model":1}',
        b'"x":"model","model":"n"',
        b'"x":"\\"model\\"","model":"n"',
        b'"tools":[],"model":"n"',  # of a key given twice but the last value is looked at
    ],
)
@pytest.mark.parametrize("lenient", [b"", b',"y":NaN', b',"y":"\\ud83d"'])
def test_a_key_hidden_among_tools_may_not_be_given_twice(second: bytes, lenient: bytes) -> None:
    tools = b'"tools":' + orjson.dumps(TOOLS)
    raw = b'{"model":"m",' + tools + b"," + CHAT_BYTES + b"," + second + lenient + b"}"
    assert refusal_of(raw) == (400, "model: given twice", "model")
    swapped = b"{" + second + b"," + tools + b"," + CHAT_BYTES + b',"model":"m"' + lenient + b"}"
    assert refusal_of(swapped) == (400, "model: given twice", "model")


def test_a_stream_given_twice_among_tools_is_refused() -> None:
    tools = b'"tools":' + orjson.dumps(TOOLS)
    for second in (b'"stream":false', b'"str\\u0065am":true'):
        raw = b'{"model":"m","stream":true,' + tools + b"," + CHAT_BYTES + b"," + second + b"}"
        assert refusal_of(raw) == (400, "stream: given twice", "stream")


NESTED = st.recursive(
    st.sampled_from([1, None, "model", '"model"', "stream"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["model", "stream", "x", '"model']), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    st.lists(st.tuples(st.sampled_from(["model", "x", "y", "m\\u006fdel"]), NESTED), max_size=5),
    st.integers(0, 5),
)
def test_a_key_is_given_twice_if_it_is_so_at_the_top(
    pairs: list[tuple[str, object]], position: int
) -> None:
    pairs = [("stream", False), ("messages", MESSAGES), *pairs]
    pairs.insert(position, ("model", "m"))
    members = [f'"{name}":{json.dumps(value)}' for name, value in pairs]
    raw = ("{" + ",".join(members) + "}").encode()
    is_twice = sum(name in ("model", "m\\u006fdel") for name, _ in pairs) > 1
    if is_twice:
        assert refusal_of(raw) == (400, "model: given twice", "model")
    else:
        assert parse_body(raw, CHAT).model == "m"


LARGE = b'"messages":[{"role":"user","content":"' + b"x" * OUTLINED_BYTES_MIN + b'"}]'


def test_fields_of_a_large_body_may_be_spelled_with_escapes() -> None:
    escaped = LARGE.replace(b"messages", b"mess\\u0061ges")
    body = parse_body(b'{"model":"m", "\\n" : 1, ' + escaped + b',"stream" : true}', CHAT)
    assert (body.is_outlined, body.is_stream, body.top["\n"]) == (True, True, 1)
    assert len(body.fields["messages"][0]["content"]) == OUTLINED_BYTES_MIN


@pytest.mark.parametrize(
    "field", [b'"z":NaN', b'"messages":[2]', b'"":"\xff"', b'"z":', b'"' + b"x" * 1025 + b'":1']
)
def test_what_has_no_outline_is_read_whole_up_to_a_size(field: bytes) -> None:
    raw = b'{"model":"m","x":"' + b"x" * READ_WHOLE_BYTES_MAX + b'",' + LARGE + b"," + field + b"}"
    status, message, param = refusal_of(raw)
    assert (status, param) == (400, None)
    assert message == (
        "a body of more than 16777216 bytes must be a JSON object in strict JSON and UTF-8,"
        " with no field given twice and at most 256 fields"
    )


def test_looking_for_keys_given_twice_ends_at_any_depth() -> None:
    nested = b"[" * 1020 + b"]" * 1020
    raw = b'{"model":"m",' + CHAT_BYTES + b',"x":' + nested + b',"y":{"model":1}}'
    with pytest.raises(GatewayError, match="nested too deeply"):
        parse_body(raw, CHAT)


# --- sessions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", SESSION_HEADERS)
def test_a_session_is_named_by_the_headers_that_agents_send(header: str) -> None:
    assert find_session_key({header: "s"}, chat(), None) == "s"


def test_the_first_header_counts_and_the_configured_one_before_it() -> None:
    headers = {"x-mine": "0", "x-session-id": "1", "x-moongate-session": "2"}
    assert find_session_key(headers, chat(), None) == "1"
    assert find_session_key(headers, chat(), "x-mine") == "0"


def test_headers_count_before_the_body() -> None:
    body = chat(prompt_cache_key="b")
    assert find_session_key({"session-id": "h"}, body, None) == "h"
    assert find_session_key({"session-id": ""}, body, None) == "b"


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"prompt_cache_key": "p", "metadata": {"user_id": "u"}}, "p"),
        ({"metadata": {"user_id": "u"}}, "u"),
        ({"metadata": "x"}, None),
        ({"prompt_cache_key": 7}, None),
        ({"prompt_cache_key": ""}, None),
        ({"user": "u"}, None),
    ],
)
def test_a_body_names_its_session(fields: dict[str, object], key: str | None) -> None:
    assert find_session_key({}, chat(**fields), None) == key


def test_a_long_key_is_cut() -> None:
    assert find_session_key({"session-id": "x" * 10_000}, chat(), None) == (
        "x" * SESSION_KEY_CHARS_MAX
    )


@pytest.mark.parametrize(("user", "key"), [("u", "u"), ("", None), (7, None), (None, None)])
def test_the_user_only_breaks_ties(user: object, key: str | None) -> None:
    assert (
        find_user(parse_body(json.dumps({"prompt": "a", "user": user}).encode(), TOKENIZE)) == key
    )


# --- a key cut out --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'{"k":{"a":[1,"}"]},"b":1.0}', b'{"b":1.0}'),
        (b'{"b": 1.0, "k" : null}', b'{"b": 1.0}'),
        (b'{"a":1,"k":2 , "b":3}', b'{"a":1 , "b":3}'),
        (b' { "k": 1 } ', b" {  } "),
        (b'{"k":1,"k":2,"b":"\xc3\xa9\\ud83d"}', b'{"b":"\xc3\xa9\\ud83d"}'),
        (b'{"a":{"k":1}}', b'{"a":{"k":1}}'),
    ],
)
def test_a_key_is_cut_out_and_every_other_byte_stays(raw: bytes, expected: bytes) -> None:
    assert without_key(raw, "k") == expected


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(["k", "a", "b", '"', "{", ","]), VALUES),
    st.sampled_from([None, 0, 2]),
)
def test_whatever_surrounds_it_the_rest_means_the_same(
    fields: dict[str, object], indent: int | None
) -> None:
    raw = json.dumps(fields, indent=indent).encode()
    rest = {name: value for name, value in fields.items() if name != "k"}
    assert json.loads(without_key(raw, "k")) == rest


def test_a_byte_order_mark_is_taken_as_engines_take_it() -> None:
    raw = b"\xef\xbb\xbf" + b'{"model":"m",' + CHAT_BYTES + b"}"
    body = parse_body(raw, CHAT)
    assert (body.model, body.is_lenient, body.raw) == ("m", True, raw)


# --- fields added ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'{"a":1}', b'{"a":1,"k":2}'),
        (b' { "a": {"b": "}"} } \n', b' { "a": {"b": "}"} ,"k":2} \n'),
        (b'{"a":"\xc3\xa9\\ud83d"}', b'{"a":"\xc3\xa9\\ud83d","k":2}'),
    ],
)
def test_fields_are_added_behind_a_bodys_own(raw: bytes, expected: bytes) -> None:
    assert b"".join(with_fields(raw, b'"k":2')) == expected


@given(
    st.dictionaries(st.sampled_from(["a", "b", '"', "}", ","]), VALUES, min_size=1),
    st.sampled_from([None, 0, 2]),
)
def test_added_fields_change_nothing_else(fields: dict[str, object], indent: int | None) -> None:
    raw = json.dumps(fields, indent=indent).encode()
    added = b"".join(with_fields(raw, b'"k":[1,{"x":2}]'))
    assert json.loads(added) == {**fields, "k": [1, {"x": 2}]}
    assert added.startswith(raw[:-1].rstrip())


# --- outlines -------------------------------------------------------------------------------------


def test_many_large_fields_are_outlined_in_one_pass() -> None:
    fields = {f"x{n}": "y" * 5000 for n in range(200)}
    raw = orjson.dumps({"model": "m", **fields, "messages": MESSAGES})
    body = parse_body(raw, CHAT)
    assert body.is_outlined
    assert len(orjson.dumps(dict(body.top))) < 10_000
    assert body.fields == orjson.loads(raw)


def test_a_value_that_also_stands_inside_of_another_is_not_mistaken_for_it() -> None:
    long = "u" * 5000
    raw = orjson.dumps(
        {
            "model": "m",
            "metadata": {"user_id": long},
            "user_id": long,
            "messages": MESSAGES * 1000,
        }
    )
    body = parse_body(raw, CHAT)
    assert find_session_key({}, body, None) == long[:512]
    assert body.fields == orjson.loads(raw)


def test_too_deep_a_body_is_refused_where_a_key_is_to_be_cut_out_of_it() -> None:
    raw = b'{"x": %b%b, "kv_transfer_params": {}}' % (b"[" * 1010, b"]" * 1010)
    with pytest.raises(GatewayError, match="nested too deeply"):
        without_key(raw, "kv_transfer_params")


@pytest.mark.parametrize("number", [b"0." + b"1" * 5000, b"1" * 4200])
def test_a_number_of_thousands_of_digits_is_read_as_it_is(number: bytes) -> None:
    text = b"x" * 20_000
    raw = b'{"model":"m","seed":%b,"messages":[{"role":"user","content":"%b"}]}' % (number, text)
    body = parse_body(raw, PROXIED["/v1/chat/completions"])
    assert (body.model, body.raw) == ("m", raw)
