"""The dashboard: its page, and the stream that it shows.

The page is static and holds no data, so nobody needs a key for it; what it shows comes from `/admin/live`, which is
guarded as all of `/admin`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import mimetypes
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from moongate.gateway.admin.live import VIEWERS_MAX, LiveFeed, TooManyViewers
from moongate.gateway.errors import GatewayError

logger = logging.getLogger(__name__)

PAGE = Path(__file__).parent / "ui"

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
"""Nothing from elsewhere, nothing inline, and no text ever becomes markup or a program."""

PAGE_HEADERS: Mapping[str, str] = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # ask each time; the answer is mostly 304
}


def make_live_routes(feed: LiveFeed) -> APIRouter:
    """Return the routes of the dashboard."""
    router, files = APIRouter(), _read_files()

    @router.get("/ui", include_in_schema=False)
    async def page(request: Request) -> Response:
        return files["index.html"].answer(request)

    @router.get("/ui/{name}", include_in_schema=False)
    async def file(request: Request, name: str) -> Response:
        if name not in files:
            raise GatewayError(404, f"there is no file {name[:64]}", "not_found")
        return files[name].answer(request)

    @router.get("/admin/live")
    async def live() -> Response:
        """What the dashboard shows, as server-sent events: at first all, then what has changed."""
        frames = feed.watch()
        try:
            first = await anext(frames)
        except TooManyViewers as error:
            message = f"{VIEWERS_MAX} watch already"
            headers = {"retry-after": "30"}
            raise GatewayError(503, message, "too_many_viewers", headers=headers) from error
        return _LiveResponse(first, frames)

    return router


@dataclass(frozen=True, slots=True)
class _File:
    """A part of the page. `tag`: names its content."""

    content: bytes
    kind: str
    tag: str

    @classmethod
    def read(cls, path: Path) -> _File:
        content = path.read_bytes()
        kind, _ = mimetypes.guess_type(path.name)
        tag = f'"{hashlib.blake2s(content, digest_size=12).hexdigest()}"'
        return cls(content, kind or "application/octet-stream", tag)

    def answer(self, request: Request) -> Response:
        headers = {**PAGE_HEADERS, "etag": self.tag}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.kind)


def _read_files() -> dict[str, _File]:
    return {path.name: _File.read(path) for path in PAGE.iterdir() if path.is_file()}


class _LiveResponse(Response):
    """Frames, until the viewer leaves or the gateway stops.

    `send` waits while a viewer's connection takes no more; frames made meanwhile are not kept for it.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, frames: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        sending = asyncio.create_task(self._send_frames(send))
        leaving = asyncio.create_task(_until_left(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            ended, _ = await asyncio.gather(sending, leaving, return_exceptions=True)
            await self._frames.aclose()
        if isinstance(ended, Exception):
            logger.error("a bug of ours", exc_info=ended)

    async def _send_frames(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for frame in self._frames:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
