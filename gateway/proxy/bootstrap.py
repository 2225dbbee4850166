"""A prefill instance's bootstrap server: which engine it is now.

Asked for each hand-off, beside its prefill, so that an engine that was started anew is known by its new
name at once; it costs 0.2 ms.

Source: vLLM 0.32 `kv_connector/v1/mooncake/mooncake_utils.py` `MooncakeBootstrapServer.query`.
"""

from __future__ import annotations

import orjson

from moongate.kvpool.mooncake_http import GetFailed, get_body, open_session

BODY_BYTES_MAX = 64 << 10
"""A rank with its workers' addresses is some 100 bytes."""


class BootstrapFailed(Exception):
    """The bootstrap server did not say which engine it is."""


class Bootstraps:
    """Asks bootstrap servers. Create it inside the event loop, and `close` it."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._session = open_session()

    async def engine_id(self, url: str, rank: int | None) -> str:
        """Return the id of the engine behind a server: of this data-parallel rank, or of its only one.

        Raises: BootstrapFailed.
        """
        try:
            body = await get_body(
                self._session, url, "/query", timeout_s=self.timeout_s, bytes_max=BODY_BYTES_MAX
            )
        except GetFailed as error:
            raise BootstrapFailed(str(error)) from error
        return read_engine_id(url, body, rank)

    async def close(self) -> None:
        await self._session.close()


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
