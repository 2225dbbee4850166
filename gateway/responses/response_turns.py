"""Responses that continue others, on any instance: the gateway keeps them, engines need not.

A request with `previous_response_id` becomes one with the whole conversation as its input before it is
routed, so it is an ordinary turn with a long known prefix. Answers are read in passing, and kept before the
client can see their end. See decision 15.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import orjson

from moongate.gateway.dialects.body import Body, parse_body
from moongate.gateway.dialects.json_edits import read_top_level, with_field, with_objects
from moongate.gateway.dialects.routes import Route
from moongate.gateway.errors import GatewayError
from moongate.gateway.replicas.shared_state import StateUnavailable
from moongate.gateway.responses.response_sharing import SharedResponses
from moongate.gateway.responses.response_store import ResponseStore, StoredResponse

RUNNING = ("queued", "in_progress")
"""States of a response that isn't complete."""

_FINAL = re.compile(
    rb"^event: ?response\.(?:completed|incomplete|failed)\r?\ndata: ?(.*)$", re.MULTILINE
)


class ResponseTurns:
    """Begins turns, and keeps what became of them. `shared`: with other replicas, if there are any."""

    def __init__(
        self,
        store: ResponseStore,
        clock: Callable[[], float],
        shared: SharedResponses | None = None,
        *,
        body_bytes_max: int,
    ) -> None:
        """`body_bytes_max`: of a body with all that it continues."""
        self.body_bytes_max = body_bytes_max
        self.store = store
        self.shared = shared
        self._clock = clock

    async def begin(self, tenant: str, body: Body, route: Route) -> ResponseTurn:
        """Return the turn that a tenant's body asks for.

        Raises: GatewayError (404) for a response that isn't known, has expired or is another tenant's; 413 for a
        conversation that has become too large.
        """
        previous_id = body.top.get("previous_response_id")
        keeps = body.top.get("store", True) is True
        if body.top.get("background") is True and not isinstance(previous_id, str | None):
            message = "previous_response_id: expected a text"
            raise GatewayError(400, message, "invalid_request", "previous_response_id")
        if not isinstance(previous_id, str):
            # Of another type the engine says better what is wrong.
            items = _own_items(body) if keeps and previous_id is None else None
            return ResponseTurn(self, tenant, body, items, None)
        previous = await self.find(tenant, previous_id, "previous_response_id")
        if previous.is_running:
            message = f"Response with id {previous_id[:200]!r} is still in progress."
            raise GatewayError(400, message, "invalid_request", "previous_response_id")
        items = _own_items(body)
        if items is None:
            raise no_items()
        size_bytes = len(body.raw) + previous.history_bytes()
        if size_bytes > self.body_bytes_max:
            message = (
                f"the body and the conversation that it continues have {size_bytes} bytes together; "
                f"limits.body_bytes_max is {self.body_bytes_max}"
            )
            raise GatewayError(413, message, "body_too_large", "previous_response_id")
        raw = _with_input(body.raw, [previous.history(), items])
        joined = parse_body(raw, route)
        return ResponseTurn(self, tenant, joined, items if keeps else None, previous)

    async def find(self, tenant: str, response_id: str, param: str) -> StoredResponse:
        """Return a tenant's stored response. Raises: GatewayError (404, 503)."""
        now = self._clock()
        if self.shared is None:
            found = self.store.find(tenant, response_id, now)
        else:
            try:
                found = await self.shared.find(tenant, response_id, now)
            except StateUnavailable as error:
                message = "it can't be asked now which responses other replicas have"
                raise GatewayError(
                    503, message, "state_unavailable", param, {"retry-after": "1"}
                ) from error
        if found is None:
            message = f"Response with id {response_id[:200]!r} not found."
            raise GatewayError(404, message, "response_not_found", param)
        return found

    def keep(
        self, tenant: str, response: bytes, input_items: bytes, previous: StoredResponse | None
    ) -> None:
        """Keep an answer, if it is a response."""
        read = _read_response(response)
        if read is None:
            return
        self._put(
            StoredResponse(
                tenant, read.id, previous, input_items, read.output_items, response,
                version=_version(),
            )
        )  # fmt: skip

    def put(
        self,
        tenant: str,
        response: Mapping[str, Any],
        input_items: bytes,
        previous: StoredResponse | None,
        events: bytes = b"",
        *,
        is_stream: bool = False,
    ) -> bytes:
        """Keep a response of the gateway's own making; return it as its client gets it.

        Raises: orjson.JSONEncodeError if it is nested too deeply.

        `events`: those that told it, for clients that ask for them again.
        """
        text = orjson.dumps(response)
        output = orjson.dumps(response["output"])[1:-1]
        is_running = response["status"] in RUNNING
        name = response["id"]
        self._put(
            StoredResponse(
                tenant, name, previous, input_items, output, text, events, _version(),
                is_stream, is_running,
            )
        )  # fmt: skip
        return text

    def _put(self, response: StoredResponse) -> None:
        self.store.put(response, self._clock())
        if self.shared is not None and self.store.bytes_max:
            self.shared.put(response)

    def forget(self, tenant: str, response_id: str) -> None:
        """Forget a response; those that continue it stay whole."""
        self.store.remove(tenant, response_id)
        if self.shared is not None:
            self.shared.remove(tenant, response_id)


class ResponseTurn:
    """One turn: `body` is what engines get; its answer passes through here."""

    def __init__(
        self,
        turns: ResponseTurns,
        tenant: str,
        body: Body,
        own_items: bytes | None,
        previous: StoredResponse | None,
    ) -> None:
        """`own_items`: what this turn adds to the conversation. None: its answer isn't kept."""
        self.tenant = tenant
        self.body = body
        self.own_items = own_items
        self.previous = previous
        self._turns = turns

    @property
    def is_plain(self) -> bool:
        """Tell whether its answer passes as it is, and isn't kept."""
        return self.own_items is None and self.previous is None

    def take_events(self, events: bytes) -> bytes:
        """Return whole events as the client gets them; keep the response that they end with."""
        if self.previous is not None:
            events = with_objects(events, "response", "previous_response_id", self._with_previous)
        final = _FINAL.search(events) if b"event: response." in events else None
        if final is not None:
            self._keep_event(final[1])
        return events

    def take_whole(self, answer: bytes) -> bytes:
        """Return a whole answer as the client gets it, and keep it."""
        if self.previous is not None:
            answer = self._with_previous(answer)
        self._keep(answer)
        return answer

    def _with_previous(self, response: bytes) -> bytes:
        """Return a response object that says again which one it continues: the engine was not told."""
        assert self.previous is not None
        name = msgspec.json.encode(self.previous.id)
        return with_field(
            response, "previous_response_id", lambda old: name if old == b"null" else old
        )

    def _keep_event(self, data: bytes) -> None:
        try:
            response = bytes(read_top_level(data)["response"])
        except (msgspec.MsgspecError, KeyError, RecursionError):
            return
        self._keep(response)

    def _keep(self, response: bytes) -> None:
        if self.own_items is not None:
            self._turns.keep(self.tenant, response, self.own_items, self.previous)


def _version() -> str:
    return secrets.token_hex(4)


class _Read(NamedTuple):
    id: str
    output_items: bytes


def _read_response(response: bytes) -> _Read | None:
    """Return what has to be known of a complete response object. None: it is none."""
    try:
        fields = read_top_level(response)
        response_id = msgspec.json.decode(fields["id"], type=str)
        status = msgspec.json.decode(fields.get("status", msgspec.Raw(b"null")))
        output = _items_of(bytes(fields["output"]))
    except (msgspec.MsgspecError, KeyError, RecursionError):
        return None
    is_complete = response_id and output is not None and status not in RUNNING
    return _Read(response_id, output or b"") if is_complete else None


def no_items() -> GatewayError:
    """Return the refusal of an input that can't be joined to others."""
    message = "input: expected a text or a list of items, in strict JSON"
    return GatewayError(400, message, "invalid_request", "input")


def _own_items(body: Body) -> bytes | None:
    """Return the items of a body's input. None: it has none that can be read."""
    try:
        value = bytes(read_top_level(body.raw)["input"])
    except (msgspec.MsgspecError, KeyError, RecursionError):
        return None
    if value.startswith(b'"'):
        return b'{"role":"user","content":' + value + b"}"
    return _items_of(value)


def _items_of(value: bytes) -> bytes | None:
    """Return what is between the brackets of a JSON list, None for anything else."""
    is_list = value.startswith(b"[") and value.endswith(b"]")
    return value[1:-1].strip() if is_list else None


def _with_input(raw: bytes, parts: list[bytes]) -> bytes:
    """Return a body with these items as its input, and no response that it continues."""
    fields = read_top_level(raw)
    fields.pop("previous_response_id", None)
    items = b",".join([part for part in parts if part])
    fields["input"] = msgspec.Raw(b"[" + items + b"]")
    return msgspec.json.encode(fields)
