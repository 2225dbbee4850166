"""docker-compose.yml as Docker Compose itself reads it: interpolated, merged, checked by its schema."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
from processes import PROJECT

FILE = PROJECT / "docker-compose.yml"
TOOLS = PROJECT / ".venv-deploy" / "bin"


def tool(name: str) -> str:
    """Return the path of a program of `.venv-deploy`."""
    path = TOOLS / name
    if not path.exists():
        pytest.fail(f"{path} is missing; run `make setup-deploy`")
    return str(path)


@dataclass(frozen=True)
class Service:
    """One service, with the parts that tests ask for."""

    name: str
    facts: Mapping[str, Any]

    @property
    def command(self) -> list[str]:
        return list(self.facts["command"] or [])

    @property
    def environment(self) -> dict[str, str]:
        return {name: value or "" for name, value in self.facts.get("environment", {}).items()}

    @property
    def profiles(self) -> list[str]:
        return list(self.facts["profiles"])

    @property
    def replicas(self) -> int:
        count: int = self.facts["deploy"].get("replicas", 1)
        return count

    @property
    def binds(self) -> dict[str, str]:
        """Return what is mounted from this machine: where it lies by where it goes."""
        return self._volumes("bind")

    @property
    def volumes(self) -> dict[str, str]:
        """Return the named volumes, by where they go."""
        return self._volumes("volume")

    @property
    def is_ours(self) -> bool:
        return "build" in self.facts

    @property
    def health_command(self) -> list[str]:
        """Return the words of its health check, none if it has none."""
        words = list(self.facts["healthcheck"].get("test", []))
        return words[1:] if words[:1] == ["CMD"] else []

    @cached_property
    def aliases(self) -> list[str]:
        network = (self.facts.get("networks") or {}).get("default") or {}
        return [self.name, *network.get("aliases", [])]

    def _volumes(self, kind: str) -> dict[str, str]:
        mounts = self.facts.get("volumes", [])
        return {m["target"]: m["source"] for m in mounts if m["type"] == kind}


def read_services(environment: Mapping[str, str] | None = None) -> dict[str, Service]:
    """Return every service, of all profiles. `environment`: what a `.env` would say."""
    words = [tool("docker-compose"), "--project-directory", str(PROJECT), "-f", str(FILE)]
    words += ["--env-file", "/dev/null", "--profile", "*", "config", "--format", "json"]
    path = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=20, env={**path, **(environment or {})}
    )
    assert done.returncode == 0, done.stderr
    services = json.loads(done.stdout)["services"]
    return {name: Service(name, facts) for name, facts in services.items()}
