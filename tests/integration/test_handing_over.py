"""Prefill here, decode there: what each instance is sent, what the client gets, what is left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import time
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from live_gateway import live_gateway, until
from pd_fleet import (
    PROFILE,
    PROMPT,
    instance,
    params,
    pd_fleet,
    running,
)

from moongate.kvpool.memory import MemoryPool
from moongate.simulator.server import SimEngine, SimEngineConfig
from moongate.simulator.transfer import Connector, Role

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]

MESSAGES = [{"role": "user", "content": "Tell me about the moon gate."}]


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line[6:]) for line in lines]


def text(answer: httpx.Response) -> str:
    choice = answer.json()["choices"][0]
    found: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return found


def cached_tokens(answer: httpx.Response) -> int:
    tokens: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


# --- both legs ------------------------------------------------------------------------------------


async def test_c72_the_prompt_is_computed_on_one_instance_and_decoded_on_another() -> None:
    async with pd_fleet() as fleet:
        answer = await fleet.complete(headers={"x-request-id": "r-1", "accept-encoding": "gzip"})
        (prefill,), (decode,) = fleet.prefill[0].received, fleet.decode[0].received
        transfer_id = params(prefill)["transfer_id"]
        assert params(prefill) == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": transfer_id,
        }
        assert params(decode) == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_bootstrap_addr": fleet.prefill[0].bootstrap_url,
            "remote_engine_id": fleet.prefill[0].runners[0].engine_id,
            "transfer_id": transfer_id,
            "remote_prefill_cached_tokens": 0,
        }
        assert prefill.headers["x-request-id"] == decode.headers["x-request-id"] == "r-1"
        assert "accept-encoding" not in prefill.headers  # it is read by the gateway
        assert answer.headers["x-moongate-instance"] == "d0"
        assert answer.headers["x-moongate-prefill-instance"] == "p0"
        assert answer.json()["usage"]["completion_tokens"] == 5
        assert cached_tokens(answer) == 0  # of the prefill leg, not all of the prompt
        assert fleet.decode[0].runners[0].model.statistics().computed_prompt_tokens == 0
        assert await fleet.handoffs("handed_over") == 1
        await fleet.until_idle()


async def test_c72_no_two_transfers_have_one_id() -> None:
    async with pd_fleet(policy={"name": "round_robin"}) as fleet:
        prompts = [[*PROMPT, n] for n in range(40)]
        await asyncio.gather(*(fleet.complete(prompt=p) for p in prompts))
        sent = [params(leg)["transfer_id"] for leg in fleet.prefill[0].received]
        got = [params(leg)["transfer_id"] for leg in fleet.decode[0].received]
        assert len(set(sent)) == 40
        assert set(got) == set(sent)
        await fleet.until_idle()


@pytest.mark.parametrize(
    "limits",
    [
        {"max_completion_tokens": 12},
        {"max_completion_tokens": 12, "max_tokens": 30},
        {},
        {"max_tokens": None, "max_completion_tokens": None},
    ],
)
async def test_c63_every_limit_of_the_prefill_leg_is_one(limits: dict[str, int]) -> None:
    body = {"model": "m", "messages": MESSAGES, **limits}
    async with pd_fleet(decode_config={"answer_tokens": 7}) as fleet:
        answer = await fleet.gateway.client.post("/v1/chat/completions", json=body)
        (prefill,), (decode,) = fleet.prefill[0].received, fleet.decode[0].received
        given = {name: value for name, value in prefill.body.items() if name.startswith("max_")}
        assert given == {"max_tokens": 1, **dict.fromkeys(limits, 1)}
        assert {k: v for k, v in decode.body.items() if k != "kv_transfer_params"} == body
        expected = limits.get("max_completion_tokens") or 7
        assert answer.json()["usage"]["completion_tokens"] == expected


async def test_c63_responses_are_handed_over_too() -> None:
    async with pd_fleet(decode=0, both=1) as fleet, FakeEngine() as decode:
        instances = [
            instance("p0", fleet.prefill[0], Role.PREFILL),
            {"id": "d0", "url": decode.url, "role": "decode"},
        ]
        body = {"model": "m", "input": "hi", "max_output_tokens": 500}
        async with live_gateway([], instances=instances) as gateway:
            await gateway.client.post("/v1/responses", json=body)
        (decoded,) = [json.loads(request.body) for request in decode.received]
        params = decoded.pop("kv_transfer_params")
        assert decoded == body
        assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
        (prefill,) = fleet.prefill[0].received
        assert (prefill.body["max_output_tokens"], prefill.body["store"]) == (1, False)
        assert prefill.body["kv_transfer_params"]["transfer_id"] == params["transfer_id"]


async def test_c64_only_the_decode_leg_streams_and_usage_is_the_clients_own() -> None:
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    async with pd_fleet() as fleet:
        answer = await fleet.complete(**stream, max_tokens=64)
        (prefill,), (decode,) = fleet.prefill[0].received, fleet.decode[0].received
        assert prefill.body["stream"] is False
        assert "stream_options" not in prefill.body
        assert {k: decode.body[k] for k in stream} == stream
        told = events(answer)[-1]["usage"]
        assert (told["prompt_tokens"], told["completion_tokens"]) == (len(PROMPT), 64)
        await fleet.until_idle()


JSON_FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"min_tokens": 20, "max_tokens": 30}, 30),
        ({"stop": ["\n"], "max_tokens": 30}, 30),
        ({}, 1),  # the answer ends by itself, at its first token
        ({"response_format": JSON_FORM, "max_tokens": 30}, 2),  # "{}" and the end
    ],
)
async def test_c65_nothing_ends_a_prefill_but_its_length(
    fields: dict[str, Any], tokens: int
) -> None:
    ends = {"answer_tokens": 1}
    body = {"messages": MESSAGES, "temperature": 0, **fields}
    async with pd_fleet(prefill_config=ends, decode_config=ends) as fleet:
        whole = SimEngine(SimEngineConfig(profile=PROFILE, model="m", answer_tokens=1))
        async with running([whole]), live_gateway([whole.url]) as gateway:
            alone = await gateway.chat(**body)
        answer = await fleet.gateway.chat(**body)
        (prefill,) = fleet.prefill[0].received
        assert prefill.body.get("min_tokens", 0) <= 1
        assert not {"stop", "response_format"} & set(prefill.body)
        assert prefill.body["ignore_eos"] is True
        assert text(answer) == text(alone)
        assert answer.json()["usage"]["completion_tokens"] == tokens
        await fleet.until_idle()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_c71_several_answers_are_computed_where_they_are_decoded(is_stream: bool) -> None:
    async with pd_fleet() as fleet:
        answer = await fleet.complete(n=3, temperature=0.7, max_tokens=8, stream=is_stream)
        choices = (
            [choice for event in events(answer) for choice in event["choices"]]
            if is_stream
            else answer.json()["choices"]
        )
        assert {choice["index"] for choice in choices} == {0, 1, 2}
        assert list(fleet.prefill[0].received) == []
        (decode,) = fleet.decode[0].received
        assert decode.body["n"] == 3
        assert "kv_transfer_params" not in decode.body


PROMPT_FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "x", "echo": True, "logprobs": 1}),
    ("/v1/chat/completions", {"messages": MESSAGES, "prompt_logprobs": 1}),
    ("/v1/chat/completions", {"messages": MESSAGES, "prompt_logprobs": 0}),
]


@pytest.mark.parametrize(("path", "fields"), PROMPT_FIELDS)
async def test_c70_what_needs_the_prompts_logits_is_refused_or_stays_whole(
    path: str, fields: dict[str, Any]
) -> None:
    body = {"model": "m", **fields}
    async with pd_fleet(both=1) as fleet:
        answer = await fleet.gateway.client.post(path, json=body)
        assert (answer.status_code, answer.headers["x-moongate-instance"]) == (200, "b0")
        assert [leg.body for leg in fleet.both[0].received] == [body]
        assert not fleet.decode[0].received
        assert not fleet.prefill[0].received
    async with pd_fleet() as fleet:
        refused = await fleet.gateway.client.post(path, json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] in ("echo", "prompt_logprobs")
        assert not fleet.decode[0].received


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["a", "b"]},
        {"prompt": [[1, 2], [3, 4]]},
        {"prompt": "x", "best_of": 2},
        {"prompt": "x", "use_beam_search": True},
    ],
)
async def test_what_is_no_single_answer_to_one_prompt_is_not_handed_over(
    fields: dict[str, Any],
) -> None:
    async with pd_fleet() as fleet:
        answer = await fleet.complete(**fields)
        assert answer.headers["x-moongate-instance"] == "d0"
        assert "x-moongate-prefill-instance" not in answer.headers
        assert not fleet.prefill[0].received


async def test_a_body_that_only_lenient_parsers_take_is_not_handed_over() -> None:
    raw = b'{"model": "m", "prompt": "\\ud800", "max_tokens": 2}'
    async with pd_fleet() as fleet:
        headers = {"content-type": "application/json"}
        await fleet.gateway.client.post("/v1/completions", content=raw, headers=headers)
        assert len(fleet.decode[0].received) == 1
        assert not fleet.prefill[0].received


async def test_c09_events_of_a_handed_over_stream_come_one_by_one() -> None:
    slow = dataclasses.replace(PROFILE, decode_tokens_per_s=50.0)
    async with pd_fleet(decode_config={"profile": slow}) as fleet:
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 10, "stream": True}
        times: list[float] = []
        async with fleet.gateway.client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                times += [time.monotonic()] * line.startswith("data: {")
        assert len(times) == 10
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert max(gaps) < 0.15
        assert times[-1] - times[0] > 0.1


# --- connectors, policies, parameters ---------------------------------------------------------------


async def test_nixls_answer_goes_to_the_decode_leg_as_it_is() -> None:
    async with pd_fleet(connector=Connector.NIXL) as fleet:
        answer = await fleet.complete()
        (prefill,), (decode,) = fleet.prefill[0].received, fleet.decode[0].received
        assert params(prefill) == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        assert params(decode)["remote_engine_id"] == fleet.prefill[0].runners[0].engine_id
        assert len(params(decode)["remote_block_ids"][0]) == 6
        assert params(decode)["transfer_mode"] == "pull"  # and whatever else it said
        assert (answer.status_code, cached_tokens(answer)) == (200, 0)
        await fleet.until_idle()
        assert fleet.prefill[0].runners[0].stale_reads == 0


async def test_a_multi_connector_hands_over_as_mooncake_beside_its_pool() -> None:
    store = MemoryPool(1 << 20)
    pool = {"kind": "memory"}
    async with pd_fleet(connector=Connector.MULTI, store=store, pool=pool) as fleet:
        answer = await fleet.complete()
        assert params(fleet.decode[0].received[0])["transfer_id"]
        assert (answer.status_code, cached_tokens(answer)) == (200, 0)
        await fleet.until_idle()


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "session_hash"])
async def test_policies_without_costs_hand_over_too(policy: str) -> None:
    async with pd_fleet(prefill=2, decode=2, policy={"name": policy}) as fleet:
        for n in range(4):
            answer = await fleet.complete(prompt=[*PROMPT, n], headers={"x-session-id": f"{n}"})
            assert answer.headers["x-moongate-prefill-instance"] in ("p0", "p1")
        counts = [len(engine.received) for engine in fleet.engines]
        assert (sum(counts[:2]), sum(counts[2:])) == (4, 4)
        if policy == "round_robin":
            assert counts == [2, 2, 2, 2]
        await fleet.until_idle()


async def test_the_cached_tokens_are_those_of_the_prefill_leg() -> None:
    async with pd_fleet(policy={"name": "round_robin"}) as fleet:
        await fleet.complete(prompt=PROMPT[:13])
        answer = await fleet.complete()
        assert answer.headers["x-moongate-prefill-instance"] == "p0"
        assert cached_tokens(answer) == 12
        total = await fleet.gateway.metric("moongate_delivered_cached_tokens_total")
        assert total == 12


async def test_parameters_of_clients_are_taken_out_before_ours_go_in() -> None:
    theirs = {"transfer_id": "evil", "do_remote_prefill": True, "prompt_token_ids": [1]}
    async with pd_fleet() as fleet:
        await fleet.complete(kv_transfer_params=theirs)
        (prefill,), (decode,) = fleet.prefill[0].received, fleet.decode[0].received
        assert params(prefill)["transfer_id"] == params(decode)["transfer_id"] != "evil"
        assert "prompt_token_ids" not in {**params(prefill), **params(decode)}


async def test_clients_that_may_speak_to_the_connector_are_not_interrupted() -> None:
    theirs = {"do_remote_decode": True, "transfer_id": "mine"}
    limits = {"allow_kv_transfer_params": True}
    async with pd_fleet(both=1, limits=limits, policy={"name": "round_robin"}) as fleet:
        for _ in range(2):
            await fleet.complete(kv_transfer_params={**theirs, "do_remote_decode": False})
        assert not fleet.prefill[0].received
        legs = [*fleet.decode[0].received, *fleet.both[0].received]
        assert {params(leg)["transfer_id"] for leg in legs} == {"mine"}


async def test_token_ids_go_along_with_the_parameters_on_both_legs() -> None:
    async with pd_fleet(tokenizer={"forward_ids": "on"}) as fleet:
        answer = await fleet.gateway.chat(max_tokens=3)
        (prefill,), (decode,) = fleet.prefill[0].received, fleet.decode[0].received
        ids = params(prefill)["prompt_token_ids"]
        assert params(decode)["prompt_token_ids"] == ids
        assert len(ids) == answer.json()["usage"]["prompt_tokens"]
        assert params(prefill)["transfer_id"] == params(decode)["transfer_id"]
        assert prefill.body["messages"] == decode.body["messages"]
        assert cached_tokens(answer) == 0
        await fleet.until_idle()


async def test_the_engine_of_the_rank_that_prefills_is_named() -> None:
    ranks = {"data_parallel_size": 2, "kv_events_port": 0}
    async with pd_fleet(prefill_config=ranks, policy={"name": "round_robin"}) as fleet:
        for n in range(4):
            answer = await fleet.complete(prompt=[*PROMPT, n])
            assert answer.status_code == 200
            rank = answer.headers["x-moongate-prefill-instance"].removeprefix("p0@")
            prefill, decode = fleet.prefill[0].received[-1], fleet.decode[0].received[-1]
            assert prefill.headers["x-data-parallel-rank"] == rank
            engine_id = fleet.prefill[0].runners[int(rank)].engine_id
            assert params(decode)["remote_engine_id"] == engine_id
            assert "x-data-parallel-rank" not in decode.headers
        assert {leg.headers["x-data-parallel-rank"] for leg in fleet.prefill[0].received} == {
            "0",
            "1",
        }
        await fleet.until_idle()


async def test_a_next_turn_stays_where_it_was_decoded_unless_it_brings_a_long_new_text() -> None:
    # A prefill takes 0.125 ms a token, and half as much again from the answers of a decode instance.
    profile = dataclasses.replace(PROFILE, prefill_tokens_per_s=8000.0, max_model_len_tokens=4096)
    config = {"profile": profile, "kv_events_port": 0, "kv_replay_port": 0}
    async with pd_fleet(prefill_config=config, decode_config=config) as fleet:
        first = list(range(100, 500))
        answers = [await fleet.complete(prompt=first)]
        await until(lambda: fleet.gateway.core.index.total >= 200)
        answers.append(await fleet.complete(prompt=[*first, *range(50, 70)]))
        answers.append(await fleet.complete(prompt=[*first, *range(50, 70), *range(600, 2600)]))
        paths = [answer.headers.get("x-moongate-prefill-instance") for answer in answers]
        assert paths == ["p0", None, "p0"]
        assert answers[1].headers["x-moongate-reason"] == "device_prefix"
        await fleet.until_idle()


async def test_an_explanation_names_the_pair_that_a_request_would_go_to() -> None:
    async with pd_fleet() as fleet:
        body = {"model": "m", "prompt": PROMPT}
        told = (await fleet.gateway.client.post("/admin/explain", json=body)).json()
        assert (told["instance"], told["prefill_instance"]) == ("d0", "p0")
        several = {**body, "n": 2}
        told = (await fleet.gateway.client.post("/admin/explain", json=several)).json()
        assert (told["instance"], told["prefill_instance"]) == ("d0", None)
        assert not any(engine.received for engine in fleet.engines)


async def test_a_body_too_deep_for_a_prefill_leg_is_refused_and_nothing_is_left() -> None:
    deep = b"[" * 1015 + b"]" * 1015
    raw = b'{"model":"m","max_tokens":2,"x":%b,"messages":[{"role":"user","content":"hi"}]}' % deep
    async with pd_fleet() as fleet:
        answer = await fleet.gateway.client.post("/v1/chat/completions", content=raw)
        assert answer.status_code == 400
        assert "nested too deeply" in answer.json()["error"]["message"]
        assert fleet.gateway.inflight() == 0
