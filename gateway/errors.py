"""The gateway's own errors, in the shapes that the clients of each API know.

Errors of an engine pass through as they are; these are only for what the gateway itself refuses, and for
how a stream ends that the engine broke off.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from moongate.gateway.dialects.routes import ApiFamily
from moongate.gateway.dialects.sse import split_events

OPENAI_TYPES = {429: "rate_limit_error"}
"""Of statuses below 500 that aren't an `invalid_request_error`."""

ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""The same, and of those from 500 that aren't an `api_error`."""

_SEQUENCE_NUMBER = re.compile(rb'"sequence_number"\s*:\s*(\d+)')


@dataclass(slots=True)
class GatewayError(Exception):
    """An answer that the gateway gives itself. `code` is a fixed word that programs can rely on."""

    status: int
    message: str
    code: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    reason: str | None = None  # by which it is counted as a refusal, where that isn't the code

    def __str__(self) -> str:
        return f"{self.status} {self.code}: {self.message}"

    def body(self, family: ApiFamily = ApiFamily.OPENAI) -> bytes:
        return error_body(self.message, self.status, self.code, self.param, family=family)


def error_body(
    message: str,
    status: int,
    code: str | None,
    param: str | None = None,
    *,
    family: ApiFamily = ApiFamily.OPENAI,
) -> bytes:
    """Return an error object as JSON."""
    if family is ApiFamily.ANTHROPIC:
        otherwise = "api_error" if status >= 500 else "invalid_request_error"
        kind = ANTHROPIC_TYPES.get(status, otherwise)
        return orjson.dumps({"type": "error", "error": {"type": kind, "message": message}})
    otherwise = "server_error" if status >= 500 else "invalid_request_error"
    kind = OPENAI_TYPES.get(status, otherwise)
    error = {"message": message, "type": kind, "param": param, "code": code}
    return orjson.dumps({"error": error})


def stream_error_events(
    message: str, code: str, family: ApiFamily, *, first: bytes = b"", last: bytes = b""
) -> bytes:
    """Return the events that end a stream which the engine broke off.

    `first` and `last`: some bytes of what the client has got, from its beginning and before its end.
    """
    match family:
        case ApiFamily.ANTHROPIC:
            return b"event: error\ndata: " + error_body(message, 502, code, family=family) + b"\n\n"
        case ApiFamily.RESPONSES:
            return failed_event(*_failed_response(message, first, last))
        case ApiFamily.OPENAI:
            return b"data: " + error_body(message, 502, code) + b"\n\ndata: [DONE]\n\n"


def failed_event(response: Mapping[str, Any], sequence_number: int) -> bytes:
    """Return the event by which the stream of a response ends that does not complete."""
    event = {"type": "response.failed", "sequence_number": sequence_number, "response": response}
    return b"event: response.failed\ndata: " + orjson.dumps(event) + b"\n\n"


def _failed_response(message: str, first: bytes, last: bytes) -> tuple[dict[str, Any], int]:
    """Return the response that fails, as far as it was announced, and the number of the event."""
    numbers = _SEQUENCE_NUMBER.findall(last) or _SEQUENCE_NUMBER.findall(first)
    response = {
        "object": "response",
        "output": [],
        **_announced_response(first),
        "status": "failed",
        "error": {"code": "server_error", "message": message},
    }
    return response, int(numbers[-1]) + 1 if numbers else 0


def _announced_response(first: bytes) -> Mapping[str, Any]:
    """Return the response of a stream's first event, empty if it can't be read."""
    events, _ = split_events(first)
    data = events[0].partition(b"data:")[2] if events else b""
    try:
        response = orjson.loads(data)["response"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return {}
    return response if isinstance(response, dict) else {}
