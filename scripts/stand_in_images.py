"""Stand-ins for public container images, on machines that reach no image registry.

Responsible for a Debian made by `debootstrap` under the name that our Dockerfiles' FROM has, and for a
Redis of Debian's package on top of it, so that Dockerfiles can be built and tried all the same. The
base differs from the published one in its point release only. Needs root, buildah and debootstrap;
standard library only. Never use what is built on them for a release: they carry a label that says so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LABEL = "moongate.stand-in"

DEBIAN = "docker.io/library/debian:12.12-slim"
SUITE = "bookworm"

# What the published slim images leave out, too.
NOT_IN_SLIM = ("usr/share/doc", "usr/share/info", "usr/share/lintian", "usr/share/locale",
               "usr/share/man", "var/cache/apt", "var/lib/apt/lists")  # fmt: skip

BUILDAH_RUN = ("--isolation", "chroot", "--network", "host")


class StandInError(Exception):
    """It can't be made; the text says why."""


@dataclass(frozen=True, slots=True)
class Package:
    """A public image that is little more than a package of Debian's."""

    package: str
    command: tuple[str, ...]
    user: str


PACKAGES: Mapping[str, Package] = {
    "redis": Package("redis-server", ("redis-server",), "redis"),
}
"""By the repository's last name."""


def can_stand_in(image: str) -> bool:
    """Return whether this module has anything for an image."""
    return image == DEBIAN or _repository(image) in PACKAGES


def make_stand_in(image: str, mounts: Sequence[str]) -> None:
    """Make an image under the name `image`. `mounts`: `-v` words for steps that install packages.

    Raises: StandInError.
    """
    if image == DEBIAN:
        _make_debian()
    else:
        _make_package(image, PACKAGES[_repository(image)], mounts)


def _repository(image: str) -> str:
    return image.rpartition("/")[2].partition(":")[0]


def _make_debian() -> None:
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        raise StandInError("making a stand-in needs root and debootstrap")
    with tempfile.TemporaryDirectory(prefix="moongate-debian-") as scratch:
        root = Path(scratch) / "root"
        _run("debootstrap", "--variant=minbase", SUITE, str(root))
        for name in NOT_IN_SLIM:
            shutil.rmtree(root / name, ignore_errors=True)
            (root / name).mkdir(parents=True)
        archive = Path(scratch) / "root.tar"
        _run("tar", "-C", str(root), "-cf", str(archive), ".")
        container = _run("buildah", "from", "scratch").strip()
        try:
            _run("buildah", "add", "-q", container, str(archive), "/")
            _commit(container, DEBIAN, ("bash",))
        finally:
            _run("buildah", "rm", container)


def _make_package(image: str, package: Package, mounts: Sequence[str]) -> None:
    container = _run("buildah", "from", "--pull-never", DEBIAN).strip()
    try:
        install = f"apt-get update && apt-get install -y --no-install-recommends {package.package}"
        _run("buildah", "run", *BUILDAH_RUN, *mounts, container, "--", "sh", "-c", install)
        _run("buildah", "config", "--user", package.user, container)
        _commit(container, image, package.command)
    finally:
        _run("buildah", "rm", container)


def _commit(container: str, image: str, command: Sequence[str]) -> None:
    path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    _run("buildah", "config", "--env", path, "--label", f"{LABEL}=true",
         "--cmd", " ".join(command), container)  # fmt: skip
    _run("buildah", "commit", "-q", container, image)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-10:])
        raise StandInError(f"failed: {' '.join(words[:3])}:\n{said}")
    return done.stdout
