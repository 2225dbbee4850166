"""The gateway's own calls to an engine: health, facts, tokenising. Not the requests it forwards.

Every failure comes out as `EngineCallFailed`; `is_gone` tells a refused or reset connection, which is
proof that nothing listens there, from silence, which is none.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Any

import httpx
import orjson

FACTS_S = 5.0
"""For what is asked of an engine about itself: not urgent, and `/metrics` can take a second."""


class EngineCallFailed(Exception):
    """A call got no usable answer."""

    def __init__(self, detail: str, *, is_gone: bool = False, status: int | None = None) -> None:
        super().__init__(detail)
        self.is_gone = is_gone
        self.status = status


class EngineApi:
    """One instance's side calls. `timeout_s` bounds each call as a whole."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        api_key: str | None = None,
        tls: ssl.SSLContext | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key is not None else {}
        self._timeout_s = timeout_s
        self._client = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            transport=transport,
            trust_env=False,
            verify=tls if tls is not None else True,
            # Few calls, seconds apart: a kept connection would mostly be one that has gone stale.
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    def reconfigure(self, *, timeout_s: float, api_key: str | None) -> None:
        """Let these hold for the calls that follow."""
        self._timeout_s = timeout_s
        self._client.headers.pop("authorization", None)
        if api_key is not None:
            self._client.headers["authorization"] = f"Bearer {api_key}"

    async def check_health(self) -> None:
        """Raises: EngineCallFailed unless the engine says that it is well."""
        await self._call("GET", "/health")

    async def get_json(self, path: str) -> object:
        """Raises: EngineCallFailed."""
        return _parse(path, (await self._call("GET", path, timeout_s=FACTS_S)).content)

    async def get_text(self, path: str) -> str:
        """Raises: EngineCallFailed."""
        return (await self._call("GET", path, timeout_s=FACTS_S)).text

    async def tokenize(self, body: Mapping[str, Any], timeout_s: float | None = None) -> list[int]:
        """Return the token ids of `/tokenize` for a prompt or messages. Raises: EngineCallFailed."""
        try:
            content = orjson.dumps(body)
        except orjson.JSONEncodeError as error:  # nested more deeply than it writes
            raise EngineCallFailed(f"/tokenize: {error}") from error
        value = await self.post_json("/tokenize", content, timeout_s)
        tokens = value.get("tokens") if isinstance(value, dict) else None
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise EngineCallFailed('/tokenize: expected a list of integers in "tokens"')
        return tokens

    async def post_json(self, path: str, content: bytes, timeout_s: float | None = None) -> object:
        """Return the answer to a JSON body. Raises: EngineCallFailed."""
        return _parse(path, (await self._call("POST", path, content, timeout_s)).content)

    async def close(self) -> None:
        await self._client.aclose()

    async def _call(
        self, method: str, path: str, content: bytes | None = None, timeout_s: float | None = None
    ) -> httpx.Response:
        headers = {"content-type": "application/json"} if content is not None else None
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            # The client's own time limit starts anew with each piece of the answer.
            async with asyncio.timeout(timeout_s):
                answer = await self._client.request(
                    method, path, content=content, headers=headers, timeout=timeout_s
                )
        except (TimeoutError, httpx.TimeoutException) as error:
            raise EngineCallFailed(f"{path}: no answer in time") from error
        except httpx.HTTPError as error:
            raise EngineCallFailed(self._detail(path, error), is_gone=_is_gone(error)) from error
        except AttributeError as error:
            # anyio, asked for the peer of a connection that was reset as it opened.
            raise EngineCallFailed(self._detail(path, error), is_gone=True) from error
        if answer.status_code != httpx.codes.OK:
            raise EngineCallFailed(
                f"{path}: status {answer.status_code}", status=answer.status_code
            )
        return answer

    def _detail(self, path: str, error: Exception) -> str:
        return f"{str(self._client.base_url).rstrip('/')}{path}: {error}"


def _is_gone(error: BaseException | None) -> bool:
    """Tell whether a refused or reset connection is behind the error.

    A name that does not resolve or a failed TLS handshake says nothing about the process.
    """
    while error is not None:
        if isinstance(error, ConnectionRefusedError | ConnectionResetError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _parse(path: str, content: bytes) -> object:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise EngineCallFailed(f"{path}: the answer is not JSON", status=httpx.codes.OK) from error
