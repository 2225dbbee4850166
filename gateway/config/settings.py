"""The configuration file: its shape, its limits, and errors that name file, line and key.

One YAML file, checked as a whole: unknown keys are errors, and nothing takes effect unless all of it
is right. `${NAME}` and `${NAME:-default}` in strings are replaced from the environment.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import SplitResult, unquote, urlsplit

import httpx
import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from moongate.engine_plugins.vllm_facts import FactsError, connectable
from moongate.gateway.auth.auth_settings import AuthSettings, InstanceTlsSettings, ListenTlsSettings
from moongate.gateway.config.setting_section import Name
from moongate.gateway.config.setting_section import Section as _Section
from moongate.gateway.telemetry.logs import LogFormat
from moongate.kvpool.keys import SHARDS_MAX, Shard
from moongate.router.admission import AdmissionLimits
from moongate.router.breaker import BreakerLimits
from moongate.router.handoff import HandoffKind
from moongate.router.policy import BUILT_IN, PolicyError, make_policy
from moongate.router.seeding import SeedingLimits

HEADER_NAME = re.compile(r"^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}$")
"""RFC 9110 token."""


MASTER = re.compile(r"^(?:[\w.-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[1-9]\d{0,4})$", re.ASCII)
DNS_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}(?:\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*\.?")
DNS_NAME_CHARS_MAX = 253
KEY_PART = re.compile(r"^(?:(?!,)[!-~]){0,256}$")
"""The master takes keys apart at commas, and is asked for them in an address."""

OTLP_TRACES = "/v1/traces"
"""The path of traces below an OTLP/HTTP endpoint."""

_URL_PATH = re.compile(r"[A-Za-z0-9/._~%-]*")

MASTER_HTTP_PORT = 9003
"""Mooncake's own default for `--metrics_port`."""


class SettingsError(ValueError):
    """The configuration can't be used. `problems` has a line of text for each thing wrong."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


# --- the shape ------------------------------------------------------------------------------------


def _check_header_name(name: str) -> str:
    if not HEADER_NAME.fullmatch(name):
        raise ValueError("expected the name of an HTTP header, such as x-agent-session")
    return name.lower()


def _check_url(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError as error:  # a bracket too many
        raise ValueError("expected http://host:port") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("expected http://host:port")
    if parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError("expected http://host:port without path, query or user")
    if not _has_good_port(parts) or any(char.isspace() for char in url):
        raise ValueError("expected http://host:port with a port from 1 to 65535")
    try:
        parsed = httpx.URL(url)
        host = parsed.raw_host.decode("ascii").lower()
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ValueError(f"expected http://host:port with a valid host ({error})") from error
    # Without a default port, so that one address has one form; ids and urls must be unique.
    port = f":{parsed.port}" if parsed.port is not None else ""
    return f"{parts.scheme}://[{host}]{port}" if ":" in host else f"{parts.scheme}://{host}{port}"


def _has_good_port(parts: SplitResult) -> bool:
    try:
        return parts.port != 0 and not parts.netloc.endswith(":")
    except ValueError:
        return False


def _is_master(address: str) -> bool:
    found = MASTER.fullmatch(address)
    return found is not None and int(found["port"]) <= 65_535


def _is_redis(url: str) -> bool:
    """Tell whether it is an address of a Redis, as far as can be told."""
    try:
        parts = urlsplit(url)
    except ValueError:  # a bracket too many
        return False
    is_there = parts.scheme in ("redis", "rediss") and bool(parts.hostname)
    number = parts.path.strip("/") or "0"
    return is_there and _has_good_port(parts) and not parts.query and number.isdecimal()


def _check_key_part(text: str) -> str:
    if not KEY_PART.fullmatch(text):
        raise ValueError("expected visible ASCII characters without a comma, 256 at most")
    return text


def _whole_as_text(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _check_endpoint(endpoint: str) -> str:
    try:
        connectable(endpoint, "http://127.0.0.1")
    except FactsError as error:
        raise ValueError(str(error)) from error
    return endpoint


def _check_otlp_endpoint(url: str) -> str:
    """Return the address that traces are posted to."""
    try:
        parts = urlsplit(url)
        _check_url(f"{parts.scheme}://{parts.netloc}")
    except ValueError as error:
        raise ValueError(f"expected http://host:4318 ({error})") from error
    is_plain = _URL_PATH.fullmatch(parts.path) and not any(char.isspace() for char in url)
    if parts.query or parts.fragment or not is_plain:
        raise ValueError("expected http://host:4318, perhaps with a path, without a query")
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path.removesuffix(OTLP_TRACES)}{OTLP_TRACES}"


def _read_headers(text: str) -> dict[str, str]:
    """Return headers written as NAME=VALUE,NAME=VALUE. Raises: ValueError, without any value."""
    headers: dict[str, str] = {}
    for number, pair in enumerate(text.split(","), 1):
        name, equals, value = (part.strip() for part in pair.partition("="))
        value = unquote(value)
        if not equals or not HEADER_NAME.fullmatch(name) or not _is_header_value(value):
            raise ValueError(f"header {number}: expected NAME=VALUE")
        headers[name] = value
    return headers


def _is_header_value(text: str) -> bool:
    return all(" " <= char <= "~" for char in text)


def _check_dns_name(name: str) -> str:
    if len(name) > DNS_NAME_CHARS_MAX or not DNS_NAME.fullmatch(name):
        raise ValueError("expected a name in DNS, such as engines.llm.svc.cluster.local")
    return name


def _check_policy_name(name: str) -> str:
    if name not in BUILT_IN and ":" not in name:
        raise ValueError(f"unknown policy{_nearest(name, [*BUILT_IN, 'module:Class'])}")
    return name


Seconds = Annotated[float, Field(gt=0, le=86_400)]
HeaderName = Annotated[str, AfterValidator(_check_header_name)]
Url = Annotated[str, AfterValidator(_check_url)]
Endpoint = Annotated[str, AfterValidator(_check_endpoint)]
OtlpEndpoint = Annotated[str, AfterValidator(_check_otlp_endpoint)]
PolicyName = Annotated[str, AfterValidator(_check_policy_name)]
KeyPart = Annotated[str, AfterValidator(_check_key_part)]
HashSeed = Annotated[str, BeforeValidator(_whole_as_text)]  # YAML reads an unquoted 0 as a number
Port = Annotated[int, Field(ge=1, le=65_535)]
DnsName = Annotated[str, AfterValidator(_check_dns_name)]


class ListenSettings(_Section):
    """Where the gateway listens."""

    host: str = "127.0.0.1"  # reachable from this machine only, until the operator says otherwise
    port: Annotated[int, Field(ge=0, le=65_535)] = 8000  # 0: any free port
    tls: ListenTlsSettings | None = None  # None: without encryption


class LimitsSettings(_Section):
    """What bounds one gateway process."""

    body_bytes_max: Annotated[int, Field(ge=1024)] = 67_108_864  # 64 MiB; larger ones get 413
    headers_bytes_max: Annotated[int, Field(ge=1024)] = 65_536  # of one request; past it 431
    # That wait for one thing: for their prompts to be read, or for an instance with room.
    queue_requests_max: Annotated[int, Field(ge=1)] = 1024
    upstream_timeout_s: Seconds = 600.0  # silence of an engine, before and between bytes
    # Send a request once more, elsewhere, after an engine was silent for that long; it is cancelled first.
    retry_timeouts: bool = True
    connect_timeout_s: Seconds = 5.0  # for a connection to an engine
    # Blocks that events may put into the index, 190 bytes each; past it a source is degraded.
    index_blocks_max: Annotated[int, Field(ge=1000)] = 4_000_000
    prompt_memory_bytes_max: Annotated[int, Field(ge=0)] = 268_435_456  # what was tokenised before
    # Requests that one instance may have from this gateway at a time; null: as many as come.
    connections_per_instance_max: Annotated[int, Field(ge=1)] | None = None
    # How deeply a body may be nested; parsers end at about 1,000 by themselves.
    json_depth_max: Annotated[int, Field(ge=8, le=1000)] = 512
    messages_max: Annotated[int, Field(ge=1)] = (
        100_000  # or input items, or prompts, of one request
    )
    stop_max: Annotated[int, Field(ge=1)] = (
        64  # stop strings of one request; engines may take fewer
    )
    allow_kv_transfer_params: bool = False  # let clients speak to the engine's KV connector


class PolicySettings(_Section):
    """How requests are routed; see `router/policy.py`."""

    name: PolicyName = "kv_cost"  # which policy
    options: dict[str, Any] = Field(default_factory=dict)  # what the policy's class takes
    allow_override: bool = False  # let a request name another policy (x-moongate-policy)

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            make_policy(self.name, self.options)
        except PolicyError as error:
            raise ValueError(str(error)) from error
        return self


_ON_OFF = {True: "on", False: "off"}
"""YAML reads an unquoted `on` or `off` as true or false."""


class TokenizerSettings(_Section):
    """How prompts become token ids."""

    # local: by a model directory's tokenizer; remote: by the engine's /tokenize; auto: local where
    # that gives the engine's very ids, else remote; off: prompts are compared as text.
    mode: Annotated[
        Literal["auto", "local", "remote", "off"],
        BeforeValidator(lambda mode: "off" if mode is False else mode),
    ] = "auto"
    path: str | None = None  # a model directory; None: where the engine says it loaded the model
    budget_ms: Annotated[float, Field(gt=0, le=60_000)] = 200.0  # past it: by what is known
    # Hand the ids to the engine, so that it need not tokenise again; auto: where that pays.
    forward_ids: Annotated[
        Literal["auto", "on", "off"], BeforeValidator(lambda way: _ON_OFF.get(way, way))
    ] = "auto"

    @model_validator(mode="after")
    def _check(self) -> TokenizerSettings:
        if self.path is not None and not (Path(self.path) / "tokenizer.json").is_file():
            raise ValueError(f"path: {self.path} has no tokenizer.json")
        return self


class InstanceSettings(_Section):
    """One engine API server."""

    id: Name  # what receipts and metrics call it
    url: Url  # of its HTTP server, without a path
    role: Literal["both", "prefill", "decode"] = "both"  # prefill: computes prompts for others only
    # Where rank 0 publishes KV events, rank r at port + r; None: as the engine says.
    kv_events: Endpoint | None = None
    kv_replay: Endpoint | None = None  # where lost events are asked for; as kv_events
    # How a prefill instance hands over; auto: mooncake where it has a bootstrap_url, else nixl.
    kv_connector: Literal["auto", "mooncake", "nixl"] = "auto"
    bootstrap_url: Url | None = None  # of a prefill instance: its Mooncake bootstrap server
    # Data-parallel ranks: how many, or their global numbers; None: as the engine says.
    ranks: (
        Annotated[int, Field(ge=1, le=1024)]
        | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
        | None
    ) = None
    block_size: Annotated[int, Field(ge=1)] | None = None  # tokens; None: as the engine says
    models: Annotated[list[str], Field(min_length=1)] | None = (
        None  # None: as the engine says (/v1/models)
    )
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0  # relative speed
    api_key_env: str | None = None  # variable with the engine's own key
    tls: InstanceTlsSettings | None = None  # for an https url; None: as the system trusts
    pool: bool | None = None  # whether its engine uses the pool; None: as it shows
    # Whether it serves /v1/messages, or is asked by way of chats; auto: as it shows.
    messages: Literal["auto", "native", "chat"] = "auto"

    @property
    def handoff(self) -> HandoffKind:
        """Return how a prefill instance hands over."""
        has_bootstrap = self.kv_connector == "auto" and self.bootstrap_url is not None
        is_mooncake = self.kv_connector == "mooncake" or has_bootstrap
        return HandoffKind.MOONCAKE if is_mooncake else HandoffKind.NIXL

    @property
    def rank_numbers(self) -> tuple[int, ...] | None:
        """Return the global ranks that the operator named, None if that is left to the engine."""
        if isinstance(self.ranks, int):
            return tuple(range(self.ranks))
        return tuple(self.ranks) if self.ranks is not None else None

    @model_validator(mode="after")
    def _check(self) -> InstanceSettings:
        if self.kv_replay is not None and self.kv_events is None:
            raise ValueError("kv_replay without kv_events")
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            raise ValueError(f"api_key_env: the variable {self.api_key_env} is not set")
        if self.tls is not None and not self.url.startswith("https://"):
            raise ValueError(f"tls: only for an https url, not {self.url}")
        if self.kv_connector == "mooncake" and self.role == "prefill" and not self.bootstrap_url:
            raise ValueError(
                "kv_connector: mooncake needs the bootstrap_url of a prefill instance, such as"
                " http://127.0.0.1:8998"
            )
        if self.bootstrap_url is not None and self.kv_connector == "nixl":
            raise ValueError("bootstrap_url: NIXL has none; leave it out, or kv_connector")
        if self.bootstrap_url is not None and self.role == "decode":
            raise ValueError("bootstrap_url: only instances that prefill have one")
        ranks = self.rank_numbers or ()
        if len(set(ranks)) != len(ranks):
            raise ValueError("ranks: a rank is named twice")
        for endpoint in (self.kv_events, self.kv_replay):
            if endpoint is not None and endpoint.startswith("ipc://") and len(ranks) > 1:
                raise ValueError(f"ranks: several need tcp:// addresses for events, not {endpoint}")
        return self


class ShardSettings(_Section):
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


class SeedingSettings(_Section):
    """When a hot prefix is put onto one more instance, from the pool; see `router/seeding.py`."""

    # auto: where there is a pool that says how full it is; on: whatever it says, if it is not full.
    enabled: Annotated[
        Literal["auto", "on", "off"], BeforeValidator(lambda way: _ON_OFF.get(way, way))
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


class PoolSettings(_Section):
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


class SessionSettings(_Section):
    """Where session keys are read, beside the names that agents use by themselves."""

    header: HeaderName | None = None  # read before the usual ones; None: only those


class ModelsSettings(_Section):
    """What models are called."""

    aliases: dict[str, str] = Field(default_factory=dict)  # name that clients use: name served

    @model_validator(mode="after")
    def _check(self) -> ModelsSettings:
        for alias, served in self.aliases.items():
            if not alias or not served:
                raise ValueError("aliases: expected names, such as my-model: served-model")
            if served in self.aliases:
                raise ValueError(f"aliases: {alias} names {served}, which is an alias itself")
        return self


class ResponsesSettings(_Section):
    """How long responses are kept, for `previous_response_id` and for being told again."""

    ttl_s: Seconds = 86_400.0  # after its last use
    bytes_max: Annotated[int, Field(ge=0)] = 268_435_456  # all of them; 0: keep none


class StateSettings(_Section):
    """What replicas share: stored responses."""

    kind: Literal["memory", "redis"] = "memory"  # memory: nothing is shared
    url: str | None = None  # redis://… or rediss://…
    timeout_ms: Annotated[float, Field(gt=0, le=1000)] = 50.0  # of a call on a request's way

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "memory":
            if self.url is not None:
                raise ValueError("url: only with kind: redis")
            return self
        if not _is_redis(self.url or ""):
            raise ValueError("url: expected redis://host:port/number, for kind: redis")
        return self


class HealthSettings(_Section):
    """How instances are checked."""

    interval_s: Seconds = 2.0  # between two checks of an instance
    timeout_s: Seconds = 1.0  # of one check
    down_after: Annotated[int, Field(ge=1)] = 2  # failed checks in a row; refused: at once
    up_after: Annotated[int, Field(ge=1)] = 1  # good checks in a row


class BreakerSettings(_Section):
    """When an instance that answers health checks gets no requests all the same; see `router/breaker.py`."""

    failures_max: Annotated[int, Field(ge=1)] = 5  # answers broken off in a row; then it opens
    open_s: Seconds = 1.0  # the first back-off; then one trial, and twice as long if it fails
    open_s_max: Seconds = 30.0  # what a back-off grows to

    @property
    def limits(self) -> BreakerLimits:
        return BreakerLimits(self.failures_max, self.open_s, self.open_s_max)

    @model_validator(mode="after")
    def _check(self) -> BreakerSettings:
        if self.open_s_max < self.open_s:
            raise ValueError(f"open_s_max: expected open_s ({self.open_s:g}) or more")
        return self


class AdmissionSettings(_Section):
    """When requests wait for an instance with room; see `router/admission.py`. Without bounds none does."""

    # Requests that an instance may run from here; null: as many as come.
    instance_requests_max: Annotated[int, Field(ge=1)] | None = None
    # Prompt tokens that may wait on an instance to be computed, before one more is sent; null: as many as come.
    instance_prefill_tokens_max: Annotated[int, Field(ge=1)] | None = None
    wait_s_max: Seconds = (
        30.0  # a request that can't start in that time is refused, if known at once
    )

    def limits(self, queue_requests_max: int) -> AdmissionLimits:
        return AdmissionLimits(
            self.instance_requests_max,
            self.instance_prefill_tokens_max,
            queue_requests_max,
            self.wait_s_max,
        )


class DrainSettings(_Section):
    """How the gateway stops."""

    limit_s: Seconds = 300.0  # running answers may take this long after SIGTERM


class FoundSettings(_Section):
    """What the instances are that a name leads to; as in `instances[]`, with ports in place of addresses."""

    role: Literal["both", "prefill", "decode"] = "both"  # prefill: computes prompts for others only
    models: Annotated[list[str], Field(min_length=1)] | None = None  # None: as the engine says
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0  # relative speed
    # Where rank 0 publishes KV events; None: as the engine says.
    kv_events_port: Port | None = None
    kv_replay_port: Port | None = None  # where lost events are asked for; as kv_events_port
    # How a prefill instance hands over; auto: mooncake where it has a bootstrap_port, else nixl.
    kv_connector: Literal["auto", "mooncake", "nixl"] = "auto"
    bootstrap_port: Port | None = None  # of a prefill instance: its Mooncake bootstrap server's
    ranks: Annotated[int, Field(ge=1, le=1024)] | None = None  # None: as the engine says
    block_size: Annotated[int, Field(ge=1)] | None = None  # tokens; None: as the engine says
    api_key_env: str | None = None  # variable with the engines' own key
    tls: InstanceTlsSettings | None = None  # for scheme: https; None: as the system trusts
    pool: bool | None = None  # whether their engines use the pool; None: as it shows
    # Whether they serve /v1/messages, or are asked by way of chats; auto: as it shows.
    messages: Literal["auto", "native", "chat"] = "auto"


class DiscoverySettings(_Section):
    """How instances are found beside those of `instances`, and those that announce themselves."""

    # static: the file's, and those that announce themselves to this gateway, or that operators add to it;
    # dns: a name leads to others, and is followed; redis: what is announced or added to one gateway is known
    # to all that share its `state` (to or from it: by a restart).
    kind: Literal["static", "dns", "redis"] = "static"
    name: DnsName | None = None  # such as engines.llm.svc
    # a: A and AAAA records, each an instance at `port`; srv: host and port are in the records.
    record: Literal["a", "srv"] = "a"
    port: Port | None = None  # of the engines' HTTP servers, for record: a
    scheme: Literal["http", "https"] = "http"  # of the engines' HTTP servers
    interval_s: Seconds = 5.0  # between two look-ups
    # One that is missing in so many look-ups in a row drains, and then goes.
    absent_after: Annotated[int, Field(ge=1, le=1000)] = 3
    found: FoundSettings = FoundSettings()  # what is known of them beforehand

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind != "dns":
            if self.name is not None:
                raise ValueError("name: only with kind: dns")
            return self
        if self.name is None:
            raise ValueError("kind dns needs the name that leads to the instances")
        if self.record == "a" and self.port is None:
            raise ValueError("record a needs the port of the engines' HTTP servers")
        if self.record == "srv" and self.port is not None:
            raise ValueError("port: with record srv it is in the records")
        try:
            self.instance("example", "127.0.0.1", 8000)
        except ValidationError as error:
            message = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise ValueError(f"found: {message}") from None
        return self

    @property
    def absence_s(self) -> float:
        """Return for how long an instance is missing until it counts as gone."""
        return self.interval_s * (self.absent_after + 1)

    def instance(self, instance_id: str, host: str, port: int) -> InstanceSettings:
        """Return an instance that was found. Raises: ValidationError."""
        found, host = self.found, f"[{host}]" if ":" in host else host
        own = {"kv_events_port", "kv_replay_port", "bootstrap_port"}
        given = {
            **found.model_dump(exclude=own),
            "id": instance_id,
            "url": f"{self.scheme}://{host}:{port}",
        }
        if found.kv_events_port is not None:
            given["kv_events"] = f"tcp://{host}:{found.kv_events_port}"
        if found.kv_replay_port is not None:
            given["kv_replay"] = f"tcp://{host}:{found.kv_replay_port}"
        if found.bootstrap_port is not None:
            given["bootstrap_url"] = f"http://{host}:{found.bootstrap_port}"
        return InstanceSettings.model_validate(given)


class ObservabilitySettings(_Section):
    """What is told about requests."""

    receipt_headers: bool = True  # tell in each answer where it went and why
    # always: ask engines for the usage of every stream, and keep it from clients that didn't.
    stream_usage: Literal["asked", "always"] = "asked"
    keep_text: bool = False  # of messages, to show where a session diverged; else only hashes
    decisions_max: Annotated[int, Field(ge=1, le=100_000)] = 1000  # receipts kept; 3 KB each
    log_format: LogFormat = "text"  # json: one object a line, for programs
    # A collector, by OTLP/HTTP; null, or "" as of an unset variable: no traces.
    otlp_endpoint: Annotated[OtlpEndpoint | None, BeforeValidator(lambda url: url or None)] = None
    # Variable with headers for it, as NAME=VALUE,NAME=VALUE (percent-encoded): its key.
    otlp_headers_env: str | None = None
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0  # of traces that no client has begun

    @property
    def otlp_headers(self) -> dict[str, str]:
        """Return the headers that `otlp_headers_env` names."""
        return _read_headers(os.environ[self.otlp_headers_env]) if self.otlp_headers_env else {}

    @model_validator(mode="after")
    def _check(self) -> ObservabilitySettings:
        if self.otlp_headers_env is not None:
            if not os.environ.get(self.otlp_headers_env):
                raise ValueError(f"otlp_headers_env: {self.otlp_headers_env} is not set")
            try:
                self.otlp_headers  # noqa: B018 - raises what is wrong
            except ValueError as error:
                raise ValueError(f"otlp_headers_env: {self.otlp_headers_env}: {error}") from None
        return self


class Settings(_Section):
    """All of the configuration file."""

    listen: ListenSettings = ListenSettings()
    limits: LimitsSettings = LimitsSettings()
    policy: PolicySettings = PolicySettings()
    tokenizer: TokenizerSettings = TokenizerSettings()
    pool: PoolSettings = PoolSettings()
    auth: AuthSettings = AuthSettings()
    session: SessionSettings = SessionSettings()
    models: ModelsSettings = ModelsSettings()
    responses: ResponsesSettings = ResponsesSettings()
    state: StateSettings = StateSettings()
    health: HealthSettings = HealthSettings()
    breaker: BreakerSettings = BreakerSettings()
    admission: AdmissionSettings = AdmissionSettings()
    drain: DrainSettings = DrainSettings()
    observability: ObservabilitySettings = ObservabilitySettings()
    discovery: DiscoverySettings = DiscoverySettings()
    instances: list[InstanceSettings]  # none: all are found, or announce themselves

    @field_validator("instances")
    @classmethod
    def _check(
        cls, instances: list[InstanceSettings], info: ValidationInfo
    ) -> list[InstanceSettings]:
        discovery = info.data.get("discovery")  # which stands above, so that it is known here
        finds_any = isinstance(discovery, DiscoverySettings) and discovery.kind == "dns"
        for what in ("id", "url"):
            values = [getattr(instance, what) for instance in instances]
            twice = next((value for value in values if values.count(value) > 1), None)
            if twice is not None:
                raise ValueError(f"the {what} {twice} is used twice")
        for instance in instances:
            has_partner = finds_any or _has_partner(instance, instances)
            if instance.role == "prefill" and not has_partner:
                raise ValueError(
                    f"{instance.id} only prefills: it needs an instance of role decode or both for"
                    " the same model"
                )
        return instances

    @model_validator(mode="after")
    def _check_discovery(self) -> Self:
        if self.discovery.kind == "redis" and self.state.kind != "redis":
            raise ValueError("discovery.kind: redis needs state.kind: redis, with a url")
        return self


def _has_partner(prefill: InstanceSettings, instances: Iterable[InstanceSettings]) -> bool:
    """Tell whether somebody can decode what the instance prefills, as far as models are named."""
    for other in instances:
        names_none_alike = (
            prefill.models is not None
            and other.models is not None
            and not set(prefill.models) & set(other.models)
        )
        if other.role != "prefill" and not names_none_alike:
            return True
    return False


# --- reading --------------------------------------------------------------------------------------

Path_ = tuple[str | int, ...]

NESTING_MAX = 32
"""Deeper than any key; an alias that contains itself has no bottom."""


def load_settings(file: Path, environment: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings of a configuration file.

    Raises: SettingsError, with one line for each problem: file, line, key, reason.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError([f"{file}: can't be read: {error}"]) from error
    return parse_settings(text, str(file), environment)


def parse_settings(text: str, file: str, environment: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings in a YAML text; `file` is the name that errors give it.

    Raises: SettingsError.
    """
    document = _Document.parse(text, file, environment)
    try:
        return Settings.model_validate(document.value)
    except ValidationError as error:
        raise SettingsError([document.describe(detail) for detail in error.errors()]) from error


def point_out(text: str, file: str, path: Path_, message: str) -> str:
    """Return one line about a key of a YAML text that can be read: file, line, key, message."""
    document = _Document.parse(text, file, os.environ)
    return document._line(path, message)  # noqa: SLF001 - of this module


class _Document:
    """A YAML document with the line of each key."""

    def __init__(self, file: str, value: dict[str, Any], lines: dict[Path_, int]) -> None:
        self.file = file
        self.value = value
        self._lines = lines

    @classmethod
    def parse(cls, text: str, file: str, environment: Mapping[str, str]) -> _Document:
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = mark.line + 1 if mark is not None else 1
            hint = " (YAML wants spaces, not tabs)" if "\\t" in str(error.problem) else ""
            raise SettingsError([f"{file}:{line}: not YAML: {error.problem}{hint}"]) from error
        except yaml.YAMLError as error:
            raise SettingsError([f"{file}: not YAML: {' '.join(str(error).split())}"]) from error
        if not isinstance(root, yaml.MappingNode):
            raise SettingsError([f"{file}:1: expected keys and values, such as instances: [...]"])
        reader = _NodeReader(file, environment)
        value = reader.read(root, ())
        if reader.problems:
            raise SettingsError(reader.problems)
        return cls(file, value, reader.lines)

    def describe(self, detail: ErrorDetails) -> str:
        """Return one line: file, line, key, what is wrong, what would be right."""
        # Pydantic names the branch of a union in the path, which is no key of the file.
        names_key = detail["type"] in ("extra_forbidden", "missing")
        path = tuple(
            part
            for part in detail["loc"]
            if self._is_key(part) or (names_key and part == detail["loc"][-1])
        )
        if detail["type"] == "extra_forbidden":
            known = _fields_at(path[:-1])
            if path[-1] in known:
                return self._line(path, "expected keys and values, such as {kind: none}")
            return self._line(path, f"unknown key{_nearest(str(path[-1]), known)}")
        if detail["type"] == "missing":
            return self._line(path, "missing; it must be given")
        if detail["type"] == "model_type":
            names = ", ".join(_fields_at(path))
            return self._line(path, f"expected keys and values; known here: {names}")
        message = detail["msg"].removeprefix("Value error, ")
        given = detail["input"]
        if isinstance(given, str | int | float | bool):
            message += f"; got {given!r}"
            choices = _choices(detail)
            if choices:
                message += _nearest(str(given), choices, known=False)
        return self._line(path, message)

    def _is_key(self, part: str | int) -> bool:
        return isinstance(part, int) or any(part in path for path in self._lines)

    def _line(self, path: Path_, message: str) -> str:
        line = next(
            (
                self._lines[path[:end]]
                for end in range(len(path), 0, -1)
                if path[:end] in self._lines
            ),
            1,
        )
        key = ".".join(f"{part}" for part in path).replace(".[", "[")
        return f"{self.file}:{line}: {key}: {message}" if key else f"{self.file}:{line}: {message}"


class _NodeReader:
    """Builds plain values from YAML nodes: lines noted, duplicates refused, variables expanded."""

    def __init__(self, file: str, environment: Mapping[str, str]) -> None:
        self._file = file
        self._environment = environment
        self._scalars = yaml.SafeLoader("")
        self.lines: dict[Path_, int] = {}
        self.problems: list[str] = []

    def read(self, node: yaml.Node, path: Path_) -> Any:
        self.lines.setdefault(path, node.start_mark.line + 1)
        if len(path) > NESTING_MAX:
            self._note(node, path, "nested too deeply")
            return None
        if isinstance(node, yaml.MappingNode):
            return self._read_mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode), node
        try:
            value = self._scalars.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:  # a tag of its own, the 99th of a month
            reason = error.problem if isinstance(error, yaml.MarkedYAMLError) else error
            self._note(node, path, f"can't be read: {reason}")
            return None
        return self._expand(value, node, path) if isinstance(value, str) else value

    def _read_mapping(self, node: yaml.MappingNode, path: Path_) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            line = key_node.start_mark.line + 1
            if key in result:
                self._note(key_node, (*path, key), "given twice")
            self.lines[(*path, key)] = line
            result[key] = self.read(value_node, (*path, key))
        return result

    def _note(self, node: yaml.Node, path: Path_, problem: str) -> None:
        where = ".".join(str(part) for part in path[:NESTING_MAX])
        self.problems.append(f"{self._file}:{node.start_mark.line + 1}: {where}: {problem}")

    def _expand(self, text: str, node: yaml.ScalarNode, path: Path_) -> Any:
        def replace(match: re.Match[str]) -> str:
            name, default = match["name"], match["default"]
            value = self._environment.get(name)
            if value:
                return value
            if default is None and value is None:
                hint = f"(give a default with ${{{name}:-value}})"
                self._note(node, path, f"the variable {name} is not set {hint}")
            return default or ""

        expanded = _VARIABLE.sub(replace, text)
        if expanded == text:
            return text
        # The value keeps the type that it would have had if it stood in the file itself.
        try:
            resolved = yaml.safe_load(expanded) if node.style is None else expanded
        except (yaml.YAMLError, ValueError):
            return expanded  # a text that only looks like the beginning of something else
        return resolved if isinstance(resolved, str | int | float | bool) else expanded


_VARIABLE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")


def _yaml(value: object) -> str:
    return str(value) if isinstance(value, str) else json.dumps(value)


def _fields_at(path: Path_) -> list[str]:
    """Return the keys that are known at a place of the file."""
    model: type[BaseModel] = Settings
    for part in path:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        inner = [annotation, *get_args(annotation)]
        nested = [a for a in inner if isinstance(a, type) and issubclass(a, BaseModel)]
        if not nested:
            return []
        model = nested[0]
    return list(model.model_fields)


def _choices(detail: ErrorDetails) -> list[str]:
    expected = detail.get("ctx", {}).get("expected")
    return re.findall(r"'([^']+)'", expected) if isinstance(expected, str) else []


def _nearest(word: str, known_words: Iterable[str], *, known: bool = True) -> str:
    words = sorted(known_words)
    near = difflib.get_close_matches(word, words, n=1)
    text = f" (did you mean {near[0]}?)" if near else ""
    return f"{text}; known here: {', '.join(words)}" if known and words else text
