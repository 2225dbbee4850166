"""What a run needs before anything is sent, and the command line of the process that sends."""

from __future__ import annotations

import importlib.util
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_facts
from made_traces import write_growing_agentic

from moongate.loadtest import running
from moongate.loadtest.probing import ProbeError, normalise_url
from moongate.loadtest.running import (
    LoadTestError,
    RunOptions,
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
