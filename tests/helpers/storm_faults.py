"""What is done to one engine at a time, or to the gateway's clock: each fault is over when it returns."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from event_proxy import Luck
from fault_proxy import Weather
from storm_engines import StormEngine

GARBAGE = (
    b"\x00\xff\x16\x03\x01 this is no HTTP\r\n\r\n",
    b"HTTP/1.1 999 Nonsense\r\ncontent-length: 2\r\n\r\nno",
    b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nnot-a-size\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n" + b"x-pad: " + b"p" * 70_000,
    b"",
)
"""In place of an answer: none of it is one, so that it can be asked for elsewhere."""

ODD_EVENTS = (
    b": a comment \xff\xfe\n\n",
    b"event: unknown\ndata\nretry: x\n\n",
    b"data:\n\n",
    b"id: 7\r\n\r\n",
)
"""Between a stream's events: odd, but none of it is what ends one, nor what clients read."""


class Clock:
    """The monotonic clock, as of a machine that was asleep now and then."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@dataclass(frozen=True, slots=True)
class Moment:
    """What a fault gets to do its harm with."""

    engine: StormEngine
    clock: Clock
    chance: random.Random
    lasts_s: float
    jump_s: float

    async def lasts(self) -> None:
        await asyncio.sleep(self.lasts_s)

    async def weather(self, weather: Weather) -> None:
        """Let it last for a while."""
        self.engine.proxy.weather = weather
        await self.lasts()
        self.engine.proxy.weather = Weather()

    async def luck(self, luck: Luck) -> None:
        self.engine.events.luck = luck
        await self.lasts()
        self.engine.events.luck = Luck()


Fault = Callable[[Moment], Awaitable[None]]


async def killed(m: Moment) -> None:
    await m.engine.kill()
    await asyncio.sleep(m.lasts_s / 2)
    await m.engine.restart()


async def frozen(m: Moment) -> None:
    m.engine.signal(signal.SIGSTOP)
    await m.lasts()
    m.engine.signal(signal.SIGCONT)


async def slow(m: Moment) -> None:
    await m.weather(Weather(delay_s=0.1))


async def throttled(m: Moment) -> None:
    await m.weather(Weather(bytes_per_s=4000.0))


async def garbage(m: Moment) -> None:
    await m.weather(Weather(garbage=m.chance.choice(GARBAGE)))


async def odd_events(m: Moment) -> None:
    await m.weather(Weather(inserted=m.chance.choice(ODD_EVENTS)))


async def doubled(m: Moment) -> None:
    await m.weather(Weather(duplicates=True))


async def half_open(m: Moment) -> None:
    """Connections stand, and nothing that is sent into them is ever answered."""
    await m.weather(Weather(swallows=True))
    m.engine.proxy.end_connections(with_reset=True)


async def deaf(m: Moment) -> None:
    """Requests arrive, and their answers are lost."""
    await m.weather(Weather(drops_answers=True))
    m.engine.proxy.end_connections(with_reset=True)


async def reset(m: Moment) -> None:
    m.engine.proxy.end_connections(with_reset=True)


async def cut(m: Moment) -> None:
    m.engine.proxy.end_connections(with_reset=False)


async def events_lost(m: Moment) -> None:
    await m.luck(Luck(lost=0.3))


async def events_repeated(m: Moment) -> None:
    await m.luck(Luck(repeated=0.5))


async def events_swapped(m: Moment) -> None:
    await m.luck(Luck(swapped=0.5))


async def clock_jumped(m: Moment) -> None:
    m.clock.ahead_s += m.jump_s


FAULTS: tuple[Fault, ...] = (
    killed, frozen, slow, throttled, garbage, odd_events, doubled, half_open, deaf, reset, cut,
    events_lost, events_repeated, events_swapped, clock_jumped,
)  # fmt: skip
