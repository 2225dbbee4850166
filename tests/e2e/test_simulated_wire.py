"""Simulated engines answer Responses in the shape of the real one's: the same events, no field of their own."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import httpx
import orjson
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


def test_responses_of_both_look_alike(engines: EnginePair) -> None:
    async def ask_both() -> list[tuple[Any, bytes]]:
        simulated = SimEngine(SimEngineConfig(model="tiny"))
        await simulated.start()
        try:
            told = []
            async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
                for url in (engines[0].url, simulated.url):
                    whole = await client.post(f"{url}/v1/responses", json=BODY)
                    stream = await client.post(f"{url}/v1/responses", json={**BODY, "stream": True})
                    assert (whole.status_code, stream.status_code) == (200, 200), whole.text
                    told.append((whole.json(), stream.content))
            return told
        finally:
            await simulated.stop()

    (real, real_stream), (ours, our_stream) = asyncio.run(ask_both())
    assert keys_of(ours) <= keys_of(real)
    assert (ours["status"], ours["incomplete_details"]) == (
        real["status"],
        real["incomplete_details"],
    )
    theirs, simulated = events_of(real_stream), events_of(our_stream)
    kinds = [
        [kind for kind, _ in itertools.groupby(e, key=lambda one: one[0])]
        for e in (theirs, simulated)
    ]
    assert kinds[0] == kinds[1]
    shapes = {kind: keys_of(event) for kind, event in theirs}
    for kind, event in simulated:
        assert keys_of(event) <= shapes[kind], kind
    assert [event["sequence_number"] for _, event in simulated] == [*range(len(simulated))]
