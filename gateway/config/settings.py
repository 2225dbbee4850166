"""All of the configuration file: its sections, and what must be right between them.

A section's keys are in the module that it is imported from; what reads the file is `settings_text.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from moongate.gateway.auth.auth_settings import AuthSettings
from moongate.gateway.config.discovery_settings import DiscoverySettings
from moongate.gateway.config.instance_settings import (
    BreakerSettings,
    HealthSettings,
    InstanceSettings,
)
from moongate.gateway.config.observability_settings import ObservabilitySettings
from moongate.gateway.config.pool_settings import PoolSettings
from moongate.gateway.config.process_settings import DrainSettings, LimitsSettings, ListenSettings
from moongate.gateway.config.routing_settings import (
    AdmissionSettings,
    ModelsSettings,
    PolicySettings,
    SessionSettings,
    TokenizerSettings,
)
from moongate.gateway.config.setting_section import Section
from moongate.gateway.config.state_settings import ResponsesSettings, StateSettings


class Settings(Section):
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
    # None: all are found, or announce themselves. May be left out where `discovery` finds them.
    instances: list[InstanceSettings] = Field(default_factory=list)

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
        if self.discovery.kind == "static" and "instances" not in self.model_fields_set:
            raise ValueError("instances: missing; it must be given, [] if all announce themselves")
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
