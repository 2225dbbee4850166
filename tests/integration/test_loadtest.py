"""`moongate loadtest` as a process: against a stack, against a server that is no gateway, and in vain."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import json
import os
import random
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from made_traces import write_growing_agentic
from processes import MOONGATE, Child, free_port, stack_up, until

from moongate.loadtest.conversations import poisson_arrivals
from moongate.loadtest.gateway_totals import read_totals
from moongate.loadtest.records import TurnRecord, read_records

pytestmark = pytest.mark.timeout(90)


SMALL = (
    "--think", "0.2", "--system-tokens", "800", "--first-tokens", "200", "--turn-tokens", "300",
    "--answer-tokens", "8", "--turns", "6",
)  # fmt: skip
"""Agents in a hurry, so that seconds show what takes minutes else."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a gateway before three simulated engines."""
    with stack_up(tmp_path_factory.mktemp("stack")) as child:
        yield child.url


def loadtest(*words: str, expect: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*MOONGATE, "loadtest", *words],
        capture_output=True,
        text=True,
        timeout=80,
        env={**os.environ, **environment},
    )
    assert done.returncode == expect, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def read(folder: Path) -> tuple[dict[str, Any], list[TurnRecord]]:
    report = json.loads((folder / "report.json").read_text())
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")
    return report, read_records(folder / "requests.csv")


def test_totals_equal_the_gateway_s_own(stack: str, tmp_path: Path) -> None:
    done = loadtest(
        *("--url", stack, "--preset", "agents", "--users", "20", "--duration", "8s"),
        *("--out", str(tmp_path), *SMALL),
    )
    report, records = read(tmp_path)
    assert report["requests"] == len(records) > 60
    assert report["failures"] == 0
    for name in ("requests", "prompt_tokens", "cached_tokens"):
        compared = report["gateway"]["agreement"][name]
        assert compared["report"] == report[name]
        assert abs(compared["difference"]) <= 0.01, (name, compared)
    assert sum(own["requests"] for own in report["per_instance"].values()) == report["requests"]
    assert report["cached_tokens"] > 0.5 * report["prompt_tokens"]
    assert 0 < report["generator"]["cpu_share_mean"] <= 1.0
    assert report["ttft_ms"]["p50"] > 0
    assert report["itl_ms"]["p50"] > 0
    assert all(r.ttft_ms is not None and r.reason is not None for r in records)
    assert "turns" in done.stdout
    assert str(tmp_path / "report.html") in done.stdout


def test_prompts_of_a_trace_are_as_long_as_recorded(stack: str, tmp_path: Path) -> None:
    write_growing_agentic(tmp_path / "traces", "one", turns=4)
    loadtest(
        *("--url", stack, "--preset", "trace", "--traces", str(tmp_path / "traces"), "--speed", "50"),
        *("--users", "2", "--duration", "3s", "--answer-tokens", "4", "--out", str(tmp_path / "out")),
    )  # fmt: skip
    _, records = read(tmp_path / "out")
    assert records
    for record in records:
        recorded = (6 + 3 * (record.turn - 1)) * 64 + 10
        assert recorded <= (record.prompt_tokens or 0) <= recorded + 19
    again = [r for r in records if r.turn > 1]
    assert again
    assert all((r.cached_tokens or 0) >= (6 + 3 * (r.turn - 2)) * 64 - 16 for r in again)


def test_a_burst_arrives_at_once_and_is_the_first_with_its_prefix(
    stack: str, tmp_path: Path
) -> None:
    loadtest(
        *("--url", stack, "--preset", "cold-burst", "--think", "2", "--system-tokens", "640"),
        *("--users", "6", "--spawn-rate", "6", "--duration", "3s", "--out", str(tmp_path)),
    )
    _, records = read(tmp_path)
    assert len(records) == 6
    assert {round(record.due_s, 2) for record in records} == {2.0}
    assert all(record.sent_s - record.due_s < 0.5 for record in records)


@pytest.fixture
def slow_engine(tmp_path: Path) -> Iterator[str]:
    """Yield the address of an engine that takes a second for an answer: no gateway, no receipts."""
    port = free_port()
    words = ["sim-engine", "--port", str(port), "--decode-tokens-per-s", "20"]
    child = Child.start([*MOONGATE, *words], f"http://127.0.0.1:{port}", tmp_path / "sim.log")
    try:
        child.wait_until("/health", 20.0)
        yield child.url
    finally:
        child.stop()


def test_arrivals_of_an_open_loop_do_not_wait_for_a_slow_server(
    slow_engine: str, tmp_path: Path
) -> None:
    done = loadtest(
        *("--url", f"{slow_engine}/v1/", "--preset", "shared-prompt", "--rate", "8", "--seed", "3"),
        *("--duration", "4s", "--answer-tokens", "20", "--system-tokens", "100"),
        *("--out", str(tmp_path)),
    )
    report, records = read(tmp_path)
    chance = random.Random("arrivals/3").random
    planned = list(itertools.takewhile(lambda at: at < 3.5, poisson_arrivals(8.0, chance)))
    due = sorted(record.due_s for record in records)
    assert due[: len(planned)] == pytest.approx(planned, abs=0.002)
    assert all(record.ttft_due_ms >= record.ttft_ms for record in records)  # type: ignore[operator]
    assert not report["receipts"]
    assert report["gateway"] is None
    assert report["per_instance"] == {}
    assert report["failures"] == 0
    assert "no route receipt" in done.stdout


def start_long_run(url: str, out: Path) -> subprocess.Popen[str]:
    """Start a run of a minute and return when it sends."""
    process = subprocess.Popen(
        [
            *(*MOONGATE, "loadtest", "--url", url, "--users", "4", "--duration", "60s"),
            *("--out", str(out), *SMALL),
        ],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    until(lambda: (out / "requests.csv").exists() or process.poll() is not None, 30.0)
    assert process.poll() is None
    return process


def requests_of(gateway_url: str) -> int:
    """Return how many a gateway has answered."""
    return read_totals(httpx.get(f"{gateway_url}/metrics", trust_env=False).text).requests


def locust_group(out: Path) -> int:
    """Return the process group of the locust whose files go to `out`."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_bytes()
            if b"locustfile.py" in command and str(out).encode() in command:
                return os.getpgid(int(process.name))
    raise AssertionError("no locust runs")


def test_an_interrupted_run_ends_its_turns_and_is_reported(stack: str, tmp_path: Path) -> None:
    process = start_long_run(stack, tmp_path)
    begun_after = requests_of(stack)
    until(lambda: requests_of(stack) >= begun_after + 8, 20.0)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 0, told
    report, _ = read(tmp_path)
    assert report["requests"] > 0
    assert report["failures"] == 0
    assert report["gateway"]["agreement"]["requests"]["difference"] == 0.0
    assert report["interrupted"]
    assert report["measured_s"] < 30


def test_a_terminated_run_leaves_nothing_running(stack: str, tmp_path: Path) -> None:
    process = start_long_run(stack, tmp_path)
    group = locust_group(tmp_path)
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


def test_runs_are_compared(stack: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        loadtest(
            *("--url", stack, "--users", "2", "--duration", "2s", "--out", str(tmp_path / name)),
            *SMALL,
        )
    page = tmp_path / "both.html"
    folders = [str(tmp_path / "a"), str(tmp_path / "b" / "report.json")]
    done = loadtest("compare", *folders, "--out", str(page))
    assert "change" in done.stdout
    assert "polyline" in page.read_text()
    assert "at least two runs" in loadtest("compare", folders[0], expect=2).stderr
    missing = loadtest("compare", folders[0], str(tmp_path / "none"), expect=1)
    assert "none/report.json: No such file" in missing.stderr


def test_policies_are_compared_by_one_command(tmp_path: Path) -> None:
    done = loadtest(
        *("policies", "--policies", "round_robin,kv_cost", "--users", "4", "--duration", "3s"),
        *("--out", str(tmp_path), *SMALL),
    )
    lines = done.stdout.splitlines()
    assert sum(line.startswith(("round_robin ", "kv_cost ")) for line in lines) == 2
    reports = json.loads((tmp_path / "comparison.json").read_text())
    for report in reports.values():
        assert report["requests"] > 0
        assert report["failures"] == 0
        assert report["gateway"]["agreement"]["requests"]["difference"] == 0.0
    assert len({report["seed"] for report in reports.values()}) == 1
    assert (tmp_path / "comparison.html").exists()


# --- in vain --------------------------------------------------------------------------------------


def test_a_policy_that_is_none_is_said(tmp_path: Path) -> None:
    words = ("--users", "2", "--duration", "1s", "--out", str(tmp_path))
    done = loadtest("policies", "--policies", "kv_cost,kv_kost", *words, *SMALL, expect=2)
    assert "unknown policy 'kv_kost' (did you mean 'kv_cost'?)" in done.stderr
    assert not list(tmp_path.iterdir()), "before anything is started"
    done = loadtest("policies", "--policies", "round_robin,no:Such", *words, *SMALL, expect=1)
    assert "`moongate up --policy no:Such` ended" in done.stderr
    assert list(json.loads((tmp_path / "comparison.json").read_text())) == ["round_robin"]
    loadtest("policies", "--policies", "kv_cost,kv_cost", expect=2)


@pytest.mark.parametrize("words", [("policies", "--port", "65536"), ("--web-port", "70000")])
def test_a_port_that_cannot_be_is_said(words: tuple[str, ...]) -> None:
    assert "must be at most 65535" in loadtest(*words, expect=2).stderr


def test_a_server_that_is_not_there_is_said(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = loadtest("--url", url, "--out", str(tmp_path / "run"), expect=1)
    assert f"{url} can't be reached" in done.stderr
    assert not (tmp_path / "run").exists()
    assert "an address such as" in loadtest("--url", "nonsense", expect=1).stderr


class _Refusing(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        authorized = self.headers.get("authorization") == "Bearer right"
        data = json.dumps({"data": [{"id": "m"}]} if authorized else {"error": "no"}).encode()
        self.send_response(200 if authorized else 401)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_error(404, "no such model")

    def log_message(self, *args: object) -> None:
        """Say nothing."""


def test_a_key_that_is_wrong_or_missing_is_said(tmp_path: Path) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url, out = f"http://127.0.0.1:{server.server_port}", str(tmp_path)
    try:
        refused = loadtest("--url", url, "--out", out, expect=1)
        assert "answered 401: name the variable with the API key by --api-key-env" in refused.stderr
        unset = loadtest("--url", url, "--out", out, "--api-key-env", "NO_SUCH_KEY", expect=1)
        assert "the variable NO_SUCH_KEY is not set" in unset.stderr
        known = loadtest(
            "--url", url, "--out", out, "--api-key-env", "MY_KEY", expect=1, MY_KEY="right"
        )
        assert "/v1/chat/completions answered 404" in known.stderr
    finally:
        server.shutdown()
        server.server_close()


def test_traces_that_are_not_there_are_said(tmp_path: Path) -> None:
    assert "needs --traces" in loadtest("--preset", "trace", expect=2).stderr
    missing = loadtest("--preset", "trace", "--traces", str(tmp_path / "none"), expect=1)
    assert "none: no such file or folder" in missing.stderr
    words = ("policies", "--preset", "trace", "--traces", str(tmp_path / "none"))
    compared = loadtest(*words, "--out", str(tmp_path / "out"), expect=1)
    assert "none: no such file or folder" in compared.stderr
    assert "[1/" not in compared.stdout
