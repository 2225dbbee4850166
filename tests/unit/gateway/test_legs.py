"""The prefill leg's body, who may be handed over, and what a prefill's answer says."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson
import pytest

from moongate.gateway.dialects.body import Body, parse_body
from moongate.gateway.dialects.routes import PROXIED, PromptKind
from moongate.gateway.errors import GatewayError
from moongate.gateway.headers import make_request_id
from moongate.gateway.proxy.legs import (
    LEFT_OUT,
    PrefillReport,
    may_hand_over,
    one_token_body,
    read_prefill,
    stays_whole,
)

CHAT = PROXIED["/v1/chat/completions"]
COMPLETION = PROXIED["/v1/completions"]
RESPONSES = PROXIED["/v1/responses"]
ANTHROPIC = PROXIED["/v1/messages"]
MESSAGES = [{"role": "user", "content": "hi"}]
FIXED = {"max_tokens": 1, "stream": False, "ignore_eos": True}

raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def chat(**fields: Any) -> Body:
    return parse_body(orjson.dumps({"model": "m", "messages": MESSAGES, **fields}), CHAT)


def completion(**fields: Any) -> Body:
    return parse_body(orjson.dumps({"model": "m", "prompt": "x", **fields}), COMPLETION)


# --- the body of the prefill leg --------------------------------------------------------------------


def test_what_shapes_the_prompt_stays_byte_for_byte() -> None:
    shaping = {
        "messages": rb'[ {"role":"user","content":"\u00e9 \ud83d\ude42 \/ 1.50e+1"} ]',
        "tools": b'[{"type": "function", "function": {"name":"f", "parameters":{"n": 1.0}}}]',
        "tool_choice": b'"required"',
        "chat_template_kwargs": b'{"enable_thinking":  false, "n": 12345678901234567890123}',
        "documents": b'[{"text":"x"}]',
        "mm_processor_kwargs": b'{"a":1E5}',
        "add_generation_prompt": b"false",
        "truncate_prompt_tokens": b"-1",
        "reasoning_effort": b'"low"',
        "cache_salt": b'"s"',
        "priority": b"-3",
        "vllm_xargs": b'{ "x" : 1 }',
        "an unknown field": b'{"n": [1, {"stop": 2}]}',
        "temperature": b"0.0",
        "logit_bias": b'{"5": -100}',
    }
    raw = b"{%b}" % b", ".join(b'"%b" : %b' % (k.encode(), v) for k, v in shaping.items())
    fields = {
        name: bytes(value)
        for name, value in raw_fields(one_token_body(raw, PromptKind.CHAT)).items()
    }
    assert {name: fields[name] for name in shaping} == shaping
    assert set(fields) - set(shaping) == set(FIXED)


@pytest.mark.parametrize("name", sorted(LEFT_OUT))
@pytest.mark.parametrize("value", [None, 1, ["x"], {"a": 1}])
def test_what_could_end_it_otherwise_or_fits_no_single_token_is_left_out(
    name: str, value: object
) -> None:
    assert orjson.loads(
        one_token_body(orjson.dumps({"model": "m", name: value}), PromptKind.CHAT)
    ) == {
        "model": "m",
        **FIXED,
    }


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
@pytest.mark.parametrize("value", [500, 0, None, "many"])
def test_c63_every_limit_that_was_given_is_one(name: str, value: object) -> None:
    sent = orjson.loads(one_token_body(orjson.dumps({name: value}), PromptKind.CHAT))
    assert sent == {**FIXED, name: 1}


def test_c64_there_is_no_stream() -> None:
    body = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": False}
    assert orjson.loads(one_token_body(orjson.dumps(body), PromptKind.CHAT)) == FIXED


def test_of_a_field_given_twice_the_last_counts_as_for_engines() -> None:
    raw = rb'{"temperature":1,"n":1,"te\u006dperature":2,"\u006e":3}'
    assert orjson.loads(one_token_body(raw, PromptKind.CHAT)) == {"temperature": 2, **FIXED}


def test_an_empty_body_and_one_with_spaces_are_bodies_too() -> None:
    assert orjson.loads(one_token_body(b" { } ", PromptKind.CHAT)) == FIXED


# --- who may be handed over -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stream": True},
        {"n": 1, "best_of": None},
        {"n": None},
        {"echo": False, "prompt_logprobs": None, "use_beam_search": False},
        {"kv_transfer_params": None},
        {"kv_transfer_params": {}},
    ],
)
def test_a_single_answer_to_one_prompt_may_be(fields: dict[str, Any]) -> None:
    assert may_hand_over(CHAT, chat(**fields))
    assert may_hand_over(COMPLETION, completion(**fields))


@pytest.mark.parametrize("prompt", ["x", "", [1], [1, 2, 3]])
def test_a_completion_of_a_text_or_of_ids_may_be(prompt: object) -> None:
    assert may_hand_over(COMPLETION, completion(prompt=prompt))


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 3},
        {"n": 0},
        {"n": "1"},
        {"best_of": 2},
        {"use_beam_search": True},
        {"echo": True},
        {"prompt_logprobs": 0},
        {"prompt_logprobs": 1},
        {"kv_transfer_params": {"x": 1}},
    ],
)
def test_anything_else_may_not_be(fields: dict[str, Any]) -> None:
    assert not may_hand_over(CHAT, chat(**fields))
    assert not may_hand_over(COMPLETION, completion(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["a", "b"]},
        {"prompt": ["a"]},
        {"prompt": [[1]]},
        {"prompt": []},
        {"prompt": None, "prompt_embeds": "abc"},
        {"prompt": "x", "prompt_embeds": "abc"},
    ],
)
def test_several_prompts_or_none_may_not_be(fields: dict[str, Any]) -> None:
    assert not may_hand_over(COMPLETION, completion(**fields))


def test_the_first_id_of_a_large_prompt_is_looked_at() -> None:
    large = completion(prompt=list(range(20_000)))
    assert large.is_outlined
    assert may_hand_over(COMPLETION, large)
    assert not may_hand_over(COMPLETION, completion(prompt=["word"] * 20_000))


def test_what_has_no_prompt_may_not_be() -> None:
    embedded = PROXIED["/v1/embeddings"]
    body = parse_body(b'{"model":"m","input":"x","echo":true}', embedded)
    assert not may_hand_over(embedded, body)
    assert not stays_whole(embedded, body)


def response(**fields: Any) -> Body:
    return parse_body(orjson.dumps({"model": "m", "input": "x", **fields}), RESPONSES)


def message(**fields: Any) -> Body:
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 9, **fields}
    return parse_body(orjson.dumps(body), ANTHROPIC)


def test_responses_and_messages_may_be() -> None:
    tools = [{"type": "function", "name": "f"}, {"type": "custom", "name": "g"}]
    assert may_hand_over(RESPONSES, response(stream=True, tools=tools, echo=True))
    assert may_hand_over(ANTHROPIC, message(stream=True, tools=[{"name": "f"}]))
    assert not stays_whole(RESPONSES, response(echo=True))


@pytest.mark.parametrize("kind", ["web_search_preview", "mcp", "code_interpreter", None])
def test_a_response_that_uses_the_engines_tools_may_not_be(kind: str | None) -> None:
    assert not may_hand_over(RESPONSES, response(tools=[{"type": "function"}, {"type": kind}]))
    assert not may_hand_over(RESPONSES, response(tools=["x"]))


@pytest.mark.parametrize("tools", [None, 5, True, 1.5, "x", {}])
def test_tools_that_make_no_sense_are_for_the_engine_to_refuse(tools: object) -> None:
    assert may_hand_over(RESPONSES, response(tools=tools))


def test_c63_prefills_of_responses_and_messages_are_for_one_token() -> None:
    asked: dict[str, Any] = {
        "model": "m",
        "input": "x",
        "max_output_tokens": 500,
        "stream": True,
        "store": True,
    }
    more: dict[str, Any] = {
        "text": {"format": {"type": "json_object"}},
        "stop": ["a"],
        "instructions": "be",
    }
    assert orjson.loads(one_token_body(orjson.dumps(asked | more), PromptKind.RESPONSES)) == {
        "model": "m", "input": "x", "instructions": "be", "max_output_tokens": 1, "stream": False,
        "store": False, "ignore_eos": True,
    }  # fmt: skip
    asked = {"model": "m", "messages": [], "max_tokens": 500, "stop_sequences": ["x"]}
    more = {"stream": True, "thinking": {"type": "enabled", "budget_tokens": 100}}
    assert orjson.loads(one_token_body(orjson.dumps(asked | more), PromptKind.MESSAGES)) == {
        "model": "m", "messages": [], "max_tokens": 1, "stream": False,
        "thinking": more["thinking"],
    }  # fmt: skip


def test_c70_what_needs_the_prompts_logits_stays_whole() -> None:
    assert stays_whole(CHAT, chat(prompt_logprobs=0))
    assert stays_whole(COMPLETION, completion(echo=True))
    assert not stays_whole(COMPLETION, completion(echo=False, logprobs=1))


def test_a_body_that_only_lenient_parsers_take_may_not_be_but_stays_whole_all_the_same() -> None:
    raw = b'{"model":"m","prompt":"\\ud800","echo":true}'
    body = parse_body(raw, COMPLETION)
    assert body.is_lenient
    assert not may_hand_over(COMPLETION, body)
    assert stays_whole(COMPLETION, body)


# --- what comes back --------------------------------------------------------------------------------


def answer(**fields: Any) -> bytes:
    return orjson.dumps({"choices": [{"finish_reason": "length"}], **fields})


@pytest.mark.parametrize(
    ("reason", "is_held"),
    [("length", True), ("tool_calls", True), ("stop", False), ("abort", False), (None, False)],
)
def test_what_ended_by_its_length_is_held(reason: str | None, is_held: bool) -> None:
    report = read_prefill(answer(choices=[{"finish_reason": reason}]))
    assert report == PrefillReport(is_held)


def test_the_answer_tells_the_parameters_and_what_was_cached() -> None:
    usage = {"prompt_tokens_details": {"cached_tokens": 12}}
    report = read_prefill(answer(kv_transfer_params={"a": [1]}, usage=usage))
    assert report == PrefillReport(True, {"a": [1]}, 12)


@pytest.mark.parametrize(
    "usage",
    [
        None,
        3,
        {},
        {"prompt_tokens_details": None},
        {"prompt_tokens_details": {"cached_tokens": None}},
        {"prompt_tokens_details": {"cached_tokens": True}},
        {"prompt_tokens_details": {"cached_tokens": -1}},
        {"prompt_tokens_details": {"cached_tokens": 1.5}},
    ],
)
def test_what_is_not_told_is_not_known(usage: object) -> None:
    assert read_prefill(answer(usage=usage)) == PrefillReport(is_held=True)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"<html>", b"null", b"[]", b"{}", b"3", b'"choices"', b'{"choices":null}'),
        *(b'{"choices":[]}', b'{"choices":{}}', b'{"choices":[3]}', b'{"choices":"ab"}'),
        b"\xff",
    ],
)
def test_an_answer_that_can_not_be_read_keeps_nothing(body: bytes) -> None:
    assert read_prefill(body) == PrefillReport(is_held=False)


@pytest.mark.parametrize("params", [None, 3, "x", [1]])
def test_parameters_are_an_object(params: object) -> None:
    assert read_prefill(answer(kv_transfer_params=params)).params is None


def test_a_body_that_is_nested_too_deeply_is_refused() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    with pytest.raises(GatewayError) as caught:
        one_token_body(b'{"model":"m","x":' + deep + b"}", PromptKind.CHAT)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("fields", "is_held"),
    [
        ({"incomplete_details": {"reason": "max_output_tokens"}}, True),
        ({"incomplete_details": {"reason": "content_filter"}}, False),
        ({"incomplete_details": None}, False),
        ({}, False),
        ({"incomplete_details": "x"}, False),
    ],
)
def test_what_a_responses_prefill_says(fields: dict[str, Any], is_held: bool) -> None:
    usage = {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}}
    told = {"object": "response", "usage": usage, "kv_transfer_params": {"a": 1}, **fields}
    report = read_prefill(orjson.dumps(told))
    assert report.is_held == is_held
    if fields.get("incomplete_details") != "x":
        assert report[1:] == ({"a": 1}, 4)


@pytest.mark.parametrize(
    ("reason", "is_held"),
    [("max_tokens", True), ("tool_use", True), ("end_turn", False), (None, False)],
)
def test_what_a_messages_prefill_says(reason: str | None, is_held: bool) -> None:
    usage = {"input_tokens": 5, "cache_read_input_tokens": 4}
    told = {"type": "message", "stop_reason": reason, "usage": usage, "kv_transfer_params": None}
    assert read_prefill(orjson.dumps(told)) == PrefillReport(is_held, None, 4)


def test_c72_ten_thousand_transfers_have_ids_of_their_own() -> None:
    """A hand-off is named as a request is."""
    assert len({make_request_id() for _ in range(10_000)}) == 10_000
