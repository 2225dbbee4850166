"""`moongate engine serve` with a program in an engine's place: signals, exit codes, announcements."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from processes import MOONGATE, free_port, until

pytestmark = pytest.mark.timeout(60)


# Stands for a Python that has vLLM: serves /health on the port that it is given. It ends at once, or
# leaves a child behind when it ends, when told to.
ENGINE = """#!{python}
import http.server, os, signal, subprocess, sys
if "ENDS" in os.environ:
    sys.exit(7)
port = int(sys.argv[sys.argv.index("--port") + 1])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *arguments):
        pass
def end(number, frame):
    print("engine got", number, flush=True)
    os._exit(3)
signal.signal(signal.SIGTERM, end)
for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: print("engine got", number, flush=True))
if "LEAVES" in os.environ:
    print("left", subprocess.Popen(["sleep", "300"]).pid, flush=True)
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
server.serve_forever()
"""


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    file = tmp_path / "python-with-vllm"
    file.write_text(ENGINE.format(python=sys.executable))
    file.chmod(0o755)
    return file


class FakeGateway:
    """Remembers what it is asked, in order."""

    def __init__(self, port: int = 0) -> None:
        asked: list[tuple[str, str, dict[str, object] | None]] = []
        self.asked = asked

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                asked.append((self.command, self.path, body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def do_DELETE(self) -> None:
                self.do_PUT()

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def wait_for(self, method: str, times: int = 1) -> None:
        until(
            lambda: [m for m, _, _ in self.asked].count(method) >= times, 15.0, lambda: self.asked
        )

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def gateways() -> Iterator[Callable[..., FakeGateway]]:
    started: list[FakeGateway] = []

    def start(port: int = 0) -> FakeGateway:
        started.append(FakeGateway(port))
        return started[-1]

    yield start
    for gateway in started:
        with contextlib.suppress(OSError):
            gateway.stop()


Serve = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def serve(engine: Path) -> Iterator[Serve]:
    started: list[subprocess.Popen[str]] = []

    def start(*words: str, **environment: str) -> subprocess.Popen[str]:
        command = [*MOONGATE, "engine", "serve", "--model", "/m", "--python", str(engine), *words]
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.terminate()  # it ends its engine, which is not in its process group
        process.communicate(timeout=20)


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_an_announced_engine_is_withdrawn_before_it_is_told_to_end(
    serve: Serve, gateways: Callable[..., FakeGateway]
) -> None:
    gateway = gateways()
    port = free_port()
    url = f"http://127.0.0.1:{gateway.port}"
    words = ("--announce", url, "--announce-id", "a", "--lease", "0.3")
    process = serve("--port", str(port), *words, LEAVES="1")
    gateway.wait_for("PUT", times=3)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 3
    methods = [(method, path) for method, path, _ in gateway.asked]
    assert methods[-1] == ("DELETE", "/admin/instances/a?withdrawn=true")
    assert methods.count(("DELETE", "/admin/instances/a?withdrawn=true")) == 1
    _, _, record = gateway.asked[0]
    assert record is not None
    assert record["url"] == f"http://127.0.0.1:{port}"
    assert record["lease_s"] == 0.3
    assert f"engine got {signal.SIGTERM.value}" in output
    left = int(output.split("left ")[1].split()[0])
    assert not is_running(left)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_that_does_not_end_an_engine_leaves_it_announced(
    serve: Serve, gateways: Callable[..., FakeGateway], number: signal.Signals
) -> None:
    gateway = gateways()
    url = f"http://127.0.0.1:{gateway.port}"
    process = serve("--port", str(free_port()), "--announce", url, "--lease", "0.3")
    gateway.wait_for("PUT")
    process.send_signal(number)
    assert process.stdout is not None
    assert f"engine got {number.value}\n" in process.stdout  # reads on until it is there
    gateway.wait_for("PUT", times=len(gateway.asked) + 2)
    assert {method for method, _, _ in gateway.asked} == {"PUT"}


def test_a_gateway_that_is_started_again_hears_of_the_engine_again(
    serve: Serve, gateways: Callable[..., FakeGateway]
) -> None:
    first = gateways()
    url = f"http://127.0.0.1:{first.port}"
    serve("--port", str(free_port()), "--announce", url, "--lease", "0.3")
    first.wait_for("PUT")
    first.stop()
    second = gateways(first.port)
    second.wait_for("PUT")


def test_the_exit_code_is_the_engines_own(
    serve: Serve, gateways: Callable[..., FakeGateway]
) -> None:
    url = f"http://127.0.0.1:{gateways().port}"
    assert serve("--announce", url, ENDS="1").wait(20) == 7
    assert serve(ENDS="1").wait(20) == 7


def test_an_engine_killed_by_a_signal_gives_128_and_its_number(
    serve: Serve, gateways: Callable[..., FakeGateway], tmp_path: Path
) -> None:
    gateway = gateways()
    url = f"http://127.0.0.1:{gateway.port}"
    process = serve("--port", str(free_port()), "--announce", url, "--lease", "0.3")
    gateway.wait_for("PUT")
    (engine,) = (
        int(stat.parent.name)
        for stat in Path("/proc").glob("[0-9]*/stat")
        if _parent_of(stat) == process.pid
    )
    os.kill(engine, signal.SIGKILL)
    assert process.wait(20) == 128 + signal.SIGKILL
    assert gateway.asked[-1][0] == "DELETE"


def _parent_of(stat: Path) -> int | None:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def test_a_pool_members_settings_are_written_before_it_starts(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "new" / "pool.json"
    words = ("--pool", "--segment-size", "512MB", "--mooncake-config", str(file))
    assert serve(*words, ENDS="1").wait(20) == 7
    assert json.loads(file.read_text())["global_segment_size"] == 512 * 1024**2
    assert list(file.parent.iterdir()) == [file]
