#!/usr/bin/env python3
"""Build the container images of docker/*.Dockerfile and print their sizes.

With docker where a daemon answers, else with buildah, which needs none. A Dockerfile whose base image
can't be had is not built, and said so; `--all` makes that a failure. Where a mirror or an index is
needed, pip's and apt's own settings of this machine are handed in (`package_sources.py`); nothing of
them stays in an image. Standard library only; run by the system's Python.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import package_sources
import stand_in_images

PROJECT = Path(__file__).resolve().parent.parent
FOLDER = PROJECT / "docker"
LABEL = "moongate.source"
PULL_S_MAX = 1800
"""A base image of several GB over a slow line."""
ASK_S_MAX = 120
"""What a builder may take to say whether it is there, or has an image."""


class BuildError(Exception):
    """A build failed; the text says which and why."""


@dataclass(frozen=True, slots=True)
class Image:
    """One of our images."""

    name: str
    dockerfile: Path

    @property
    def tag(self) -> str:
        """Return the name that docker-compose.yml has for it."""
        return f"localhost/moongate-{self.name}:{_version()}"

    def bases(self) -> list[str]:
        """Return the images that it is built on, each once."""
        found = re.findall(r"^FROM\s+(\S+)", self.dockerfile.read_text(), re.MULTILINE)
        return list(dict.fromkeys(found))

    def missing_sources(self) -> list[str]:
        """Return what it copies and this checkout hasn't."""
        return [name for name in self._copied() if not (PROJECT / name).exists()]

    def digest(self) -> str:
        """Return a hash of all that the image is made from, but for packages and bases."""
        digest = hashlib.sha256()
        for file in sorted(self._files()):
            digest.update(f"{file.relative_to(PROJECT)}\0".encode() + file.read_bytes())
        return digest.hexdigest()[:16]

    def _copied(self) -> Iterator[str]:
        for line in self.dockerfile.read_text().splitlines():
            if line.startswith("COPY ") and "--from=" not in line:
                words = [word for word in line.split()[1:] if not word.startswith("--")]
                for word in words[:-1]:
                    found = sorted(path.name for path in PROJECT.glob(word)) if "*" in word else []
                    yield from found or [word]

    def _files(self) -> Iterator[Path]:
        yield self.dockerfile
        for name in self._copied():
            path = PROJECT / name
            found = path.rglob("*") if path.is_dir() else [path]
            yield from (f for f in found if f.is_file() and "__pycache__" not in f.parts)


def all_images() -> list[Image]:
    """Return our images, by name."""
    files = sorted(FOLDER.glob("*.Dockerfile"))
    return [Image(file.name.removesuffix(".Dockerfile"), file) for file in files]


def _version() -> str:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version: str = project["version"]
    return version


# --- builders -------------------------------------------------------------------------------------


class Builder(Protocol):
    """What makes images."""

    @property
    def name(self) -> str: ...

    def has(self, image: str) -> bool: ...

    def pull(self, image: str) -> bool: ...

    def is_current(self, image: Image) -> bool: ...

    def build(self, image: Image, build_args: Sequence[str]) -> None: ...

    def size_bytes(self, image: Image) -> int: ...


class Docker:
    """Builds with a daemon. Its cache tells what is up to date."""

    name = "docker"

    def __init__(self, secret: Path, mounts: Sequence[str]) -> None:
        self._secret = secret  # a daemon mounts nothing into builds, so `mounts` stay unused

    def has(self, image: str) -> bool:
        return _succeeds("docker", "image", "inspect", image)

    def pull(self, image: str) -> bool:
        return _succeeds("docker", "pull", "--quiet", image, limit_s=PULL_S_MAX)

    def is_current(self, image: Image) -> bool:
        return False

    def build(self, image: Image, build_args: Sequence[str]) -> None:
        _build(image, "docker", "build", "--secret", f"id=pip,src={self._secret}",
               "--label", f"{LABEL}={image.digest()}", *build_args)  # fmt: skip

    def size_bytes(self, image: Image) -> int:
        return int(_output("docker", "image", "inspect", "--format", "{{.Size}}", image.tag))


class Buildah:
    """Builds without a daemon. A label tells what is up to date, since its own look takes long.

    Steps are kept (`--layers`), so that a change of ours doesn't install all packages again; `buildah rmi
    --prune` frees them.
    """

    name = "buildah"

    def __init__(self, secret: Path, mounts: Sequence[str]) -> None:
        self._secret = secret
        self._mounts = mounts

    def has(self, image: str) -> bool:
        return _succeeds("buildah", "inspect", "--type", "image", image)

    def pull(self, image: str) -> bool:
        return _succeeds("buildah", "pull", "--quiet", image, limit_s=PULL_S_MAX)

    def is_current(self, image: Image) -> bool:
        labels = '{{index .OCIv1.Config.Labels "' + LABEL + '"}}'
        words = ("buildah", "inspect", "--type", "image", "--format", labels, image.tag)
        return self.has(image.tag) and _output(*words) == image.digest()

    def build(self, image: Image, build_args: Sequence[str]) -> None:
        # In Docker's format, since the OCI one has no health checks.
        _build(image, "buildah", "build", "--layers", "--format", "docker", *stand_in_images.BUILDAH_RUN,
               "--pull-never", "--secret", f"id=pip,src={self._secret}", *self._mounts,
               "--label", f"{LABEL}={image.digest()}", *build_args)  # fmt: skip

    def size_bytes(self, image: Image) -> int:
        listing = _output("buildah", "images", "--json", image.tag)
        match = re.search(r'"size": "([\d.]+) ([KMG]?B)"', listing)
        assert match is not None, listing
        return int(float(match[1]) * {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9}[match[2]])


def _build(image: Image, *command: str) -> None:
    words = [*command, "--tag", image.tag, "--file", str(image.dockerfile), str(PROJECT)]
    if subprocess.run(words, check=False, stdin=subprocess.DEVNULL).returncode != 0:
        raise BuildError(f"{image.dockerfile.name}: the build failed; its messages are above")


def _succeeds(*words: str, limit_s: float = ASK_S_MAX) -> bool:
    quiet = subprocess.DEVNULL
    try:
        done = subprocess.run(words, stdout=quiet, stderr=quiet, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _output(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def choose_builder(name: str | None) -> type[Docker | Buildah]:
    """Return the builder that was asked for, or that works here. Raises: BuildError."""
    if name in (None, "docker") and shutil.which("docker") and _succeeds("docker", "info"):
        return Docker
    if name in (None, "buildah") and shutil.which("buildah"):
        return Buildah
    raise BuildError(
        "nothing to build with: no docker daemon answers, and buildah is not installed"
        " (Debian: apt-get install buildah debootstrap crun)"
    )


# --- what is done ---------------------------------------------------------------------------------


def ensure_base(builder: Builder, base: str, mounts: Sequence[str], may_stand_in: bool) -> str:
    """Make sure that a base image is here. Return why it isn't, or "" if it is."""
    if builder.has(base):
        return ""
    print(f"pulling {base}", flush=True)
    if builder.pull(base):
        return ""
    if builder.name != "buildah" or not may_stand_in or not stand_in_images.can_stand_in(base):
        return f"its base {base} can't be pulled here"
    print(f"{base} can't be pulled: making a stand-in by debootstrap, for trying only", flush=True)
    try:
        stand_in_images.make_stand_in(base, mounts)
    except stand_in_images.StandInError as error:
        return f"its base {base} can't be pulled here, nor a stand-in be made: {error}"
    return ""


def why_not(image: Image, builder: Builder, options: Options) -> str:
    """Get what an image is built from. Return why it can't be built, or "" if it can."""
    missing = image.missing_sources()
    if missing:
        return f"this checkout has no {', '.join(missing)}"
    reasons = (
        ensure_base(builder, base, options.mounts, options.may_stand_in) for base in image.bases()
    )
    return next(filter(None, reasons), "")


def build_all(images: Sequence[Image], builder: Builder, options: Options) -> int:
    """Build what can be built, print a line for each, and return the exit code."""
    told: list[str] = []
    unbuilt = 0
    for image in images:
        reason = why_not(image, builder, options)
        if reason:
            unbuilt += 1
            told.append(f"  {image.name:12} not built: {reason}")
            continue
        began = time.monotonic()
        if not builder.is_current(image):
            builder.build(image, options.build_args)
        size_mb = builder.size_bytes(image) / 1e6
        told.append(
            f"  {image.name:12} {size_mb:7.0f} MB   {image.tag}   ({time.monotonic() - began:.0f} s)"
        )
    print(f"images ({builder.name}):", *told, sep="\n")
    return 1 if unbuilt and options.needs_all else 0


@dataclass(frozen=True, slots=True)
class Options:
    """How to build."""

    mounts: Sequence[str]  # `-v` words, for buildah
    build_args: Sequence[str]
    may_stand_in: bool
    needs_all: bool


def main() -> int:
    """Return the exit code: 0 built what this machine can, 1 failed, 2 used wrongly."""
    words = _parse_arguments()
    images = [image for image in all_images() if not words.names or image.name in words.names]
    unknown = set(words.names) - {image.name for image in images}
    if unknown:
        known = ", ".join(image.name for image in all_images())
        print(f"no such image: {', '.join(sorted(unknown))}; there are {known}", file=sys.stderr)
        return 2
    settings = package_sources.read_pip_settings()
    pip_conf, mounts = package_sources.place(settings)
    mounts += package_sources.apt_mounts(stand_in_images.SUITE)
    mounts += [word for mount in words.volume for word in ("-v", mount)]
    build_args = [word for argument in words.build_arg for word in ("--build-arg", argument)]
    options = Options(mounts, build_args, not words.no_stand_ins, words.all)
    with tempfile.TemporaryDirectory(prefix="moongate-images-") as scratch:
        secret = Path(scratch) / "pip.conf"
        secret.touch(0o600)
        secret.write_text(pip_conf, encoding="utf-8")
        # Not in the images' layers: buildah's scratch space, where a small /tmp would overflow.
        os.environ.setdefault("TMPDIR", "/var/tmp")  # noqa: S108
        try:
            return build_all(images, choose_builder(words.builder)(secret, mounts), options)
        except (BuildError, stand_in_images.StandInError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Build the images of docker/*.Dockerfile.")
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="such as gateway (default: every image)")
    add("--all", action="store_true", help="fail if any can't be built here")
    add("--builder", choices=("docker", "buildah"), help="(default: docker if its daemon answers)")
    add("--no-stand-ins", action="store_true",
        help="build on published base images only; without it, where no registry is reached,"
        " buildah builds on a Debian made by debootstrap")  # fmt: skip
    add("--build-arg", action="append", default=[], metavar="NAME=VALUE",
        help="passed on, such as PIP_EXTRA_INDEX_URL=... (repeatable)")  # fmt: skip
    add("--volume", action="append", default=[], metavar="HERE:THERE:ro",
        help="buildah: mounted into build steps, such as a folder of wheels (repeatable)")  # fmt: skip
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
