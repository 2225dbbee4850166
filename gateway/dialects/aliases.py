"""Other names for models: clients ask for `models.aliases`, engines for what they serve.

The request is renamed before it is read, so that all behind it knows one name; the answer carries the name that
its client asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from moongate.gateway.dialects.body import Body, parse_body, with_fields, without_key
from moongate.gateway.dialects.json_edits import read_top_level, with_field, with_objects
from moongate.gateway.dialects.routes import PromptKind, Route

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
        return with_objects(events, HOLDERS.get(self.kind), "model", self.take_whole)

    def take_whole(self, answer: bytes) -> bytes:
        """Return a whole answer, or an object, with the name that was asked for."""
        served, asked = msgspec.json.encode(self.served), msgspec.json.encode(self.asked)
        return with_field(answer, "model", lambda value: asked if value == served else value)


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
        fields = read_top_level(raw)
    except (msgspec.MsgspecError, RecursionError):
        # What only a lenient parser reads; it has more than a model, else it were no such thing.
        return b"".join(with_fields(without_key(raw, "model"), b'"model":' + value))
    return msgspec.json.encode({**fields, "model": msgspec.Raw(value)})
