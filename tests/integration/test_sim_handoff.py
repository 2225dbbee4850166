"""Prefill and decode by two simulated engines: both handshakes over sockets, and what can go wrong."""

import asyncio
import contextlib
import dataclasses
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from moongate.simulator.engine import EngineProfile
from moongate.simulator.server import SimEngine, SimEngineConfig
from moongate.simulator.transfer import Connector, Role

PROFILE = EngineProfile(
    blocks=65,
    block_size_tokens=4,
    prefill_tokens_per_s=1e6,
    decode_tokens_per_s=1e4,
    max_model_len_tokens=256,
    step_overhead_ms=0.1,
    kv_bytes_per_token=1,
)
SLOW_PREFILL = dataclasses.replace(PROFILE, prefill_tokens_per_s=10.0)
SLOW_DECODE = dataclasses.replace(PROFILE, decode_tokens_per_s=20.0)
ONE_AT_A_TIME = dataclasses.replace(SLOW_DECODE, max_num_seqs=1)

PREFILL = SimEngineConfig(profile=PROFILE, role=Role.PREFILL, connector=Connector.MOONCAKE)
DECODE = dataclasses.replace(PREFILL, role=Role.DECODE)
NIXL = SimEngineConfig(profile=PROFILE, connector=Connector.NIXL)

WAIT_LIMIT_S = 5.0
PROMPT = list(range(10, 31))  # 21 tokens: 5 full blocks and one more
Body = dict[str, Any]


def prefill_body(transfer_id: str) -> Body:
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    return {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": params}


@dataclasses.dataclass
class Pair:
    prefill: SimEngine
    decode: SimEngine
    to_prefill: httpx.AsyncClient
    to_decode: httpx.AsyncClient

    async def engine_id(self) -> str:
        async with httpx.AsyncClient(trust_env=False) as client:
            ranks = (await client.get(f"{self.prefill.bootstrap_url}/query")).json()
        found: str = ranks["0"]["engine_id"]
        return found

    async def prefill_leg(self, transfer_id: str, **fields: Any) -> httpx.Response:
        body = {**prefill_body(transfer_id), **fields}
        return await self.to_prefill.post("/v1/completions", json=body)

    async def decode_body(self, transfer_id: str, **fields: Any) -> Body:
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_bootstrap_addr": self.prefill.bootstrap_url,
            "remote_engine_id": await self.engine_id(),
            "transfer_id": transfer_id,
        }
        return {"prompt": PROMPT, "max_tokens": 5, "kv_transfer_params": params, **fields}

    async def decode_leg(self, transfer_id: str, **fields: Any) -> httpx.Response:
        body = await self.decode_body(transfer_id, **fields)
        return await self.to_decode.post("/v1/completions", json=body)

    @property
    def held(self) -> float:
        return usage(self.prefill)


def usage(engine: SimEngine) -> float:
    return engine.runners[0].model.pool.usage


def cached_tokens(answer: httpx.Response) -> int:
    tokens: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


@asynccontextmanager
async def running(config: SimEngineConfig) -> AsyncIterator[tuple[SimEngine, httpx.AsyncClient]]:
    engine = SimEngine(config)
    await engine.start()
    async with httpx.AsyncClient(
        base_url=engine.url, timeout=WAIT_LIMIT_S, trust_env=False
    ) as client:
        try:
            yield engine, client
        finally:
            await engine.stop()


@asynccontextmanager
async def pair(
    prefill: SimEngineConfig = PREFILL, decode: SimEngineConfig = DECODE
) -> AsyncIterator[Pair]:
    async with running(prefill) as (one, to_one), running(decode) as (other, to_other):
        yield Pair(one, other, to_one, to_other)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_LIMIT_S):
        while not condition():
            await asyncio.sleep(0.002)


# -- Mooncake -----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_the_decoder_gets_the_prompt_and_the_prefill_engine_its_blocks_back() -> None:
    async with pair() as pd:
        alone = await pd.to_prefill.post(
            "/v1/completions", json={"prompt": PROMPT, "max_tokens": 5}
        )
        first = await pd.prefill_leg("t1")
        assert first.json()["choices"][0]["finish_reason"] == "length"
        assert first.json()["kv_transfer_params"] is None
        assert pd.held == pytest.approx(6 / 64)
        answer = await pd.decode_leg("t1")
        assert pd.held == 0.0
        statistics = pd.decode.runners[0].model.statistics()
    assert answer.json()["choices"][0]["text"] == alone.json()["choices"][0]["text"]
    assert cached_tokens(answer) == 21
    assert statistics.cached_tokens_by_source["p2p"] == 21
    assert (statistics.external_prompt_tokens, statistics.computed_prompt_tokens) == (21, 0)
    assert pd.prefill.handoff_api is not None
    assert pd.prefill.handoff_api.pulls == ["t1"]


@pytest.mark.asyncio
async def test_both_legs_may_be_sent_at_once() -> None:
    async with pair() as pd:
        decoding = asyncio.create_task(pd.decode_leg("t1"))
        model = pd.decode.runners[0].model
        await until(lambda: model.pool.usage > 0)
        assert (model.statistics().running_requests, model.statistics().waiting_requests) == (0, 1)
        await pd.prefill_leg("t1")
        answer = await decoding
        assert (answer.status_code, cached_tokens(answer), pd.held) == (200, 21, 0.0)


@pytest.mark.asyncio
async def test_only_what_the_decoder_lacks_comes_but_all_blocks_are_freed() -> None:
    async with pair() as pd:
        await pd.to_decode.post("/v1/completions", json={"prompt": PROMPT[:13], "max_tokens": 1})
        await pd.prefill_leg("t1")
        answer = await pd.decode_leg("t1")
        statistics = pd.decode.runners[0].model.statistics()
        assert (cached_tokens(answer), pd.held) == (21, 0.0)
    assert (statistics.prefix_hits_tokens, statistics.external_hits_tokens) == (12, 9)


@pytest.mark.asyncio
async def test_what_was_received_is_cached_at_the_decoder() -> None:
    async with pair() as pd:
        await pd.prefill_leg("t1")
        await pd.decode_leg("t1")
        again = await pd.to_decode.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1})
    assert cached_tokens(again) == 20


@pytest.mark.asyncio
async def test_a_stream_is_decoded_from_a_handed_over_prompt() -> None:
    async with pair() as pd:
        await pd.prefill_leg("t1")
        answer = await pd.decode_leg("t1", stream=True, stream_options={"include_usage": True})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line[:7] == "data: {"]
    assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 21}
    assert events[-1]["usage"]["completion_tokens"] == 5


@pytest.mark.asyncio
async def test_several_answers_share_one_hand_off() -> None:
    async with pair() as pd:
        await pd.prefill_leg("t1")
        answer = await pd.decode_leg("t1", n=3)
        assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1, 2]
        assert (cached_tokens(answer), pd.held) == (21, 0.0)
        assert usage(pd.decode) == 0.0


@pytest.mark.asyncio
async def test_a_prefill_of_several_answers_keeps_the_blocks_of_all_but_one_for_ever() -> None:
    config = dataclasses.replace(PREFILL, transfer_hold_s=0.05)
    async with pair(config) as pd:
        await pd.prefill_leg("t1", n=2)
        await pd.decode_leg("t1")
        await asyncio.sleep(0.1)
        assert pd.held > 0.0


@pytest.mark.asyncio
async def test_what_the_prefill_engine_had_cached_may_be_told_in_usage() -> None:
    async with pair() as pd:
        await pd.prefill_leg("t1")
        body = await pd.decode_body("t1")
        body["kv_transfer_params"]["remote_prefill_cached_tokens"] = 7
        answer = await pd.to_decode.post("/v1/completions", json=body)
    assert cached_tokens(answer) == 7


@pytest.mark.asyncio
async def test_an_engine_that_prefills_answers_others_as_well() -> None:
    async with pair() as pd:
        answer = await pd.to_prefill.post("/v1/completions", json={"prompt": PROMPT})
        assert (answer.status_code, pd.held) == (200, 0.0)


@pytest.mark.asyncio
async def test_an_answer_that_ends_by_itself_holds_nothing() -> None:
    async with pair(dataclasses.replace(PREFILL, answer_tokens=1)) as pd:
        params = {"do_remote_decode": True, "transfer_id": "t1"}
        message = {"role": "user", "content": "Say something about the moon."}
        body = {"messages": [message], "kv_transfer_params": params}
        answer = await pd.to_prefill.post("/v1/chat/completions", json=body)
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
        assert pd.held == 0.0


@pytest.mark.asyncio
async def test_a_prefill_whose_client_leaves_holds_nothing() -> None:
    async with pair(dataclasses.replace(PREFILL, profile=SLOW_PREFILL)) as pd:
        with pytest.raises(httpx.ReadTimeout):
            await pd.to_prefill.post("/v1/completions", json=prefill_body("t1"), timeout=0.1)
        await until(lambda: pd.held == 0.0)
        outbox = pd.prefill.runners[0].outbox
        assert outbox is not None
        assert len(outbox) == 0


@pytest.mark.asyncio
async def test_blocks_that_nobody_comes_for_are_freed_in_the_end() -> None:
    async with pair(dataclasses.replace(PREFILL, transfer_hold_s=0.5)) as pd:
        await pd.prefill_leg("t1")
        assert pd.held > 0.0
        await until(lambda: pd.held == 0.0)


@pytest.mark.asyncio
async def test_held_blocks_leave_no_room_for_others() -> None:
    profile = dataclasses.replace(PROFILE, blocks=9, max_model_len_tokens=32)
    async with pair(dataclasses.replace(PREFILL, profile=profile)) as pd:
        await pd.prefill_leg("t1")  # 6 of 8 blocks
        body = {"prompt": list(range(50, 71)), "max_tokens": 1}
        waiting = asyncio.create_task(pd.to_prefill.post("/v1/completions", json=body))
        model = pd.prefill.runners[0].model
        await until(lambda: model.statistics().waiting_requests == 1)
        await pd.decode_leg("t1")
        assert (await waiting).status_code == 200


# -- decoders that give up ------------------------------------------------------------------------


@asynccontextmanager
async def left(client: httpx.AsyncClient, body: Body) -> AsyncIterator[None]:
    """A request whose client leaves at the end of the block."""
    sending = asyncio.create_task(client.post("/v1/completions", json=body))
    yield
    sending.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await sending


@pytest.mark.asyncio
async def test_a_decode_that_was_never_scheduled_frees_the_prefill_engines_blocks() -> None:
    async with pair(decode=dataclasses.replace(DECODE, profile=ONE_AT_A_TIME)) as pd:
        model = pd.decode.runners[0].model
        async with left(pd.to_decode, {"prompt": [7] * 9, "max_tokens": 200}):
            await until(lambda: model.statistics().running_requests == 1)
            await pd.prefill_leg("t1")
            async with left(pd.to_decode, await pd.decode_body("t1")):
                await until(lambda: model.statistics().waiting_requests == 1)
                assert pd.held > 0.0
            await until(lambda: pd.held == 0.0)


@pytest.mark.asyncio
async def test_a_decode_that_is_given_up_while_it_waits_keeps_its_blocks_until_the_kv_came() -> (
    None
):
    async with pair() as pd:
        model = pd.decode.runners[0].model
        async with left(pd.to_decode, await pd.decode_body("t1")):
            await until(lambda: model.pool.usage > 0)
        await until(lambda: model.statistics().finished_requests["abort"] == 1)
        assert model.pool.usage > 0.0
        await pd.prefill_leg("t1")
        await until(lambda: pd.held == 0.0 and model.pool.usage == 0.0)


@pytest.mark.asyncio
async def test_a_decode_that_is_refused_frees_the_prefill_engines_blocks() -> None:
    async with pair() as pd:
        await pd.prefill_leg("t1")
        refused = await pd.decode_leg("t1", min_tokens=9)
        assert refused.status_code == 400
        assert "min_tokens must be less than or equal to max_tokens=5" in refused.text
        await until(lambda: pd.held == 0.0)


# -- prefill engines that are not there -------------------------------------------------------------

ERROR = {
    "message": "Internal server error",
    "type": "InternalServerError",
    "param": None,
    "code": 500,
}


@pytest.mark.asyncio
async def test_an_unknown_engine_id_fails_the_decode_at_once() -> None:
    async with pair() as pd:
        body = await pd.decode_body("t1")
        body["kv_transfer_params"]["remote_engine_id"] = "another"
        answer = await pd.to_decode.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()) == (500, {"error": ERROR})
        assert usage(pd.decode) == 0.0
        assert pd.decode.runners[0].model.statistics().finished_requests["error"] == 1


@pytest.mark.asyncio
async def test_a_failed_stream_ends_with_the_error() -> None:
    async with pair() as pd:
        body = await pd.decode_body("t1", stream=True)
        body["kv_transfer_params"]["remote_engine_id"] = "another"
        answer = await pd.to_decode.post("/v1/completions", json=body)
    assert answer.status_code == 200
    first, second = answer.text.split("\n\n")[:2]
    assert json.loads(first.removeprefix("data: ")) == {"error": ERROR}
    assert second == "data: [DONE]"


@pytest.mark.asyncio
async def test_where_failed_loads_are_recomputed_the_decoder_computes() -> None:
    async with pair(decode=dataclasses.replace(DECODE, recomputes_failed_loads=True)) as pd:
        body = await pd.decode_body("t1")
        body["kv_transfer_params"]["remote_engine_id"] = "another"
        answer = await pd.to_decode.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 5)


@pytest.mark.asyncio
async def test_a_prefill_engine_that_never_was_there_fails_after_three_attempts() -> None:
    async with pair() as pd:
        body = await pd.decode_body("t1")
        with socket.create_server(("127.0.0.1", 0)) as nobody:
            port = nobody.getsockname()[1]
        body["kv_transfer_params"]["remote_bootstrap_addr"] = f"http://127.0.0.1:{port}"
        body["kv_transfer_params"]["remote_engine_id"] = "another"
        answer = await pd.to_decode.post("/v1/completions", json=body)
        assert answer.status_code == 500


@pytest.mark.asyncio
async def test_a_known_prefill_engine_that_crashed_is_waited_for_until_the_limit() -> None:
    async with pair(decode=dataclasses.replace(DECODE, transfer_hold_s=0.2)) as pd:
        await pd.prefill_leg("t1")
        await pd.decode_leg("t1")
        body = await pd.decode_body("t2")
        await pd.prefill.crash()
        began = asyncio.get_running_loop().time()
        answer = await pd.to_decode.post("/v1/completions", json=body)
        assert answer.status_code == 500
        assert asyncio.get_running_loop().time() - began > 0.2


@pytest.mark.asyncio
async def test_a_prefill_engine_that_crashes_while_it_is_waited_for_is_not_noticed() -> None:
    async with pair(decode=dataclasses.replace(DECODE, transfer_hold_s=0.6)) as pd:
        decoding = asyncio.create_task(pd.decode_leg("t1"))
        await until(lambda: bool(pd.prefill.handoff_api and pd.prefill.handoff_api.pulls))
        await pd.prefill.crash()
        await asyncio.sleep(0.1)
        assert not decoding.done()
        assert (await decoding).status_code == 500


@pytest.mark.asyncio
async def test_a_restarted_prefill_engine_has_another_id() -> None:
    async with pair() as pd:
        old = await pd.decode_body("t1")
        port = pd.prefill.bootstrap_port or 0
        await pd.prefill.crash()
        async with running(dataclasses.replace(PREFILL, bootstrap_port=port)) as (again, client):
            restarted = Pair(again, pd.decode, client, pd.to_decode)
            assert await restarted.engine_id() != old["kv_transfer_params"]["remote_engine_id"]
            assert (await pd.to_decode.post("/v1/completions", json=old)).status_code == 500
            await restarted.prefill_leg("t1")
            assert cached_tokens(await restarted.decode_leg("t1")) == 21


@pytest.mark.asyncio
async def test_a_transfer_that_never_comes_fails_when_the_prefill_engine_gives_up() -> None:
    async with pair(dataclasses.replace(PREFILL, transfer_hold_s=0.1)) as pd:
        answer = await pd.decode_leg("never")
        assert answer.status_code == 500
        assert usage(pd.decode) == 0.0


# -- parameters that are not right -------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_decode_that_names_no_prefill_engine_is_computed() -> None:
    async with pair() as pd:
        body = await pd.decode_body("t1")
        del body["kv_transfer_params"]["remote_engine_id"]
        answer = await pd.to_decode.post("/v1/completions", json=body)
        assert (answer.status_code, cached_tokens(answer)) == (200, 0)


@pytest.mark.asyncio
async def test_or_waits_for_ever_as_vllm_does() -> None:
    async with pair(decode=dataclasses.replace(DECODE, waits_for_nobody=True)) as pd:
        body = await pd.decode_body("t1")
        del body["kv_transfer_params"]["remote_engine_id"]
        with pytest.raises(httpx.ReadTimeout):
            await pd.to_decode.post("/v1/completions", json=body, timeout=0.1)


@pytest.mark.asyncio
async def test_a_leg_at_the_wrong_engine_is_the_end_of_that_engine() -> None:
    async with pair() as pd:
        body = await pd.decode_body("t1")
        assert (await pd.to_prefill.post("/v1/completions", json=body)).status_code == 500
        await until(lambda: not pd.prefill.runners[0].is_alive)
        assert (await pd.to_prefill.get("/health")).status_code == 503


@pytest.mark.asyncio
async def test_without_a_connector_the_parameters_are_ignored() -> None:
    async with running(SimEngineConfig(profile=PROFILE)) as (engine, client):
        params = {"do_remote_decode": True, "transfer_id": "t1"}
        body = {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": params}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert (usage(engine), engine.bootstrap_url) == (0.0, None)


@pytest.mark.asyncio
async def test_the_bootstrap_server_tells_each_rank() -> None:
    async with running(dataclasses.replace(PREFILL, data_parallel_size=2)) as (engine, _):
        async with httpx.AsyncClient(trust_env=False) as client:
            ranks = (await client.get(f"{engine.bootstrap_url}/query")).json()
    assert list(ranks) == ["0", "1"]
    assert ranks["0"]["engine_id"] != ranks["1"]["engine_id"]
    assert ranks["0"]["worker_addr"] == {"0": {"0": f"tcp://127.0.0.1:{engine.bootstrap_port}"}}


# -- NIXL ---------------------------------------------------------------------------------------------

ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


async def nixl_prefill(pd: Pair, **fields: Any) -> Body:
    """Prefill, and return the body of the decode leg."""
    body = {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": ASK, **fields}
    answer = (await pd.to_prefill.post("/v1/completions", json=body)).json()
    return {"prompt": PROMPT, "max_tokens": 5, "kv_transfer_params": answer["kv_transfer_params"]}


@pytest.mark.asyncio
async def test_nixls_prefill_answers_what_the_decoder_needs() -> None:
    async with pair(NIXL, NIXL) as pd:
        body = await nixl_prefill(pd)
        params = body["kv_transfer_params"]
        (blocks,) = params.pop("remote_block_ids")
        assert len(blocks) == 6
        assert params == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": pd.prefill.runners[0].engine_id,
            "remote_request_id": "0",
            "remote_host": "127.0.0.1",
            "remote_port": pd.prefill.bootstrap_port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": 21,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
        }
        assert pd.held == pytest.approx(6 / 64)


@pytest.mark.asyncio
async def test_nixls_decoder_gets_the_prompt() -> None:
    async with pair(NIXL, NIXL) as pd:
        answer = await pd.to_decode.post("/v1/completions", json=await nixl_prefill(pd))
        assert pd.held == 0.0
        assert answer.json()["usage"]["completion_tokens"] == 5
        assert cached_tokens(answer) == 0  # the prefill engine's
        statistics = pd.decode.runners[0].model.statistics()
        assert statistics.cached_tokens_by_source["external_unspecified"] == 21


@pytest.mark.asyncio
async def test_nixls_lease_ends_and_what_is_read_then_is_not_what_it_was() -> None:
    async with pair(dataclasses.replace(NIXL, lease_s=0.05), NIXL) as pd:
        body = await nixl_prefill(pd)
        await until(lambda: pd.held == 0.0)
        answer = await pd.to_decode.post("/v1/completions", json=body)
        assert (answer.status_code, pd.prefill.runners[0].stale_reads) == (200, 1)


@pytest.mark.asyncio
async def test_nixls_lease_is_prolonged_while_the_decoder_has_the_request() -> None:
    short = dataclasses.replace(NIXL, lease_s=0.5)
    async with pair(short, dataclasses.replace(short, profile=ONE_AT_A_TIME)) as pd:
        model = pd.decode.runners[0].model
        async with left(pd.to_decode, {"prompt": [7] * 9, "max_tokens": 200}):
            await until(lambda: model.statistics().running_requests == 1)
            body = await nixl_prefill(pd)
            async with left(pd.to_decode, body):
                await asyncio.sleep(0.7)
                assert pd.held > 0.0
            await until(lambda: pd.held == 0.0)
        assert pd.prefill.runners[0].stale_reads == 0


@pytest.mark.asyncio
async def test_nixls_decode_fails_at_once_when_the_prefill_engine_is_another_or_gone() -> None:
    async with pair(NIXL, NIXL) as pd:
        body = await nixl_prefill(pd)
        another = {**body["kv_transfer_params"], "remote_engine_id": "another"}
        answers = [
            await pd.to_decode.post("/v1/completions", json={**body, "kv_transfer_params": another})
        ]
        await pd.prefill.crash()
        answers.append(await pd.to_decode.post("/v1/completions", json=body))
    assert [answer.status_code for answer in answers] == [500, 500]


@pytest.mark.asyncio
async def test_nixls_decode_without_blocks_is_the_end_of_the_engine() -> None:
    async with pair(NIXL, NIXL) as pd:
        body = {"prompt": PROMPT, "kv_transfer_params": {"do_remote_prefill": True}}
        assert (await pd.to_decode.post("/v1/completions", json=body)).status_code == 500
        assert (await pd.to_decode.get("/health")).status_code == 503


# -- what tests see, and faults -------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_each_engine_remembers_what_it_was_sent() -> None:
    async with pair() as pd:
        await pd.prefill_leg("t1", user="u")
        await pd.decode_leg("t1")
        (leg,) = pd.prefill.received
        assert leg.path == "/v1/completions"
        assert leg.headers["content-type"] == "application/json"
        assert (leg.body["user"], leg.body["kv_transfer_params"]["transfer_id"]) == ("u", "t1")
        (other,) = (await pd.to_decode.get("/sim/requests")).json()
        assert other["body"]["kv_transfer_params"]["do_remote_prefill"] is True


@pytest.mark.asyncio
async def test_a_test_may_let_requests_fail_and_wait() -> None:
    async with pair() as pd:
        pd.prefill.debugging.fail_next(status=500, delay_s=0.05)
        pd.prefill.debugging.fail_next(status=400)
        pd.prefill.debugging.fail_next(status=None, delay_s=0.05)
        began = asyncio.get_running_loop().time()
        statuses = [(await pd.prefill_leg(f"t{number}")).status_code for number in range(4)]
        assert statuses == [500, 400, 200, 200]
        assert asyncio.get_running_loop().time() - began >= 0.1


@pytest.mark.asyncio
async def test_a_crash_breaks_off_what_is_on_the_way() -> None:
    async with pair(decode=dataclasses.replace(DECODE, profile=SLOW_DECODE)) as pd:
        body = {"prompt": PROMPT, "max_tokens": 200, "stream": True}
        async with pd.to_decode.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
            await pd.decode.crash()
            with pytest.raises(httpx.HTTPError):
                async for _ in lines:
                    pass
        with pytest.raises(httpx.ConnectError):
            await pd.to_decode.get("/health")
