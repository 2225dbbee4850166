"""A command in a terminal of its own: what its screen shows, and that it ends with its terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pyte

ROWS, COLUMNS = 50, 110

TAKE_TERMINAL = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"


class Terminal:
    """A running command and its screen."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self._master: int | None = master
        self.screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self.screen)

    def read(self, for_s: float = 0.1) -> str:
        """Take in what the command writes meanwhile; return what the screen shows."""
        deadline = time.monotonic() + for_s
        while self._master is not None and (left := deadline - time.monotonic()) > 0:
            if not select.select([self._master], [], [], left)[0]:
                break
            try:
                piece = os.read(self._master, 65536)
            except OSError:  # the command has ended
                break
            if not piece:
                break
            self._stream.feed(piece)
        return self.text

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    def wait_for(self, condition: Callable[[str], object], timeout_s: float = 20.0) -> str:
        """Return what the screen shows once that is as wished; the test fails if it never is."""
        deadline = time.monotonic() + timeout_s
        while not condition(shown := self.read()):
            assert time.monotonic() < deadline, shown
        return shown

    def press(self, keys: bytes) -> None:
        assert self._master is not None
        os.write(self._master, keys)

    def close(self) -> None:
        """Close the terminal, as when its window is closed."""
        if self._master is not None:
            os.close(self._master)
            self._master = None

    def wait(self, timeout_s: float = 15.0) -> int:
        """Return the exit code; what the command still writes is taken in."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text
            self.read()
            time.sleep(0.01)
        self.read()
        return self.process.returncode


@contextlib.contextmanager
def terminal(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Terminal]:
    """Run a command in a new terminal; whatever is left of it ends with the block."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", TAKE_TERMINAL, *command],
        stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        env={**os.environ, "TERM": "xterm-256color", **environment},
    )  # fmt: skip
    os.close(slave)
    shown = Terminal(process, master)
    try:
        yield shown
    finally:
        shown.close()
        # Its engines are in process groups of their own.
        while left := processes_of(process.pid):
            for number in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            process.poll()
        process.wait()


def processes_of(session: int) -> dict[int, str]:
    """Return the command lines of the processes that are in a terminal's session, by their ids."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
