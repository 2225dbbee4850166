#!/usr/bin/env python3
"""Run mypy over the project under the names by which it is imported.

The folders at the top of the tree are the package `moongate`'s parts, which mypy can't know from
the files' places; a link to the tree under that name, made in the environment, shows it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
PACKAGES = ("gateway", "router", "kvpool", "engine_plugins", "simulator", "loadtest")
MODULES = ("cli", "engine_cli", "local_stack", "stack_panel")
SCRIPTS = (
    "setup_venv",
    "setup_engine",
    "check_types",
    "make_sim_tokenizer",
    "make_configuration_reference",
    "build_images",
)


def main() -> int:
    """Return mypy's exit code: the worst of all parts of the project."""
    root = PROJECT / ".venv" / "src"
    root.mkdir(parents=True, exist_ok=True)
    for name, target in (("moongate", PROJECT), ("benchmarks", PROJECT / "benchmarks")):
        link = root / name
        if not link.is_symlink():
            link.symlink_to(target)
    product = [f"-pmoongate.{name}" for name in PACKAGES] + [f"-mmoongate.{m}" for m in MODULES]
    codes = [_mypy(root, str(root), product)]
    helpers = f"{root}:{PROJECT / 'tests' / 'helpers'}:{PROJECT / 'scripts'}"
    tests = sorted(str(path) for path in (PROJECT / "tests").rglob("*.py"))
    # Several test files share a name; each is checked as a script of its own.
    codes.append(_mypy(root, helpers, ["--scripts-are-modules", "--namespace-packages",
                                       "--explicit-package-bases", *tests]))  # fmt: skip
    codes.append(_mypy(root, helpers, [f"-m{name}" for name in SCRIPTS]))
    codes.append(_mypy(root, str(root), ["-pbenchmarks"]))
    return max(codes)


def _mypy(cwd: Path, path: str, targets: list[str]) -> int:
    command = [sys.executable, "-m", "mypy", "--config-file", str(PROJECT / "pyproject.toml")]
    environment = {**os.environ, "MYPYPATH": path}
    return subprocess.run([*command, *targets], cwd=cwd, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
