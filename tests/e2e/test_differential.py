"""What an engine accepts it accepts through the gateway, and answers in the same bytes.

Each body goes to an engine twice, so that the second answer comes from its cache, and then through the gateway
to the same engine. Compared are status, content type and bytes, but for what differs between any two answers:
ids, times, and by whom the calls in them are named.
"""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from processes import EngineProcess, Serve
from request_bodies import CHATS, MESSAGES, RESPONSES

EnginePair = tuple[EngineProcess, EngineProcess]

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "def f"}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}

OPTIONS: list[dict[str, Any]] = [
    {}, {"n": 2, "seed": 1, "temperature": 1}, {"logprobs": True, "top_logprobs": 2},
    {"stop": ["e"]}, {"stop": "e"}, {"stop_token_ids": [5]}, {"seed": 3, "temperature": 0.7},
    {"min_p": 0.1}, {"top_k": 3}, {"top_p": 0.5}, {"logit_bias": {"17": 5}},
    {"presence_penalty": 1.0, "frequency_penalty": -1}, {"repetition_penalty": 1.1},
    {"ignore_eos": True}, {"min_tokens": 2}, {"skip_special_tokens": False},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    {"structured_outputs": {"choice": ["yes", "no"]}}, {"tools": [TOOL], "tool_choice": "none"},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"tools": [TOOL]}, {"return_token_ids": True}, {"echo": True}, {"priority": 0},
    {"user": "u", "metadata": {"user_id": "x"}, "prompt_cache_key": "k"}, {"cache_salt": "s"},
    {"x_unknown": [1, {"a": None}]}, {"max_completion_tokens": 3}, {"prompt_logprobs": 1},
    {"parallel_tool_calls": False}, {"stream_options": None}, {"n": None}, {"top_p": None},
    {"kv_transfer_params": None}, {"model": "other"}, {"max_tokens": 0}, {"temperature": -1},
]  # fmt: skip
STREAMED: list[dict[str, Any]] = [
    {}, {"stream_options": {"include_usage": True}}, {"n": 2, "seed": 1},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"logprobs": True}, {"tools": [TOOL], "tool_choice": OPTIONS[19]["tool_choice"]},
    {"return_token_ids": True}, {"stream_options": {}}, {"echo": True}, {"max_tokens": 1},
]  # fmt: skip
COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": "def f"}, {"prompt": ["a b", "c d"]}, {"prompt": [5, 6, 7]}, {"prompt": [[5, 6], [7]]},
    {"prompt": "a", "echo": True, "logprobs": 1}, {"prompt": "a", "n": 2, "seed": 1, "temperature": 1},
    {"prompt": "a", "suffix": "b"}, {"prompt": ""}, {"prompt": []}, {"prompt": "a", "max_tokens": 0},
    {"prompt": "a", "add_special_tokens": False}, {"prompt": "a", "truncate_prompt_tokens": 1},
    {"prompt": "def f", "stream": True}, {"prompt": ["a", "b"], "stream": True},
    {"prompt": [5, 6], "stream": True, "stream_options": {"include_usage": True}},
]  # fmt: skip
MESSAGE = '"messages":[{"role":"user","content":"x"}]'
RAW: dict[str, bytes] = {
    "spaces": b' {\n\t"model" : "tiny" ,\r\n "max_tokens":2,"temperature":0,' + MESSAGE.encode() + b"}\n",
    "escapes": b'{"model":"tin\\u0079","max_tokens":2,"temperature":0,"messages":[{"role":"user","content":"\\u00e9\\ud83d\\ude42"}]}',
    "last of two": b'{"model":"tiny","max_tokens":9,"max_tokens":2,"temperature":0,' + MESSAGE.encode() + b"}",
    "large number": b'{"model":"tiny","max_tokens":2,"temperature":0,"x":123456789012345678901234567890,' + MESSAGE.encode() + b"}",
    "exponent": b'{"model":"tiny","max_tokens":2,"temperature":0e-3,' + MESSAGE.encode() + b"}",
    "not a number": b'{"model":"tiny","max_tokens":2,"temperature":0,"x":NaN,' + MESSAGE.encode() + b"}",
    "byte order mark": b'\xef\xbb\xbf{"model":"tiny","max_tokens":2,"temperature":0,' + MESSAGE.encode() + b"}",
    "deep": b'{"model":"tiny","max_tokens":2,"temperature":0,"x":' + b"[" * 200 + b"]" * 200 + b"," + MESSAGE.encode() + b"}",
    "no object": b"[1]",
    "no JSON": b"{",
    "empty": b"",
}  # fmt: skip


def corpus() -> dict[str, tuple[str, bytes]]:
    """Return every request by its name: where it goes, and its body."""
    base = {"model": "tiny", "max_tokens": 4, "temperature": 0}
    listed: list[tuple[str, str, dict[str, Any]]] = []
    listed += [(CHAT, f"chat {n}", {"messages": [USER], **o}) for n, o in enumerate(OPTIONS)]
    listed += [
        (CHAT, f"chat stream {n}", {"messages": [USER], "stream": True, **o})
        for n, o in enumerate(STREAMED)
    ]
    listed += [(COMPLETION, f"completion {n}", o) for n, o in enumerate(COMPLETIONS)]
    listed += [(CHAT, f"chat {name}", body) for name, body in CHATS.items()]
    for path, bodies in (("/v1/responses", RESPONSES), ("/v1/messages", MESSAGES)):
        limit = {"max_output_tokens": 4} if path == "/v1/responses" else {}
        for name, body in bodies.items():
            listed.append((path, f"{path} {name}", {**limit, **body}))
        for name in list(bodies)[::4]:
            listed.append(
                (path, f"{path} stream {name}", {**limit, **bodies[name], "stream": True})
            )
    # One is sampled, as its client asks for it.
    listed = [(p, n, b | {"temperature": 0} if "claude" in n else b) for p, n, b in listed]
    listed.append(("/v1/messages/count_tokens", "count", {"messages": [USER]}))
    listed.append(("/tokenize", "tokenize", {"prompt": "def f"}))
    listed.append(("/detokenize", "detokenize", {"tokens": [5, 6]}))
    listed.append(("/v1/embeddings", "embeddings", {"input": "a"}))
    made = {name: (path, json.dumps({**base, **body}).encode()) for path, name, body in listed}
    return made | {f"raw {name}": (CHAT, raw) for name, raw in RAW.items()}


CORPUS = corpus()
OURS = frozenset(
    # Refused by the gateway itself, in its own words (INTERFACE: what it must know to route).
    ("raw no object", "raw no JSON", "raw empty", "chat 34")
)

ANY_ID = re.compile(rb'"((?:chatcmpl|cmpl|resp|msg|rs|fc|call|tokn)[-_][-\w]{8,})')
ANY_TIME = re.compile(rb'"(created|created_at)": ?\d+')


def comparable(answer: httpx.Response) -> tuple[int, str, bytes]:
    """Return what has to be equal of two answers."""
    names: dict[bytes, bytes] = {}

    def renamed(found: re.Match[bytes]) -> bytes:
        return b'"' + names.setdefault(found[1], b"id-%d" % len(names))

    body = ANY_TIME.sub(rb'"\1":0', ANY_ID.sub(renamed, answer.content))
    content_type = answer.headers.get("content-type", "")
    if content_type.startswith("text/event-stream"):
        body = told_by(body)
    return answer.status_code, content_type, body


PIECES = ("content", "text", "delta", "partial_json", "arguments", "reasoning")
"""Fields in which a stream's text comes."""


def told_by(stream: bytes) -> bytes:
    """Return a stream's text and the forms of its events: how both are cut follows the engine's steps."""
    texts: dict[int, str] = {}  # of each answer or block
    forms: list[str] = []

    def form_of(value: Any, name: str = "", index: int = 0) -> Any:
        if isinstance(value, str) and name in PIECES:
            texts[index] = texts.get(index, "") + value
            return ""
        if isinstance(value, dict):
            index = value.get("index", index)
            return {key: form_of(one, key, index) for key, one in value.items()}
        if name in ("logprobs", "token_ids"):
            return None
        if isinstance(value, list):
            return [form_of(one, "", index) for one in value]
        return 0 if type(value) is int else value

    for event in stream.decode().split("\n\n"):
        name, _, data = event.rpartition("data: ")
        form = name + (json.dumps(form_of(json.loads(data))) if data.startswith("{") else data)
        if form not in forms:
            forms.append(form)
    return "\n".join([*forms, str(sorted(texts.items()))]).encode()


def test_the_corpus_is_large() -> None:
    assert len(CORPUS) >= 120


@pytest.fixture
def gateway_url(engines: EnginePair, serve: Serve) -> str:
    return serve(engines[:1]).url


def test_every_request_is_answered_as_by_the_engine(
    gateway_url: str, engines: EnginePair, capsys: pytest.CaptureFixture[str]
) -> None:
    differing: list[str] = []
    accepted = 0
    headers = {"content-type": "application/json"}
    with httpx.Client(timeout=60.0, trust_env=False, headers=headers) as client:
        for name, (path, raw) in CORPUS.items():
            urls = (engines[0].url, engines[0].url, gateway_url)
            _, direct, through = (client.post(url + path, content=raw) for url in urls)
            accepted += direct.status_code == 200
            if name in OURS:
                same = direct.status_code == through.status_code
            else:
                same = comparable(direct) == comparable(through)
            if not same:
                differing.append(
                    f"{name}\n  engine:  {comparable(direct)}\n  gateway: {comparable(through)}"
                )
    with capsys.disabled():
        print(f"\n{len(CORPUS)} requests, {accepted} accepted, {len(differing)} answered otherwise")
    assert not differing, "\n".join(differing)[:6000]
