"""Where this machine gets its packages from, given to image builds from outside.

Responsible for turning pip's and apt's own settings here into a secret and mounts of a build, so that a
Dockerfile names no mirror and an image keeps none. Standard library only.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

OS_RELEASE = Path("/etc/os-release")

# pip's settings that say where packages come from; others have no business in a build.
SOURCES = ("cert", "constraint", "extra-index-url", "find-links", "index-url", "no-index",
           "proxy", "timeout", "trusted-host")  # fmt: skip


def read_pip_settings() -> dict[str, str]:
    """Return what pip is told about sources here, by files and variables; variables count more."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    return parse_pip_settings(listing.stdout)


def parse_pip_settings(listing: str) -> dict[str, str]:
    """Return the sources in what `pip config list` printed."""
    settings: dict[str, str] = {}
    for line in sorted(listing.splitlines(), key=lambda line: line.startswith(":env:")):
        match = re.fullmatch(r"(?:global|install|:env:)\.([\w-]+)=(['\"])(.*)\2", line)
        if match is not None and match[1] in SOURCES:
            settings[match[1]] = match[3].replace("\\n", " ").strip()
    return settings


def place(settings: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return these settings as a pip.conf of a build, and `-v` words that mount what they name.

    Files and folders of this machine get a place of their own there: where they lie here, packages
    may want to put theirs.
    """
    mounts: dict[str, str] = {}
    lines = ["[global]"]
    for key, value in settings.items():
        words = [_placed(word, mounts) for word in value.split()]
        lines.append(f"{key} = {' '.join(words)}")
    words = [word for here, there in mounts.items() for word in ("-v", f"{here}:{there}:ro")]
    return "\n".join(lines) + "\n", words


def _placed(word: str, mounts: dict[str, str]) -> str:
    """Return a word of a setting as it is in the build, and note what has to be mounted for it."""
    is_index = word.startswith("file://")
    path = Path(word.removeprefix("file://"))
    if not path.is_absolute() or not path.exists():
        return word
    # An index's pages point beside themselves, to where its files are.
    shown = path.parent if is_index else path
    there = mounts.setdefault(str(shown), f"/run/moongate-sources/{len(mounts)}/{shown.name}")
    return f"file://{there}/{path.name}" if is_index else there


def apt_mounts(suite: str) -> list[str]:
    """Return `-v` words that mount apt's settings, where this is the same release of Debian."""
    return ["-v", "/etc/apt:/etc/apt:ro"] if _is_debian(suite) else []


def _is_debian(suite: str) -> bool:
    try:
        release = OS_RELEASE.read_text(encoding="utf-8")
    except OSError:
        return False
    lines = release.replace('"', "").splitlines()
    return "ID=debian" in lines and f"VERSION_CODENAME={suite}" in lines
