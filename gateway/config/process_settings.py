"""Sections about one gateway process: where it listens, what bounds it, how it stops."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from moongate.gateway.auth.auth_settings import ListenTlsSettings
from moongate.gateway.config.setting_kinds import Seconds
from moongate.gateway.config.setting_section import Section


class ListenSettings(Section):
    """Where the gateway listens."""

    host: str = "127.0.0.1"  # reachable from this machine only, until the operator says otherwise
    port: Annotated[int, Field(ge=0, le=65_535)] = 8000  # 0: any free port
    tls: ListenTlsSettings | None = None  # None: without encryption


class LimitsSettings(Section):
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
    allow_kv_transfer_params: bool = (
        False  # let clients speak to the engine's KV and encoder connectors
    )


class DrainSettings(Section):
    """How the gateway stops."""

    limit_s: Seconds = 300.0  # running answers may take this long after SIGTERM
