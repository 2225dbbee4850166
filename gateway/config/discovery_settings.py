"""The section about finding instances that the file doesn't name."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator

from moongate.gateway.auth.auth_settings import InstanceTlsSettings
from moongate.gateway.config.instance_settings import InstanceSettings
from moongate.gateway.config.setting_kinds import Port, Seconds
from moongate.gateway.config.setting_section import Section

DNS_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}(?:\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*\.?")
DNS_NAME_CHARS_MAX = 253


def _check_dns_name(name: str) -> str:
    if len(name) > DNS_NAME_CHARS_MAX or not DNS_NAME.fullmatch(name):
        raise ValueError("expected a name in DNS, such as engines.llm.svc.cluster.local")
    return name


DnsName = Annotated[str, AfterValidator(_check_dns_name)]


class FoundSettings(Section):
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


class DiscoverySettings(Section):
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
