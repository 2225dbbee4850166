"""Streams of any bytes, in any pieces: nothing gets lost in passing, and nothing raises."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from odd_values import damaged, objects, pieces_of, quick

from moongate.gateway.auth.tenants import ANYBODY
from moongate.gateway.dialects.aliases import Aliases
from moongate.gateway.dialects.body import parse_body
from moongate.gateway.dialects.json_edits import Edit
from moongate.gateway.dialects.messages_bridge import count_of, error_of, message_of
from moongate.gateway.dialects.messages_stream import MessageStream
from moongate.gateway.dialects.routes import PROXIED, ApiFamily
from moongate.gateway.dialects.sse import EventSplitter, ends_stream, split_events
from moongate.gateway.dialects.stream_usage import without_usage_events
from moongate.gateway.dialects.usage import UsageReader
from moongate.gateway.errors import stream_error_events
from moongate.gateway.proxy.collected import Collected
from moongate.gateway.proxy.transfer_params import TransferParamsFilter, without_params
from moongate.gateway.responses.response_store import ResponseStore
from moongate.gateway.responses.response_turns import ResponseTurn, ResponseTurns

CHUNKS = objects(
    "id", "model", "choices", "delta", "content", "role", "tool_calls", "function", "name", "index",
    "arguments", "finish_reason", "stop_reason", "usage", "prompt_tokens", "completion_tokens",
    "prompt_tokens_details", "cached_tokens", "error", "message", "code", "response", "type",
    "output", "status", "previous_response_id", "sequence_number", "kv_transfer_params", "ec_transfer_params",
    "reasoning", "data", "count", "tokens",
)  # fmt: skip
NAMES = st.sampled_from(
    ["response.created", "response.completed", "response.failed", "error", "message_stop", "x"]
)
MARKS = st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r"])


@st.composite
def events(draw: st.DrawFn) -> bytes:
    """Return one event, right or odd."""
    kind = draw(st.integers(0, 5))
    if kind == 0:
        return draw(st.sampled_from([b"data: [DONE]", b": ping", b"data:", b"id: 1"])) + draw(MARKS)
    data = json.dumps(draw(CHUNKS)).encode()
    if kind == 1:
        data = draw(damaged(data)).replace(b"\n", b"").replace(b"\r", b"")
    label = b"event: " + draw(NAMES).encode() + b"\n" if draw(st.booleans()) else b""
    return label + b"data: " + data + draw(MARKS)


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """Return a stream in pieces."""
    whole = b"".join(draw(st.lists(events(), max_size=5))) + draw(st.binary(max_size=12))
    return pieces_of(draw, whole)


@quick
@given(pieces=streams(), held_bytes_max=st.sampled_from([4, 64, 1 << 20]))
def test_no_byte_is_lost_between_events(pieces: list[bytes], held_bytes_max: int) -> None:
    splitter = EventSplitter(held_bytes_max)
    passed = b"".join(splitter.feed(piece) for piece in pieces)
    assert passed + splitter.held == b"".join(pieces)
    assert len(splitter.held) <= held_bytes_max or len(pieces) == 1


@quick
@given(pieces=streams())
def test_what_is_read_in_passing_never_raises(pieces: list[bytes]) -> None:
    splitter, usage, params = EventSplitter(), UsageReader(), TransferParamsFilter()
    for piece in pieces:
        taken = splitter.feed(piece)
        usage.feed(taken)
        params.feed(taken)
        ends_stream(taken)
    params.rest()
    found = usage.prompt_tokens(), usage.cached_tokens(), usage.completion_tokens()
    assert all(count is None or count >= 0 for count in found)


@quick
@given(pieces=streams())
def test_what_changes_events_leaves_the_others_and_never_raises(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    kept = split_events(without_usage_events(whole))[0]
    assert [e for e in split_events(whole)[0] if e in kept] == kept
    body = parse_body(b'{"model":"alias","input":"x"}', PROXIED["/v1/responses"])
    _, renaming = Aliases({"alias": "m"}).resolve(body, PROXIED["/v1/responses"])
    assert renaming is not None
    turns = ResponseTurns(ResponseStore(60.0, 1 << 20), lambda: 0.0, body_bytes_max=1 << 20)
    turn = ResponseTurn(turns, "", body, b"{}", None)
    changes: tuple[Edit, ...] = (
        renaming.take_events, turn.take_events, MessageStream().take_events,
        renaming.take_whole, turn.take_whole, without_params,
    )  # fmt: skip
    for change in changes:
        change(whole)


@quick
@given(chunks=st.lists(CHUNKS, max_size=6))
def test_whatever_a_chat_streams_a_message_is_told_in_events_that_can_be_read(
    chunks: list[dict[str, Any]],
) -> None:
    stream = MessageStream()
    told = [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks]
    written = b"".join(stream.take_events(event) for event in [*told, b"data: [DONE]\n\n"])
    names = []
    for event in split_events(written)[0]:
        matched = re.fullmatch(rb"event: (\w+)\ndata: (.*)\n\n", event, re.DOTALL)
        assert matched is not None, event
        value = json.loads(matched[2])
        assert value["type"].encode() == matched[1]
        names.append(value["type"])
    assert names.count("content_block_start") == names.count("content_block_stop") or (
        names[-1] == "error"
    )
    assert names[-1] in ("message_stop", "error")


@quick
@given(value=CHUNKS, status=st.integers(400, 599))
def test_whatever_an_engine_answers_a_message_is_made_of_it(
    value: dict[str, Any], status: int
) -> None:
    answer = json.dumps(value).encode()
    message_of(answer)
    count_of(answer)
    changed = error_of(status, answer)
    if changed != answer:  # it was an error's object
        error = json.loads(changed)
        assert error["type"] == "error"
        assert isinstance(error["error"]["message"], str)


@quick
@given(
    first=events() | st.binary(max_size=40),
    last=events() | st.binary(max_size=40),
    family=st.sampled_from(list(ApiFamily)),
)
def test_a_stream_is_ended_well_whatever_was_in_it(
    first: bytes, last: bytes, family: ApiFamily
) -> None:
    ending = stream_error_events("why", "engine_disconnected", family, first=first, last=last)
    whole, rest = split_events(ending)
    assert rest == b""
    assert ends_stream(ending)
    for event in whole:
        data = event.partition(b"data: ")[2].strip()
        assert data == b"[DONE]" or isinstance(json.loads(data), dict)


def never(message: str) -> None:
    raise AssertionError(message)


@quick
@given(pieces=streams())
def test_what_is_collected_is_what_came(pieces: list[bytes]) -> None:
    asked: Any = SimpleNamespace(
        route=None, method="POST", target="", headers=(), tenant=ANYBODY, opened_at=0.0
    )
    collected = Collected(asked, b"", is_stream=True, bytes_max=1 << 20, on_excess=never)
    for piece in pieces:
        collected.write(piece)
    assert collected.answer == b"".join(pieces)
    assert b"".join(collected.events) == b"".join(split_events(b"".join(pieces))[0])
