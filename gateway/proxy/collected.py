"""An answer that is taken to its end whoever waits for it, and told to those who do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from moongate.gateway.auth.tenants import Tenant
from moongate.gateway.dialects.json_edits import Edit
from moongate.gateway.dialects.routes import Route
from moongate.gateway.dialects.sse import EDITED_BYTES_MAX, EventCutter
from moongate.gateway.proxy.client import Client, RawHeaders


class Collected:
    """A client that waits for nothing. `edit`: of a stream, what is done to whole events before they are kept.

    Of an answer that is longer than `bytes_max`, or has an event that is too long to be changed, nothing more is
    kept; `on_excess` is called with what is too much.
    """

    def __init__(
        self,
        asked: Client,
        body: bytes,
        *,
        is_stream: bool,
        bytes_max: int,
        on_excess: Callable[[str], None],
        edit: Edit | None = None,
    ) -> None:
        self.route: Route = asked.route
        self.method = asked.method
        self.target = asked.target
        self.headers: RawHeaders = asked.headers
        self.tenant: Tenant = asked.tenant
        self.opened_at = asked.opened_at
        self.has_started = False
        self.disconnected = False
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None
        self.status = 0
        self.answer_headers: RawHeaders = ()
        self.is_over = False
        self.is_whole = False
        self.size_bytes = 0
        self._body = body
        self._edit = edit
        self._bytes_max = bytes_max
        self._on_excess = on_excess
        self._is_stream = is_stream
        self._pieces: list[bytes] = []  # of a stream its whole events
        self._cutter = EventCutter()  # of a stream: it holds the beginning of an event
        self._changed = asyncio.Event()

    @property
    def events(self) -> list[bytes]:
        """Return a stream's whole events so far; what is there stays as it is."""
        return self._pieces if self._is_stream else []

    @property
    def answer(self) -> bytes:
        return b"".join(self._pieces) + self._cutter.held

    # --- as a client ------------------------------------------------------------------------------

    def take_body(self) -> bytes:
        return self._body

    def start(self, status: int, headers: RawHeaders) -> None:
        self.status, self.answer_headers, self.has_started = status, headers, True
        self._wake()

    def write(self, piece: bytes) -> None:
        if self.is_over:
            return
        self.size_bytes += len(piece)
        if self._is_stream:
            self._take_events(self._cutter.feed(piece))
        elif piece:
            self._pieces.append(piece)
        if self.size_bytes > self._bytes_max:
            self._exceed(f"the answer is longer than {self._bytes_max} bytes")
        elif self._cutter.held_bytes > EDITED_BYTES_MAX:
            self._exceed(f"an event of the answer is longer than {EDITED_BYTES_MAX} bytes")
        self._wake()

    def _take_events(self, events: list[bytes]) -> None:
        self._pieces += map(self._edit, events) if self._edit is not None else events

    def _exceed(self, message: str) -> None:
        self._on_excess(message)
        self.break_off()

    def finish(self, piece: bytes = b"") -> None:
        self.write(piece)
        self.is_whole = not self.is_over or self.is_whole
        self.is_over = True
        self._wake()

    def end_with(self, event: bytes) -> None:
        """End a stream with this event; what was begun of another goes."""
        if not self.is_over:
            self._cutter = EventCutter()
            self._pieces.append(event)
            self.is_whole = self.is_over = True
            self._wake()

    def break_off(self) -> None:
        self.is_over = True
        self._wake()

    # --- for those who wait -----------------------------------------------------------------------

    async def begun(self) -> None:
        """Wait until there is a status, or there never will be one."""
        while not (self.has_started or self.is_over):
            await self._changed.wait()

    async def ended(self) -> None:
        """Wait until nothing more comes."""
        while not self.is_over:
            await self._changed.wait()

    async def follow(self, seen: int = 0) -> AsyncIterator[bytes]:
        """Iterate over the events behind the first `seen`, those to come included, several at once."""
        while True:
            events = self.events[seen:]
            if events:
                seen += len(events)
                yield b"".join(events)
            elif self.is_over:
                return
            else:
                await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def follow_into(collected: Collected, client: Client) -> None:
    """Answer a client with what is collected, as fast as it takes it. A cancellation ends only this."""
    can_write = asyncio.Event()
    can_write.set()
    client.start(collected.status, collected.answer_headers)
    client.on_pause, client.on_resume = can_write.clear, can_write.set
    try:
        async for events in collected.follow():
            client.write(events)
            await can_write.wait()
    finally:
        client.on_pause = client.on_resume = None
    if collected.is_whole:
        client.finish()
    else:
        client.break_off()
