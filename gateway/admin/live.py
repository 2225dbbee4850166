"""The live view as a stream of server-sent events, made once for all who watch.

Theory of operation. While somebody watches, a task makes the view's parts every `TICK_S`, encodes those that have
changed into one frame, and wakes the viewers; while nobody does there is no task. A viewer's first frame has all
parts. So has the next frame of one that is behind: a viewer that takes a frame slowly misses those made meanwhile,
and nothing is kept for it but the latest. However many requests a second there are, a frame is bounded by what the
view shows; if frames take long to make, they are made less often (`SHARE_MAX`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Protocol

import orjson

logger = logging.getLogger(__name__)

TICK_S = 0.5
SHARE_MAX = 0.05
"""Of the time at most this much goes into making frames."""

VIEWERS_MAX = 64
"""Past it another viewer is refused."""


class TooManyViewers(Exception):
    """`VIEWERS_MAX` are there already."""


class Viewed(Protocol):
    """What frames are made of: `LiveView`."""

    def parts(self) -> Mapping[str, Any]: ...

    def now_s(self) -> float: ...


class LiveFeed:
    """Frames for viewers. All streams end, after one more frame, once `is_stopping` says so."""

    def __init__(
        self, view: Viewed, is_stopping: Callable[[], bool], *, tick_s: float = TICK_S
    ) -> None:
        self._view = view
        self._tick_s = tick_s
        self._is_stopping = is_stopping
        self._viewers = 0
        self._task: asyncio.Task[None] | None = None
        self._parts: dict[str, bytes] = {}  # as last encoded
        self._number = 0  # of the latest frame
        self._changes = b""  # the latest frame, for viewers that have the one before
        self._whole: bytes | None = None  # the same with all parts, made when somebody needs it
        self._now_s = 0.0
        self._next: asyncio.Future[None] | None = None
        self._has_ended = False

    @property
    def viewers(self) -> int:
        return self._viewers

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Yield frames until the gateway stops. Raises: TooManyViewers."""
        if self._viewers >= VIEWERS_MAX:
            raise TooManyViewers
        self._viewers += 1
        try:
            if self._task is None and not self._has_ended:
                self._make()
                self._task = asyncio.create_task(self._keep_making())
            seen = 0
            while True:
                if seen != self._number:
                    frame = (
                        self._changes if seen == self._number - 1 and seen else self._get_whole()
                    )
                    seen = self._number
                    yield frame
                elif self._has_ended:
                    break
                else:
                    await self._next_frame()
        finally:
            self._viewers -= 1
            if not self._viewers:
                await self._stop()

    async def _stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _next_frame(self) -> None:
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._next)

    def _wake(self) -> None:
        if self._next is not None and not self._next.done():
            self._next.set_result(None)
        self._next = None

    async def _keep_making(self) -> None:
        loop, took_s = asyncio.get_running_loop(), 0.0
        while not self._has_ended:
            await asyncio.sleep(max(self._tick_s, took_s / SHARE_MAX))
            # Streams that went on would keep the server from ending.
            self._has_ended = self._is_stopping()
            began = loop.time()
            try:
                self._make()
            except Exception:
                # A bug of ours; a stream that stands still would look like a gateway that does.
                logger.exception("the live view could not be made")
                self._wake()
            took_s = loop.time() - began

    def _make(self) -> None:
        """Make the next frame and wake the viewers."""
        parts = {name: orjson.dumps(part) for name, part in self._view.parts().items()}
        changed = {name: part for name, part in parts.items() if self._parts.get(name) != part}
        self._parts, self._now_s = parts, self._view.now_s()
        self._number += 1
        self._changes, self._whole = self._frame(changed, is_whole=False), None
        self._wake()

    def _get_whole(self) -> bytes:
        if self._whole is None:
            self._whole = self._frame(self._parts, is_whole=True)
        return self._whole

    def _frame(self, parts: Mapping[str, bytes], *, is_whole: bool) -> bytes:
        fields: dict[str, Any] = {
            "now_s": self._now_s,
            "is_whole": is_whole,
            "parts": {name: orjson.Fragment(part) for name, part in parts.items()},
        }
        return b"event: frame\ndata: " + orjson.dumps(fields) + b"\n\n"
