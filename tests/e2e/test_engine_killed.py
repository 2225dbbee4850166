"""An engine dies in the middle of a run: nothing that had not begun fails, and it comes back empty."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx
import pytest
from agent_workload import Turn, Workload, run_workload, summarise
from processes import BLOCK_TOKENS, EngineProcess, Serve, states_of

EnginePair = tuple[EngineProcess, EngineProcess]


async def _kill_during(
    url: str, model: Path, workload: Workload, engine: EngineProcess, after_s: float
) -> tuple[list[Turn], float]:
    """Run the workload, kill the engine after a while, return the turns and when it was killed."""
    running = asyncio.create_task(run_workload(url, model, workload, BLOCK_TOKENS))
    await asyncio.sleep(after_s)
    assert not running.done()
    killed_at = asyncio.get_running_loop().time()
    engine.kill()
    return await running, killed_at


def _source(url: str, instance: str) -> dict[str, object]:
    index = httpx.get(f"{url}/admin/index", trust_env=False).json()
    return next(s for s in index["sources"] if s["instance"] == instance)


@pytest.mark.timeout(420)
def test_a_killed_engine_costs_only_the_answers_it_had_begun(
    engines: EnginePair, tiny_model: Path, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = serve(engines)
    workload = Workload(model="tiny", seed=31, answer_tokens=64)
    turns, killed_at = asyncio.run(
        _kill_during(gateway.url, tiny_model, workload, engines[0], after_s=4.0)
    )

    broken = [turn for turn in turns if turn.error is not None]
    whole = [turn for turn in turns if turn.error is None]
    assert {turn.status for turn in turns} == {200}
    assert all(turn.is_complete for turn in turns)  # also the broken ones end with [DONE]
    assert all("engine_disconnected" in (turn.error or "") for turn in broken)
    assert all(turn.instance == "a" and turn.began_at < killed_at for turn in broken)
    assert len(broken) <= workload.concurrency * 2  # forks run two at a time

    after = [turn for turn in whole if turn.began_at + turn.first_token_s > killed_at + 0.1]
    homes = {(turn.session, turn.number): turn.instance for turn in turns}
    moved = [t for t in after if homes.get((t.session, t.number - 1)) == "a"]
    assert moved, "the engine was killed when no session lived on it"
    assert {turn.instance for turn in after} == {"b"}
    took_over_s = min(turn.began_at + turn.first_token_s for turn in moved) - killed_at
    assert took_over_s <= 2.0
    metrics = httpx.get(f"{gateway.url}/metrics", trust_env=False).text
    retries = [line for line in metrics.splitlines() if line.startswith("moongate_retries_total")]

    with capsys.disabled():
        print(
            f"\nkilled at turn {len(turns) - len(after)} of {len(turns)}: {len(broken)} answers broken "
            f"off, other engine took over after {took_over_s:.2f} s; {retries}"
        )

    held_before = _source(gateway.url, "a")
    began = time.monotonic()
    engines[0].start()
    engines[0].wait_ready()
    while "down" in states_of(gateway.url):
        assert time.monotonic() - began < 120
        time.sleep(0.1)
    while (source := _source(gateway.url, "a"))["restarts"] == held_before["restarts"]:
        assert time.monotonic() - began < 120
        time.sleep(0.1)
    assert source["blocks"] == {"device": 0, "host": 0, "disk": 0, "pool": 0}
    assert source["epoch"] == held_before["epoch"] + 1  # type: ignore[operator]

    again = asyncio.run(
        run_workload(
            gateway.url, tiny_model, Workload(model="tiny", seed=32, sessions=8), BLOCK_TOKENS
        )
    )
    assert [turn.error for turn in again if turn.error] == []
    result = summarise(again)
    with capsys.disabled():
        print(f"after the restart: {result}")
    assert result.largest_instance_share <= 0.8  # it gets a share of the new sessions again
    assert result.exact_predictions >= 0.99
