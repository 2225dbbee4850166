"""Token ids handed to a real engine: the same answers, and sooner."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from processes import Child, EngineProcess, Serve

from moongate.engine_plugins.vllm_render import ModelRenderer

EnginePair = tuple[EngineProcess, EngineProcess]

CONVERSATION_TOKENS = 14_000
PAIRS = 30
SIZES_TOKENS = (250, 500, 1_000, 2_000, 4_000)
SIZE_PAIRS = 15
WARM_UP_PAIRS = 3
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {}}}},
    }
]
USER = {"role": "user", "content": "Grüße, 世界 🙂 <|im_start|>"}
THOUGHT = {"role": "assistant", "reasoning": "so", "content": "b", "tool_calls": []}

BODIES: dict[str, dict[str, Any]] = {
    "plain": {"messages": [USER]},
    "several turns": {"messages": [{"role": "system", "content": " s "}, USER, THOUGHT, USER]},
    "tools": {"messages": [USER], "tools": TOOLS},
    "required tool": {"messages": [USER], "tools": TOOLS, "tool_choice": "required"},
    "no tool may be used": {"messages": [USER], "tools": TOOLS, "tool_choice": "none"},
    "structured": {"messages": [USER], "response_format": {"type": "json_object"}},
    "log probabilities": {"messages": [USER], "logprobs": True, "top_logprobs": 2},
    "salt": {"messages": [USER], "cache_salt": "t"},
    "continued": {
        "messages": [USER, {"role": "assistant", "content": "begun"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
}


def conversation(model: Path, tokens: int = CONVERSATION_TOKENS) -> list[dict[str, Any]]:
    """Return a conversation of about so many tokens."""
    renderer = ModelRenderer.load(model)
    words_each = min(150, tokens // 60)
    messages: list[dict[str, Any]] = []
    while True:
        words = " ".join(f"word{len(messages)}x{n} and more" for n in range(words_each))
        role = "assistant" if len(messages) % 2 else "user"
        messages.append({"role": role, "content": words})
        count = len(renderer.chat_token_ids({"messages": messages}))
        if count >= tokens and role == "user":
            assert count < tokens * 1.5
            return messages


def answer_of(client: httpx.Client, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return what an answer says, without what differs from one to the next."""
    fields = {"model": "tiny", "max_tokens": 12, "temperature": 0, **body}
    answer = client.post(f"{url}/v1/chat/completions", json=fields)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    choice = found["choices"][0]
    calls = choice["message"].get("tool_calls") or []
    return {
        "content": choice["message"]["content"],
        "calls": [call["function"] for call in calls],
        "finish_reason": choice["finish_reason"],
        "logprobs": choice["logprobs"] and [t["token"] for t in choice["logprobs"]["content"]],
        "prompt_tokens": found["usage"]["prompt_tokens"],
        "completion_tokens": found["usage"]["completion_tokens"],
    }


def forwarded_with_ids(client: httpx.Client, gateway: Child) -> float:
    lines = client.get(f"{gateway.url}/metrics").text.splitlines()
    values = [line for line in lines if line.startswith("moongate_ids_forwarded_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in values)


def test_answers_are_the_same_with_and_without_ids(
    tiny_model: Path, engines: EnginePair, serve: Serve
) -> None:
    gateway = serve(engines[:1], tokenizer={"forward_ids": "on"})
    bodies = {**BODIES, "long": {"messages": conversation(tiny_model)}}
    with httpx.Client(timeout=60) as client:
        for name, body in bodies.items():
            before = forwarded_with_ids(client, gateway)
            through = answer_of(client, gateway.url, body)
            took_ids = forwarded_with_ids(client, gateway) - before
            assert through == answer_of(client, engines[0].url, body), name
            assert took_ids == (0 if name == "no tool may be used" else 1), name


def test_too_long_a_prompt_is_refused_as_by_the_engine(engines: EnginePair, serve: Serve) -> None:
    gateway = serve(engines[:1], tokenizer={"forward_ids": "on"})
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "many words " * 20_000}],
        "stream": True,
    }
    with httpx.Client(timeout=60) as client:
        for _ in range(2):  # the second time its ids are known
            answers = [
                client.post(f"{url}/v1/chat/completions", json=body)
                for url in (gateway.url, engines[0].url)
            ]
            assert [answer.status_code for answer in answers] == [400, 400]
            assert answers[0].json()["error"] == answers[1].json()["error"]


@pytest.mark.timeout(280)
def test_the_first_token_comes_earlier_than_directly(
    tiny_model: Path, engines: EnginePair, serve: Serve
) -> None:
    gateway = serve(engines[:1])  # `auto`: a conversation of this length pays
    urls = {"direct": engines[0].url, "gateway": gateway.url}
    with httpx.Client(timeout=60) as client:
        times = first_tokens_ms(client, urls, conversation(tiny_model), PAIRS)
        assert forwarded_with_ids(client, gateway) == PAIRS + WARM_UP_PAIRS
    gain = median_gain_ms(times["direct"], times["gateway"])
    print(
        f"\nfirst token of {CONVERSATION_TOKENS} warm tokens, median of {PAIRS} pairs: direct"
        f" {statistics.median(times['direct']):.1f} ms, through the gateway with forwarded ids"
        f" {statistics.median(times['gateway']):.1f} ms, gain {gain:.1f} ms"
    )
    assert gain > 0


@pytest.mark.timeout(280)
def test_ids_pay_for_prompts_that_are_not_short(
    tiny_model: Path, engines: EnginePair, serve: Serve
) -> None:
    urls = {way: serve(engines[:1], tokenizer={"forward_ids": way}).url for way in ("off", "on")}
    gains = {}
    with httpx.Client(timeout=60) as client:
        for tokens in SIZES_TOKENS:
            messages = conversation(tiny_model, tokens)
            times = first_tokens_ms(client, urls, messages, SIZE_PAIRS)
            gains[tokens] = median_gain_ms(times["off"], times["on"])
            print(
                f"\nfirst token of {tokens} warm tokens through the gateway, median of"
                f" {SIZE_PAIRS} pairs: without ids {statistics.median(times['off']):.1f} ms, with"
                f" ids {statistics.median(times['on']):.1f} ms, gain {gains[tokens]:.1f} ms"
            )
    assert gains[SIZES_TOKENS[-1]] > 0


def first_tokens_ms(
    client: httpx.Client, urls: dict[str, str], messages: list[dict[str, Any]], pairs: int
) -> dict[str, list[float]]:
    """Return how long first events take by each way, asked in turns; the first pairs warm up."""
    body = {
        "model": "tiny", "messages": messages, "max_tokens": 2, "temperature": 0, "stream": True
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in urls}
    for pair in range(pairs + WARM_UP_PAIRS):
        for name in sorted(urls, reverse=bool(pair % 2)):
            took_ms = first_token_ms(client, urls[name], body)
            if pair >= WARM_UP_PAIRS:
                times[name].append(took_ms)
    return times


def first_token_ms(client: httpx.Client, url: str, body: dict[str, Any]) -> float:
    began = time.perf_counter()
    with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        took_s = None
        for line in answer.iter_lines():
            if took_s is None and line.startswith("data:"):
                took_s = time.perf_counter() - began
        assert took_s is not None
        return took_s * 1000


def median_gain_ms(before: list[float], after: list[float]) -> float:
    return statistics.median(b - a for b, a in zip(before, after, strict=True))
