"""What a reload does with each key: the table is complete, and files are compared by it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from moongate.gateway.config.reloadable import EFFECTS, Effect, describe_instances, find_changes
from moongate.gateway.config.settings import Settings


def keys(prefix: str, model: type[BaseModel]) -> Iterator[str]:
    """Return all keys of the file that have a value of their own."""
    for name, field in model.model_fields.items():
        inner = nested(field.annotation)
        if inner is None:
            yield f"{prefix}{name}"
        else:
            is_list = "list" in str(field.annotation)
            yield from keys(f"{prefix}{name}{'[]' if is_list else ''}.", inner)


def nested(annotation: Any) -> type[BaseModel] | None:
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def settings(**fields: Any) -> Settings:
    instances = [{"id": "a", "url": "http://h:1"}, {"id": "b", "url": "http://h:2"}]
    return Settings.model_validate({"instances": instances, **fields})


def shown(old: Settings, new: Settings) -> list[tuple[str, Effect]]:
    return [(change.shown, change.effect) for change in find_changes(old, new)]


def test_every_key_is_in_the_table() -> None:
    assert set(keys("", Settings)) - EFFECTS.keys() == set(), (
        "add it to gateway/config/reloadable.py"
    )
    assert EFFECTS.keys() - set(keys("", Settings)) == set(), "not a key any more"


def test_equal_settings_have_no_changes() -> None:
    assert find_changes(settings(), settings()) == []


def test_a_changed_key_is_told_with_its_effect() -> None:
    new = settings(listen={"port": 9}, policy={"name": "random"}, health={"up_after": 3})
    assert shown(settings(), new) == [
        ("listen.port", Effect.RESTART),
        ("policy.name", Effect.AT_ONCE),
        ("health.up_after", Effect.AT_ONCE),
    ]


def test_a_section_that_comes_is_compared_key_by_key() -> None:
    pool = {"kind": "mooncake", "master": "h:1"}
    new = settings(pool={**pool, "shards": {"tp": 2}})
    changed = shown(settings(pool=pool), new)
    assert ("pool.shards.tp", Effect.RESTART) in changed
    assert {effect for _, effect in changed} == {Effect.RESTART}


def test_instances_are_compared_by_id_wherever_they_stand() -> None:
    instances = [
        {"id": "b", "url": "http://h:2", "weight": 2.0},
        {"id": "a", "url": "http://h:3"},
    ]
    assert shown(settings(), settings(instances=instances)) == [
        ("instances[b].weight", Effect.AT_ONCE),
        ("instances[a].url", Effect.REPLACES),
    ]


def test_instances_that_come_and_go_are_named() -> None:
    instances = [{"id": "b", "url": "http://h:2"}, {"id": "c", "url": "http://h:3"}]
    new = settings(instances=instances)
    assert find_changes(settings(), new) == []
    assert describe_instances(settings(), new) == ["instances: + c", "instances: - a"]


def test_a_change_of_clients_keys_is_one_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A", "key-of-a")
    monkeypatch.setenv("B", "key-of-b")
    keys = [{"tenant": "a", "key_env": "A"}]
    assert shown(settings(), settings(auth={"keys": keys})) == [("auth.keys", Effect.AT_ONCE)]
    more = [*keys, {"tenant": "b", "key_env": "B", "requests_per_minute": 9}]
    assert shown(settings(auth={"keys": keys}), settings(auth={"keys": more})) == [
        ("auth.keys", Effect.AT_ONCE)
    ]


def test_instances_that_all_gateways_share_are_a_matter_of_the_start() -> None:
    dns = {"kind": "dns", "name": "engines.x", "port": 8101}
    shared = {"state": {"kind": "redis", "url": "redis://h:1"}}
    to_dns = shown(settings(**shared), settings(**shared, discovery=dns))
    assert ("discovery.kind", Effect.AT_ONCE) in to_dns
    to_redis = shown(settings(**shared), settings(**shared, discovery={"kind": "redis"}))
    assert to_redis == [("discovery.kind", Effect.RESTART)]
