"""Recorded sessions of coding agents, over Responses and Messages, reuse what can be reused."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import orjson
import pytest
from engine_metrics import counter
from processes import BLOCK_TOKENS, EngineProcess, Serve
from recorded_sessions import RESULT_BYTES, Body, claude_code_session, codex_session

EnginePair = tuple[EngineProcess, EngineProcess]
SESSIONS = 3


class Turn(NamedTuple):
    prompt_tokens: int
    cached_tokens: int
    predicted_tokens: int
    instance: str


def read_usage(stream: str) -> tuple[int, int]:
    """Return the prompt and cached tokens that a stream tells at its end."""
    events = [orjson.loads(line[5:]) for line in stream.splitlines() if line.startswith("data:")]
    for event in reversed(events):
        if event["type"] in ("response.completed", "response.incomplete"):
            usage = event["response"]["usage"]
            return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
        if event["type"] == "message_delta":
            usage = event["usage"]
            cached = usage.get("cache_read_input_tokens") or 0
            stored = usage.get("cache_creation_input_tokens") or 0
            return usage["input_tokens"] + cached + stored, cached
    raise AssertionError(f"no usage: {stream[-500:]}")


async def replay(client: httpx.AsyncClient, path: str, bodies: Iterator[Body]) -> list[Turn]:
    turns = []
    for body in bodies:
        answer = await client.post(path, json={"model": "tiny", **body})
        assert answer.status_code == 200, answer.text
        prompt, cached = read_usage(answer.text)
        predicted = int(answer.headers["x-moongate-device-tokens"])
        turns.append(Turn(prompt, cached, predicted, answer.headers["x-moongate-instance"]))
    return turns


@pytest.mark.parametrize(
    ("path", "session"),
    [("/v1/responses", codex_session), ("/v1/messages", claude_code_session)],
    ids=["codex", "claude_code"],
)
def test_a_coding_agents_sessions_reuse_nearly_all_they_can(
    path: str,
    session: Callable[[int], Iterator[Body]],
    engines: EnginePair,
    serve: Serve,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gateway = serve(engines)
    for engine in engines:
        httpx.post(f"{engine.url}/reset_prefix_cache", trust_env=False)

    async def all_at_once() -> list[list[Turn]]:
        options: Any = {"base_url": gateway.url, "timeout": 120.0, "trust_env": False}
        async with httpx.AsyncClient(**options) as client:
            return await asyncio.gather(
                *(replay(client, path, session(seed)) for seed in range(SESSIONS))
            )

    sessions = asyncio.run(all_at_once())
    ideal = cached = 0
    for turns in sessions:
        assert len(turns) == len(RESULT_BYTES)
        for before, now in itertools.pairwise(turns):
            ideal += before.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS
            cached += now.cached_tokens
    later = [turn for turns in sessions for turn in turns[1:]]
    exact = sum(turn.predicted_tokens == turn.cached_tokens for turn in later)
    with capsys.disabled():
        print(
            f"\n{path}: {SESSIONS} sessions of {len(RESULT_BYTES)} turns up to"
            f" {max(turn.prompt_tokens for turn in later)} tokens: {cached} of {ideal} tokens reused,"
            f" {exact} of {len(later)} as predicted"
        )
    assert cached >= 0.95 * ideal
    assert exact >= 0.97 * len(later)
    assert counter(gateway.url, "moongate_route_fallback_total") == 0
    assert counter(gateway.url, "moongate_prefix_divergences_total") == 0
