"""A prefill instance's bootstrap server: which engine it is now.

Asked for each hand-off, beside its prefill, so that an engine that was started anew is known by its new
name at once; it costs 0.2 ms.

Source: vLLM 0.32 `kv_connector/v1/mooncake/mooncake_utils.py` `MooncakeBootstrapServer.query`.
"""

from __future__ import annotations

import aiohttp
import orjson

BODY_BYTES_MAX = 64 << 10
"""A rank with its workers' addresses is some 100 bytes."""


class BootstrapFailed(Exception):
    """The bootstrap server did not say which engine it is."""


class Bootstraps:
    """Asks bootstrap servers. Create it inside the event loop, and `close` it."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session = aiohttp.ClientSession(trust_env=False)

    async def engine_id(self, url: str, rank: int | None) -> str:
        """Return the id of the engine behind a server: of this data-parallel rank, or of its only one.

        Raises: BootstrapFailed.
        """
        try:
            async with self._session.get(
                f"{url}/query", timeout=self._timeout, allow_redirects=False
            ) as answer:
                body = await _read_body(answer)
        except TimeoutError as error:
            raise BootstrapFailed(f"{url}: no answer in time") from error
        except aiohttp.ClientError as error:
            raise BootstrapFailed(f"{url}: {error}") from error
        if answer.status != 200:
            raise BootstrapFailed(f"{url}/query: status {answer.status}")
        if len(body) > BODY_BYTES_MAX:
            raise BootstrapFailed(f"{url}/query: more than {BODY_BYTES_MAX} bytes")
        return read_engine_id(url, body, rank)

    async def close(self) -> None:
        await self._session.close()


async def _read_body(answer: aiohttp.ClientResponse) -> bytes:
    """Return the body, of one that is too long no more than shows that it is."""
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > BODY_BYTES_MAX:
            break
    return bytes(body)


def read_engine_id(url: str, body: bytes, rank: int | None) -> str:
    """Raises: BootstrapFailed."""
    try:
        workers = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BootstrapFailed(f"{url}/query: the answer is not JSON") from error
    if not isinstance(workers, dict):
        raise BootstrapFailed(f"{url}/query: the answer is not an object")
    if rank is None and len(workers) > 1:
        # The engine chose one by itself, and the decode side would wait at another for nothing.
        named = ", ".join(workers)
        raise BootstrapFailed(f"{url}/query: several ranks ({named}): name them, ranks: [{named}]")
    entry = next(iter(workers.values()), None) if rank is None else workers.get(str(rank))
    engine_id = entry.get("engine_id") if isinstance(entry, dict) else None
    if not isinstance(engine_id, str) or not engine_id:
        which = "" if rank is None else f" for rank {rank}"
        raise BootstrapFailed(f"{url}/query: no engine_id{which}; has it registered?")
    return engine_id
