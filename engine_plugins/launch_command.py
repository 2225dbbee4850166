"""What every launch has in common: the command to run, its refusal, and the ports it takes.

Pure. It knows neither vLLM nor Mooncake: `vllm_launch.py` and `store_launch.py` do.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

PORT_MAX = 65_535


class LaunchError(ValueError):
    """A launch that nothing could start from; the text names the field and a right value."""


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """What to run, the environment variables to add to the caller's own, and the files to write
    first (path to content)."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)


def shell_script(command: LaunchCommand, home: str | None = None) -> str:
    """Return `command` as lines for a POSIX shell that also write its files, as here-documents.

    `home`: where paths of files begin with it, "$HOME" stands in its place, so that the lines may be
    run by another user, or in a container.
    """
    documents = [_here_document(path, content, home) for path, content in command.files.items()]
    assignments = [
        f"{name}={_shell_path(value, home) if value in command.files else shlex.quote(value)}"
        for name, value in command.environment.items()
    ]
    return "".join(documents) + " ".join([*assignments, shlex.join(command.argv)])


def _here_document(path: str, content: str, home: str | None) -> str:
    folder = posixpath.dirname(path)
    making = f"mkdir -p {_shell_path(folder, home)}\n" if folder not in ("", "/") else ""
    return f"{making}cat > {_shell_path(path, home)} <<'END'\n{content.rstrip()}\nEND\n"


def _shell_path(path: str, home: str | None) -> str:
    """Return a path as one word for a shell."""
    rest = path.removeprefix(home.rstrip("/")) if home else path
    if rest == path or not rest.startswith("/") or not (home or "").rstrip("/"):
        return shlex.quote(path)
    return f'"$HOME"{shlex.quote(rest)}'


@dataclass(frozen=True, slots=True)
class PortRange:
    """The ports that one socket of each rank listens on: `first`, and the next `count` - 1."""

    name: str
    first: int
    count: int = 1

    @property
    def last(self) -> int:
        return self.first + self.count - 1


def check_ports(ranges: Iterable[PortRange]) -> None:
    """Raises: LaunchError if one isn't a port, or if two ranges share one."""
    taken: list[PortRange] = []
    for ports in ranges:
        if not 1 <= ports.first <= ports.last <= PORT_MAX:
            raise LaunchError(
                f"{ports.name}: {_listed(ports)} is not a port; choose one from 1 to {PORT_MAX}"
                if ports.count == 1
                else f"{ports.name}: {_listed(ports)} are not all ports; choose from 1 to {PORT_MAX}"
            )
        for other in taken:
            if ports.first <= other.last and other.first <= ports.last:
                raise LaunchError(
                    f"{ports.name}: {_listed(ports)} clashes with {other.name}, {_listed(other)};"
                    " choose ports of their own"
                )
        taken.append(ports)


def _listed(ports: PortRange) -> str:
    return str(ports.first) if ports.count == 1 else f"{ports.first} to {ports.last}"


def check_counts(launch: object, names: Iterable[str], least: int = 1) -> None:
    """Raises: LaunchError if one of these fields of `launch` is a number below `least`."""
    for name in names:
        count: int | None = getattr(launch, name)
        if count is not None and count < least:
            raise LaunchError(f"{name}: {count} is too small; choose {least} or more")
