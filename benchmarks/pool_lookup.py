"""What asking the shared pool costs: keys, round trips, time and processor time, for an agent's prompt.

    .venv/bin/python -m benchmarks.pool_lookup [--json FILE]

A chain of 5,600 blocks (89,600 tokens in blocks of 16), of which the pool has all but a tail. The master
is a simulated one in a process of its own, over HTTP; the client is the gateway's. Each answer is checked.
Times are medians; processor time is this process's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop

from moongate.kvpool.digests import DigestMemory, HashScheme, digest_blocks
from moongate.kvpool.keys import BlockDigest, KeyLayout
from moongate.kvpool.lookup import PrefixLookup
from moongate.kvpool.memory import MemoryPool
from moongate.kvpool.mooncake import MooncakeMaster
from moongate.router import BlockSpace
from moongate.router.blocks import hash_prompt, pack_tokens
from moongate.simulator.master import PoolMaster

BLOCK_TOKENS = 16
CHAIN_BLOCKS = 5_600
TAIL_BLOCKS = 60  # that a turn adds
BLOCK_BYTES = 2_097_152  # 128 KiB a token
SCHEME = HashScheme("sha256", "0")
LAYOUT = KeyLayout("model")
REPETITIONS = 60

ROWS = (
    ("digest_cold_ms", "digests of 5,600 blocks, from nothing", "ms"),
    ("digest_grown_us", "the same, of a turn of 60 blocks", "us"),
    ("known_keys", "look-up from where the turn before ended: keys", ""),
    ("known_round_trips", "... round trips", ""),
    ("known_ms", "... time", "ms"),
    ("known_cpu_ms", "... processor time", "ms"),
    ("cold_keys", "look-up from nothing: keys", ""),
    ("cold_round_trips", "... round trips", ""),
    ("cold_ms", "... time", "ms"),
    ("cold_cpu_ms", "... processor time", "ms"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write the numbers where they are wanted."""
    parser = argparse.ArgumentParser(prog="pool_lookup", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args(arguments)
    numbers = measure()
    for name, text, unit in ROWS:
        print(f"{text:55} {numbers[name]:10.3g} {unit}")
    if options.json is not None:
        options.json.write_text(json.dumps(numbers, indent=1) + "\n")


def measure() -> dict[str, float]:
    tokens = pack_tokens(random.Random(1).choices(range(130_000), k=CHAIN_BLOCKS * BLOCK_TOKENS))
    assert SCHEME.root is not None
    digests = digest_blocks(SCHEME.algorithm, SCHEME.root, tokens, BLOCK_TOKENS)
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(theirs, digests[:-TAIL_BLOCKS]), daemon=True
    )
    server.start()
    try:
        url: str = ours.recv()
        return {**measure_digests(tokens), **uvloop.run(_measure_lookups(url, digests))}
    finally:
        server.terminate()
        server.join()


def _serve(connection: Connection, digests: Sequence[BlockDigest]) -> None:
    """Run a master that has these blocks, and tell its address."""
    pool = MemoryPool(len(digests) * BLOCK_BYTES)
    for digest in digests:
        for key in LAYOUT.keys(digest):
            pool.put(key, BLOCK_BYTES)

    async def serve() -> None:
        master = PoolMaster(pool)
        await master.start()
        connection.send(master.url)
        await asyncio.Event().wait()

    uvloop.run(serve())


def measure_digests(tokens: bytes) -> dict[str, float]:
    chain = hash_prompt(BlockSpace(BLOCK_TOKENS), tokens)
    known = len(chain) - TAIL_BLOCKS
    assert SCHEME.root is not None
    first = digest_blocks(SCHEME.algorithm, SCHEME.root, tokens[: 4 * BLOCK_TOKENS], BLOCK_TOKENS)[
        0
    ]
    cold, grown = [], []
    for _ in range(9):
        memory = DigestMemory()
        began = time.perf_counter()
        memory.digest(SCHEME.algorithm, chain[:known], tokens, BLOCK_TOKENS, first)
        cold.append(time.perf_counter() - began)
        began = time.perf_counter()
        digests = memory.digest(SCHEME.algorithm, chain, tokens, BLOCK_TOKENS, first)
        grown.append(time.perf_counter() - began)
        assert len(digests) == CHAIN_BLOCKS
    return {
        "digest_cold_ms": statistics.median(cold) * 1e3,
        "digest_grown_us": statistics.median(grown) * 1e6,
    }


async def _measure_lookups(url: str, digests: Sequence[BlockDigest]) -> dict[str, float]:
    master = MooncakeMaster(url, timeout_s=2.0)
    numbers: dict[str, float] = {}
    try:
        for name, likely in (("known", CHAIN_BLOCKS - TAIL_BLOCKS), ("cold", None)):
            times, cpu_times = [], []
            for _ in range(REPETITIONS):
                lookup = PrefixLookup(master, LAYOUT, digests)
                began, cpu_began = time.perf_counter(), time.process_time()
                prefix = await lookup.run(likely)
                cpu_times.append(time.process_time() - cpu_began)
                times.append(time.perf_counter() - began)
                assert prefix.blocks == CHAIN_BLOCKS - TAIL_BLOCKS
            numbers[f"{name}_keys"] = lookup.asked_keys
            numbers[f"{name}_round_trips"] = lookup.round_trips
            numbers[f"{name}_ms"] = statistics.median(times) * 1e3
            numbers[f"{name}_cpu_ms"] = statistics.median(cpu_times) * 1e3
    finally:
        await master.close()
    return numbers


if __name__ == "__main__":
    main()
