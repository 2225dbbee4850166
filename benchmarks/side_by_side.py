"""Compares routers: every round starts each of them once, fresh, and plays all workloads.

Rounds are interleaved (A B C, A B C, ...), so that ratios within a round hardly see the machine's
drift. What a run measures and how to read it is in `benchmarks/README.md`; what samples add up to is
`report.py`'s.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path

import msgspec

from benchmarks.processes import Child, StartError, completes, is_healthy, take_free_ports
from benchmarks.report import BenchRun, format_report, summarise
from benchmarks.routers import (
    PEERS_PYTHON,
    PROJECT,
    ROUND_ROBIN,
    ROUTERS,
    EngineAddress,
    Place,
    Router,
)
from benchmarks.sample import Sample
from benchmarks.workloads import WORKLOADS

ENGINES = 2
SETTLE_S = 1.0
"""Between a router's first answer and the load: subscriptions and health checks of both engines."""
WORKLOAD_TIMEOUT_S = 900.0
"""Far above the slowest workload, where engines render every prompt for the router."""
PEERS = ("vllm-router", "sglang-router")
OWN_PACKAGES = ("moongate", "httptools", "uvloop", "orjson", "msgspec", "tokenizers", "pyzmq")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run is to do."""

    rounds: int
    routers: tuple[Router, ...]
    workloads: tuple[str, ...]
    scale: float
    chunk_delay_ms: float
    tokenizer: Path | None
    skipped: tuple[str, ...]


PLAIN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML: role and content of each message, and nothing else."""


def run_plan(plan: Plan, file: Path) -> BenchRun:
    """Return the finished run. The file is written after each router, so a broken run leaves some."""
    run = BenchRun(
        date=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        command=shlex.join(["python", "-m", "benchmarks.side_by_side", *sys.argv[1:]]),
        commit=find_commit(),
        machine=describe_machine(),
        versions=find_versions(),
        samples=(),
        failures=(),
        skipped=plan.skipped,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    for round_number in range(plan.rounds):
        for router in plan.routers:
            samples, failures = _run_router(plan, router, round_number)
            run = msgspec.structs.replace(
                run, samples=run.samples + samples, failures=run.failures + failures
            )
            run = msgspec.structs.replace(run, summary=summarise(run.samples))
            file.write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=1) + b"\n")
    return run


def make_plain_model(model: Path, folder: Path) -> Path:
    """Return a model directory with a model's tokenizer and the plainest template for it.

    Real templates differ in what they cost to render; routers that know none should not be compared
    with one of them.
    """
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (model / name).is_file():
            shutil.copy(model / name, folder / name)
    (folder / "chat_template.jinja").write_text(PLAIN_TEMPLATE, encoding="utf-8")
    return folder


def _run_router(
    plan: Plan, router: Router, round_number: int
) -> tuple[tuple[Sample, ...], tuple[str, ...]]:
    """Return a router's samples of a round, and what went wrong in words."""
    samples: list[Sample] = []
    where = f"round {round_number + 1}/{plan.rounds}, {router.name}"
    with contextlib.ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="moongate-bench-")))
        try:
            engines = _start_engines(plan, router, folder, cleanup)
            child, url = _start_router(plan, router, engines, folder, cleanup)
            for workload in plan.workloads:
                sample = _play(plan, router, workload, round_number, (child, url), engines)
                samples.append(sample)
                _say(f"{where}, {workload}: {_brief(sample)}")
        except StartError as error:
            _say(f"{where}: {error}")
            return tuple(samples), (f"{where}: {error}",)
    return tuple(samples), ()


def _start_engines(
    plan: Plan, router: Router, folder: Path, cleanup: contextlib.ExitStack
) -> tuple[EngineAddress, ...]:
    engines = tuple(EngineAddress(*take_free_ports(3)) for _ in range(ENGINES))
    for number, engine in enumerate(engines):
        command = [sys.executable, "-m", "benchmarks.mock_engine", "--port", str(engine.port)]
        command += ["--chunk-delay-ms", str(plan.chunk_delay_ms)]
        if router.needs_tokenizer:
            command += ["--tokenizer", str(plan.tokenizer)]
            command += ["--kv-events-port", str(engine.kv_events_port)]
            command += ["--kv-replay-port", str(engine.kv_replay_port)]
        child = Child.start(command, folder / f"engine-{number}.log", PROJECT)
        cleanup.callback(child.stop)
        child.wait_until(partial(is_healthy, engine.url))
    return engines


def _start_router(
    plan: Plan,
    router: Router,
    engines: tuple[EngineAddress, ...],
    folder: Path,
    cleanup: contextlib.ExitStack,
) -> tuple[Child, str]:
    port, metrics_port = take_free_ports(2)
    place = Place(port, metrics_port, engines, plan.tokenizer, folder)
    child = Child.start(router.make_command(place), folder / "router.log", folder)
    cleanup.callback(child.stop)
    url = f"http://127.0.0.1:{port}"
    child.wait_until(partial(completes, url))
    time.sleep(SETTLE_S)
    return child, url


def _play(
    plan: Plan,
    router: Router,
    workload: str,
    round_number: int,
    started: tuple[Child, str],
    engines: tuple[EngineAddress, ...],
) -> Sample:
    """Return the sample of one workload, which a process of its own plays.

    Raises: StartError where that process does not come to an end of its own.
    """
    child, url = started
    command = [sys.executable, "-m", "benchmarks.load", "--name", router.name, "--url", url]
    command += ["--pid", str(child.process.pid), "--workload", workload]
    command += ["--round", str(round_number), "--scale", str(plan.scale)]
    for engine in engines:
        command += ["--engine", engine.url]
    try:
        done = subprocess.run(
            command, cwd=PROJECT, capture_output=True, check=False, timeout=WORKLOAD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise StartError(f"{workload} took over {WORKLOAD_TIMEOUT_S:.0f} s") from error
    if not done.stdout:
        raise StartError(
            f"{workload} gave no sample: {done.stderr.decode(errors='replace')[-1000:]}"
        )
    return msgspec.json.decode(done.stdout, type=Sample)


def _brief(sample: Sample) -> str:
    text = f"{sample.router_cpu_ms:.3f} ms/request"
    if sample.cached_token_share is not None:
        text += f", cached {sample.cached_token_share:.1%}"
    if not sample.is_clean:
        text += f", NOT CLEAN: forwarded {sample.forwarded}/{sample.requests}, {sample.errors}"
    return text


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- facts about the run --------------------------------------------------------------------------


def find_commit() -> str:
    """Return the commit of the tree, marked when the tree has changed since."""
    head = _output("git", "rev-parse", "HEAD")
    if head is None:
        return "unknown"
    return f"{head} with changes" if _output("git", "status", "--porcelain") else head


def describe_machine() -> dict[str, str | int]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count() or 0,
        "kernel": platform.release(),
    }


def find_versions() -> dict[str, str]:
    """Return the versions of what is compared and of what carries it."""
    versions = {"python": platform.python_version()}
    versions |= {name: metadata.version(name) for name in OWN_PACKAGES}
    ask = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
    for name in PEERS:
        if version := _output(str(PEERS_PYTHON), "-c", ask, name):
            versions[name] = version
    return versions


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command, cwd=PROJECT, capture_output=True, text=True, check=False, timeout=60
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


# --- command line ---------------------------------------------------------------------------------


def find_tokenizer() -> Path | None:
    """Return the newest SmolLM2 that `scripts/make_models.py` left in the shared cache."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    cache = Path(os.environ.get("MOONGATE_CACHE_DIR") or f"{base}/moongate").expanduser()
    finished = (cache / "models").glob("smollm2-*/.complete")
    return max((marker.parent for marker in finished), default=None, key=_modified_at)


def _modified_at(folder: Path) -> float:
    return folder.stat().st_mtime


def make_plan(arguments: argparse.Namespace) -> Plan:
    """Return what to do, without the routers that cannot run here.

    Raises: ValueError for a router, workload or model directory that there is not.
    """
    wanted = _choose(arguments.only, [router.name for router in ROUTERS], "router")
    workloads = _choose(arguments.workloads, list(WORKLOADS), "workload")
    tokenizer: Path | None = arguments.tokenizer or find_tokenizer()
    for name in ("tokenizer.json", "chat_template.jinja"):
        if tokenizer is not None and not (tokenizer / name).is_file():
            raise ValueError(f"--tokenizer: {tokenizer} has no {name}")
    routers = [router for router in ROUTERS if router.name in wanted]
    reasons = {router: _find_obstacle(router, tokenizer) for router in routers}
    return Plan(
        rounds=arguments.rounds,
        routers=tuple(router for router in routers if reasons[router] is None),
        workloads=tuple(workloads),
        scale=arguments.scale,
        chunk_delay_ms=arguments.chunk_delay_ms,
        tokenizer=tokenizer.resolve() if tokenizer is not None else None,
        skipped=tuple(f"{router.name}: {why}" for router, why in reasons.items() if why),
    )


def _choose(asked: str | None, names: Sequence[str], what: str) -> list[str]:
    chosen = [name.strip() for name in asked.split(",")] if asked else list(names)
    if unknown := [name for name in chosen if name not in names]:
        raise ValueError(f"no {what} {', '.join(unknown)}; there are: {', '.join(names)}")
    return chosen


def _find_obstacle(router: Router, tokenizer: Path | None) -> str | None:
    if not router.program.exists():
        return f"{router.program.relative_to(PROJECT)} is missing (make bench sets it up)"
    if router.needs_tokenizer and tokenizer is None:
        return "no SmolLM2 in the cache (make run-real makes it) and no --tokenizer"
    return None


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measure what routers cost, side by side. Exit codes: 0 all samples are clean,"
        " 1 some are not or are missing, 2 wrong arguments.",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="for all samples")
    parser.add_argument("--only", metavar="NAMES", help="routers, with commas between")
    parser.add_argument("--workloads", metavar="NAMES", help="workloads, with commas between")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on numbers of requests")
    parser.add_argument("--chunk-delay-ms", type=float, default=5.0, help="between SSE chunks")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="default: SmolLM2, if made")
    parser.add_argument("--baseline", default=ROUND_ROBIN, help="the router that is 1 in tables")
    return parser.parse_args(words)


def main() -> int:
    arguments = parse_arguments(sys.argv[1:])
    # An exception, unlike a signal's default action, ends the child processes too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        plan = make_plan(arguments)
    except ValueError as error:
        _say(str(error))
        return 2
    for text in plan.skipped:
        _say(f"skipped: {text}")
    with tempfile.TemporaryDirectory(prefix="moongate-bench-") as folder:
        if plan.tokenizer is not None:
            plan = replace(plan, tokenizer=make_plain_model(plan.tokenizer, Path(folder)))
        run = run_plan(plan, arguments.json)
    print(format_report(run, arguments.baseline))
    is_clean = all(sample.is_clean for sample in run.samples)
    return 0 if is_clean and not run.failures and run.samples else 1


if __name__ == "__main__":
    sys.exit(main())
