"""Tenants over real sockets: who is let in, what engines see of their keys, and what nobody sees of another."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_engine import FakeEngine, Received, chat_answer, stream_event
from live_gateway import LiveGateway, live_gateway, until
from otlp_receiver import Collector
from pd_fleet import pd_fleet
from raw_client import get, post, raw_client

from moongate.gateway.auth.tenants import make_salt

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]

KEYS = {"GW_A": "gw-1", "GW_B": "gw-2", "ENGINE": "b-1", "ADMIN": "gw-admin", "SALT": "secret"}
A: dict[str, Any] = {"key_env": "GW_A", "tenant": "a"}
B: dict[str, Any] = {"key_env": "GW_B", "tenant": "b"}
AS_A = {"authorization": "Bearer gw-1"}
AS_B = {"x-api-key": "gw-2"}
SALTS = {name: make_salt("secret", name) for name in "ab"}


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, key in KEYS.items():
        monkeypatch.setenv(name, key)


def auth(*keys: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    return {"keys": list(keys or (A, B)), "salt_env": "SALT", **others}


async def rejected(gateway: LiveGateway, reason: str) -> float:
    return await gateway.metric("moongate_rejected_total", reason=reason)


# --- who is let in --------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [AS_A, {"x-api-key": "gw-1"}])
async def test_c98_no_engine_sees_a_clients_key(headers: dict[str, str]) -> None:
    others = {"x-other": "k=gw-1", "x-request-id": "gw-1", "cookie": "key=gw-1", "api-key": "gw-1"}
    async with FakeEngine() as with_key, FakeEngine() as without:
        instances = [
            {"id": "a", "url": with_key.url, "api_key_env": "ENGINE"},
            {"id": "b", "url": without.url},
        ]
        policy = {"name": "round_robin"}
        async with live_gateway([], instances=instances, auth=auth(), policy=policy) as gateway:
            for _ in range(4):
                answer = await gateway.client.post(
                    "/v1/chat/completions?beta=true&key=%67w-1",
                    json={"model": "m", "messages": [{"role": "user", "content": "hi"}]},
                    headers={**headers, **others, "x-kept": "kept"},
                )
                assert answer.status_code == 200
                assert "gw-1" not in str(answer.headers)
    seen = [*with_key.received, *without.received]
    assert (len(with_key.received), len(without.received)) == (2, 2)
    for request in seen:
        assert "gw-1" not in str(request.headers)
        assert request.headers["x-kept"] == "kept"
        assert request.path == "/v1/chat/completions"
        assert not {"x-api-key", "cookie", "x-other"} & request.headers.keys()
    assert {request.headers["authorization"] for request in with_key.received} == {"Bearer b-1"}
    assert not any("authorization" in request.headers for request in without.received)


async def test_c98_only_who_says_so_passes_keys_on() -> None:
    async with FakeEngine() as engine:
        passing = auth(forward_client_key=True)
        async with live_gateway([engine.url], auth=passing) as gateway:
            assert (await gateway.chat(headers=AS_A)).status_code == 200
    assert engine.received[0].headers["authorization"] == "Bearer gw-1"


PATHS = [
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings",
    "/v1/rerank", "/v1/score", "/v1/messages/count_tokens", "/tokenize", "/detokenize",
    "/v1/responses/resp_1", "/v1/responses/resp_1/cancel", "/v1/models", "/reset_prefix_cache",
    "/sleep", "/wake_up", "/collective_rpc", "/v1/load_lora_adapter", "//v1/models",
    "/v1/../sleep", "/V1/models", "/v1/models/", "/admin/instances", "/admin/decisions",
    "/admin/live", "/admin/explain", "/admin/openapi.json", "/admin", "/", "/health/",
    "/ready/../v1/models", "/metrics/x", "/uix", "/docs", "/openapi.json",
]  # fmt: skip


@pytest.mark.parametrize("key", [None, "wrong", "gw-1x", "gw-"])
async def test_c101_without_a_key_nothing_is_open_but_what_watches(key: str | None) -> None:
    headers = [f"authorization: Bearer {key}"] if key is not None else []
    async with FakeEngine() as engine:
        calls: list[str] = []

        async def note(request: Received) -> None:
            calls.append(request.path)
            await request.answer(200, b"{}")

        for path in PATHS:
            engine.side_calls.setdefault(path, note)
        del engine.side_calls["/v1/models"]
        keys = auth(admin_key_env="ADMIN")
        async with live_gateway([engine.url], auth=keys) as gateway:
            calls.clear()  # of the gateway's own, by which it got to know the engine
            for path in PATHS:
                for request in (get(path, *headers), post(b"{}", *headers, path=path)):
                    async with raw_client(gateway.port) as client:
                        await client.send(request)
                        answer = await client.answer()
                    assert answer.status == 401, (path, answer.body)
                    assert answer.headers["www-authenticate"] == "Bearer"
                    assert answer.headers["x-request-id"]
            for path in ("/health", "/ready", "/metrics", "/ui"):
                assert (await gateway.client.get(path)).status_code in (200, 307)
            assert await rejected(gateway, "invalid_api_key") >= 2 * (len(PATHS) - 8)
            assert await gateway.metric("moongate_requests_total", code="200") == 0
    assert engine.received == []
    assert calls == []


async def test_errors_have_the_shape_of_the_api_that_was_asked() -> None:
    async with FakeEngine() as engine, live_gateway([engine.url], auth=auth()) as gateway:
        ours = (await gateway.client.post("/v1/chat/completions", content=b"not JSON")).json()
        assert ours["error"]["code"] == "invalid_api_key"
        assert ours["error"]["type"] == "invalid_request_error"
        for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches"):
            theirs = (await gateway.client.post(path, content=b"{}")).json()
            assert theirs["type"] == "error"
            assert theirs["error"]["type"] == "authentication_error"


async def test_who_has_no_key_is_refused_before_the_body_is_read() -> None:
    async with FakeEngine() as engine, live_gateway([engine.url], auth=auth()) as gateway:
        async with raw_client(gateway.port) as client:
            length = "content-length: 60000000"
            await client.send(post(b"", "expect: 100-continue", framing=length))
            answer = await client.answer()
            assert (answer.status, answer.closes) == (401, True)
        tokenized = await gateway.metric("moongate_tokenize_seconds_count")
        assert tokenized == 0


async def test_with_a_key_everything_goes_its_way() -> None:
    async with FakeEngine() as engine, live_gateway([engine.url], auth=auth()) as gateway:
        for headers in (AS_A, AS_B):
            assert (await gateway.chat(headers=headers)).status_code == 200
            assert (await gateway.client.get("/v1/models", headers=headers)).status_code == 200
            assert (await gateway.client.get("/nowhere", headers=headers)).status_code == 404
        assert (await gateway.client.get("/admin/instances")).status_code == 200
        passed_on = {"x-forwarded-for": "10.0.0.1"}
        answer = await gateway.client.get("/admin/instances", headers=passed_on)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:9", 200),
        ("LOCALHOST", 200),
        ("127.0.0.9", 200),
        ("[::1]:9", 200),
        ("evil.example", 403),  # a name that points here now
        ("localhost.evil.example:9", 403),
        ("127.0.0.1.evil.example", 403),
        ("192.0.2.7", 403),
        ("", 403),
    ],
)
async def test_what_is_for_this_machine_is_not_for_pages_that_a_browser_on_it_shows(
    host: str, status: int
) -> None:
    headers = {"host": host}
    async with FakeEngine() as engine:
        async with live_gateway([engine.url], auth=auth()) as gateway:
            read = await gateway.client.get("/admin/instances", headers=headers)
            changed = await gateway.client.post("/admin/instances/a/undrain", headers=headers)
            assert (read.status_code, changed.status_code) == (status, status)
            open_to_all = await gateway.client.get("/metrics", headers=headers)
            assert open_to_all.status_code == 200
        async with live_gateway([engine.url]) as gateway:  # everybody may read
            read = await gateway.client.get("/admin/instances", headers=headers)
            changed = await gateway.client.post("/admin/instances/a/undrain", headers=headers)
            assert (read.status_code, changed.status_code) == (200, status)


async def test_the_name_that_the_gateway_listens_on_is_its_own() -> None:
    listen = {"host": "gateway.example"}  # in the settings only: the test's socket is another
    async with FakeEngine() as engine:
        async with live_gateway([engine.url], auth=auth(), listen=listen) as gateway:
            for host, status in (("gateway.example:8000", 200), ("other.example", 403)):
                read = await gateway.client.get("/admin/instances", headers={"host": host})
                assert read.status_code == status


@pytest.mark.parametrize(
    ("said", "passed"),
    [
        ("0", 0),
        ("7", 7),
        ("-1", None),
        ("-1.0", None),
        ('"-1"', None),
        ("null", None),
        ('7,"priority":-1', None),
        ('7,"pri\\u006frity":-1', None),
        ('-1,"n":NaN', None),
    ],
)
async def test_no_tenant_overtakes_others_on_engines(said: str, passed: int | None) -> None:
    raw = '{"model":"m","messages":[{"role":"user","content":"x"}],"priority":' + said + "}"
    headers = {**AS_A, "X-Vllm-Priority": "-5", "content-type": "application/json"}
    path = "/v1/chat/completions"
    async with FakeEngine() as engine:
        async with live_gateway([engine.url], auth=auth()) as gateway:
            assert (await gateway.client.post(path, content=raw, headers=headers)).is_success
        async with live_gateway([engine.url]) as gateway:  # everybody is one
            assert (await gateway.client.post(path, content=raw, headers=headers)).is_success
    of_tenant, of_anybody = engine.received
    assert of_tenant.json().get("priority") == passed
    assert "x-vllm-priority" not in of_tenant.headers
    assert of_anybody.body == raw.encode()
    assert of_anybody.headers["x-vllm-priority"] == "-5"


async def test_a_key_file_that_comes_to_hold_anothers_key_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "b.key"
    file.write_text("gw-b")
    keys = auth(A, {"key_file": str(file), "tenant": "b"}, admin_key_env="ADMIN")
    async with FakeEngine() as engine, live_gateway([engine.url], auth=keys) as gateway:
        access = gateway.server.gateway.access
        for taken in ("gw-1", "gw-admin"):
            file.write_text(taken)
            assert not access.refresh()
            tenants = access.tenants
            assert tenants.find({"authorization": "Bearer gw-1"}).name == "a"
            assert tenants.find({"authorization": "Bearer gw-b"}).name == "b"
        assert (await gateway.chat(headers={"x-api-key": "gw-admin"})).status_code == 401


async def test_a_key_file_is_read_again_under_way(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("gw-old\n")
    keys = auth({"key_file": str(file), "tenant": "a"})
    old, new = {"x-api-key": "gw-old"}, {"x-api-key": "gw-newer"}
    async with FakeEngine() as engine, live_gateway([engine.url], auth=keys) as gateway:
        assert (await gateway.chat(headers=old)).status_code == 200
        assert (await gateway.chat(headers=new)).status_code == 401
        file.write_text("gw-newer\n")

        async def is_read() -> bool:
            return (await gateway.chat(headers=new)).status_code == 200

        await until(is_read)
        assert (await gateway.chat(headers=old)).status_code == 401


async def test_no_key_is_told_anywhere(caplog: pytest.LogCaptureFixture) -> None:
    """Sent in every place that is echoed, hashed, logged or remembered."""
    caplog.set_level("DEBUG")
    async with FakeEngine() as engine, Collector() as collector:
        observability = {"otlp_endpoint": collector.url}
        async with live_gateway([engine.url], auth=auth(), observability=observability) as gateway:
            given = {"x-session-id": "gw-1", "x-request-id": "gw-1", "traceparent": "gw-1"}
            headers = {**AS_A, **given, "x-moongate-policy": "gw-1", "user-agent": "gw-1"}
            told = [await gateway.chat(headers=headers, user="gw-1", metadata={"user_id": "gw-1"})]
            told += [
                await gateway.client.get(path, headers={"x-request-id": "gw-1"})
                for path in (
                    "/admin/decisions", "/admin/instances", "/admin/index", "/metrics", "/ready",
                )
            ]  # fmt: skip
            assert {answer.status_code for answer in told} == {200}
            live = gateway.server.gateway.view.parts()
    for text in [*(str(answer.headers) + answer.text for answer in told), repr(live)]:
        assert "gw-1" not in text
        assert SALTS["a"] not in text
    assert len(collector.bodies) == 1  # written when the gateway stops
    assert b"gw-1" not in collector.bodies[0]
    assert "gw-1" not in caplog.text
    assert SALTS["a"] not in caplog.text


# --- models ---------------------------------------------------------------------------------------


async def test_a_tenant_sees_and_uses_its_own_models_only() -> None:
    async with FakeEngine(model="m") as one, FakeEngine(model="secret") as other:
        limited = auth({**A, "models": ["m"]}, {**B, "models": ["other-name"]})
        aliases = {"aliases": {"other-name": "secret"}}
        async with live_gateway([one.url, other.url], auth=limited, models=aliases) as gateway:
            for headers, names in ((AS_A, ["m"]), (AS_B, ["other-name"])):
                listed = (await gateway.client.get("/v1/models", headers=headers)).json()
                assert [card["id"] for card in listed["data"]] == names
            assert (await gateway.chat(headers=AS_A)).status_code == 200
            for headers, model in ((AS_A, "secret"), (AS_A, "other-name"), (AS_B, "m")):
                answer = await gateway.chat(headers=headers, model=model)
                assert (answer.status_code, answer.json()["error"]["code"]) == (
                    404,
                    "model_not_found",
                )
                # Exactly as if there were none.
                nothing = await gateway.chat(headers=headers, model="none")
                assert answer.text.replace(f"'{model}'", "'none'") == nothing.text
            renamed = await gateway.chat(headers=AS_B, model="other-name")
            assert renamed.status_code == 200
            assert len(other.received) == 1
            # By its real name it isn't what this tenant may ask for.
            assert (await gateway.chat(headers=AS_B, model="secret")).status_code == 404


async def test_a_body_that_names_no_model_means_the_only_one_if_it_may() -> None:
    limited = auth(A, {**B, "models": ["other"]})
    async with FakeEngine() as engine, live_gateway([engine.url], auth=limited) as gateway:
        body = {"prompt": "x"}
        one = await gateway.client.post("/tokenize", json=body, headers=AS_A)
        other = await gateway.client.post("/tokenize", json=body, headers=AS_B)
        assert one.json()["detail"] == "Not Found"  # the engine's
        assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")


# --- what is cached -------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "x"}]
DIALECTS: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x", "store": False},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/embeddings": {"input": "x"},
    "/v1/rerank": {"query": "x", "documents": ["y"]},
    "/v1/score": {"text_1": "x", "text_2": "y"},
}


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("has_messages", [True, False])
async def test_every_dialect_is_cached_under_the_tenants_salt(
    path: str, has_messages: bool
) -> None:
    fields = {"model": "m", **DIALECTS[path], "cache_salt": "mine"}
    async with FakeEngine() as engine:
        engine.has_messages = has_messages
        async with live_gateway([engine.url], auth=auth()) as gateway:
            for headers in (AS_A, AS_B):
                answer = await gateway.client.post(path, json=fields, headers=headers)
                assert answer.status_code == 200, answer.text
    assert [body["cache_salt"] for body in engine.bodies] == [SALTS["a"], SALTS["b"]]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/messages/count_tokens"])
async def test_what_is_not_cached_passes_as_it_is(path: str) -> None:
    raw = b'{ "model":"m", "messages":[], "tokens":[1] }'
    async with FakeEngine() as engine:

        async def note(request: Received) -> None:
            engine.received.append(request)
            await request.answer(200, b"{}")

        async with live_gateway([engine.url], auth=auth()) as gateway:
            engine.side_calls["/tokenize"] = note
            await gateway.client.post(path, content=raw, headers=AS_A)
    assert [request.body for request in engine.received] == [raw]


SPELLINGS = [
    b'{ "model":"m","messages":[{"role":"user","content":"x"}], "cache_salt":"b" }',
    b'{"cache_salt":"x","model":"m","messages":[{"role":"user","content":"x"}],"cache_salt":"b"}',
    b'{"cache\\u005fsalt":"b","model":"m","messages":[{"role":"user","content":"x"}]}',
    b'{"model":"m","messages":[{"role":"user","content":"x"}],"cache_salt":null,"cache_salt":["b"]}',
    b'{"cache_salt":"b","model":"m","temperature":NaN,"messages":[{"role":"user","content":"x"}]}',
    b'{"model":"m","messages":[{"role":"user","content":"\\"cache_salt\\":\\"b\\"}"}]}',
    b'{"model":"m","messages":[{"role":"user","content":"%b"}],"cache_salt":"b","cache_\\u0073alt":"b"}'
    % (b"x" * 20_000),
]


@pytest.mark.parametrize("raw", SPELLINGS)
async def test_a_salt_of_a_clients_own_does_not_slip_through(raw: bytes) -> None:
    """However it is spelled, and however often: neither a parser that takes the first nor the last."""
    async with FakeEngine() as engine, live_gateway([engine.url], auth=auth()) as gateway:
        answer = await gateway.client.post("/v1/chat/completions", content=raw, headers=AS_A)
        assert answer.status_code == 200, answer.text
    pairs: list[tuple[str, Any]] = []

    def note(found: list[tuple[str, Any]]) -> dict[str, Any]:
        pairs[:] = found
        return dict(found)

    sent = json.loads(engine.received[0].body, object_pairs_hook=note)
    assert [value for name, value in pairs if name == "cache_salt"] == [SALTS["a"]]
    assert sent["messages"] == json.loads(raw)["messages"]


async def test_every_other_byte_stays_as_it_came() -> None:
    raw = b'{ "model" : "m",\t"messages":[ {"role":"user", "content":"\\u00e9 1"} ] ,"x":1.0E2 }\n'
    async with FakeEngine() as engine, live_gateway([engine.url], auth=auth()) as gateway:
        await gateway.client.post("/v1/chat/completions", content=raw, headers=AS_A)
    assert engine.received[0].body == raw[:-2] + b',"cache_salt":"%b"}\n' % SALTS["a"].encode()


async def test_who_shares_the_cache_keeps_what_it_says() -> None:
    sharing = auth({**A, "shares_cache": True}, B)
    raw = b'{"model":"m","messages":[{"role":"user","content":"x"}]}'
    async with FakeEngine() as engine, live_gateway([engine.url], auth=sharing) as gateway:
        await gateway.client.post("/v1/chat/completions", content=raw, headers=AS_A)
        await gateway.chat(headers=AS_A, cache_salt="mine")
        await gateway.chat(headers=AS_B, cache_salt="mine")
    assert engine.received[0].body == raw
    assert [body["cache_salt"] for body in engine.bodies[1:]] == ["mine", SALTS["b"]]


SYSTEM = "You are an agent that writes def and class. " * 20


async def test_a_tenant_finds_what_it_has_cached_and_no_other_does() -> None:
    """By timing, too: engines compute the same prompt anew for another tenant, and routing knows."""
    async with pd_fleet(prefill=0, decode=0, both=3, auth=auth()) as fleet:
        messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]

        async def turn(headers: Mapping[str, str], **fields: Any) -> tuple[int, int, str]:
            sent = [*messages, {"role": "user", "content": "go on " * 30}]
            answer = await fleet.gateway.chat(
                messages=sent, headers=headers, max_tokens=2, **fields
            )
            assert answer.status_code == 200, answer.text
            cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            told = answer.headers
            return int(told["x-moongate-device-tokens"]), cached, told["x-moongate-instance"]

        assert (await turn(AS_A))[:2] == (0, 0)
        expected, delivered, home = await turn(AS_A)
        assert expected == delivered > 200
        for stolen in ({}, {"cache_salt": SALTS["a"]}):
            expected, delivered, _ = await turn(AS_B, **stolen)
            if not stolen:
                assert (expected, delivered) == (0, 0)
        expected, delivered, _ = await turn(AS_B)
        assert expected == delivered > 200
        assert (await turn(AS_A))[0::2] == (expected, home)

        sent = {"model": "m", "messages": [*messages, {"role": "user", "content": "go on " * 30}]}
        for query, found in ({"tenant": "a"}, expected), ({}, 0):
            dry = await fleet.gateway.client.post("/admin/explain", params=query, json=sent)
            overlaps = [c["overlap_tokens"]["device"] for c in dry.json()["candidates"]]
            assert max(overlaps) == found
        nobody = await fleet.gateway.client.post("/admin/explain?tenant=zz", json=sent)
        assert (nobody.status_code, nobody.json()["error"]["param"]) == (400, "tenant")


async def test_one_session_key_of_two_tenants_is_two_sessions() -> None:
    turn: dict[str, Any] = {
        "messages": [{"role": "system", "content": SYSTEM * 3}, *MESSAGES],
        "max_tokens": 1,
    }
    changed = {"role": "system", "content": "x" + SYSTEM * 3}
    other: dict[str, Any] = {"messages": [changed, *MESSAGES], "max_tokens": 1}
    session = {"x-session-id": "one"}
    async with pd_fleet(prefill=0, decode=0, both=1, auth=auth()) as fleet:
        gateway = fleet.gateway
        await gateway.chat(headers={**AS_A, **session}, **turn)
        await gateway.chat(headers={**AS_B, **session}, **other)
        assert await gateway.metric("moongate_prefix_divergences_total") == 0
        found = (await gateway.client.get("/admin/decisions")).json()["decisions"]
        assert len({receipt["session"] for receipt in found}) == 2
        assert [receipt["tenant"] for receipt in found] == ["b", "a"]
        ours = await gateway.client.get("/admin/decisions", params={"session": "a/one"})
        assert len(ours.json()["decisions"]) == 1
        # It is still one session to its own tenant.
        await gateway.chat(headers={**AS_A, **session}, **other)
        assert await gateway.metric("moongate_prefix_divergences_total") == 1


# --- stored responses -----------------------------------------------------------------------------


async def respond(request: Received) -> None:
    output = {"type": "message", "role": "assistant", "content": []}
    answer = {"id": "resp_1", "object": "response", "status": "completed", "output": [output]}
    await request.answer(200, json.dumps(answer, separators=(",", ":")).encode())


async def test_a_stored_response_is_its_tenants() -> None:
    async with FakeEngine(respond) as engine:
        async with live_gateway([engine.url], auth=auth()) as gateway:
            client = gateway.client
            body = {"model": "m", "input": "hi"}
            await client.post("/v1/responses", json=body, headers=AS_A)
            for method, path in (
                ("GET", "/v1/responses/resp_1"), ("DELETE", "/v1/responses/resp_1"),
                ("POST", "/v1/responses/resp_1/cancel"), ("GET", "/v1/responses/resp_1?stream=true"),
            ):  # fmt: skip
                answer = await client.request(method, path, headers=AS_B)
                assert answer.json()["error"]["code"] == "response_not_found"
            further = {**body, "previous_response_id": "resp_1"}
            answer = await client.post("/v1/responses", json=further, headers=AS_B)
            assert (answer.status_code, len(engine.received)) == (404, 1)
            # Even one of the same id is another one.
            await client.post("/v1/responses", json=body, headers=AS_B)
            await client.delete("/v1/responses/resp_1", headers=AS_B)
            assert (await client.get("/v1/responses/resp_1", headers=AS_A)).status_code == 200
            answer = await client.post("/v1/responses", json=further, headers=AS_A)
            assert answer.status_code == 200


async def test_a_response_in_the_background_is_its_tenants() -> None:
    can_answer = asyncio.Event()

    async def wait(request: Received) -> None:
        await can_answer.wait()
        await respond(request)

    async with FakeEngine(wait) as engine, live_gateway([engine.url], auth=auth()) as gateway:
        client = gateway.client
        body = {"model": "m", "input": "hi", "background": True}
        begun = (await client.post("/v1/responses", json=body, headers=AS_A)).json()
        path = f"/v1/responses/{begun['id']}"
        for method, tail in (("GET", ""), ("POST", "/cancel"), ("DELETE", "")):
            assert (await client.request(method, path + tail, headers=AS_B)).status_code == 404
        can_answer.set()

        async def status() -> Any:
            return (await client.get(path, headers=AS_A)).json()["status"]

        async def is_complete() -> bool:
            return bool(await status() == "completed")

        await until(is_complete)
        assert engine.bodies[0]["cache_salt"] == SALTS["a"]


# --- rates ----------------------------------------------------------------------------------------


async def test_requests_past_the_rate_are_told_when_to_come_again() -> None:
    limited = auth({**A, "requests_per_minute": 3}, B)
    async with FakeEngine() as engine, live_gateway([engine.url], auth=limited) as gateway:
        answers = [await gateway.chat(headers=AS_A) for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        left = [answer.headers["x-ratelimit-remaining-requests"] for answer in answers]
        assert left == ["2", "1", "0", "0"]
        refused = answers[3]
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert refused.headers["retry-after"] in ("19", "20")
        assert refused.headers["x-ratelimit-limit-requests"] == "3"
        assert refused.headers["x-ratelimit-reset-requests"] in ("59s", "1m0s")
        assert "x-ratelimit-limit-tokens" not in refused.headers
        assert "connection" not in refused.headers
        message = await gateway.client.post(
            "/v1/messages", json={"model": "m", **DIALECTS["/v1/messages"]}, headers=AS_A
        )
        assert (message.status_code, message.json()["error"]["type"]) == (429, "rate_limit_error")
        unlimited = await gateway.chat(headers=AS_B)
        assert unlimited.status_code == 200
        assert not [name for name in unlimited.headers if name.startswith("x-ratelimit")]
        assert await rejected(gateway, "requests_per_minute") == 2
        assert await gateway.metric("moongate_requests_total", code="429") == 2
    assert len(engine.received) == 4


async def test_openai_python_knows_what_it_is_told() -> None:
    limited = auth({**A, "requests_per_minute": 1}, B)
    async with FakeEngine() as engine, live_gateway([engine.url], auth=limited) as gateway:

        async def ask(key: str) -> object:
            url = f"{gateway.url}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
                return await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "x"}]
                )

        with pytest.raises(openai.AuthenticationError) as wrong:
            await ask("wrong")
        assert wrong.value.code == "invalid_api_key"
        await ask("gw-1")
        with pytest.raises(openai.RateLimitError) as limit:
            await ask("gw-1")
        assert limit.value.code == "rate_limit_exceeded"
        assert int(limit.value.response.headers["retry-after"]) in (59, 60)


def usage_of(prompt_tokens: int, completion_tokens: int) -> bytes:
    answer = json.loads(chat_answer())
    answer["usage"] = {
        "prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }  # fmt: skip
    return json.dumps(answer).encode()


def tokens_left(answer: httpx.Response) -> int:
    return int(answer.headers["x-ratelimit-remaining-tokens"])


async def test_tokens_are_counted_as_engines_report_them() -> None:
    async def answer(request: Received) -> None:
        await request.answer(200, usage_of(300, 500))

    limited = auth({**A, "tokens_per_minute": 1000}, B)
    async with FakeEngine(answer) as engine:
        async with live_gateway([engine.url], auth=limited) as gateway:
            first = await gateway.chat(headers=AS_A)
            assert 960 < tokens_left(first) < 1000  # by its size, before it is known
            second = await gateway.chat(headers=AS_A)
            assert 160 < tokens_left(second) < 200 + 20
            third = await gateway.chat(headers=AS_A)
            assert third.status_code == 429
            assert third.json()["error"]["code"] == "rate_limit_exceeded"
            assert 20 < int(third.headers["retry-after"]) <= 37  # 600 are owed, at 16.7 a second
            assert tokens_left(third) == 0
            assert await rejected(gateway, "tokens_per_minute") == 1
    assert len(engine.received) == 2


async def test_what_an_engine_refuses_or_never_answers_costs_no_tokens() -> None:
    async def refuse(request: Received) -> None:
        await request.answer(400, b'{"error":{"message":"no"}}')

    async def fail(request: Received) -> None:
        request.cut()

    async def break_off(request: Received) -> None:
        await request.start_stream()
        for _ in range(50):
            await request.send_chunk(stream_event("x"))
        await asyncio.sleep(0.05)
        request.cut()

    limited = auth({**A, "tokens_per_minute": 1000}, B)
    async with FakeEngine(refuse) as engine:
        async with live_gateway([engine.url], auth=limited) as gateway:
            for handler, status in ((refuse, 400), (fail, 502)):
                engine.handler = handler
                answer = await gateway.chat(headers=AS_A, content="x" * 2000)
                assert answer.status_code == status
            refused = await gateway.chat(headers=AS_A, model="none", content="x" * 2000)
            assert refused.status_code == 404
            engine.handler = break_off
            broken = await gateway.chat(headers=AS_A, stream=True)
            assert tokens_left(broken) > 950
            engine.handler = refuse
            # But what had come of a stream does: an event is a token.
            assert 880 < tokens_left(await gateway.chat(headers=AS_A)) < 950


async def test_a_stream_is_counted_though_its_client_did_not_ask_for_its_usage() -> None:
    async def stream(request: Received) -> None:
        assert request.json()["stream_options"] == {"include_usage": True}
        await request.start_stream()
        await request.send_chunk(stream_event("x"))
        await request.send_chunk(
            b'data: {"choices":[],"usage":{"prompt_tokens":100,"completion_tokens":600}}\n\n'
        )
        await request.send_chunk(b"data: [DONE]\n\n")
        await request.send_chunk(b"")

    limited = auth({**A, "tokens_per_minute": 1000}, B)
    async with FakeEngine(stream) as engine:
        async with live_gateway([engine.url], auth=limited) as gateway:
            first = await gateway.chat(headers=AS_A, stream=True)
            assert b'"usage"' not in first.content
            assert 250 < tokens_left(await gateway.chat(headers=AS_A, stream=True)) < 310


async def test_a_client_that_leaves_pays_for_what_it_had() -> None:
    started = asyncio.Event()

    async def stream(request: Received) -> None:
        await request.start_stream()
        for _ in range(400):
            await request.send_chunk(stream_event("x"))
        started.set()
        await request.client_left.wait()

    limited = auth({**A, "tokens_per_minute": 1000}, B)
    async with FakeEngine(stream) as engine:
        async with live_gateway([engine.url], auth=limited) as gateway:
            body = {"model": "m", "messages": MESSAGES, "stream": True}
            async with gateway.client.stream(
                "POST", "/v1/chat/completions", json=body, headers=AS_A
            ) as answer:
                events = 0
                async for line in answer.aiter_lines():
                    events += line.startswith("data:")
                    if events == 400:
                        break
            await until(lambda: gateway.inflight() == 0)
            engine.handler = respond
            assert 500 < tokens_left(await gateway.chat(headers=AS_A)) < 610


async def test_what_is_over_a_limit_reaches_no_engine_and_costs_no_tokens() -> None:
    limits = {"json_depth_max": 16, "messages_max": 5, "stop_max": 3}
    limited = auth({**A, "tokens_per_minute": 100_000}, B)
    deep: Any = "x"
    for _ in range(20):
        deep = [deep]
    async with FakeEngine() as engine:
        async with live_gateway([engine.url], auth=limited, limits=limits) as gateway:
            for padding in ("", "x" * 20_000):  # a small body, and one that is outlined first
                message = {"role": "user", "content": padding}
                for fields, named in (
                    (
                        {"messages": [message], "tools": deep},
                        "tools: nested too deeply; limits.json",
                    ),
                    ({"messages": [message] * 6}, "messages: 6 items; limits.messages_max is 5"),
                    (
                        {"messages": [message], "stop": ["x"] * 4},
                        "stop: 4 stop strings; limits.stop",
                    ),
                ):
                    answer = await gateway.chat(headers=AS_A, **fields)
                    assert answer.status_code == 400
                    assert answer.json()["error"]["message"].startswith(named)
                    assert answer.json()["error"]["param"] == named.partition(":")[0]
            for path, fields in (
                ("/v1/responses", {"input": ["x"] * 6, "background": True}),
                ("/v1/completions", {"prompt": ["x"] * 6}),
                ("/v1/messages", {"messages": [], "max_tokens": 1, "stop_sequences": ["x"] * 4}),
            ):
                answer = await gateway.client.post(
                    path, json={"model": "m", **fields}, headers=AS_A
                )
                assert answer.status_code == 400, answer.text
            assert engine.received == []
            just: dict[str, Any] = {"messages": MESSAGES * 5, "stop": ["x"] * 3}
            fine = await gateway.chat(headers=AS_A, **just)
            assert fine.status_code == 200
            assert tokens_left(fine) > 99_900


async def test_a_response_in_the_background_is_one_request() -> None:
    limited = auth({**A, "requests_per_minute": 2, "tokens_per_minute": 1000}, B)
    async with FakeEngine(respond) as engine, live_gateway([engine.url], auth=limited) as gateway:
        body = {"model": "m", "input": "hi", "background": True}
        await gateway.client.post("/v1/responses", json=body, headers=AS_A)
        await until(lambda: len(engine.received) == 1)
        second = await gateway.chat(headers=AS_A)
        assert second.headers["x-ratelimit-remaining-requests"] == "0"
        assert len(engine.received) == 2


async def test_tokens_that_are_only_counted_are_not_spent() -> None:
    async def count(request: Received) -> None:
        await request.answer(200, b'{"input_tokens":3000}')

    keys = auth({**A, "tokens_per_minute": 5000, "requests_per_minute": 10})
    body = {"model": "m", "messages": [{"role": "user", "content": "hi " * 400}], "max_tokens": 1}
    async with FakeEngine(count) as engine, live_gateway([engine.url], auth=keys) as gateway:
        path = "/v1/messages/count_tokens"
        left = [
            int(
                (await gateway.client.post(path, json=body, headers=AS_A)).headers[
                    "x-ratelimit-remaining-tokens"
                ]
            )
            for _ in range(4)
        ]
        assert min(left) > 4000, "a guess at a time, which comes back"
