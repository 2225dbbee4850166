"""Real engines for the tests: started once, shared by those that leave them as they were."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import (
    ENGINE_PYTHON,
    MOONGATE,
    PROJECT,
    Child,
    EngineProcess,
    Serve,
    free_port,
    running,
    start_gateway,
)

SHARED_ENGINE: dict[str, Any] = {
    # Room for all that the shared tests put in, so that nothing is evicted between them.
    "gpu_blocks_override": 16_384,
    "max_model_len_tokens": 32_768,
    "enable_auto_tool_choice": True,
    "tool_call_parser": "xlam",  # one that makes a random model call: its calls are plain JSON
    "extra_args": (
        *("--enable-scale-out",),  # serves the render routes
        *("--structured-outputs-config", '{"backend":"xgrammar","disable_any_whitespace":true}'),
    ),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything here as e2e, with time for engines to start and to compute."""
    for item in items:
        if "e2e" in Path(item.fspath).parts:
            item.add_marker(pytest.mark.e2e)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(300))


def make_model(name: str) -> Path:
    """Return the directory of a model, made when it isn't there."""
    if not ENGINE_PYTHON.exists():
        pytest.fail(f"{ENGINE_PYTHON} is missing; run `make setup-engine`")
    script = PROJECT / "scripts" / "make_models.py"
    made = subprocess.run(
        [ENGINE_PYTHON, script, name], capture_output=True, text=True, timeout=280, check=True
    )
    return Path(made.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Return the tiny random model."""
    return make_model("tiny")


@pytest.fixture(scope="session")
def tiny_hybrid_model() -> Path:
    """Return the tiny random model most of whose layers attend to a window."""
    return make_model("tiny-hybrid")


@pytest.fixture(scope="session")
def engines(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """Return two engines with room for all that the shared tests put into them."""
    directory = tmp_path_factory.mktemp("engines")
    pair = (
        EngineProcess.make(tiny_model, directory, "a", **SHARED_ENGINE),
        EngineProcess.make(tiny_model, directory, "b", **SHARED_ENGINE),
    )
    with running(*pair):
        yield pair


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Return a function that starts a gateway before engines; it is stopped with the test."""
    started: list[Child] = []

    def start(engines: tuple[EngineProcess, ...], **settings: Any) -> Child:
        instances = [{"id": "ab"[n], "url": engine.url} for n, engine in enumerate(engines)]
        name = f"gateway{len(started)}"
        gateway = start_gateway(tmp_path, {"instances": instances, **settings}, name)
        started.append(gateway)
        return gateway

    yield start
    for gateway in started:
        gateway.stop()


@pytest.fixture(scope="module")
def start_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Child]]:
    """Return a function that starts `moongate up` with three simulated engines and more flags.

    It returns the gateway; all stop after the module.
    """
    started: list[Child] = []

    def start(*flags: str) -> Child:
        port, log = free_port(), tmp_path_factory.mktemp("up") / "up.log"
        argv = (*MOONGATE, "up", "--engines", "3", "--port", str(port))
        stack = Child.start((*argv, *flags), f"http://127.0.0.1:{port}", log)
        started.append(stack)
        stack.wait_until("/ready", 30.0)
        return stack

    yield start
    for stack in started:
        stack.stop()
