"""Prompts that engines are asked for, since they can't be rendered here."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from moongate.engine_plugins.vllm_rendered import Media, hash_rendered
from moongate.gateway.dialects.body import parse_body
from moongate.gateway.dialects.routes import PROXIED
from moongate.gateway.instances.engine_api import EngineApi
from moongate.gateway.prompts.engine_rendering import EngineRendering
from moongate.router import BlockSpace
from moongate.router.blocks import hash_prompt, pack_tokens

pytestmark = pytest.mark.asyncio

SPACE = BlockSpace(2)
RESPONSES = PROXIED["/v1/responses"]
BODY = parse_body(b'{"model":"m","input":"x","tools":[{"type":"custom"}]}', RESPONSES)


class Engine:
    """Answers what it is asked with this; `after_s` late."""

    def __init__(self, answer: Any, *, status: int = 200, after_s: float = 0.0) -> None:
        self.answer, self.status, self.after_s = answer, status, after_s
        self.asked: list[tuple[str, Any]] = []
        transport = httpx.MockTransport(self._handle)
        self.api = EngineApi("http://engine", timeout_s=5.0, transport=transport)

    async def _handle(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((request.url.path, json.loads(request.content)))
        await asyncio.sleep(self.after_s)
        return httpx.Response(self.status, json=self.answer)


def rendering(*engines: Engine, budget_s: float = 5.0) -> EngineRendering:
    made = EngineRendering(budget_s)
    for engine in engines:
        made.note(engine.api, renders=True)
    return made


async def test_an_engine_that_can_is_asked_with_the_whole_body() -> None:
    cannot, can = Engine({}), Engine({"token_ids": [1, 2, 3, 4, 5]})
    asked = rendering(can)
    told = await asked.read(RESPONSES, BODY, "custom_tool", [cannot.api, can.api], [SPACE])
    assert told is not None
    prompt, tokens, media = told
    assert (prompt.token_count, prompt.is_exact, media) == (5, True, ())
    assert tokens == pack_tokens([1, 2, 3, 4, 5])
    assert prompt.chains[SPACE] == hash_prompt(SPACE, tokens)
    assert can.asked == [("/v1/responses/render", json.loads(BODY.raw))]
    assert cannot.asked == []


async def test_images_are_in_the_names_of_their_blocks() -> None:
    places = {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [_place(1, 2)]}}
    engine = Engine({"token_ids": [1, 2, 3, 4], "features": places})
    told = await rendering(engine).read(RESPONSES, BODY, "multimodal", [engine.api], [SPACE])
    assert told is not None
    prompt, tokens, media = told
    assert media == (Media(1, 2, "a"),)
    assert prompt.chains[SPACE] == hash_rendered(SPACE, tokens, media, None)
    assert prompt.chains[SPACE] != hash_prompt(SPACE, tokens)


def _place(offset: int, length: int) -> dict[str, int]:
    return {"offset": offset, "length": length}


@pytest.mark.parametrize(
    "engine",
    [
        Engine({"error": "x"}, status=400),
        Engine({"token_ids": "x"}),
        Engine({"token_ids": [-1]}),
        Engine({"token_ids": [1]}, after_s=1.0),
    ],
)
async def test_what_no_engine_tells_in_time_stays_unknown(engine: Engine) -> None:
    asked = rendering(engine, budget_s=0.1)
    assert await asked.read(RESPONSES, BODY, "custom_tool", [engine.api], [SPACE]) is None
    assert len(engine.asked) == 1


@pytest.mark.parametrize("reason", ["call_without_id", "prompt_form"])
async def test_what_engines_do_not_know_either_is_not_asked(reason: str) -> None:
    engine = Engine({"token_ids": [1]})
    assert await rendering(engine).read(RESPONSES, BODY, reason, [engine.api], [SPACE]) is None
    assert engine.asked == []


async def test_only_prompts_of_engines_that_are_here_are_asked_for() -> None:
    engine = Engine({"token_ids": [1]})
    asked = rendering(engine)
    none = PROXIED["/v1/embeddings"]
    assert await asked.read(none, BODY, "custom_tool", [engine.api], [SPACE]) is None
    assert await asked.read(RESPONSES, BODY, "custom_tool", [], [SPACE]) is None
    asked.note(engine.api, renders=False)
    assert await asked.read(RESPONSES, BODY, "custom_tool", [engine.api], [SPACE]) is None
    assert engine.asked == []
