#!/usr/bin/env python3
"""Record what vLLM's own KV-cache manager publishes for several groups, and what it reuses.

Run it with the engine environment's interpreter, and FOLDER as argument (what tests read lies in
tests/fixtures/vllm_groups). For each of `LAYOUTS` it drives a real `KVCacheManager` (no model, no
engine) through prompts that grow, are cut short and branch off, in a cache too small for them, and
writes FOLDER/NAME.msgpack.z: for every prompt its token ids, the tokens that the manager found cached,
and the batches of events that followed, encoded by vLLM's own classes. Prompts, sizes and order come from a fixed seed, so what is recorded is the same each time.
"""

from __future__ import annotations

import os
import random
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ["PYTHONHASHSEED"] = "0"  # vLLM's block hashes start from it

import msgspec
import torch
from vllm.distributed.kv_events import KVEventBatch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

SEED = 7
PROMPTS = 40
PROMPT_TOKENS_MAX = 120
CHUNK_TOKENS = 32
"""Computed in one step, so that windows move on while a prompt is computed."""


@dataclass(frozen=True)
class Layout:
    """Groups as a model would have them, and a cache of so many blocks for all of them."""

    groups: tuple[KVCacheSpec, ...]
    blocks: int
    hash_tokens: int
    aligned_tokens: int  # what all groups' block sizes divide
    retention_interval: int | None = None


def full(block_size: int) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32
    )


def window(block_size: int, tokens: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=8,
        dtype=torch.float32,
        sliding_window=tokens,
    )


def mamba(block_size: int, mode: str) -> MambaSpec:
    return MambaSpec(
        block_size=block_size, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode=mode
    )


def chunked(block_size: int, tokens: int) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=8,
        dtype=torch.float32,
        attention_chunk_size=tokens,
    )


LAYOUTS = {
    "one-group": Layout((full(4),), 60, 4, 4),
    "gpt-oss": Layout((window(4, 10), full(4)), 70, 4, 4),
    "gemma3": Layout((window(4, 14), window(4, 14), window(4, 14), full(4)), 110, 4, 4),
    "two-windows": Layout((full(4), window(4, 5), window(4, 19)), 90, 4, 4),
    "two-full": Layout((full(4), full(4), window(4, 9)), 100, 4, 4),
    "large-window-blocks": Layout((full(4), window(8, 20)), 60, 4, 8),
    "small-window-blocks": Layout((full(8), window(4, 11)), 60, 4, 8),
    "sparse-windows": Layout((full(4), window(4, 9)), 70, 4, 4, retention_interval=16),
    "mamba-all": Layout((full(4), mamba(4, "all")), 70, 4, 4),
    "local-chunks": Layout((chunked(4, 16), full(4)), 60, 4, 4),
    "mamba-parts": Layout((full(16), mamba(16, "align")), 24, 4, 16),
    "mamba-align": Layout((full(4), mamba(4, "align")), 70, 4, 4),
}


def main() -> None:
    folder = Path(sys.argv[1])
    init_none_hash(sha256)
    for name, layout in LAYOUTS.items():
        recording = msgspec.msgpack.encode(list(record(layout)))
        (folder / f"{name}.msgpack.z").write_bytes(zlib.compress(recording, 9))


def record(layout: Layout) -> Iterator[tuple[list[int], int, list[bytes]]]:
    manager = KVCacheManager(
        KVCacheConfig(
            num_blocks=layout.blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec([f"layer.{n}"], spec) for n, spec in enumerate(layout.groups)
            ],
            prefix_cache_retention_interval=layout.retention_interval,
        ),
        max_model_len=PROMPT_TOKENS_MAX,
        scheduler_block_size=layout.aligned_tokens,
        hash_block_size=layout.hash_tokens,
        max_in_flight_tokens=CHUNK_TOKENS,
        enable_kv_cache_events=True,
    )
    hasher = get_request_block_hasher(layout.hash_tokens, sha256)
    for number, tokens in enumerate(prompts(random.Random(SEED))):  # noqa: S311 (made to repeat)
        request = Request(
            str(number), tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher
        )
        cached_tokens, batches = compute(manager, request, number)
        yield tokens, cached_tokens, batches


def compute(manager: KVCacheManager, request: Request, number: int) -> tuple[int, list[bytes]]:
    """Compute a prompt chunk by chunk, as the scheduler would, and free it."""
    blocks, cached_tokens, boundary = manager.get_computed_blocks(request)
    request.shared_prefix_boundary = boundary
    hit, batches = cached_tokens, []
    while request.num_computed_tokens < request.num_tokens:
        left = request.num_tokens - request.num_computed_tokens - hit
        new = min(CHUNK_TOKENS, left)
        manager.new_step_starts()
        slots = manager.allocate_slots(request, new, hit, blocks if hit else None)
        assert slots is not None, "the layout has too few blocks for its longest prompt"
        request.num_computed_tokens += hit + new
        hit = 0
        batches += encode(manager, number)
    manager.free(request)
    return cached_tokens, batches + encode(manager, number)


def encode(manager: KVCacheManager, number: int) -> list[bytes]:
    events = manager.take_events()
    batch = KVEventBatch(ts=float(number), events=events, data_parallel_rank=0)
    return [msgspec.msgpack.encode(batch)] if events else []


def prompts(chance: random.Random) -> Iterator[list[int]]:
    """Yield prompts of a few conversations that grow, are repeated, cut short and branch off."""
    conversations = [[chance.randrange(100) for _ in range(20)] for _ in range(3)]
    for _ in range(PROMPTS):
        number = chance.randrange(len(conversations))
        tokens = conversations[number]
        kind = chance.choice(["grow", "grow", "grow", "repeat", "cut", "branch"])
        if kind in ("cut", "branch"):
            tokens = tokens[: chance.randint(1, len(tokens))]
        if kind in ("grow", "branch"):
            tokens = tokens + [chance.randrange(100) for _ in range(chance.randint(1, 40))]
        if len(tokens) > PROMPT_TOKENS_MAX:
            tokens = tokens[:10]
        conversations[number] = tokens
        yield tokens


if __name__ == "__main__":
    main()
