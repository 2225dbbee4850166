"""What seeding hot prefixes gains, in virtual time: 40 sessions on one system prompt that one instance has.

The routing core before the engines' pure models, which share a pool (`simulator/fleet.py`); the same policy
with seeding and without. Each row is one way in which sessions come, on one kind of fleet. `all warm` is
what could be gained at most: every instance has the prompt from the start.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from moongate.kvpool.memory import MemoryPool
from moongate.router import InstanceId, PoolChecked, RouterCore, SeedingLimits, make_policy
from moongate.simulator.engine import EngineProfile
from moongate.simulator.fleet import Sent, VirtualFleet

SESSIONS = 40
SYSTEM_PROMPT = range(6000)
POOL_BYTES = 1 << 42  # never full
QUIET_S = 30.0
"""Between the first session, by which one instance has the prompt, and the others."""

Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class Hardware:
    """A fleet, and how long the system prompt takes to come from the pool."""

    name: str
    instances: int
    kv_bytes_per_token: int
    link_bytes_per_s: float

    @property
    def profile(self) -> EngineProfile:
        return EngineProfile(
            kv_bytes_per_token=self.kv_bytes_per_token, kv_link_bytes_per_s=self.link_bytes_per_s
        )


@dataclass(frozen=True, slots=True)
class Pace:
    """What a turn is."""

    question_tokens: int = 200
    answer_tokens: int = 40
    thinking_s: float = 0.2  # between an answer and what its agent does next


USUAL = Pace()
PACES = tuple(
    itertools.starmap(Pace, itertools.product((100, 200, 400), (20, 40, 80), (0.05, 0.2, 1.0)))
)

LARGE_4 = Hardware("4 x 70 B, 4 GB/s", 4, 327_680, 4e9)
LARGE_8 = Hardware("8 x 70 B, 4 GB/s", 8, 327_680, 4e9)
SMALL_4 = Hardware("4 x 8 B, 4 GB/s", 4, 131_072, 4e9)
FAST_4 = Hardware("4 x 8 B, 10 GB/s", 4, 131_072, 10e9)
SLOW_4 = Hardware("4 x 8 B, 1.25 GB/s", 4, 131_072, 1.25e9)
HARDWARE = (LARGE_4, LARGE_8, SMALL_4, FAST_4, SLOW_4)
"""By parameters of the model (80 layers or 32, 8 KV heads, 16 bits) and by link: 4 GB/s is the prior that
costs start from, 1.25 a network of 10 Gbit/s, 10 a dedicated one of 100."""


def own_tokens(number: int, count: int) -> Tokens:
    """Return tokens that nobody else sends."""
    return range(1_000_000 * number, 1_000_000 * number + count)


class Crowd:
    """Sessions that begin with the system prompt, each with a question of its own."""

    def __init__(self, fleet: VirtualFleet, turns: int = 1, pace: Pace = USUAL) -> None:
        self.fleet = fleet
        self.pace = pace
        self.turns = turns
        self.begun = 0

    def begin(self, then: Callable[[], None] = lambda: None) -> None:
        """Let a session begin now, if there are any left; `then` follows its first answer."""
        if self.begun == SESSIONS:
            return
        self.begun += 1
        self._ask([*SYSTEM_PROMPT], self.begun * 100, 1, then)

    def begin_at(self, offsets_s: Sequence[float]) -> None:
        for offset_s in offsets_s:
            self.fleet.at(self.fleet.now + offset_s, self.begin)

    def _ask(self, history: list[int], number: int, turn: int, then: Callable[[], None]) -> None:
        def answered(sent: Sent) -> None:
            then()
            if turn < self.turns:
                more = [*sent.tokens, *sent.output_ids]
                self.fleet.at(
                    self.fleet.now + self.pace.thinking_s,
                    lambda: self._ask(more, number + 1, turn + 1, lambda: None),
                )

        tokens = [*history, *own_tokens(number, self.pace.question_tokens)]
        self.fleet.arrive(tokens, self.pace.answer_tokens, answered)


# --- how they come --------------------------------------------------------------------------------


def grow(crowd: Crowd, by: int) -> None:
    """One agent; each starts so many others when it has had its first answer, until there are 40."""

    def begin() -> None:
        crowd.begin(then=start_others)

    def start_others() -> None:
        for _ in range(by):
            crowd.fleet.at(crowd.fleet.now + crowd.pace.thinking_s, begin)

    begin()


def at_once(crowd: Crowd) -> None:
    crowd.begin_at([0.0] * SESSIONS)


def evenly(crowd: Crowd, within_s: float) -> None:
    crowd.begin_at([n * within_s / SESSIONS for n in range(SESSIONS)])


def in_waves(crowd: Crowd) -> None:
    crowd.begin_at([1.5 * (n // 10) for n in range(SESSIONS)])


def after_scouts(crowd: Crowd, scouts: int, pause_s: float) -> None:
    """A few, a tenth of a second apart, and the others together after a pause."""
    rest = SESSIONS - scouts
    crowd.begin_at([*(0.1 * n for n in range(scouts)), *[pause_s] * rest])


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A way in which the sessions come."""

    name: str
    begin: Callable[[Crowd], None]
    turns: int = 1


GROW_BY_3 = Arrivals("each starts 3 more", lambda crowd: grow(crowd, 3))
GROW_BY_2 = Arrivals("each starts 2 more", lambda crowd: grow(crowd, 2))
SCOUTS = Arrivals("8 scouts, 3 s, 32", lambda crowd: after_scouts(crowd, 8, 3.0))
AT_ONCE = Arrivals("all at once", at_once)
ARRIVALS = (
    GROW_BY_3,
    GROW_BY_2,
    SCOUTS,
    Arrivals("4 scouts, 2 s, 36", lambda crowd: after_scouts(crowd, 4, 2.0)),
    Arrivals("4 scouts, 2 s, 36; 4 turns", lambda crowd: after_scouts(crowd, 4, 2.0), turns=4),
    Arrivals("4 waves of 10", in_waves),
    Arrivals("evenly within 2 s", lambda crowd: evenly(crowd, 2.0)),
    Arrivals("evenly within 4 s", lambda crowd: evenly(crowd, 4.0)),
    Arrivals("evenly within 10 s", lambda crowd: evenly(crowd, 10.0)),
    AT_ONCE,
    Arrivals("all at once; 4 turns", at_once, turns=4),
)


# --- one run --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one run."""

    requests_per_s: float
    ttft_s_mean: float
    ttft_s_max: float
    from_pool: int  # requests that were sent to where they had to fetch
    seedings: int


def make_fleet(
    hardware: Hardware,
    seeding: SeedingLimits | None,
    policy: str = "kv_cost",
    pool: PoolChecked | None = None,
    *,
    all_warm: bool = False,
) -> VirtualFleet:
    """Return a fleet of which one instance (or each) has the system prompt, and the pool as well."""
    core = RouterCore(make_policy(policy), lambda n: n - 1, seeding=seeding)
    names = [InstanceId(f"i{n}") for n in range(hardware.instances)]
    fleet = VirtualFleet(core, names, hardware.profile, MemoryPool(POOL_BYTES))
    fleet.handle(pool or PoolChecked(is_up=True, use=0.1))
    first = [*SYSTEM_PROMPT, *own_tokens(1, 50)]
    fleet.arrive(first, max_tokens=1)
    fleet.run()
    if all_warm:
        for name in names[1:]:
            fleet.warm(name, first)
    fleet.run(until=fleet.now + QUIET_S)
    return fleet


def measure(fleet: VirtualFleet, arrivals: Arrivals, pace: Pace = USUAL) -> Outcome:
    """Let the sessions come, and return what came of them."""
    before = len(fleet.sent)
    arrivals.begin(Crowd(fleet, arrivals.turns, pace))
    fleet.run()
    sent = list(fleet.sent.values())[before:]
    ends = [one.ended_at for one in sent if one.ended_at is not None]
    assert len(ends) == len(sent) == SESSIONS * arrivals.turns
    ttfts = [one.ttft_s for one in sent]
    return Outcome(
        len(sent) / (max(ends) - min(one.arrived_at for one in sent)),
        sum(ttfts) / len(ttfts),
        max(ttfts),
        Counter(one.reason.value for one in sent if one.reason is not None)["pool_prefix"],
        len(fleet.seedings),
    )


@dataclass(frozen=True, slots=True)
class Row:
    hardware: str
    arrivals: str
    without: Outcome
    seeded: Outcome
    all_warm: Outcome

    @property
    def gain(self) -> float:
        return self.seeded.requests_per_s / self.without.requests_per_s


def compare(hardware: Hardware, arrivals: Arrivals, pace: Pace = USUAL) -> Row:
    """Return the same with seeding and without."""
    return Row(
        hardware.name,
        arrivals.name,
        measure(make_fleet(hardware, None), arrivals, pace),
        measure(make_fleet(hardware, SeedingLimits()), arrivals, pace),
        measure(make_fleet(hardware, None, all_warm=True), arrivals, pace),
    )


def rows() -> Iterator[Row]:
    for hardware in HARDWARE:
        for arrivals in ARRIVALS:
            yield compare(hardware, arrivals)


def vary() -> None:
    """Print how the gain depends on the pace, for the ways in which seeding can gain much."""
    print(f"| fleet | sessions come | least | median | most | at least 1.5, of {len(PACES)} |")
    print("| --- | --- | --- | --- | --- | --- |")
    for hardware, arrivals in itertools.product(HARDWARE, (GROW_BY_3, GROW_BY_2, SCOUTS)):
        gains = sorted(compare(hardware, arrivals, pace).gain for pace in PACES)
        count = sum(gain >= 1.5 for gain in gains)
        median = statistics.median(gains)
        print(
            f"| {hardware.name} | {arrivals.name} | {gains[0]:.2f} | {median:.2f} |"
            f" {gains[-1]:.2f} | {count} |"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all, and print a table as it comes."""
    parser = argparse.ArgumentParser(
        prog="hot_prefixes", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--vary", action="store_true", help="also how the gain depends on the pace")
    options = parser.parse_args(arguments)
    print(
        "| fleet | sessions come | requests/s | seeded | gain | all warm | mean TTFT, s | seedings |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    measured: list[dict[str, object]] = []
    for row in rows():
        measured.append({**asdict(row), "gain": row.gain})
        ttfts = f"{row.without.ttft_s_mean:.3f} -> {row.seeded.ttft_s_mean:.3f}"
        print(
            f"| {row.hardware} | {row.arrivals} | {row.without.requests_per_s:.2f} |"
            f" {row.seeded.requests_per_s:.2f} | {row.gain:.2f} |"
            f" {row.all_warm.requests_per_s:.2f} | {ttfts} | {row.seeded.seedings} |"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(measured, indent=1) + "\n")
    if options.vary:
        vary()


if __name__ == "__main__":
    main()
