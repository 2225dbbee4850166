"""Simulated engines answer in the shape of the real one's: the same events, no field of their own."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import httpx
import orjson
import pytest
from processes import EngineProcess

from moongate.simulator.server import SimEngine, SimEngineConfig

EnginePair = tuple[EngineProcess, EngineProcess]

BODY: dict[str, Any] = {
    "model": "tiny", "input": "hello", "instructions": "be", "max_output_tokens": 4,
    "temperature": 0, "metadata": {"a": "b"},
}  # fmt: skip


def keys_of(value: Any, path: str = "") -> set[str]:
    """Return the paths of all fields of a JSON value."""
    if isinstance(value, list):
        return set().union(*(keys_of(one, f"{path}[]") for one in value))
    if not isinstance(value, dict):
        return set()
    inner = (keys_of(one, f"{path}.{name}") for name, one in value.items())
    return {f"{path}.{name}" for name in value}.union(*inner)


def events_of(stream: bytes) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for event in stream.split(b"\n\n")[:-1]:
        name, data = event.split(b"\n")
        found.append((name.removeprefix(b"event: ").decode(), orjson.loads(data[6:])))
    return found


def ask_both(engines: EnginePair, path: str, body: Any) -> list[tuple[Any, bytes]]:
    """Return what a real and a simulated engine answer to a body, whole and as a stream."""

    async def ask() -> list[tuple[Any, bytes]]:
        simulated = SimEngine(SimEngineConfig(model="tiny"))
        await simulated.start()
        try:
            told = []
            async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
                for url in (engines[0].url, simulated.url):
                    whole = await client.post(f"{url}{path}", json=body)
                    stream = await client.post(f"{url}{path}", json={**body, "stream": True})
                    assert (whole.status_code, stream.status_code) == (200, 200), whole.text
                    told.append((whole.json(), stream.content))
            return told
        finally:
            await simulated.stop()

    return asyncio.run(ask())


def check_events(real: bytes, ours: bytes) -> None:
    """See that our stream has the events of the real one's, in their order, and no field of its own."""
    theirs, simulated = events_of(real), events_of(ours)
    kinds = [
        [kind for kind, _ in itertools.groupby(e, key=lambda one: one[0])]
        for e in (theirs, simulated)
    ]
    assert kinds[0] == kinds[1]
    shapes = {kind: keys_of(event) for kind, event in theirs}
    for kind, event in simulated:
        assert keys_of(event) <= shapes[kind], kind
    assert [event["sequence_number"] for _, event in simulated] == [*range(len(simulated))]


def test_responses_of_both_look_alike(engines: EnginePair) -> None:
    (real, real_stream), (ours, our_stream) = ask_both(engines, "/v1/responses", BODY)
    assert keys_of(ours) <= keys_of(real)
    assert (ours["status"], ours["incomplete_details"]) == (
        real["status"],
        real["incomplete_details"],
    )
    check_events(real_stream, our_stream)


LOOK: dict[str, Any] = {
    "name": "look",
    "parameters": {
        "type": "object",
        "properties": {"place": {"enum": ["here", "there"]}},
        "required": ["place"],
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "look"}])
def test_calls_in_responses_of_both_look_alike(choice: Any, engines: EnginePair) -> None:
    tool = {"type": "function", "strict": True, **LOOK}
    body = {**BODY, "tools": [tool], "tool_choice": choice, "max_output_tokens": 64}
    (real, real_stream), (ours, our_stream) = ask_both(engines, "/v1/responses", body)
    # Real engines say again what they make of the fields `tools` and `text`.
    assert keys_of(ours["output"]) <= keys_of(real["output"])
    told = [(item["type"], item["name"], item["status"]) for item in ours["output"]]
    assert told == [(item["type"], item["name"], item["status"]) for item in real["output"]]
    assert json.loads(ours["output"][0]["arguments"])["place"] in ("here", "there")
    assert {"chatcmpl-tool-"} == {
        one["output"][0]["call_id"][: len("chatcmpl-tool-")] for one in (real, ours)
    }
    check_events(real_stream, our_stream)


def chunks_of(stream: bytes) -> list[dict[str, Any]]:
    *events, done, rest = stream.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [orjson.loads(event.removeprefix(b"data: ")) for event in events]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_calls_in_chats_of_both_look_alike(choice: Any, engines: EnginePair) -> None:
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 64,
        "temperature": 0, "tools": [{"type": "function", "function": LOOK}], "tool_choice": choice,
    }  # fmt: skip
    (real, real_stream), (ours, our_stream) = ask_both(engines, "/v1/chat/completions", body)
    assert keys_of(ours) <= keys_of(real)
    real_choice, our_choice = real["choices"][0], ours["choices"][0]
    assert our_choice["finish_reason"] == real_choice["finish_reason"]
    assert our_choice["message"]["content"] == real_choice["message"]["content"] == ""
    assert len(our_choice["message"]["tool_calls"]) == 1

    theirs, simulated = chunks_of(real_stream), chunks_of(our_stream)
    for stream in (theirs, simulated):
        last = stream[-1]["choices"][0]
        assert last["finish_reason"] == real_choice["finish_reason"]
        deltas = [call for c in stream for call in c["choices"][0]["delta"].get("tool_calls", ())]
        first, *others = deltas
        assert first["function"]["name"] == "look"
        assert first["id"].startswith("chatcmpl-tool-")
        assert not any(call["function"].get("name") or "id" in call for call in others)
        arguments = "".join(call["function"]["arguments"] for call in deltas)
        assert json.loads(arguments)["place"] in ("here", "there")
    assert set().union(*map(keys_of, simulated)) <= set().union(*map(keys_of, theirs))


def test_json_that_was_asked_for_comes_from_both(engines: EnginePair) -> None:
    schema = {"name": "place", "schema": LOOK["parameters"]}
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 64,
        "temperature": 0, "response_format": {"type": "json_schema", "json_schema": schema},
    }  # fmt: skip
    (real, real_stream), (ours, our_stream) = ask_both(engines, "/v1/chat/completions", body)
    assert keys_of(ours) <= keys_of(real)
    for whole, stream in ((real, real_stream), (ours, our_stream)):
        choice, chunks = whole["choices"][0], chunks_of(stream)
        text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
        assert json.loads(text)["place"] in ("here", "there")
        assert text == choice["message"]["content"]
        assert choice["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "stop"


def refusal(url: str, body: Any) -> tuple[int, Any]:
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30.0, trust_env=False)
    return answer.status_code, answer.json()


def test_a_choice_among_no_tools_is_refused_by_both(engines: EnginePair) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    named = {"type": "function", "function": {"name": "other"}}
    tools = [{"type": "function", "function": LOOK}]
    bodies = [{**asked, "tool_choice": "required"}, {**asked, "tool_choice": named, "tools": tools}]

    async def ask() -> list[tuple[int, Any]]:
        simulated = SimEngine(SimEngineConfig(model="tiny"))
        await simulated.start()
        try:
            return [await asyncio.to_thread(refusal, simulated.url, body) for body in bodies]
        finally:
            await simulated.stop()

    assert asyncio.run(ask()) == [refusal(engines[0].url, body) for body in bodies]
