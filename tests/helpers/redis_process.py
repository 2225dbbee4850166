"""A real redis-server of a test's own."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path
from typing import Self

import pytest
import redis
from processes import free_port, until

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None,
    reason="no redis-server here: apt-get install redis-server",
)


class RedisProcess:
    """Can be stopped, frozen and flushed; comes back on its port."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.thaw()
        self.stop()

    def start(self) -> None:
        argv = [
            "redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
            "--appendonly", "no", "--dir", str(self._directory),
        ]  # fmt: skip
        self._process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, process_group=0)
        until(self._answers, told=lambda: "redis-server does not start")

    def _answers(self) -> bool:
        try:
            return bool(self.client().ping())
        except redis.exceptions.ConnectionError:
            return False

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def client(self) -> redis.Redis:
        """Return a client of the test's own."""
        return redis.Redis(port=self.port, socket_timeout=5.0)
