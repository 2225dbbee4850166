"""An engine as a child process that is announced while it runs.

Responsible for the signals between them and for the exit code: whoever started this process must see
no difference to an engine that runs by itself. Standard library only; POSIX.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

LEFTOVERS_S = 5.0
"""What the engine's own children get to end, and to free their shared memory, after it did."""

_ENDING = (signal.SIGTERM, signal.SIGINT)
_FORWARDED = (*_ENDING, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Announced(Protocol):
    """What an `Announcer` does."""

    def start(self) -> None: ...

    def withdraw(self) -> None: ...


def supervise(argv: Sequence[str], environment: Mapping[str, str], announcer: Announced) -> int:
    """Run a command until it ends, announced, and return its exit code (128 + N for signal N).

    A signal is passed on, but before one that ends it (SIGTERM, SIGINT) the announcement is withdrawn:
    gateways must not send anything more to an engine that is about to end. Call it in the main thread.
    Raises: OSError if there is nothing to run.
    """
    # Handlers only note what came; a queue's `put` is safe in them, unlike requests and locks.
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in (*_FORWARDED, signal.SIGCHLD):
        signal.signal(number, lambda number, _frame: signals.put(number))
    # In a process group of its own, so that Ctrl-C reaches it through us only, and only once. Not in a
    # session of its own: docs/engines.md, "Several engines on one machine".
    process = subprocess.Popen(  # noqa: S603
        argv, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, process_group=0
    )
    announcer.start()
    try:
        while process.poll() is None:
            received = signals.get()
            if received in _ENDING:
                announcer.withdraw()
            if received != signal.SIGCHLD:
                process.send_signal(received)
    finally:
        announcer.withdraw()
        _end_group(process.pid)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _end_group(group: int) -> None:
    """Kill what an engine left behind: its workers survive when the server alone is killed."""
    deadline = time.monotonic() + LEFTOVERS_S
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.05)
        os.killpg(group, signal.SIGKILL)
