"""One run: the server is probed, locust runs in a process of its own, and its files become a report.

gevent patches whatever is in its process, so locust gets one to itself. It has a process group too:
Ctrl-C reaches this process only, which passes it on once, waits for turns under way, and still writes
the report; a second one ends the load at once.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, TextIO

import orjson

from moongate.loadtest.conversations import Workload
from moongate.loadtest.pages import run_page
from moongate.loadtest.probing import Prober, normalise_url
from moongate.loadtest.records import (
    GENERATOR_FILE,
    LOG_FILE,
    ROWS_FILE,
    TurnRecord,
    read_records,
)
from moongate.loadtest.settings import Preset, WorkloadSettings, words_of
from moongate.loadtest.summary import Json, RunFacts, summarise

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
REPORT_FILE, PAGE_FILE = "report.json", "report.html"

GRACE_S = 60
"""What turns under way get at a run's end; then they are cut off."""
START_S_MAX = 60.0
"""What locust may need to start and to end, beside the run."""
PLAIN_PROGRESS_S = 5.0
READ_BYTES = 65_536


class LoadTestError(RuntimeError):
    """The run can't be made; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """One run."""

    url: str
    settings: WorkloadSettings
    users: int
    spawn_rate: float
    duration_s: float
    out: Path
    api_key_env: str | None = None
    ca: Path | None = None
    web_port: int | None = None
    name: str = ""


def check_locust() -> None:
    """Raises: LoadTestError if locust isn't installed."""
    if importlib.util.find_spec("locust") is None:
        raise LoadTestError(
            "locust is not installed: `pip install '.[loadtest]'` in moongate's checkout installs it,"
            " `make setup` there too"
        )


def check_web_port(port: int) -> None:
    """Raises: LoadTestError if another program listens there. Locust tells it too late and not well."""
    with socket.socket() as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # one that just ended is no matter
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise LoadTestError(f"--web-port {port}: {error.strerror}; choose another") from error


def run(options: RunOptions) -> tuple[Json, list[TurnRecord]]:
    """Make a run, write its files into `options.out`, and return its report and turns.

    Raises: LoadTestError, ProbeError, TraceError.
    """
    check_locust()
    Workload(
        options.settings
    )  # what is wrong with it is told before a server is asked for anything
    key = _read_key(options.api_key_env)
    options = replace(options, url=normalise_url(options.url))
    with _prepared(options.out), Prober(options.url, key, options.ca) as prober:
        probe = prober.probe(
            options.settings.model or None,
            has_tools=options.settings.preset is Preset.AGENTS and options.settings.has_tools,
        )
        settings = replace(
            options.settings, model=probe.model, costs=probe.costs, ignores_eos=probe.ignores_eos
        )
        options = replace(options, settings=settings)
        before = prober.settled_totals()
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        was_interrupted = make_load(options)
        after = prober.settled_totals()
    records = read_records(options.out / ROWS_FILE)
    facts = RunFacts(
        settings=settings,
        url=options.url,
        users=None if settings.rate_per_s is not None else options.users,
        duration_s=options.duration_s,
        started_at=started_at,
        has_receipts=probe.has_receipts,
        notes=probe.notes,
        generator=_read_generator(options.out),
        before=before,
        after=after,
        name=options.name,
        was_interrupted=was_interrupted,
    )
    report = summarise(records, facts)
    (options.out / REPORT_FILE).write_text(json.dumps(report, indent=2) + "\n")
    (options.out / PAGE_FILE).write_text(run_page(report, records), encoding="utf-8")
    return report, records


def read_run(folder: Path) -> tuple[Json, list[TurnRecord]]:
    """Return the report and turns of an earlier run, by its folder or its `report.json`.

    Raises: LoadTestError.
    """
    folder = folder.parent if folder.name == REPORT_FILE else folder
    try:
        report = json.loads((folder / REPORT_FILE).read_text())
        if not isinstance(report, dict) or "tokens_by_source" not in report:
            raise LoadTestError(f"{folder / REPORT_FILE}: no report of `moongate loadtest`")
        return report, read_records(folder / ROWS_FILE)
    except OSError as error:
        raise LoadTestError(f"{error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise LoadTestError(f"{folder}: {error}") from error


# --- before and after -----------------------------------------------------------------------------


def _read_key(name: str | None) -> str | None:
    if name is None:
        return None
    key = os.environ.get(name)
    if not key:
        raise LoadTestError(f"--api-key-env: the variable {name} is not set")
    return key


@contextmanager
def _prepared(out: Path) -> Iterator[None]:
    """Make a run's folder. If the block fails before anything is in it, nothing is left of it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in (REPORT_FILE, PAGE_FILE, ROWS_FILE, GENERATOR_FILE, LOG_FILE):
            (out / name).unlink(missing_ok=True)
    except OSError as error:
        raise LoadTestError(f"--out {out}: {error.strerror}") from error
    try:
        yield
    except BaseException:
        with suppress(OSError):  # there is something in it
            out.rmdir()
        raise


def _read_generator(out: Path) -> dict[str, Any]:
    """Return what the generator wrote of itself and remove the file: the report has it all."""
    file = out / GENERATOR_FILE
    if not file.exists():
        return {}
    told: dict[str, Any] = orjson.loads(file.read_bytes())
    file.unlink()
    return told


# --- locust ---------------------------------------------------------------------------------------


def locust_command(options: RunOptions) -> list[str]:
    """Return the command line of the process that makes the load."""
    settings = options.settings
    if settings.traces is not None:
        settings = replace(settings, traces=settings.traces.resolve())
    open_loop = settings.rate_per_s is not None
    ui = ["--headless"]
    if options.web_port is not None:
        ui = ["--autostart", "--autoquit", "1", "--web-host", "127.0.0.1"]
        ui += ["--web-port", str(options.web_port)]
    words = [
        *(sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), *ui, "--only-summary"),
        *("--host", options.url),
        *("--users", "1" if open_loop else str(options.users)),
        *("--spawn-rate", f"{options.spawn_rate:g}"),
        *("--run-time", f"{math.ceil(options.duration_s)}s"),
        *("--stop-timeout", str(GRACE_S)),
        *("--records", str(options.out.resolve()), "--progress"),
        *words_of(settings),
    ]
    if options.api_key_env is not None:
        words += ["--api-key-env", options.api_key_env]
    if options.ca is not None:
        words += ["--ca", str(options.ca.resolve())]
    return words


def make_load(options: RunOptions) -> bool:
    """Let locust make the load; tell whether somebody ended it early.

    One that goes on for longer than it may is killed; under its web UI, where users may make a run
    longer, only once it has closed its output. Raises: LoadTestError.
    """
    log = options.out / LOG_FILE
    limit_s = options.duration_s + GRACE_S + START_S_MAX
    with log.open("w") as errors, _ended(_start_locust(options, errors)) as process:
        deadline = None if options.web_port is not None else time.monotonic() + limit_s
        assert process.stdout is not None
        progress = make_progress(options.duration_s, options.name)
        try:
            lines = _Lines(process.stdout, deadline)
            was_interrupted = _follow(process, lines, progress, errors)
            process.wait(START_S_MAX if deadline is None else max(deadline - time.monotonic(), 1.0))
        except (TimeoutError, subprocess.TimeoutExpired):
            raise LoadTestError(f"locust did not end; see {log}") from None
        finally:
            progress.close()
    if not (options.out / ROWS_FILE).exists():
        told = _last_words(log.read_text(errors="replace"))
        raise LoadTestError(f"locust ended with code {process.returncode}: {told} (see {log})")
    return was_interrupted


def _last_words(log: str) -> str:
    """Return the last line that tells of an error, else the last one with words: not a table's rule."""
    lines = [line.strip() for line in log.splitlines() if any(map(str.isalpha, line))]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it said nothing"])[-1]


def _start_locust(options: RunOptions, errors: TextIO) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - our own command
        locust_command(options),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        process_group=0,
    )


class _Lines:
    """The lines that come through a pipe. An exception from outside loses none: just go on.

    Raises, from `next`: TimeoutError at `deadline` (on `time.monotonic`); None: never.
    """

    def __init__(self, pipe: IO[bytes], deadline: float | None) -> None:
        self._pipe, self._deadline = pipe, deadline
        self._rest = b""

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        while b"\n" not in self._rest:
            self._wait()
            more = os.read(self._pipe.fileno(), READ_BYTES)
            if not more and not self._rest:
                raise StopIteration
            self._rest += more or b"\n"
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode(errors="replace") + "\n"

    def _wait(self) -> None:
        """Return when there is something to read, or nothing will come any more."""
        left_s = None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe, selectors.EVENT_READ)
            if not selector.select(left_s):
                raise TimeoutError


def _follow(
    process: subprocess.Popen[bytes], lines: _Lines, progress: Progress, log: TextIO
) -> bool:
    """Show what the process tells until it closes its output; a Ctrl-C is passed on, and told.

    Raises: TimeoutError.
    """
    was_interrupted = False
    while True:
        try:
            for line in lines:
                if line.startswith("{"):
                    progress.show(orjson.loads(line))
                else:
                    log.write(line)
            return was_interrupted
        except KeyboardInterrupt:
            if was_interrupted:
                raise
            was_interrupted = True
            progress.say("stopping: turns under way may end; Ctrl-C again ends them now")
            # Not SIGINT: that would be an exception in whichever greenlet runs just then, and get lost.
            process.send_signal(signal.SIGTERM)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the group that a process leads, also if it has ended itself."""
    with suppress(ProcessLookupError):  # the whole group has ended already
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Leave nothing of a process group behind, however the block ends."""
    try:
        yield process
    finally:
        kill_group(process)
        if process.stdout is not None:
            process.stdout.close()


# --- progress -------------------------------------------------------------------------------------


class Progress:
    """Plain lines, every few seconds."""

    def __init__(self, duration_s: float, name: str) -> None:
        self._duration_s, self._name = duration_s, name
        self._told_s = 0.0

    def show(self, told: Json) -> None:
        at_s = float(told["at_s"])
        if at_s - self._told_s >= PLAIN_PROGRESS_S:
            self._told_s = at_s
            prefix = f"{self._name}: " if self._name else ""
            self.say(f"{prefix}{at_s:.0f} of {self._duration_s:.0f} s: {_format(told)}")

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing is kept open."""


class BarProgress(Progress):
    """A bar on a terminal."""

    def __init__(self, duration_s: float, name: str) -> None:
        from tqdm import tqdm

        super().__init__(duration_s, name)
        self._bar = tqdm(
            total=round(duration_s), desc=name or None, unit="s", file=sys.stderr, leave=False,
            bar_format="{desc}{percentage:3.0f}%|{bar}| {n:.0f}/{total} s {postfix}",
        )  # fmt: skip

    def show(self, told: Json) -> None:
        self._bar.n = min(float(told["at_s"]), float(self._bar.total))
        self._bar.set_postfix_str(_format(told))

    def say(self, text: str) -> None:
        self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        self._bar.close()


def make_progress(duration_s: float, name: str) -> Progress:
    return (BarProgress if sys.stderr.isatty() else Progress)(duration_s, name)


def _format(told: Json) -> str:
    ttft_ms = told["ttft_ms_p50"]
    parts = [f"{told['turns']} turns", f"{told['open']} conversations open"]
    if told["failures"]:
        parts.insert(1, f"{told['failures']} failed")
    if ttft_ms is not None:
        parts.append(f"TTFT {ttft_ms:.0f} ms")
    if told["cpu_share"] is not None:
        parts.append(f"generator {told['cpu_share']:.0%} CPU")
    return ", ".join(parts)


def list_files(out: Path) -> Sequence[Path]:
    return [out / name for name in (REPORT_FILE, ROWS_FILE, PAGE_FILE)]
