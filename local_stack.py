"""`moongate up`: gateway and engines on this machine, as one process group that Ctrl-C ends.

Simulated engines run in this process, beside the gateway; vLLM engines as child processes from the
engine environment. Everything binds to localhost. This is for trying and for tests, so what it
starts is small: see the constants.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvloop

from moongate.engine_plugins.vllm_launch import (
    CPU_BLOCK_SIZE_MULTIPLE_TOKENS,
    EngineLaunch,
    build_command,
)
from moongate.gateway.app import Gateway
from moongate.gateway.config.settings import Settings
from moongate.gateway.server import GatewayServer, handle_signals, listen
from moongate.kvpool.memory import MemoryPool
from moongate.simulator.engine import EngineProfile
from moongate.simulator.script import Script, load_script
from moongate.simulator.server import BUNDLED_TOKENIZER, SimEngine, SimEngineConfig
from moongate.simulator.transfer import Connector, Role
from moongate.stack_panel import show_panel, show_starting, takes_panel

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
SIM_MODEL = "sim"

ENGINE_START_S_MAX = 600.0
"""A real engine's first start on a slow machine, with its caches empty."""

ENGINE_STOP_S = 10.0
"""What an engine gets to end by itself; then its process group is killed."""

POLL_S = 0.2
"""How often it is looked whether an engine has ended."""

EXAMPLE = (
    "Please tell me in one sentence what a prefix cache is good for. Only full blocks of a prompt are "
    "cached and found again, so this question is somewhat longer than it need be: long enough to fill "
    "several blocks of an engine, whichever size they have, and to be found there when asked again."
)
"""What the printed curl line asks: several blocks, so that the second time is seen to go home."""

SIM_PROFILE = EngineProfile(blocks=16384, prefill_tokens_per_s=8000.0, decode_tokens_per_s=60.0)
"""A mid-size model on one GPU, with a cache for about 260 K tokens."""

SIM_POOL_CACHES = 4
"""How many engines' caches the pool of simulated engines holds."""


class StackError(RuntimeError):
    """The stack could not be started; the text says what failed and what to do."""


@dataclass(frozen=True, slots=True)
class StackOptions:
    """What `moongate up` was asked for."""

    engines: int = 3
    engine: str = "sim"  # or "vllm"
    port: int = 8000
    model: str | None = None  # directory; None: the simulated engines' own
    policy: str = "kv_cost"
    python: str | None = None  # interpreter with vLLM
    pd: bool = False  # simulated engines: one prefills, the others decode
    script: Path | None = None  # simulated engines: what they answer


def run(options: StackOptions) -> int:
    """Start everything, say what to try, and stay until a signal. Return the exit code.

    Raises: StackError, ListenError, ScriptError.
    """
    if options.model is not None and not (Path(options.model) / "tokenizer.json").is_file():
        raise StackError(
            f"--model {options.model}: no tokenizer.json there; give a model directory"
        )
    sock = listen(HOST, options.port)
    # Under nohup it stays; else it ends with its terminal.
    ends_with_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    try:
        code = uvloop.run(_main(options, sock, ends_with_terminal=ends_with_terminal))
    except asyncio.CancelledError:
        code = 1  # stopped before it was up
    with contextlib.suppress(OSError):
        if takes_panel(sys.stdout):
            print("All of it has stopped.", flush=True)
    return code


async def _main(options: StackOptions, sock: socket.socket, *, ends_with_terminal: bool) -> int:
    engines: list[_Engine] = []
    stopping = (signal.SIGTERM, signal.SIGHUP) if ends_with_terminal else (signal.SIGTERM,)
    loop, main = asyncio.get_running_loop(), asyncio.current_task()
    assert main is not None
    for number in stopping:
        loop.add_signal_handler(number, main.cancel)
    try:
        engines = await _start_engines(options)
        server = GatewayServer(Gateway(_settings(options, engines), pool=_pool_of(engines)), sock)
        handle_signals(server)
        if ends_with_terminal:
            loop.add_signal_handler(signal.SIGHUP, server.request_stop)
        showing = asyncio.create_task(_show(server, engines))
        watching = [asyncio.create_task(_stop_with(engine, server)) for engine in engines]
        await server.serve()
        for task in (showing, *watching):
            task.cancel()
        await asyncio.gather(showing, *watching, return_exceptions=True)
        return 0
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines))


async def _show(server: GatewayServer, engines: Sequence[_Engine]) -> None:
    """Print what to try; then, on a terminal, what goes on."""
    with contextlib.suppress(OSError):  # the terminal may be gone
        await _announce(server, engines)
        if takes_panel(sys.stdout):
            await show_panel(server.gateway.view.parts)


def _settings(options: StackOptions, engines: Sequence[_Engine]) -> Settings:
    return Settings.model_validate(
        {
            "policy": {"name": options.policy},
            "pool": {"kind": "none" if _pool_of(engines) is None else "memory"},
            "drain": {"limit_s": 5.0},
            "instances": [_instance_settings(engine) for engine in engines],
        }
    )


def _instance_settings(engine: _Engine) -> dict[str, Any]:
    """Return what the gateway is told of one engine."""
    return {
        "id": engine.id,
        "url": engine.url,
        "role": engine.role.value,
        "bootstrap_url": engine.bootstrap_url if engine.role is Role.PREFILL else None,
    }


def _pool_of(engines: Sequence[_Engine]) -> MemoryPool | None:
    """Return the pool that the engines share in this process, None if they don't."""
    return next((engine.pool for engine in engines if engine.pool is not None), None)


async def _announce(server: GatewayServer, engines: Sequence[_Engine]) -> None:
    """Print what to try once the gateway can route."""
    url = f"http://{HOST}:{server.port}"
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        while True:
            if server.has_started and (await client.get("/ready")).status_code == httpx.codes.OK:
                break
            await asyncio.sleep(0.05)
    model = engines[0].model
    names = ", ".join(f"{engine.id} ({engine.url})" for engine in engines)
    body = json.dumps(
        {"model": model, "messages": [{"role": "user", "content": EXAMPLE}], "max_tokens": 16}
    )
    print(
        f"moongate is up.\n\n"
        f"  endpoint   {url}/v1   (model: {model})\n"
        f"  engines    {names}\n"
        f"  dashboard  {url}/ui\n"
        f"  operators  {url}/admin/instances   {url}/admin/index   {url}/metrics\n\n"
        f"Try (twice: the second answer comes from the instance that holds the prefix):\n\n"
        f"  curl -i {url}/v1/chat/completions -H 'content-type: application/json' \\\n"
        f"    -d '{body}'\n\n"
        f"Ctrl-C stops all of it.",
        flush=True,
    )


async def _stop_with(engine: _Engine, server: GatewayServer) -> None:
    """End the stack when an engine ends by itself."""
    await engine.wait()
    logger.error("engine %s ended; stopping", engine.id)
    server.request_stop()


# --- engines --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Engine:
    """A running engine, whichever kind."""

    id: str
    url: str
    model: str
    stop: Callable[[], Awaitable[None]]
    wait: Callable[[], Awaitable[Any]]
    role: Role = Role.BOTH
    bootstrap_url: str | None = None  # where decoders come to; None: it does not prefill for others
    pool: MemoryPool | None = None  # what it shares with the others in this process


async def _start_engines(options: StackOptions) -> list[_Engine]:
    names = [f"engine-{chr(ord('a') + number)}" for number in range(options.engines)]
    if options.engine == "sim":
        return await _start_sims(names, options)
    processes = [_VllmProcess(name, options, number) for number, name in enumerate(names)]
    is_shown = takes_panel(sys.stdout)
    try:
        with show_starting(names) if is_shown else contextlib.nullcontext():
            await asyncio.gather(*(process.start() for process in processes))
    except BaseException:
        await asyncio.gather(*(process.stop() for process in processes))
        raise
    return [_Engine(p.name, p.url, p.model_name, p.stop, p.wait) for p in processes]


async def _start_sims(names: Sequence[str], options: StackOptions) -> list[_Engine]:
    """Start simulated engines with one pool; with `pd` the first prefills for the others."""
    assert len(names) > 1 or not options.pd, "one prefills, the others decode"
    pool = MemoryPool(
        SIM_POOL_CACHES * SIM_PROFILE.capacity_tokens * SIM_PROFILE.kv_bytes_per_token
    )
    roles = [Role.BOTH] * len(names)
    if options.pd:
        roles = [Role.PREFILL, *[Role.DECODE] * (len(names) - 1)]
    script = None if options.script is None else load_script(options.script)
    return [
        await _start_sim(name, role, pool, options, script)
        for name, role in zip(names, roles, strict=True)
    ]


async def _start_sim(
    name: str, role: Role, pool: MemoryPool, options: StackOptions, script: Script | None
) -> _Engine:
    config = SimEngineConfig(
        profile=SIM_PROFILE,
        model=SIM_MODEL,
        kv_events_port=0,
        kv_replay_port=0,
        tokenizer=BUNDLED_TOKENIZER if options.model is None else Path(options.model),
        role=role,
        connector=Connector.NONE if role is Role.BOTH else Connector.MULTI,
        script=script,
    )
    engine = SimEngine(config, pool)
    await engine.start()
    return _Engine(
        id=name,
        url=engine.url,
        model=SIM_MODEL,
        stop=engine.stop,
        wait=asyncio.Event().wait,
        role=role,
        bootstrap_url=engine.bootstrap_url,
        pool=pool,
    )


class _VllmProcess:
    """One vLLM server as a child process, in a process group of its own."""

    def __init__(self, name: str, options: StackOptions, number: int) -> None:
        assert options.model is not None
        assert options.python is not None
        self.name = name
        self.model_name = Path(options.model).name.split("-")[0]
        http_port, events_port, replay_port = _free_ports(3)
        self.url = f"http://{HOST}:{http_port}"
        self._has_gpu = _has_gpu()
        self._number = number
        self._log = Path(options.python).parent.parent / f"{name}.log"
        # Not asyncio's: uvloop knows no process groups.
        self._process: subprocess.Popen[bytes] | None = None
        self._launch = EngineLaunch(
            model=options.model,
            served_model_name=self.model_name,
            python=options.python,
            port=http_port,
            kv_events_port=events_port,
            kv_replay_port=replay_port,
            topic=f"kv@{HOST}:{http_port}@{self.model_name}",
            device="gpu" if self._has_gpu else "cpu",
            block_size_tokens=None if self._has_gpu else CPU_BLOCK_SIZE_MULTIPLE_TOKENS,
            dtype=None if self._has_gpu else "float32",
            threads=None if self._has_gpu else max(1, (os.cpu_count() or 1) // options.engines),
        )

    async def start(self) -> None:
        """Return when the engine answers. Raises: StackError."""
        began = time.monotonic()
        self._process = self._begin()
        while not await self._answers():
            if self._process.poll() is not None:
                raise StackError(f"{self.name} ended while starting; see {self._log}")
            if time.monotonic() - began > ENGINE_START_S_MAX:
                raise StackError(f"{self.name} did not start in time; see {self._log}")
            await asyncio.sleep(0.5)
        print(f"{self.name} is up after {time.monotonic() - began:.0f} s", flush=True)

    def _begin(self) -> subprocess.Popen[bytes]:
        command = build_command(self._launch)
        environment = {**os.environ, **command.environment}
        if self._has_gpu:
            environment["CUDA_VISIBLE_DEVICES"] = str(self._number)
        with self._log.open("wb") as log:
            return subprocess.Popen(  # noqa: S603 - our own words, no shell
                command.argv,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,  # not a session: docs/engines.md, "Several engines on one machine"
            )

    async def _answers(self) -> bool:
        async with httpx.AsyncClient(base_url=self.url, trust_env=False) as client:
            try:
                return (await client.get("/health")).status_code == httpx.codes.OK
            except httpx.HTTPError:
                return False

    async def wait(self) -> None:
        assert self._process is not None
        while self._process.poll() is None:  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """Let the engine end by itself, which frees its shared memory; then kill what is left."""
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ENGINE_STOP_S):
                await self.wait()
        with contextlib.suppress(ProcessLookupError):  # the whole group has ended already
            os.killpg(self._process.pid, signal.SIGKILL)
        await self.wait()


def _free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago; held open together so that they differ."""
    sockets = [listen(HOST, 0) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def _has_gpu() -> bool:
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"],  # noqa: S607 - found on PATH, as the driver installs it
            capture_output=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and b"GPU" in listed.stdout


def default_engine_python(root: Path) -> str:
    """Return the interpreter of the engine environment beside this project.

    Raises: StackError if there is none.
    """
    python = root / ".venv-engine" / "bin" / "python"
    if not (root / "Makefile").exists():
        raise StackError(
            "--engine vllm works in a checkout only, whose `make setup-engine` installs vLLM; from an"
            " installed package start engines by the lines that `moongate engine command --python PYTHON"
            " …` prints, and name them to `moongate serve`"
        )
    if not python.exists():
        raise StackError(f"{python} does not exist; `make setup-engine` makes it")
    return str(python)
