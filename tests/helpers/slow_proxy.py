"""A TCP proxy that takes its time, or passes nothing on."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self


class SlowProxy:
    """Passes bytes on `delay_s` late, as they came. Use it as an async context."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.delay_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with contextlib.suppress(OSError):
            there, here = await asyncio.open_connection("127.0.0.1", self._target)
            try:
                await asyncio.gather(self._pass(reader, here), self._pass(there, writer))
            finally:
                here.close()
        writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(65_536):
            if self.delay_s:
                loop.call_later(self.delay_s, self._write, writer, data)
            else:
                self._write(writer, data)
        writer.close()

    @staticmethod
    def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
        if not writer.is_closing():
            writer.write(data)
