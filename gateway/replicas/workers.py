"""Several gateway processes behind one address: starts them, and starts again what crashes.

Each worker has a listening socket of its own on the same address (SO_REUSEPORT), so the kernel spreads
connections and nobody stands between. They meet at the hub (`hub.py`), which is in this process, and are to
each other what replicas with Redis are. This process answers no requests.

SIGTERM, SIGINT and SIGHUP are passed on to all. A worker that crashes loses the requests that it had; the
others are told that its load is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from moongate.gateway.config.settings import Settings
from moongate.gateway.replicas import peer_wire, worker_views
from moongate.gateway.replicas.hub import Hub
from moongate.gateway.server import ListenError, listen
from moongate.gateway.telemetry import merged_metrics
from moongate.gateway.telemetry.merged_metrics import Retired
from moongate.router import PeerId

logger = logging.getLogger(__name__)

RESTART_S_MIN, RESTART_S_MAX = 0.1, 5.0
"""Before a worker that ended is started again; the wait doubles while they end within `STEADY_S`."""

STEADY_S = 10.0

METRICS_INTERVAL_S = 5.0
"""What a crashed worker counted since it was last asked is lost."""

PEER = "supervisor"
REPLY_TO = f"moongate:0:answer-{PEER}"
LAST_SEQUENCE = 1 << 40

HUB_BYTES = 64 << 20
"""What the hub may hold beside stored responses: instances, rates."""


class Workers:
    """`arguments`: of the command that runs one worker, but for the hub's socket."""

    def __init__(
        self, arguments: Sequence[str], count: int, hub_path: Path, bytes_max: int
    ) -> None:
        self._arguments = [*arguments, "--hub", str(hub_path)]
        self._count = count
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._retired = Retired()
        self._exit_code = 0
        self._known: set[str] = set()
        self._hub = Hub(
            hub_path, bytes_max=bytes_max, clock=time.monotonic, on_gone=self._note_gone
        )

    async def run(self) -> int:
        """Run until a signal asks to stop, or no worker can start. Return the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGHUP, self._pass_on, signal.SIGHUP)
        try:
            await self._hub.start()
        except OSError as error:  # such as a path that is too long for a socket
            raise ListenError(f"workers can't meet at {self._hub.path}: {error}") from error
        self._hub.listen(f"moongate:0:{worker_views.ASK}", self._asked)
        self._hub.listen(REPLY_TO, self._answered)
        asking = asyncio.create_task(self._keep_asking())
        try:
            await asyncio.gather(*(self._keep(number) for number in range(self._count)))
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await self._hub.close()
        return self._exit_code

    def _stop(self) -> None:
        self._stopping.set()
        self._pass_on(signal.SIGTERM)

    def _pass_on(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    async def _keep(self, number: int) -> None:
        """Run one worker after the other in this place."""
        pause_s = RESTART_S_MIN
        while not self._stopping.is_set():
            began = time.monotonic()
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *self._arguments,
                process_group=0,  # a terminal's Ctrl-C comes from here, once
            )
            self._processes[number] = process
            if self._stopping.is_set():  # the signal came while it was made
                process.terminate()
            code = await process.wait()
            del self._processes[number]
            if self._stopping.is_set():
                # One that had not come so far as to heed the signal has ended by it: that is no failure.
                self._exit_code = self._exit_code or (0 if code == -signal.SIGTERM else abs(code))
                return
            if not self._known:
                self._exit_code = 1  # none could start, and each has said why
                self._stop()
                return
            logger.error("worker %d ended with code %d, and is started again", number, code)
            is_steady = time.monotonic() - began >= STEADY_S
            pause_s = RESTART_S_MIN if is_steady else min(pause_s * 2, RESTART_S_MAX)
            await asyncio.sleep(pause_s)

    def _note_gone(self, peer: str) -> None:
        """Its connections are closed: it has stopped or crashed."""
        left = peer_wire.write(PeerId(peer), LAST_SEQUENCE, 1.0, [], [], has_left=True)
        self._hub.publish(b"moongate:0:peers", left)
        self._retired.end(peer)

    # --- what those counted that are gone ---------------------------------------------------------

    def _ask(self) -> None:
        question = worker_views.Question("", f"answer-{PEER}", "metrics", b"")
        channel = f"moongate:0:{worker_views.ASK}".encode()
        self._hub.publish(channel, worker_views.encode(question))

    async def _keep_asking(self) -> None:
        while True:
            self._ask()
            await asyncio.sleep(METRICS_INTERVAL_S if self._known else 0.1)

    def _answered(self, data: bytes) -> None:
        answer = worker_views.read_answer(data)
        self._known.add(answer.peer)
        self._retired.note(answer.peer, merged_metrics.read(answer.content))

    def _asked(self, data: bytes) -> None:
        question = worker_views.read_question(data)
        if question.what == "metrics" and question.reply_to != f"answer-{PEER}":
            self._ask()  # so that what is told now is not taken back, whoever crashes then
        if question.reply_to != f"answer-{PEER}":
            told = self._retired.families if question.what == "metrics" else None
            content = merged_metrics.encode(told) if told is not None else b""
            answer = worker_views.Answer(question.number, PEER, content)
            self._hub.publish(
                f"moongate:0:{question.reply_to}".encode(), worker_views.encode(answer)
            )


def run(settings: Settings, count: int, arguments: Sequence[str]) -> int:
    """Serve with this many workers until a signal asks to stop. Return the exit code.

    `arguments`: of a Python that runs one; the port is added. Raises: ListenError.
    """
    host = settings.listen.host
    # Held for as long as workers come and go, and never listened on: so it gets no connections.
    with listen(host, settings.listen.port, is_shared=True) as reserved:
        port = reserved.getsockname()[1]
        scheme = "https" if settings.listen.tls is not None else "http"
        told = "moongate listens on %s://%s:%d with %d workers"
        logger.info(told, scheme, host, port, count)
        with tempfile.TemporaryDirectory(prefix="moongate-") as directory:
            workers = Workers(
                [*arguments, "--host", host, "--port", str(port)],
                count,
                Path(directory) / "hub",
                settings.responses.bytes_max + HUB_BYTES,
            )
            return asyncio.run(workers.run())
