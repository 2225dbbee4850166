"""The commands as processes: what they print, how they end, and that nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from processes import Child, free_port, start_gateway

pytestmark = pytest.mark.timeout(60)

MOONGATE = [sys.executable, "-m", "moongate.cli"]


def chat(url: str, content: str = "hello " * 60) -> httpx.Response:
    body = {
        "model": "sim",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 4,
    }
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30, trust_env=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_serves_until_a_signal_and_leaves_nothing(tmp_path: Path, number: int) -> None:
    port = free_port()
    log = tmp_path / "up.log"
    url = f"http://127.0.0.1:{port}"
    child = Child.start([*MOONGATE, "up", "--port", str(port)], url, log)
    child.wait_until("/ready", 20.0)
    first, second = chat(url), chat(url)
    assert (first.status_code, second.status_code) == (200, 200)
    assert second.headers["x-moongate-reason"] == "device_prefix"
    assert second.headers["x-moongate-instance"] == first.headers["x-moongate-instance"]
    child.process.send_signal(number)
    assert child.process.wait(15) == 0, child.tail()
    with pytest.raises(ProcessLookupError):
        os.killpg(child.process.pid, 0)
    printed = log.read_text()
    assert f"{url}/v1" in printed
    assert "curl -i" in printed
    assert "Traceback" not in printed


def test_a_port_in_use_is_said_and_is_exit_code_1(tmp_path: Path) -> None:
    port = free_port()
    child = Child.start(
        [*MOONGATE, "up", "--port", str(port)], f"http://127.0.0.1:{port}", tmp_path / "up.log"
    )
    child.wait_until("/health", 20.0)
    second = subprocess.run(
        [*MOONGATE, "up", "--port", str(port)], capture_output=True, text=True, timeout=20
    )
    child.stop()
    assert second.returncode == 1
    assert f"can't listen on 127.0.0.1:{port}" in second.stderr
    assert "Traceback" not in second.stderr


def test_sigterm_lets_a_running_answer_end(tmp_path: Path) -> None:
    sim_port = free_port()
    sim = Child.start(
        [*MOONGATE, "sim-engine", "--port", str(sim_port), "--decode-tokens-per-s", "20"],
        f"http://127.0.0.1:{sim_port}",
        tmp_path / "sim.log",
    )
    sim.wait_until("/health", 20.0)
    gateway = start_gateway(
        tmp_path, {"instances": [{"id": "a", "url": sim.url}], "drain": {"limit_s": 20.0}}
    )
    body = {"model": "sim", "prompt": "x", "max_tokens": 40, "stream": True}
    with httpx.stream(
        "POST", f"{gateway.url}/v1/completions", json=body, timeout=30, trust_env=False
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        gateway.process.terminate()
        time.sleep(0.3)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{gateway.url}/health", timeout=2, trust_env=False)
        rest = list(lines)
    assert rest[-2] == "data: [DONE]"
    assert gateway.process.wait(20) == 0
    sim.stop()


def test_a_wrong_file_is_refused_quickly_by_serve(tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text("polcy: {name: kv_cost}\ninstances: [{id: a, url: 'http://127.0.0.1:1'}]\n")
    began = time.monotonic()
    refused = subprocess.run(
        [*MOONGATE, "serve", "-c", str(file)], capture_output=True, text=True, timeout=20
    )
    assert time.monotonic() - began < 3.0
    assert refused.returncode == 1
    assert f"{file}:1: polcy: unknown key (did you mean policy?)" in refused.stderr


def test_explain_shows_every_candidate(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    child = Child.start([*MOONGATE, "up", "--port", str(port)], url, tmp_path / "up.log")
    child.wait_until("/ready", 20.0)
    file = tmp_path / "request.json"
    file.write_text('{"model": "sim", "messages": [{"role": "user", "content": "hi"}]}')
    shown = subprocess.run(
        [*MOONGATE, "explain", "-f", str(file), "--url", url],
        capture_output=True,
        text=True,
        timeout=20,
    )
    child.stop()
    assert shown.returncode == 0, shown.stderr
    for name in ("engine-a", "engine-b", "engine-c"):
        assert f'"instance": "{name}"' in shown.stdout
    assert '"prefill":' in shown.stdout
