"""Simulated engines that answer by a script, over HTTP: what clients get, and what is cached of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest
from pd_fleet import pd_fleet

from moongate.simulator.engine import EngineProfile
from moongate.simulator.script import Script, load_script
from moongate.simulator.server import SimEngine, SimEngineConfig

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "script.yaml"
QUESTION = {"type": "object", "properties": {"question": {"type": "string"}}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"required": [key], **QUESTION}}}
    for name, key in (("grep", "pattern"), ("read_file", "path"), ("ask_reviewer", "question"))
]
FAST = EngineProfile(decode_tokens_per_s=1e4)


@asynccontextmanager
async def engine(script: Script) -> AsyncIterator[str]:
    """Start an engine; yield its address."""
    made = SimEngine(SimEngineConfig(script=script, profile=FAST))
    await made.start()
    try:
        yield made.url
    finally:
        await made.stop()


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        yield client


async def test_the_example_is_a_loop_of_four_turns() -> None:
    messages: list[Any] = [{"role": "user", "content": "Where is the cost?"}]
    called = []
    left_tokens = 0
    async with engine(load_script(EXAMPLE)) as url, client_of(url) as client:
        for _ in range(4):
            answer = await client.chat.completions.create(
                model="sim", messages=messages, tools=TOOLS
            )
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            cached = answer.usage.prompt_tokens_details.cached_tokens
            assert cached == left_tokens // FAST.block_size_tokens * FAST.block_size_tokens
            left_tokens = answer.usage.total_tokens - 1  # nobody has computed the last one
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                called.append((call.function.name, json.loads(call.function.arguments)))  # type: ignore[union-attr]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "x" * 99})
    assert called == [
        ("grep", {"pattern": "def cost"}),
        ("read_file", {"path": "cost.py"}),
        ("read_file", {"path": "policy.py"}),
        ("ask_reviewer", {"question": "text"}),
    ]
    assert message.content == "The cost of a placement is computed in cost.py."


async def test_the_example_has_a_reviewer_and_an_answer_for_everybody() -> None:
    script = load_script(EXAMPLE)
    async with engine(script) as url, client_of(url) as client:

        async def say(*messages: Any, **fields: Any) -> Any:
            answer = await client.chat.completions.create(
                model="sim", messages=messages, max_tokens=50, **fields
            )
            return answer.choices[0].message

        system = {"role": "system", "content": "You are a reviewer."}
        asked = {"role": "user", "content": "Is it the cost?"}
        reviewed = await say(system, asked, tools=TOOLS)
        assert reviewed.tool_calls is not None
        assert reviewed.tool_calls[0].id.startswith("chatcmpl-tool-")
        assert (await say(asked)).content == "It depends."
        other = await say({"role": "user", "content": "Hello"})
        assert other.content not in (None, "", "It depends.")  # what any simulated engine says


SAYS_ALL = {
    "answers": [
        {
            "reasoning": "Hm.",
            "text": "Look 🙂:",
            "calls": [{"name": "grep", "arguments": {"a": "é"}}, {"name": "read_file"}],
        }
    ]
}
ALL_KINDS = [
    *("response.created", "response.in_progress"),
    *("response.output_item.added", "response.content_part.added"),
    *("response.reasoning_text.delta", "response.reasoning_text.done"),
    *("response.content_part.done", "response.output_item.done"),
    *("response.output_item.added", "response.content_part.added"),
    *("response.output_text.delta", "response.output_text.done"),
    *("response.content_part.done", "response.output_item.done"),
    *("response.output_item.added", "response.function_call_arguments.delta"),
    *("response.function_call_arguments.done", "response.output_item.done"),
    *("response.output_item.added", "response.function_call_arguments.delta"),
    *("response.function_call_arguments.done", "response.output_item.done"),
    "response.completed",
]


def events_of(text: str) -> list[dict[str, Any]]:
    lines = (line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: "))
    return [orjson.loads(line) for line in lines if line != "[DONE]"]


async def test_a_streamed_response_has_the_items_of_the_whole_one() -> None:
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body = {"input": "x", "tools": tools}
    async with engine(Script.model_validate([SAYS_ALL])) as url:
        async with httpx.AsyncClient(trust_env=False, base_url=url) as client:
            whole = (await client.post("/v1/responses", json=body)).json()
            stream = await client.post("/v1/responses", json={**body, "stream": True})
    events = events_of(stream.text)
    kinds = [event["type"] for event in events]
    distinct = [kind for n, kind in enumerate(kinds) if n == 0 or kinds[n - 1] != kind]
    assert distinct == ALL_KINDS
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    final = events[-1]["response"]

    def bare(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: value for key, value in item.items() if key != "id"} for item in items]

    assert bare(whole["output"]) == bare(done) == bare(final["output"])
    assert len({item["id"] for item in done}) == 4
    assert final["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert 0 < whole["usage"]["output_tokens_details"]["reasoning_tokens"] < 20


async def test_a_streamed_chat_joins_to_the_whole_one() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "n": 2}
    async with engine(Script.model_validate([SAYS_ALL])) as url:
        async with httpx.AsyncClient(trust_env=False, base_url=url) as client:
            whole = (await client.post("/v1/chat/completions", json=body)).json()
            stream = await client.post("/v1/chat/completions", json={**body, "stream": True})
    told: list[dict[str, Any]] = [{"reasoning": "", "content": "", "calls": {}} for _ in range(2)]
    for choice in (choice for event in events_of(stream.text) for choice in event["choices"]):
        mine, delta = told[choice["index"]], choice["delta"]
        mine["reasoning"] += delta.get("reasoning") or ""
        mine["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            begun = mine["calls"].setdefault(call["index"], {**call, "arguments": ""})
            begun["arguments"] += call["function"]["arguments"]
        mine["finish_reason"] = choice["finish_reason"]
    ids = set()
    for mine, choice in zip(told, whole["choices"], strict=True):
        message = choice["message"]
        assert (mine["reasoning"], mine["content"]) == (message["reasoning"], message["content"])
        assert mine["finish_reason"] == choice["finish_reason"] == "tool_calls"
        for begun, call in zip(mine["calls"].values(), message["tool_calls"], strict=True):
            assert (begun["id"], begun["arguments"]) == (call["id"], call["function"]["arguments"])
            ids.add(call["id"])
    assert len(ids) == 4
    assert [begun["function"]["name"] for begun in told[0]["calls"].values()] == [
        "grep",
        "read_file",
    ]


async def test_a_limit_cuts_a_scripted_answer() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "max_tokens": 40}
    async with engine(Script.model_validate([SAYS_ALL])) as url:
        async with httpx.AsyncClient(trust_env=False, base_url=url) as client:
            whole = (await client.post("/v1/chat/completions", json=body)).json()
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["content"].startswith("\n</think>\n\nLook 🙂:\n<tool_call>")
    assert whole["usage"]["completion_tokens"] == 40


async def test_who_wants_tokens_without_end_gets_any_text() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "max_tokens": 300}
    async with engine(Script.model_validate([SAYS_ALL])) as url:
        async with httpx.AsyncClient(trust_env=False, base_url=url) as client:
            asked = {**body, "ignore_eos": True}
            whole = (await client.post("/v1/chat/completions", json=asked)).json()
    assert whole["usage"]["completion_tokens"] == 300
    assert whole["choices"][0]["finish_reason"] == "length"


async def test_a_choice_of_the_engines_own_tools_forces_no_call() -> None:
    tools = [{"type": "function", **TOOLS[0]["function"]}]
    body = {"input": "x", "tools": tools, "max_output_tokens": 5}
    async with engine(Script.model_validate([{"answers": [{"text": "Yes."}]}])) as url:
        async with httpx.AsyncClient(trust_env=False, base_url=url) as client:
            choices: list[Any] = [{"type": "web_search"}, {"type": "function", "name": "grep"}]
            told = [
                (await client.post("/v1/responses", json={**body, "tool_choice": choice})).json()
                for choice in choices
            ]
    assert told[0]["output"][0]["content"][0]["text"] == "Yes."
    assert told[1]["status"] == "incomplete"  # the call that it forces is longer


async def test_prefill_and_decode_apart_say_the_same() -> None:
    script = Script.model_validate([SAYS_ALL])
    scripted = {"script": script}
    async with pd_fleet(prefill_config=scripted, decode_config=scripted) as fleet:
        body = {
            "model": "m", "messages": [{"role": "user", "content": "long " * 200}], "tools": TOOLS,
        }  # fmt: skip
        answer = await fleet.gateway.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    assert "x-moongate-prefill-instance" in answer.headers
    assert message["content"] == "Look 🙂:"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["grep", "read_file"]
