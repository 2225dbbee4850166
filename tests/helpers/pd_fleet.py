"""Simulated engines that prefill and decode for each other, behind a gateway."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from live_gateway import LiveGateway, live_gateway, until

from moongate.kvpool.memory import MemoryPool
from moongate.simulator.debugging import ReceivedRequest
from moongate.simulator.engine import EngineProfile
from moongate.simulator.server import SimEngine, SimEngineConfig
from moongate.simulator.transfer import Connector, Role

PROFILE = EngineProfile(
    blocks=1025,
    block_size_tokens=4,
    prefill_tokens_per_s=1e6,
    decode_tokens_per_s=1e4,
    max_model_len_tokens=2048,
    step_overhead_ms=0.1,
    kv_bytes_per_token=1,
)
SLOW_DECODE = dataclasses.replace(PROFILE, decode_tokens_per_s=20.0)
SLOW_PREFILL = dataclasses.replace(PROFILE, prefill_tokens_per_s=100.0)

PROMPT = list(range(10, 31))  # 21 tokens
Body = dict[str, Any]


@dataclass
class Fleet:
    """Engines by role, and the gateway before them: p0, p1, ..., d0, ..., b0, ..."""

    prefill: list[SimEngine]
    decode: list[SimEngine]
    both: list[SimEngine]
    gateway: LiveGateway

    @property
    def engines(self) -> list[SimEngine]:
        return [*self.prefill, *self.decode, *self.both]

    async def complete(self, headers: Any = None, **body: Any) -> Any:
        """Post a completion of `PROMPT`; fields of `body` replace the defaults."""
        fields = {"model": "m", "prompt": PROMPT, "max_tokens": 5, **body}
        return await self.gateway.client.post("/v1/completions", json=fields, headers=headers)

    async def handoffs(self, result: str) -> float:
        return await self.gateway.metric("moongate_pd_handoffs_total", result=result)

    def held(self) -> float:
        """Return the largest part of a prefill engine's memory that is held."""
        return max(usage(engine) for engine in self.prefill)

    async def until_idle(self, timeout_s: float = 5.0) -> None:
        """Return when nothing is held and nothing counted; the test fails if it doesn't in time."""
        await until(
            lambda: not any(usage(e) for e in self.engines) and self.gateway.inflight() == 0,
            timeout_s,
        )
        assert self.gateway.core.requests == {}
        await until(lambda: not adopted(self.gateway))


def usage(engine: SimEngine) -> float:
    """Return the part of an engine's memory that is in use, by requests or held for decoders."""
    return max(runner.model.pool.usage for runner in engine.runners.values())


def adopted(gateway: LiveGateway) -> set[asyncio.Task[None]]:
    """Return what goes on in the gateway without a client."""
    hot_path = gateway.server.gateway._hot_path
    assert hot_path is not None
    return hot_path._adopted


def params(leg: ReceivedRequest) -> Mapping[str, Any]:
    found: Mapping[str, Any] = leg.body["kv_transfer_params"]
    return found


def instance(name: str, engine: SimEngine, role: Role) -> dict[str, Any]:
    """Return the settings of an instance."""
    settings = {"id": name, "url": engine.url, "role": role.value}
    is_mooncake = engine._config.connector.is_mooncake
    if role is Role.PREFILL and is_mooncake:
        settings["bootstrap_url"] = engine.bootstrap_url or ""
    return settings


@contextlib.asynccontextmanager
async def running(engines: Sequence[SimEngine]) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
        yield


@contextlib.asynccontextmanager
async def pd_fleet(
    *,
    prefill: int = 1,
    decode: int = 1,
    both: int = 0,
    connector: Connector = Connector.MOONCAKE,
    store: MemoryPool | None = None,
    prefill_config: Mapping[str, Any] | None = None,
    decode_config: Mapping[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Fleet]:
    """Run that many engines of each role, and a gateway. `store`: the pool that they share."""
    common: dict[str, Any] = {"profile": PROFILE, "model": "m", "connector": connector}
    configs = {
        Role.PREFILL: (prefill, {**common, **(prefill_config or {})}),
        Role.DECODE: (decode, {**common, **(decode_config or {})}),
        Role.BOTH: (both, common),
    }
    engines = {
        role: [SimEngine(SimEngineConfig(role=role, **config), store) for _ in range(count)]
        for role, (count, config) in configs.items()
    }
    flat = [(role, n, engine) for role, some in engines.items() for n, engine in enumerate(some)]
    async with running([engine for _, _, engine in flat]):
        instances = [instance(f"{role.value[0]}{n}", engine, role) for role, n, engine in flat]
        merged = {"instances": instances, **settings}
        async with live_gateway([], memory_pool=store, **merged) as gateway:
            yield Fleet(engines[Role.PREFILL], engines[Role.DECODE], engines[Role.BOTH], gateway)
