"""The section about what is told of requests, and to whom."""

from __future__ import annotations

import os
import re
from typing import Annotated, Literal
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from moongate.gateway.config.setting_kinds import HEADER_NAME, check_url
from moongate.gateway.config.setting_section import Section
from moongate.gateway.telemetry.logs import LogFormat

OTLP_TRACES = "/v1/traces"
"""The path of traces below an OTLP/HTTP endpoint."""

_URL_PATH = re.compile(r"[A-Za-z0-9/._~%-]*")


def _check_otlp_endpoint(url: str) -> str:
    """Return the address that traces are posted to."""
    try:
        parts = urlsplit(url)
        check_url(f"{parts.scheme}://{parts.netloc}")
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


OtlpEndpoint = Annotated[str, AfterValidator(_check_otlp_endpoint)]


class ObservabilitySettings(Section):
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
