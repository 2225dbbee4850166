#!/usr/bin/env python3
"""Create a Python environment from pinned requirements: the gateway's `.venv`, with the project
installed in place; or (argument `bench`) `.venv-bench` with the routers it is compared to; or (`sdks`)
`.venv-sdks` with the clients and agent frameworks it is tried with; or (`deploy`) `.venv-deploy` with what
checks the deployment files. Standard library only; run by the system's Python."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
PYTHON_OLDEST = (3, 11)


@dataclass(frozen=True, slots=True)
class Environment:
    """An environment, and what goes into it."""

    folder: str
    requirements: str
    has_project: bool


ENVIRONMENTS: Mapping[str, Environment] = {
    "gateway": Environment(".venv", "dev.txt", has_project=True),
    # Apart, because the compared routers have requirements of their own.
    "bench": Environment(".venv-bench", "bench.txt", has_project=False),
    # Apart, so that what people use comes with what it brings, and the gateway stays light.
    "sdks": Environment(".venv-sdks", "sdks.txt", has_project=False),
    # Apart, because these are programs of other people, which only the tests of files run.
    "deploy": Environment(".venv-deploy", "deploy.txt", has_project=False),
}


def main() -> int:
    """Return the exit code: 0 done, 1 something is missing or failed."""
    parser = argparse.ArgumentParser(description="Create a Python environment of the project.")
    parser.add_argument("name", nargs="?", choices=ENVIRONMENTS, default="gateway")
    environment = ENVIRONMENTS[parser.parse_args().name]
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
    print(f"setting up {environment.folder} ...", flush=True)
    try:
        _create(environment)
    except subprocess.CalledProcessError as error:
        print(f"failed: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    (PROJECT / environment.folder / ".ready").touch()
    print(f"{environment.folder} is ready ({time.monotonic() - began:.0f} s)", flush=True)
    return 0


def _create(environment: Environment) -> None:
    folder = PROJECT / environment.folder
    python = folder / "bin" / "python"
    if not python.exists():
        _run(sys.executable, "-m", "venv", folder)
    pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check")
    _run(*pip, "install", "-r", PROJECT / "requirements" / environment.requirements)
    if environment.has_project:
        _run(*pip, "install", "--no-deps", "--editable", PROJECT)


def _run(*words: str | Path) -> None:
    subprocess.run(words, check=True, cwd=PROJECT)


if __name__ == "__main__":
    sys.exit(main())
