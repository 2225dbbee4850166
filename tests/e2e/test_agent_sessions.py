"""The main job on real engines: keyless agent sessions go home, and exactly as predicted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from agent_workload import Turn, Workload, inexact, run_workload, summarise
from processes import BLOCK_TOKENS, EngineProcess, Serve

EnginePair = tuple[EngineProcess, EngineProcess]


def run(url: str, model: Path, workload: Workload) -> list[Turn]:
    return asyncio.run(run_workload(url, model, workload, BLOCK_TOKENS))


@pytest.mark.timeout(400)
def test_sessions_without_a_key_go_home_exactly_as_predicted(
    engines: EnginePair, tiny_model: Path, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = serve(engines)
    turns = run(gateway.url, tiny_model, Workload(model="tiny", seed=1))
    even = serve(engines, policy={"name": "round_robin"})
    compared = run(even.url, tiny_model, Workload(model="tiny", seed=2))
    with capsys.disabled():
        print(f"\nkv_cost:     {summarise(turns)}")
        print(f"round_robin: {summarise(compared)}")
        print("".join(f"  not as predicted: {line}\n" for line in inexact(turns)), end="")

    assert [turn.error for turn in turns if turn.error] == []
    assert len(turns) == 16 * 10 + 8 * 5
    result = summarise(turns)
    assert result.turns == 16 * 9 + 8 * 5
    assert result.device_prefix_share == 1.0
    assert result.exact_predictions >= 0.99
    assert result.reused_share_of_ideal >= 0.97
    assert result.largest_instance_share <= 0.65
