"""Responses in the background: answered like any other, for a client that asks for them later.

The gateway computes them, so they need no store in the engine, can be repeated elsewhere until their first byte,
and are told by whichever route tells stored responses. Their client has an object with their id at once.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
import orjson

from moongate.gateway.body import Body
from moongate.gateway.client import Client, RawHeaders
from moongate.gateway.errors import GatewayError
from moongate.gateway.json_edits import read_top_level
from moongate.gateway.response_turns import ResponseTurn, ResponseTurns, no_items
from moongate.gateway.routes import Route

RUNNING_MAX = 1024
"""More are refused: nobody waits for them, so nothing else holds their number down."""

_ECHOED: Mapping[str, Any] = {
    "instructions": None, "metadata": None, "parallel_tool_calls": True,
    "previous_response_id": None, "temperature": None, "tool_choice": "auto", "tools": [],
    "top_p": None, "max_output_tokens": None, "truncation": "disabled", "user": None,
}  # fmt: skip
"""Fields of a request that its response repeats, with their defaults."""


class Collected:
    """A client that waits for nothing: takes an answer to its end."""

    def __init__(self, asked: Client, body: bytes) -> None:
        self.route: Route = asked.route
        self.method = asked.method
        self.target = asked.target
        self.headers: RawHeaders = asked.headers
        self.opened_at = asked.opened_at
        self.has_started = False
        self.disconnected = False
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None
        self.status = 0
        self.is_whole = False
        self._body = body
        self._pieces: list[bytes] = []

    @property
    def answer(self) -> bytes:
        return b"".join(self._pieces)

    def take_body(self) -> bytes:
        return self._body

    def start(self, status: int, headers: RawHeaders) -> None:
        self.status, self.has_started = status, True

    def write(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def finish(self, piece: bytes = b"") -> None:
        self._pieces.append(piece)
        self.is_whole = True

    def break_off(self) -> None:
        """Leave `is_whole` unset."""


class Background:
    """Runs responses. `answer` computes one to its end."""

    def __init__(
        self, turns: ResponseTurns, answer: Callable[[Collected], Awaitable[None]]
    ) -> None:
        self._turns = turns
        self._answer = answer
        self._running: dict[str, asyncio.Task[None]] = {}

    @staticmethod
    def takes(body: Body) -> bool:
        """Tell whether a body asks for this. Without a store it can't; the engine will say so."""
        return body.top.get("background") is True and body.top.get("store", True) is True

    def begin(self, client: Client, raw: bytes, body: Body) -> bytes:
        """Return the response as it is at first. `raw`: the body as the client sent it.

        Raises: GatewayError (400, 404, 503).
        """
        if body.is_stream:
            message = "stream: not with background; ask GET /v1/responses/{id} for it"
            raise GatewayError(400, message, "invalid_request", "stream")
        if len(self._running) >= RUNNING_MAX:
            message = "too many responses run in the background"
            raise GatewayError(503, message, "queue_full", headers={"retry-after": "1"})
        turn = self._turns.begin(body, client.route)
        if turn.own_items is None:
            raise no_items()
        response_id = f"resp_{secrets.token_hex(16)}"
        announced = _announced(response_id, body)
        self._put(turn, {**announced, "status": "in_progress"})
        collected = Collected(client, _in_foreground(raw, response_id))
        task = asyncio.create_task(self._run(response_id, collected, turn, announced))
        self._running[response_id] = task
        task.add_done_callback(lambda _: self._running.pop(response_id, None))
        return orjson.dumps(announced)

    def cancel(self, response_id: str) -> bytes:
        """End a response that is still computed; return it. Raises: GatewayError (400, 404)."""
        stored = self._turns.find(response_id, "response_id")
        task = self._running.pop(response_id, None)
        if task is None:
            message = "Cannot cancel a response that is complete, or not in the background."
            raise GatewayError(400, message, "invalid_request", "response_id")
        task.cancel()
        cancelled = {**orjson.loads(stored.response), "status": "cancelled"}
        return self._turns.put(cancelled, stored.input_items, stored.previous)

    async def close(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(
        self,
        response_id: str,
        collected: Collected,
        turn: ResponseTurn,
        announced: Mapping[str, Any],
    ) -> None:
        await self._answer(collected)
        answer = _read(collected.answer)
        if collected.is_whole and collected.status == 200 and "output" in answer:
            self._put(turn, {**answer, "id": response_id, "background": True})
            return
        error = answer.get("error")
        told = error.get("message") if isinstance(error, dict) else None
        message = told if isinstance(told, str) else "the engine broke its answer off"
        failure = {"code": "server_error", "message": message}
        self._put(turn, {**announced, "status": "failed", "error": failure})

    def _put(self, turn: ResponseTurn, response: Mapping[str, Any]) -> None:
        assert turn.own_items is not None
        self._turns.put(response, turn.own_items, turn.previous)


def _announced(response_id: str, body: Body) -> dict[str, Any]:
    """Return a response that has not begun."""
    fields = body.fields
    echoed = {
        name: default if fields.get(name) is None else fields[name]
        for name, default in _ECHOED.items()
    }
    return {
        "id": response_id, "object": "response", "created_at": int(time.time()),
        "status": "queued", "background": True, "model": body.model, "output": [], "error": None,
        "incomplete_details": None, "usage": None, **echoed,
    }  # fmt: skip


def _in_foreground(raw: bytes, response_id: str) -> bytes:
    """Return a body that an engine answers at once, by this id. It was read strictly before."""
    fields = read_top_level(raw)
    fields.pop("background", None)
    return msgspec.json.encode(
        {**fields, "request_id": msgspec.Raw(msgspec.json.encode(response_id))}
    )


def _read(answer: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
