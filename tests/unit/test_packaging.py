"""What is installed is what is in the tree."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]


@pytest.mark.timeout(60)
def test_the_wheel_holds_every_file_of_every_component(tmp_path: Path) -> None:
    """A package that pyproject.toml does not list would be left out without a word."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=PROJECT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    # Built from a copy of the tracked files: in the tree itself setuptools would leave its marks.
    source = tmp_path / "source"
    for name in listed:
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((PROJECT / name).read_bytes())
    options = ("--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(tmp_path))
    command = [sys.executable, "-m", "pip", "wheel", str(source), *options]
    built = subprocess.run(command, check=False, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}

    outside = ("tests", "scripts", "docs", "examples", "benchmarks", "requirements", "docker")
    expected = {
        f"moongate/{name}"
        for name in listed
        if name.split("/")[0] not in outside
        and (
            name.endswith((".py", "py.typed"))
            or name.startswith(("simulator/model/", "gateway/admin/ui/"))
        )
    }
    assert packed == expected


def test_every_dependency_is_pinned_for_the_environments() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for name in ("gateway.txt", "dev.txt")
        for line in (PROJECT / "requirements" / name).read_text().splitlines()
        if "==" in line
    }
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {line.split(">")[0].split(";")[0].strip().lower() for line in wanted}
    assert names - pinned == set()
