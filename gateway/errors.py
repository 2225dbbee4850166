"""The gateway's own errors, in the shape that OpenAI clients know.

Errors of an engine pass through as they are; these are only for what the gateway itself refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson

ERROR_TYPES = {
    400: "invalid_request_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}


@dataclass(slots=True)
class GatewayError(Exception):
    """An answer that the gateway gives itself. `code` is a fixed word that programs can rely on."""

    status: int
    message: str
    code: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.status} {self.code}: {self.message}"

    def body(self) -> bytes:
        return error_body(self.message, self.status, self.code, self.param)


def error_body(message: str, status: int, code: str | None, param: str | None = None) -> bytes:
    """Return an error object as JSON."""
    kind = ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    error = {"message": message, "type": kind, "param": param, "code": code}
    return orjson.dumps({"error": error})


def stream_error_events(message: str, code: str) -> bytes:
    """Return the events that end a stream which the engine broke off, for chat and completions."""
    return b"data: " + error_body(message, 502, code) + b"\n\ndata: [DONE]\n\n"
