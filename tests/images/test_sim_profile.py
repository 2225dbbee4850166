"""The profiles `sim` and `load`, from their images: two gateways before three simulated engines, Redis, and
locust with two workers.

The tests share its containers, in their order: the last one stops a gateway.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from compose_file import read_services
from containers import Container, ContainerHost, missing_here
from processes import until
from stand_in_images import make_stand_in

SERVICES = [s for s in read_services().values() if s.profiles in (["sim"], ["load"])]
MODEL = "sim"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContainerHost]:
    redis = next(s.facts["image"] for s in SERVICES if s.name == "redis")
    reason = missing_here([s.facts["image"] for s in SERVICES if s.is_ours])
    if reason:
        pytest.skip(reason)
    if missing_here([redis]):
        make_stand_in(redis, ["-v", "/etc/apt:/etc/apt:ro"])
    with ContainerHost(tmp_path_factory.mktemp("sim")) as host:
        host.plan(SERVICES, {})
        for name in ("redis", "sim-a", "sim-b", "sim-c", "gateway"):
            host.start(name)
        yield host


@pytest.fixture
def gateways(host: ContainerHost) -> list[Container]:
    return host.containers["gateway"]


def ask(gateway: Container, path: str, **body: Any) -> httpx.Response:
    url = f"http://{gateway.address}:8000{path}"
    return httpx.post(url, json={"model": MODEL, **body}, timeout=30, trust_env=False)


def has_all_engines(gateway: Container) -> bool:
    page = httpx.get(f"http://{gateway.address}:8000/metrics", timeout=5, trust_env=False).text
    up = [line for line in page.splitlines() if line.startswith("moongate_instance_up{")]
    return len(up) == 3 and all(line.endswith(" 1.0") for line in up)


def test_they_run_as_the_user_of_their_image(host: ContainerHost) -> None:
    for name in ("sim-a", "gateway"):
        assert host.containers[name][0].user_of_process() == 10001


def test_a_turn_goes_through_one_gateway_and_the_next_one_home_through_the_other(
    gateways: list[Container],
) -> None:
    for gateway in gateways:
        until(lambda: has_all_engines(gateway), 40.0, gateway.tail)  # noqa: B023
    messages = [{"role": "user", "content": "tell me of the moon and its gates. " * 60}]
    first = ask(gateways[0], "/v1/chat/completions", messages=messages, max_tokens=8)
    assert first.status_code == 200, first.text
    answer = first.json()["choices"][0]["message"]
    time.sleep(1.0)  # events of the engine reach the other gateway
    messages += [answer, {"role": "user", "content": "and then?"}]
    second = ask(gateways[1], "/v1/chat/completions", messages=messages, max_tokens=8)
    assert second.status_code == 200, second.text
    assert second.headers["x-moongate-reason"] == "device_prefix"
    assert second.headers["x-moongate-instance"] == first.headers["x-moongate-instance"]
    details = second.json()["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == int(second.headers["x-moongate-device-tokens"]) > 0


def test_what_one_gateway_stored_the_other_one_continues(gateways: list[Container]) -> None:
    first = ask(gateways[0], "/v1/responses", input="hello", max_output_tokens=8)
    assert first.status_code == 200, first.text
    name = first.json()["id"]
    second = ask(
        gateways[1], "/v1/responses", input="go on", previous_response_id=name, max_output_tokens=8
    )
    assert second.status_code == 200, second.text
    assert second.json()["previous_response_id"] == name


def test_locusts_workers_send_turns_to_the_gateways(host: ContainerHost) -> None:
    (master,) = host.start("load-master")
    host.start("load-worker")
    url = f"http://{master.address}:8089"

    def stats() -> dict[str, Any]:
        answer = httpx.get(f"{url}/stats/requests", timeout=5, trust_env=False)
        found: dict[str, Any] = answer.json()
        return found

    until(lambda: len(stats()["workers"]) == 2, 40.0, master.tail)
    begun = httpx.post(f"{url}/swarm", data={"user_count": 4, "spawn_rate": 4}, trust_env=False)
    assert begun.json()["success"] is True, begun.text
    until(lambda: total(stats())["num_requests"] >= 8, 40.0, master.tail)
    httpx.get(f"{url}/stop", trust_env=False)
    assert total(stats())["num_failures"] == 0, stats()["errors"]


def total(stats: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = next(row for row in stats["stats"] if row["name"] == "Aggregated")
    return row


def test_a_stop_lets_a_running_answer_end(gateways: list[Container]) -> None:
    gateway = gateways[1]
    body = {"model": MODEL, "prompt": "x", "max_tokens": 120, "stream": True}
    url = f"http://{gateway.address}:8000/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=30, trust_env=False) as answer:
        lines = answer.iter_lines()
        next(lines)
        gateway.terminate()
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert gateway.wait_ended(20) == 0, gateway.tail()


def test_logs_are_free_of_trouble(host: ContainerHost) -> None:
    for container in host.all:
        log = container.log.read_text(errors="replace")
        assert "Traceback" not in log, f"{container.name}:\n{log[-3000:]}"
