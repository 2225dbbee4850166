"""Child processes for tests: real engines and the gateway, each in a process group of its own.

Whatever a test starts here it also ends, by process group; logs stay in the test's directory.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import yaml

from moongate.engine_plugins.vllm_launch import EngineLaunch, build_command

PROJECT = Path(__file__).parents[2]
T = TypeVar("T")
MOONGATE = (sys.executable, "-m", "moongate.cli")
ENGINE_PYTHON = PROJECT / ".venv-engine" / "bin" / "python"
ENGINE_START_S = 180.0
BLOCK_TOKENS = 32
"""Block size of the test engines: the smallest that vLLM's CPU kernels take."""


def until(
    condition: Callable[[], T | None],
    timeout_s: float = 10.0,
    told: Callable[[], object] = lambda: "",
) -> T:
    """Return the first true value of `condition()`. The test fails if there is none in time, and says
    what `told` returns then."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {told()}"
        time.sleep(0.03)
    return value


def free_port() -> int:
    """Return a port that was free a moment ago, and that nobody is given by chance.

    An engine binds its ports half a minute after its start. Those from 32,768 on the system meanwhile
    gives to any connection.
    """
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                sock.bind(("127.0.0.1", port))
                return port
    raise AssertionError("no port from 20,000 to 32,000 is free")


@dataclass(slots=True)
class Child:
    """A running child process."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    @classmethod
    def start(
        cls, argv: Sequence[str], url: str, log: Path, environment: Mapping[str, str] | None = None
    ) -> Child:
        with log.open("ab") as out:
            process = subprocess.Popen(
                argv,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                process_group=0,  # not a session: docs/engines.md, "Several engines on one machine"
                env={**os.environ, **(environment or {})},
            )
        return cls(process, url, log)

    def wait_until(self, path: str, timeout_s: float) -> None:
        """Return when `path` answers 200."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"ended while starting:\n{self.tail()}"
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(self.url + path, timeout=2.0, trust_env=False).status_code == 200:
                    return
            time.sleep(0.1)
        raise AssertionError(f"{path} did not answer in {timeout_s} s:\n{self.tail()}")

    def kill(self) -> None:
        """SIGKILL the whole group, as a crash would be."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self, timeout_s: float = 15.0) -> int:
        """Ask it to end, and kill what is left of its group. Return its exit code."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        self.kill()
        return self.process.returncode

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


def _shared_memory_of(group: int) -> set[Path]:
    """Return the shared-memory segments that the processes of a group have mapped."""
    segments: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ProcessLookupError):
            if os.getpgid(int(process.name)) == group:
                maps = (process / "maps").read_text()
                segments |= {Path(path) for path in re.findall(r"/dev/shm/psm_\w+", maps)}
    return segments


@dataclass(slots=True)
class EngineProcess:
    """A real vLLM engine that can be killed and started again on its addresses."""

    launch: EngineLaunch
    log: Path
    child: Child | None = None

    @classmethod
    def make(cls, model: Path, directory: Path, name: str, **options: Any) -> EngineProcess:
        port = free_port()
        launch = EngineLaunch(
            model=str(model),
            served_model_name="tiny",
            python=str(ENGINE_PYTHON),
            port=port,
            kv_events_port=free_port(),
            kv_replay_port=free_port(),
            topic=f"kv@127.0.0.1:{port}@tiny",
            device="cpu",
            dtype="float32",
            threads=1,
            block_size_tokens=32,
            **options,
        )
        return cls(launch, directory / f"{name}.log")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.launch.port}"

    def start(self) -> None:
        command = build_command(self.launch)
        for path, content in command.files.items():
            Path(path).write_text(content)
        self.child = Child.start(command.argv, self.url, self.log, command.environment)

    def wait_ready(self) -> None:
        assert self.child is not None
        self.child.wait_until("/health", ENGINE_START_S)

    def kill(self) -> None:
        """SIGKILL, and take away the shared memory that its processes can no longer free."""
        assert self.child is not None
        segments = _shared_memory_of(self.child.process.pid)
        self.child.kill()
        for segment in segments:
            segment.unlink(missing_ok=True)

    def stop(self) -> None:
        if self.child is not None:
            self.child.stop()


@contextlib.contextmanager
def running(*engines: EngineProcess) -> Iterator[None]:
    """Start engines side by side, wait until all are ready, and stop them in the end."""
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_ready()
        yield
    finally:
        for engine in engines:
            engine.stop()


@contextlib.contextmanager
def stack_up(directory: Path) -> Iterator[Child]:
    """Run `moongate up`, which is a gateway before three simulated engines; it is ready."""
    port = free_port()
    argv = [*MOONGATE, "up", "--port", str(port)]
    child = Child.start(argv, f"http://127.0.0.1:{port}", directory / "up.log")
    try:
        child.wait_until("/ready", 30.0)
        yield child
    finally:
        child.stop()


Serve = Callable[..., Child]
"""Starts a gateway before engines: `serve(engines, **settings)`."""


def start_gateway(directory: Path, settings: Mapping[str, Any], name: str = "gateway") -> Child:
    """Start `moongate serve` with these settings (listen is chosen here); wait for all instances."""
    port = free_port()
    file = directory / f"{name}.yaml"
    file.write_text(yaml.safe_dump({**settings, "listen": {"host": "127.0.0.1", "port": port}}))
    child = Child.start(
        [*MOONGATE, "serve", "-c", str(file)],
        f"http://127.0.0.1:{port}",
        directory / f"{name}.log",
    )
    try:
        child.wait_until("/ready", 30.0)
        key = os.environ.get((settings.get("auth") or {}).get("admin_key_env") or "")
        until(lambda: states_of(child.url, key) == {"up"}, 30.0, child.tail)
    except BaseException:
        child.kill()  # nobody else knows of it
        raise
    return child


def states_of(gateway_url: str, admin_key: str | None = None) -> set[str]:
    """Return the states that a gateway's instances are in."""
    headers = {"authorization": f"Bearer {admin_key}"} if admin_key else {}
    answer = httpx.get(
        f"{gateway_url}/admin/instances", timeout=10.0, trust_env=False, headers=headers
    )
    return {instance["state"] for instance in answer.json()["instances"]}
