"""`moongate simulate`: runs a preset's trials, shows how far it is, prints and writes what came of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from moongate.loadtest.traces import TraceError
from moongate.simulator.plots import write_plots
from moongate.simulator.presets import PRESETS, Given
from moongate.simulator.report import as_json, bound_line, table
from moongate.simulator.trial import Result, Trial, run

BAR_CELLS = 30
SHOWN_EVERY_S = 0.2
MOST = 0.95
"""Where devices could hold more of what is reused than this, room isn't what matters."""


class SimulateError(ValueError):
    """What was asked for can't be run; the text says why."""


class ProgressLine:
    """How far a row of trials is: a bar on a terminal, a line a trial elsewhere."""

    def __init__(self, out: TextIO, trials: int) -> None:
        self._out = out
        self._trials = trials
        self._is_terminal = out.isatty()
        self._shown_at = 0.0

    def moved(self, number: int, trial: Trial, share: float) -> None:
        now = time.monotonic()
        if not self._is_terminal or (now - self._shown_at < SHOWN_EVERY_S and share < 1):
            return
        self._shown_at = now
        done = (number + share) / self._trials
        bar = "#" * int(done * BAR_CELLS)
        what = f"{trial.name}, {trial.load}"[:40]
        self._out.write(f"\r[{bar:{BAR_CELLS}}] {done:4.0%} {what:40}")
        self._out.flush()

    def ended(self, number: int, trial: Trial, took_s: float) -> None:
        if not self._is_terminal:
            what = f"{trial.name}, {trial.workload.name}, {trial.load}"
            print(f"{number + 1}/{self._trials} {what}: {took_s:.1f} s", file=self._out, flush=True)
        elif number + 1 == self._trials:
            self._out.write("\r" + " " * (BAR_CELLS + 50) + "\r")


def simulate(
    preset: str,
    *,
    seed: int,
    traces: Path | None,
    json_file: Path | None,
    plots: Path | None,
    minutes: float = 60.0,
    out: TextIO = sys.stdout,
    progress: TextIO = sys.stderr,
) -> None:
    """Run a preset and tell what came of it.

    Raises: SimulateError for a name that isn't known, traces that can't be read, and files that can't
    be written; the latter before anything is run.
    """
    if preset not in PRESETS:
        raise SimulateError(f"unknown preset {preset!r}; known: {', '.join(PRESETS)}")
    _check_outputs(json_file, plots)
    try:
        trials = PRESETS[preset](Given(seed, traces, minutes * 60))
    except (TraceError, ValueError) as error:
        raise SimulateError(str(error)) from error
    results = run_all(trials, ProgressLine(progress, len(trials)))
    rows = [result.row for result in results]
    print(table(rows), file=out)
    for result in results:
        if result.row.pool_hit_rate and result.bounds.recency < MOST:
            print(bound_line(result), file=out)
    if json_file is not None:
        with _option("--json", json_file):
            json_file.write_text(as_json(preset, seed, rows))
    if plots is not None:
        with _option("--plots", plots):
            files = write_plots(plots, preset, results)
        print(*files, sep="\n", file=out)


def _check_outputs(json_file: Path | None, plots: Path | None) -> None:
    """Raises: SimulateError if these can't be written. A run may take an hour, so they come first."""
    if json_file is not None:
        with _option("--json", json_file):
            is_new = not json_file.exists()
            json_file.open("a").close()
            if is_new:
                json_file.unlink()
    if plots is not None:
        with _option("--plots", plots):
            plots.mkdir(parents=True, exist_ok=True)


@contextmanager
def _option(name: str, path: Path) -> Iterator[None]:
    try:
        yield
    except FileExistsError as error:  # of a folder that was to be made
        raise SimulateError(f"{name} {path}: not a folder") from error
    except OSError as error:
        raise SimulateError(f"{name} {path}: {error.strerror}") from error


def run_all(trials: Sequence[Trial], line: ProgressLine) -> list[Result]:
    results = []
    for number, trial in enumerate(trials):
        began = time.monotonic()
        results.append(run(trial, lambda share, n=number, t=trial: line.moved(n, t, share)))  # type: ignore[misc]
        line.ended(number, trial, time.monotonic() - began)
    return results
