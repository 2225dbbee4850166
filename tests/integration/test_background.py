"""Responses in the background: asked for now, told later, by whichever engine is there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, Received
from live_gateway import LiveGateway, live_gateway, until

from moongate.gateway.dialects.sse import EDITED_BYTES_MAX
from moongate.gateway.responses import background

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
        ({"input": 3}, 400, "input"),
        ({"previous_response_id": "resp_9"}, 404, "previous_response_id"),
        ({"previous_response_id": 5}, 400, "previous_response_id"),
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


class StreamingEngine:
    """Streams by the id that it is asked to use; each event but the first once it may."""

    def __init__(self, texts: int = 3, *, breaks_off: bool = False) -> None:
        self.turns = asyncio.Semaphore(0)
        self.texts = texts
        self.breaks_off = breaks_off

    def let(self, events: int = 100) -> None:
        for _ in range(events):
            self.turns.release()

    async def __call__(self, request: Received) -> None:
        response = {
            "id": request.json()["request_id"], "object": "response", "status": "in_progress",
            "background": False, "previous_response_id": None, "output": [],
        }  # fmt: skip
        await request.start_stream()
        await self._send(request, 0, "response.created", response=response)
        for number in range(1, self.texts + 1):
            await self.turns.acquire()
            await self._send(request, number, "response.output_text.delta", delta="a")
        await self.turns.acquire()
        if self.breaks_off:
            request.cut()
            return
        done = {**response, "status": "completed", "output": OUTPUT}
        await self._send(request, self.texts + 1, "response.completed", response=done)
        await request.send_chunk(b"")

    async def _send(self, request: Received, number: int, kind: str, **fields: Any) -> None:
        data = json.dumps({"type": kind, "sequence_number": number, **fields})
        await request.send_chunk(f"event: {kind}\ndata: {data}\n\n".encode())


def events_of(text: str) -> list[Any]:
    return [json.loads(part.partition("data: ")[2]) for part in text.split("\n\n") if part]


ASKED = {"model": "m", "input": "hi", "background": True, "stream": True}


async def first_event(answer: httpx.Response) -> Any:
    text = ""
    async for piece in answer.aiter_text():
        text += piece
        if "\n\n" in text:
            break
    return events_of(text)[0]


async def test_its_stream_is_told_to_its_end_and_can_be_told_again_from_anywhere() -> None:
    handler = StreamingEngine()
    async with FakeEngine(handler) as engine, live_gateway([engine.url]) as gateway:
        handler.let()
        answer = await gateway.client.post("/v1/responses", json=ASKED)
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-moongate-instance"]
        told = events_of(answer.text)
        assert [event["sequence_number"] for event in told] == [0, 1, 2, 3, 4]
        assert {told[0]["response"]["background"], told[-1]["response"]["background"]} == {True}
        path = f"/v1/responses/{told[0]['response']['id']}"
        assert (await gateway.client.get(path)).json() == told[-1]["response"]
        again = await gateway.client.get(path, params={"stream": True})
        assert again.text == answer.text
        rest = await gateway.client.get(path, params={"stream": True, "starting_after": 2})
        assert events_of(rest.text) == told[3:]
        none = await gateway.client.get(path, params={"stream": True, "starting_after": 4})
        assert (none.status_code, none.text) == (200, "")
        for wrong in ({"starting_after": -1}, {"starting_after": "x"}, {"stream": "maybe"}):
            refused = await gateway.client.get(path, params={"stream": True, **wrong})
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                400,
                "invalid_request",
            )
            assert next(iter(wrong)) in refused.json()["error"]["message"]
        assert await gateway.metric("moongate_requests_total", route="/v1/responses") == 1


async def test_its_stream_goes_on_without_its_client_which_comes_back() -> None:
    handler = StreamingEngine()
    async with FakeEngine(handler) as engine, live_gateway([engine.url]) as gateway:
        async with gateway.client.stream("POST", "/v1/responses", json=ASKED) as answer:
            first = await first_event(answer)
        path = f"/v1/responses/{first['response']['id']}"
        handler.let(2)
        behind = {"stream": True, "starting_after": 0}
        back = asyncio.create_task(gateway.client.get(path, params=behind))
        other = asyncio.create_task(gateway.client.get(path, params={"stream": True}))
        handler.let()
        assert [e["sequence_number"] for e in events_of((await back).text)] == [1, 2, 3, 4]
        assert len(events_of((await other).text)) == 5
        assert (await gateway.client.get(path)).json()["status"] == "completed"
        assert not engine.received[0].client_left.is_set()
        await until(lambda: gateway.inflight() == 0)


@contextlib.asynccontextmanager
async def streaming(gateway: LiveGateway) -> AsyncIterator[tuple[str, AsyncIterator[str]]]:
    """Begin a response whose stream is read; yield its path and what comes after the first event."""
    async with gateway.client.stream("POST", "/v1/responses", json=ASKED) as answer:
        text = answer.aiter_text()
        (first,) = events_of(await anext(text))
        yield f"/v1/responses/{first['response']['id']}", text


async def test_its_stream_ends_when_it_is_cancelled() -> None:
    handler = StreamingEngine()
    async with FakeEngine(handler) as engine, live_gateway([engine.url]) as gateway:
        async with streaming(gateway) as (path, text):
            cancelled = await gateway.client.post(f"{path}/cancel")
            assert cancelled.json()["status"] == "cancelled"
            (last,) = events_of("".join([piece async for piece in text]))
        assert (last["type"], last["sequence_number"]) == ("response.failed", 1)
        assert last["response"]["status"] == "cancelled"
        await until(engine.received[0].client_left.is_set)
        again = await gateway.client.get(path, params={"stream": True})
        assert [event["type"] for event in events_of(again.text)][-1] == "response.failed"
        await until(lambda: gateway.inflight() == 0)


async def test_its_stream_tells_of_an_engine_that_broke_off() -> None:
    handler = StreamingEngine(breaks_off=True)
    async with FakeEngine(handler) as engine, live_gateway([engine.url]) as gateway:
        handler.let()
        told = events_of((await gateway.client.post("/v1/responses", json=ASKED)).text)
        assert told[-1]["type"] == "response.failed"
        path = f"/v1/responses/{told[0]['response']['id']}"
        stored = (await gateway.client.get(path)).json()
        assert (stored["status"], stored["error"]["code"]) == ("failed", "server_error")


async def test_an_engine_that_refuses_a_stream_is_heard_at_once() -> None:
    refusal = b'{"error":{"message":"too long","code":400}}'

    async def refuse(request: Received) -> None:
        await request.answer(400, refusal)

    async with FakeEngine(refuse) as engine, live_gateway([engine.url]) as gateway:
        answer = await gateway.client.post("/v1/responses", json=ASKED)
        assert (answer.status_code, answer.content) == (400, refusal)


async def test_a_client_that_leaves_before_it_knows_the_name_ends_it() -> None:
    async def never(request: Received) -> None:
        await request.client_left.wait()

    async with FakeEngine(never) as engine, live_gateway([engine.url]) as gateway:
        with pytest.raises(httpx.ReadTimeout):
            await gateway.client.post("/v1/responses", json=ASKED, timeout=0.3)
        await until(engine.received[0].client_left.is_set)
        await until(lambda: gateway.inflight() == 0)


async def test_only_a_stream_can_be_told_as_one() -> None:
    handler = Engine()
    async with FakeEngine(handler) as engine, live_gateway([engine.url]) as gateway:
        handler.may_answer.set()
        queued = await begin(gateway)
        await wait_for(gateway, queued["id"], "completed")
        path = f"/v1/responses/{queued['id']}"
        answer = await gateway.client.get(path, params={"stream": True})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")
        unknown = await gateway.client.get("/v1/responses/resp_x", params={"stream": True})
        assert unknown.status_code == 404


async def test_what_is_deleted_ends_and_stays_gone() -> None:
    handler = StreamingEngine()
    async with FakeEngine(handler) as engine, live_gateway([engine.url]) as gateway:
        async with streaming(gateway) as (path, text):
            assert (await gateway.client.delete(path)).json()["deleted"] is True
            with pytest.raises(httpx.RemoteProtocolError):
                async for _ in text:
                    pass
        await until(engine.received[0].client_left.is_set)
        await until(lambda: gateway.inflight() == 0)
        handler.let()
        assert (await gateway.client.get(path)).status_code == 404
        assert (await gateway.client.post(f"{path}/cancel")).status_code == 404


async def test_what_can_not_be_written_again_is_refused() -> None:
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    async with FakeEngine() as engine, live_gateway([engine.url]) as gateway:
        body = {"model": "m", "input": "hi", "background": True, "metadata": {"a": deep}}
        answer = await gateway.client.post("/v1/responses", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
        assert await gateway.metric("moongate_requests_total", code="400") == 1


async def test_without_room_for_responses_there_is_no_background() -> None:
    async with FakeEngine() as engine:
        async with live_gateway([engine.url], responses={"bytes_max": 0}) as gateway:
            body = {"model": "m", "input": "hi", "background": True}
            answer = await gateway.client.post("/v1/responses", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "background")


async def test_an_end_mark_behind_the_end_changes_nothing() -> None:
    async def answer(request: Received) -> None:
        response = {"id": request.json()["request_id"], "status": "completed", "output": OUTPUT}
        data = json.dumps(
            {"type": "response.completed", "sequence_number": 0, "response": response}
        )
        await request.start_stream()
        event = f"event: response.completed\ndata: {data}\n\ndata: [DONE]\n\n"
        await request.send_chunk(event.encode())
        await request.send_chunk(b"")

    async with FakeEngine(answer) as engine, live_gateway([engine.url]) as gateway:
        text = (await gateway.client.post("/v1/responses", json=ASKED)).text
        name = json.loads(text.partition("data: ")[2].partition("\n")[0])["response"]["id"]
        await wait_for(gateway, name, "completed")


# --- when the gateway stops -----------------------------------------------------------------------


async def test_what_runs_may_end_before_the_gateway_does() -> None:
    handler = Engine()
    async with FakeEngine(handler) as engine:
        async with live_gateway([engine.url], drain={"limit_s": 20.0}) as gateway:
            queued = await begin(gateway)
            await until(lambda: handler.bodies)
            store = gateway.server.gateway._hot_path.background._turns.store  # type: ignore[union-attr]
            gateway.server.request_stop()
            await asyncio.sleep(0.5)
            assert not engine.received[0].client_left.is_set()

            def status() -> str:
                found = store.find("", queued["id"], time.monotonic())
                assert found is not None
                told: str = json.loads(found.response)["status"]
                return told

            assert status() == "in_progress"
            handler.may_answer.set()
            await until(lambda: status() == "completed")


@pytest.mark.parametrize("signals", [1, 2])
async def test_what_the_gateway_has_no_time_for_has_failed_and_is_told_so(signals: int) -> None:
    handler = StreamingEngine()
    async with FakeEngine(handler) as engine:
        limit_s = {1: 0.3, 2: 30.0}[signals]
        async with live_gateway([engine.url], drain={"limit_s": limit_s}) as gateway:
            store = gateway.server.gateway._hot_path.background._turns.store  # type: ignore[union-attr]
            async with streaming(gateway) as (path, text):
                for _ in range(signals):
                    gateway.server.request_stop()
                (last,) = events_of("".join([piece async for piece in text]))
        await until(engine.received[0].client_left.is_set)
    assert (last["type"], last["sequence_number"]) == ("response.failed", 1)
    found = store.find("", path.rpartition("/")[2], time.monotonic())
    assert found is not None
    assert json.loads(found.response) == last["response"]
    assert last["response"]["status"] == "failed"
    assert "the gateway that computed it has stopped" in last["response"]["error"]["message"]


# --- how many there are ---------------------------------------------------------------------------


async def test_no_tenant_has_more_than_half_of_the_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "RUNNING_MAX", 4)
    monkeypatch.setenv("KEY_A", "sk-alpha")
    monkeypatch.setenv("KEY_B", "sk-beta")
    keys = [{"tenant": "a", "key_env": "KEY_A"}, {"tenant": "b", "key_env": "KEY_B"}]
    handler = Engine()
    body = {"model": "m", "input": "hi", "background": True}

    async with FakeEngine(handler) as engine:
        async with live_gateway([engine.url], auth={"keys": keys}) as gateway:

            async def ask(key: str) -> httpx.Response:
                headers = {"x-api-key": key}
                return await gateway.client.post("/v1/responses", json=body, headers=headers)

            at_once = await asyncio.gather(*(ask("sk-alpha") for _ in range(6)))
            assert sorted(answer.status_code for answer in at_once) == [200] * 2 + [429] * 4
            refused = next(answer for answer in at_once if answer.status_code == 429)
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "queue_full"
            assert [(await ask("sk-beta")).status_code for _ in range(3)] == [200, 200, 503]
            handler.may_answer.set()
            await until(lambda: gateway.inflight() == 0)
            assert (await ask("sk-alpha")).status_code == 200


async def test_without_keys_all_places_are_everybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "RUNNING_MAX", 4)
    handler = Engine()
    body = {"model": "m", "input": "hi", "background": True}
    async with FakeEngine(handler) as engine, live_gateway([engine.url]) as gateway:
        asked = [await gateway.client.post("/v1/responses", json=body) for _ in range(5)]
        assert [answer.status_code for answer in asked] == [200] * 4 + [503]
        handler.may_answer.set()


async def test_no_tenant_has_more_than_half_of_the_room_for_what_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KEY_A", "sk-alpha")
    monkeypatch.setenv("KEY_B", "sk-beta")
    keys = [{"tenant": "a", "key_env": "KEY_A"}, {"tenant": "b", "key_env": "KEY_B"}]

    async def fill(request: Received) -> None:
        await request.start_stream()
        await request.send_chunk(b"event: x\ndata: {}\n\n" + b": filling\n\n" * 2000)
        await request.client_left.wait()

    async with FakeEngine(fill) as engine:
        auth, responses = {"keys": keys}, {"bytes_max": 40_000}
        async with live_gateway([engine.url], auth=auth, responses=responses) as gateway:
            statuses = []
            for key in ("sk-alpha", "sk-alpha", "sk-beta"):
                headers = {"x-api-key": key}
                async with gateway.client.stream(
                    "POST", "/v1/responses", json=ASKED, headers=headers
                ) as answer:
                    statuses.append(answer.status_code)
                    if answer.status_code == 200:
                        text = ""
                        async for piece in answer.aiter_text():
                            text += piece
                            if len(text) > 21_000:
                                break
            assert statuses == [200, 429, 200]


async def test_a_stream_of_more_than_is_kept_fails_and_its_engine_is_told_to_stop() -> None:
    handler = StreamingEngine(texts=1000)
    kept = {"bytes_max": 20_000}
    async with (
        FakeEngine(handler) as engine,
        live_gateway([engine.url], responses=kept) as gateway,
    ):
        handler.let(1000)
        told = events_of((await gateway.client.post("/v1/responses", json=ASKED)).text)
        message = "the answer is longer than 20000 bytes"
        assert told[-1]["response"]["error"] == {"code": "server_error", "message": message}
        assert told[-1]["sequence_number"] == len(told) - 1 < 1000
        await until(engine.received[0].client_left.is_set)
        path = f"/v1/responses/{told[0]['response']['id']}"
        stored = (await gateway.client.get(path)).json()
        assert (stored["status"], stored["error"]["message"]) == ("failed", message)
        again = events_of((await gateway.client.get(path, params={"stream": True})).text)
        assert again == told[-1:]
        await until(lambda: gateway.inflight() == 0)


async def test_an_event_that_is_too_long_to_be_changed_ends_a_background_stream() -> None:
    async def answer(request: Received) -> None:
        await request.start_stream()
        await request.send_chunk(b'event: response.created\ndata: {"type":"response.created",')
        await request.send_chunk(b'"x":"' + b"x" * EDITED_BYTES_MAX)
        await request.client_left.wait()

    async with FakeEngine(answer) as engine, live_gateway([engine.url]) as gateway:
        (last,) = events_of((await gateway.client.post("/v1/responses", json=ASKED)).text)
        message = f"an event of the answer is longer than {EDITED_BYTES_MAX} bytes"
        assert last["response"]["error"]["message"] == message
        await until(lambda: gateway.inflight() == 0)


async def test_a_whole_answer_of_more_than_is_kept_fails() -> None:
    async def answer(request: Received) -> None:
        await request.answer(200, json.dumps({"output": OUTPUT, "x": "x" * 20_000}).encode())

    async with (
        FakeEngine(answer) as engine,
        live_gateway([engine.url], responses={"bytes_max": 20_000}) as gateway,
    ):
        response_id = (await begin(gateway))["id"]
        await wait_for(gateway, response_id, "failed")
        stored = (await gateway.client.get(f"/v1/responses/{response_id}")).json()
        assert stored["error"]["message"] == "the answer is longer than 20000 bytes"
        await until(lambda: gateway.inflight() == 0)
