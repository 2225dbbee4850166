"""Other names for models: clients ask for `models.aliases`, engines for what they serve.

The request is renamed before it is read, so that all behind it knows one name; the answer carries the name that
its client asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from moongate.gateway.body import Body, parse_body, with_fields, without_key
from moongate.gateway.routes import PromptKind, Route
from moongate.gateway.sse import split_events

_Fields = dict[str, msgspec.Raw]
_read_top_level = msgspec.json.Decoder(_Fields).decode

HOLDERS: Mapping[PromptKind, str] = {
    PromptKind.RESPONSES: "response",
    PromptKind.MESSAGES: "message",
}
"""In which field of an event the object is that names the model; in others the event itself does."""


@dataclass(frozen=True, slots=True)
class Renaming:
    """One request's: `asked` by its client, `served` by engines."""

    asked: str
    served: str
    kind: PromptKind

    def take_events(self, events: bytes) -> bytes:
        """Return whole events with the name that was asked for."""
        if b'"model"' not in events:
            return events
        whole, rest = split_events(events)
        return b"".join([self._event(event) for event in whole] + [rest])

    def take_whole(self, answer: bytes) -> bytes:
        """Return a whole answer with the name that was asked for."""
        return self._renamed(answer)

    def _event(self, event: bytes) -> bytes:
        before, mark, behind = event.partition(b"data:")
        text = behind.strip()
        if b'"model"' not in text or not text.startswith(b"{"):
            return event
        at = behind.index(text)
        changed = self._in_event(text)
        return before + mark + behind[:at] + changed + behind[at + len(text) :]

    def _in_event(self, text: bytes) -> bytes:
        holder = HOLDERS.get(self.kind)
        if holder is None:
            return self._renamed(text)
        return _edited(text, holder, self._renamed)

    def _renamed(self, text: bytes) -> bytes:
        """Return an object with its model's name, if that is the one served."""
        served, asked = msgspec.json.encode(self.served), msgspec.json.encode(self.asked)
        return _edited(text, "model", lambda value: asked if value == served else value)


class Aliases:
    """The names of `models.aliases`."""

    def __init__(self, served_by_alias: Mapping[str, str]) -> None:
        self.served_by_alias = served_by_alias

    def resolve(self, body: Body, route: Route) -> tuple[Body, Renaming | None]:
        """Return the body as engines know it, and what to do with the answer."""
        asked = body.model
        served = self.served_by_alias.get(asked) if asked is not None else None
        if asked is None or served is None:
            return body, None
        return parse_body(_with_model(body.raw, served), route), Renaming(asked, served, route.kind)


def _with_model(raw: bytes, name: str) -> bytes:
    value = msgspec.json.encode(name)
    try:
        fields = _read_top_level(raw)
    except (msgspec.MsgspecError, RecursionError):
        # What only a lenient parser reads; it has more than a model, else it were no such thing.
        return b"".join(with_fields(without_key(raw, "model"), b'"model":' + value))
    return msgspec.json.encode({**fields, "model": msgspec.Raw(value)})


def _edited(text: bytes, name: str, edit: Callable[[bytes], bytes]) -> bytes:
    """Return a JSON object's text with one field edited; one that can't be read stays as it is."""
    try:
        fields = _read_top_level(text)
    except (msgspec.MsgspecError, RecursionError):
        return text
    if name not in fields:
        return text
    old = bytes(fields[name])
    new = edit(old)
    return text if new == old else msgspec.json.encode({**fields, name: msgspec.Raw(new)})
