"""A stand-in for a vLLM engine that costs next to nothing, so that a router can be measured alone.

It answers chat completions with fixed tokens and counts what reached it. With `--tokenizer` it also
reads prompts, holds their blocks without ever computing anything, publishes KV events, and renders
prompts for the routers that ask engines to. It is not the simulated engine of `moongate up`: that
one imitates an engine's timing, this one only its wire.

`GET /bench/stats` has the counters since the start; a measurement takes the difference of two.

Source: the routes and shapes of vLLM 0.32.0.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import time
from array import array
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import httptools
import msgspec
import uvloop

from benchmarks.mock_blocks import HeldBlocks, PromptReader, Publisher, Tokens
from benchmarks.sample import EngineStats
from benchmarks.workloads import BLOCK_SIZE_TOKENS, MODEL

VERSION = "0.32.0"
CREATED_AT_S = 1_700_000_000
MODEL_LEN_TOKENS_MAX = 1_048_576
RENDERS_PER_MEASUREMENT = 7
"""Every 7th render is done in full and timed: all of them would keep both cores from the router.
7 has no factor in common with the 16 distinct bodies nor with the 12 turns of a session."""


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class TransferParams(msgspec.Struct):
    prompt_token_ids: list[int] | None = None


class ChatRequest(msgspec.Struct):
    """The fields that the mock looks at. The rest is checked to be JSON, and skipped."""

    messages: msgspec.Raw
    stream: bool = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None  # what some routers make of max_tokens
    stream_options: StreamOptions | None = None
    kv_transfer_params: TransferParams | None = None

    @property
    def answer_tokens(self) -> int:
        return self.max_completion_tokens or self.max_tokens or 16

    @property
    def forwarded_ids(self) -> list[int] | None:
        params = self.kv_transfer_params
        return params.prompt_token_ids if params is not None else None


_decode_request = msgspec.json.Decoder(ChatRequest).decode
_decode_messages = msgspec.json.Decoder(list[dict[str, Any]]).decode
_encode = msgspec.json.encode


class MockEngine:
    """What the engine knows and counts; the HTTP around it is `Connection`."""

    def __init__(self, reader: PromptReader | None, publisher: Publisher | None) -> None:
        self.reader = reader
        self.publisher = publisher
        self.blocks = HeldBlocks(BLOCK_SIZE_TOKENS, blocks_max=1_000_000)
        self.stats = EngineStats(pid=os.getpid())
        self.running = 0

    def admit(self, request: ChatRequest) -> dict[str, Any]:
        """Take in a request; return the usage that its answer reports."""
        self.stats.requests += 1
        tokens = self._prompt_of(request)
        cached_tokens = 0
        if self.reader is not None:
            admission = self.blocks.admit(tokens)
            cached_tokens = admission.cached_tokens
            self.stats.prompt_tokens += len(tokens)
            self.stats.cached_tokens += cached_tokens
            self.stats.cached_share_sum += cached_tokens / max(1, len(tokens))
            if self.publisher is not None and admission.events:
                self.publisher.publish(admission.events)
        return {
            "prompt_tokens": len(tokens),
            # One, whatever was asked for, so that no blocks of an answer are to be announced.
            "completion_tokens": 1,
            "total_tokens": len(tokens) + 1,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }

    def _prompt_of(self, request: ChatRequest) -> Tokens:
        """Return the ids that came with the request, as vLLM does, or else the messages' own."""
        own = array("I")
        if self.reader is not None:
            own = self.reader.read(_decode_messages(request.messages))
        if request.forwarded_ids is None:
            return own
        given = array("I", request.forwarded_ids)
        self.stats.requests_with_ids += 1
        if self.reader is not None and given != own:
            self.stats.requests_with_wrong_ids += 1
        return given

    def render(self, request: ChatRequest, body_bytes: int) -> list[int]:
        """Return the prompt's tokens to a router that asks for them."""
        assert self.reader is not None
        messages = _decode_messages(request.messages)
        if self.stats.renders % RENDERS_PER_MEASUREMENT == 0:
            began = time.thread_time()
            self.reader.read_in_full(messages)
            self.stats.measured_render_s += time.thread_time() - began
            self.stats.measured_render_bytes += body_bytes
        self.stats.renders += 1
        self.stats.render_bytes += body_bytes
        return self.reader.read(messages).tolist()


# --- answers --------------------------------------------------------------------------------------


def make_response(
    body: bytes, status: str = "200 OK", content_type: str = "application/json"
) -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n"
    return f"{head}\r\n".encode() + body


def make_error(status: str, text: str) -> bytes:
    return make_response(_encode({"error": {"message": text, "code": int(status[:3])}}), status)


def make_event(data: bytes) -> bytes:
    """Return an SSE event in a chunk of HTTP's framing."""
    event = b"data: " + data + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(event), event)


def make_chunk(choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
    chunk = {
        "id": "chatcmpl-mock",
        "object": "chat.completion.chunk",
        "created": CREATED_AT_S,
        "model": MODEL,
        "choices": choices,
    }
    return make_event(_encode(chunk if usage is None else {**chunk, "usage": usage}))


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
TOKEN_EVENT = make_chunk(
    [{"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": None}]
)
STREAM_END = make_event(b"[DONE]") + b"0\r\n\r\n"


def make_completion(usage: dict[str, Any]) -> bytes:
    message = {"role": "assistant", "content": "as you wish"}
    completion = {
        "id": "chatcmpl-mock",
        "object": "chat.completion",
        "created": CREATED_AT_S,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": "length"}],
        "usage": usage,
    }
    return make_response(_encode(completion))


def make_rendered(path: str, request: ChatRequest, tokens: list[int]) -> bytes:
    if path == "/tokenize":
        answer: dict[str, Any] = {"count": len(tokens), "max_model_len": MODEL_LEN_TOKENS_MAX}
        return make_response(_encode({**answer, "tokens": tokens}))
    generate = {
        "request_id": "render-mock",
        "token_ids": tokens,
        "features": None,
        "sampling_params": {"max_tokens": request.answer_tokens},
        "model": MODEL,
        "stream": request.stream,
        "cache_salt": None,
        "priority": 0,
    }
    return make_response(_encode(generate))


def make_metrics(engine: MockEngine) -> bytes:
    labels = f'engine="0",model_name="{MODEL}"'
    gauges = {
        f"vllm:num_requests_running{{{labels}}}": engine.running,
        f"vllm:num_requests_waiting{{{labels}}}": 0,
        f"vllm:kv_cache_usage_perc{{{labels}}}": 0.1,
        f'vllm:cache_config_info{{engine="0",block_size="{BLOCK_SIZE_TOKENS}",'
        'enable_prefix_caching="True",num_gpu_blocks="1000000",'
        'prefix_caching_hash_algo="sha256"}': 1,
    }
    text = "".join(
        f"# TYPE {series.partition('{')[0]} gauge\n{series} {value}\n"
        for series, value in gauges.items()
    )
    return make_response(text.encode(), content_type="text/plain; version=0.0.4")


def make_event_sources(publisher: Publisher | None) -> dict[str, Any]:
    if publisher is None:
        return {}
    return {
        "0": {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": publisher.endpoint,
            "replay_endpoint": publisher.replay_endpoint,
            "buffer_steps": 10_000,
            "hwm": 100_000,
            "max_queue_size": 100_000,
            "topic": "",
        }
    }


def make_fixed_answers(publisher: Publisher | None) -> dict[str, bytes]:
    model = {"id": MODEL, "object": "model", "created": CREATED_AT_S, "owned_by": "vllm"}
    model |= {"root": MODEL, "parent": None, "max_model_len": MODEL_LEN_TOKENS_MAX}
    about = {"model_path": MODEL, "is_generation": True}  # what sglang-router looks for
    values: dict[str, Any] = {
        "/v1/models": {"object": "list", "data": [model]},
        "/version": {"version": VERSION},
        "/kv_event_sources": make_event_sources(publisher),
        "/get_model_info": about,
        "/get_server_info": about,
        "/server_info": about,
    }
    return {path: make_response(_encode(value)) for path, value in values.items()} | {
        path: make_response(b"")
        # The last is of a collector of traces, which it is as well.
        for path in ("/health", "/ping", "/health_generate", "/v1/traces")
    }


# --- HTTP -----------------------------------------------------------------------------------------


class Connection(asyncio.Protocol):
    """One keep-alive connection. The routers under test do not pipeline, so neither is expected."""

    def __init__(self, engine: MockEngine, fixed: dict[str, bytes], chunk_delay_s: float) -> None:
        self._engine = engine
        self._fixed = fixed
        self._chunk_delay_s = chunk_delay_s
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._path = ""
        self._parts: list[bytes] = []
        self._streaming: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have all the methods, but no base class in common with asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._streaming is not None:
            self._streaming.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def on_url(self, url: bytes) -> None:
        self._path = url.decode("latin-1").partition("?")[0]
        self._parts = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"expect":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        body = b"".join(self._parts)
        if self._path == "/v1/chat/completions":
            self._complete(body)
        elif self._path in ("/v1/chat/completions/render", "/tokenize"):
            self._render(body)
        elif self._path == "/bench/stats":
            self._transport.write(make_response(_encode(asdict(self._engine.stats))))
        elif self._path == "/metrics":
            self._transport.write(make_metrics(self._engine))
        else:
            not_found = make_error("404 Not Found", self._path)
            self._transport.write(self._fixed.get(self._path, not_found))

    def _complete(self, body: bytes) -> None:
        request = self._decode(body)
        if request is None:
            return
        usage = self._engine.admit(request)
        if request.stream:
            self._streaming = asyncio.create_task(self._stream(request, usage))
        else:
            self._transport.write(make_completion(usage))

    def _render(self, body: bytes) -> None:
        if self._engine.reader is None:
            # As vLLM does without --enable-scale-out; routers then go by the text.
            self._transport.write(make_error("403 Forbidden", "rendering is off"))
            return
        request = self._decode(body)
        if request is not None:
            tokens = self._engine.render(request, len(body))
            self._transport.write(make_rendered(self._path, request, tokens))

    def _decode(self, body: bytes) -> ChatRequest | None:
        try:
            return _decode_request(body)
        except msgspec.MsgspecError as error:
            self._engine.stats.invalid_bodies += 1
            self._transport.write(make_error("400 Bad Request", str(error)))
            return None

    async def _stream(self, request: ChatRequest, usage: dict[str, Any]) -> None:
        self._engine.running += 1
        try:
            self._transport.write(STREAM_HEAD)
            for _ in itertools.repeat(None, request.answer_tokens):
                self._transport.write(TOKEN_EVENT)
                await asyncio.sleep(self._chunk_delay_s)
            if request.stream_options is not None and request.stream_options.include_usage:
                self._transport.write(make_chunk([], usage))
            self._transport.write(STREAM_END)
        finally:
            self._engine.running -= 1


# --- command line ---------------------------------------------------------------------------------


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A stand-in for a vLLM engine, for benchmarks.")
    parser.add_argument("--port", type=int, required=True, help="on 127.0.0.1")
    parser.add_argument(
        "--chunk-delay-ms", type=float, default=5.0, help="pause after each chunk of a stream"
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="model directory with tokenizer.json and chat_template.jinja: read prompts",
    )
    parser.add_argument("--kv-events-port", type=int, help="publish KV events on this port")
    parser.add_argument("--kv-replay-port", type=int, help="send them again on this port")
    arguments = parser.parse_args()
    ports = (arguments.kv_events_port, arguments.kv_replay_port)
    if (arguments.tokenizer is None) != (None in ports) or (ports[0] is None) != (ports[1] is None):
        parser.error("--tokenizer, --kv-events-port and --kv-replay-port only work together")
    return arguments


async def _serve(arguments: argparse.Namespace) -> None:
    reader = publisher = None
    if arguments.tokenizer is not None:
        reader = PromptReader(arguments.tokenizer)
        ports = (arguments.kv_events_port, arguments.kv_replay_port)
        publisher = Publisher(*(f"tcp://127.0.0.1:{port}" for port in ports))
    engine = MockEngine(reader, publisher)
    fixed = make_fixed_answers(publisher)
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(engine, fixed, arguments.chunk_delay_ms / 1e3),
        "127.0.0.1",
        arguments.port,
        backlog=1024,
    )
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(_parse_arguments()))
