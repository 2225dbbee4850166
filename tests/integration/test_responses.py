"""Responses go on wherever there is an instance; each API's streams end in their own way."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, Received, chat_answer, stream_event
from live_gateway import LiveGateway, live_gateway, until

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]

OUTPUT = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "yes", "annotations": []}],
}


def response(number: int, **fields: Any) -> bytes:
    """Return a response object as vLLM writes it: no spaces."""
    value = {
        "id": f"resp_{number}", "object": "response", "status": "completed", "output": [OUTPUT],
        "previous_response_id": None, **fields,
    }  # fmt: skip
    return json.dumps(value, separators=(",", ":")).encode()


def event(kind: str, number: int, **fields: Any) -> bytes:
    data = b'{"type":"response.%b","sequence_number":%d,"response":%b}'
    whole = data % (kind.encode(), number, response(1, **fields))
    return b"event: response.%b\ndata: %b\n\n" % (kind.encode(), whole)


class Answering:
    """Answers with responses that are counted."""

    def __init__(self) -> None:
        self.count = 0

    async def __call__(self, request: Received) -> None:
        self.count += 1
        if not request.json().get("stream"):
            await request.answer(200, response(self.count))
            return
        await request.start_stream()
        await request.send_chunk(event("created", 0, output=[], status="in_progress"))
        await request.send_chunk(event("completed", 1))
        await request.send_chunk(b"")


async def ask(gateway: LiveGateway, **fields: Any) -> Any:
    answer = await gateway.client.post("/v1/responses", json={"model": "m", **fields})
    assert answer.status_code == 200, answer.text
    return answer


async def test_a_response_goes_on_after_the_death_of_the_instance_that_answered() -> None:
    answering = Answering()
    async with FakeEngine(answering) as one, FakeEngine(answering) as other:
        async with live_gateway([one.url, other.url]) as gateway:
            first = await ask(gateway, input="hi", instructions="be")
            assert first.content == response(1)
            home, survivor = (one, other) if one.received else (other, one)
            await home.stop()
            second = await ask(gateway, input="more", previous_response_id="resp_1")
            assert second.json()["previous_response_id"] == "resp_1"
            (sent,) = survivor.bodies
            assert sent == {
                "model": "m",
                "input": [
                    {"role": "user", "content": "hi"}, OUTPUT, {"role": "user", "content": "more"},
                ],
            }  # fmt: skip
            again = await gateway.client.get("/v1/responses/resp_2")
            assert (again.status_code, again.content) == (200, second.content)
            await home.start()


async def test_a_streamed_response_can_be_continued_at_once() -> None:
    async with FakeEngine(Answering()) as engine, live_gateway([engine.url]) as gateway:
        body = {"model": "m", "input": "hi", "stream": True}
        async with gateway.client.stream("POST", "/v1/responses", json=body) as stream:
            text = b""
            async for chunk in stream.aiter_raw():
                text += chunk
                if b"response.completed" in text:
                    break
            # Its end has not come, but what it said has.
            told = await gateway.client.get("/v1/responses/resp_1")
        assert told.content == response(1)


async def test_a_continued_stream_names_what_it_continues() -> None:
    async with FakeEngine(Answering()) as engine, live_gateway([engine.url]) as gateway:
        await ask(gateway, input="hi")
        stream = await ask(gateway, input="x", previous_response_id="resp_1", stream=True)
        assert stream.text.count('"previous_response_id":"resp_1"') == 2
        assert '"previous_response_id":null' not in stream.text


async def test_what_is_not_stored_is_not_there() -> None:
    async with FakeEngine(Answering()) as engine, live_gateway([engine.url]) as gateway:
        await ask(gateway, input="hi", store=False)
        for answer in (
            await gateway.client.get("/v1/responses/resp_1"),
            await gateway.client.delete("/v1/responses/resp_1"),
            await gateway.client.post("/v1/responses/resp_1/cancel"),
            await gateway.client.post(
                "/v1/responses", json={"model": "m", "input": "x", "previous_response_id": "resp_1"}
            ),
        ):
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "response_not_found"
        assert len(engine.received) == 1


@pytest.mark.parametrize("more", [{}, {"background": True}])
async def test_a_conversation_is_held_to_the_limits_of_a_body(more: dict[str, Any]) -> None:
    limits = {"body_bytes_max": 20_000, "messages_max": 5}
    async with (
        FakeEngine(Answering()) as engine,
        live_gateway([engine.url], limits=limits) as gateway,
    ):

        async def post(text: str, previous: str | None = None, **fields: Any) -> httpx.Response:
            body = {"model": "m", "input": text, "previous_response_id": previous, **fields}
            return await gateway.client.post("/v1/responses", json=body)

        long = (await post("x" * 15_000)).json()["id"]
        refused = await post("y" * 6_000, long, **more)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")
        name: str | None = None
        for _ in range(3):  # with each answer's item 5 in the end
            turn = await post("x", name)
            assert turn.status_code == 200
            name = turn.json()["id"]
        asked = len(engine.received)
        refused = await post("x", name)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
        assert "messages_max" in refused.text
        assert len(engine.received) == asked


async def test_a_deleted_response_is_gone_and_a_finished_one_can_not_be_cancelled() -> None:
    async with FakeEngine(Answering()) as engine, live_gateway([engine.url]) as gateway:
        await ask(gateway, input="hi")
        cancelled = await gateway.client.post("/v1/responses/resp_1/cancel")
        assert cancelled.status_code == 400
        deleted = await gateway.client.delete("/v1/responses/resp_1")
        assert deleted.json() == {"id": "resp_1", "object": "response", "deleted": True}
        assert (await gateway.client.get("/v1/responses/resp_1")).status_code == 404


async def test_with_no_room_nothing_is_kept() -> None:
    async with (
        FakeEngine(Answering()) as engine,
        live_gateway([engine.url], responses={"bytes_max": 0}) as gateway,
    ):
        await ask(gateway, input="hi")
        assert (await gateway.client.get("/v1/responses/resp_1")).status_code == 404


async def test_engines_are_not_asked_to_compress_what_is_read_here() -> None:
    async def answer(request: Received) -> None:
        packs = "gzip" in request.headers.get("accept-encoding", "")
        packed = gzip.compress(response(1))
        headers = {"content-encoding": "gzip"} if packs else {}
        await request.answer(200, packed if packs else response(1), headers)

    async with FakeEngine(answer) as engine, live_gateway([engine.url]) as gateway:
        assert (await ask(gateway, input="hi")).content == response(1)
        assert (await gateway.client.get("/v1/responses/resp_1")).status_code == 200
        await ask(gateway, input="hi", store=False)
        assert "gzip" in engine.received[-1].headers["accept-encoding"]


async def test_an_engines_refusal_passes_and_is_not_kept() -> None:
    refusal = b'{"error":{"message":"no","type":"invalid_request_error","param":null,"code":400}}'

    async def answer(request: Received) -> None:
        await request.answer(400, refusal)

    async with FakeEngine(answer) as engine, live_gateway([engine.url]) as gateway:
        refused = await gateway.client.post("/v1/responses", json={"model": "m", "input": [3]})
        assert (refused.status_code, refused.content) == (400, refusal)
        assert refused.headers["content-length"] == str(len(refusal))


async def test_an_answer_that_breaks_off_is_not_kept() -> None:
    async def answer(request: Received) -> None:
        await request.send(b"HTTP/1.1 200 OK\r\ncontent-length: 900\r\n\r\n" + response(1))
        await asyncio.sleep(0.05)
        request.cut()

    async with FakeEngine(answer) as engine, live_gateway([engine.url]) as gateway:
        with pytest.raises(httpx.RemoteProtocolError):
            await ask(gateway, input="hi")
        assert (await gateway.client.get("/v1/responses/resp_1")).status_code == 404
        await until(lambda: gateway.inflight() == 0)


async def test_a_response_that_breaks_off_ends_as_failed() -> None:
    async def answer(request: Received) -> None:
        await request.start_stream()
        await request.send_chunk(event("created", 0, output=[], status="in_progress"))
        await request.send_chunk(b'event: x\ndata: {"sequence_number":4}\n\n')
        await asyncio.sleep(0.05)
        request.cut()

    async with FakeEngine(answer) as engine, live_gateway([engine.url]) as gateway:
        text = (await ask(gateway, input="hi", stream=True)).text
    name, data = text.split("\n\n")[2].split("\n")
    failed = json.loads(data.removeprefix("data: "))
    assert name == "event: response.failed"
    assert (failed["type"], failed["sequence_number"]) == ("response.failed", 5)
    assert (failed["response"]["id"], failed["response"]["status"]) == ("resp_1", "failed")
    assert failed["response"]["error"]["code"] == "server_error"


async def test_a_response_that_the_gateway_cuts_has_its_name_and_goes_on_counting() -> None:
    async def begin(request: Received) -> None:
        await request.start_stream()
        await request.send_chunk(event("created", 0, output=[], status="in_progress"))
        await request.send_chunk(event("in_progress", 4, output=[], status="in_progress"))
        await asyncio.sleep(60)

    async with FakeEngine(begin) as engine:
        async with live_gateway([engine.url], drain={"limit_s": 0.3}) as gateway:
            asking = asyncio.create_task(ask(gateway, input="hi", stream=True))
            await until(lambda: engine.received)
            await asyncio.sleep(0.2)
            gateway.server.request_stop()
            text = (await asking).text
    last = json.loads(text.strip().rpartition("data: ")[2])
    assert (last["type"], last["sequence_number"]) == ("response.failed", 5)
    assert (last["response"]["id"], last["response"]["status"]) == ("resp_1", "failed")
    assert last["response"]["error"]["message"] == "the gateway is stopping"


async def test_a_message_that_breaks_off_ends_with_its_own_error() -> None:
    start = b'event: message_start\ndata: {"type":"message_start"}\n\n'

    async def answer(request: Received) -> None:
        await request.start_stream()
        await request.send_chunk(start)
        await asyncio.sleep(0.05)
        request.cut()

    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    async with FakeEngine(answer) as engine, live_gateway([engine.url]) as gateway:
        text = (await gateway.client.post("/v1/messages", json={**body, "stream": True})).content
        unknown = await gateway.client.post("/v1/messages", json={**body, "model": "other"})
    assert text.startswith(
        start + b'event: error\ndata: {"type":"error","error":{"type":"api_error"'
    )
    assert unknown.status_code == 404
    assert unknown.json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("query", "body", "status"),
    [
        ("", {"input": "hi"}, 200),
        ("", {"system": "s", "messages": [{"role": "user", "content": "x"}]}, 200),
        ("?route=/v1/messages", {"messages": [{"role": "user", "content": "x"}]}, 200),
        ("?route=/v1/nothing", {"input": "hi"}, 400),
        ("", {"input": "hi", "previous_response_id": "resp_9"}, 404),
    ],
)
async def test_every_kind_of_request_can_be_explained(
    query: str, body: dict[str, Any], status: int
) -> None:
    async with FakeEngine() as engine, live_gateway([engine.url]) as gateway:
        answer = await gateway.client.post(f"/admin/explain{query}", json={"model": "m", **body})
    assert answer.status_code == status, answer.text


async def test_an_alias_is_renamed_both_ways_and_what_is_kept_has_it_too() -> None:
    async def answer(request: Received) -> None:
        assert request.json()["model"] == "m"
        if request.json().get("stream"):
            await request.start_stream()
            await request.send_chunk(event("created", 0, model="m"))
            await request.send_chunk(event("completed", 1, model="m"))
            await request.send_chunk(b"")
        else:
            await request.answer(200, response(1, model="m"))

    async with (
        FakeEngine(answer) as engine,
        live_gateway([engine.url], models={"aliases": {"gpt": "m"}}) as gateway,
    ):
        for stream in (False, True):
            told = await gateway.client.post(
                "/v1/responses", json={"model": "gpt", "input": "hi", "stream": stream}
            )
            assert told.status_code == 200
            assert told.text.count('"model":"gpt"') == (2 if stream else 1)
            assert '"model":"m"' not in told.text
            kept = await gateway.client.get("/v1/responses/resp_1")
            assert kept.json()["model"] == "gpt"
        plain = await gateway.client.post("/v1/responses", json={"model": "m", "input": "hi"})
        assert plain.content == response(1, model="m")
        models = (await gateway.client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in models] == ["m", "gpt"]
        explained = await gateway.client.post(
            "/admin/explain", json={"model": "gpt", "input": "hi"}
        )
        assert explained.status_code == 200


# --- messages, where an engine has none -----------------------------------------------------------

MESSAGE = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}


async def test_an_engine_without_messages_is_asked_by_way_of_chats() -> None:
    async def answer(request: Received) -> None:
        assert request.path == "/v1/chat/completions"
        assert request.json()["messages"] == MESSAGE["messages"]
        if not request.json().get("stream"):
            await request.answer(200, chat_answer("yes", cached_tokens=4))
            return
        await request.start_stream()
        await request.send_chunk(stream_event("ye"))
        await request.send_chunk(stream_event("s") + b"data: [DONE]\n\n")
        await request.send_chunk(b"")

    async with FakeEngine(answer) as engine:
        engine.has_messages = False
        async with live_gateway([engine.url]) as gateway:
            whole = await gateway.client.post("/v1/messages?beta=true", json=MESSAGE)
            assert whole.json()["content"] == [{"type": "text", "text": "yes"}]
            assert whole.json()["usage"]["cache_read_input_tokens"] == 4
            assert await gateway.metric("moongate_delivered_cached_tokens_total") == 4
            stream = await gateway.client.post("/v1/messages", json={**MESSAGE, "stream": True})
            kinds = [line[7:] for line in stream.text.split("\n") if line.startswith("event: ")]
            assert kinds == [
                "message_start", "content_block_start", "content_block_delta",
                "content_block_delta", "content_block_stop", "message_delta", "message_stop",
            ]  # fmt: skip
            assert gateway.inflight() == 0


async def test_its_errors_and_refusals_have_the_messages_shape() -> None:
    async def answer(request: Received) -> None:
        await request.answer(400, b'{"error":{"message":"too long","type":"x","code":400}}')

    async with FakeEngine(answer) as engine:
        engine.has_messages = False
        async with live_gateway([engine.url]) as gateway:
            refused = await gateway.client.post("/v1/messages", json=MESSAGE)
            assert refused.status_code == 400
            assert refused.json()["error"] == {
                "type": "invalid_request_error",
                "message": "too long",
            }
            odd = {**MESSAGE, "messages": [{"role": "user", "content": [{"type": "video"}]}]}
            ours = await gateway.client.post("/v1/messages", json=odd)
            assert (ours.status_code, ours.json()["type"]) == (400, "error")
            assert len(engine.received) == 1
            assert gateway.inflight() == 0


async def test_its_tokens_are_counted_by_tokenising() -> None:
    async def tokenize(request: Received) -> None:
        await request.answer(200, b'{"count":7,"max_model_len":99,"tokens":[1,2,3,4,5,6,7]}')

    async with FakeEngine() as engine:
        engine.has_messages = False
        engine.side_calls["/tokenize"] = tokenize
        async with live_gateway([engine.url]) as gateway:
            body = {"model": "m", "messages": MESSAGE["messages"]}
            counted = await gateway.client.post("/v1/messages/count_tokens", json=body)
            assert counted.json() == {"input_tokens": 7}


@pytest.mark.parametrize("way", ["native", "chat"])
async def test_an_operator_can_say_which_way(way: str) -> None:
    async with FakeEngine() as engine:
        settings: dict[str, Any] = {"instances": [{"id": "a", "url": engine.url, "messages": way}]}
        async with live_gateway([], **settings) as gateway:
            await gateway.client.post("/v1/messages", json=MESSAGE)
            paths = [request.path for request in engine.received]
            assert paths == ["/v1/messages" if way == "native" else "/v1/chat/completions"]


# --- cases ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_streams", [False, True])
async def test_c111_a_chain_of_responses_needs_no_owner(first_streams: bool) -> None:
    """Each engine knows its own ids only, and none is ever asked for another's."""
    numbers = iter(range(1, 99))

    async def answer(request: Received) -> None:
        body = request.json()
        assert "previous_response_id" not in body
        number = next(numbers)
        if body.get("stream"):
            await request.start_stream()
            completed = event("completed", 1).replace(b"resp_1", b"resp_%d" % number)
            await request.send_chunk(event("created", 0).replace(b"resp_1", b"resp_%d" % number))
            await request.send_chunk(completed)
            await request.send_chunk(b"")
        else:
            await request.answer(200, response(number))

    engines = [FakeEngine(answer) for _ in range(3)]
    async with engines[0], engines[1], engines[2]:
        urls = [engine.url for engine in engines]
        async with live_gateway(urls, policy={"name": "round_robin"}) as gateway:
            told = await ask(gateway, input="turn 1", stream=first_streams)
            previous = "resp_1"
            for turn in range(2, 6):
                others = [ask(gateway, input="other load", store=False) for _ in range(2)]
                told, *_ = await asyncio.gather(
                    ask(gateway, input=f"turn {turn}", previous_response_id=previous), *others
                )
                assert told.json()["previous_response_id"] == previous
                previous = told.json()["id"]
                kept = await gateway.client.get(f"/v1/responses/{previous}")
                assert kept.content == told.content
            turns = [
                b["input"]
                for engine in engines
                for b in engine.bodies
                if b["input"] != "other load"
            ]
            assert sorted(len(items) for items in turns if isinstance(items, list)) == [3, 5, 7, 9]
            assert sum(bool(engine.received) for engine in engines) == 3
            cancelled = await gateway.client.post(f"/v1/responses/{previous}/cancel")
            assert cancelled.status_code == 400


PASSED_ON: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"model": "m", "prompt": "a"}),
    ("/tokenize", {"model": "m", "messages": [{"role": "user", "content": "a"}]}),
    ("/detokenize", {"model": "m", "tokens": [1, 2]}),
    ("/v1/embeddings", {"model": "m", "input": ["a", "b"]}),
    ("/v1/embeddings", {"model": "m", "input": [[1, 2], [3]], "encoding_format": "base64"}),
    ("/v1/rerank", {"model": "m", "query": "a", "documents": ["b", "c"]}),
    ("/v1/score", {"model": "m", "text_1": "a", "text_2": ["b"]}),
    ("/v1/completions", {"model": "m", "prompt": ["a", "b"]}),
    ("/v1/completions", {"model": "m", "prompt": [[1, 2], [3]]}),
]


@pytest.mark.parametrize(("path", "body"), PASSED_ON)
async def test_c115_what_engines_have_beside_chats_passes_as_it_is(
    path: str, body: dict[str, Any]
) -> None:
    said = b'{ "odd":  [1.50, 1E2],"data":"AAAA" }'
    asked = json.dumps(body).encode()

    async def answer(request: Received) -> None:
        assert (request.path, request.body) == (path, asked)
        await request.answer(200, said)

    async with FakeEngine(answer) as engine:
        engine.side_calls["/tokenize"] = answer
        async with live_gateway([engine.url], tokenizer={"mode": "off"}) as gateway:
            answered = await gateway.client.post(path, content=asked)
            assert (answered.status_code, answered.content) == (200, said)


async def test_c115_what_is_not_served_is_refused_in_json() -> None:
    async def answer(request: Received) -> None:
        await request.answer(404, b'{"detail":"Not Found"}')

    async with FakeEngine(answer) as engine, live_gateway([engine.url]) as gateway:
        theirs = await gateway.client.post("/v1/rerank", json={"model": "m", "query": "a"})
        assert (theirs.status_code, theirs.json()) == (404, {"detail": "Not Found"})
        ours = await gateway.client.post("/v1/audio/speech", json={"model": "m"})
        assert (ours.status_code, ours.json()["error"]["code"]) == (404, "not_found")


# --- found by a review ----------------------------------------------------------------------------


async def test_a_final_event_of_megabytes_is_kept() -> None:
    long = [{**OUTPUT, "content": [{"type": "output_text", "text": "x" * 3_000_000}]}]
    final = event("completed", 1, output=long)

    async def answer(request: Received) -> None:
        await request.start_stream()
        for start in range(0, len(final), 65_536):
            await request.send_chunk(final[start : start + 65_536])
        await request.send_chunk(b"")

    async with FakeEngine(answer) as engine, live_gateway([engine.url]) as gateway:
        told = await ask(gateway, input="hi", stream=True)
        assert told.content == final
        assert (await gateway.client.get("/v1/responses/resp_1")).content == response(
            1, output=long
        )


async def test_a_response_that_breaks_off_has_the_names_its_client_knows() -> None:
    created = event("created", 0, output=[], status="in_progress", model="m")

    async def answer(request: Received) -> None:
        if not request.json().get("stream"):
            await request.answer(200, response(1, model="m"))
            return
        await request.start_stream()
        await request.send_chunk(created[:40])
        await asyncio.sleep(0.02)
        await request.send_chunk(created[40:])
        await asyncio.sleep(0.05)
        request.cut()

    async with (
        FakeEngine(answer) as engine,
        live_gateway([engine.url], models={"aliases": {"gpt": "m"}}) as gateway,
    ):
        first = {"model": "gpt", "input": "hi"}
        assert (await gateway.client.post("/v1/responses", json=first)).status_code == 200
        more = {**first, "previous_response_id": "resp_1", "stream": True}
        text = (await gateway.client.post("/v1/responses", json=more)).text
    failed = json.loads(text.split("\n\n")[1].split("\n")[1].removeprefix("data: "))["response"]
    told = (failed["id"], failed["model"], failed["previous_response_id"], failed["status"])
    assert told == ("resp_1", "gpt", "resp_1", "failed")


async def test_half_an_answer_that_would_be_changed_is_not_sent() -> None:
    async def answer(request: Received) -> None:
        half = b'{"id":"resp_1","kv_transfer_params":{"remote_host":"10.0.0.1"},'
        await request.send(b"HTTP/1.1 200 OK\r\ncontent-length: 900\r\n\r\n" + half)
        await asyncio.sleep(0.05)
        request.cut()

    async with FakeEngine(answer) as engine, live_gateway([engine.url]) as gateway:
        body = {"model": "m", "input": "hi"}
        seen: list[bytes] = []

        async def read() -> None:
            async with gateway.client.stream("POST", "/v1/responses", json=body) as stream:
                seen.extend([piece async for piece in stream.aiter_raw()])

        with pytest.raises(httpx.RemoteProtocolError):
            await read()
        assert seen == []


async def test_a_chat_without_an_end_is_a_message_without_an_end() -> None:
    async def answer(request: Received) -> None:
        await request.start_stream()
        await request.send_chunk(stream_event("a"))
        await request.send_chunk(b"")

    async with FakeEngine(answer) as engine:
        engine.has_messages = False
        async with live_gateway([engine.url]) as gateway:
            body = {**MESSAGE, "stream": True}
            text = (await gateway.client.post("/v1/messages", json=body)).text
            assert "message_stop" not in text
            assert text.rstrip().split("\n")[-2] == "event: error"


@pytest.mark.parametrize(
    "body",
    [
        {"input": [{"role": "assistant", "tool_calls": 5}]},
        {"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": 5}]},
        {"input": [{"type": ["x"]}]},
        {"input": {"a": 1}},
        {"input": "x", "reasoning": 5, "truncation": [], "chat_template_kwargs": 5},
        {"input": "x", "metadata": 5, "store": "x", "previous_response_id": 5},
        {"input": "x", "tools": {"a": 1}, "instructions": ["x"]},
    ],
)
async def test_odd_bodies_are_the_engines_to_refuse(body: dict[str, Any]) -> None:
    refusal = b'{"error":{"message":"no"}}'

    async def answer(request: Received) -> None:
        await request.answer(400, refusal)

    async with FakeEngine(answer) as engine, live_gateway([engine.url]) as gateway:
        for headers in ({}, {"x-session-id": "s"}):
            told = await gateway.client.post(
                "/v1/responses", json={"model": "m", **body}, headers=headers
            )
            assert (told.status_code, told.content) == (400, refusal)
