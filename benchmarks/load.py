"""Plays one workload against one router and says what the router paid for it.

The measured phase lies between two readings of the CPU clocks and of the engines' counters. Every
answer is checked, and so is that the engines saw each request once: a router that is fast because
it loses requests shows up as not clean rather than as fast.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec
import uvloop

from benchmarks.client import Answer, Client
from benchmarks.cpu import CpuReading, machine_busy_s, take_reading
from benchmarks.sample import EngineStats, Sample
from benchmarks.workloads import WORKLOADS, Workload, make_workload

PATH = "/v1/chat/completions"
IDLE_LOOK_S, IDLE_SHARE, IDLE_PATIENCE_S = 0.3, 0.1, 15.0
"""A router is idle when it used less than this share of a core for so long."""
WARM_UP_CLIENTS_MAX = 4
STATS_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Target:
    """A router, and the engines behind it."""

    name: str
    url: str
    pid: int
    engine_urls: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Timing:
    first_byte_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Played:
    """What came back. Answers that failed have no timing."""

    timings: tuple[Timing, ...]
    errors: Counter[str]
    wall_s: float


@dataclass(frozen=True, slots=True)
class Clocks:
    """Everything that is read before and after the measured phase."""

    router: CpuReading
    engines: tuple[CpuReading, ...]
    client_s: float
    machine_s: float
    stats: tuple[EngineStats, ...]


async def measure(target: Target, workload: Workload, round_number: int) -> Sample:
    """Warm up, play the workload, and return what it cost."""
    warm_up = workload.sequences[: workload.warm_up_sequences]
    clients = min(WARM_UP_CLIENTS_MAX, workload.clients)
    warmed = await play(target.url, warm_up, clients, workload.events)
    await until_idle(target)
    before = read_clocks(target)
    played = await play(target.url, workload.sequences, workload.clients, workload.events)
    after = read_clocks(target)
    played.errors.update({f"warm-up: {kind}": n for kind, n in warmed.errors.items()})
    return make_sample(target.name, round_number, workload, played, before, after)


async def until_idle(target: Target) -> None:
    """Wait until the router has done what the warm-up left it to do, or for `IDLE_PATIENCE_S`."""
    deadline = time.monotonic() + IDLE_PATIENCE_S
    busy_s = IDLE_LOOK_S
    while busy_s > IDLE_SHARE * IDLE_LOOK_S and time.monotonic() < deadline:
        earlier = take_reading(target.pid)
        await asyncio.sleep(IDLE_LOOK_S)
        busy_s = take_reading(target.pid).seconds_since(earlier)


async def play(
    url: str, sequences: Sequence[Sequence[bytes]], clients: int, events: int | None
) -> Played:
    """Send all sequences, `clients` at a time, and each in order."""
    parts = urlsplit(url)
    host, port = parts.hostname, parts.port
    assert host is not None, url
    assert port is not None, url
    timings: list[Timing] = []
    errors: Counter[str] = Counter()
    waiting = iter(sequences)

    async def play_some() -> None:
        client = Client(host, port, PATH)
        for sequence in waiting:  # shared: each client takes the next one
            for body in sequence:
                try:
                    answer = await client.post(body)
                except (OSError, TimeoutError) as error:
                    errors[type(error).__name__] += 1
                    continue
                if problem := find_problem(answer, events):
                    errors[problem] += 1
                else:
                    timings.append(Timing(answer.first_byte_s, answer.total_s))
        client.close()

    began = time.perf_counter()
    await asyncio.gather(*(play_some() for _ in range(clients)))
    return Played(tuple(timings), errors, time.perf_counter() - began)


def find_problem(answer: Answer, events: int | None) -> str | None:
    """Return why an answer is not whole and right. `events` as in `Workload`."""
    if answer.status != 200:
        return f"status {answer.status}"
    if events is None:
        return None if b'"chat.completion"' in answer.body else "not a completion"
    if not answer.body.rstrip().endswith(b"data: [DONE]"):
        return "stream without its end"
    seen = answer.body.count(b"data: ")
    return None if seen == events else f"{seen} events instead of {events}"


# --- clocks ---------------------------------------------------------------------------------------


def read_clocks(target: Target) -> Clocks:
    stats = tuple(_fetch_stats(url) for url in target.engine_urls)
    return Clocks(
        router=take_reading(target.pid),
        engines=tuple(take_reading(engine.pid) for engine in stats),
        client_s=time.process_time(),
        machine_s=machine_busy_s(),
        stats=stats,
    )


def _fetch_stats(engine_url: str) -> EngineStats:
    # Not the client above: its cost in the measured phase stays that of the requests alone.
    with urllib.request.urlopen(f"{engine_url}/bench/stats", timeout=STATS_TIMEOUT_S) as answer:
        return msgspec.json.decode(answer.read(), type=EngineStats)


def make_sample(
    router: str,
    round_number: int,
    workload: Workload,
    played: Played,
    before: Clocks,
    after: Clocks,
) -> Sample:
    """Return the sample of a phase that was played between two readings."""
    requests = workload.requests
    gained = _Gained(before.stats, after.stats)
    errors = played.errors + Counter(
        {
            "body that is not valid": int(gained.sum("invalid_bodies")),
            "token ids that are not the prompt's": int(gained.sum("requests_with_wrong_ids")),
        }
    )
    router_s = after.router.seconds_since(before.router)
    engines_s = sum(
        late.seconds_since(early) for early, late in zip(before.engines, after.engines, strict=True)
    )
    client_s = after.client_s - before.client_s
    busy_s = after.machine_s - before.machine_s
    totals_ms = [timing.total_s * 1e3 for timing in played.timings]
    prompt_tokens = gained.sum("prompt_tokens")
    return Sample(
        router=router,
        round=round_number,
        workload=workload.name,
        requests=requests,
        forwarded=int(gained.sum("requests")),
        errors=dict(errors),
        router_cpu_ms=router_s / requests * 1e3,
        engine_cpu_ms=engines_s / requests * 1e3,
        engine_render_cpu_ms=estimate_render_cpu_ms(gained, requests),
        client_cpu_ms=client_s / requests * 1e3,
        foreign_cores=max(0.0, busy_s - router_s - engines_s - client_s) / played.wall_s,
        requests_per_s=len(played.timings) / played.wall_s,
        e2e_ms_p50=percentile(totals_ms, 0.50),
        e2e_ms_p99=percentile(totals_ms, 0.99),
        first_byte_ms_p50=percentile([t.first_byte_s * 1e3 for t in played.timings], 0.50),
        router_resident_mib=after.router.resident_bytes / 2**20,
        body_bytes_mean=workload.body_bytes_mean,
        split=tuple(int(count) for count in gained.each("requests")),
        renders=int(gained.sum("renders")),
        requests_with_ids=int(gained.sum("requests_with_ids")),
        cached_token_share=gained.sum("cached_tokens") / prompt_tokens if prompt_tokens else None,
        cached_share_mean=gained.sum("cached_share_sum") / requests if prompt_tokens else None,
    )


class _Gained:
    """How much the engines' counters rose."""

    def __init__(self, before: Sequence[EngineStats], after: Sequence[EngineStats]) -> None:
        self._pairs = tuple(zip(before, after, strict=True))

    def each(self, name: str) -> list[float]:
        return [getattr(after, name) - getattr(before, name) for before, after in self._pairs]

    def sum(self, name: str) -> float:
        return sum(self.each(name))


def estimate_render_cpu_ms(gained: _Gained, requests: int) -> float | None:
    """Return what the renders would have cost engines that do each in full, per request sent.

    Some were, and were timed; the others are taken to cost the same per byte.
    """
    if not gained.sum("renders"):
        return 0.0
    measured_bytes = gained.sum("measured_render_bytes")
    if not measured_bytes:
        return None
    s_per_byte = gained.sum("measured_render_s") / measured_bytes
    return gained.sum("render_bytes") * s_per_byte / requests * 1e3


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of all values do not exceed; 0 where there are none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


# --- command line ---------------------------------------------------------------------------------


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Play workloads against one running router; print one JSON sample a line."
    )
    parser.add_argument("--name", required=True, help="of the router, for the samples")
    parser.add_argument("--url", required=True, help="of the router: http://127.0.0.1:PORT")
    parser.add_argument("--pid", type=int, required=True, help="of the router")
    parser.add_argument("--engine", action="append", required=True, metavar="URL", dest="engines")
    parser.add_argument("--workload", action="append", choices=WORKLOADS, dest="workloads")
    parser.add_argument("--round", type=int, default=0, help="chooses the texts")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on numbers of requests")
    return parser.parse_args()


def main() -> int:
    """Return the exit code: 0 all samples are clean, 1 not."""
    arguments = _parse_arguments()
    target = Target(arguments.name, arguments.url, arguments.pid, tuple(arguments.engines))
    is_clean = True
    for name in arguments.workloads or WORKLOADS:
        workload = make_workload(name, arguments.round, arguments.scale)
        sample = uvloop.run(measure(target, workload, arguments.round))
        is_clean &= sample.is_clean
        print(msgspec.json.encode(sample).decode(), flush=True)
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
