"""Which requests are handed on with their token ids: those where all conditions hold, and no other."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, cast

import orjson
import pytest

from moongate.gateway.dialects.body import Body, parse_body
from moongate.gateway.dialects.routes import PROXIED, Route
from moongate.gateway.instances.engine_api import EngineApi
from moongate.gateway.prompts.parity import PromptForm
from moongate.gateway.prompts.prompt import PromptPipeline, ReadPrompt
from moongate.gateway.prompts.prompt_memory import Piece
from moongate.gateway.prompts.tokenizing import Tokenized
from moongate.gateway.proxy.id_forwarding import TOKENS_MIN, ForwardIds, IdForwarding, with_params
from moongate.router import Prompt

CHAT = PROXIED["/v1/chat/completions"]
COMPLETION = PROXIED["/v1/completions"]
API = cast("EngineApi", object())
OTHER_API = cast("EngineApi", object())
FIELDS: Mapping[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


class Verdicts:
    """What the prompt pipeline would say of model m and of the instance behind `API`."""

    def __init__(
        self, *, takes: bool = True, agrees: bool = True, is_repeatable: bool = True
    ) -> None:
        self._takes = takes
        self._agrees = agrees
        self._is_repeatable = is_repeatable

    def takes_ids(self, api: EngineApi) -> bool:
        return self._takes and api is API

    def agrees_with(self, model: str, api: EngineApi, form: PromptForm) -> bool:
        return self._agrees and model == "m" and api is API and form is PromptForm.PLAIN

    def is_repeatable(self, model: str) -> bool:
        return self._is_repeatable and model == "m"


def read_of(count: int) -> ReadPrompt:
    """Return a prompt of that many ids: 0, 1, 2, ..."""
    piece = Piece(b"text", array("I", range(count)).tobytes())
    return ReadPrompt(Prompt(count, {}), tokenized=Tokenized((), [piece]))


def ids_given(
    fields: Mapping[str, Any] = FIELDS,
    *,
    mode: ForwardIds = "auto",
    verdicts: Verdicts | None = None,
    route: Route = CHAT,
    read: ReadPrompt | None = None,
    api: EngineApi = API,
    context_tokens: int | None = 32_768,
) -> list[int] | None:
    """Return the ids that the engine gets, None if it gets the body as it came."""
    body: Body = parse_body(orjson.dumps(fields), route)
    prompts = cast("PromptPipeline", verdicts or Verdicts())
    given = IdForwarding(mode, prompts).ids_for(
        route, body, read_of(TOKENS_MIN) if read is None else read, api, context_tokens
    )
    pieces = with_params(body.raw, given)
    if list(pieces) == [body.raw]:
        return None
    sent = orjson.loads(b"".join(pieces))
    params = sent.pop("kv_transfer_params")
    assert sent == fields  # the text stays, for tools and parsers
    assert list(params) == ["prompt_token_ids"]
    ids: list[int] = params["prompt_token_ids"]
    return ids


def test_where_all_is_well_the_engine_gets_the_ids_beside_the_text() -> None:
    assert ids_given() == list(range(TOKENS_MIN))
    assert ids_given({**FIELDS, "stream": True, "tools": TOOLS}) == list(range(TOKENS_MIN))


@pytest.mark.parametrize(
    ("mode", "count", "is_given"),
    [
        ("auto", TOKENS_MIN - 1, False),
        ("auto", TOKENS_MIN, True),
        ("on", 0, False),
        ("on", 1, True),
        ("off", TOKENS_MIN, False),
    ],
)
def test_short_prompts_are_left_to_the_engine_unless_it_is_told_otherwise(
    mode: ForwardIds, count: int, is_given: bool
) -> None:
    ids = ids_given(mode=mode, read=read_of(count))
    assert ids == (list(range(count)) if is_given else None)


@pytest.mark.parametrize(
    ("context_tokens", "is_given"), [(None, True), (2049, True), (2048, False), (100, False)]
)
def test_what_exceeds_the_context_the_engine_refuses_by_the_text(
    context_tokens: int | None, is_given: bool
) -> None:
    ids = ids_given(read=read_of(2048), context_tokens=context_tokens)
    assert (ids is not None) is is_given


def test_a_prompt_that_was_not_tokenised_here_has_no_ids() -> None:
    assert ids_given(read=ReadPrompt(Prompt(2048, {}))) is None
    assert ids_given(read=ReadPrompt(None, "budget"), mode="on") is None


@pytest.mark.parametrize("mode", ["auto", "on"])
@pytest.mark.parametrize(
    "fields",
    [
        {"echo": True},
        {"kv_transfer_params": {"do_remote_decode": True}},
        {"kv_transfer_params": None},
        {"tools": TOOLS, "tool_choice": "none"},
    ],
)
def test_fields_that_shape_the_prompt_otherwise_leave_it_to_the_engine(
    fields: Mapping[str, Any], mode: ForwardIds
) -> None:
    assert ids_given({**FIELDS, **fields}, mode=mode) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": False},
        {"tool_choice": "none"},
        {"tools": [], "tool_choice": "none"},
        {"tools": TOOLS, "tool_choice": "auto"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
    ],
)
def test_fields_that_only_look_like_these_do_not(fields: Mapping[str, Any]) -> None:
    assert ids_given({**FIELDS, **fields}) is not None


def test_only_chats_are_handed_on_by_ids() -> None:
    assert ids_given({"model": "m", "prompt": "x"}, route=COMPLETION, mode="on") is None


@pytest.mark.parametrize("mode", ["auto", "on"])
@pytest.mark.parametrize("doubt", ["agrees", "is_repeatable"])
def test_ids_that_are_in_doubt_are_never_handed_on(doubt: str, mode: ForwardIds) -> None:
    assert ids_given(mode=mode, verdicts=Verdicts(**{doubt: False})) is None


def test_whether_an_engine_takes_ids_the_operator_may_know_better() -> None:
    assert ids_given(verdicts=Verdicts(takes=False)) is None
    assert ids_given(verdicts=Verdicts(takes=False), mode="on") is not None


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_another_instances_word_does_not_count(mode: ForwardIds) -> None:
    assert ids_given(api=OTHER_API, mode=mode) is None


def test_the_body_stays_byte_for_byte_before_the_ids() -> None:
    raw = b'{ "model":"m", "x": 1.0,"messages":[{"role":"user","content":"\\u00e9"}] } \n'
    forwarding = IdForwarding("on", cast("PromptPipeline", Verdicts()))
    pieces = with_params(
        raw, forwarding.ids_for(CHAT, parse_body(raw, CHAT), read_of(3), API, None)
    )
    ids = b',"kv_transfer_params":{"prompt_token_ids":[0,1,2]}'
    assert b"".join(pieces) == raw[:-3] + ids + b"} \n"
