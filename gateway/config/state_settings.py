"""Sections about stored responses: how long they are kept, and where replicas share them."""

from __future__ import annotations

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from moongate.gateway.config.setting_kinds import Seconds, has_good_port
from moongate.gateway.config.setting_section import Section


def _is_redis(url: str) -> bool:
    """Tell whether it is an address of a Redis, as far as can be told."""
    try:
        parts = urlsplit(url)
    except ValueError:  # a bracket too many
        return False
    is_there = parts.scheme in ("redis", "rediss") and bool(parts.hostname)
    number = parts.path.strip("/") or "0"
    return is_there and has_good_port(parts) and not parts.query and number.isdecimal()


class ResponsesSettings(Section):
    """How long responses are kept, for `previous_response_id` and for being told again."""

    ttl_s: Seconds = 86_400.0  # after its last use
    bytes_max: Annotated[int, Field(ge=0)] = 268_435_456  # all of them; 0: keep none


class StateSettings(Section):
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
