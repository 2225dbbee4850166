"""The workers' hub is to its clients as Redis is: the same calls, the same answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from live_gateway import until
from redis.asyncio.client import Pipeline
from redis_process import RedisProcess, needs_redis

from moongate.gateway.auth.rates import Measure, RateLimits, Verdict
from moongate.gateway.replicas.hub import Hub
from moongate.gateway.replicas.shared_rates import SharedRates
from moongate.gateway.replicas.shared_state import SILENCE_S, SharedState, StateRefused

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]

BYTES_MAX = 1_000_000


@pytest_asyncio.fixture(params=["hub", pytest.param("redis", marks=needs_redis)])
async def state(request: Any, tmp_path: Path) -> AsyncIterator[SharedState]:
    """A connection to either."""
    if request.param == "redis":
        with RedisProcess(tmp_path) as server:
            connection = SharedState(server.url, timeout_s=5.0, clock=time.monotonic)
            await connection.start()
            yield connection
            await connection.close()
        return
    hub = Hub(tmp_path / "hub", bytes_max=BYTES_MAX, clock=time.monotonic, on_gone=lambda _: None)
    await hub.start()
    connection = SharedState(f"unix://{tmp_path}/hub", timeout_s=5.0, clock=time.monotonic)
    await connection.start()
    yield connection
    await connection.close()
    await hub.close()


async def ask(state: SharedState, *calls: Callable[[Pipeline], object]) -> list[Any]:
    return await state.ask(lambda pipeline: [call(pipeline) for call in calls])


async def test_strings(state: SharedState) -> None:
    assert await ask(
        state,
        lambda p: p.set("k", b"v\r\n\x00"),
        lambda p: p.get("k"),
        lambda p: p.set("k", b"w", get=True),
        lambda p: p.exists("k", "none"),
        lambda p: p.getdel("k"),
        lambda p: p.getdel("k"),
        lambda p: p.get("k"),
        lambda p: p.delete("k"),
        lambda p: p.set("large", b"x" * 300_000),
    ) == [True, b"v\r\n\x00", b"v\r\n\x00", 1, b"w", None, None, 0, True]


async def test_what_ends(state: SharedState) -> None:
    await ask(
        state,
        lambda p: p.set("a", b"1", px=100),
        lambda p: p.set("b", b"2", ex=100),
        lambda p: p.expire("b", 1),
        lambda p: p.set("c", b"3", px=100),
        lambda p: p.getex("c", ex=100),
    )
    await asyncio.sleep(0.2)
    found = await ask(state, lambda p: p.get("a"), lambda p: p.get("b"), lambda p: p.get("c"))
    assert found == [None, b"2", b"3"]
    assert await ask(state, lambda p: p.expire("a", 5), lambda p: p.getex("a", ex=5)) == [0, None]


async def test_hashes(state: SharedState) -> None:
    assert await ask(
        state,
        lambda p: p.hset("h", "f", b"1"),
        lambda p: p.hset("h", "f", b"2"),
        lambda p: p.hset("h", "g", b"3"),
        lambda p: p.hgetall("h"),
        lambda p: p.hdel("h", "f"),
        lambda p: p.hdel("h", "f"),
        lambda p: p.hgetall("h"),
        lambda p: p.hdel("h", "g"),
        lambda p: p.exists("h"),
        lambda p: p.hgetall("h"),
        lambda p: p.expire("h", 5),
    ) == [1, 0, 1, {b"f": b"2", b"g": b"3"}, 1, 0, {b"g": b"3"}, 1, 0, {}, 0]


async def test_a_hash_is_no_string(state: SharedState) -> None:
    await ask(state, lambda p: p.hset("h", "f", b"1"), lambda p: p.set("s", b"1"))
    for call in (lambda p: p.get("h"), lambda p: p.hset("s", "f", b"1")):
        with pytest.raises(StateRefused):
            await ask(state, call)
    assert state.is_up


async def test_messages_come_to_all_who_listen(state: SharedState) -> None:
    heard: list[tuple[str, bytes]] = []
    state.listen("x", lambda data: heard.append(("one", data)))
    state.listen("x", lambda data: heard.append(("other", data)))
    state.listen("y", lambda data: heard.append(("none", data)))

    async def are_two() -> bool:
        return await ask(state, lambda p: p.publish(state.channel("x"), b"")) == [2]

    await until(are_two)
    heard.clear()
    message = bytes(range(256)) * 1000
    assert await state.publish("x", message)
    await until(lambda: len(heard) == 2)
    assert sorted(heard) == [("one", message), ("other", message)]


FIVE_A_SECOND = RateLimits(requests_per_minute=300)
TEN_A_MINUTE = RateLimits(requests_per_minute=10)


async def test_a_rate_is_kept_by_all_together(state: SharedState) -> None:
    one, other = SharedRates(state), SharedRates(state)
    verdicts = [
        await rates.take("t", TEN_A_MINUTE, 0, 0.0) for _ in range(6) for rates in (one, other)
    ]
    assert [v.lacking for v in verdicts] == [None] * 10 + [Measure.REQUESTS] * 2
    assert not any(v.is_alone for v in verdicts)
    assert 5.0 < verdicts[-1].retry_after_s <= 6.0
    for _ in range(300):
        await one.take("u", FIVE_A_SECOND, 0, 0.0)
    refused = await until_refused(other, "u", FIVE_A_SECOND)
    assert 0 < refused.retry_after_s <= 0.2
    await asyncio.sleep(refused.retry_after_s + 0.01)
    assert (await one.take("u", FIVE_A_SECOND, 0, 0.0)).lacking is None


async def until_refused(rates: SharedRates, name: str, limits: RateLimits) -> Verdict:
    while True:
        verdict = await rates.take(name, limits, 0, 0.0)
        if verdict.lacking is not None:
            return verdict


async def test_a_request_draws_on_several_buckets_or_on_none(state: SharedState) -> None:
    """Tokens are let through while there is one, may be owed, and are settled afterwards."""
    rates = SharedRates(state)
    limits = RateLimits(requests_per_minute=3, tokens_per_minute=1000)

    async def take(tokens: int) -> tuple[Measure | None, list[int]]:
        verdict = await rates.take("t", limits, tokens, 0.0)
        return verdict.lacking, [room.remaining // 10 * 10 for room in verdict.rooms.values()][1:]

    assert await take(800) == (None, [200])
    taken = await rates.take("t", limits, 700, 0.0)
    refused = await rates.take("t", limits, 1, 0.0)
    assert refused.lacking is Measure.TOKENS
    assert refused.rooms[Measure.REQUESTS].remaining == 1  # refused for one, it took of none
    assert refused.retry_after_s == pytest.approx(30, rel=0.05)
    rates.settle("t", limits, -600, 0.0, taken)
    await rates.close()
    assert await take(0) == (None, [100])
    rates.settle("t", limits, -5000, 0.0, taken)
    await rates.close()
    full = await rates.take("t", limits, 0, 0.0)
    assert (full.lacking, full.rooms[Measure.TOKENS].remaining) == (Measure.REQUESTS, 1000)


async def test_of_many_at_once_just_as_many_are_let_through_as_there_is_room_for(
    state: SharedState,
) -> None:
    rates, limits = [SharedRates(state) for _ in range(4)], RateLimits(requests_per_minute=30)
    verdicts = await asyncio.gather(*(rates[n % 4].take("t", limits, 0, 0.0) for n in range(100)))
    assert sum(v.lacking is None for v in verdicts) == 30


async def test_who_leaves_while_it_is_counted_has_its_tokens_back(state: SharedState) -> None:
    rates, limits = SharedRates(state), RateLimits(tokens_per_minute=10_000)
    for _ in range(5):
        taking = asyncio.create_task(rates.take("t", limits, 1500, 0.0))
        await asyncio.sleep(0)
        taking.cancel()
        assert isinstance((await asyncio.gather(taking, return_exceptions=True))[0], BaseException)
    await rates.close()
    await rates.take("t", limits, 20_000, 0.0)  # what is refused isn't given back
    taking = asyncio.create_task(rates.take("t", limits, 5000, 0.0))
    await asyncio.sleep(0)
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    await rates.close()
    found = await rates.take("t", limits, 0, 0.0)
    assert found.rooms[Measure.TOKENS].remaining == 0
    assert found.retry_after_s == pytest.approx(60, rel=0.02)  # 10,000 are owed


async def test_a_subscription_in_which_nothing_comes_goes_on(state: SharedState) -> None:
    heard: list[bytes] = []
    state.listen("quiet", heard.append)
    await asyncio.sleep(2 * SILENCE_S + 0.3)
    assert await ask(state, lambda p: p.publish(state.channel("quiet"), b"x")) == [1]
    await until(lambda: heard[-1:] == [b"x"])


# --- the hub alone --------------------------------------------------------------------------------


async def test_whose_last_connection_closes_is_gone(tmp_path: Path) -> None:
    gone: list[str] = []
    hub = Hub(tmp_path / "hub", bytes_max=1000, clock=time.monotonic, on_gone=gone.append)
    await hub.start()
    state = SharedState(f"unix://{tmp_path}/hub", timeout_s=0.5, clock=time.monotonic, name="w")
    await state.start()
    state.listen("x", lambda _: None)
    await asyncio.sleep(0.1)
    assert gone == []
    await state.close()
    await until(lambda: gone == ["w"])
    await hub.close()


@pytest.mark.parametrize(
    "rubbish",
    [b"GET / HTTP/1.1\r\n\r\n", b"*x\r\n", b"*1\r\n:1\r\n", b"*1\r\n$x\r\n", b"*-1\r\n$5\r\n"],
)
async def test_what_is_not_the_protocol_ends_its_connection_only(
    rubbish: bytes, tmp_path: Path
) -> None:
    hub = Hub(tmp_path / "hub", bytes_max=1000, clock=time.monotonic, on_gone=lambda _: None)
    await hub.start()
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / "hub"))
    writer.write(rubbish)
    async with asyncio.timeout(2.0):
        assert await _end(reader) == b""
    writer.close()
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / "hub"))
    writer.write(b"*1\r\n$4\r\nPI")
    writer.write(b"NG\r\n*2\r\n$3\r\nGET\r\n$1\r\nk\r\n*1\r\n$3\r\nSET\r\n*1\r\n$4\r\nNOPE\r\n")
    wanted = b"+PONG\r\n$-1\r\n-ERR wrong arguments for 'set'\r\n-ERR unknown command 'NOPE'\r\n"
    async with asyncio.timeout(2.0):
        assert await reader.readexactly(len(wanted)) == wanted
    writer.close()
    await writer.wait_closed()
    await hub.close()


async def _end(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


# --- rates without Redis --------------------------------------------------------------------------


@needs_redis
async def test_without_redis_each_gateway_keeps_the_rate_by_itself(tmp_path: Path) -> None:
    with RedisProcess(tmp_path) as server:
        state = SharedState(server.url, timeout_s=0.05, clock=time.monotonic)
        await state.start()
        rates, limits = (
            SharedRates(state),
            RateLimits(requests_per_minute=2, tokens_per_minute=6000),
        )
        before = await rates.take("t", limits, 10, 0.0)
        assert (before.lacking, before.is_alone) == (None, False)
        key = "moongate:rate:{t}:requests_per_minute:2"
        assert 30_000 < server.client().pttl(key) <= 31_000
        server.freeze()
        began = time.monotonic()
        found = [await rates.take("t", limits, 10, 0.0) for _ in range(4)]
        assert [v.lacking for v in found] == [None, None, Measure.REQUESTS, Measure.REQUESTS]
        assert all(v.is_alone for v in found)
        assert found[3].retry_after_s == 30.0
        assert time.monotonic() - began < 0.3  # two calls' limit; then it counts as down
        server.thaw()
        await until(lambda: state.is_up)
        # Each is settled where it was counted.
        rates.settle("t", limits, -1000, 0.0, found[0])
        rates.settle("t", limits, 2000, 0.0, before)
        await rates.close()
        again = await rates.take("t", limits, 0, 0.0)
        # Two of the calls that were given up may have been counted when it thawed, at 10 each.
        assert 3950 < again.rooms[Measure.TOKENS].remaining < 4100
        await state.close()
