"""The containers' health check, as a program."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from processes import PROJECT


class Answers(BaseHTTPRequestHandler):
    """200 for /well, 503 for all else."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/well" else 503)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def server() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), Answers) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield http.server_port
        finally:
            http.shutdown()
            thread.join()


def check(*words: str) -> subprocess.CompletedProcess[str]:
    # A proxy of the environment must not be asked.
    environment = {"PATH": "/usr/bin:/bin", "http_proxy": "http://127.0.0.1:9"}
    program = [sys.executable, str(PROJECT / "docker" / "healthcheck.py"), *words]
    return subprocess.run(program, capture_output=True, text=True, env=environment, timeout=10)


@pytest.mark.parametrize(
    ("address", "code", "said"),
    [
        ("http://127.0.0.1:{port}/well", 0, ""),
        ("http://127.0.0.1:{port}/ill", 1, "HTTP Error 503: Service Unavailable"),
        ("tcp://127.0.0.1:{port}", 0, ""),
        ("http://127.0.0.1:1/well", 1, "Connection refused"),
        ("tcp://127.0.0.1:1", 1, "Connection refused"),
        ("nonsense", 1, "unknown url type"),
    ],
)
def test_it_ends_as_the_address_answers(address: str, code: int, said: str) -> None:
    with server() as port:
        done = check(address.format(port=port))
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


def test_without_an_address_it_says_how_it_is_used() -> None:
    done = check()
    assert done.returncode == 2
    assert done.stderr.startswith("usage: healthcheck http://HOST:PORT/PATH")
