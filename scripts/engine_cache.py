"""The cache directory that clones of this project share, and how a directory in it is built once.

Responsible for where the cache is and for building a directory there exactly once, also when two
clones want it at the same moment. It knows nothing of what is built: `setup_engine.py` builds
environments with it, `make_models.py` model directories. Standard library only, because
`setup_engine.py` runs before anything is installed.

A directory is built in place, since a virtual environment cannot be moved afterwards. So a marker
file, written last, tells a finished directory from the remains of an interrupted build, and
another one, written first, tells those remains from a directory that isn't ours to delete.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

COMPLETE_MARKER = ".complete"
BUILDING_MARKER = ".building"


class SetupError(Exception):
    """Something outside the project is missing or wrong; the text says what to do about it."""


class Progress:
    """Plain progress lines with the seconds since the start."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._start = time.monotonic()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._start:4.0f} s] {text}", file=self._stream, flush=True)


def cache_folder() -> Path:
    """Return the directory that all clones on this machine share; it may not exist yet."""
    if chosen := os.environ.get("MOONGATE_CACHE_DIR"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "moongate"


def is_complete(folder: Path, key: str) -> bool:
    """Return whether `folder` was built to the end from what `key` stands for."""
    try:
        return (folder / COMPLETE_MARKER).read_text(encoding="utf-8").strip() == key
    except (FileNotFoundError, NotADirectoryError):
        return False


def build_once(folder: Path, key: str, build: Callable[[Path], None], progress: Progress) -> bool:
    """Return whether `build` had to run to make `folder`; afterwards `folder` is complete.

    Raises: `SetupError` when `folder` holds something that this module did not put there.
    """
    if is_complete(folder, key):
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock"), progress):
        if is_complete(folder, key):  # Another process built it while we waited for the lock.
            return False
        _clear(folder)
        folder.mkdir(exist_ok=True)
        (folder / BUILDING_MARKER).touch()
        build(folder)
        (folder / COMPLETE_MARKER).write_text(key + "\n", encoding="utf-8")
        (folder / BUILDING_MARKER).unlink(missing_ok=True)
    return True


def run_main(main: Callable[[], int]) -> int:
    """Return the exit code of `main`, with the world's troubles as one line on stderr."""
    try:
        return main()
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the next run starts the unfinished part again", file=sys.stderr)
        return 1


def _clear(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if (folder / BUILDING_MARKER).exists() or (folder / COMPLETE_MARKER).exists():
        shutil.rmtree(folder)
    elif folder.exists():
        raise SetupError(f"{folder} exists and was not made by this script; move it away first")


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    # The lock ends with the process, so a killed build never blocks the next one.
    with path.open("w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.say(f"waiting for another process that holds {path}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
