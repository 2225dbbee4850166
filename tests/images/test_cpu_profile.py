"""The profile `cpu`, from its images: vLLM engines, members of a Mooncake pool, and a gateway.

With the tiny random model, which needs no network; `smollm2`, the profile's default, is fetched.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from compose_file import read_services
from containers import Container, ContainerHost, missing_here

ENVIRONMENT = {"MOONGATE_CPU_MODEL": "tiny", "MOONGATE_CPU_MODEL_LEN": "8192"}
SERVICES = [s for s in read_services(ENVIRONMENT).values() if s.profiles == ["cpu"]]
ENGINE_START_S = 240.0
PROMPT = "what the moon sees through its gates, and what it keeps to itself, night by night; " * 40


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContainerHost]:
    reason = missing_here([s.facts["image"] for s in SERVICES])
    if reason:
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("cpu")
    models = directory / "volume-models"
    models.mkdir()
    models.chmod(0o777)  # a new volume takes the image's folder's owner
    with ContainerHost(directory) as host:
        host.plan(SERVICES, {"models": models})
        (maker,) = host.start("cpu-model", healthy_s=None)
        assert maker.wait_ended(120) == 0, maker.tail()
        host.start("cpu-master")
        host.start("cpu-a", healthy_s=None)
        host.start("cpu-b", healthy_s=None)
        for name in ("cpu-a", "cpu-b"):
            host.containers[name][0].wait_healthy(ENGINE_START_S)
        host.start("cpu-gateway")
        yield host


def ask(container: Container, port: int, **body: Any) -> httpx.Response:
    fields = {"model": "tiny", "max_tokens": 8, "temperature": 0, **body}
    url = f"http://{container.address}:{port}/v1/completions"
    return httpx.post(url, json=fields, timeout=60, trust_env=False)


def pool_hits(engine: Container) -> float:
    page = httpx.get(f"http://{engine.address}:8101/metrics", timeout=10, trust_env=False).text
    pattern = r"^vllm:external_prefix_cache_hits_total\{[^}]*\} (\S+)"
    return sum(float(value) for value in re.findall(pattern, page, re.MULTILINE))


def test_a_turn_goes_through_and_comes_home(host: ContainerHost) -> None:
    (gateway,) = host.containers["cpu-gateway"]
    first = ask(gateway, 8000, prompt=PROMPT)
    assert first.status_code == 200, first.text
    time.sleep(1.0)
    second = ask(gateway, 8000, prompt=PROMPT + " And then?")
    assert second.headers["x-moongate-instance"] == first.headers["x-moongate-instance"]
    assert second.headers["x-moongate-reason"] == "device_prefix"
    cached = second.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 0.9 * first.json()["usage"]["prompt_tokens"]


def test_what_one_engine_computed_the_other_fetches_from_the_pool(host: ContainerHost) -> None:
    (gateway,) = host.containers["cpu-gateway"]
    home = ask(gateway, 8000, prompt=PROMPT).headers["x-moongate-instance"]
    (other,) = host.containers["cpu-b" if home == "cpu-a" else "cpu-a"]
    deadline = time.monotonic() + 60
    number = 0
    # An engine's first call to another's segment may fail: it then computes.
    while not pool_hits(other):
        assert time.monotonic() < deadline, other.tail()
        prompt = f"{number} {PROMPT}"
        ask(host.containers[home][0], 8101, prompt=prompt)
        time.sleep(1.0)
        assert ask(other, 8101, prompt=prompt).status_code == 200
        number += 1


def test_they_run_as_the_user_of_their_image(host: ContainerHost) -> None:
    for container in host.all:
        if container.process is not None and container.process.poll() is None:
            assert container.user_of_process() == 10001


def test_an_engine_ends_when_it_is_told_to(host: ContainerHost) -> None:
    (engine,) = host.containers["cpu-a"]
    engine.terminate()
    engine.wait_ended(45)
    assert "Traceback" not in host.containers["cpu-gateway"][0].log.read_text()
