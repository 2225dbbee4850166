"""Child processes of a benchmark: started in a group of their own, and ended by their own ids."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.workloads import MODEL

STOP_TIMEOUT_S = 10.0
START_TIMEOUT_S = 30.0
LOG_TAIL_CHARACTERS = 1_000


class StartError(Exception):
    """A program did not come up; the text has the end of its log."""


@dataclass(frozen=True, slots=True)
class Child:
    """A running program."""

    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(cls, command: Sequence[str], log: Path, cwd: Path) -> Child:
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,  # not a session: docs/engines.md, "Several engines on one machine"
            )
        return cls(process, log)

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """Return once `is_ready` says so.

        Raises: StartError when the program ends first, or takes too long.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_ready():
            if self.process.poll() is not None:
                raise StartError(f"ended with code {self.process.returncode}: {self._tail()}")
            if time.monotonic() > deadline:
                raise StartError(f"not ready after {START_TIMEOUT_S:.0f} s: {self._tail()}")
            time.sleep(0.1)

    def stop(self) -> None:
        """Ask it to end; then kill what is left of it and of its children."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_TIMEOUT_S)
        # The group is named by the id of the process that began it, and holds nothing else.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:].strip()


def take_free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago, all different."""
    with contextlib.ExitStack() as open_sockets:
        sockets = [open_sockets.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def is_healthy(url: str) -> bool:
    return _answers(urllib.request.Request(f"{url}/health"))


def completes(url: str) -> bool:
    """Return whether a chat completion gets through: routers say they are healthy before that."""
    question = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "ready?"}]
    body = json.dumps({"model": MODEL, "messages": question, "max_tokens": 1, "stream": False})
    headers = {"content-type": "application/json"}
    path = "/v1/chat/completions"
    return _answers(urllib.request.Request(url + path, data=body.encode(), headers=headers))


def _answers(request: urllib.request.Request) -> bool:
    try:
        with urllib.request.urlopen(request, timeout=5.0):
            return True
    except (OSError, urllib.error.URLError):
        return False
