"""A simulated engine on localhost: its HTTP routes, its event sockets, and what a lost client does."""

import asyncio
import dataclasses
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from moongate.simulator.engine import EngineProfile
from moongate.simulator.event_wire import DigestForm, EventForm, external_digest
from moongate.simulator.server import SimConfigError, SimEngine, SimEngineConfig

# Fast enough for tests, and small enough that a few prompts evict each other.
PROFILE = EngineProfile(
    blocks=65,
    block_size_tokens=4,
    prefill_tokens_per_s=1e6,
    decode_tokens_per_s=1e4,
    max_model_len_tokens=256,
    step_overhead_ms=0.1,
)

SLOW_DECODE = dataclasses.replace(PROFILE, decode_tokens_per_s=50.0)
SLOW_PREFILL = dataclasses.replace(PROFILE, prefill_tokens_per_s=10.0)

CONFIG = SimEngineConfig(profile=PROFILE, kv_events_port=0, kv_replay_port=0, topic="kv@test")

WAIT_LIMIT_S = 10.0

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        },
    }
]


@asynccontextmanager
async def running(config: SimEngineConfig = CONFIG) -> AsyncIterator[SimEngine]:
    engine = SimEngine(config)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


@asynccontextmanager
async def http(engine: SimEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=engine.url, timeout=WAIT_LIMIT_S) as client:
        yield client


@asynccontextmanager
async def openai_client(engine: SimEngine) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=f"{engine.url}/v1", api_key="none", timeout=WAIT_LIMIT_S, max_retries=0
    ) as client:
        yield client


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that the engine does by itself."""
    async with asyncio.timeout(WAIT_LIMIT_S):
        while not condition():
            await asyncio.sleep(0.002)


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


# -- OpenAI's own client ------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_chat_is_answered_and_a_repeated_one_is_cached_and_equal() -> None:
    async with running() as engine, openai_client(engine) as client:
        answers = [
            await client.chat.completions.create(
                model="sim", messages=user("Tell me about the moon. " * 4), max_tokens=9
            )
            for _ in range(2)
        ]
    first, second = answers
    assert first.choices[0].finish_reason == "length"
    assert first.choices[0].message.content
    assert first.choices[0].message.content == second.choices[0].message.content
    assert first.usage is not None
    assert second.usage is not None
    assert first.usage.completion_tokens == 9
    assert first.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details is not None
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    full_blocks = (second.usage.prompt_tokens - 1) // 4
    assert second.usage.prompt_tokens_details.cached_tokens == full_blocks * 4


@pytest.mark.asyncio
async def test_a_stream_adds_up_to_the_whole_answer_and_ends_with_usage() -> None:
    question: dict[str, Any] = {"model": "sim", "messages": user("Why?"), "max_tokens": 12}
    async with running() as engine, openai_client(engine) as client:
        whole = await client.chat.completions.create(**question)
        stream = await client.chat.completions.create(
            **question, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [one.choices[0].finish_reason for one in chunks if one.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert len(chunks) == 1 + 12 + 1


@pytest.mark.asyncio
async def test_an_answer_without_limit_stops_by_itself() -> None:
    config = dataclasses.replace(CONFIG, answer_tokens=5)
    async with running(config) as engine, openai_client(engine) as client:
        answer = await client.chat.completions.create(model="sim", messages=user("Hi"))
    assert answer.usage is not None
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", 5)


@pytest.mark.asyncio
async def test_tools_and_tool_messages_are_part_of_the_prompt() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    history: Any = [
        *user("Add 1."),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
    ]
    async with running() as engine, openai_client(engine) as client, http(engine) as raw:
        await client.chat.completions.create(
            model="sim", messages=history, tools=TOOLS, max_tokens=2
        )
        rendered = await raw.post("/tokenize", json={"messages": history, "tools": TOOLS})
        text = await raw.post("/detokenize", json={"tokens": rendered.json()["tokens"]})
    prompt = text.json()["prompt"]
    assert '"name": "add"' in prompt
    assert '"arguments": {"a": 1}' in prompt
    assert rendered.json()["count"] == len(rendered.json()["tokens"])


@pytest.mark.asyncio
async def test_completions_take_text_ids_and_lists_of_both() -> None:
    async with running() as engine, openai_client(engine) as client:
        prompts: list[Any] = ["one two", ["one two", "three"], [5, 6, 7], [[5, 6, 7], [8]]]
        answers = [
            await client.completions.create(model="sim", prompt=prompt, n=2) for prompt in prompts
        ]
    assert [len(answer.choices) for answer in answers] == [2, 4, 2, 4]
    assert [choice.index for choice in answers[1].choices] == [0, 1, 2, 3]
    assert answers[0].choices[0].text == answers[1].choices[0].text
    assert answers[0].choices[0].text != answers[0].choices[1].text
    assert answers[2].choices[0].text == answers[3].choices[0].text
    assert answers[3].usage is not None
    assert (answers[3].usage.prompt_tokens, answers[3].usage.completion_tokens) == (4, 64)


@pytest.mark.asyncio
async def test_errors_have_the_engines_shape() -> None:
    async with running() as engine, openai_client(engine) as client:
        with pytest.raises(BadRequestError) as too_long:
            await client.completions.create(model="sim", prompt=[7] * 300)
        with pytest.raises(NotFoundError) as unknown:
            await client.completions.create(model="other", prompt="x")
        with pytest.raises(BadRequestError, match="Token id 2048 is out of vocabulary"):
            await client.completions.create(model="sim", prompt=[2048])
        with pytest.raises(NotFoundError) as embeddings:
            await client.embeddings.create(model="sim", input="x")
    assert "maximum context length is 256 tokens" in too_long.value.message
    assert (too_long.value.param, too_long.value.type) == ("input_tokens", "BadRequestError")
    assert "The model `other` does not exist" in unknown.value.message
    assert embeddings.value.type == "Not Found"


# -- the other routes ---------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_bodies_that_are_no_request_are_refused() -> None:
    headers = {"content-type": "application/json"}
    async with running() as engine, http(engine) as client:
        broken = await client.post("/v1/chat/completions", content=b"{", headers=headers)
        missing = await client.post("/v1/chat/completions", json={"model": "sim"})
        no_prompt = await client.post("/v1/completions", json={"model": "sim"})
    assert [one.status_code for one in (broken, missing, no_prompt)] == [400, 400, 400]
    assert missing.json()["error"]["param"] == "body.messages"
    assert set(broken.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.asyncio
async def test_token_ids_are_returned_on_request() -> None:
    async with running() as engine, http(engine) as client:
        body = {"prompt": [5, 6, 7], "max_tokens": 3, "return_token_ids": True}
        whole = (await client.post("/v1/completions", json=body)).json()
        text = (await client.post("/v1/completions", json={**body, "stream": True})).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert text.endswith("data: [DONE]\n\n")
    assert whole["choices"][0]["prompt_token_ids"] == [5, 6, 7]
    streamed = [token for event in events for token in event["choices"][0]["token_ids"]]
    assert streamed == whole["choices"][0]["token_ids"]
    assert events[0]["choices"][0]["prompt_token_ids"] == [5, 6, 7]
    assert events[1]["choices"][0]["prompt_token_ids"] is None


@pytest.mark.asyncio
async def test_ids_sent_with_a_chat_are_used_instead_of_its_messages() -> None:
    body = {
        "messages": user("x"),
        "max_tokens": 1,
        "return_token_ids": True,
        "kv_transfer_params": {"prompt_token_ids": [9, 8, 7]},
    }
    async with running() as engine, http(engine) as client:
        answer = (await client.post("/v1/chat/completions", json=body)).json()
    assert answer["prompt_token_ids"] == [9, 8, 7]


@pytest.mark.asyncio
async def test_small_routes_answer_as_the_engine_does() -> None:
    async with running() as engine, http(engine) as client:
        health = await client.get("/health")
        version = await client.get("/version")
        (card,) = (await client.get("/v1/models")).json()["data"]
        sources = (await client.get("/kv_event_sources")).json()
    assert (health.status_code, health.content) == (200, b"")
    assert version.json() == {"version": "0.32.0+moongate-sim"}
    assert (card["id"], card["max_model_len"]) == ("sim", 256)
    assert engine.kv_events_endpoint is not None
    port = engine.kv_events_endpoint.rpartition(":")[2]
    assert sources["0"]["endpoint"] == f"tcp://*:{port}"
    assert (sources["0"]["topic"], sources["0"]["buffer_steps"]) == ("kv@test", 10_000)


@pytest.mark.asyncio
async def test_an_engine_without_events_has_no_sources() -> None:
    async with running(SimEngineConfig(profile=PROFILE)) as engine, http(engine) as client:
        assert (await client.get("/kv_event_sources")).json() == {}
        assert engine.kv_events_endpoint is None


@pytest.mark.asyncio
async def test_metrics_count_tokens_and_describe_the_cache() -> None:
    async with running() as engine, http(engine) as client:
        body = {"prompt": list(range(10, 19)), "max_tokens": 2}
        await client.post("/v1/completions", json=body)
        await client.post("/v1/completions", json=body)
        lines = (await client.get("/metrics")).text.splitlines()
    labels = '{engine="0",model_name="sim"}'
    assert f"vllm:prefix_cache_queries_total{labels} 18.0" in lines
    assert f"vllm:prefix_cache_hits_total{labels} 8.0" in lines
    assert f"vllm:generation_tokens_total{labels} 4.0" in lines
    assert f"vllm:num_requests_running{labels} 0.0" in lines
    (info,) = [line for line in lines if line.startswith("vllm:cache_config_info")]
    assert 'block_size="4"' in info
    assert 'num_gpu_blocks="65"' in info


@pytest.mark.asyncio
async def test_a_salt_separates_caches() -> None:
    async with running() as engine, http(engine) as client:
        body: dict[str, Any] = {"prompt": list(range(10, 19)), "max_tokens": 1}
        cached = []
        for salt in ("a", "b", "a"):
            answer = await client.post("/v1/completions", json={**body, "cache_salt": salt})
            cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, 8]


# -- clients that leave -------------------------------------------------------------------------


async def send_and_hang_up(engine: SimEngine, body: dict[str, Any], *, after_bytes: bytes) -> None:
    """Send a request, wait until `after_bytes` came back (nothing: until it runs), and close."""
    assert engine.port is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
    payload = json.dumps(body).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: sim\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(payload), payload)
    )
    if after_bytes:
        async with asyncio.timeout(WAIT_LIMIT_S):
            await reader.readuntil(after_bytes)
    else:
        await until(lambda: engine.runners[0].model.statistics().running_requests > 0)
    writer.close()
    await writer.wait_closed()


@pytest.mark.asyncio
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_before_the_first_byte_aborts(*, is_stream: bool) -> None:
    config = dataclasses.replace(CONFIG, profile=SLOW_PREFILL)
    body = {"prompt": [7] * 200, "max_tokens": 5, "stream": is_stream}  # 20 s of prefill
    async with running(config) as engine:
        await send_and_hang_up(engine, body, after_bytes=b"")
        model = engine.runners[0].model
        await until(lambda: model.statistics().finished_requests["abort"] == 1)
        assert (model.statistics().running_requests, model.pool.usage) == (0, 0.0)


@pytest.mark.asyncio
async def test_a_client_that_leaves_a_stream_aborts() -> None:
    config = dataclasses.replace(CONFIG, profile=SLOW_DECODE)
    body = {"prompt": [7] * 20, "max_tokens": 200, "stream": True}  # 4 s of decoding
    async with running(config) as engine:
        await send_and_hang_up(engine, body, after_bytes=b"data: ")
        model = engine.runners[0].model
        await until(lambda: model.statistics().finished_requests["abort"] == 1)
        assert model.statistics().generation_tokens < 100


@pytest.mark.asyncio
async def test_stopping_the_engine_ends_open_streams() -> None:
    config = dataclasses.replace(CONFIG, profile=SLOW_DECODE)
    async with running(config) as engine, http(engine) as client:
        body = {"prompt": [7] * 20, "max_tokens": 200, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
            await engine.stop()
            with pytest.raises(httpx.RemoteProtocolError):
                async for _ in lines:
                    pass


@pytest.mark.asyncio
async def test_a_rank_that_ended_makes_the_engine_unhealthy_and_answers_500() -> None:
    async with running() as engine, http(engine) as client:
        await engine.runners[0].stop()
        health = await client.get("/health")
        answer = await client.post("/v1/completions", json={"prompt": "x"})
    assert (health.status_code, answer.status_code) == (503, 500)
    assert answer.json()["error"]["type"] == "InternalServerError"


# -- events -------------------------------------------------------------------------------------


class Subscriber:
    """Reads both wire forms and keeps the copies of each block; knows nothing of the simulator."""

    def __init__(self) -> None:
        self.copies: Counter[Any] = Counter()
        self.sequences: list[int] = []
        self.ranks: set[int] = set()
        self.kinds: list[str] = []

    def apply(self, sequence: bytes, payload: bytes) -> None:
        self.sequences.append(int.from_bytes(sequence, "big"))
        _, events, rank = msgspec.msgpack.decode(payload)
        self.ranks.add(rank)
        for event in events:
            is_map = isinstance(event, dict)
            kind, hashes = event["type"] if is_map else event[0], ()
            if kind != "AllBlocksCleared":
                hashes = event["block_hashes"] if is_map else event[1]
            self._apply(kind, hashes)

    def _apply(self, kind: str, hashes: Any) -> None:
        self.kinds.append(kind)
        match kind:
            case "BlockStored":
                self.copies.update(hashes)
            case "BlockRemoved":
                self.copies.subtract(hashes)
            case "AllBlocksCleared":
                self.copies.clear()

    @property
    def held(self) -> dict[Any, int]:
        return dict(+self.copies)


def cached(engine: SimEngine, rank: int = 0, form: DigestForm = DigestForm.INT) -> dict[Any, int]:
    copies = engine.runners[rank].model.pool.cached_copies()
    return {external_digest(digest, form): len(blocks) for digest, blocks in copies.items()}


async def replay(endpoint: str | None, start: int, *, frames: int = 4) -> list[list[bytes]]:
    """Ask for the batches from `start`; return [topic, sequence, payload] of each."""
    assert endpoint is not None
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(endpoint)
        await dealer.send_multipart((b"", start.to_bytes(8, "big")))
        batches: list[list[bytes]] = []
        async with asyncio.timeout(WAIT_LIMIT_S):
            while True:
                reply = await dealer.recv_multipart()
                assert len(reply) == frames
                assert reply[0] == b""
                if reply[-2] == b"\xff" * 8:
                    assert reply[-1] == b""
                    return batches
                batches.append(reply[1:])


async def churn(client: httpx.AsyncClient, count: int = 12) -> None:
    """Send prompts that share prefixes, and more of them than the cache holds."""
    for number in range(count):
        prompt = [*range(100, 116), *range(200 + 40 * number, 240 + 40 * number)]
        answer = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 9})
        assert answer.status_code == 200


@pytest.mark.asyncio
@pytest.mark.parametrize("event_form", list(EventForm))
@pytest.mark.parametrize("digest_form", list(DigestForm))
async def test_events_rebuild_the_cache(event_form: EventForm, digest_form: DigestForm) -> None:
    config = dataclasses.replace(CONFIG, event_form=event_form, digest_form=digest_form)
    subscriber = Subscriber()
    async with running(config) as engine, http(engine) as client:
        await churn(client)
        for _, sequence, payload in await replay(engine.kv_replay_endpoint, 0):
            subscriber.apply(sequence, payload)
        assert subscriber.held == cached(engine, form=digest_form)
    assert set(subscriber.kinds) == {"BlockStored", "BlockRemoved"}
    assert subscriber.sequences == list(range(len(subscriber.sequences)))


async def subscribe(context: zmq.asyncio.Context, engine: SimEngine) -> zmq.asyncio.Socket:
    """Return a subscriber whose subscription has arrived: XPUB-less, so it asks until it hears."""
    socket: zmq.asyncio.Socket = context.socket(zmq.SUB)
    socket.subscribe(b"kv@")
    assert engine.kv_events_endpoint is not None
    socket.connect(engine.kv_events_endpoint)
    async with http(engine) as client:
        for number in range(100):
            prompt = [number + 1] * 5
            await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
            if await socket.poll(20):
                return socket
    raise AssertionError("no event arrived")


@pytest.mark.asyncio
async def test_published_batches_equal_the_replayed_ones_and_come_before_the_answer() -> None:
    with zmq.asyncio.Context() as context:
        async with running() as engine, http(engine) as client:
            socket = await subscribe(context, engine)
            await churn(client, count=3)
            live = []
            while await socket.poll(100):
                live.append(await socket.recv_multipart())
            first = int.from_bytes(live[0][1], "big")
            assert await replay(engine.kv_replay_endpoint, first) == live
            assert {batch[0] for batch in live} == {b"kv@test"}
            socket.close()


@pytest.mark.asyncio
async def test_older_engines_replay_without_a_topic_frame() -> None:
    config = dataclasses.replace(CONFIG, has_replay_topic_frame=False)
    async with running(config) as engine, http(engine) as client:
        await churn(client, count=1)
        batches = await replay(engine.kv_replay_endpoint, 0, frames=3)
    assert [int.from_bytes(sequence, "big") for sequence, _ in batches] == list(range(len(batches)))


@pytest.mark.asyncio
async def test_a_reset_is_published_with_the_next_request() -> None:
    subscriber = Subscriber()
    async with running() as engine, http(engine) as client:
        await churn(client, count=2)
        assert (await client.post("/reset_prefix_cache")).json() == {"success": True}
        before = len(await replay(engine.kv_replay_endpoint, 0))
        await churn(client, count=1)
        for _, sequence, payload in await replay(engine.kv_replay_endpoint, 0):
            subscriber.apply(sequence, payload)
        assert len(subscriber.sequences) > before
        assert subscriber.kinds.count("AllBlocksCleared") == 1
        assert subscriber.held == cached(engine)


# -- data-parallel ranks ------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_each_rank_has_its_own_cache_and_publisher() -> None:
    config = dataclasses.replace(CONFIG, data_parallel_size=2, data_parallel_start_rank=4)
    body = {"prompt": list(range(10, 19)), "max_tokens": 1}
    async with running(config) as engine, http(engine) as client:
        for _ in range(2):
            answer = await client.post(
                "/v1/completions", json=body, headers={"X-data-parallel-rank": "5"}
            )
        details = answer.json()["usage"]["prompt_tokens_details"]
        refused = await client.post(
            "/v1/completions", json=body, headers={"X-data-parallel-rank": "0"}
        )
        sources = (await client.get("/kv_event_sources")).json()
        idle = await replay(engine.rank_endpoints(4)[1], 0)
        subscriber = Subscriber()
        for _, sequence, payload in await replay(engine.rank_endpoints(5)[1], 0):
            subscriber.apply(sequence, payload)
    assert details["cached_tokens"] == 8
    assert refused.status_code == 400
    assert "out of range [4, 6)" in refused.json()["error"]["message"]
    assert set(sources) == {"4", "5"}
    assert idle == []
    assert subscriber.ranks == {5}


@pytest.mark.asyncio
async def test_without_the_header_ranks_take_turns() -> None:
    config = dataclasses.replace(CONFIG, data_parallel_size=2)
    async with running(config) as engine, http(engine) as client:
        for _ in range(4):
            await client.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 1})
        counts = [one.model.statistics().prompt_tokens for one in engine.runners.values()]
    assert counts == [4, 4]


# -- starting -----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_an_address_in_use_is_reported_and_leaves_nothing_behind() -> None:
    async with running() as engine:
        assert engine.kv_events_endpoint is not None
        taken = int(engine.kv_events_endpoint.rpartition(":")[2])
        for config in (
            dataclasses.replace(CONFIG, port=engine.port or 0),
            dataclasses.replace(CONFIG, kv_events_port=taken),
        ):
            with pytest.raises(OSError, match="in use"):
                await SimEngine(config).start()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_events_port": None}, "a replay port needs an events port"),
        ({"port": 70_000}, "port port 70000"),
        ({"kv_events_port": 5557, "kv_replay_port": 5558, "data_parallel_size": 2}, "used twice"),
        ({"data_parallel_size": 0}, "data parallel size"),
        ({"answer_tokens": 0}, "answer tokens"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SimConfigError, match=message):
        dataclasses.replace(CONFIG, **changes)
