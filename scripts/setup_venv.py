#!/usr/bin/env python3
"""Create the gateway's environment `.venv`, from the pinned requirements, and install the project
into it in place. Standard library only; run by the system's Python."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
VENV = PROJECT / ".venv"
READY = VENV / ".ready"
PYTHON_OLDEST = (3, 11)


def main() -> int:
    """Return the exit code: 0 done, 1 something is missing or failed."""
    if sys.version_info < PYTHON_OLDEST:
        print(f"moongate needs Python 3.11 or newer; this is {sys.version.split()[0]}")
        return 1
    try:
        import ensurepip  # noqa: F401 - Debian ships venv without it
        import venv  # noqa: F401
    except ImportError:
        print(
            "Python's venv module is missing. On Debian or Ubuntu:\n  apt-get install python3-venv"
        )
        return 1
    began = time.monotonic()
    print("setting up .venv ...", flush=True)
    try:
        _create()
    except subprocess.CalledProcessError as error:
        print(f"failed: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    READY.touch()
    print(f".venv is ready ({time.monotonic() - began:.0f} s)", flush=True)
    return 0


def _create() -> None:
    python = VENV / "bin" / "python"
    if not python.exists():
        _run(sys.executable, "-m", "venv", VENV)
    pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check")
    _run(*pip, "install", "-r", PROJECT / "requirements" / "dev.txt")
    _run(*pip, "install", "--no-deps", "--editable", PROJECT)


def _run(*words: str | Path) -> None:
    subprocess.run(words, check=True, cwd=PROJECT)


if __name__ == "__main__":
    sys.exit(main())
