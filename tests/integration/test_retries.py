"""What is sent once more, what isn't, and what a client gets when every instance has no room."""

from __future__ import annotations

import asyncio

import pytest
from fake_engine import FakeEngine, Handler, Received, chat_answer, streaming_until
from live_gateway import LiveGateway, live_gateway, until

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]


def refusing(status: int, body: bytes = b'{"error":{"message":"no"}}', **headers: str) -> Handler:
    """Return what answers every request so; names of headers with _ for -."""

    async def act(request: Received) -> None:
        await request.answer(status, body, {k.replace("_", "-"): v for k, v in headers.items()})

    return act


# --- C24: what can never work ---------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_c24_a_requests_own_fault_is_asked_of_one_instance_only(status: int) -> None:
    async with FakeEngine(refusing(status)) as a, FakeEngine(refusing(status)) as b:
        async with live_gateway([a.url, b.url]) as gateway:
            answer = await gateway.chat()
            assert (answer.status_code, answer.json()) == (status, {"error": {"message": "no"}})
            assert len(a.received) + len(b.received) == 1
            assert await gateway.metric("moongate_retries_total") == 0


# --- C25, C26: no room ----------------------------------------------------------------------------


async def test_c25_a_429_passes_with_its_headers() -> None:
    act = refusing(429, retry_after="7", x_ratelimit_remaining_requests="0")
    async with FakeEngine(act) as a, live_gateway([a.url]) as gateway:
        answer = await gateway.chat()
        assert (answer.status_code, answer.json()) == (429, {"error": {"message": "no"}})
        assert answer.headers["retry-after"] == "7"
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
        assert answer.headers["x-moongate-instance"] == "a"
        assert len(a.received) == 1


@pytest.mark.parametrize("waits", [("3", "9"), ("9", "3"), ("", "3"), ("3", "soon")])
async def test_c26_where_all_answer_429_the_shortest_wait_counts(waits: tuple[str, str]) -> None:
    acts = [refusing(429, b'{"error":{"message":"%d"}}' % n, retry_after=waits[n]) for n in (0, 1)]
    async with FakeEngine(acts[0]) as a, FakeEngine(acts[1]) as b:
        async with live_gateway([a.url, b.url], policy={"name": "round_robin"}) as gateway:
            for _ in range(4):  # from either first
                answer = await gateway.chat()
                shortest = waits.index("3")
                assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
                assert answer.json() == {"error": {"message": str(shortest)}}
                assert answer.headers["x-moongate-instance"] == "ab"[shortest]
            assert (len(a.received), len(b.received)) == (4, 4)
            assert gateway.inflight() == 0
            listed = (await gateway.client.get("/admin/instances")).json()["instances"]
            closed = {"state": "closed", "openings": 0}
            assert [(i["state"], i["breaker"]) for i in listed] == [("up", closed)] * 2


async def test_c26_one_that_has_room_serves_what_another_has_not() -> None:
    async with FakeEngine(refusing(429, retry_after="5")) as a, FakeEngine() as b:
        async with live_gateway([a.url, b.url], policy={"name": "round_robin"}) as gateway:
            answers = [await gateway.chat() for _ in range(4)]
            assert [answer.status_code for answer in answers] == [200] * 4
            assert {answer.headers["x-moongate-instance"] for answer in answers} == {"b"}
            assert len(a.received) >= 2  # it is asked again: to have no room is no fault
            repeated = await gateway.metric("moongate_retries_total", reason="rate_limited")
            assert repeated == len(a.received)


@pytest.mark.parametrize("status", [500, 503])
async def test_c26_a_429_says_more_than_the_failure_of_another(status: int) -> None:
    async with FakeEngine(refusing(429, retry_after="5")) as a:
        async with FakeEngine(refusing(status)) as b:
            urls = [a.url, b.url]
            async with live_gateway(urls, policy={"name": "round_robin"}) as gateway:
                answers = [await gateway.chat() for _ in range(2)]
                assert [answer.status_code for answer in answers] == [429, 429]
                assert {answer.headers["retry-after"] for answer in answers} == {"5"}


async def test_c26_not_more_than_four_are_asked() -> None:
    engines = [FakeEngine(refusing(429, retry_after=str(9 - n))) for n in range(6)]
    for engine in engines:
        await engine.start()
    async with live_gateway([e.url for e in engines], policy={"name": "round_robin"}) as gateway:
        answer = await gateway.chat()
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "6")
        assert [len(engine.received) for engine in engines] == [1, 1, 1, 1, 0, 0]
    for engine in engines:
        await engine.stop()


# --- silence --------------------------------------------------------------------------------------


@pytest.mark.parametrize("retries", [True, False])
async def test_silence_is_repeated_if_the_operator_wants_it(retries: bool) -> None:
    async def silent(request: Received) -> None:
        await request.client_left.wait()

    limits = {"upstream_timeout_s": 0.3, "retry_timeouts": retries}
    async with FakeEngine(silent) as a, FakeEngine() as b:
        async with live_gateway([a.url, b.url], limits=limits) as gateway:
            answer = await gateway.chat()
            assert answer.status_code == (200 if retries else 504)
            assert len(b.received) == retries
            await until(a.received[0].client_left.is_set)  # it need not go on


# --- breakers -------------------------------------------------------------------------------------


async def test_c49_an_instance_that_fails_is_tried_again_by_one_request_at_a_time() -> None:
    breaker = {"open_s": 0.3, "open_s_max": 0.3}
    async with FakeEngine(refusing(503)) as a, FakeEngine() as b:
        urls = [a.url, b.url]
        async with live_gateway(urls, policy={"name": "round_robin"}, breaker=breaker) as gateway:
            for _ in range(6):
                assert (await gateway.chat()).status_code == 200
            assert len(a.received) == 1
            assert await gateway.metric("moongate_breaker_openings_total", instance="a") == 1
            assert await gateway.metric("moongate_breaker_state", instance="a") == 2
            listed = (await gateway.client.get("/admin/instances")).json()["instances"]
            assert [i["state"] for i in listed] == ["suspended", "up"]
            await until(lambda: _is_half_open(gateway))
            a.handler = refusing(200, chat_answer())
            for _ in range(2):
                assert (await gateway.chat()).status_code == 200
            assert len(a.received) == 2
            assert await gateway.metric("moongate_breaker_state", instance="a") == 0


async def test_a_trial_that_streams_for_long_keeps_nobody_out() -> None:
    may_end = asyncio.Event()

    breaker = {"open_s": 0.3}
    async with FakeEngine(refusing(503)) as a, FakeEngine() as b:
        urls = [a.url, b.url]
        async with live_gateway(urls, policy={"name": "round_robin"}, breaker=breaker) as gateway:
            for _ in range(2):
                assert (await gateway.chat()).status_code == 200
            await until(lambda: _is_half_open(gateway))
            a.handler = streaming_until(may_end)
            streams = [asyncio.create_task(gateway.chat(stream=True)) for _ in range(2)]
            await until(lambda: len(a.received) == 2)
            await until(lambda: _is_closed(gateway))
            a.handler = refusing(200, chat_answer())
            for _ in range(4):
                assert (await gateway.chat()).status_code == 200
            assert len(a.received) == 4
            may_end.set()
            assert {(await stream).status_code for stream in streams} == {200}


async def _is_closed(gateway: LiveGateway) -> bool:
    return await gateway.metric("moongate_breaker_state", instance="a") == 0


async def _is_half_open(gateway: LiveGateway) -> bool:
    return await gateway.metric("moongate_breaker_state", instance="a") == 1


async def test_an_instance_that_breaks_off_all_it_begins_gets_less() -> None:
    async def break_off(request: Received) -> None:
        await request.start_stream()
        await request.send_chunk(b'data: {"choices":[]}\n\n')
        request.cut()

    async with FakeEngine(break_off) as a, FakeEngine() as b:
        urls = [a.url, b.url]
        breaker = {"failures_max": 3}
        async with live_gateway(urls, policy={"name": "round_robin"}, breaker=breaker) as gateway:
            for _ in range(12):
                await gateway.chat(stream=True)
            assert len(a.received) == 3
            assert await gateway.metric("moongate_broken_off_total", instance="a") == 3
            assert await gateway.metric("moongate_breaker_openings_total", instance="a") == 1
