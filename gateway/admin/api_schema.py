"""What the operators' schema (`/admin/openapi.json`) says beyond what FastAPI finds by itself.

Errors are the gateway's own, in place of FastAPI's; bodies that are read by hand are described here.
"""

from __future__ import annotations

from typing import Any

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


def _answer(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": _answer("what is wrong with the call, in OpenAI's shape", _ERROR),
    "503": _answer("it can't be done now, in OpenAI's shape", _ERROR),
}
"""Of every route."""

UNREADY: dict[int | str, dict[str, Any]] = {
    "503": _answer(
        "nothing can be routed now",
        {
            "type": "object",
            "required": ["ready", "reasons"],
            "properties": {
                "ready": {"const": False},
                "reasons": {"type": "array", "items": {"type": "string"}, "minItems": 1},
            },
        },
    )
}


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


def _record(*required: str) -> dict[str, Any]:
    """Return a body that describes an instance; further fields are those of the configuration file."""
    return _body(
        {
            "type": "object",
            "required": [*required],
            "properties": {
                "id": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$"},
                "url": {"type": "string", "example": "http://127.0.0.1:8101"},
                "role": {"enum": ["prefill", "decode", "both"]},
                "weight": {"type": "number", "exclusiveMinimum": 0},
                "kv_events": {"type": "string", "example": "tcp://127.0.0.1:5557"},
                "lease_s": {"type": "number", "exclusiveMinimum": 0},
            },
        }
    )


ADDED = _record("id", "url")
ANNOUNCED = _record("url")
EXPLAINED = _body(
    {
        "type": "object",
        "description": "a request's body, as a client would send it",
        "required": ["model"],
        "properties": {"model": {"type": "string"}},
    }
)
CHANGED: dict[int | str, dict[str, Any]] = {
    "201": {"description": "the instance is new"},
    "200": {"description": "it was known, and is renewed or replaced"},
}
