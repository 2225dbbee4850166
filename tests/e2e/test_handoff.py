"""A real prefill/decode pair: MooncakeConnector over TCP, with a real Mooncake pool beside it.

Both engines have a MultiConnector (the hand-off, then the pool), and a third does both, alone: what it
answers is what the pair has to answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from conversation import Conversation, ask
from engine_metrics import counter
from pool_processes import MooncakePool
from processes import (
    BLOCK_TOKENS,
    Child,
    EngineProcess,
    free_port,
    running,
    start_gateway,
    until,
)

from moongate.engine_plugins.kv_transfer_launch import Handoff

ENGINE: dict[str, Any] = {"gpu_blocks_override": 1200, "max_model_len_tokens": 16_384}
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
KV_USE = "vllm:kv_cache_usage_perc"


@dataclass(frozen=True, slots=True)
class Pair:
    """The engines, their pool, and a gateway before the two that work together."""

    prefill: EngineProcess
    decode: EngineProcess
    alone: EngineProcess
    pool: MooncakePool
    gateway: Child

    @property
    def url(self) -> str:
        return self.gateway.url

    def metric(self, name: str, **labels: str) -> float:
        return counter(self.url, name, **labels)


@pytest.fixture(scope="module")
def pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("pair")
    pool = MooncakePool(directory)
    bootstrap = free_port()
    prefill = pool.engine(
        tiny_model, "p", role="prefill", handoff=Handoff(bootstrap_port=bootstrap), **ENGINE
    )
    decode = pool.engine(tiny_model, "d", role="decode", handoff=Handoff(), **ENGINE)
    alone = EngineProcess.make(tiny_model, directory, "alone", **ENGINE)
    settings = {
        "pool": pool.settings,
        "instances": [
            {
                "id": "p",
                "url": prefill.url,
                "role": "prefill",
                "bootstrap_url": f"http://127.0.0.1:{bootstrap}",
            },
            {"id": "d", "url": decode.url, "role": "decode"},
        ],
    }
    with pool, running(prefill, decode, alone):
        gateway = start_gateway(directory, settings)
        try:
            yield Pair(prefill, decode, alone, pool, gateway)
        finally:
            gateway.stop()


def test_a_pair_answers_as_one_engine_alone(pair: Pair, tiny_model: Path) -> None:
    before = counter(pair.decode.url, EXTERNAL_HITS)
    session = Conversation(pair.url, tiny_model, seed=1)
    (reply,) = session.grow(1, tokens=3000, max_tokens=48)
    assert reply.headers["x-moongate-instance"] == "d"
    assert reply.headers["x-moongate-prefill-instance"] == "p"
    handed_over = counter(pair.decode.url, EXTERNAL_HITS) - before
    assert handed_over == reply.prompt_tokens

    same = ask(pair.alone.url, session.messages[:1], max_tokens=48)
    assert same.text == reply.text
    assert same.prompt_tokens == reply.prompt_tokens
    assert same.completion_tokens == reply.completion_tokens == 48

    whole = httpx.post(
        f"{pair.url}/v1/chat/completions",
        json={"model": "tiny", "messages": session.messages[:1], "max_completion_tokens": 48,
              "temperature": 0},
        timeout=60.0, trust_env=False,
    ).json()  # fmt: skip
    assert whole["choices"][0]["message"]["content"] == reply.text
    assert whole["usage"]["completion_tokens"] == 48


TEXT = "def scan(index: int) -> list[str]:\n    return [str(index)]\n" * 120
TOOL = {"name": "look", "description": "d"}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
OTHER_APIS: dict[str, tuple[str, dict[str, Any]]] = {
    "response": (
        "/v1/responses",
        {
            "instructions": TEXT, "input": "x", "max_output_tokens": 24, "temperature": 0,
            "tools": [{"type": "function", **TOOL, "parameters": SCHEMA}],
        },
    ),
    "messages": (
        "/v1/messages",
        {
            "system": f"In other words. {TEXT}", "messages": [{"role": "user", "content": "y"}], "max_tokens": 24,
            "temperature": 0,
        },
    ),
}  # fmt: skip


def _said(answer: dict[str, Any]) -> tuple[Any, Any]:
    usage = answer["usage"]
    told = answer.get("output") or answer["content"]
    texts = [part.get("text") or [c["text"] for c in part.get("content", ())] for part in told]
    return texts, (usage["input_tokens"], usage["output_tokens"])


@pytest.mark.parametrize("name", OTHER_APIS)
def test_a_pair_answers_responses_and_messages_too(name: str, pair: Pair) -> None:
    path, body = OTHER_APIS[name]
    before = counter(pair.decode.url, EXTERNAL_HITS)
    handed = pair.metric("moongate_pd_handoffs_total", result="handed_over")
    with httpx.Client(timeout=60.0, trust_env=False) as client:
        answer = client.post(f"{pair.url}{path}", json={"model": "tiny", **body})
        alone = client.post(f"{pair.alone.url}{path}", json={"model": "tiny", **body})
        assert (answer.status_code, alone.status_code) == (200, 200), answer.text
        stream = client.post(f"{pair.url}{path}", json={"model": "tiny", "stream": True, **body})
    assert answer.headers["x-moongate-prefill-instance"] == "p"
    assert _said(answer.json())[0] == _said(alone.json())[0]
    assert answer.json().get("kv_transfer_params") is None
    prompt_tokens = int(answer.headers["x-moongate-prompt-tokens"])
    assert counter(pair.decode.url, EXTERNAL_HITS) - before >= prompt_tokens > 2_000
    assert pair.metric("moongate_pd_handoffs_total", result="handed_over") > handed
    assert stream.status_code == 200
    assert ("response.completed" in stream.text or "response.incomplete" in stream.text) == (
        name == "response"
    )


async def _ask_many(pair: Pair, bodies: list[dict[str, Any]], at_once: int) -> list[str]:
    """Send all as streams, so many at a time. Return the texts."""
    gate = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(timeout=120.0, trust_env=False) as client:

        async def one(url: str, body: dict[str, Any]) -> str:
            async with gate:
                answer = await client.post(f"{url}/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
                assert answer.text.rstrip().endswith("data: [DONE]")
                assert '"error"' not in answer.text, answer.text
                return answer.text

        return await asyncio.gather(*(one(pair.url, body) for body in bodies))


def test_fifty_requests_eight_at_a_time(
    pair: Pair, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handed_over = pair.metric("moongate_pd_handoffs_total", result="handed_over")
    session = Conversation(pair.url, tiny_model, seed=50)
    bodies = [
        {
            "model": "tiny", "max_tokens": 16, "temperature": 0, "stream": True,
            "messages": [{"role": "user", "content": session.text(600)}],
        }
        for _ in range(50)
    ]  # fmt: skip
    began = time.perf_counter()
    texts = asyncio.run(_ask_many(pair, bodies, at_once=8))
    took_s = time.perf_counter() - began
    assert len(texts) == 50
    done = pair.metric("moongate_pd_handoffs_total", result="handed_over") - handed_over
    assert done == 50
    assert pair.metric("moongate_inflight_requests") == 0
    _wait_for_idle(pair.prefill)
    with capsys.disabled():
        print(f"\n50 hand-offs, 8 at a time, in {took_s:.1f} s")


def _wait_for_idle(engine: EngineProcess, limit_s: float = 5.0) -> float:
    """Wait until an engine's KV cache is held by nobody. Return how long that took."""
    began = time.monotonic()
    until(lambda: counter(engine.url, KV_USE) == 0, limit_s, lambda: counter(engine.url, KV_USE))
    return time.monotonic() - began


@pytest.mark.parametrize("after_s", [0.02, 0.15, 0.3, 0.5, 0.8])
def test_a_client_that_leaves_strands_nothing(
    pair: Pair, tiny_model: Path, after_s: float, capsys: pytest.CaptureFixture[str]
) -> None:
    _wait_for_idle(pair.prefill)
    session = Conversation(pair.url, tiny_model, seed=int(1000 * after_s))

    async def leave(is_stream: bool) -> None:
        body = {
            "model": "tiny", "max_tokens": 200, "stream": is_stream, "temperature": 0,
            "messages": [{"role": "user", "content": session.text(2500)}],
        }  # fmt: skip
        async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
            sending = asyncio.create_task(client.post(f"{pair.url}/v1/chat/completions", json=body))
            await asyncio.sleep(after_s)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def several() -> None:
        await asyncio.gather(*(leave(is_stream) for is_stream in (True, False, True)))

    asyncio.run(several())
    took_s = _wait_for_idle(pair.prefill, 8.0)  # three prompts may still have to be computed
    _wait_for_idle(pair.decode, 8.0)
    until(lambda: not pair.metric("moongate_inflight_requests"), 8.0)
    with capsys.disabled():
        print(f"\nleft after {after_s:.2f} s: the prefiller is idle {took_s:.1f} s later")


def test_a_prefix_that_only_the_pool_has_is_fetched_by_the_prefiller(
    pair: Pair, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = Conversation(pair.url, tiny_model, seed=7)
    session.grow(1, tokens=4000)
    # As much again of others, so that neither device has it any more.
    for seed in range(70, 82):
        Conversation(pair.url, tiny_model, seed=seed).grow(1, tokens=4000)
    before = counter(pair.prefill.url, EXTERNAL_HITS)
    (turn,) = session.grow(1, tokens=300)
    fetched = counter(pair.prefill.url, EXTERNAL_HITS) - before
    with capsys.disabled():
        print(f"\nthe prefiller fetched {fetched:.0f} of {turn.prompt_tokens} tokens")
    assert turn.headers["x-moongate-prefill-instance"] == "p"
    assert turn.headers["x-moongate-reason"] == "pool_prefix"
    assert int(turn.headers["x-moongate-pool-tokens"]) == fetched >= 4000 - BLOCK_TOKENS


def test_a_restarted_prefiller_is_known_by_its_new_name(pair: Pair, tiny_model: Path) -> None:
    failed = pair.metric("moongate_pd_handoffs_total", result="failed")
    pair.prefill.kill()
    pair.prefill.start()
    pair.prefill.wait_ready()
    until(lambda: pair.metric("moongate_instance_up", instance="p") == 1, 30.0)
    before = counter(pair.decode.url, EXTERNAL_HITS)
    (reply,) = Conversation(pair.url, tiny_model, seed=9).grow(1, tokens=2000)
    assert reply.headers["x-moongate-prefill-instance"] == "p"
    assert counter(pair.decode.url, EXTERNAL_HITS) - before == reply.prompt_tokens
    assert pair.metric("moongate_pd_handoffs_total", result="failed") == failed
