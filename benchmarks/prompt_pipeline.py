"""What reading a prompt costs: parse, render, encode, hash, overlap and decide, turn by turn.

    python -m benchmarks.prompt_pipeline --json FILE [--tokenizer DIR]

In one process, without sockets but for the last figure. All times are processor time of all threads, in
ms, medians; a calibration (the full encode of a fixed text) tells how fast the machine is just now: the
asked figures hold where it takes 300 ms, and are scaled by it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from benchmarks.instances import add_instance
from benchmarks.processes import Child, completes, is_healthy, take_free_ports
from benchmarks.report import format_table
from benchmarks.routers import MOONGATE, PROJECT, EngineAddress, Place, make_moongate_settings
from benchmarks.side_by_side import describe_machine, find_commit, find_tokenizer
from benchmarks.workloads import BLOCK_SIZE_TOKENS, MODEL, Message, excerpt
from moongate.engine_plugins.vllm_render import ModelRenderer
from moongate.gateway.config.process_settings import LimitsSettings
from moongate.gateway.config.routing_settings import TokenizerSettings
from moongate.gateway.dialects.body import parse_body
from moongate.gateway.dialects.routes import PROXIED
from moongate.gateway.instances.engine_api import EngineApi
from moongate.gateway.prompts.prompt import PromptPipeline, ReadPrompt
from moongate.router import (
    BatchReceived,
    BlockSpace,
    Forward,
    InstanceFacts,
    InstanceId,
    ModelCard,
    Outcome,
    Request,
    RequestArrived,
    RequestFinished,
    RequestId,
    RouterCore,
    SourceId,
    make_policy,
)
from moongate.router.blocks import TOKEN_BYTES
from moongate.router.events import BlocksStored
from moongate.router.model import BlockHash, Tier

CALIBRATION_MS = 300.0
CALIBRATION_CHARACTERS = 351_000
CONVERSATION_CHARACTERS = 330_000
MESSAGE_CHARACTERS = 4_100
TURNS = 15
DISTINCT_PROMPTS, DISTINCT_CHARACTERS = 300, 310_000
HEALTH_PROMPTS, HEALTH_CHARACTERS = 8, 1_000_000
CHAT = PROXIED["/v1/chat/completions"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value beside what is asked (None: nothing)."""

    name: str
    unit: str
    measured: float
    asked: float | None = None


class TimedRenderer(ModelRenderer):
    """Notes the processor time that encoding takes, whichever thread does it."""

    encode_s = 0.0

    def encode_pieces(self, pieces: Sequence[str]) -> list[list[int]]:
        began = time.thread_time()
        ids = super().encode_pieces(pieces)
        TimedRenderer.encode_s += time.thread_time() - began
        return ids


class SameRenderer(EngineApi):
    """Stands for an engine whose `/tokenize` agrees, so that the local tokenizer is used."""

    def __init__(self, renderer: ModelRenderer) -> None:
        super().__init__("http://127.0.0.1:1", timeout_s=1.0)
        self._renderer = renderer

    async def tokenize(self, body: Any, timeout_s: float | None = None) -> list[int]:
        if "messages" in body:
            return self._renderer.chat_token_ids(body)
        return self._renderer.completion_token_ids(body["prompt"])


class Reader:
    """A pipeline and a core behind it, as in a gateway of two instances that announce their blocks."""

    def __init__(self, directory: Path) -> None:
        self.renderer = TimedRenderer.load(directory)
        self._held: dict[InstanceId, dict[BlockHash, int]] = {}  # by the engine's names
        self._batches: Counter[InstanceId] = Counter()
        self.core = RouterCore(make_policy("kv_cost"), random.Random(1).randrange)
        for name in ("a", "b"):
            instance = InstanceId(name)
            facts = InstanceFacts((ModelCard(MODEL),), BLOCK_SIZE_TOKENS, 1_000_000)
            add_instance(self.core, instance, facts)
            self._announce(instance, ())
        self.pipeline = PromptPipeline(
            mode="local",
            path=str(directory),
            budget_s=TokenizerSettings().budget_ms / 1000,
            waiting_max=100,
            memory_bytes_max=LimitsSettings().prompt_memory_bytes_max,
            spaces=self.core.spaces,
            remotes=lambda _: [],
            clock=time.monotonic,
            load=lambda _: self.renderer,
        )
        self._requests = 0

    async def learn(self) -> None:
        way = await self.pipeline.learn(MODEL, None, SameRenderer(self.renderer))
        assert way == "local", way

    async def read(self, raw: bytes) -> tuple[float, float]:
        """Return the ms that a body took in all, and in the encoder."""
        self._requests += 1
        request_id = RequestId(str(self._requests))
        TimedRenderer.encode_s = 0.0
        began = time.process_time()
        body = parse_body(raw, CHAT)
        read = await self.pipeline.read(CHAT, body)
        request = Request(id=request_id, model=MODEL, prompt=read.prompt)
        forward = self.core.handle(RequestArrived(request), time.monotonic())[0]
        took = time.process_time() - began
        assert isinstance(forward, Forward)
        if read.tokenized is not None:
            self._store(forward.holder.instance_id, read)
        self.core.handle(RequestFinished(request_id, Outcome.ANSWERED), time.monotonic())
        return took * 1000, TimedRenderer.encode_s * 1000

    def _store(self, instance: InstanceId, read: ReadPrompt) -> None:
        """Announce the blocks that the instance did not hold, as its engine would."""
        assert read.prompt is not None
        assert read.tokenized is not None
        chain = read.prompt.chains[BlockSpace(BLOCK_SIZE_TOKENS)]
        held = self._held.setdefault(instance, {})
        known = next((n for n, block in enumerate(chain) if block not in held), len(chain))
        new = chain[known:]
        if not new:
            return
        held |= {block: len(held) + n for n, block in enumerate(new)}
        size = BLOCK_SIZE_TOKENS * TOKEN_BYTES
        event = BlocksStored(
            engine_hashes=tuple(held[block] for block in new),
            parent=held[chain[known - 1]] if known else None,
            tokens=read.tokenized.tokens()[known * size : len(chain) * size],
            block_size_tokens=BLOCK_SIZE_TOKENS,
            tier=Tier.DEVICE,
        )
        self._announce(instance, (event,))

    def _announce(self, instance: InstanceId, events: tuple[BlocksStored, ...]) -> None:
        sequence = self._batches[instance]
        self._batches[instance] += 1
        batch = BatchReceived(SourceId(instance), sequence, events, digest=bytes(sequence % 256))
        self.core.handle(batch, time.monotonic())


# --- texts ----------------------------------------------------------------------------------------


def make_conversation(chance: random.Random, characters: int) -> list[Message]:
    messages: list[Message] = [{"role": "system", "content": excerpt(chance, MESSAGE_CHARACTERS)}]
    for number in range(characters // MESSAGE_CHARACTERS):
        role = "assistant" if number % 2 else "user"
        messages.append({"role": role, "content": excerpt(chance, MESSAGE_CHARACTERS)})
    return messages


def make_body(messages: Sequence[Message]) -> bytes:
    return orjson.dumps({"model": MODEL, "messages": messages, "max_tokens": 1})


def grow(
    chance: random.Random, messages: list[Message], characters: int, turns: int
) -> Iterator[list[Message]]:
    """Iterate over turns that each add an answer and a question of together so many characters."""
    for _ in range(turns):
        half = characters // 2
        messages = [
            *messages,
            {"role": "assistant", "content": excerpt(chance, half)},
            {"role": "user", "content": excerpt(chance, half)},
        ]
        yield messages


# --- what is measured -----------------------------------------------------------------------------


def calibrate(renderer: ModelRenderer) -> float:
    """Return the ms that a full encode of the fixed text takes."""
    text = excerpt(random.Random("calibration"), CALIBRATION_CHARACTERS)
    times = []
    for _ in range(5):
        began = time.process_time()
        renderer.encode(text, add_special_tokens=False)
        times.append((time.process_time() - began) * 1000)
    return statistics.median(times)


async def measure_turns(reader: Reader, scale: float) -> list[Figure]:
    chance = random.Random("turns")
    messages = make_conversation(chance, CONVERSATION_CHARACTERS)
    await reader.read(make_body(messages))
    await asyncio.sleep(1)  # over the budget, so it is encoded behind our back
    same = [(await reader.read(make_body(messages)))[0] for _ in range(TURNS)]
    figures = [Figure("the same 330 KB again", "ms", statistics.median(same), 2.0 * scale)]
    for characters, asked, asked_rest in ((6_000, 15.0, 2.5), (1_000, None, None)):
        turns = list(grow(chance, messages, characters, TURNS))
        taken = [await reader.read(make_body(turn)) for turn in turns]
        messages = turns[-1]
        in_all = statistics.median(total for total, _ in taken)
        rest = statistics.median(total - encoding for total, encoding in taken)
        what = f"turn of {characters // 1000} KB in {CONVERSATION_CHARACTERS // 1000} KB"
        figures += [
            Figure(what, "ms", in_all, asked and asked * scale),
            Figure(f"{what}, all but encoding", "ms", rest, asked_rest and asked_rest * scale),
        ]
    return figures


async def measure_memory(reader: Reader) -> Figure:
    """Read many distinct prompts; the process's peak is what counts."""
    chance = random.Random("memory")
    for _ in range(DISTINCT_PROMPTS):
        await reader.read(make_body(make_conversation(chance, DISTINCT_CHARACTERS)))
        while reader.pipeline.is_busy:  # noqa: ASYNC110 - nothing tells when the threads are done
            await asyncio.sleep(0.01)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    name = f"peak memory after {DISTINCT_PROMPTS} distinct prompts of 320 KB"
    return Figure(name, "MiB", peak_mib, 1536.0)


async def measure_health(directory: Path, folder: Path) -> Figure:
    """Return how long `/health` takes at most (p99) while large prompts are tokenised."""
    port, metrics_port, *engine_ports = take_free_ports(5)
    engine = EngineAddress(*engine_ports)
    place = Place(port, metrics_port, (engine,), directory, folder)
    settings = make_moongate_settings("kv_cost", {"mode": "local"}, place)
    (folder / "moongate.yaml").write_text(json.dumps(settings), encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.mock_engine", "--port", str(engine.port)]
    command += ["--tokenizer", str(directory), "--kv-events-port", str(engine.kv_events_port)]
    command += ["--kv-replay-port", str(engine.kv_replay_port)]
    mock = Child.start(command, folder / "engine.log", PROJECT)
    serve = [str(MOONGATE), "serve", "-c", str(folder / "moongate.yaml")]
    gateway = None
    try:
        mock.wait_until(lambda: is_healthy(engine.url))
        gateway = Child.start(serve, folder / "gateway.log", folder)
        url = f"http://127.0.0.1:{port}"
        gateway.wait_until(lambda: completes(url))
        times = await _probe_while_tokenising(url)
    finally:
        if gateway is not None:
            gateway.stop()
        mock.stop()
    p99 = sorted(times)[max(int(len(times) * 0.99) - 1, 0)]
    return Figure(f"/health, p99, while {HEALTH_PROMPTS} prompts of 1 MB are read", "ms", p99, 50.0)


async def _probe_while_tokenising(url: str) -> list[float]:
    chance = random.Random("health")
    bodies = [
        make_body([{"role": "user", "content": excerpt(chance, HEALTH_CHARACTERS)}])
        for _ in range(HEALTH_PROMPTS)
    ]
    posts = [asyncio.create_task(asyncio.to_thread(_post, url, body)) for body in bodies]
    times: list[float] = []
    while not all(post.done() for post in posts) or len(times) < 100:
        began = time.perf_counter()
        await asyncio.to_thread(_get, f"{url}/health")
        times.append((time.perf_counter() - began) * 1000)
        await asyncio.sleep(0.005)
    await asyncio.gather(*posts)
    return times


def _post(url: str, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200


def _get(url: str) -> None:
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert answer.status == 200


# --- command line ---------------------------------------------------------------------------------


async def measure_all(directory: Path) -> list[Figure]:
    reader = Reader(directory)
    await reader.learn()
    calibration = calibrate(reader.renderer)
    scale = calibration / CALIBRATION_MS
    figures = [Figure("calibration: full encode of 351 KB", "ms", calibration)]
    figures += await measure_turns(reader, scale)
    figures.append(await measure_memory(reader))
    reader.pipeline.close()
    with tempfile.TemporaryDirectory(prefix="moongate-bench-") as folder:
        figures.append(await measure_health(directory, Path(folder)))
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what reading a prompt costs.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="for the figures")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="default: SmolLM2, if made")
    arguments = parser.parse_args()
    directory = arguments.tokenizer or find_tokenizer()
    if directory is None:
        print("no SmolLM2 in the cache (make bench makes it) and no --tokenizer", file=sys.stderr)
        return 2
    figures = asyncio.run(measure_all(directory.resolve()))
    rows = [
        (f.name, f"{f.measured:.2f} {f.unit}", f"{f.asked:.2f}" if f.asked is not None else "")
        for f in figures
    ]
    print(format_table(("what", "measured", "asked, at most"), rows))
    if arguments.json is not None:
        found = {
            "commit": find_commit(),
            "machine": describe_machine(),
            "figures": [
                {"name": f.name, "unit": f.unit, "measured": f.measured, "asked": f.asked}
                for f in figures
            ],
        }
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
