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
from processes import BLOCK_TOKENS, Child, EngineProcess, Serve
from recorded_sessions import RESULT_BYTES, Body, claude_code_session, codex_session

EnginePair = tuple[EngineProcess, EngineProcess]
SESSIONS = 3

SIM_BLOCK_TOKENS = 16
"""Block size of simulated engines."""

EACH_AGENT = pytest.mark.parametrize(
    ("path", "session"),
    [("/v1/responses", codex_session), ("/v1/messages", claude_code_session)],
    ids=["codex", "claude_code"],
)


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


async def replay(
    client: httpx.AsyncClient, path: str, bodies: Iterator[Body], model: str
) -> list[Turn]:
    turns = []
    for body in bodies:
        answer = await client.post(path, json={"model": model, **body})
        assert answer.status_code == 200, answer.text
        prompt, cached = read_usage(answer.text)
        predicted = int(answer.headers["x-moongate-device-tokens"])
        turns.append(Turn(prompt, cached, predicted, answer.headers["x-moongate-instance"]))
    return turns


async def replay_all(
    url: str, path: str, session: Callable[[int], Iterator[Body]], model: str
) -> list[list[Turn]]:
    """Replay all sessions side by side."""
    options: Any = {"base_url": url, "timeout": 120.0, "trust_env": False}
    async with httpx.AsyncClient(**options) as client:
        replays = (replay(client, path, session(seed), model) for seed in range(SESSIONS))
        return await asyncio.gather(*replays)


@EACH_AGENT
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

    sessions = asyncio.run(replay_all(gateway.url, path, session, "tiny"))
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


@pytest.fixture(scope="module")
def simulated(start_stack: Callable[..., Child]) -> Child:
    return start_stack()


@EACH_AGENT
def test_on_simulated_engines_every_turn_goes_home(
    path: str,
    session: Callable[[int], Iterator[Body]],
    simulated: Child,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ideal = cached = 0
    for turns in asyncio.run(replay_all(simulated.url, path, session, "sim")):
        assert len(turns) == len(RESULT_BYTES)
        for before, now in itertools.pairwise(turns):
            assert now.instance == before.instance, (before, now)
            assert now.predicted_tokens == now.cached_tokens, (before, now)
            ideal += before.prompt_tokens // SIM_BLOCK_TOKENS * SIM_BLOCK_TOKENS
            cached += now.cached_tokens
    with capsys.disabled():
        print(f"\n{path}, simulated: {cached} of {ideal} tokens reused", end=" ")
    assert cached >= 0.95 * ideal
    assert counter(simulated.url, "moongate_route_fallback_total") == 0
