"""Whether a command line of a deployment file is one that our own parsers take. Nothing is started."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest
from make_models import _parse_arguments as parse_model_words

from moongate import cli
from moongate.simulator.server import config_from_arguments


def check_words(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if the command would be refused, by its parser or by what builds the launch."""
    program, rest = words[0], list(words[1:])
    checks: dict[str, Callable[[], object]] = {
        "moongate": lambda: _check_ours(rest),
        "python": lambda: _check_model(rest, monkeypatch),
        "locust": lambda: _check_locust(rest),
    }
    assert program in checks, f"who knows {program}?"
    try:
        checks[program]()
    except SystemExit as ended:
        pytest.fail(f"refused with exit code {ended.code}: {' '.join(words)}")


def _check_ours(words: list[str]) -> None:
    options = cli._make_parser().parse_args(words)
    if words[0] == "engine":
        assert options.build(options).argv  # raises LaunchError for what can't work
    elif words[0] == "sim-engine":
        assert config_from_arguments(options).port
    else:
        assert words[:2] == ["serve", "-c"], words


def _check_model(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", words)
    assert words[0] == "/opt/models/make_models.py"
    assert parse_model_words().model


def _check_locust(words: list[str]) -> None:
    # In a process of its own, since locust patches whichever it is in.
    parse = (
        "import sys; from locust.argument_parser import parse_options;"
        " import moongate.loadtest.locustfile; parse_options(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", parse, *words], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
