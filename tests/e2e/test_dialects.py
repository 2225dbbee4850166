"""Responses and Messages are read as the chats that the engine makes of them: the same token ids."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_metrics import counter
from processes import EngineProcess, Serve
from request_bodies import MESSAGES, RESPONSES

from moongate.engine_plugins.vllm_messages import messages_as_chat
from moongate.engine_plugins.vllm_render import ModelRenderer
from moongate.engine_plugins.vllm_responses import responses_as_chat

EnginePair = tuple[EngineProcess, EngineProcess]


@pytest.fixture(scope="module")
def renderer(tiny_model: Path) -> ModelRenderer:
    return ModelRenderer.load(tiny_model)


def rendered(engine: EngineProcess, path: str, body: Mapping[str, Any]) -> list[int]:
    """Return the ids that the engine says it would compute."""
    url = f"{engine.url}{path}/render"
    answer = httpx.post(url, json={"model": "tiny", **body}, timeout=30, trust_env=False)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["token_ids"]
    return ids


@pytest.mark.parametrize("name", RESPONSES)
def test_responses_have_the_engines_own_token_ids(
    name: str, engines: EnginePair, renderer: ModelRenderer
) -> None:
    theirs = rendered(engines[0], "/v1/responses", RESPONSES[name])
    assert renderer.chat_token_ids(responses_as_chat(RESPONSES[name])) == theirs


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_have_the_engines_own_token_ids(
    name: str, engines: EnginePair, renderer: ModelRenderer
) -> None:
    body = {"max_tokens": 1, **MESSAGES[name]}
    theirs = rendered(engines[0], "/v1/messages", body)
    assert renderer.chat_token_ids(messages_as_chat(body, renderer.manners)) == theirs


TEXT = "def f(self): return lambda x: not x\n" * 500  # about 6,000 tokens

AGENT_BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "input as a text": ("/v1/responses", {"input": TEXT}),
    "input as a list": ("/v1/responses", {"input": [{"role": "user", "content": TEXT}]}),
    "instructions": ("/v1/responses", {"input": "x", "instructions": TEXT}),
    "system blocks": (
        "/v1/messages",
        {
            "system": [{"type": "text", "text": TEXT}],
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 1,
        },
    ),
}


@pytest.mark.parametrize("name", AGENT_BODIES)
def test_c40_the_same_body_again_goes_where_its_prefix_is(
    name: str, engines: EnginePair, serve: Serve
) -> None:
    path, body = AGENT_BODIES[name]
    gateway = serve(engines)
    for engine in engines:
        httpx.post(f"{engine.url}/reset_prefix_cache", trust_env=False)
    limit = {"max_output_tokens": 1} if path == "/v1/responses" else {}
    with httpx.Client(base_url=gateway.url, timeout=60.0, trust_env=False) as client:
        first, second = (
            client.post(path, json={"model": "tiny", **limit, **body}) for _ in range(2)
        )
    assert (first.status_code, second.status_code) == (200, 200), second.text
    assert second.headers["x-moongate-reason"] == "device_prefix"
    assert second.headers["x-moongate-instance"] == first.headers["x-moongate-instance"]
    assert int(second.headers["x-moongate-device-tokens"]) > 5_000
    assert counter(gateway.url, "moongate_route_fallback_total") == 0


def test_c40_what_only_the_engine_can_render_it_is_asked_for(
    engines: EnginePair, serve: Serve
) -> None:
    gateway = serve(engines)
    for engine in engines:
        httpx.post(f"{engine.url}/reset_prefix_cache", trust_env=False)
    body = {
        "model": "tiny", "input": TEXT, "max_output_tokens": 1,
        "tools": [{"type": "custom", "name": "free", "description": "d"}],
    }  # fmt: skip
    with httpx.Client(base_url=gateway.url, timeout=60.0, trust_env=False) as client:
        first, second = (client.post("/v1/responses", json=body) for _ in range(2))
    assert (first.status_code, second.status_code) == (200, 200), second.text
    assert second.headers["x-moongate-reason"] == "device_prefix"
    predicted = int(second.headers["x-moongate-device-tokens"])
    assert predicted > 5_000
    usage = second.json()["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == predicted
    assert int(second.headers["x-moongate-prompt-tokens"]) == usage["input_tokens"]
    assert counter(gateway.url, "moongate_route_fallback_total") == 0


def test_c40_a_prompt_that_can_not_be_read_is_counted(engines: EnginePair, serve: Serve) -> None:
    gateway = serve(engines)
    call = {"type": "tool_use", "name": "look", "input": {}}  # whose id the engine makes up
    answer = httpx.post(
        f"{gateway.url}/v1/messages",
        json={
            "model": "tiny", "max_tokens": 1,
            "messages": [
                {"role": "user", "content": "x"}, {"role": "assistant", "content": [call]},
                {"role": "user", "content": "y"},
            ],
        },
        timeout=60.0, trust_env=False,
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    assert counter(gateway.url, "moongate_route_fallback_total", reason="call_without_id") == 1
