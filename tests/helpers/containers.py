"""Services of docker-compose.yml, run from their images without a daemon.

Each container is one of buildah's (chroot isolation: no daemon, no cgroups) in a network namespace of
its own, and all of them are on one bridge, with the names that Compose would give them in /etc/hosts. So
command, environment, mounts, user, capabilities, addresses and ports are the Compose file's. What is not:
cgroup limits, the read-only root, `init`, and Compose's own order of things. Needs root.

Whatever is started here is also ended, by the ids of processes in its own namespaces.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from compose_file import Service

SUBNET = "10.231.77"
"""Of this machine only; nothing of it leaves the bridge."""

RUN = ("buildah", "run", "--isolation", "chroot", "--network", "host")


class ContainerError(AssertionError):
    """A container did not do what it was to do."""


@dataclass
class Container:
    """One running replica of a service."""

    service: Service
    name: str  # of its namespace
    address: str
    log: Path
    options: Sequence[str] = ()
    names: Sequence[tuple[str, str]] = ()  # of all containers, with their addresses
    id: str = ""
    process: subprocess.Popen[bytes] | None = None

    @property
    def _inside(self) -> list[str]:
        return ["ip", "netns", "exec", self.name, *RUN, *self.options, self.id, "--"]

    def start(self) -> None:
        caps = [word for cap in self.service.facts["cap_drop"] for word in ("--cap-drop", cap)]
        hosts = [word for name in self.names for word in ("--add-host", ":".join(name))]
        image = self.service.facts["image"]
        self.id = _run("buildah", "from", "--pull-never", *caps, *hosts, image).strip()
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [*self._inside, *self.service.command],
                stdout=out, stderr=out, stdin=subprocess.DEVNULL, process_group=0,
            )  # fmt: skip

    def wait_healthy(self, timeout_s: float) -> None:
        """Return when its own health check, run inside, is content."""
        assert self.process is not None
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ContainerError(f"{self.name} ended while starting:\n{self.tail()}")
            if self._is_healthy():
                return
            time.sleep(0.3)
        raise ContainerError(f"{self.name} is not healthy after {timeout_s} s:\n{self.tail()}")

    def wait_ended(self, timeout_s: float) -> int:
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ContainerError(f"{self.name} goes on:\n{self.tail()}") from None

    def terminate(self) -> None:
        """Send its first process what a stop of the container would send."""
        os.kill(self._first_process(), signal.SIGTERM)

    def user_of_process(self) -> int:
        status = Path(f"/proc/{self._first_process()}/status").read_text()
        match = re.search(r"^Uid:\s+(\d+)", status, re.MULTILINE)
        assert match is not None
        return int(match[1])

    def _is_healthy(self) -> bool:
        first = self._find_first_process()
        if first is None:
            return False
        # As a daemon would: beside the first process, with its root, network, user and environment.
        user = ("--setuid", str(self.user_of_process()))
        enter = ["nsenter", "--target", str(first), "--mount", "--net", "--root", *user]
        environment = Path(f"/proc/{first}/environ").read_bytes().decode().split("\0")
        words = [*enter, "env", "-i", *filter(None, environment), *self.service.health_command]
        return subprocess.run(words, capture_output=True, timeout=30, check=False).returncode == 0

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def remove(self) -> None:
        for number in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        if self.process is not None:
            self.process.wait(10)
        if self.id:
            subprocess.run(["buildah", "rm", self.id], capture_output=True, check=False)

    def _processes(self) -> list[int]:
        listing = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False
        )
        return [int(word) for word in listing.stdout.split()]

    def _first_process(self) -> int:
        first = self._find_first_process()
        if first is None:
            raise ContainerError(f"{self.name} has no process:\n{self.tail()}")
        return first

    def _find_first_process(self) -> int | None:
        """Return the process that the command became: the first one in the image's root."""
        for number in sorted(self._processes(), key=_start_time):
            with contextlib.suppress(OSError):
                process = Path(f"/proc/{number}")
                is_buildahs = "buildah" in (process / "exe").readlink().name
                if not is_buildahs and (process / "root").readlink() != Path("/"):
                    return number
        return None


@dataclass
class ContainerHost:
    """A bridge with containers on it, inside `with`."""

    directory: Path
    containers: dict[str, list[Container]] = field(default_factory=dict)
    made: list[tuple[str, str]] = field(default_factory=list)
    """Namespaces, and what links each to the bridge; noted before they are made."""

    def __enter__(self) -> Self:
        _run("ip", "link", "add", self.bridge, "type", "bridge")
        _run("ip", "address", "add", f"{SUBNET}.1/24", "dev", self.bridge)
        _run("ip", "link", "set", self.bridge, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for container in self.all:
            container.remove()
        for namespace, link in self.made:
            # First, and by name: a namespace goes only some time after its last socket.
            subprocess.run(["ip", "link", "del", link], check=False)
            subprocess.run(["ip", "netns", "del", namespace], check=False)
        subprocess.run(["ip", "link", "del", self.bridge], check=False)

    @property
    def bridge(self) -> str:
        return f"mg{os.getpid() % 100_000}"

    @property
    def all(self) -> Iterator[Container]:
        for replicas in self.containers.values():
            yield from replicas

    def plan(self, services: Sequence[Service], volumes: Mapping[str, Path]) -> None:
        """Give every replica a namespace, an address and its mounts, so that all know all."""
        number = 2
        for service in services:
            self.containers[service.name] = []
            for replica in range(service.replicas):
                container = self._make(service, replica, number)
                self.containers[service.name].append(container)
                number += 1
        for container in self.all:
            container.options = list(self._options(container, volumes))
            container.names = [(name, c.address) for c in self.all for name in c.service.aliases]

    def start(self, name: str, *, healthy_s: float | None = 60.0) -> list[Container]:
        """Start every replica of a service; wait until it is healthy, unless None is given."""
        replicas = self.containers[name]
        for container in replicas:
            container.start()
        for container in replicas:
            if healthy_s is not None:
                container.wait_healthy(healthy_s)
        return replicas

    def _make(self, service: Service, replica: int, number: int) -> Container:
        name = f"{self.bridge}-{service.name}-{replica}"
        outside, inside = f"{self.bridge}v{number}", "eth0"
        self.made.append((name, outside))
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", outside, "type", "veth", "peer", "name", inside, "netns", name)
        _run("ip", "link", "set", outside, "master", self.bridge, "up")
        address = f"{SUBNET}.{number}"
        for words in (
            ("address", "add", f"{address}/24", "dev", inside),
            ("link", "set", inside, "up"),
            ("link", "set", "lo", "up"),
            ("route", "add", "default", "via", f"{SUBNET}.1"),
        ):
            _run("ip", "-n", name, *words)
        log = self.directory / f"{service.name}-{replica}.log"
        return Container(service, name, address, log)

    def _options(self, container: Container, volumes: Mapping[str, Path]) -> Iterator[str]:
        service = container.service
        for target, source in service.binds.items():
            yield from ("-v", f"{source}:{target}:ro")
        for target, source in service.volumes.items():
            yield from ("-v", f"{volumes[source]}:{target}")
        for target in service.facts["tmpfs"]:
            place = self.directory / f"{container.name}{target.partition(':')[0].replace('/', '-')}"
            place.mkdir()
            place.chmod(0o1777)
            yield from ("-v", f"{place}:{target.partition(':')[0]}")
        for name, value in service.environment.items():
            yield from ("--env", f"{name}={value}")
        if "user" in service.facts:
            yield from ("--user", service.facts["user"])


def _start_time(process: int) -> int:
    """Return when a process began, in ticks; ids begin anew one day, and don't tell."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return 0  # it has ended
    return int(stat.rpartition(")")[2].split()[19])


def missing_here(images: Sequence[str]) -> str:
    """Return why containers can't be run here, "" if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("buildah", "ip"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    for image in images:
        found = subprocess.run(
            ["buildah", "inspect", "--type", "image", image], capture_output=True, check=False
        )
        if found.returncode != 0:
            return f"the image {image} is not built; run `make images`"
    return ""


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode != 0:
        raise ContainerError(f"{' '.join(words)}: {done.stderr}")
    return done.stdout
