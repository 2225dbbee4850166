"""What an instance that was found in DNS is called, and what is known of it beforehand."""

from __future__ import annotations

from typing import Any

import pytest

from moongate.gateway.config.discovery_settings import DiscoverySettings
from moongate.gateway.config.settings_text import SettingsError, parse_settings
from moongate.gateway.instances.dns_discovery import name_instance
from moongate.gateway.instances.dns_names import Address

LONG = "engine-0." + "x" * 60 + ".svc.cluster.local"


def discovery(**found: Any) -> DiscoverySettings:
    given = {"kind": "dns", "name": "e.test", "port": 1, "found": found}
    return DiscoverySettings.model_validate(given)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("10.0.0.7", "10.0.0.7-8000"),
        ("fd00::1", "fd00--1-8000"),
        ("::1", "1-8000"),
        ("engine-0.llm", "engine-0.llm-8000"),
    ],
)
def test_an_instance_is_called_by_its_address(host: str, name: str) -> None:
    assert name_instance(Address(host, 8000)) == name
    assert discovery().instance(name, host, 8000).id == name


def test_a_long_name_is_cut_and_still_its_own() -> None:
    one, other = (name_instance(Address(LONG, port)) for port in (1, 2))
    assert one != other
    assert one[:51] == other[:51]
    assert discovery().instance(one, LONG, 1).id == one


def test_ports_become_addresses_at_the_host() -> None:
    found = discovery(
        role="prefill", kv_events_port=5, kv_replay_port=6, bootstrap_port=7, weight=2.0, ranks=2
    ).instance("n", "fd00::1", 8000)
    assert (found.url, found.role, found.weight) == ("http://[fd00::1]:8000", "prefill", 2.0)
    assert (found.kv_events, found.kv_replay) == ("tcp://[fd00::1]:5", "tcp://[fd00::1]:6")
    assert found.bootstrap_url == "http://[fd00::1]:7"
    assert found.rank_numbers == (0, 1)


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        (
            "{kind: consul}",
            "discovery.kind: Input should be 'static', 'dns' or 'redis'; got 'consul'",
        ),
        ("{kind: dns, port: 1}", "discovery: kind dns needs the name that leads to the instances"),
        (
            "{kind: dns, name: e.test}",
            "discovery: record a needs the port of the engines' HTTP servers",
        ),
        (
            "{kind: dns, name: e.test, record: srv, port: 1}",
            "discovery: port: with record srv it is in the records",
        ),
        ("{name: e.test}", "discovery: name: only with kind: dns"),
        (
            "{kind: dns, name: 'a b', port: 1}",
            (
                "discovery.name: expected a name in DNS, such as engines.llm.svc.cluster.local; "
                "got 'a b'"
            ),
        ),
        (
            "{kind: dns, name: e.test, port: 1, found: {kv_replay_port: 1}}",
            "discovery: found: kv_replay without kv_events",
        ),
    ],
)
def test_what_can_not_be_followed_is_refused(section: str, problem: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_settings(f"discovery: {section}\ninstances: []\n", "m.yaml")
    assert caught.value.problems == (f"m.yaml:1: {problem}",)


def test_who_prefills_may_have_a_partner_that_is_found() -> None:
    prefill = "instances: [{id: a, url: 'http://h:1', role: prefill}]\n"
    with pytest.raises(SettingsError, match="a only prefills"):
        parse_settings(prefill, "m.yaml")
    settings = parse_settings(f"discovery: {{kind: dns, name: e.test, port: 1}}\n{prefill}", "m")
    assert settings.discovery.kind == "dns"
