"""Sections about what becomes of a request: the policy, its prompt, whose turn it is, when it may start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from moongate.gateway.config.setting_kinds import HEADER_NAME, ON_OFF, Seconds, nearest
from moongate.gateway.config.setting_section import Section
from moongate.router.admission import AdmissionLimits
from moongate.router.policy import BUILT_IN, PolicyError, make_policy


def _check_policy_name(name: str) -> str:
    if name not in BUILT_IN and ":" not in name:
        raise ValueError(f"unknown policy{nearest(name, [*BUILT_IN, 'module:Class'])}")
    return name


def _check_header_name(name: str) -> str:
    if not HEADER_NAME.fullmatch(name):
        raise ValueError("expected the name of an HTTP header, such as x-agent-session")
    return name.lower()


PolicyName = Annotated[str, AfterValidator(_check_policy_name)]
HeaderName = Annotated[str, AfterValidator(_check_header_name)]


class PolicySettings(Section):
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


class TokenizerSettings(Section):
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
        Literal["auto", "on", "off"], BeforeValidator(lambda way: ON_OFF.get(way, way))
    ] = "auto"

    @model_validator(mode="after")
    def _check(self) -> TokenizerSettings:
        if self.path is not None and not (Path(self.path) / "tokenizer.json").is_file():
            raise ValueError(f"path: {self.path} has no tokenizer.json")
        return self


class SessionSettings(Section):
    """Where session keys are read, beside the names that agents use by themselves."""

    header: HeaderName | None = None  # read before the usual ones; None: only those


class ModelsSettings(Section):
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


class AdmissionSettings(Section):
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
