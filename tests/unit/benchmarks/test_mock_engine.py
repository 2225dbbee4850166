"""What a mock engine counts and publishes, without its sockets."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.mock_blocks import HeldBlocks, PromptReader
from benchmarks.mock_engine import ChatRequest, MockEngine, make_chunk, make_rendered
from moongate.engine_plugins.vllm_wire import Frame, decode_batch
from moongate.router.events import BlocksRemoved, BlocksStored
from moongate.router.model import InstanceId, SourceId

MODEL = Path(__file__).parents[3] / "simulator" / "model"
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "def f(x):\n\treturn x  # <tag> 12345\n"},
    {"role": "assistant", "content": [{"type": "text", "text": "It returns "}, {"text": "x."}]},
]


@pytest.fixture(scope="module")
def reader() -> PromptReader:
    return PromptReader(MODEL)


def request(messages: list[dict[str, Any]], **other: Any) -> ChatRequest:
    return msgspec.json.decode(json.dumps({"messages": messages, **other}), type=ChatRequest)


def tokens(*values: int) -> array[int]:
    return array("I", values)


def test_a_prompt_read_by_messages_has_the_tokens_of_the_whole(reader: PromptReader) -> None:
    first = reader.read(MESSAGES)
    assert len(first) > 20
    assert first == reader.read_in_full(MESSAGES)
    assert reader.read(MESSAGES) == first


def test_leading_blocks_that_are_held_count_as_cached() -> None:
    blocks = HeldBlocks(block_size_tokens=2, blocks_max=100)
    assert blocks.admit(tokens(1, 2, 3, 4, 5)).cached_tokens == 0
    assert blocks.admit(tokens(1, 2, 3, 4, 5)).cached_tokens == 4
    assert blocks.admit(tokens(1, 2, 9, 9)).cached_tokens == 2
    assert blocks.admit(tokens(9, 9, 3, 4)).cached_tokens == 0


def test_events_name_the_new_blocks_and_their_parent() -> None:
    blocks = HeldBlocks(block_size_tokens=2, blocks_max=100)
    (first,) = blocks.admit(tokens(1, 2, 3, 4, 5)).events
    assert (first["token_ids"], first["parent_block_hash"]) == ([1, 2, 3, 4], None)
    (second,) = blocks.admit(tokens(1, 2, 3, 4, 5, 6)).events
    assert second["token_ids"] == [5, 6]
    assert second["parent_block_hash"] == first["block_hashes"][-1]
    assert blocks.admit(tokens(1, 2, 3, 4, 5, 6)).events == []


def test_the_gateway_understands_the_events_and_what_was_evicted() -> None:
    blocks = HeldBlocks(block_size_tokens=2, blocks_max=2)
    blocks.admit(tokens(1, 2, 3, 4))
    events = blocks.admit(tokens(5, 6)).events
    payload = msgspec.msgpack.encode([1.0, events, 0])
    batch = decode_batch(SourceId(InstanceId("a"), 0), Frame(b"", 7, payload))
    stored, removed = batch.events
    assert isinstance(stored, BlocksStored)
    assert isinstance(removed, BlocksRemoved)
    assert (stored.block_size_tokens, len(stored.engine_hashes)) == (2, 1)
    assert len(removed.engine_hashes) == 1


def test_ids_that_come_with_a_request_are_taken_and_checked(reader: PromptReader) -> None:
    engine = MockEngine(reader, publisher=None)
    own = reader.read(MESSAGES).tolist()
    engine.admit(request(MESSAGES))
    usage = engine.admit(request(MESSAGES, kv_transfer_params={"prompt_token_ids": own}))
    assert usage["prompt_tokens"] == len(own)
    assert usage["prompt_tokens_details"] == {"cached_tokens": len(own) // 16 * 16}
    assert (engine.stats.requests_with_ids, engine.stats.requests_with_wrong_ids) == (1, 0)
    usage = engine.admit(request(MESSAGES, kv_transfer_params={"prompt_token_ids": [7, 8, 9]}))
    assert usage["prompt_tokens"] == 3
    assert (engine.stats.requests_with_ids, engine.stats.requests_with_wrong_ids) == (2, 1)


def test_every_seventh_render_is_timed_in_full(reader: PromptReader) -> None:
    engine = MockEngine(reader, publisher=None)
    for _ in range(8):
        engine.render(request(MESSAGES), body_bytes=100)
    assert (engine.stats.renders, engine.stats.render_bytes) == (8, 800)
    assert engine.stats.measured_render_bytes == 200
    assert engine.stats.measured_render_s > 0


def test_answers_have_the_shapes_of_vllm() -> None:
    size, _, rest = make_chunk([], {"prompt_tokens": 3}).partition(b"\r\n")
    assert int(size, 16) == len(rest) - 2
    chunk = json.loads(rest.removeprefix(b"data: "))
    assert (chunk["choices"], chunk["usage"]) == ([], {"prompt_tokens": 3})
    rendered = make_rendered("/v1/chat/completions/render", request(MESSAGES), [1, 2])
    assert json.loads(rendered.partition(b"\r\n\r\n")[2])["token_ids"] == [1, 2]
    tokenized = make_rendered("/tokenize", request(MESSAGES), [1, 2])
    assert json.loads(tokenized.partition(b"\r\n\r\n")[2])["count"] == 2
