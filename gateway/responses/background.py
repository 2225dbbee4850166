"""Responses in the background: answered like any other, for a client that asks for them later.

The gateway computes them, so they need no store in the engine, can be repeated elsewhere until their first byte,
and are told by whichever route tells stored responses. Their client has an object with their id at once, or, where
it asked for a stream, the events as they come: they are kept, so it may leave and go on later where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from moongate.gateway.auth.tenants import NO_TENANT
from moongate.gateway.dialects.body import Body
from moongate.gateway.dialects.json_edits import read_top_level, with_field, with_objects
from moongate.gateway.dialects.sse import split_events
from moongate.gateway.errors import GatewayError, failed_event
from moongate.gateway.proxy.client import Client
from moongate.gateway.proxy.collected import Collected
from moongate.gateway.responses.response_sharing import SharedResponses
from moongate.gateway.responses.response_store import StoredResponse
from moongate.gateway.responses.response_turns import (
    RUNNING,
    ResponseTurn,
    ResponseTurns,
    no_items,
)

logger = logging.getLogger(__name__)

Name = tuple[str, str]
"""Names a response: whose it is, and its id."""

RUNNING_MAX = 1024
"""More are refused: nobody waits for them, so nothing else holds their number down. Of tenants no one has more
than half of them, nor of the room for what they have said so far."""

TENANT_SHARE = 0.5

POLL_S = 0.5
"""How often replicas look at what others say of a response."""

CANCEL_POLLS = 6

_STOPPED = {
    "code": "server_error",
    "message": "the gateway that computed it has stopped; ask again",
}

_ECHOED: Mapping[str, Any] = {
    "instructions": None, "metadata": None, "parallel_tool_calls": True,
    "previous_response_id": None, "temperature": None, "tool_choice": "auto", "tools": [],
    "top_p": None, "max_output_tokens": None, "truncation": "disabled", "user": None,
}  # fmt: skip
"""Fields of a request that its response repeats, with their defaults."""


@dataclass(slots=True)
class Run:
    """A response that is computed. `announced`: what it is before anything is known of it."""

    name: Name
    announced: dict[str, Any]
    turn: ResponseTurn
    collected: Collected
    is_stream: bool


class Background:
    """Runs responses. `answer` computes one to its end."""

    def __init__(
        self, turns: ResponseTurns, answer: Callable[[Collected], Awaitable[None]]
    ) -> None:
        self._turns = turns
        self._answer = answer
        self._running: dict[Name, tuple[Run, asyncio.Task[None]]] = {}
        self._informing: asyncio.Task[None] | None = None
        if turns.shared is not None:
            turns.shared.running = self._running.keys()

    @staticmethod
    def takes(body: Body) -> bool:
        """Tell whether a body asks for this. Without a store it can't; the engine will say so."""
        return body.top.get("background") is True and body.top.get("store", True) is True

    async def begin(self, client: Client, raw: bytes, body: Body) -> Run:
        """Begin a response. `raw`: the body as the client sent it. Raises: GatewayError (400, 404, 429, 503)."""
        if not self._turns.store.bytes_max:
            message = "background: not here, where no responses are kept"
            raise GatewayError(400, message, "invalid_request", "background")
        tenant = client.tenant.name
        turn = await self._turns.begin(tenant, body, client.route)
        if turn.own_items is None:
            raise no_items()
        self._check_room(tenant)  # nothing is waited for between this and taking the place
        response_id = f"resp_{secrets.token_hex(16)}"
        announced = _announced(response_id, body)
        foreground = _in_foreground(raw, response_id)
        name = tenant, response_id
        collected = Collected(
            client, foreground, is_stream=body.is_stream, bytes_max=self._turns.store.bytes_max,
            on_excess=functools.partial(self._exceeded, name), edit=_in_background,
        )  # fmt: skip
        run = Run(name, announced, turn, collected, body.is_stream)
        try:
            self._put(run, {**announced, "status": "in_progress"})
        except orjson.JSONEncodeError as error:
            message = "the body is nested too deeply to be answered in the background"
            raise GatewayError(400, message, "invalid_request") from error
        task = asyncio.create_task(self._run(run))
        self._running[name] = run, task
        task.add_done_callback(lambda _: self._running.pop(name, None))
        self._keep_others_informed()
        return run

    def _check_room(self, tenant: str) -> None:
        """Raises: GatewayError (503: there is none; 429: the rest is for other tenants)."""
        running = [run for run, _ in self._running.values()]
        if self._are_too_many(running, share=1.0):
            message = "too many responses run in the background"
            raise GatewayError(503, message, "queue_full", headers={"retry-after": "1"})
        own = [run for run in running if run.name[0] == tenant]
        if tenant != NO_TENANT and self._are_too_many(own, share=TENANT_SHARE):
            message = "too many of this key's tenant's responses run in the background"
            raise GatewayError(429, message, "queue_full", headers={"retry-after": "1"})

    def _are_too_many(self, runs: Sequence[Run], share: float) -> bool:
        """Tell whether these leave no room for one more, of this share of all that there is."""
        held_bytes = sum(run.collected.size_bytes for run in runs)
        return len(runs) >= RUNNING_MAX * share or held_bytes > self._turns.store.bytes_max * share

    async def cancel(self, name: Name) -> bytes:
        """End a response that is still computed; return it. Raises: GatewayError (400, 404)."""
        stored = await self._turns.find(*name, "response_id")
        if name in self._running and stored.is_running:
            return self._cancel(name, stored)
        if stored.is_running and self._turns.shared is not None:
            await self._turns.shared.ask_to_cancel(*name)
            for _ in range(CANCEL_POLLS):
                await asyncio.sleep(POLL_S)
                stored = await self._turns.find(*name, "response_id")
                if not stored.is_running:
                    return stored.response
            message = "the replica that computes it does not answer"
            raise GatewayError(503, message, "replica_unreachable", headers={"retry-after": "1"})
        message = "Cannot cancel a response that is complete, or not in the background."
        raise GatewayError(400, message, "invalid_request", "response_id")

    def _cancel(self, name: Name, stored: StoredResponse) -> bytes:
        run = self._break_off(name)
        cancelled = {**orjson.loads(stored.response), "status": "cancelled"}
        if run.is_stream:
            run.collected.end_with(failed_event(cancelled, len(run.collected.events)))
        return self._put(run, cancelled)

    def _exceeded(self, name: Name, message: str) -> None:
        """End a response of which there is more than is kept: it fails."""
        if name not in self._running:
            return
        run = self._break_off(name)
        failed = _failed(run, message)
        if run.is_stream:
            run.collected.end_with(failed_event(failed, len(run.collected.events)))
        self._put(run, failed)

    async def delete(self, name: Name) -> None:
        """Forget a response; what still computes it ends. Raises: GatewayError (404, 503)."""
        stored = await self._turns.find(*name, "response_id")
        if name in self._running:
            self._drop(name)
        elif stored.is_running and self._turns.shared is not None:
            await self._turns.shared.ask_to_cancel(*name)
        self._turns.forget(*name)

    def _drop(self, name: Name) -> None:
        """End a response of which nothing is to be kept."""
        if name in self._running:
            self._break_off(name).collected.break_off()

    def _break_off(self, name: Name) -> Run:
        """End what computes a response: its client wants no more, and pays for what there is."""
        run, task = self._running.pop(name)
        run.collected.disconnected = True
        task.cancel()
        return run

    def forget(self, run: Run) -> None:
        """End a response of which nobody was told."""
        self._drop(run.name)
        self._turns.forget(*run.name)

    async def follow(self, name: Name, starting_after: int | None) -> AsyncIterator[bytes]:
        """Return a response's events behind the one of this number, those to come included.

        Raises: GatewayError (400: it has none, since its client didn't ask for a stream; 404).
        """
        stored = await self._turns.find(*name, "response_id")
        seen = 0 if starting_after is None else starting_after + 1
        run, _ = self._running.get(name, (None, None))
        if run is not None and run.is_stream:
            return run.collected.follow(seen)
        if run is None and stored.is_running and stored.is_stream:
            return self._follow_elsewhere(name, seen)
        if not stored.events:
            message = "stream: only for a response that was asked for with background and stream"
            raise GatewayError(400, message, "invalid_request", "stream")
        return _told(split_events(stored.events)[0][seen:])

    async def _follow_elsewhere(self, name: Name, seen: int) -> AsyncIterator[bytes]:
        """Iterate over the events of a response that another replica computes, once it has."""
        try:
            while (stored := await self._turns.find(*name, "response_id")).is_running:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
        except GatewayError as error:  # it was deleted, or can't be asked for any more
            failure = {"code": error.code, "message": error.message}
            yield failed_event({"id": name[1], "status": "failed", "error": failure}, seen)
            return
        async for event in _told(split_events(stored.events)[0][seen:]):
            yield event

    def _keep_others_informed(self) -> None:
        """See to it that other replicas know that responses are computed here, as long as there are any."""
        if self._turns.shared is not None and (self._informing is None or self._informing.done()):
            self._informing = asyncio.create_task(self._inform(self._turns.shared))

    async def _inform(self, shared: SharedResponses) -> None:
        while self._running:
            for name in await shared.renew():
                await self._heed(name)
            await asyncio.sleep(POLL_S)

    async def _heed(self, name: Name) -> None:
        """Another replica wants a response ended, or thought that this one was gone."""
        try:
            stored = await self._turns.find(*name, "response_id")
        except GatewayError as error:
            if error.status == 404:
                self._drop(name)
            return
        if name not in self._running:
            return
        if not stored.is_running:
            self._drop(name)  # it has an end already, by which others have gone on
        elif self._turns.shared is not None and self._turns.shared.take_cancel(name):
            self._cancel(name, stored)

    async def drain(self, limit_s: float) -> None:
        """Let what runs come to its end; what has none after so long has failed. A cancellation ends the waiting."""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    while self._running:  # and what is begun meanwhile
                        await asyncio.wait([task for _, task in self._running.values()])
        finally:
            await self._cut()

    async def close(self) -> None:
        await self._cut()
        if self._informing is not None:
            self._informing.cancel()
            await asyncio.gather(self._informing, return_exceptions=True)

    async def _cut(self) -> None:
        """End what still runs, and tell of it that it has failed."""
        tasks = [
            self._fail(name) for name, (_, task) in [*self._running.items()] if not task.done()
        ]
        if tasks:
            logger.warning(
                "%d responses in the background end, since the gateway stops", len(tasks)
            )
        await asyncio.gather(*tasks, return_exceptions=True)

    def _fail(self, name: Name) -> asyncio.Task[None]:
        """End a response that the gateway has no time for, and tell so; return what computed it."""
        run, task = self._running.pop(name)
        failed = {**run.announced, "status": "failed", "error": _STOPPED}
        collected = run.collected
        if run.is_stream and collected.status == 200:
            collected.finish(failed_event(failed, len(collected.events)))
        self._put(run, failed)
        task.cancel()
        return task

    async def _run(self, run: Run) -> None:
        collected = run.collected
        try:
            await self._answer(collected)
        finally:
            collected.break_off()  # nobody waits for more
        if run.name not in self._running:
            return  # it was ended meanwhile
        events = collected.events if run.is_stream else []
        answer = _read(_last_response(events) if events else collected.answer)
        if collected.is_whole and collected.status == 200 and "output" in answer:
            self._put(run, {**answer, "id": run.name[1], "background": True})
            return
        error = answer.get("error")
        told = error.get("message") if isinstance(error, dict) else None
        message = told if isinstance(told, str) else "the engine broke its answer off"
        self._put(run, _failed(run, message))

    def _put(self, run: Run, response: Mapping[str, Any]) -> bytes:
        turn, is_stream = run.turn, run.is_stream
        assert turn.own_items is not None
        is_over = response["status"] not in RUNNING
        events = run.collected.events if is_over else []
        if run.collected.size_bytes > self._turns.store.bytes_max:
            events = events[-1:]  # with all of them it would not be kept
        return self._turns.put(
            turn.tenant,
            response,
            turn.own_items,
            turn.previous,
            b"".join(events),
            is_stream=is_stream,
        )


def _failed(run: Run, message: str) -> dict[str, Any]:
    failure = {"code": "server_error", "message": message}
    return {**run.announced, "status": "failed", "error": failure}


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


def _in_background(event: bytes) -> bytes:
    """Return an event whose response says how its client asked for it: the engine was not told."""
    return with_objects(
        event,
        "response",
        "background",
        lambda response: with_field(response, "background", lambda _: b"true"),
    )


def _last_response(events: Sequence[bytes]) -> bytes:
    """Return the response object of a stream's last event that has one, empty if none of the last has."""
    for event in reversed(events[-2:]):  # an end mark may follow
        try:
            return bytes(read_top_level(event.partition(b"data:")[2].strip())["response"])
        except (msgspec.MsgspecError, KeyError, RecursionError):
            continue
    return b""


async def _told(events: Sequence[bytes]) -> AsyncIterator[bytes]:
    for event in events:
        yield event


def _read(answer: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
