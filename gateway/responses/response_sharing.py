"""Stored responses that replicas share: in Redis, beside what each keeps itself.

A response has a head (which contents its conversation is made of, in what state it is) and a content, which
never changes; so a replica that has the contents asks for the head only, and one that has not gets just
those that it lacks. While Redis doesn't answer each replica knows its own responses.

Keys: `moongate:response:TENANT:ID` (head), `...:ID:VERSION` (content), `...:ID:run` (a lease: somebody
computes it), `...:ID:cancel`. All of them expire.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec
import orjson
from redis.asyncio.client import Pipeline

from moongate.gateway.dialects.json_edits import read_top_level
from moongate.gateway.errors import failed_event
from moongate.gateway.replicas.shared_state import SharedState, StateRefused, StateUnavailable
from moongate.gateway.responses.response_store import ResponseStore, StoredResponse

logger = logging.getLogger(__name__)

LEASE_S = 10.0
"""A response in the background whose gateway says nothing of it for so long has failed."""

WAITING_BYTES_MAX = 134_217_728
"""What waits for Redis. Past it nothing more is written until it answers: each replica still has its own."""

MISS_RETRIES, MISS_RETRY_S = 3, 0.02
"""A response may be asked for just before the replica that answered has written it."""

WRITE_RETRY_S = 0.25
ID_CHARS_MAX = 256
CANCEL_S = 60


_Value = TypeVar("_Value")


class _Head(msgspec.Struct, array_like=True):
    line: list[tuple[str, str]]  # id and version of the contents, the latest first; empty: deleted
    is_running: bool
    is_stream: bool = False


class _Content(msgspec.Struct, array_like=True):
    input_items: bytes
    output_items: bytes
    response: bytes
    events: bytes


class _Write(NamedTuple):
    """Something that waits to be written."""

    commands: Callable[[Pipeline], object]
    size_bytes: int
    on_answers: Callable[[Sequence[object]], None] | None


_read_head = msgspec.msgpack.Decoder(_Head).decode
_read_content = msgspec.msgpack.Decoder(_Content).decode
_read_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_write = msgspec.msgpack.Encoder().encode


class SharedResponses:
    """`store` is this replica's own. `running`: tenants and ids of responses that this replica computes, as they
    are at any time. Create it inside the event loop.
    """

    def __init__(self, store: ResponseStore, state: SharedState, ttl_s: float) -> None:
        self._store = store
        self._state = state
        self._ttl_s = max(1, round(ttl_s))
        self._writes: asyncio.Queue[_Write] = asyncio.Queue()
        self._waiting_bytes = 0
        self._cancels: set[tuple[str, str]] = set()
        self._writing = asyncio.create_task(self._keep_writing())
        self.running: Collection[tuple[str, str]] = ()

    async def close(self) -> None:
        """Write what waits, if that goes quickly."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._writes.join()
        self._writing.cancel()
        await asyncio.gather(self._writing, return_exceptions=True)

    # --- reading ----------------------------------------------------------------------------------

    async def find(self, tenant: str, response_id: str, now: float) -> StoredResponse | None:
        """Return a tenant's response, whichever replica answered; None if none is known.

        Raises: StateUnavailable when it may be another's, which can't be asked for now.
        """
        own = self._store.find(tenant, response_id, now)
        if len(response_id) > ID_CHARS_MAX:
            return own
        try:
            return await self._find(tenant, response_id, own, now)
        except StateUnavailable:
            if own is not None:
                return own
        return await self._find(tenant, response_id, None, now)

    async def _find(
        self, tenant: str, response_id: str, own: StoredResponse | None, now: float
    ) -> StoredResponse | None:
        """Raises: StateUnavailable."""
        head = await self._find_head(tenant, response_id, retries=0 if own else MISS_RETRIES)
        if head is not None:
            return await self._take(tenant, response_id, own, head, now)
        if own is not None:
            self.put(own, is_lost=True)
        return own

    async def _find_head(self, tenant: str, response_id: str, retries: int) -> _Head | None:
        """Raises: StateUnavailable."""
        key = _key(tenant, response_id)
        for attempt in range(retries + 1):
            try:
                (value,) = await self._state.ask(lambda p: p.getex(key, ex=self._ttl_s))
            except StateRefused:  # something else has this name
                return None
            if value is not None:
                return _read(value, _read_head)
            if attempt < retries:
                await asyncio.sleep(MISS_RETRY_S)
        return None

    async def _take(
        self, tenant: str, response_id: str, own: StoredResponse | None, head: _Head, now: float
    ) -> StoredResponse | None:
        """Return the response that a head tells of. Raises: StateUnavailable."""
        if not head.line:
            self._store.remove(tenant, response_id)
            return None
        if own is not None and not own.is_running and head.is_running:
            self.put(own)  # the end of it, which Redis has missed
            return own
        found = own
        if own is None or own.version != head.line[0][1]:
            found = await self._load(tenant, head, now)
        else:
            self._touch_all(own, head)
        if found is None or not head.is_running or (tenant, response_id) in self.running:
            return found
        (runs,) = await self._state.ask(lambda p: p.exists(_key(tenant, response_id, "run")))
        # Leases that ran out while Redis was away say nothing.
        is_sure = now - self._state.up_since > LEASE_S
        return self._failed(found, now) if is_sure and not runs else found

    def _touch_all(self, own: StoredResponse, head: _Head) -> None:
        """Let what a response is made of live on in Redis, and put there what it has lost."""

        def write_lost(found: Sequence[object]) -> None:
            if not all(found):
                self.put(own, is_lost=True)

        self._later(lambda p: self._touch(p, own.tenant, head.line), on_answers=write_lost)

    async def _load(self, tenant: str, head: _Head, now: float) -> StoredResponse | None:
        """Return a response whose contents are here or there. Raises: StateUnavailable."""
        known = {one: self._own(tenant, one, now) for one in head.line}
        lacking = [one for one, own in known.items() if own is None]
        values = await self._state.tell(lambda p: self._get(p, tenant, head.line, lacking))
        read = dict(zip(lacking, values, strict=False))
        response: StoredResponse | None = None
        for name in reversed(head.line):
            own = known[name]
            if own is not None:
                response = own
                continue
            content = _read(read[name], _read_whole) if read[name] is not None else None
            if content is None:
                return None  # part of its conversation has expired
            response = StoredResponse(
                tenant, name[0], response, content.input_items, content.output_items,
                content.response, content.events, version=name[1],
            )  # fmt: skip
        assert response is not None
        response.is_running, response.is_stream = head.is_running, head.is_stream
        self._store.put(response, now)
        return response

    def _own(self, tenant: str, name: tuple[str, str], now: float) -> StoredResponse | None:
        own = self._store.find(tenant, name[0], now)
        return own if own is not None and own.version == name[1] else None

    def _get(
        self,
        pipeline: Pipeline,
        tenant: str,
        line: Iterable[tuple[str, str]],
        lacking: Iterable[tuple[str, str]],
    ) -> None:
        for name in lacking:
            pipeline.get(_key(tenant, *name))
        self._touch(pipeline, tenant, line)

    def _touch(self, pipeline: Pipeline, tenant: str, line: Iterable[tuple[str, str]]) -> None:
        for name in line:
            pipeline.expire(_key(tenant, *name), self._ttl_s)

    def _failed(self, response: StoredResponse, now: float) -> StoredResponse:
        """Note that whoever computed a response is gone."""
        failure = {"code": "server_error", "message": "the gateway that computed it is gone"}
        named = {"id": response.id, "object": "response"}
        told = {**named, **_object_of(response.response), "status": "failed", "error": failure}
        events = failed_event(told, 0) if response.is_stream else b""
        failed = StoredResponse(
            response.tenant, response.id, response.previous, response.input_items, b"",
            orjson.dumps(told), events, f"{response.version}-gone", response.is_stream,
        )  # fmt: skip
        self._store.put(failed, now)
        self.put(failed)
        return failed

    # --- writing ----------------------------------------------------------------------------------

    def put(self, response: StoredResponse, *, is_lost: bool = False) -> None:
        """Let the other replicas know a response, soon. `is_lost`: Redis had it, and those before it."""
        if response.is_running and is_lost and (response.tenant, response.id) not in self.running:
            return  # whoever computes it says so
        line = [*response.line()]
        written = line if is_lost else line[:1]
        names = [(one.id, one.version) for one in line]
        head = _Head(names, response.is_running, response.is_stream)

        def write(pipeline: Pipeline) -> None:
            tenant = response.tenant
            for one in written:
                content = _Content(one.input_items, one.output_items, one.response, one.events)
                pipeline.set(_key(tenant, one.id, one.version), _write(content), ex=self._ttl_s)
            pipeline.set(_key(tenant, response.id), _write(head), ex=self._ttl_s)
            if response.is_running:
                pipeline.set(_key(tenant, response.id, "run"), b"", px=round(LEASE_S * 1000))

        self._later(write, sum(one.size_bytes for one in written))

    def remove(self, tenant: str, response_id: str) -> None:
        """Let no replica know a response any more; what continues it keeps its content."""
        gone = _write(_Head([], is_running=False))
        self._later(lambda p: p.set(_key(tenant, response_id), gone, ex=self._ttl_s))

    # --- in the background ------------------------------------------------------------------------

    async def renew(self) -> Sequence[tuple[str, str]]:
        """Say which responses are still computed here; return those of which another replica has said
        that they are to end (see `take_cancel`), or may have thought that they were lost."""
        names = [*self.running]

        def renew(pipeline: Pipeline) -> None:
            for name in names:
                pipeline.getdel(_key(*name, "cancel"))
            for name in names:
                key = _key(*name, "run")
                pipeline.set(key, b"", px=round(LEASE_S * 1000), get=True)

        try:
            answers = await self._state.tell(renew) if names else []
        except StateUnavailable:
            return ()
        cancels, leases = answers[: len(names)], answers[len(names) :]
        self._cancels |= {one for one, found in zip(names, cancels, strict=False) if found}
        lapsed = {one for one, lease in zip(names, leases, strict=False) if lease is None}
        return [one for one in names if one in self._cancels or one in lapsed]

    def take_cancel(self, name: tuple[str, str]) -> bool:
        """Tell, once, whether another replica wants a response ended that is computed here."""
        is_wanted = name in self._cancels
        self._cancels.discard(name)
        return is_wanted

    async def ask_to_cancel(self, tenant: str, response_id: str) -> None:
        """Ask whichever replica computes a response to end it."""
        key = _key(tenant, response_id, "cancel")
        with contextlib.suppress(StateUnavailable):
            await self._state.ask(lambda p: p.set(key, b"1", ex=CANCEL_S))

    # --- the queue --------------------------------------------------------------------------------

    def _later(
        self,
        commands: Callable[[Pipeline], object],
        size_bytes: int = 256,
        on_answers: Callable[[Sequence[object]], None] | None = None,
    ) -> None:
        if self._waiting_bytes + size_bytes <= WAITING_BYTES_MAX:
            self._waiting_bytes += size_bytes
            self._writes.put_nowait(_Write(commands, size_bytes, on_answers))

    async def _keep_writing(self) -> None:
        while True:
            waiting = await self._writes.get()
            try:
                await self._write(waiting)
            except Exception:
                logger.exception("a bug of ours")
            finally:
                self._waiting_bytes -= waiting.size_bytes
                self._writes.task_done()

    async def _write(self, waiting: _Write) -> None:
        """Write, if need be once Redis is back: in this order, and none is left out."""
        while True:
            try:
                answers = await self._state.tell(waiting.commands)
            except StateRefused:
                return  # this replica has it
            except StateUnavailable:
                await asyncio.sleep(WRITE_RETRY_S)
            else:
                if waiting.on_answers is not None:
                    waiting.on_answers(answers)
                return


def _key(tenant: str, response_id: str, part: str = "") -> str:
    """Return a key. Names are quoted: an id with a colon in it is no part of another's."""
    names = (tenant, response_id, part) if part else (tenant, response_id)
    return "moongate:response:" + ":".join(quote(name, safe="") for name in names)


def _read_whole(value: bytes) -> _Content:
    """Return a content of which every part can be used. Raises: msgspec.DecodeError, RecursionError."""
    content = _read_content(value)
    for items in (content.input_items, content.output_items):
        _read_list(b"[" + items + b"]")
    read_top_level(content.response)
    return content


def _object_of(response: bytes) -> dict[str, Any]:
    """Return a response as it was told, empty if it can only be passed on."""
    try:
        told = orjson.loads(response)
    except orjson.JSONDecodeError:
        return {}
    return told if isinstance(told, dict) else {}


def _read(value: bytes, read: Callable[[bytes], _Value]) -> _Value | None:
    try:
        return read(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        logger.warning("a value in Redis isn't one of ours")
        return None
