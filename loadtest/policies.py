"""Policies compared: for each a stack of its own (`moongate up`), the same load, then one table."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx

from moongate.loadtest.conversations import Workload
from moongate.loadtest.pages import comparison_page
from moongate.loadtest.records import TurnRecord
from moongate.loadtest.running import LoadTestError, RunOptions, check_locust, kill_group, run
from moongate.loadtest.summary import Json

READY_S_MAX = 600.0
"""Real engines take minutes to start."""
STOP_S = 30.0


def compare_policies(
    policies: Sequence[str], options: RunOptions, up_words: Sequence[str], port: int
) -> dict[str, Json]:
    """Run the load once for each policy, write `comparison.html` and `.json`; return the reports.

    `up_words`: further words for `moongate up`. `port`: the gateways', one after the other; 0: any.
    Raises: LoadTestError, ProbeError, TraceError.
    """
    check_locust()
    Workload(options.settings)  # told before any stack is started
    reports: dict[str, Json] = {}
    records: dict[str, list[TurnRecord]] = {}
    try:
        for number, policy in enumerate(policies, 1):
            print(f"[{number}/{len(policies)}] {policy}", flush=True)
            with _stack(policy, up_words, port) as url:
                own = replace(options, url=url, out=options.out / policy, name=policy)
                reports[policy], records[policy] = run(own)
            if reports[policy]["interrupted"]:
                break
    finally:
        if reports:  # also if a later one fails
            _write_comparison(options.out, reports, records)
    return reports


def _write_comparison(
    out: Path, reports: Mapping[str, Json], records: Mapping[str, Sequence[TurnRecord]]
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "comparison.json").write_text(json.dumps(reports, indent=2) + "\n")
    (out / "comparison.html").write_text(comparison_page(reports, records), encoding="utf-8")


@contextmanager
def _stack(policy: str, up_words: Sequence[str], port: int) -> Iterator[str]:
    """Start a stack, yield its gateway's address, and leave nothing of it running."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(  # noqa: S603 - our own command
            [
                *(sys.executable, "-m", "moongate.cli", "--log-level", "warning", "up"),
                *("--policy", policy, "--port", str(port), *up_words),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            url = _await_ready(process, output.fileno(), policy)
            print(f"      {url}/v1", flush=True)
            yield url
        finally:
            _stop(process)


def _await_ready(process: subprocess.Popen[bytes], output: int, policy: str) -> str:
    """Return the address once the stack has printed it and can route. Raises: LoadTestError."""
    deadline = time.monotonic() + READY_S_MAX
    while time.monotonic() < deadline:
        printed = _read_all(output)
        if process.poll() is not None:
            raise LoadTestError(f"`moongate up --policy {policy}` ended:\n{printed.strip()}")
        found = re.search(r"\bendpoint\s+(https?://\S+?)/v1\b", printed)
        if found is not None:
            with contextlib.suppress(httpx.HTTPError):
                ready = httpx.get(f"{found[1]}/ready", timeout=5.0, trust_env=False)
                if ready.status_code == httpx.codes.OK:
                    return found[1]
        time.sleep(0.1)
    raise LoadTestError(f"`moongate up --policy {policy}` was not ready in {READY_S_MAX:.0f} s")


def _read_all(descriptor: int) -> str:
    """Return what a file has, without moving the place where its writer goes on."""
    return os.pread(descriptor, 1 << 20, 0).decode(errors="replace")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    kill_group(process)


def default_out(kind: str) -> Path:
    """Return a folder for a run's files that is named by the time, below the working directory."""
    return Path(f"loadtest-{kind}-{time.strftime('%Y%m%d-%H%M%S')}")
