"""Turns of stored responses: what engines get, what clients get, and what is kept."""

import asyncio
import json
from typing import Any

import orjson
import pytest

from moongate.gateway.dialects.body import parse_body
from moongate.gateway.dialects.routes import PROXIED
from moongate.gateway.errors import GatewayError
from moongate.gateway.responses.response_store import ResponseStore
from moongate.gateway.responses.response_turns import ResponseTurn, ResponseTurns

ROUTE = PROXIED["/v1/responses"]
OUTPUT = {"type": "message", "id": "msg_1", "role": "assistant", "content": []}
USER = {"role": "user", "content": "hi"}


def some_turns() -> ResponseTurns:
    return ResponseTurns(ResponseStore(100.0, 1 << 20), lambda: 0.0, body_bytes_max=1 << 20)


def begin(turns: ResponseTurns, **fields: Any) -> ResponseTurn:
    return asyncio.run(
        turns.begin("", parse_body(orjson.dumps({"model": "m", **fields}), ROUTE), ROUTE)
    )


def answer(response_id: str, **fields: Any) -> bytes:
    return orjson.dumps(
        {"id": response_id, "previous_response_id": None, "output": [OUTPUT], **fields}
    )


def final_event(response: bytes, kind: str = "completed") -> bytes:
    return b'event: response.%b\ndata: {"type":"response.%b","response":%b}\n\n' % (
        kind.encode(), kind.encode(), response,
    )  # fmt: skip


def input_of(turn: ResponseTurn) -> Any:
    return json.loads(turn.body.raw)["input"]


def test_a_first_turn_goes_to_the_engine_as_it_came() -> None:
    turns = some_turns()
    raw = b'{ "model":"m", "input" : "hi" }'
    turn = asyncio.run(turns.begin("", parse_body(raw, ROUTE), ROUTE))
    assert turn.body.raw == raw
    assert turn.take_whole(answer("resp_1")) == answer("resp_1")
    assert asyncio.run(turns.find("", "resp_1", "x")).response == answer("resp_1")


def test_a_continued_response_has_the_whole_conversation_as_its_input() -> None:
    turns = some_turns()
    begin(turns, input="hi").take_whole(answer("resp_1"))
    second = begin(turns, input=[USER, USER], previous_response_id="resp_1", instructions="be")
    assert input_of(second) == [USER, OUTPUT, USER, USER]
    fields = json.loads(second.body.raw)
    assert fields["instructions"] == "be"
    assert "previous_response_id" not in fields
    second.take_whole(answer("resp_2"))
    third = begin(turns, input=[], previous_response_id="resp_2")
    assert input_of(third) == [USER, OUTPUT, USER, USER, OUTPUT]
    fork = begin(turns, input="x", previous_response_id="resp_1")
    assert input_of(fork) == [USER, OUTPUT, {"role": "user", "content": "x"}]


def test_numbers_and_spaces_in_items_stay_as_they_are() -> None:
    turns = some_turns()
    raw = b'{"model":"m","input":[ {"x":1e400, "y":12345678901234567890123} ]}'
    asyncio.run(turns.begin("", parse_body(raw, ROUTE), ROUTE)).take_whole(
        answer("resp_1", output=[])
    )
    second = begin(turns, input="x", previous_response_id="resp_1")
    assert b'{"x":1e400, "y":12345678901234567890123}' in second.body.raw


def test_the_client_is_told_what_its_response_continues() -> None:
    turns = some_turns()
    begin(turns, input="hi").take_whole(answer("resp_1"))
    turn = begin(turns, input="x", previous_response_id="resp_1")
    told = json.loads(turn.take_whole(answer("resp_2")))
    assert told["previous_response_id"] == "resp_1"
    assert (
        json.loads(asyncio.run(turns.find("", "resp_2", "x")).response)["previous_response_id"]
        == "resp_1"
    )

    stream = begin(turns, input="x", previous_response_id="resp_1")
    created = b'event: response.created\ndata: {"response":{"previous_response_id": null}}\n\n'
    assert stream.take_events(created) == created.replace(b" null", b'"resp_1"')
    echoed = b'event: x\ndata: {"response":{"tools":[{"previous_response_id":null}]}}\n\n'
    assert stream.take_events(echoed) == echoed
    delta = (
        b'event: response.output_text.delta\ndata: {"delta":"\\"previous_response_id\\":null"}\n\n'
    )
    assert stream.take_events(delta) == delta


@pytest.mark.parametrize("kind", ["completed", "incomplete", "failed"])
def test_a_streams_last_response_is_kept(kind: str) -> None:
    turns = some_turns()
    turn = begin(turns, input="hi", stream=True)
    created = b'event: response.created\ndata: {"response":{"id":"resp_1","output":[]}}\n\n'
    assert turn.take_events(created) == created
    assert len(turns.store) == 0
    final = final_event(answer("resp_1"), kind)
    assert turn.take_events(b"event: x\ndata: {}\n\n" + final).endswith(final)
    assert asyncio.run(turns.find("", "resp_1", "x")).history() == orjson.dumps(
        USER
    ) + b"," + orjson.dumps(OUTPUT)


def test_what_is_not_to_be_stored_is_not_kept_but_can_continue() -> None:
    turns = some_turns()
    assert begin(turns, input="hi", store=False).is_plain
    begin(turns, input="hi").take_whole(answer("resp_1"))
    turn = begin(turns, input="x", previous_response_id="resp_1", store=False)
    assert not turn.is_plain
    assert len(input_of(turn)) == 3
    turn.take_whole(answer("resp_2"))
    turn.take_events(final_event(answer("resp_2")))
    assert len(turns.store) == 1


def test_an_unknown_response_can_not_be_continued() -> None:
    with pytest.raises(GatewayError) as caught:
        begin(some_turns(), input="x", previous_response_id="resp_9")
    assert (caught.value.status, caught.value.code) == (404, "response_not_found")
    assert caught.value.param == "previous_response_id"


@pytest.mark.parametrize("given", [{}, {"input": 3}, {"input": {"a": 1}}])
def test_an_input_that_can_not_be_joined_is_refused(given: dict[str, Any]) -> None:
    turns = some_turns()
    begin(turns, input="hi").take_whole(answer("resp_1"))
    with pytest.raises(GatewayError) as caught:
        begin(turns, previous_response_id="resp_1", **given)
    assert (caught.value.status, caught.value.param) == (400, "input")


@pytest.mark.parametrize("given", [{}, {"input": 3}, {"input": "x", "previous_response_id": 7}])
def test_what_the_engine_will_refuse_is_left_to_it(given: dict[str, Any]) -> None:
    turn = begin(some_turns(), **given)
    assert turn.is_plain
    assert json.loads(turn.body.raw) == {"model": "m", **given}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b'{"id":3,"output":[]}',
        b'{"id":"","output":[]}',
        b'{"id":"resp_1"}',
        b'{"id":"resp_1","output":null}',
        b'{"id":"resp_1","output":[]',
        b'{"id":"resp_1","output":[],"status":"queued"}',
        b'{"id":"resp_1","output":[],"status":"in_progress"}',
    ],
)
def test_what_is_no_response_is_not_kept(text: bytes) -> None:
    turns = some_turns()
    turn = begin(turns, input="hi")
    assert turn.take_whole(text) == text
    turn.take_events(final_event(text))
    turn.take_events(b"event: response.completed\ndata: {}\n\n")
    turn.take_events(b"event: response.completed\ndata: {\n\n")
    assert len(turns.store) == 0
