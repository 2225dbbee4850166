"""Responses and Messages before simulated engines: routed by prefix, with the reuse that was predicted."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from live_gateway import LiveGateway
from pd_fleet import PROFILE, pd_fleet

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

SYSTEM = "You are an agent that writes def and class. " * 20


def is_as_predicted(answer: httpx.Response, cached_tokens: int) -> bool:
    """These engines announce nothing: what was forwarded is known to a block."""
    expected = int(answer.headers["x-moongate-device-tokens"])
    return expected <= cached_tokens <= expected + PROFILE.block_size_tokens


async def post(gateway: LiveGateway, path: str, **fields: Any) -> httpx.Response:
    answer = await gateway.client.post(path, json={"model": "m", **fields})
    assert answer.status_code == 200, answer.text
    return answer


async def test_a_chain_of_responses_stays_at_home() -> None:
    async with pd_fleet(prefill=0, decode=0, both=3) as fleet:
        previous = None
        homes = set()
        for turn in range(6):
            answer = await post(
                fleet.gateway, "/v1/responses", input=f"turn {turn} " * 30, instructions=SYSTEM,
                max_output_tokens=4, previous_response_id=previous,
            )  # fmt: skip
            told = answer.json()
            assert told["previous_response_id"] == previous
            cached = told["usage"]["input_tokens_details"]["cached_tokens"]
            assert is_as_predicted(answer, cached)
            homes.add(answer.headers["x-moongate-instance"])
            if previous is not None:
                assert answer.headers["x-moongate-reason"] == "device_prefix"
            previous = told["id"]
        assert len(homes) == 1
        assert await fleet.gateway.metric("moongate_route_fallback_total") == 0


async def test_messages_reach_simulated_engines_by_way_of_chats() -> None:
    async with pd_fleet(prefill=0, decode=0, both=2) as fleet:
        messages: list[dict[str, Any]] = []
        for turn in range(4):
            messages.append({"role": "user", "content": f"turn {turn} " * 30})
            answer = await post(
                fleet.gateway, "/v1/messages", system=SYSTEM, messages=messages, max_tokens=4
            )
            told = answer.json()
            assert is_as_predicted(answer, told["usage"]["cache_read_input_tokens"])
            assert told["stop_reason"] == "max_tokens"
            messages.append({"role": "assistant", "content": told["content"]})
        counted = await post(
            fleet.gateway, "/v1/messages/count_tokens", system=SYSTEM, messages=messages
        )
        assert counted.json()["input_tokens"] > told["usage"]["input_tokens"]
        assert await fleet.gateway.metric("moongate_route_fallback_total") == 0


async def test_openai_python_reads_simulated_responses() -> None:
    async with pd_fleet(prefill=0, decode=0, both=1) as fleet:
        url = f"{fleet.gateway.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:
            first = await client.responses.create(model="m", input="hello")
            assert (first.status, bool(first.output_text)) == ("completed", True)
            async with client.responses.stream(
                model="m", input="more", previous_response_id=first.id, max_output_tokens=3
            ) as stream:
                kinds = [event.type async for event in stream]
                final = await stream.get_final_response()
            assert (final.status, final.previous_response_id) == ("incomplete", first.id)
            assert kinds[:2] == ["response.created", "response.in_progress"]
            assert kinds.count("response.output_text.delta") == 3
            with pytest.raises(openai.NotFoundError):
                await client.responses.create(model="m", input="x", previous_response_id="resp_0")
            for wrong in (
                {"max_output_tokens": 0},
                {"input": [3]},
                {"temperature": "x", "input": 5},
            ):
                with pytest.raises(openai.BadRequestError):
                    await client.responses.create(**{"model": "m", "input": "x", **wrong})  # type: ignore[call-overload]


async def test_an_engine_asked_itself_keeps_nothing() -> None:
    async with pd_fleet(prefill=0, decode=0, both=1) as fleet:
        url = fleet.both[0].url
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            for fields, status in (
                ({"input": "x", "previous_response_id": "resp_1"}, 404),
                ({"input": "x", "background": True}, 400),
                ({}, 400),
                ({"input": "x", "stream": 1}, 400),
                ({"input": "x", "model": "other"}, 404),
            ):
                answer = await client.post("/v1/responses", json={"model": "m", **fields})
                assert answer.status_code == status, answer.text
