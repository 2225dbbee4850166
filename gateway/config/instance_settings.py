"""Sections about instances: which there are, how they are checked, when they get nothing for a while."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from moongate.engine_plugins.vllm_facts import FactsError, connectable
from moongate.gateway.auth.auth_settings import InstanceTlsSettings
from moongate.gateway.config.setting_kinds import Seconds, Url
from moongate.gateway.config.setting_section import Name, Section
from moongate.router.breaker import BreakerLimits
from moongate.router.handoff import HandoffKind


def _check_endpoint(endpoint: str) -> str:
    try:
        connectable(endpoint, "http://127.0.0.1")
    except FactsError as error:
        raise ValueError(str(error)) from error
    return endpoint


Endpoint = Annotated[str, AfterValidator(_check_endpoint)]


class InstanceSettings(Section):
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


class HealthSettings(Section):
    """How instances are checked."""

    interval_s: Seconds = 2.0  # between two checks of an instance
    timeout_s: Seconds = 1.0  # of one check
    down_after: Annotated[int, Field(ge=1)] = 2  # failed checks in a row; refused: at once
    up_after: Annotated[int, Field(ge=1)] = 1  # good checks in a row


class BreakerSettings(Section):
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
