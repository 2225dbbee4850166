"""What a mock engine knows of prompts: their tokens, the blocks it holds, and the events it sends.

Not responsible for HTTP; see `mock_engine.py`. Prompts are rendered with the model directory's own
chat template and tokenised here, by code apart from the gateway's, so that a gateway whose tokens
differ finds no overlap and shows it in its cached share.

Source: vLLM 0.32 `distributed/kv_events.py` for the event wire.
"""

from __future__ import annotations

import json
import re
import threading
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import jinja2.sandbox
import msgspec
import xxhash
import zmq
from tokenizers import Tokenizer

SEGMENTS_MAX = 20_000
"""Tokenised pieces of prompts that are kept; the oldest goes first."""
REPLAY_BATCHES_MAX = 10_000
"""As vLLM's `buffer_steps`."""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

Tokens: TypeAlias = "array[int]"


class PromptReader:
    """Turns chat messages into token ids, as the engine of this model directory would."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # As transformers compiles chat templates.
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True
        )
        self._template = environment.from_string((model / "chat_template.jinja").read_text())
        self._boundary = _special_token_pattern(model)
        self._segments: OrderedDict[str, Tokens] = OrderedDict()

    def read(self, messages: Sequence[Mapping[str, Any]]) -> Tokens:
        """Return the prompt's tokens, tokenising only messages that were not seen before.

        Why: the mock shares its cores with the router under test.
        """
        tokens = array("I")
        for segment in self._boundary.split(self._render(messages)):
            if segment:
                tokens.extend(self._read_segment(segment))
        return tokens

    def read_in_full(self, messages: Sequence[Mapping[str, Any]]) -> Tokens:
        """Return the same tokens with all the work that a real engine does for each prompt."""
        return array("I", self._encode(self._render(messages)))

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        plain = [{**message, "content": _text_of(message)} for message in messages]
        return self._template.render(messages=plain, add_generation_prompt=True)

    def _read_segment(self, segment: str) -> Tokens:
        tokens = self._segments.get(segment)
        if tokens is None:
            tokens = self._segments[segment] = array("I", self._encode(segment))
            if len(self._segments) > SEGMENTS_MAX:
                self._segments.popitem(last=False)
        return tokens

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _special_token_pattern(model: Path) -> re.Pattern[str]:
    """Return where prompts may be cut: before special tokens, which are found before all else."""
    added = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    names = [
        re.escape(token["content"])
        for token in added
        if token["special"] and not (token["lstrip"] or token["rstrip"] or token["single_word"])
    ]
    return re.compile(f"(?={'|'.join(names)})" if names else r"(?!)")


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


@dataclass(frozen=True, slots=True)
class Admission:
    """What became of a prompt's full blocks."""

    cached_tokens: int
    events: list[dict[str, Any]]
    """In the map form of vLLM's wire."""


class HeldBlocks:
    """The blocks that an engine holds, by a hash that names each with its whole prefix."""

    def __init__(self, block_size_tokens: int, blocks_max: int) -> None:
        self.block_size_tokens = block_size_tokens
        self._blocks_max = blocks_max
        self._held: OrderedDict[int, None] = OrderedDict()

    def admit(self, tokens: Tokens) -> Admission:
        """Take in a prompt's blocks. The leading ones that were held count as cached."""
        hashes = self._hash(tokens)
        cached_blocks = next(
            (number for number, name in enumerate(hashes) if name not in self._held), len(hashes)
        )
        for name in hashes:
            self._held[name] = None
            self._held.move_to_end(name)
        events = []
        if cached_blocks < len(hashes):
            events.append(self._stored(hashes, cached_blocks, tokens))
        if evicted := self._evict():
            removed = {"type": "BlockRemoved", "block_hashes": evicted, "medium": "GPU"}
            events.append({**removed, "group_idx": 0})
        return Admission(cached_blocks * self.block_size_tokens, events)

    def _hash(self, tokens: Tokens) -> list[int]:
        size = self.block_size_tokens
        packed = memoryview(tokens.tobytes())
        block_bytes = size * tokens.itemsize
        chain = xxhash.xxh3_64()
        hashes = []
        for number in range(len(tokens) // size):
            # One running hash over all tokens so far: each value depends on the whole prefix.
            chain.update(packed[number * block_bytes : (number + 1) * block_bytes])
            hashes.append(chain.intdigest())
        return hashes

    def _stored(self, hashes: list[int], first: int, tokens: Tokens) -> dict[str, Any]:
        size = self.block_size_tokens
        return {
            "type": "BlockStored",
            "block_hashes": hashes[first:],
            "parent_block_hash": hashes[first - 1] if first else None,
            "token_ids": tokens[first * size : len(hashes) * size].tolist(),
            "block_size": size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "group_idx": 0,
        }

    def _evict(self) -> list[int]:
        surplus = max(0, len(self._held) - self._blocks_max)
        return [self._held.popitem(last=False)[0] for _ in range(surplus)]


class Publisher:
    """Sends event batches on a PUB socket, and the kept ones again to who asks the ROUTER socket.

    Replays are answered by a thread, so that they do not wait for prompts that are being read.
    """

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self.endpoint = endpoint
        self.replay_endpoint = replay_endpoint
        self._next_sequence = 0
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=REPLAY_BATCHES_MAX)
        self._encode = msgspec.msgpack.Encoder().encode
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.set_hwm(100_000)
        self._socket.bind(endpoint)
        threading.Thread(target=self._answer_replays, daemon=True).start()

    def publish(self, events: list[dict[str, Any]]) -> None:
        sequence = self._next_sequence.to_bytes(8, "big")
        payload = self._encode([time.time(), events, 0])
        self._next_sequence += 1
        # Kept first: a subscriber that misses the message may ask at once.
        self._kept.append((sequence, payload))
        self._socket.send_multipart([b"", sequence, payload])

    def _answer_replays(self) -> None:
        socket = self._context.socket(zmq.ROUTER)
        socket.bind(self.replay_endpoint)
        while True:
            frames = socket.recv_multipart()
            if len(frames) == 3 and len(frames[2]) == 8:
                # Sequences are big-endian and so compare as bytes.
                batches = [kept for kept in tuple(self._kept) if kept[0] >= frames[2]]
                for sequence, payload in [*batches, (END_OF_REPLAY, b"")]:
                    socket.send_multipart([frames[0], b"", b"", sequence, payload])
