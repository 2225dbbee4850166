"""What a reload does with each key of the configuration: data, and the comparison of two files by it.

Every key is in the table; a test holds that, and another one that those which take effect do. The
reference of the configuration shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel

from moongate.gateway.auth.auth_settings import KeySettings
from moongate.gateway.config.discovery_settings import FoundSettings
from moongate.gateway.config.instance_settings import BreakerSettings, InstanceSettings
from moongate.gateway.config.process_settings import ListenSettings
from moongate.gateway.config.routing_settings import AdmissionSettings
from moongate.gateway.config.settings import Settings


class Effect(Enum):
    """When a changed value holds."""

    AT_ONCE = "at once"
    REPLACES = "as another instance"  # checked before it gets work; the old one ends what it has
    RESTART = "restart"  # a reload that changes it changes nothing


INSTANCE_REPLACED = ("id", "url", "ranks", "block_size", "tls")
"""Keys that say which cache it is. With the others an instance stays what it is, and keeps its work."""


def _keys(prefix: str, model: type[BaseModel], names: Sequence[str]) -> Iterator[str]:
    """Return these keys of a section, as far as it has them; of a section in it, all of its own."""
    for name in names:
        field = model.model_fields.get(name)
        if field is None:
            continue
        inner = [kind for kind in get_args(field.annotation) if kind is not type(None)]
        if inner and isinstance(inner[0], type) and issubclass(inner[0], BaseModel):
            yield from (f"{prefix}{name}.{key}" for key in inner[0].model_fields)
        else:
            yield f"{prefix}{name}"


EFFECTS: Mapping[str, Effect] = {
    **dict.fromkeys(
        (
            "limits.body_bytes_max", "limits.headers_bytes_max", "limits.queue_requests_max",
            "limits.upstream_timeout_s", "limits.connect_timeout_s",
            "limits.prompt_memory_bytes_max", "limits.connections_per_instance_max",
            "limits.allow_kv_transfer_params", "limits.retry_timeouts",
            "limits.json_depth_max", "limits.messages_max", "limits.stop_max",
            "policy.name", "policy.options", "policy.allow_override",
            "tokenizer.budget_ms", "tokenizer.forward_ids",
            "pool.lookup_budget_ms",
            "pool.seeding.at_once_max", "pool.seeding.per_minute_max",
            "pool.seeding.demand_per_s_min", "pool.seeding.busy_requests",
            "pool.seeding.prefix_tokens_min", "pool.seeding.pool_use_max",
            "pool.seeding.kv_use_max",
            "auth.forward_client_key", "auth.admin_key_env", "auth.salt_env",
            *(f"auth.keys[].{key}" for key in KeySettings.model_fields),
            *(f"breaker.{key}" for key in BreakerSettings.model_fields),
            *(f"admission.{key}" for key in AdmissionSettings.model_fields),
            "session.header",
            "models.aliases",
            "health.interval_s", "health.timeout_s", "health.down_after", "health.up_after",
            "drain.limit_s",
            "discovery.kind", "discovery.name", "discovery.record", "discovery.port",
            "discovery.interval_s", "discovery.absent_after",
            *(
                f"discovery.found.{key}"
                for key in FoundSettings.model_fields
                if key not in INSTANCE_REPLACED
            ),
            "observability.receipt_headers", "observability.stream_usage",
            "observability.keep_text", "observability.decisions_max",
            "observability.log_format", "observability.sample_ratio",
            *(
                f"instances[].{key}"
                for key in InstanceSettings.model_fields
                if key not in INSTANCE_REPLACED
            ),
        ),
        Effect.AT_ONCE,
    ),
    **dict.fromkeys(
        (
            *_keys("instances[].", InstanceSettings, INSTANCE_REPLACED),
            "discovery.scheme",
            *_keys("discovery.found.", FoundSettings, INSTANCE_REPLACED),
        ),
        Effect.REPLACES,
    ),
    **dict.fromkeys(
        (
            "listen.host", "listen.port", *_keys("listen.", ListenSettings, ("tls",)),  # the socket is open, and clients know it
            "limits.index_blocks_max",  # what should go could not be told
            # Prompts are remembered as one tokenizer made them.
            "tokenizer.mode", "tokenizer.path",
            # What is known of the pool is known by these.
            "pool.kind", "pool.master", "pool.admin_url", "pool.hash_seeds", "pool.cache_prefix",
            "pool.namespace", "pool.shards.tp", "pool.shards.pcp", "pool.shards.dcp",
            "pool.shards.pp", "pool.shards.groups", "pool.seeding.enabled",
            # Responses are kept for as long as was promised, and shared with those who agree on it.
            "responses.ttl_s", "responses.bytes_max",
            "state.kind", "state.url", "state.timeout_ms",
            # One exporter runs, with what waits in it.
            "observability.otlp_endpoint", "observability.otlp_headers_env",
        ),
        Effect.RESTART,
    ),
}  # fmt: skip


class Changed(NamedTuple):
    """A key whose value differs. `key` as in `EFFECTS`; `shown` names the instance that it is of."""

    key: str
    shown: str
    path: tuple[str | int, ...]  # in the new file, as far as it is there
    effect: Effect


def find_changes(old: Settings, new: Settings) -> list[Changed]:
    """Return the keys that differ, in the order of the settings. Instances are compared by their ids."""
    changes: list[Changed] = []
    for name in Settings.model_fields:
        if name != "instances":
            for found in _differences((name,), getattr(old, name), getattr(new, name)):
                key = ".".join(str(part) for part in found.path)
                changes.append(_changed(key, key, found))
    return changes + list(_instance_changes(old, new))


def describe_instances(old: Settings, new: Settings) -> list[str]:
    """Return which instances are in only one of the files: `+ id` and `- id`."""
    before, after = ({i.id for i in settings.instances} for settings in (old, new))
    return [f"instances: + {i}" for i in sorted(after - before)] + [
        f"instances: - {i}" for i in sorted(before - after)
    ]


def _instance_changes(old: Settings, new: Settings) -> Iterator[Changed]:
    before = {instance.id: instance for instance in old.instances}
    for number, instance in enumerate(new.instances):
        if instance.id in before:
            for found in _differences(("instances", number), before[instance.id], instance):
                key = ".".join(str(part) for part in found.path[2:])
                yield _changed(f"instances[].{key}", f"instances[{instance.id}].{key}", found)


class _Difference(NamedTuple):
    path: tuple[str | int, ...]
    old: Any
    new: Any


def _differences(path: tuple[str | int, ...], old: Any, new: Any) -> Iterator[_Difference]:
    """Iterate over the keys at and below a place whose values differ."""
    if old == new:
        return
    sides = [value for value in (old, new) if isinstance(value, BaseModel)]
    if not sides:
        yield _Difference(path, old, new)
        return
    for name in type(sides[0]).model_fields:
        values = (getattr(value, name, None) for value in (old, new))
        yield from _differences((*path, name), *values)


def _changed(key: str, shown: str, found: _Difference) -> Changed:
    sides = (found.old, found.new)
    entries = [entry for side in sides if isinstance(side, list) for entry in side]
    if entries and isinstance(entries[0], BaseModel):
        # Entries of a list have no names; all their keys have one effect.
        key = f"{key}[].{next(iter(type(entries[0]).model_fields))}"
    # Who is told of what is settled at the start.
    needs_restart = key == "discovery.kind" and "redis" in sides
    return Changed(key, shown, found.path, Effect.RESTART if needs_restart else EFFECTS[key])
