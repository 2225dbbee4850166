"""The commands as processes: what they print, how they end, and that nothing is left running."""

from __future__ import annotations

import functools
import json
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from processes import MOONGATE, Child, free_port, start_gateway, until

pytestmark = pytest.mark.timeout(60)


Launch = Callable[..., Child]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Return a function that starts a command on a port; it is stopped with the test."""
    started: list[Child] = []

    def start(*words: str, port: int) -> Child:
        log = tmp_path / f"{words[0]}{port}.log"
        command = [*MOONGATE, *words, "--port", str(port)]
        child = Child.start(command, f"http://127.0.0.1:{port}", log)
        started.append(child)
        return child

    yield start
    for child in started:
        child.stop()


def printed_curl(log: Path) -> httpx.Response:
    """Do what the printed curl line does, once it is printed."""
    until(lambda: "Ctrl-C stops" in log.read_text(), told=log.read_text)
    words = shlex.split(log.read_text().partition("  curl ")[2].partition("Ctrl-C")[0])
    url = next(word for word in words if word.startswith("http"))
    headers = {"content-type": "application/json"}
    body = words[words.index("-d") + 1]
    return httpx.post(url, content=body, headers=headers, timeout=30, trust_env=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_serves_until_a_signal_and_leaves_nothing(launch: Launch, number: int) -> None:
    child = launch("up", port=free_port())
    url, log = child.url, child.log
    child.wait_until("/ready", 20.0)
    first, second = printed_curl(log), printed_curl(log)
    assert (first.status_code, second.status_code) == (200, 200)
    assert second.headers["x-moongate-reason"] == "device_prefix"
    assert second.headers["x-moongate-instance"] == first.headers["x-moongate-instance"]
    child.process.send_signal(number)
    assert child.process.wait(15) == 0, child.tail()
    with pytest.raises(ProcessLookupError):
        os.killpg(child.process.pid, 0)
    printed = log.read_text()
    assert f"{url}/v1" in printed
    assert f"{url}/ui" in printed
    assert "curl -i" in printed
    assert "\x1b" not in printed, "what is no terminal gets plain lines"
    assert "Traceback" not in printed


def test_a_port_in_use_is_said_and_is_exit_code_1(launch: Launch) -> None:
    port = free_port()
    child = launch("up", port=port)
    child.wait_until("/health", 20.0)
    second = subprocess.run(
        [*MOONGATE, "up", "--port", str(port)], capture_output=True, text=True, timeout=20
    )
    assert second.returncode == 1
    assert f"can't listen on 127.0.0.1:{port}" in second.stderr
    assert "Traceback" not in second.stderr


@pytest.mark.parametrize("is_stream", [True, False])
def test_c90_past_the_limit_a_running_answer_ends_so_that_it_is_seen(
    tmp_path: Path, launch: Launch, is_stream: bool
) -> None:
    sim = launch("sim-engine", "--decode-tokens-per-s", "5", port=free_port())
    sim.wait_until("/health", 20.0)
    gateway = start_gateway(
        tmp_path, {"instances": [{"id": "a", "url": sim.url}], "drain": {"limit_s": 1.0}}
    )
    body = {"model": "sim", "prompt": "x", "max_tokens": 100, "stream": is_stream}
    with httpx.Client(base_url=gateway.url, timeout=30, trust_env=False) as client:
        stopping = threading.Timer(0.5, gateway.process.terminate)
        stopping.start()
        began = time.monotonic()
        with client.stream("POST", "/v1/completions", json=body) as answer:
            told = answer.read().decode()
        assert 1.0 < time.monotonic() - began < 5.0
    if is_stream:
        *events, error, end = [line for line in told.splitlines() if line]
        assert answer.status_code == 200
        assert len(events) >= 2
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "gateway_stopping"
        assert end == "data: [DONE]"
    else:
        assert answer.status_code == 503
        assert json.loads(told)["error"]["code"] == "gateway_stopping"
        assert answer.headers["retry-after"] == "1"
    assert gateway.process.wait(10) == 0


def test_c90_sigterm_lets_a_running_answer_end(tmp_path: Path, launch: Launch) -> None:
    sim = launch("sim-engine", "--decode-tokens-per-s", "20", port=free_port())
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


def has_logged(gateway: Child, text: str) -> bool:
    return text in gateway.log.read_text()


def test_sighup_reads_the_file_again_and_what_holds_is_logged(
    tmp_path: Path, launch: Launch
) -> None:
    sim = launch("sim-engine", port=free_port())
    sim.wait_until("/health", 20.0)
    gateway = start_gateway(tmp_path, {"instances": [{"id": "a", "url": sim.url}]})
    file = tmp_path / "gateway.yaml"
    reload = f"{gateway.url}/admin/reload"
    for content, told in (
        ("policy: {name: random}", "is in force: policy.name"),
        ("policy: {nam: random}", "policy.nam: unknown key (did you mean name?)"),
    ):
        port = httpx.URL(gateway.url).port
        file.write_text(
            f"{content}\nlisten: {{port: {port}}}\ninstances: [{{id: a, url: '{sim.url}'}}]\n"
        )
        gateway.process.send_signal(signal.SIGHUP)
        until(functools.partial(has_logged, gateway, told), told=gateway.tail)
    assert "SIGHUP" in gateway.log.read_text()
    assert len(httpx.get(reload, trust_env=False).json()["problems"]) == 1
    with httpx.Client(trust_env=False) as client:
        assert client.post(reload).status_code == 400
    assert gateway.stop() == 0


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


@pytest.mark.parametrize("command", ["up", "sim-engine"])
def test_a_wrong_script_is_told_with_its_line(command: str, tmp_path: Path) -> None:
    file = tmp_path / "script.yaml"
    file.write_text("- answers:\n  - txt: hello\n")
    words = [*MOONGATE, command, "--port", "0", "--script", str(file)]
    refused = subprocess.run(words, capture_output=True, text=True, timeout=20)
    assert refused.returncode == 1
    assert refused.stderr == f"moongate: {file}:2: rule 1: answers[0].txt: unknown key\n"


def test_up_answers_by_a_script(launch: Launch, tmp_path: Path) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text('{"when": {"user": "weather"}, "answers": [{"text": "It rains."}]}\n')
    child = launch("up", "--engines", "1", "--script", str(script), port=free_port())
    child.wait_until("/ready", 20.0)
    body = {"model": "sim", "messages": [{"role": "user", "content": "How is the weather?"}]}
    answer = httpx.post(f"{child.url}/v1/chat/completions", json=body, trust_env=False)
    assert answer.json()["choices"][0]["message"]["content"] == "It rains."


def test_explain_shows_every_candidate(tmp_path: Path, launch: Launch) -> None:
    child = launch("up", port=free_port())
    child.wait_until("/ready", 20.0)
    file = tmp_path / "request.json"
    file.write_text('{"model": "sim", "messages": [{"role": "user", "content": "hi"}]}')
    shown = subprocess.run(
        [*MOONGATE, "explain", "-f", str(file), "--url", child.url],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert shown.returncode == 0, shown.stderr
    for name in ("engine-a", "engine-b", "engine-c"):
        assert f'"instance": "{name}"' in shown.stdout
    assert '"prefill":' in shown.stdout


def test_two_engine_processes_hand_a_prompt_over(launch: Launch) -> None:
    bootstrap = free_port()
    flags = ("--kv-bytes-per-token", "1", "--block-size", "4")
    one = launch(
        *("sim-engine", "--role", "prefill", "--bootstrap-port", str(bootstrap)),
        *flags,
        port=free_port(),
    )
    other = launch("sim-engine", "--role", "decode", *flags, port=free_port())
    one.wait_until("/health", 20.0)
    other.wait_until("/health", 20.0)
    ranks = httpx.get(f"http://127.0.0.1:{bootstrap}/query", trust_env=False).json()
    legs = (
        (one, {"do_remote_decode": True, "transfer_id": "t"}),
        (
            other,
            {
                "do_remote_prefill": True,
                "remote_bootstrap_addr": f"http://127.0.0.1:{bootstrap}",
                "remote_engine_id": ranks["0"]["engine_id"],
                "transfer_id": "t",
            },
        ),
    )
    body = {"prompt": list(range(10, 31)), "max_tokens": 1}
    answers = [
        httpx.post(
            f"{engine.url}/v1/completions",
            json={**body, "kv_transfer_params": params},
            timeout=10,
            trust_env=False,
        ).json()
        for engine, params in legs
    ]
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in answers]
    assert cached == [0, 21]
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]


def test_up_with_pd_has_one_engine_that_prefills(launch: Launch) -> None:
    child = launch("up", "--pd", port=free_port())
    child.wait_until("/ready", 20.0)
    assert printed_curl(child.log).status_code == 200
    refused = subprocess.run(
        [*MOONGATE, "up", "--pd", "--engines", "1"], capture_output=True, text=True, timeout=20
    )
    assert refused.returncode == 2
    assert "--pd needs at least 2 engines" in refused.stderr
