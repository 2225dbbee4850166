"""Our view of a real Mooncake master: its state, keys that nobody stored, and that it was restarted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pool_processes import MIB, MooncakePool

from moongate.kvpool.mooncake import KEYS_PER_CALL, MooncakeMaster
from moongate.kvpool.store import PoolState, PoolUnavailable

KEY = "m@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@"


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[MooncakePool]:
    with MooncakePool(tmp_path, segment_bytes=64 * MIB) as pool:
        yield pool


@pytest.mark.asyncio
async def test_a_real_master_is_read_and_its_restart_is_noticed(pool: MooncakePool) -> None:
    store = MooncakeMaster(pool.url, timeout_s=2.0)
    try:
        state = await _until_it_has_a_segment(store)
        assert state == PoolState("0", 0, 0, 64 * MIB, 0)
        keys = [f"{KEY}{number:064x}" for number in range(KEYS_PER_CALL + 1)]
        assert await store.look_up(keys) == {}
        for _ in range(5):  # counters that rise are no restart
            await asyncio.sleep(1.0)
            assert (await store.check()).epoch == "0"
        assert pool.master is not None
        pool.master.kill()
        with pytest.raises(PoolUnavailable):
            await store.check()
        pool.start_master()
        assert (await store.check()).epoch == "1"
    finally:
        await store.close()


async def _until_it_has_a_segment(store: MooncakeMaster) -> PoolState:
    began = time.monotonic()
    while not (state := await store.check()).capacity_bytes:
        assert time.monotonic() - began < 30.0
        await asyncio.sleep(0.2)
    return state
