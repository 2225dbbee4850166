"""Why turns went where they went, afterwards: `/admin/decisions`; and what the log says of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import pytest
from fake_engine import FakeEngine, Received, chat_answer, stream_event
from live_gateway import LiveGateway, live_gateway, until

from moongate.gateway.dialects.body import name_session
from moongate.gateway.telemetry.logs import TextFormatter

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]

SECRET = "nobody-may-read-this"


async def decisions(gateway: LiveGateway, **query: Any) -> list[dict[str, Any]]:
    answer = await gateway.client.get("/admin/decisions", params=query)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["decisions"]
    return found


async def test_a_decision_agrees_with_the_headers_and_tells_what_followed() -> None:
    async def act(request: Received) -> None:
        await request.answer(200, chat_answer(cached_tokens=16))

    async with FakeEngine(act) as a, FakeEngine(act) as b:
        async with live_gateway([a.url, b.url]) as gateway:
            answer = await gateway.chat(headers={"x-request-id": "r1", "x-session-id": "s1"})
            (shown,) = await decisions(gateway)
    said = answer.headers
    runner_up, runner_up_cost = said["x-moongate-runner-up"].split(";")
    assert shown["request_id"] == "r1"
    assert shown["instance"] == said["x-moongate-instance"]
    assert shown["reason"] == said["x-moongate-reason"]
    assert shown["policy"] == said["x-moongate-policy"]
    assert f"{shown['cost_ms']:.1f}" == said["x-moongate-cost-ms"]
    assert [c["instance"] for c in shown["candidates"]] == [shown["instance"], runner_up]
    assert shown["runner_up"] == runner_up
    assert f"{shown['candidates'][1]['cost_ms']:.1f}" == runner_up_cost
    assert sum(shown["candidates"][0]["cost_terms_ms"].values()) == pytest.approx(shown["cost_ms"])
    assert (shown["route"], shown["model"]) == ("/v1/chat/completions", "m")
    assert shown["session"] == name_session("s1")
    assert shown["trace_id"] is None
    outcome = shown["outcome"]
    assert (outcome["status"], outcome["cached_tokens"], outcome["output_tokens"]) == (200, 16, 1)
    assert 0 < shown["ttft_ms"] <= outcome["e2e_ms"]


async def test_a_request_under_way_is_shown_and_then_how_it_ended() -> None:
    async def act(request: Received) -> None:
        await request.start_stream()
        await request.send_chunk(stream_event("a"))
        await request.client_left.wait()

    async with FakeEngine(act) as engine, live_gateway([engine.url]) as gateway:
        asking = asyncio.create_task(gateway.chat(stream=True))
        await until(lambda: _has_first_byte(gateway))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: gateway.inflight() == 0)
        (shown,) = await decisions(gateway)
    assert shown["outcome"]["status"] == 499
    assert shown["is_stream"] is True


async def _has_first_byte(gateway: LiveGateway) -> bool:
    found = await decisions(gateway)
    return bool(found) and found[0]["ttft_ms"] is not None and found[0]["outcome"] is None


async def test_attempts_are_counted_and_the_last_decision_stands() -> None:
    async def fail_first(request: Received) -> None:
        if len(a.received) + len(b.received) == 1:
            request.cut()
        else:
            await request.answer(200, chat_answer())

    async with FakeEngine(fail_first) as a, FakeEngine(fail_first) as b:
        async with live_gateway([a.url, b.url]) as gateway:
            answer = await gateway.chat()
            (shown,) = await decisions(gateway)
    assert shown["attempts"] == 2
    assert shown["instance"] == answer.headers["x-moongate-instance"]


async def test_an_answer_that_broke_off_is_told_from_a_whole_one() -> None:
    async def act(request: Received) -> None:
        await request.start_stream()
        await request.send_chunk(stream_event("a"))
        request.cut()

    async with FakeEngine(act) as engine, live_gateway([engine.url]) as gateway:
        await gateway.chat(stream=True)
        (shown,) = await decisions(gateway)
    assert (shown["outcome"]["status"], shown["outcome"]["is_broken_off"]) == (200, True)


async def test_operators_ask_for_some_of_them() -> None:
    async with FakeEngine() as engine:
        async with live_gateway([engine.url], observability={"decisions_max": 3}) as gateway:
            for n in range(5):
                headers = {"x-request-id": f"r{n}", "x-session-id": f"s{n % 2}"}
                await gateway.chat(headers=headers)
            assert [d["request_id"] for d in await decisions(gateway)] == ["r4", "r3", "r2"]
            assert [d["request_id"] for d in await decisions(gateway, limit=1)] == ["r4"]
            assert [d["request_id"] for d in await decisions(gateway, session="s1")] == ["r3"]
            assert [d["number"] for d in await decisions(gateway, after=4)] == [5]
            slowest = await decisions(gateway, slowest="ttft")
            times = [d["ttft_ms"] for d in slowest]
            assert times == sorted(times, reverse=True)
            for query in ({"limit": 0}, {"limit": "x"}, {"slowest": "cost"}):
                refused = await gateway.client.get("/admin/decisions", params=query)
                assert refused.status_code == 400
                assert refused.json()["error"]["param"] == next(iter(query))


async def test_what_is_refused_before_it_is_forwarded_is_no_decision() -> None:
    async with FakeEngine() as engine, live_gateway([engine.url]) as gateway:
        await gateway.chat(model="nope")
        assert await decisions(gateway) == []


# --- the log --------------------------------------------------------------------------------------


async def test_lines_about_a_request_name_it_and_none_has_text_or_keys(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of requests that are answered, refused, broken off, left, malformed, and met a bug of ours."""
    lines: list[str] = []
    formatter = TextFormatter()

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(formatter.format(record))

    handler = Lines()
    logging.getLogger().addHandler(handler)
    caplog.set_level(logging.DEBUG)

    async def act(request: Received) -> None:
        match request.headers["x-request-id"]:
            case "left":
                await request.client_left.wait()
            case "broken":
                await request.start_stream()
                await request.send_chunk(stream_event(SECRET))
                request.cut()
            case "text":
                await request.answer(400, b"plain", {"content-type": "text/plain"})
            case _:
                await request.answer(200, chat_answer(SECRET))

    async with FakeEngine(act) as engine, live_gateway([engine.url]) as gateway:

        async def send(request_id: str, **body: Any) -> None:
            headers = {
                "x-request-id": request_id, "authorization": f"Bearer {SECRET}",
                "x-api-key": SECRET, "cookie": SECRET, "x-session-id": SECRET,
            }  # fmt: skip
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(gateway.chat(content=SECRET, headers=headers, **body), 0.5)

        await send("fine")
        await send("left")
        await send("broken", stream=True)
        await send("text")
        await send("refused", model=SECRET)
        bad = f'{{"model": "m", "messages": [{{"content": "{SECRET}'
        await gateway.client.post("/v1/chat/completions", content=bad)
        await until(lambda: gateway.inflight() == 0)

        def fail(*_: object) -> None:
            raise RuntimeError("a bug, staged")

        monkeypatch.setattr(gateway.core.policy.__class__, "rank", fail)
        await send("bug")
    logging.getLogger().removeHandler(handler)
    assert not [line for line in lines if SECRET in line]
    about = {rid: [line for line in lines if f"request_id={rid}" in line] for rid in
             ("left", "broken", "bug")}  # fmt: skip
    assert any("the client left" in line for line in about["left"])
    assert any("broke its answer off" in line for line in about["broken"])
    assert any("a bug of ours" in line and "a bug, staged" in line for line in about["bug"])


async def test_an_id_that_could_forge_a_line_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    async def act(request: Received) -> None:
        request.cut()

    async with FakeEngine(act) as engine, live_gateway([engine.url]) as gateway:
        answer = await gateway.chat(headers={"x-request-id": "a\tERROR made up"})
        assert len(answer.headers["x-request-id"]) == 32
    assert "made up" not in caplog.text
