"""A session that changes what it sent before is told why it computes it again."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from pd_fleet import pd_fleet

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

SYSTEM = {"role": "system", "content": "You are an agent that writes def and class. " * 30}
USER = {"role": "user", "content": "return the import of a lambda " * 30}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("look", "write")]


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"messages": [{**SYSTEM, "content": "At 10:31. " + SYSTEM["content"]}, USER]}, "system"),
        ({"messages": [SYSTEM, USER], "tools": TOOLS[::-1]}, "tools_order"),
        ({"messages": [SYSTEM, USER], "cache_salt": "x"}, "salt"),
    ],
)
async def test_it_is_counted_logged_and_explained(
    changed: dict[str, Any], cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    first: dict[str, Any] = {"messages": [SYSTEM, USER], "tools": TOOLS, "max_tokens": 2}
    headers = {"x-session-id": "one"}
    caplog.set_level(logging.INFO, "moongate.gateway.prompts.divergence")
    async with pd_fleet(prefill=0, decode=0, both=1) as fleet:
        gateway = fleet.gateway
        for _ in range(2):
            assert (await gateway.chat(headers=headers, **first)).status_code == 200
        assert await gateway.metric("moongate_prefix_divergences_total") == 0
        turn: dict[str, Any] = {"model": "m", "tools": TOOLS, "max_tokens": 2, **changed}
        dry = await gateway.client.post("/admin/explain", json=turn, headers=headers)
        told = dry.json()["divergence"]
        assert told["cause"] == cause
        assert await gateway.metric("moongate_prefix_divergences_total") == 0

        assert (await gateway.chat(headers=headers, **turn)).status_code == 200
        assert await gateway.metric("moongate_prefix_divergences_total", cause=cause) == 1
        lost = await gateway.metric("moongate_prefix_lost_tokens_total", cause=cause)
        assert lost == told["lost_tokens"] > 256
        (line,) = [record.getMessage() for record in caplog.records]
        assert f"cause '{cause}'" in line
        assert "agent" not in line + repr(told)

        same = await gateway.client.post("/admin/explain", json=turn, headers=headers)
        assert same.json()["divergence"] is None
        nobody = await gateway.client.post("/admin/explain", json=turn)
        assert nobody.json()["divergence"] is None


async def test_a_session_that_said_that_it_ended_is_not_compared_to_the_next_with_its_key() -> None:
    first: dict[str, Any] = {"messages": [SYSTEM, USER], "max_tokens": 2}
    other = {**SYSTEM, "content": "At 10:31. " + SYSTEM["content"]}
    headers = {"x-session-id": "one"}
    async with pd_fleet(prefill=0, decode=0, both=1) as fleet:
        gateway = fleet.gateway
        last = {**headers, "x-moongate-session-end": "true"}
        assert (await gateway.chat(headers=last, **first)).status_code == 200
        turn = {**first, "messages": [other, USER]}
        assert (await gateway.chat(headers=headers, **turn)).status_code == 200
        assert await gateway.metric("moongate_prefix_divergences_total") == 0
        assert await gateway.metric("moongate_inflight_requests") == 0
