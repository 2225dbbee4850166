"""examples/kubernetes: by Kubernetes' own schemas, our parsers, and what has to agree between files."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from compose_file import read_services, tool
from launch_words import check_words
from processes import PROJECT

from moongate.gateway.config.settings_text import parse_settings

FOLDER = PROJECT / "examples" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
MANIFESTS = [file for file in FILES if file.name != "kustomization.yaml"]
OBJECTS: list[dict[str, Any]] = [o for f in MANIFESTS for o in yaml.safe_load_all(f.read_text())]
KUBERNETES = "1.31.0"


def of_kind(*kinds: str) -> list[dict[str, Any]]:
    return [o for o in OBJECTS if o["kind"] in kinds]


def named(o: dict[str, Any]) -> str:
    return f"{o['kind']}/{o['metadata']['name']}"


WORKLOADS = of_kind("Deployment", "StatefulSet")
SERVICES = {o["metadata"]["name"]: o["spec"] for o in of_kind("Service")}


def containers(workload: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from workload["spec"]["template"]["spec"]["containers"]


@pytest.fixture(params=WORKLOADS, ids=named)
def workload(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = request.param
    return found


def test_they_are_what_kubernetes_takes() -> None:
    done = subprocess.run(
        [tool("kubernetes-validate"), "--strict", "-k", KUBERNETES, *map(str, MANIFESTS)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_list_names_every_file() -> None:
    listed = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == [file.name for file in MANIFESTS]


def test_the_gateways_configuration_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONGATE_ADMIN_KEY", "k")
    (config,) = of_kind("ConfigMap")
    settings = parse_settings(config["data"]["gateway.yaml"], "gateway.yaml")
    (engine,) = of_kind("StatefulSet")
    names = [f"engine-{number}" for number in range(engine["spec"]["replicas"])]
    assert [i.id for i in settings.instances] == names
    service = engine["spec"]["serviceName"]
    assert [i.url for i in settings.instances] == [f"http://{n}.{service}:8101" for n in names]
    (gateway,) = [o for o in WORKLOADS if o["metadata"]["name"] == "gateway"]
    pod = gateway["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > settings.drain.limit_s
    assert settings.pool.master == "mooncake-master:50051"
    for name, port in re.findall(r"//?([a-z-]+):(\d+)", config["data"]["gateway.yaml"]):
        assert int(port) in [p["port"] for p in SERVICES[name]["ports"]]


def test_every_command_of_ours_is_one_that_our_parsers_take(
    workload: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for container in containers(workload):
        if container["command"][0] == "moongate":
            words = [word.replace("$(POD_IP)", "10.0.0.7") for word in container["command"]]
            check_words(words, monkeypatch)
        else:
            assert container["command"] == read_services()["redis"].command


def test_every_container_is_held_and_asked_how_it_is(workload: dict[str, Any]) -> None:
    pod = workload["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    for container in containers(workload):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"].keys() == {"requests", "limits"}
        assert container.keys() >= {"livenessProbe", "readinessProbe"}
        assert re.search(r":\d+\.\d+", container["image"])


def test_every_service_finds_its_pods_and_every_probe_its_port(workload: dict[str, Any]) -> None:
    labels = workload["spec"]["template"]["metadata"]["labels"]
    assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
    ports = {p["name"]: p["containerPort"] for c in containers(workload) for p in c["ports"]}
    mine = [spec for spec in SERVICES.values() if spec["selector"].items() <= labels.items()]
    assert mine
    for spec in mine:
        for port in spec["ports"]:
            assert ports[port["name"]] == port["port"]
    for container in containers(workload):
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked = container.get(probe, {}).get("httpGet")
            assert asked is None or asked["port"] in ports


def test_what_a_pod_mounts_is_there(workload: dict[str, Any]) -> None:
    volumes = {v["name"]: v for v in workload["spec"]["template"]["spec"]["volumes"]}
    for container in containers(workload):
        assert {m["name"] for m in container["volumeMounts"]} == set(volumes)
    maps = {o["metadata"]["name"] for o in of_kind("ConfigMap")}
    asked = {v["configMap"]["name"] for v in volumes.values() if "configMap" in v}
    assert asked <= maps


def test_gateways_are_two_and_never_all_gone() -> None:
    (budget,) = of_kind("PodDisruptionBudget")
    (gateway,) = [o for o in WORKLOADS if o["metadata"]["name"] == "gateway"]
    assert gateway["spec"]["replicas"] == 2
    assert budget["spec"]["minAvailable"] == 1
    assert budget["spec"]["selector"] == gateway["spec"]["selector"]
