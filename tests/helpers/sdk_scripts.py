"""Scripts with the client libraries that people use, run in an environment of their own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from processes import PROJECT

SDK_PYTHON = PROJECT / ".venv-sdks" / "bin" / "python"
SCRIPT_S = 120.0


def run_script(script: Path, *words: str, **environment: str) -> str:
    """Run a script with the libraries that it is for. Return what it printed."""
    if not SDK_PYTHON.exists():
        pytest.fail(f"{SDK_PYTHON} is missing; run `make setup-sdks`")
    done = subprocess.run(
        [SDK_PYTHON, script, *words],
        env={**os.environ, **environment},
        capture_output=True, text=True, timeout=SCRIPT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
