"""What every pool store must do, whichever it is: one suite for all of them.

`MemoryPool` is asked directly; `MooncakeMaster` asks a `PoolMaster`, a master's HTTP over such a pool.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
from raw_server import Peer, RawServer

from moongate.kvpool import mooncake
from moongate.kvpool.memory import MemoryPool
from moongate.kvpool.mooncake import KEYS_PER_CALL, MooncakeMaster
from moongate.kvpool.store import PoolState, PoolStore, PoolUnavailable, Replica
from moongate.simulator.master import PoolMaster

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(20)]

KEY = "m@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@"

Stores = Callable[[MemoryPool], contextlib.AbstractAsyncContextManager[PoolStore]]


@contextlib.asynccontextmanager
async def memory(pool: MemoryPool) -> AsyncIterator[PoolStore]:
    yield pool
    await pool.close()


@contextlib.asynccontextmanager
async def master_of(pool: MemoryPool) -> AsyncIterator[tuple[MooncakeMaster, PoolMaster]]:
    master = PoolMaster(pool)
    await master.start()
    store = MooncakeMaster(master.url + "/", timeout_s=1.0)
    try:
        yield store, master
    finally:
        await store.close()
        await master.stop()


@contextlib.asynccontextmanager
async def over_http(pool: MemoryPool) -> AsyncIterator[PoolStore]:
    async with master_of(pool) as (store, _):
        yield store


both = pytest.mark.parametrize("stores", [memory, over_http])


@both
async def test_it_returns_the_keys_that_exist_and_where_they_lie(stores: Stores) -> None:
    pool = MemoryPool(1_000)
    pool.put(f"{KEY}aa", 100, "10.0.0.1:15000")
    pool.put(f"{KEY}bb", 50, "[::1]:15000")
    async with stores(pool) as store:
        found = await store.look_up([f"{KEY}aa", f"{KEY}cc", f"{KEY}bb"])
    assert found == {
        f"{KEY}aa": Replica("10.0.0.1:15000", 100),
        f"{KEY}bb": Replica("[::1]:15000", 50),
    }


@both
@pytest.mark.parametrize("count", [0, 1, KEYS_PER_CALL, KEYS_PER_CALL + 1, 3 * KEYS_PER_CALL])
async def test_any_number_of_keys_can_be_asked_for(stores: Stores, count: int) -> None:
    pool = MemoryPool(1_000_000)
    keys = [f"{KEY}{number:064x}" for number in range(count)]
    for key in keys[::2]:
        pool.put(key, 10)
    async with stores(pool) as store:
        assert list(await store.look_up(keys)) == keys[::2]


@both
@pytest.mark.parametrize(
    "model", ["My Model", "a#b", "a&b", "%41", "a+b", "a;b", "modell-ü", "x\r\nX-Evil: 1", "a/?b=c"]
)
async def test_any_name_of_a_model_is_asked_for_as_it_is(stores: Stores, model: str) -> None:
    pool = MemoryPool(1_000)
    keys = [f"{model}@tp_rank:0@{name}" for name in ("aa", "bb", "cc")]
    pool.put(keys[0], 10)
    pool.put(keys[2], 10)
    async with stores(pool) as store:
        assert list(await store.look_up(keys)) == [keys[0], keys[2]]


async def test_a_key_with_a_comma_is_not_asked_for() -> None:
    pool = MemoryPool(100)
    for key in ("a", "b", "a,b"):
        pool.put(key, 10)
    async with master_of(pool) as (store, master):
        assert set(await store.look_up(["b", "a,b"])) == {"b"}
        assert await store.look_up(["a,b"]) == {}
        assert [request.keys for request in master.requests] == [("b",)]


@both
async def test_looking_up_keeps_nothing_from_being_evicted(stores: Stores) -> None:
    pool = MemoryPool(20)
    pool.put("old", 10)
    pool.put("young", 10)
    async with stores(pool) as store:
        assert set(await store.look_up(["old"])) == {"old"}
        pool.put("new", 10)
        assert set(await store.look_up(["old", "young", "new"])) == {"young", "new"}


@both
async def test_it_says_how_full_it_is_and_what_it_evicted(stores: Stores) -> None:
    pool = MemoryPool(20)
    for key in "abc":
        pool.put(key, 10)
    async with stores(pool) as store:
        assert await store.check() == PoolState("0", 2, 20, 20, 1)


@both
async def test_its_epoch_stays_while_nothing_is_lost(stores: Stores) -> None:
    pool = MemoryPool(20)
    async with stores(pool) as store:
        first = await store.check()
        for key in "abc":
            pool.put(key, 10)
        pool.remove_endpoint("")
        assert (await store.check()).epoch == first.epoch


async def test_a_memory_pool_that_is_cleared_has_another_epoch() -> None:
    pool = MemoryPool(20)
    first = await pool.check()
    pool.clear()
    assert (await pool.check()).epoch != first.epoch


# --- Mooncake's master ----------------------------------------------------------------------------


async def test_a_master_that_is_restarted_has_another_epoch_whatever_it_counts_first() -> None:
    pool = MemoryPool(1_000)
    async with master_of(pool) as (store, master):
        await store.check()
        pool.put("a", 10)
        first = await store.check()
        await master.restart()
        second = await store.check()
        assert second.epoch != first.epoch
        assert second.key_count == 0
        pool.put("b", 10)
        assert (await store.check()).epoch == second.epoch


async def test_two_hundred_keys_are_one_call() -> None:
    async with master_of(MemoryPool(10)) as (store, master):
        await store.look_up([f"{KEY}{number}" for number in range(KEYS_PER_CALL + 1)])
        assert [len(keys) for keys in master.queries] == [KEYS_PER_CALL, 1]


async def test_a_copy_on_a_disk_is_told_from_one_in_memory() -> None:
    pool = MemoryPool(100)
    pool.put("a", 10, "h:1")
    async with master_of(pool) as (store, master):
        master.disk_keys.add("a")
        assert await store.look_up(["a"]) == {"a": Replica("", 10, on_disk=True)}


async def test_a_master_that_is_gone_is_unavailable_and_comes_back() -> None:
    async with master_of(MemoryPool(100)) as (store, master):
        await master.stop()
        for call in (store.check(), store.look_up(["a"])):
            with pytest.raises(PoolUnavailable):
                await call
        await master.start()
        assert (await store.check()).key_count == 0


async def test_a_silent_master_is_unavailable_after_the_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mooncake, "CHECK_S", 0.05)
    async with master_of(MemoryPool(100)) as (_, master):
        master.is_silent = True
        store = MooncakeMaster(master.url, timeout_s=0.05)
        for call in (store.check(), store.look_up(["a"])):
            with pytest.raises(PoolUnavailable, match="no answer in time"):
                await call
        await store.close()


# --- answers that nobody expects ------------------------------------------------------------------


def http(body: str | bytes, status: str = "200 OK", headers: str = "") -> bytes:
    raw = body if isinstance(body, bytes) else body.encode()
    head = f"HTTP/1.1 {status}\r\n{headers}content-length: {len(raw)}\r\nconnection: close\r\n\r\n"
    return head.encode() + raw


@contextlib.asynccontextmanager
async def answering(reply: bytes) -> AsyncIterator[MooncakeMaster]:
    """Return the store of a master that answers every request so, and closes the connection."""

    async def reply_so(peer: Peer) -> None:
        await peer.head()
        await peer.send(reply)
        peer.close()

    async with RawServer(reply_so) as server:
        store = MooncakeMaster(server.url, timeout_s=2.0)
        try:
            yield store
        finally:
            await store.close()


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"no HTTP at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{}",
        http("{}", "500 Internal Server Error"),
        http("{}", "404 Not Found"),
        http("", "302 Found", "location: http://127.0.0.1:1/\r\n"),
        http("not JSON"),
        http("[]"),
        http("null"),
        http("{}"),
        http('{"data": null}'),
        http('{"data": [1]}'),
        http(b"\xff\xfe{}"),
    ],
)
async def test_what_is_no_answer_means_that_the_pool_is_unavailable(reply: bytes) -> None:
    async with answering(reply) as store:
        with pytest.raises(PoolUnavailable):
            await store.look_up(["a"])
        with pytest.raises(PoolUnavailable):
            await store.check()


async def test_an_answer_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "BODY_BYTES_MAX", 1_000)
    async with answering(http('{"data": {}}' + " " * 2_000)) as store:
        with pytest.raises(PoolUnavailable, match="more than"):
            await store.look_up(["a"])


BUFFER = '{"size_": 10, "transport_endpoint_": "h:1"}'


@pytest.mark.parametrize(
    ("entry", "replica"),
    [
        ("null", None),
        ("[]", None),
        ("{}", None),
        ('{"ok": false, "values": [BUFFER]}', None),
        ('{"ok": "yes", "values": [BUFFER]}', None),
        ('{"ok": true}', None),
        ('{"ok": true, "values": null, "disk_values": null}', None),
        ('{"ok": true, "values": 5, "disk_values": "x"}', None),
        ('{"ok": true, "values": [null, 3, "x"]}', None),
        ('{"ok": true, "values": [7, BUFFER]}', Replica("h:1", 10)),
        ('{"ok": true, "values": [{}]}', Replica("", 0)),
        ('{"ok": true, "values": [{"size_": "x", "transport_endpoint_": null}]}', Replica("", 0)),
        ('{"ok": true, "values": [{"size_": -1, "transport_endpoint": "h:2"}]}', Replica("h:2", 0)),
        ('{"ok": true, "disk_values": [{"object_size": 7}]}', Replica("", 7, on_disk=True)),
        (
            '{"ok": true, "local_disk_values": [{"object_size_": 7}], "disk_values": [{}]}',
            Replica("", 7, on_disk=True),
        ),
        ('{"ok": true, "disk_values": [{}], "values": [BUFFER]}', Replica("h:1", 10)),
    ],
)
async def test_odd_entries_are_no_keys_and_missing_fields_are_nothing(
    entry: str, replica: Replica | None
) -> None:
    entry = entry.replace("BUFFER", BUFFER)
    async with answering(http(f'{{"data": {{"a": {entry}}}}}')) as store:
        found = await store.look_up(["a"])
    assert found == ({} if replica is None else {"a": replica})


@pytest.mark.parametrize(
    ("page", "state"),
    [
        ("master_key_count 3", PoolState("0", 3)),
        ("master_key_count 1e+06\nmaster_allocated_bytes 2.5\n", PoolState("0", 1_000_000, 2)),
        ("master_key_count +\nmaster_total_capacity_bytes 1e999", PoolState("0", 0, None, 0)),
    ],
)
async def test_metrics_are_read_in_any_form_of_number(page: str, state: PoolState) -> None:
    async with answering(http(page)) as store:
        assert await store.check() == state


@pytest.mark.parametrize(
    "page", ["", "master_key_count", "vllm:num_requests 3", "x master_key_count 3"]
)
async def test_a_page_of_something_else_is_no_master_s(page: str) -> None:
    async with answering(http(page)) as store:
        with pytest.raises(PoolUnavailable, match="not a Mooncake master's"):
            await store.check()
