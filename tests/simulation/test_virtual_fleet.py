"""Small fleets in virtual time: what policies, pools and faults do there, always the same by seed."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from moongate.cli import main
from moongate.simulator.command import ProgressLine, simulate
from moongate.simulator.faults import Fault
from moongate.simulator.generators import codex_like
from moongate.simulator.presets import PRESETS, Given
from moongate.simulator.profiles import GB200_KIMI, H200_LLAMA70
from moongate.simulator.report import JSON_FIELDS
from moongate.simulator.trial import Result, Row, Trial, run

SMALL = Trial(
    "pool/round_robin", H200_LLAMA70, 4, codex_like(1, 40), "round_robin", 1, "12 sessions",
    horizon_s=400.0, warm_s=100.0, users=12, ramp_s=20.0,
)  # fmt: skip


def without_time(row: Row) -> Row:
    return row._replace(decision_ms_p50=0.0)


def run_with(**changes: object) -> Row:
    return run(replace(SMALL, **changes)).row  # type: ignore[arg-type]


def test_a_run_is_repeated_by_its_seed() -> None:
    once, again, other = (run(replace(SMALL, seed=seed)) for seed in (3, 3, 4))
    assert without_time(once.row) == without_time(again.row)
    assert once.ttft_ms == again.ttft_ms
    assert without_time(once.row) != without_time(other.row)


def test_a_pool_gives_round_robin_what_it_misses_without() -> None:
    alone, pooled = run_with(has_pool=False), run_with()
    assert alone.hit_rate + 0.1 < pooled.hit_rate
    assert alone.pool_hit_rate == 0 < pooled.pool_hit_rate
    assert pooled.pool_bytes > 0 == alone.pool_bytes
    assert pooled.ttft_ms_p50 < alone.ttft_ms_p50


def test_kv_cost_finds_on_devices_what_round_robin_fetches() -> None:
    robin, cost = run_with(), run_with(policy="kv_cost")
    assert cost.device_hit_rate > 0.8
    assert cost.pool_bytes < robin.pool_bytes / 5
    assert cost.ttft_ms_p50 < robin.ttft_ms_p50


def test_prefill_and_decode_apart() -> None:
    row = run_with(profile=GB200_KIMI, groups=2)
    assert (row.instances, row.gpus) == (4, 24)
    assert row.requests > 100
    assert row.hit_rate > 0.85


def test_what_is_measured_adds_up() -> None:
    result: Result = run(replace(SMALL, policy="kv_cost"))
    row = result.row
    assert row.hit_rate == pytest.approx(row.device_hit_rate + row.pool_hit_rate)
    assert row.throughput * 300 == pytest.approx(row.requests)
    assert len(result.ttft_ms) == row.requests
    assert all(0 <= share <= 1.000001 for _, shares in result.loads for share in shares)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("crash", crashed=2, at_s=150.0, for_s=60.0),
        Fault("cut off", cut_off=1, at_s=150.0, for_s=60.0),
        Fault("slow", slow=1),
        Fault("lost", lost_share=0.2),
        Fault("lost for ever", lost_share=0.2, has_replay=False),
        Fault("late and twice", late_s=2.0, repeated_share=0.5),
    ],
    ids=lambda fault: fault.name,
)
@pytest.mark.parametrize("profile", [H200_LLAMA70, GB200_KIMI], ids=lambda p: p.name)
def test_a_fleet_goes_on_under_faults(fault: Fault, profile: object) -> None:
    row = run_with(policy="kv_cost", fault=fault, profile=profile, gateways=2)
    clean = run_with(policy="kv_cost", profile=profile, gateways=2)
    assert row.requests > 0.6 * clean.requests
    assert row.failures <= 12


def test_every_preset_has_trials_without_traces() -> None:
    for name, make in PRESETS.items():
        trials = make(Given(seed=1, traces=None, horizon_s=60.0))
        assert trials, name
        assert all(trial.warm_s < trial.horizon_s for trial in trials)


def test_the_command_writes_what_it_is_asked_for(tmp_path: Path) -> None:
    json_file, plots, out = tmp_path / "rows.json", tmp_path / "plots", io.StringIO()
    simulate(
        "paper-12", seed=2, traces=None, json_file=json_file, plots=plots, minutes=4.0,
        out=out, progress=io.StringIO(),
    )  # fmt: skip
    document = json.loads(json_file.read_text())
    assert set(document) == {"preset", "seed", "commit", "rows"}
    assert all(tuple(row) == JSON_FIELDS for row in document["rows"])
    names = {row["name"] for row in document["rows"]}
    assert names == {"none/round_robin", "pool/round_robin", "pool/kv_cost"}
    assert "pool/kv_cost" in out.getvalue()
    assert {file.name for file in plots.iterdir()} >= {"paper-12-hits.svg", "paper-12-ttft.svg"}
    assert all(file.read_text().startswith("<svg") for file in plots.iterdir())


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    bar, lines = Terminal(), io.StringIO()
    for out in (bar, lines):
        line = ProgressLine(out, 2)
        line.moved(0, SMALL, 0.5)
        line.ended(0, SMALL, 1.0)
    assert "[#######   " in bar.getvalue()
    assert " 25%" in bar.getvalue()
    assert lines.getvalue() == "1/2 pool/round_robin, codex-like, 12 sessions: 1.0 s\n"


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--preset", "nothing"], 2, "known: paper-12"),
        (["--preset", "roomy", "--minutes", "0"], 2, "--minutes"),
        (["--preset", "roomy", "--traces", "/nowhere"], 1, "/nowhere: no such"),
    ],
)
def test_bad_use_is_told(
    words: list[str], code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *words]) == code
    assert told in capsys.readouterr().err
