"""What a run plans to do, and how it sets up the gateway."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import routers
from benchmarks.processes import take_free_ports
from benchmarks.routers import EngineAddress, Place, make_moongate_settings
from benchmarks.side_by_side import Plan, make_plan, parse_arguments
from moongate.gateway.config.settings_text import parse_settings

MODEL = Path(__file__).parents[3] / "simulator" / "model"


def plan_of(*words: str) -> Plan:
    return make_plan(parse_arguments(["--json", "out.json", *words]))


def test_routers_are_skipped_with_a_reason_where_there_is_no_tokenizer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MOONGATE_CACHE_DIR", str(tmp_path))
    plan = plan_of("--only", "moongate:kv_cost")
    assert plan.routers == ()
    (reason,) = plan.skipped
    assert reason.startswith("moongate:kv_cost: ")


def test_the_newest_finished_model_of_the_cache_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MOONGATE_CACHE_DIR", str(tmp_path))
    unfinished, finished = (tmp_path / "models" / f"smollm2-{n}" for n in ("a", "b"))
    for folder in (unfinished, finished):
        folder.mkdir(parents=True)
        for name in ("tokenizer.json", "chat_template.jinja"):
            (folder / name).touch()
    (finished / ".complete").touch()
    assert plan_of().tokenizer == finished


@pytest.mark.parametrize(
    "words",
    [("--only", "nginx"), ("--workloads", "small,huge"), ("--tokenizer", "/nonexistent")],
)
def test_what_there_is_not_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"no router nginx|no workload huge|tokenizer\.json"):
        plan_of(*words)


@pytest.mark.parametrize(
    ("policy", "tokenizer", "has_events"),
    [
        ("round_robin", {"mode": "off"}, False),
        ("kv_cost", {"mode": "local", "forward_ids": "off"}, True),
        ("kv_cost", {"mode": "local", "forward_ids": "on"}, True),
    ],
)
def test_the_gateway_accepts_its_configuration(
    policy: str, tokenizer: dict[str, str], has_events: bool, tmp_path: Path
) -> None:
    engines = (EngineAddress(9001, 9002, 9003), EngineAddress(9004, 9005, 9006))
    place = Place(9000, 9007, engines, MODEL, tmp_path)
    text = json.dumps(make_moongate_settings(policy, tokenizer, place))
    settings = parse_settings(text, "moongate.yaml", {})
    assert (settings.policy.name, settings.listen.port) == (policy, 9000)
    assert settings.instances[1].kv_events == ("tcp://127.0.0.1:9005" if has_events else None)


def test_every_router_listens_on_localhost_only(tmp_path: Path) -> None:
    place = Place(9000, 9007, (EngineAddress(9001, 9002, 9003),), MODEL, tmp_path)
    for router in routers.ROUTERS:
        command = router.make_command(place)
        if router.program == routers.MOONGATE:
            assert json.loads(Path(command[-1]).read_text())["listen"]["host"] == "127.0.0.1"
        else:
            assert command[command.index("--host") + 1] == "127.0.0.1"
            assert command[command.index("--prometheus-host") + 1] == "127.0.0.1"


def test_free_ports_are_all_different() -> None:
    assert len(set(take_free_ports(20))) == 20
