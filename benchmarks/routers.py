"""The routers that are compared, as command lines. Starting them is `side_by_side.py`'s.

Each runs with its defaults but for what a fair comparison needs: the same two engines, no log line
per request, and where it reads KV events, the addresses of these.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.workloads import BLOCK_SIZE_TOKENS, MODEL

PROJECT = Path(__file__).resolve().parent.parent
MOONGATE = PROJECT / ".venv" / "bin" / "moongate"
PEERS_PYTHON = PROJECT / ".venv-bench" / "bin" / "python"
VLLM_ROUTER = PROJECT / ".venv-bench" / "bin" / "vllm-router"


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where a mock engine listens, all on 127.0.0.1."""

    port: int
    kv_events_port: int
    kv_replay_port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def kv_events(self) -> str:
        return f"tcp://127.0.0.1:{self.kv_events_port}"

    @property
    def kv_replay(self) -> str:
        return f"tcp://127.0.0.1:{self.kv_replay_port}"


@dataclass(frozen=True, slots=True)
class Place:
    """What a router is started with."""

    port: int
    metrics_port: int
    engines: tuple[EngineAddress, ...]
    tokenizer: Path | None
    folder: Path
    """For files of its own."""


@dataclass(frozen=True, slots=True)
class Router:
    """One column of the comparison."""

    name: str
    make_command: Callable[[Place], list[str]]
    program: Path
    """Must be there for it to run."""
    needs_tokenizer: bool = False
    """Its engines read prompts, render them on request and publish KV events."""


def _vllm_router(policy: str, *, has_kv_events: bool = False) -> Callable[[Place], list[str]]:
    def make_command(place: Place) -> list[str]:
        command = [str(VLLM_ROUTER), "--policy", policy, "--host", "127.0.0.1"]
        command += ["--port", str(place.port), "--prometheus-port", str(place.metrics_port)]
        command += ["--prometheus-host", "127.0.0.1", "--log-level", "warning"]
        command += ["--worker-startup-check-interval", "1"]
        command += ["--worker-urls", *(engine.url for engine in place.engines)]
        if has_kv_events:
            # Without the model's name and the block size it looks at no event.
            command += ["--kv-event-model", MODEL, "--kv-event-block-size", str(BLOCK_SIZE_TOKENS)]
            for engine in place.engines:
                command += ["--kv-event-source", f"{engine.url}={engine.kv_events}"]
                command += ["--kv-event-replay-source", f"{engine.url}={engine.kv_replay}"]
        return command

    return make_command


def _sglang_router(policy: str) -> Callable[[Place], list[str]]:
    def make_command(place: Place) -> list[str]:
        command = [str(PEERS_PYTHON), "-m", "sglang_router.launch_router", "--policy", policy]
        command += ["--host", "127.0.0.1", "--port", str(place.port)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(place.metrics_port)]
        command += ["--log-level", "warn", "--worker-startup-check-interval", "1"]
        return [*command, "--worker-urls", *(engine.url for engine in place.engines)]

    return make_command


def _moongate(
    policy: str, tokenizer: Mapping[str, str], *, has_traces: bool = False
) -> Callable[[Place], list[str]]:
    def make_command(place: Place) -> list[str]:
        file = place.folder / "moongate.yaml"
        # JSON is YAML, with every string quoted: a bare `off` would be false.
        settings = make_moongate_settings(policy, tokenizer, place)
        if has_traces:
            settings["observability"] = {"otlp_endpoint": place.engines[0].url}
        file.write_text(json.dumps(settings, indent=1), encoding="utf-8")
        return [str(MOONGATE), "serve", "-c", str(file)]

    return make_command


def make_moongate_settings(
    policy: str, tokenizer: Mapping[str, str], place: Place
) -> dict[str, Any]:
    """Return the configuration of a gateway; a local tokenizer also brings KV events and replay."""
    is_local = tokenizer["mode"] == "local"
    instances = [
        {"id": f"engine-{number}", "url": engine.url}
        | ({"kv_events": engine.kv_events, "kv_replay": engine.kv_replay} if is_local else {})
        for number, engine in enumerate(place.engines)
    ]
    return {
        "listen": {"host": "127.0.0.1", "port": place.port},
        "policy": {"name": policy},
        "tokenizer": {**tokenizer, **({"path": str(place.tokenizer)} if is_local else {})},
        "instances": instances,
    }


ROUND_ROBIN = "vllm-router:round_robin"
CACHE_AWARE_NO_RENDER = "vllm-router:cache_aware (no render)"
CACHE_AWARE = "vllm-router:cache_aware (render)"
KV_AWARE = "vllm-router:kv_aware"
SGLANG = "sglang-router:cache_aware"
OURS_ROUND_ROBIN = "moongate:round_robin"
OURS_KV_COST = "moongate:kv_cost"
OURS_KV_COST_IDS = "moongate:kv_cost+ids"
OURS_ROUND_ROBIN_TRACES = "moongate:round_robin+traces"
OURS_KV_COST_TRACES = "moongate:kv_cost+traces"

ROUTERS = (
    Router(ROUND_ROBIN, _vllm_router("round_robin"), VLLM_ROUTER),
    Router(OURS_ROUND_ROBIN, _moongate("round_robin", {"mode": "off"}), MOONGATE),
    Router(
        OURS_KV_COST,
        _moongate("kv_cost", {"mode": "local", "forward_ids": "off"}),
        MOONGATE,
        needs_tokenizer=True,
    ),
    Router(
        OURS_KV_COST_IDS,
        _moongate("kv_cost", {"mode": "local", "forward_ids": "on"}),
        MOONGATE,
        needs_tokenizer=True,
    ),
    # The same two with every request traced.
    Router(
        OURS_ROUND_ROBIN_TRACES,
        _moongate("round_robin", {"mode": "off"}, has_traces=True),
        MOONGATE,
    ),
    Router(
        OURS_KV_COST_TRACES,
        _moongate("kv_cost", {"mode": "local", "forward_ids": "off"}, has_traces=True),
        MOONGATE,
        needs_tokenizer=True,
    ),
    # It asks engines to render each prompt, and where they refuse compares text.
    Router(CACHE_AWARE_NO_RENDER, _vllm_router("cache_aware"), VLLM_ROUTER),
    Router(CACHE_AWARE, _vllm_router("cache_aware"), VLLM_ROUTER, needs_tokenizer=True),
    Router(
        KV_AWARE, _vllm_router("kv_aware", has_kv_events=True), VLLM_ROUTER, needs_tokenizer=True
    ),
    Router(SGLANG, _sglang_router("cache_aware"), PEERS_PYTHON),
)
"""In the order in which a round starts them."""
