"""Small changes to JSON on its way: one field of an object, or of the objects in events; all else stays.

Done by the text of the object's own fields, so that no other place which looks alike is changed.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from moongate.gateway.dialects.sse import split_events

Edit = Callable[[bytes], bytes]
"""What becomes of whole events, of a whole body, or of a field's text, on their way."""

read_top_level = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
"""Returns a JSON object's fields, each as its text. Raises: msgspec.MsgspecError, RecursionError."""


def with_field(text: bytes, name: str, edit: Edit) -> bytes:
    """Return a JSON object's text with one of its fields edited; what can't be read stays as it is."""
    try:
        fields = read_top_level(text)
    except (msgspec.MsgspecError, RecursionError):
        return text
    if name not in fields:
        return text
    old = bytes(fields[name])
    new = edit(old)
    return text if new == old else msgspec.json.encode({**fields, name: msgspec.Raw(new)})


def with_objects(events: bytes, holder: str | None, mark: str, edit: Edit) -> bytes:
    """Return whole events, those edited that have a field called `mark` somewhere.

    `holder`: the field of an event in which the object is that is edited; None: the event's data is.
    """
    found = b'"%b"' % mark.encode()
    if found not in events:
        return events
    whole, rest = split_events(events)
    return b"".join([_with_object(event, holder, found, edit) for event in whole] + [rest])


def _with_object(event: bytes, holder: str | None, found: bytes, edit: Edit) -> bytes:
    before, label, behind = event.partition(b"data:")
    data = behind.strip()
    if found not in data or not data.startswith(b"{"):
        return event
    at = behind.index(data)
    changed = edit(data) if holder is None else with_field(data, holder, edit)
    return before + label + behind[:at] + changed + behind[at + len(data) :]
