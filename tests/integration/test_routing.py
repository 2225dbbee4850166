"""Where requests go: home, elsewhere after a failure, and by load; with nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from fake_engine import FakeEngine, Received, chat_answer
from live_gateway import LiveGateway, live_gateway, until

from moongate.simulator.engine import EngineProfile
from moongate.simulator.event_wire import DigestForm
from moongate.simulator.server import SimEngine, SimEngineConfig

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]

FAST = EngineProfile(prefill_tokens_per_s=200_000.0, decode_tokens_per_s=2_000.0)


@contextlib.asynccontextmanager
async def sims(count: int, **config: object) -> AsyncIterator[list[SimEngine]]:
    """Run simulated engines with KV events; each with its own hash seed."""
    engines = [
        SimEngine(
            SimEngineConfig(
                profile=FAST,
                model="m",
                kv_events_port=0,
                kv_replay_port=0,
                hash_seed=str(n),
                **config,  # type: ignore[arg-type]
            )
        )
        for n in range(count)
    ]
    try:
        for engine in engines:
            await engine.start()
        yield engines
    finally:
        for engine in engines:
            await engine.stop()


def long_text(seed: int, words: int = 400) -> str:
    return " ".join(f"word{seed}x{n}" for n in range(words))


# --- home -----------------------------------------------------------------------------------------


async def test_c38_a_second_chat_goes_to_the_holder_with_the_overlap_that_the_engine_reports() -> (
    None
):
    messages = [{"role": "user", "content": long_text(1)}]
    async with sims(3) as engines, live_gateway([e.url for e in engines]) as gateway:
        first = await gateway.chat(messages=messages, max_tokens=4)
        assert first.headers["x-moongate-reason"] == "load"
        await asyncio.sleep(0.1)
        second = await gateway.chat(messages=messages, max_tokens=4)
    assert second.headers["x-moongate-instance"] == first.headers["x-moongate-instance"]
    assert second.headers["x-moongate-reason"] == "device_prefix"
    usage = second.json()["usage"]
    prompt_tokens = usage["prompt_tokens"]
    assert second.headers["x-moongate-prompt-tokens"] == str(prompt_tokens)
    overlap = int(second.headers["x-moongate-device-tokens"])
    assert overlap == (prompt_tokens - 1) // 16 * 16
    assert overlap == usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(
    "fields",
    [
        {
            "tools": [
                {
                    "type": "function",
                    "function": {"name": f"f{n}", "parameters": {"type": "object"}},
                }
                for n in range(12)
            ]
        },
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": long_text(5)}]}]},
    ],
)
async def test_c39_what_shapes_the_prompt_shapes_the_overlap(fields: dict[str, object]) -> None:
    messages = [
        {"role": "user", "content": long_text(2)},
        {"role": "assistant", "content": "It is"},
    ]
    body = {"messages": messages, "max_tokens": 2, **fields}
    async with sims(2) as engines, live_gateway([e.url for e in engines]) as gateway:
        first = await gateway.chat(**body)  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        second = await gateway.chat(**body)  # type: ignore[arg-type]
    assert second.headers["x-moongate-instance"] == first.headers["x-moongate-instance"]
    usage = second.json()["usage"]
    assert int(second.headers["x-moongate-prompt-tokens"]) == usage["prompt_tokens"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert int(second.headers["x-moongate-device-tokens"]) == cached > 0


@pytest.mark.parametrize("digest_form", list(DigestForm))
async def test_c42_engines_with_other_hash_seeds_are_matched_all_the_same(
    digest_form: DigestForm,
) -> None:
    async with sims(2, digest_form=digest_form) as engines:
        async with live_gateway([e.url for e in engines]) as gateway:
            homes = {}
            for seed in range(4):
                answer = await gateway.chat(content=long_text(seed), max_tokens=2)
                homes[seed] = answer.headers["x-moongate-instance"]
            await asyncio.sleep(0.1)
            for seed in range(4):
                answer = await gateway.chat(content=long_text(seed), max_tokens=2)
                assert answer.headers["x-moongate-instance"] == homes[seed]
                assert answer.headers["x-moongate-reason"] == "device_prefix"
                cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert int(answer.headers["x-moongate-device-tokens"]) == cached > 0
    assert set(homes.values()) == {"a", "b"}


async def test_c33_unrelated_prompts_one_after_the_other_fill_all_engines() -> None:
    async with sims(4) as engines, live_gateway([e.url for e in engines]) as gateway:
        order = []
        for seed in range(40):
            answer = await gateway.chat(content=long_text(seed, 60), max_tokens=1)
            order.append(answer.headers["x-moongate-instance"])
    counts = Counter(order)
    assert all(5 <= counts[name] <= 15 for name in "abcd")
    assert all(len(set(order[n : n + 5])) > 1 for n in range(36))


async def test_a_prompt_known_only_by_its_text_still_leads_home() -> None:
    async with sims(3) as engines:
        tokenizer = {"mode": "off"}
        async with live_gateway([e.url for e in engines], tokenizer=tokenizer) as gateway:
            messages = [{"role": "user", "content": long_text(7)}]
            first = await gateway.chat(messages=messages, max_tokens=2)
            messages += [
                {"role": "assistant", "content": "ok"},
                {"role": "user", "content": "more"},
            ]
            second = await gateway.chat(messages=messages, max_tokens=2)
    assert first.headers["x-moongate-reason"] == "load"
    assert second.headers["x-moongate-instance"] == first.headers["x-moongate-instance"]
    assert second.headers["x-moongate-reason"] == "device_prefix"


async def test_remote_tokenising_gives_the_same_overlap() -> None:
    async with sims(2) as engines:
        tokenizer = {"mode": "remote", "budget_ms": 2000}
        async with live_gateway([e.url for e in engines], tokenizer=tokenizer) as gateway:
            await gateway.chat(content=long_text(3), max_tokens=2)
            await asyncio.sleep(0.1)
            answer = await gateway.chat(content=long_text(3), max_tokens=2)
            assert await gateway.metric("moongate_route_fallback_total") == 0
    cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert int(answer.headers["x-moongate-device-tokens"]) == cached > 0


async def test_a_session_key_leads_where_the_prompt_says_nothing() -> None:
    async with FakeEngine() as a, FakeEngine() as b, live_gateway([a.url, b.url]) as gateway:
        body = {"model": "m", "input": "x"}
        homes = set()
        for _ in range(6):
            answer = await gateway.client.post(
                "/v1/responses", json=body, headers={"x-session-id": "s-1"}
            )
            homes.add(answer.headers["x-moongate-instance"])
            assert answer.headers["x-moongate-reason"] == "session"
        spread = {
            (await gateway.client.post("/v1/responses", json=body)).headers["x-moongate-instance"]
            for _ in range(6)
        }
    assert len(homes) == 1
    assert spread == {"a", "b"}


async def test_the_policy_header_counts_only_where_allowed() -> None:
    asked = {"x-moongate-policy": "round_robin"}
    async with FakeEngine() as a, FakeEngine() as b:
        async with live_gateway([a.url, b.url]) as gateway:
            ignored = await gateway.chat(headers=asked)
        async with live_gateway([a.url, b.url], policy={"allow_override": True}) as gateway:
            taken = await gateway.chat(headers=asked)
            unknown = await gateway.chat(headers={"x-moongate-policy": "best"})
    assert ignored.headers["x-moongate-policy"] == "kv_cost"
    assert taken.headers["x-moongate-policy"] == "round_robin"
    assert unknown.status_code == 400


# --- elsewhere ------------------------------------------------------------------------------------


async def drop(request: Received) -> None:
    """Close the connection instead of answering."""
    request.cut()


async def headers_only(request: Received) -> None:
    """Begin a stream as vLLM does, before anything is computed, and die."""
    await request.start_stream()
    await asyncio.sleep(0.05)
    request.cut()


async def refuse_500(request: Received) -> None:
    await request.answer(500, b'{"error":{"message":"boom"}}')


async def refuse_503(request: Received) -> None:
    await request.answer(503, b'{"error":{"message":"no"}}')


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (drop, "disconnected"),
        (headers_only, "disconnected"),
        (refuse_500, "status"),
        (refuse_503, "status"),
    ],
)
async def test_a_request_that_fails_before_its_first_byte_is_repeated_once_elsewhere(
    failure: object, reason: str
) -> None:
    async with FakeEngine() as a, FakeEngine() as b, live_gateway([a.url, b.url]) as gateway:
        a.handler = failure  # type: ignore[assignment]
        answers = [await gateway.chat(content=f"{n}", stream=True) for n in range(4)]
        assert [answer.status_code for answer in answers] == [200] * 4
        assert {answer.headers["x-moongate-instance"] for answer in answers} == {"b"}
        assert len(a.received) == 1  # then it is left alone for a while
        assert await gateway.metric("moongate_retries_total", reason=reason) == 1
        assert gateway.inflight() == 0


async def test_a_refused_connection_costs_one_request_one_retry() -> None:
    async with FakeEngine() as b:
        a = FakeEngine()
        await a.start()
        async with live_gateway([a.url, b.url]) as gateway:
            await a.stop()
            answers = [await gateway.chat(content=f"{n}") for n in range(10)]
            assert [answer.status_code for answer in answers] == [200] * 10
            assert await gateway.metric("moongate_retries_total", reason="unreachable") <= 1
            assert await gateway.metric("moongate_instance_up", instance="a") == 0


async def test_a_failure_everywhere_is_the_clients_to_see_and_charged_to_nobody() -> None:
    async with FakeEngine(refuse_500) as a, FakeEngine(refuse_500) as b:
        async with live_gateway([a.url, b.url]) as gateway:
            answer = await gateway.chat()
            assert answer.status_code == 500
            assert answer.json() == {"error": {"message": "boom"}}
            assert len(a.received) + len(b.received) == 2
            a.handler = b.handler = _ok
            assert {(await gateway.chat(content=f"{n}")).headers["x-moongate-instance"]
                    for n in range(4)} == {"a", "b"}  # fmt: skip


async def _ok(request: Received) -> None:
    await request.answer(200, chat_answer())


async def test_silence_is_cancelled_and_repeated_once() -> None:
    async def silent(request: Received) -> None:
        await request.client_left.wait()

    async with FakeEngine(silent) as a, FakeEngine(silent) as b:
        limits = {"upstream_timeout_s": 0.3}
        async with live_gateway([a.url, b.url], limits=limits) as gateway:
            answer = await gateway.chat()
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] == "engine_timeout"
            for engine in (a, b):
                assert len(engine.received) == 1
                await asyncio.wait_for(engine.received[0].client_left.wait(), 2.0)
            assert gateway.inflight() == 0


@pytest.mark.timeout(60)
async def test_c35_no_way_of_ending_leaves_load_behind() -> None:
    async def act(request: Received) -> None:
        match json.loads(request.body)["x_act"]:
            case "hang":
                await request.client_left.wait()
            case "stream":
                await request.start_stream()
                while not request.client_left.is_set():
                    await request.send_chunk(b'data: {"choices":[]}\n\n')
                    await asyncio.sleep(0.02)
            case "500":
                await refuse_500(request)
            case _:
                await _ok(request)

    engines = [FakeEngine(act) for _ in range(3)]
    for engine in engines:
        await engine.start()
    async with live_gateway([e.url for e in engines]) as gateway:

        async def leave(act_name: str, n: int) -> None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    gateway.chat(content=f"{act_name}{n}", x_act=act_name, stream=True), 0.5
                )

        await asyncio.gather(*(leave("hang", n) for n in range(100)))
        await asyncio.gather(*(leave("stream", n) for n in range(100)))
        await asyncio.gather(*(gateway.chat(content=f"e{n}", x_act="500") for n in range(50)))
        for engine in engines:
            await engine.stop()
        await asyncio.gather(*(gateway.chat(content=f"r{n}", x_act="ok") for n in range(50)))
        await until(lambda: gateway.inflight() == 0)
        assert await gateway.metric("moongate_inflight_requests") == 0
        for engine in engines:
            await engine.start()
        await until(lambda: _all_up(gateway), 5.0)
        before = [len(engine.received) for engine in engines]
        for n in range(40):
            assert (await gateway.chat(content=f"new{n}", x_act="ok")).status_code == 200
        gained = [len(e.received) - was for e, was in zip(engines, before, strict=True)]
        assert all(10 <= count <= 17 for count in gained), gained
    for engine in engines:
        await engine.stop()


def _all_up(gateway: LiveGateway) -> bool:
    return all(instance.is_healthy for instance in gateway.core.fleet)


async def test_c49_a_stopped_holder_is_left_at_once() -> None:
    async with sims(2) as engines, live_gateway([e.url for e in engines]) as gateway:
        first = await gateway.chat(content=long_text(1), max_tokens=2)
        home = "ab".index(first.headers["x-moongate-instance"])
        await engines[home].stop()
        answers = [await gateway.chat(content=long_text(1), max_tokens=2) for _ in range(50)]
        other = "ab"[1 - home]
        assert [answer.status_code for answer in answers] == [200] * 50
        assert {answer.headers["x-moongate-instance"] for answer in answers} == {other}
        assert await gateway.metric("moongate_retries_total") <= 1
        engines[home] = SimEngine(SimEngineConfig(profile=FAST, model="m"))  # stopped by `sims`
        await engines[home].start()


# --- the fleet ------------------------------------------------------------------------------------


async def test_c113_models_are_merged_and_a_dead_instance_hides_none_of_the_others() -> None:
    async with FakeEngine(model="m1") as a, FakeEngine(model="m2") as b:
        dead = {"id": "c", "url": "http://127.0.0.1:9"}
        instances = [dead, {"id": "a", "url": a.url}, {"id": "b", "url": b.url}]
        async with live_gateway([], instances=instances, wait_ready=False) as gateway:
            await until(lambda: sum(i.is_healthy for i in gateway.core.fleet) == 2)
            listed = (await gateway.client.get("/v1/models")).json()
            assert [card["id"] for card in listed["data"]] == ["m1", "m2"]
            answer = await gateway.chat(model="m2")
            assert answer.headers["x-moongate-instance"] == "b"
            assert answer.headers["x-moongate-reason"] == "only_choice"


async def test_c91_without_any_instance_requests_get_503_until_one_comes() -> None:
    engine = FakeEngine()
    await engine.start()
    port = engine.port
    await engine.stop()
    async with live_gateway([f"http://127.0.0.1:{port}"], wait_ready=False) as gateway:
        ready = await gateway.client.get("/ready")
        assert (ready.status_code, ready.json()["ready"]) == (503, False)
        assert (await gateway.client.get("/health")).status_code == 200
        refused = await gateway.chat()
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        await engine.start()
        await until(lambda: _all_up(gateway), 3.0)
        assert (await gateway.client.get("/ready")).status_code == 200
        assert (await gateway.chat()).status_code == 200
    await engine.stop()


async def test_an_event_address_that_nobody_answers_costs_no_affinity() -> None:
    async with FakeEngine() as a, FakeEngine() as b:
        instances = [
            {"id": name, "url": e.url, "kv_events": "tcp://127.0.0.1:9", "block_size": 16}
            for name, e in (("a", a), ("b", b))
        ]
        async with live_gateway([], instances=instances) as gateway:
            body = {"model": "m", "prompt": list(range(1, 400))}
            homes, overlaps = [], []
            for _ in range(4):
                answer = await gateway.client.post("/v1/completions", json=body)
                homes.append(answer.headers["x-moongate-instance"])
                overlaps.append(int(answer.headers["x-moongate-device-tokens"]))
                await asyncio.sleep(0.4)  # longer in all than what events would have to confirm
            assert await gateway.metric("moongate_index_trust") == 0
    assert len(set(homes)) == 1
    assert overlaps == [0, 384, 384, 384]


async def test_a_description_that_fails_later_leaves_the_instance_in_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moongate.gateway.instances.monitor.DESCRIBE_AGAIN_S", 0.1)
    async with FakeEngine() as engine, live_gateway([engine.url]) as gateway:
        asked: list[str] = []

        async def broken(request: Received) -> None:
            asked.append(request.path)
            await request.answer(200, b"<html>")

        engine.side_calls["/v1/models"] = broken
        await until(lambda: len(asked) >= 2)
        assert (await gateway.chat()).status_code == 200
        assert await gateway.metric("moongate_instance_up") == 1


@pytest.mark.parametrize("body", [b"<html>", b"5", b"null", b"[1]", b'{"0": 1}'])
async def test_event_sources_that_make_no_sense_cost_only_the_events(body: bytes) -> None:
    async def answer(request: Received) -> None:
        await request.answer(200, body)

    async with FakeEngine() as engine:
        engine.side_calls["/kv_event_sources"] = answer
        async with live_gateway([engine.url]) as gateway:
            assert (await gateway.chat()).status_code == 200
            assert await gateway.metric("moongate_index_trust") == 0


async def test_a_bug_of_ours_is_an_error_object_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    async with FakeEngine() as engine, live_gateway([engine.url]) as gateway:
        monkeypatch.setattr("moongate.gateway.proxy.request_reading.find_user", fail)
        answer = await gateway.chat()
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal_error"
        assert answer.headers["x-request-id"]
        assert await gateway.metric("moongate_requests_total", code="500") == 1
        assert gateway.inflight() == 0
    assert engine.received == []
