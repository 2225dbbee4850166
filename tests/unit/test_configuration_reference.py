"""The reference of the configuration file is what the settings say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
PAGE = PROJECT / "docs" / "configuration-reference.md"


def check(page: Path) -> subprocess.CompletedProcess[str]:
    script = PROJECT / "scripts" / "make_configuration_reference.py"
    words = [sys.executable, str(script), "--check", "--page", str(page)]
    return subprocess.run(words, capture_output=True, text=True, timeout=20)


def test_the_page_is_what_the_settings_say() -> None:
    done = check(PAGE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_page_that_says_another_default_is_told_apart(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    wrong = text.replace("| `8000` |", "| `8001` |")
    assert wrong != text
    page = tmp_path / "page.md"
    page.write_text(wrong, encoding="utf-8")
    done = check(page)
    assert done.returncode == 1
    assert "-| `port` | whole number from 0 to 65535 | `8001` |" in done.stdout
    assert "scripts/make_configuration_reference.py" in done.stderr


@pytest.mark.parametrize(
    ("key", "told"),
    [
        (
            "upstream_timeout_s",
            "number above 0, 86400 at most | `600` | s | at once | silence of an engine",
        ),
        ("stream_usage", "`asked`, `always` | `asked` |  | at once | always: ask engines for"),
        (
            "per_minute_max",
            "whole number from 1 to 600 | `20` | 1/minute | at once | seedings begun",
        ),
        ("id", "text | must be given |  | as another instance | what receipts"),
        (
            "ranks",
            "whole number from 1 to 1024, or list of whole number, 0 or more | *none* |  | as another",
        ),
        ("port", "whole number from 0 to 65535 | `8000` |  | restart | 0: any free port"),
        ("history_weight", "`3` |  | extra charge"),
    ],
)
def test_a_key_is_told_with_kind_default_unit_and_meaning(key: str, told: str) -> None:
    (row,) = [
        line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{key}` | {told}")
    ]
    assert row.endswith(" |")
