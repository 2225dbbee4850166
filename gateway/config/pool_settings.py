"""The section about the shared KV pool, and those in it."""

from __future__ import annotations

import itertools
import math
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from moongate.gateway.config.setting_kinds import ON_OFF, Url
from moongate.gateway.config.setting_section import Section
from moongate.kvpool.keys import SHARDS_MAX, Shard
from moongate.router.seeding import SeedingLimits

MASTER = re.compile(r"^(?:[\w.-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[1-9]\d{0,4})$", re.ASCII)
KEY_PART = re.compile(r"^(?:(?!,)[!-~]){0,256}$")
"""The master takes keys apart at commas, and is asked for them in an address."""

MASTER_HTTP_PORT = 9003
"""Mooncake's own default for `--metrics_port`."""


def _is_master(address: str) -> bool:
    found = MASTER.fullmatch(address)
    return found is not None and int(found["port"]) <= 65_535


def _check_key_part(text: str) -> str:
    if not KEY_PART.fullmatch(text):
        raise ValueError("expected visible ASCII characters without a comma, 256 at most")
    return text


def _whole_as_text(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


KeyPart = Annotated[str, AfterValidator(_check_key_part)]
HashSeed = Annotated[str, BeforeValidator(_whole_as_text)]  # YAML reads an unquoted 0 as a number


class ShardSettings(Section):
    """In how many parts an engine stores a block: its parallel sizes, as they show in pool keys."""

    tp: Annotated[int, Field(ge=1, le=256)] = 1  # tensor parallel
    pcp: Annotated[int, Field(ge=1, le=64)] = 1  # prefill context parallel
    dcp: Annotated[int, Field(ge=1, le=64)] = 1  # decode context parallel
    pp: Annotated[int, Field(ge=1, le=64)] = 1  # pipeline parallel
    groups: Annotated[int, Field(ge=1, le=64)] = 1  # KV groups of a hybrid model

    @model_validator(mode="after")
    def _check(self) -> ShardSettings:
        count = math.prod(self._sizes)
        if count > SHARDS_MAX:
            raise ValueError(
                f"tp x pcp x dcp x pp x groups are {count} parts, {SHARDS_MAX} at most"
            )
        return self

    @property
    def _sizes(self) -> tuple[int, ...]:
        return self.tp, self.pcp, self.dcp, self.pp, self.groups

    def as_shards(self) -> list[Shard]:
        return [Shard(*ranks) for ranks in itertools.product(*map(range, self._sizes))]


class SeedingSettings(Section):
    """When a hot prefix is put onto one more instance, from the pool; see `router/seeding.py`."""

    # auto: where there is a pool that says how full it is; on: whatever it says, if it is not full.
    enabled: Annotated[
        Literal["auto", "on", "off"], BeforeValidator(lambda way: ON_OFF.get(way, way))
    ] = "auto"
    at_once_max: Annotated[int, Field(ge=1, le=64)] = 4  # seedings; an instance has one at most
    per_minute_max: Annotated[int, Field(ge=1, le=600)] = 20  # seedings begun
    demand_per_s_min: Annotated[float, Field(gt=0, le=1000)] = 0.1  # requests, for each holder
    busy_requests: Annotated[int, Field(ge=1, le=1000)] = 2  # with which a holder is busy
    prefix_tokens_min: Annotated[int, Field(ge=1)] = 1024  # shorter ones are not worth it
    pool_use_max: Annotated[float, Field(gt=0, le=1)] = 0.95  # of its bytes; fuller: none
    kv_use_max: Annotated[float, Field(gt=0, le=1)] = 0.7  # of the cache of the instance

    @property
    def limits(self) -> SeedingLimits | None:
        """Return what the core is given. None: nothing is seeded."""
        if self.enabled == "off":
            return None
        fields = self.model_dump(exclude={"enabled"})
        return SeedingLimits(**fields, needs_pool_use=self.enabled == "auto")


class PoolSettings(Section):
    """The shared KV pool that engines store into and fetch from."""

    # mooncake: a store whose master is asked what it holds; memory: in process, for moongate up.
    kind: Literal["none", "memory", "mooncake"] = "none"
    master: str | None = None  # host:port of the Mooncake master, as engines are given it
    admin_url: Url | None = None  # its HTTP interface; None: port 9003 on the master's host
    lookup_budget_ms: Annotated[float, Field(gt=0, le=1000)] = 20.0  # what a turn waits for it
    hash_seeds: list[HashSeed] = Field(default_factory=list)  # PYTHONHASHSEED of engines, if not 0
    cache_prefix: KeyPart = ""  # as in the engines' kv_connector_extra_config
    namespace: KeyPart = ""  # of an opt-in payload format, such as @store_tp:2@store_pp:1
    shards: ShardSettings | None = None  # None: learned from what engines store
    seeding: SeedingSettings = SeedingSettings()  # of hot prefixes

    @model_validator(mode="after")
    def _check(self) -> PoolSettings:
        if self.kind == "mooncake" and self.admin_url is None and self.master is None:
            raise ValueError(
                "kind mooncake needs admin_url: http://host:9003, or master: host:port"
            )
        if self.kind != "mooncake" and (self.admin_url or self.master):
            raise ValueError(f"master and admin_url are of kind mooncake, not {self.kind}")
        if self.kind == "none" and self.seeding.enabled == "on":
            raise ValueError("seeding.enabled: on needs a pool; kind is none")
        if self.master is not None and not _is_master(self.master):
            raise ValueError("master: expected host:port, such as 127.0.0.1:50051")
        return self

    @property
    def master_url(self) -> str:
        """Return where the master's HTTP interface is."""
        if self.admin_url is not None:
            return self.admin_url
        assert self.master is not None
        return f"http://{self.master.rpartition(':')[0]}:{MASTER_HTTP_PORT}"
