"""A real engine that announces itself to a gateway which knows nobody, and withdraws at its end."""

from __future__ import annotations

from pathlib import Path

import httpx
from conversation import Conversation
from processes import ENGINE_PYTHON, MOONGATE, Child, free_port, until


def _instances(url: str) -> dict[str, str]:
    answer = httpx.get(f"{url}/admin/instances", trust_env=False, timeout=10.0)
    return {instance["id"]: instance["state"] for instance in answer.json()["instances"]}


def _wait_for(url: str, instances: dict[str, str], limit_s: float) -> None:
    until(lambda: _instances(url) == instances, limit_s, lambda: _instances(url))


def test_an_engine_comes_serves_and_goes_by_itself(tiny_model: Path, tmp_path: Path) -> None:
    port = free_port()
    file = tmp_path / "gateway.yaml"
    file.write_text(f"listen: {{port: {port}}}\ninstances: []\n")
    gateway = Child.start(
        [*MOONGATE, "serve", "-c", str(file)],
        f"http://127.0.0.1:{port}",
        tmp_path / "gateway.log",
    )
    engine_port = free_port()
    engine = Child.start(
        [
            *MOONGATE, "engine", "serve",
            "--python", str(ENGINE_PYTHON), "--model", str(tiny_model),
            "--served-model-name", "tiny", "--device", "cpu", "--dtype", "float32",
            "--threads", "1", "--block-size", "32", "--max-model-len", "8192",
            "--port", str(engine_port), "--kv-events-port", str(free_port()),
            "--kv-replay-port", str(free_port()),
            "--announce", gateway.url, "--announce-id", "e1", "--lease", "6",
        ],
        f"http://127.0.0.1:{engine_port}",
        tmp_path / "engine.log",
    )  # fmt: skip
    try:
        gateway.wait_until("/health", 30.0)
        assert httpx.get(f"{gateway.url}/ready", trust_env=False).status_code == 503
        engine.wait_until("/health", 180.0)
        _wait_for(gateway.url, {"e1": "up"}, 20.0)
        session = Conversation(gateway.url, tiny_model, seed=5)
        first, second = session.grow(2, tokens=300)
        assert (first.instance, second.instance) == ("e1", "e1")
        assert second.predicted_tokens == second.cached_tokens > 0
        engine.stop(30.0)
        _wait_for(gateway.url, {}, 15.0)
    finally:
        engine.stop()
        gateway.stop()
