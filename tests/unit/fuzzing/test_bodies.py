"""Bodies of any form: read, or refused with 400, and never anything else."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from functools import partial
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from odd_values import damaged, objects, quick, texts_of, tried

from moongate.engine_plugins.vllm_render import PromptRefused, PromptUnsupported
from moongate.gateway.dialects.aliases import Aliases
from moongate.gateway.dialects.body import (
    OUTLINED_BYTES_MIN,
    Body,
    find_session_key,
    find_user,
    parse_body,
    without_key,
)
from moongate.gateway.dialects.messages_bridge import bridge_for
from moongate.gateway.dialects.prompt_fields import (
    has_given_ids,
    hash_body_text,
    prompt_fields,
    read_salt,
    read_text,
    skips_cache,
    with_tags,
)
from moongate.gateway.dialects.routes import PROXIED, WITH_CHOICES, PromptKind, Route
from moongate.gateway.dialects.stream_usage import asks_for_usage, with_usage_asked
from moongate.gateway.errors import GatewayError
from moongate.gateway.responses.background import Background
from moongate.gateway.responses.response_store import ResponseStore
from moongate.gateway.responses.response_turns import ResponseTurn, ResponseTurns

ROUTES = st.sampled_from(list(PROXIED.values()))
FIELDS = objects(
    "model", "messages", "prompt", "input", "stream", "stream_options", "role", "content", "type",
    "text", "tools", "system", "metadata", "user_id", "user", "prompt_cache_key", "cache_salt",
    "tool_calls", "function", "name", "arguments", "instructions", "previous_response_id", "output",
    "echo", "logprobs", "n", "kv_transfer_params", "store", "background", "id", "tool_choice",
    "stop_sequences", "thinking", "max_tokens", "image_url", "source", "reasoning", "summary",
)  # fmt: skip
RIGHT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
LARGE = "a large text " * (OUTLINED_BYTES_MIN // 10)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Return bodies of all sorts, some of them large enough to be outlined."""
    fields = draw(FIELDS)
    if draw(st.booleans()):
        fields = {**RIGHT, **fields}
    if draw(st.integers(0, 3)) == 0:
        fields["messages"] = [{"role": "user", "content": LARGE}]
    return draw(texts_of(fields))


def read_all(raw: bytes, route: Route) -> Body:
    """Do with a body all that the gateway does before it knows an instance."""
    body, _ = Aliases({"other": "m"}).resolve(parse_body(raw, route), route)
    assert body.model is None or isinstance(body.model, str)
    find_session_key({}, body, None)
    find_user(body)
    read_salt(body)
    Background.takes(body)
    fields = body.fields
    asks_for_usage(fields)
    skips_cache(route, fields)
    if route.kind in WITH_CHOICES and body.is_stream and not body.is_lenient:
        orjson.loads(with_usage_asked(body.raw, fields))
    if route.kind is not PromptKind.NONE and not has_given_ids(route, body):
        hash_body_text(read_text(route, body), body)
    with suppress(PromptRefused, PromptUnsupported):
        with_tags(prompt_fields(route, fields, None))
    if route.template.startswith("/v1/messages"):
        orjson.loads(bridge_for(route, fields, None).body)
    return body


@quick
@given(raw=bodies() | bodies().flatmap(damaged) | st.binary(max_size=60), route=ROUTES)
@example(raw=b"[" * 100_000, route=PROXIED["/v1/chat/completions"])
@example(raw=b'{"model":' * 100_000, route=PROXIED["/v1/responses"])
@example(raw=b'{"model":"m","messages":[1],"stream":1e999}', route=PROXIED["/v1/messages"])
def test_any_body_is_read_or_refused(raw: bytes, route: Route) -> None:
    read = tried(lambda: read_all(raw, route), GatewayError)
    if isinstance(read, GatewayError):
        assert read.status == 400
        assert json.loads(read.body(route.family))["error"]["message"]


@quick
@given(raw=bodies(), route=ROUTES)
def test_a_body_in_outline_says_what_it_says_in_full(raw: bytes, route: Route) -> None:
    padding = json.dumps({"x_padding": [LARGE]}).encode()[1:-1]
    large = raw.rstrip()[:-1] + (b"," if b":" in raw else b"") + padding + b"}"

    def read(text: bytes) -> object:
        try:
            body = parse_body(text, route)
        except GatewayError as error:
            return error.status, error.code, error.param
        return body.model, body.is_stream, find_session_key({}, body, None), find_user(body)

    assert read(large) == read(raw)


@quick
@given(raw=bodies(), key=st.sampled_from(["kv_transfer_params", "model", "messages", "content"]))
def test_a_key_is_taken_out_and_all_else_stays(raw: bytes, key: str) -> None:
    before = json.loads(raw.decode("utf-8-sig", "surrogatepass"))
    if raw.startswith(b"\xef\xbb\xbf"):
        raw = raw[3:]
    after = json.loads(without_key(raw, key).decode("utf-8", "surrogatepass"))
    assert after == {name: value for name, value in before.items() if name != key}


@quick
@given(raw=bodies())
def test_a_response_begins_with_any_body(raw: bytes) -> None:
    route = PROXIED["/v1/responses"]
    turns = ResponseTurns(ResponseStore(60.0, 1 << 20), lambda: 0.0, body_bytes_max=1 << 20)
    turns.keep("", b'{"id":"resp_1","output":[{"type":"message"}]}', b'{"role":"user"}', None)
    raw = raw.replace(b'"previous_response_id": null', b'"previous_response_id": "resp_1"')
    turn = tried(lambda: asyncio.run(turns.begin("", parse_body(raw, route), route)), GatewayError)
    if isinstance(turn, GatewayError):
        assert turn.status in (400, 404)
    elif isinstance(turn, ResponseTurn) and turn.previous is not None:
        items = json.loads(turn.body.raw)["input"]
        assert items[:2] == [{"role": "user"}, {"type": "message"}]


@pytest.mark.parametrize("depth", [100, 1000, 100_000])
def test_depth_costs_no_more_than_its_bytes(depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    raw = b'{"model":"m","messages":[{"role":"user","content":' + nested + b"}]}"
    for route in PROXIED.values():
        read = tried(partial(read_all, raw, route), GatewayError)
        assert isinstance(read, Body) or (isinstance(read, GatewayError) and read.status == 400)
