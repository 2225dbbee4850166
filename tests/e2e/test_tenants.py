"""Tenants before real engines: in every dialect each finds what it has cached, and nobody else does."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from processes import EngineProcess, Serve

EnginePair = tuple[EngineProcess, EngineProcess]

TEXT = "def f(self): return lambda x: not x\n" * 60
KEYS = {"E2E_KEY_A": "key-a", "E2E_KEY_B": "key-b"}


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{text} {TEXT}"}]


# Prompts of their own: a tenant finds in one dialect what it has cached by another.
DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": messages("one"), "max_tokens": 2}),
    "completion": ("/v1/completions", {"prompt": TEXT, "max_tokens": 2}),
    "response": (
        "/v1/responses",
        {"input": messages("three"), "max_output_tokens": 2, "store": False},
    ),
    "message": ("/v1/messages", {"messages": messages("four"), "max_tokens": 2}),
}


def cached_tokens(answer: httpx.Response) -> int:
    """Return the hit that the engine reports, in whichever dialect."""
    usage = answer.json()["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return int(details.get("cached_tokens") or usage.get("cache_read_input_tokens") or 0)


@pytest.mark.parametrize("name", DIALECTS)
def test_what_one_tenant_has_cached_no_other_finds(
    name: str, engines: EnginePair, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, key in KEYS.items():
        monkeypatch.setenv(variable, key)
    keys = [{"key_env": variable, "tenant": variable[-1].lower()} for variable in KEYS]
    gateway = serve(engines, auth={"keys": keys})
    path, body = DIALECTS[name]

    def ask(key: str, **fields: Any) -> tuple[int, int]:
        answer = client.post(
            path, json={"model": "tiny", **body, **fields}, headers={"x-api-key": key}
        )
        assert answer.status_code == 200, answer.text
        return int(answer.headers["x-moongate-device-tokens"]), cached_tokens(answer)

    with httpx.Client(base_url=gateway.url, timeout=60.0, trust_env=False) as client:
        assert ask("key-a") == (0, 0)
        expected, delivered = ask("key-a")
        assert expected == delivered > 500
        assert ask("key-b") == (0, 0)
        assert ask("key-b", cache_salt="mine") == ask("key-a") == (expected, expected)
        refused = client.post(path, json={"model": "tiny", **body})
        assert refused.status_code == 401
