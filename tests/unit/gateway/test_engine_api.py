"""Calls to an engine beside its requests: what can come out of them."""

from __future__ import annotations

import httpx
import pytest

from moongate.gateway.instances.engine_api import EngineApi, EngineCallFailed


@pytest.mark.asyncio
async def test_an_engine_that_is_reset_as_it_connects_is_gone() -> None:
    """On uvloop anyio then asks for the peer of a socket that it hasn't any more."""

    def reset(_: httpx.Request) -> httpx.Response:
        raise AttributeError("'NoneType' object has no attribute 'getpeername'")

    api = EngineApi("http://engine:1", timeout_s=1.0, transport=httpx.MockTransport(reset))
    with pytest.raises(EngineCallFailed, match=r"http://engine:1/health: .*getpeername") as failed:
        await api.check_health()
    assert failed.value.is_gone
    await api.close()
