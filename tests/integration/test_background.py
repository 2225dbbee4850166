"""Responses in the background: asked for now, told later, by whichever engine is there."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, Received
from live_gateway import LiveGateway, live_gateway, until

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]

OUTPUT = [
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
]


class Engine:
    """Answers once it may, by the id that it is asked to use."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.bodies: list[Any] = []

    async def __call__(self, request: Received) -> None:
        body = request.json()
        self.bodies.append(body)
        await self.may_answer.wait()
        answer = {
            "id": body.get("request_id", "resp_x"), "object": "response", "status": "completed",
            "background": False, "previous_response_id": None, "output": OUTPUT,
        }  # fmt: skip
        await request.answer(200, json.dumps(answer).encode())


async def begin(gateway: LiveGateway, **fields: Any) -> Any:
    body = {"model": "m", "input": "hi", "background": True, **fields}
    answer = await gateway.client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def state(gateway: LiveGateway, response_id: str) -> str:
    told = await gateway.client.get(f"/v1/responses/{response_id}")
    status: str = told.json()["status"]
    return status


async def wait_for(gateway: LiveGateway, response_id: str, wanted: str) -> None:
    async with asyncio.timeout(5.0):
        while await state(gateway, response_id) != wanted:
            await asyncio.sleep(0.01)


async def test_it_is_announced_computed_and_told() -> None:
    handler = Engine()
    async with FakeEngine(handler) as engine, live_gateway([engine.url]) as gateway:
        queued = await begin(gateway, instructions="be", metadata={"a": "b"})
        assert queued["status"] == "queued"
        assert queued["id"].startswith("resp_")
        assert (queued["background"], queued["output"]) == (True, [])
        assert (queued["instructions"], queued["metadata"]) == ("be", {"a": "b"})
        assert await state(gateway, queued["id"]) == "in_progress"
        handler.may_answer.set()
        await wait_for(gateway, queued["id"], "completed")
        told = (await gateway.client.get(f"/v1/responses/{queued['id']}")).json()
        assert (told["id"], told["background"], told["output"]) == (queued["id"], True, OUTPUT)
        (sent,) = handler.bodies
        assert sent == {
            "model": "m", "input": "hi", "instructions": "be", "metadata": {"a": "b"},
            "request_id": queued["id"],
        }  # fmt: skip
        assert gateway.inflight() == 0


async def test_it_continues_and_is_continued() -> None:
    handler = Engine()
    async with FakeEngine(handler) as engine, live_gateway([engine.url]) as gateway:
        handler.may_answer.set()
        first = await begin(gateway)
        await wait_for(gateway, first["id"], "completed")
        second = await begin(gateway, input="x", previous_response_id=first["id"])
        await wait_for(gateway, second["id"], "completed")
        told = (await gateway.client.get(f"/v1/responses/{second['id']}")).json()
        assert told["previous_response_id"] == first["id"]
        third = await gateway.client.post(
            "/v1/responses", json={"model": "m", "input": "y", "previous_response_id": second["id"]}
        )
        assert third.status_code == 200
        assert [item["role"] for item in handler.bodies[-1]["input"]] == [
            "user", "assistant", "user", "assistant", "user",
        ]  # fmt: skip


async def test_it_can_be_cancelled_once() -> None:
    handler = Engine()
    async with FakeEngine(handler) as engine, live_gateway([engine.url]) as gateway:
        queued = await begin(gateway)
        await until(lambda: handler.bodies)
        early = await gateway.client.post(
            "/v1/responses", json={"model": "m", "input": "y", "previous_response_id": queued["id"]}
        )
        assert (early.status_code, early.json()["error"]["code"]) == (400, "invalid_request")
        cancelled = await gateway.client.post(f"/v1/responses/{queued['id']}/cancel")
        assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
        await until(engine.received[0].client_left.is_set)
        assert await state(gateway, queued["id"]) == "cancelled"
        await until(lambda: gateway.inflight() == 0)
        again = await gateway.client.post(f"/v1/responses/{queued['id']}/cancel")
        assert again.status_code == 400


async def test_a_failure_is_told() -> None:
    async def refuse(request: Received) -> None:
        await request.answer(400, b'{"error":{"message":"too long","code":400}}')

    async with FakeEngine(refuse) as engine, live_gateway([engine.url]) as gateway:
        queued = await begin(gateway)
        await wait_for(gateway, queued["id"], "failed")
        told = (await gateway.client.get(f"/v1/responses/{queued['id']}")).json()
        assert told["error"] == {"code": "server_error", "message": "too long"}


async def test_it_goes_on_elsewhere_when_its_instance_dies() -> None:
    handler = Engine()
    async with FakeEngine(handler) as one, FakeEngine(handler) as other:
        async with live_gateway([one.url, other.url]) as gateway:
            queued = await begin(gateway)
            await until(lambda: handler.bodies)
            home = one if one.received else other
            handler.may_answer.clear()
            await home.stop()
            handler.may_answer.set()
            await wait_for(gateway, queued["id"], "completed")
            assert len(handler.bodies) == 2
            await home.start()


async def test_it_goes_on_when_its_client_leaves() -> None:
    handler = Engine()
    async with FakeEngine(handler) as engine, live_gateway([engine.url]) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as client:
            body = {"model": "m", "input": "hi", "background": True}
            queued = (await client.post("/v1/responses", json=body)).json()
        handler.may_answer.set()
        await wait_for(gateway, queued["id"], "completed")


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"stream": True}, 400, "stream"),
        ({"input": 3}, 400, "input"),
        ({"previous_response_id": "resp_9"}, 404, "previous_response_id"),
        ({"model": "other"}, 404, "model"),
    ],
)
async def test_what_can_not_be_is_refused_at_once(
    fields: dict[str, Any], status: int, param: str
) -> None:
    async with FakeEngine() as engine, live_gateway([engine.url]) as gateway:
        body = {"model": "m", "input": "hi", "background": True, **fields}
        answer = await gateway.client.post("/v1/responses", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
        assert engine.received == []


async def test_without_a_store_the_engine_is_asked() -> None:
    refusal = b'{"error":{"message":"background can only be used when `store` is true"}}'

    async def answer(request: Received) -> None:
        await request.answer(400, refusal)

    async with FakeEngine(answer) as engine, live_gateway([engine.url]) as gateway:
        body = {"model": "m", "input": "hi", "background": True, "store": False}
        answered = await gateway.client.post("/v1/responses", json=body)
        assert (answered.status_code, answered.content) == (400, refusal)
