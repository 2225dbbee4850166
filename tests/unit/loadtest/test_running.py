"""What a run needs before anything is sent, and the command line of the process that sends."""

from __future__ import annotations

import importlib.util
import re
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_facts, make_turn
from made_traces import write_growing_agentic

from moongate.cli import main
from moongate.loadtest import running
from moongate.loadtest.commands import DEFAULT_POLICIES, _why_none
from moongate.loadtest.probing import ProbeError, normalise_url
from moongate.loadtest.records import NOT_SENT
from moongate.loadtest.running import (
    LoadTestError,
    RunOptions,
    _last_words,
    check_locust,
    locust_command,
    make_load,
    read_run,
    run,
)
from moongate.loadtest.settings import Preset
from moongate.loadtest.traces import TraceError, TraceFormat


def make_options(**changes: Any) -> RunOptions:
    fields: dict[str, Any] = {
        "url": "http://h", "settings": make_facts().settings, "users": 5, "spawn_rate": 2.5,
        "duration_s": 9.2, "out": Path("/out"),
    } | changes  # fmt: skip
    return RunOptions(**fields)


def test_without_locust_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LoadTestError, match=r"pip install '\.\[loadtest\]'"):
        check_locust()


def test_a_trace_format_that_is_not_there_is_said_before_a_server_is_asked(tmp_path: Path) -> None:
    write_growing_agentic(tmp_path / "traces", "one", turns=2)
    settings = replace(
        make_facts().settings,
        preset=Preset.TRACE,
        traces=tmp_path / "traces",
        trace_format=TraceFormat.MOONCAKE,
    )
    with pytest.raises(TraceError, match="no mooncake traces there, only agentic"):
        run(make_options(settings=settings, url="http://127.0.0.1:1", out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_locust_is_told_everything_but_the_key() -> None:
    words = locust_command(make_options(api_key_env="MY_KEY"))
    text = " ".join(words)
    assert "--headless --only-summary --host http://h --users 5 --spawn-rate 2.5" in text
    assert "--run-time 10s" in text
    assert "--records /out --progress --preset agents --seed 7" in text
    assert text.endswith("--api-key-env MY_KEY")
    web = " ".join(locust_command(make_options(web_port=8089)))
    assert "--autostart --autoquit 1 --web-host 127.0.0.1 --web-port 8089" in web


@pytest.mark.parametrize(
    "ends_output", [False, True], ids=["with its output open", "with its output closed"]
)
def test_a_locust_that_hangs_is_ended_when_its_time_is_over(
    ends_output: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closes = "os.close(1); " if ends_output else ""
    hangs = f"import os, time; print('unended', end='', flush=True); {closes}time.sleep(60)"
    monkeypatch.setattr(running, "locust_command", lambda options: [sys.executable, "-c", hangs])
    monkeypatch.setattr(running, "GRACE_S", 0.2)
    monkeypatch.setattr(running, "START_S_MAX", 0.2)
    began = time.monotonic()
    with pytest.raises(LoadTestError, match=r"locust did not end; see .*locust\.log"):
        make_load(make_options(out=tmp_path, duration_s=0.1))
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("http://h:1/", "http://h:1"),
        ("https://h/base/v1/", "https://h/base"),
        ("http://h", "http://h"),
    ],
)
def test_addresses_may_have_what_clients_add(given: str, meant: str) -> None:
    assert normalise_url(given) == meant


@pytest.mark.parametrize("given", ["h:8000", "ftp://h", "", "http://"])
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(ProbeError, match="an address such as"):
        normalise_url(given)


def test_folders_without_a_report_are_refused(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text('{"rows": []}')
    with pytest.raises(LoadTestError, match="no report of `moongate loadtest`"):
        read_run(tmp_path)
    (tmp_path / "report.json").write_text("{")
    with pytest.raises(LoadTestError, match=str(tmp_path)):
        read_run(tmp_path)


# --- words that don't fit together, and what is said of them --------------------------------------


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--context-max", "10"), "--context-max 10: nothing would be sent"),
        (("policies", "--policies", ""), "--policies: name at least one policy"),
        (("policies", "--engine", "vllm"), "--engine vllm needs --engine-model DIR"),
    ],
)
def test_what_can_not_be_is_told_before_anything_is_begun(
    words: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["loadtest", *words]) == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"moongate: {problem}")
    assert told.out == ""


def test_policies_names_are_whole_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["loadtest", "policies", "--help"])
    words = re.split(r"[\s,;]+", capsys.readouterr().out)
    assert set(DEFAULT_POLICIES) <= set(words)


def test_a_web_port_that_is_in_use_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["loadtest", "--web", "--web-port", str(port)]) == 1
    told = capsys.readouterr()
    assert told.err == f"moongate: --web-port {port}: Address already in use; choose another\n"
    assert told.out == ""


def test_a_locust_s_last_words_are_no_table_s_rule() -> None:
    table = "Type Name # reqs\n-----|-----\n\n"
    assert (
        _last_words(f"[x] ERROR/locust: no such port\n{table}") == "[x] ERROR/locust: no such port"
    )
    assert _last_words(table) == "Type Name # reqs"
    assert _last_words("") == "it said nothing"


def test_without_a_turn_that_succeeded_the_commonest_failure_is_told() -> None:
    failed = [make_turn(n, outcome="status", error="500: no engine") for n in range(3)]
    told = _why_none([*failed, make_turn(4, outcome="timeout")])
    assert told == "no turn succeeded; 3 of 4: status, 500: no engine"
    assert _why_none([make_turn(0, outcome=NOT_SENT)]) == "no turn was sent"
