"""Usage of every stream (`observability.stream_usage: always`): asked for, and kept from clients.

The engine reports a stream's usage in an event of its own without choices, if it is asked. Clients that
didn't ask don't expect such an event, so it is taken out again; what it said has been counted by then.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from moongate.gateway.dialects.body import with_fields, without_key
from moongate.gateway.dialects.sse import split_events

_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')


def asks_for_usage(fields: Mapping[str, Any]) -> bool:
    """Tell whether the client itself wants the usage of its stream."""
    options = fields.get("stream_options")
    # The engine takes other spellings of true as well.
    return isinstance(options, dict) and options.get("include_usage") not in (None, False)


def with_usage_asked(raw: bytes, fields: Mapping[str, Any]) -> bytes:
    """Return a body that asks for usage; other options stay. One that is no object stays as it is.

    Usage in each event has no effect unless usage is asked for, so for this client it must not have.
    """
    options = fields.get("stream_options")
    if options is None:
        options = {}
    if not isinstance(options, dict):
        return raw  # the engine will refuse it
    if "stream_options" in fields:
        raw = without_key(raw, "stream_options")
    options = {name: value for name, value in options.items() if name != "continuous_usage_stats"}
    asked = orjson.dumps({"stream_options": {**options, "include_usage": True}})
    return b"".join(with_fields(raw, asked[1:-1]))


def without_usage_events(events: bytes) -> bytes:
    """Return whole events without those that have no choices but a usage."""
    if _NO_CHOICES.search(events) is None:
        return events
    whole, rest = split_events(events)
    return b"".join([event for event in whole if not _is_usage_only(event)] + [rest])


def _is_usage_only(event: bytes) -> bool:
    if not event.startswith(b"data:") or _NO_CHOICES.search(event) is None:
        return False
    try:
        fields = orjson.loads(event[5:])
    except orjson.JSONDecodeError:
        return False
    if not isinstance(fields, dict):
        return False
    return fields.get("choices") == [] and fields.get("usage") is not None
