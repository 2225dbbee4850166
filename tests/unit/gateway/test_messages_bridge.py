"""Messages by way of chats: requests, whole answers, streams, errors."""

import json
from typing import Any

import pytest

from moongate.engine_plugins.vllm_render import TemplateManners
from moongate.gateway.dialects.messages_bridge import (
    bridge_for,
    chat_request,
    count_of,
    error_of,
    message_of,
    tokenize_request,
)
from moongate.gateway.dialects.messages_stream import MessageStream
from moongate.gateway.dialects.routes import PROXIED
from moongate.gateway.errors import GatewayError

MANNERS = TemplateManners(merges_system=False, disabled_thinking_effort="none")
USER = {"role": "user", "content": "hi"}
BASE = {"model": "m", "max_tokens": 9, "messages": [USER]}


def asked(**fields: Any) -> Any:
    return json.loads(chat_request({**BASE, **fields}, MANNERS))


def test_a_plain_message_is_a_chat() -> None:
    assert asked() == {"model": "m", "max_tokens": 9, "messages": [USER]}


def test_what_both_can_say_is_carried_over() -> None:
    schema = {"type": "object"}
    request = asked(
        system="be", stream=True, temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["x"],
        metadata={"user_id": "u"}, tools=[{"name": "f", "input_schema": schema}],
        tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}},
        vllm_xargs={"a": 1}, chat_template_kwargs={"b": 2},
    )  # fmt: skip
    (tool,) = request.pop("tools")
    assert tool["function"]["name"] == "f"
    assert request == {
        "model": "m", "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True},
        "messages": [{"role": "system", "content": "be"}, USER],
        "temperature": 0.5, "top_p": 0.9, "top_k": 3, "stop": ["x"], "reasoning_effort": "low",
        "tool_choice": {"type": "function", "function": {"name": "f"}}, "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        "vllm_xargs": {"a": 1}, "chat_template_kwargs": {"b": 2},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "told"), [("auto", "auto"), ("any", "required"), ("none", "none"), ("new", None)]
)
def test_choices_of_tools_have_other_names(choice: str, told: str | None) -> None:
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    assert asked(tools=tools, tool_choice={"type": choice}).get("tool_choice") == told
    assert "tool_choice" not in asked(tool_choice={"type": choice})
    assert "tool_choice" not in asked(tools=tools, tool_choice={"type": [choice]})
    assert "tool_choice" not in asked(tools=tools, tool_choice=choice)


def test_thinking_keeps_its_budget() -> None:
    assert (
        asked(thinking={"type": "enabled", "budget_tokens": 2000})["thinking_token_budget"] == 2000
    )


def test_no_tools_are_no_tools_and_calls_get_ids() -> None:
    use = {"type": "tool_use", "name": "f", "input": {}}
    messages = [USER, {"role": "assistant", "content": [use, use]}]
    request = asked(tools=[], messages=messages)
    assert "tools" not in request
    ids = [call["id"] for call in request["messages"][1]["tool_calls"]]
    assert len(set(ids)) == 2


@pytest.mark.parametrize("odd", ["\ud800", 10**30, float("nan")])
def test_what_only_lenient_parsers_read_is_carried_over(odd: Any) -> None:
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {"x": odd}}
    messages = [{"role": "assistant", "content": [use]}]
    request = json.loads(chat_request({**BASE, "messages": messages}, MANNERS))
    arguments = request["messages"][0]["tool_calls"][0]["function"]["arguments"]
    assert repr(json.loads(arguments)["x"]) == repr(odd)


@pytest.mark.parametrize("place", ["input", "schema"])
def test_what_is_nested_too_deeply_is_refused(place: str) -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"a": deep}
    fields: dict[str, Any] = {**BASE, "tools": [{"name": "f", "input_schema": {"x": deep}}]}
    if place == "input":
        use = {"type": "tool_use", "id": "t", "name": "f", "input": deep}
        fields = {**BASE, "messages": [{"role": "assistant", "content": [use]}]}
    with pytest.raises(GatewayError, match="nested too deeply"):
        chat_request(fields, MANNERS)


def test_a_turn_with_a_call_and_its_result() -> None:
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {"x": "é"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "done"}
    messages = [
        USER,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    _, call, tool = asked(messages=messages)["messages"]
    function = call["tool_calls"][0]["function"]
    assert json.loads(function["arguments"]) == {"x": "é"}
    assert call["content"] is None
    assert tool == {"role": "tool", "tool_call_id": "t", "content": "done"}


def test_what_can_not_be_a_chat_is_refused() -> None:
    with pytest.raises(GatewayError) as caught:
        chat_request({**BASE, "messages": []}, None)
    assert caught.value.status == 400


def test_without_a_known_template_system_messages_come_first() -> None:
    inline = [USER, {"role": "system", "content": "s"}]
    request = json.loads(chat_request({**BASE, "messages": inline}, None))
    assert request["messages"] == [{"role": "system", "content": "s"}, USER]


def test_tokens_are_counted_by_tokenising() -> None:
    request = json.loads(tokenize_request({**BASE, "system": "s"}, MANNERS))
    assert request == {"model": "m", "messages": [{"role": "system", "content": "s"}, USER]}
    assert json.loads(count_of(b'{"count": 7, "tokens": []}')) == {"input_tokens": 7}
    assert count_of(b"[]") == b"[]"
    bridge = bridge_for(PROXIED["/v1/messages/count_tokens"], BASE, MANNERS)
    assert (bridge.path, bridge.take_whole) == ("/tokenize", count_of)


# --- answers --------------------------------------------------------------------------------------

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
CUT = {**CALL, "function": {"name": "f", "arguments": '{"x":'}}
USAGE = {"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}


def answer(message: dict[str, Any], finish: str = "stop", **choice: Any) -> bytes:
    choices = [{"index": 0, "message": message, "finish_reason": finish, **choice}]
    return json.dumps({"id": "i", "model": "m", "choices": choices, "usage": USAGE}).encode()


def test_a_whole_answer_is_a_message() -> None:
    told = json.loads(
        message_of(answer({"reasoning": "hm", "content": "a", "tool_calls": [CALL]}, "tool_calls"))
    )
    assert told == {
        "id": "i", "type": "message", "role": "assistant", "model": "m",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "a"},
            {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}},
        ],
        "stop_reason": "tool_use", "stop_sequence": None,
        "usage": {"input_tokens": 2, "output_tokens": 3, "cache_read_input_tokens": 8},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("finish", "choice", "message", "reason"),
    [
        ("stop", {}, {"content": "a"}, ("end_turn", None)),
        ("stop", {"stop_reason": "x"}, {"content": "a"}, ("stop_sequence", "x")),
        ("stop", {"stop_reason": 5}, {"content": "a"}, ("end_turn", None)),
        ("stop", {}, {"tool_calls": [CALL]}, ("tool_use", None)),
        ("stop", {"stop_reason": "x"}, {"tool_calls": [CALL]}, ("tool_use", None)),
        ("stop", {"stop_reason": "x"}, {"tool_calls": [CUT]}, ("stop_sequence", "x")),
        ("length", {}, {"tool_calls": [CALL]}, ("max_tokens", None)),
        ("length", {}, {"content": ""}, ("max_tokens", None)),
    ],
)
def test_why_it_ended(
    finish: str, choice: dict[str, Any], message: dict[str, Any], reason: tuple[str, str | None]
) -> None:
    told = json.loads(message_of(answer(message, finish, **choice)))
    assert (told["stop_reason"], told["stop_sequence"]) == reason


@pytest.mark.parametrize("arguments", ["{", "[1]", "", None])
def test_arguments_that_a_model_wrote_wrongly_are_none(arguments: object) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    (block,) = json.loads(message_of(answer({"tool_calls": [call]})))["content"]
    assert block["input"] == {}


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"choices":[]}', b'{"choices":[3]}'])
def test_what_is_no_answer_stays_as_it_is(text: bytes) -> None:
    assert message_of(text) == text


def test_an_empty_answer_has_an_empty_text() -> None:
    assert json.loads(message_of(answer({"content": ""})))["content"] == [
        {"type": "text", "text": ""}
    ]


def test_large_numbers_in_calls_stay_exact() -> None:
    call = {**CALL, "function": {"name": "f", "arguments": '{"x":12345678901234567890123}'}}
    (block,) = json.loads(message_of(answer({"tool_calls": [call]})))["content"]
    assert block["input"] == {"x": 12345678901234567890123}


def test_errors_change_their_shape() -> None:
    error = b'{"error":{"message":"too long","type":"BadRequestError","code":400}}'
    assert json.loads(error_of(400, error)) == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "too long"},
    }
    assert error_of(400, b'{"detail":"no"}') == b'{"detail":"no"}'


# --- streams --------------------------------------------------------------------------------------


def chunk(delta: dict[str, Any] | None = None, **fields: Any) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": None}]
    value = {"id": "i", "model": "m", "choices": choices, **fields}
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def finish(reason: str, **choice: Any) -> bytes:
    choices = [{"index": 0, "delta": {}, "finish_reason": reason, **choice}]
    return chunk(None, choices=choices)


def told_by(*events: bytes) -> list[dict[str, Any]]:
    """Return the message's events; each is named as its type says."""
    stream, told = MessageStream(), []
    for event in b"".join(stream.take_events(event) for event in events).split(b"\n\n")[:-1]:
        name, data = event.split(b"\n")
        told.append(json.loads(data.removeprefix(b"data: ")))
        assert name == b"event: " + told[-1]["type"].encode()
    return told


DONE = b"data: [DONE]\n\n"


def test_a_stream_is_a_messages_stream() -> None:
    events = told_by(
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning": "h"}) + chunk({"reasoning": "m"}),
        chunk({"content": "a"}),
        chunk(
            {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}]}
        ),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"x":'}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]}),
        chunk(
            {"tool_calls": [{"index": 1, "id": "d", "function": {"name": "g", "arguments": "{}"}}]}
        ),
        finish("tool_calls"),
        chunk(None, usage=USAGE),
        DONE,
    )
    usage = {"input_tokens": 0, "output_tokens": 0}
    assert events[0] == {
        "type": "message_start",
        "message": {
            "id": "i", "type": "message", "role": "assistant", "content": [], "model": "m",
            "stop_reason": None, "stop_sequence": None, "usage": usage,
        },
    }  # fmt: skip
    shapes = [
        (e["type"], e.get("index"), e.get("content_block") or e.get("delta")) for e in events[1:]
    ]
    tool = {"type": "tool_use", "input": {}}
    assert shapes == [
        ("content_block_start", 0, {"type": "thinking", "thinking": ""}),
        ("content_block_delta", 0, {"type": "thinking_delta", "thinking": "h"}),
        ("content_block_delta", 0, {"type": "thinking_delta", "thinking": "m"}),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, {"type": "text", "text": ""}),
        ("content_block_delta", 1, {"type": "text_delta", "text": "a"}),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, {**tool, "id": "c", "name": "f"}),
        ("content_block_delta", 2, {"type": "input_json_delta", "partial_json": '{"x":'}),
        ("content_block_delta", 2, {"type": "input_json_delta", "partial_json": "1}"}),
        ("content_block_stop", 2, None),
        ("content_block_start", 3, {**tool, "id": "d", "name": "g"}),
        ("content_block_delta", 3, {"type": "input_json_delta", "partial_json": "{}"}),
        ("content_block_stop", 3, None),
        ("message_delta", None, {"stop_reason": "tool_use", "stop_sequence": None}),
        ("message_stop", None, None),
    ]
    assert events[-2]["usage"] == {
        "input_tokens": 2, "output_tokens": 3, "cache_read_input_tokens": 8,
    }  # fmt: skip


def test_a_stream_that_ends_by_a_sequence() -> None:
    *_, delta, stop = told_by(chunk({"content": "a"}), finish("stop", stop_reason="x"), DONE)
    assert delta["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "x"}
    assert stop == {"type": "message_stop"}


def test_an_error_within_a_stream_is_told() -> None:
    (error,) = told_by(b'data: {"error":{"message":"no"}}\n\n')
    assert error == {"type": "error", "error": {"type": "api_error", "message": "no"}}


def test_what_is_no_event_of_a_chat_is_left_out() -> None:
    assert told_by(b": ping\n\n", b"data: [1]\n\n", b"data: {\n\n") == []


def test_text_in_the_middle_of_a_call_comes_behind_it() -> None:
    def call(arguments: str, **first: Any) -> bytes:
        function = {"arguments": arguments, **({"name": "f"} if first else {})}
        return chunk({"tool_calls": [{"index": 0, **first, "function": function}]})

    events = told_by(
        call('{"a":', id="c"), chunk({"content": "\n"}), call("1}"), finish("tool_calls"), DONE
    )
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert deltas == [
        {"type": "input_json_delta", "partial_json": '{"a":'},
        {"type": "input_json_delta", "partial_json": "1}"},
        {"type": "text_delta", "text": "\n"},
    ]
    assert [event["type"] for event in events][-3:] == [
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    both = told_by(
        call("{}", id="c"), chunk({"content": "x"}),
        chunk({"tool_calls": [{"index": 1, "id": "d", "function": {"name": "g", "arguments": "{}"}}]}),
        DONE,
    )  # fmt: skip
    blocks = [e["content_block"]["type"] for e in both if e["type"] == "content_block_start"]
    assert blocks == ["tool_use", "text", "tool_use"]


def test_nothing_follows_an_error() -> None:
    events = told_by(chunk({"content": "a"}), b'data: {"error":{"message":"no"}}\n\n', DONE)
    assert events[-1]["type"] == "error"


def test_a_stream_of_nothing_is_an_empty_message() -> None:
    assert [event["type"] for event in told_by(DONE)] == [
        "message_start", "message_delta", "message_stop",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "odd",
    [
        {"choices": 5},
        {"choices": [5]},
        {"choices": [{"delta": 5}]},
        {"usage": {"prompt_tokens": "5"}},
    ],
)
def test_odd_chunks_do_no_harm(odd: dict[str, Any]) -> None:
    events = told_by(chunk({"content": "a"}), chunk(None, **odd), chunk({"content": "b"}), DONE)
    text = [e["delta"]["text"] for e in events if e["type"] == "content_block_delta"]
    assert text == ["a", "b"]
