"""From bodies to prompts, with the simulator's real tokenizer and an engine made of a function."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

import moongate.simulator
from moongate.engine_plugins.vllm_render import ModelRenderer
from moongate.gateway.body import parse_body
from moongate.gateway.engine_api import EngineApi, EngineCallFailed
from moongate.gateway.errors import GatewayError
from moongate.gateway.prompt import PROBE_BODIES, RELOAD_AFTER_S, PromptPipeline, ReadPrompt
from moongate.gateway.routes import PROXIED
from moongate.router import BlockSpace, Prompt
from moongate.router.blocks import hash_prompt, hash_text, pack_tokens
from moongate.router.model import TEXT_SPACE

MODEL_PATH = Path(moongate.simulator.__file__).parent / "model"
RENDERER = ModelRenderer.load(MODEL_PATH)
SPACE = BlockSpace(2)
ADAPTER_SPACE = BlockSpace(2, "ad-1")
CHAT, COMPLETION = PROXIED["/v1/chat/completions"], PROXIED["/v1/completions"]
MESSAGES = [{"role": "user", "content": "hello world"}]

Answer = Callable[[dict[str, Any]], httpx.Response]


def tokens(ids: Sequence[int]) -> httpx.Response:
    return httpx.Response(200, json={"count": len(ids), "max_model_len": 99, "tokens": [*ids]})


def ids_of(body: Mapping[str, Any]) -> list[int]:
    if "messages" in body:
        return RENDERER.chat_token_ids(body)
    return RENDERER.completion_token_ids(body["prompt"])


def agrees(body: dict[str, Any]) -> httpx.Response:
    """Tokenise as an engine with the same model does."""
    return tokens(ids_of(body))


def contradicts(body: dict[str, Any]) -> httpx.Response:
    return tokens([1, *ids_of(body)])


def is_missing(_: dict[str, Any]) -> httpx.Response:
    return httpx.Response(404)


def breaks_down(_: dict[str, Any]) -> httpx.Response:
    raise httpx.ReadError("reset")


class Engine:
    """An engine whose `/tokenize` is a function; it notes the bodies that it was asked for."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[dict[str, Any]] = []
        transport = httpx.MockTransport(self._handle)
        self.api = EngineApi("http://engine", timeout_s=5.0, transport=transport)

    def _handle(self, request: httpx.Request) -> httpx.Response:
        assert (request.method, request.url.path) == ("POST", "/tokenize")
        body = json.loads(request.content)
        self.asked.append(body)
        return self.answer(body)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@contextlib.asynccontextmanager
async def a_pipeline(
    *,
    mode: str = "auto",
    path: Path | None = MODEL_PATH,
    budget_s: float = 10.0,
    waiting_max: int = 8,
    spaces: Sequence[BlockSpace] = (SPACE, TEXT_SPACE),
    remote: Engine | None = None,
    clock: Clock | None = None,
) -> AsyncIterator[PromptPipeline]:
    pipeline = PromptPipeline(
        mode=mode,
        path=str(path) if path is not None else None,
        budget_s=budget_s,
        waiting_max=waiting_max,
        spaces=lambda _: spaces,
        remote=lambda _: remote.api if remote is not None else None,
        clock=clock if clock is not None else Clock(),
    )
    try:
        yield pipeline
    finally:
        pipeline.close()


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await story()

    asyncio.run(main())


async def read(
    pipeline: PromptPipeline, fields: Mapping[str, Any], route: Any = CHAT
) -> ReadPrompt:
    """Read a chat of one message, or what the fields say instead."""
    base = {"model": "m", "messages": MESSAGES} if route is CHAT else {"model": "m"}
    return await pipeline.read(route, parse_body(orjson.dumps({**base, **fields}), route))


async def read_locally(fields: Mapping[str, Any], route: Any = CHAT, **options: Any) -> ReadPrompt:
    """Read with a tokenizer that an engine has agreed to."""
    async with a_pipeline(**options) as pipeline:
        assert await pipeline.learn("m", None, Engine(agrees).api) == "local"
        return await read(pipeline, fields, route)


def exact(ids: Sequence[int], *spaces: BlockSpace, salt: str | None = None) -> ReadPrompt:
    chains = {space: hash_prompt(space, pack_tokens(ids), salt) for space in spaces or (SPACE,)}
    return ReadPrompt(Prompt(len(ids), chains))


def exact_here(ids: Sequence[int], *spaces: BlockSpace, salt: str | None = None) -> ReadPrompt:
    """Return a prompt read with the local tokenizer, whose text fills no chunk."""
    prompt = exact(ids, *spaces, salt=salt).prompt
    assert prompt is not None
    return ReadPrompt(Prompt(prompt.token_count, {**prompt.chains, TEXT_SPACE: []}))


def by_text(text: bytes, fallback: str | None, *, salt: str | None = None) -> ReadPrompt:
    chain = hash_text(text, ("m", salt))
    return ReadPrompt(Prompt(len(text) // 4, {TEXT_SPACE: chain}, is_exact=False), fallback)


# --- which way a model is tokenised ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "path", "answer", "way"),
    [
        ("auto", MODEL_PATH, agrees, "local"),
        ("auto", MODEL_PATH, contradicts, "remote"),
        ("auto", MODEL_PATH, is_missing, "none"),
        ("auto", MODEL_PATH, breaks_down, "none"),
        ("auto", None, agrees, "remote"),
        ("auto", None, is_missing, "none"),
        ("local", MODEL_PATH, agrees, "local"),
        ("local", MODEL_PATH, contradicts, "none"),
        ("remote", MODEL_PATH, agrees, "remote"),
        ("off", MODEL_PATH, agrees, "none"),
    ],
)
def test_the_parity_probe_decides_how_a_model_is_tokenised(
    mode: str, path: Path | None, answer: Answer, way: str
) -> None:
    async def story() -> None:
        async with a_pipeline(mode=mode, path=path) as pipeline:
            assert await pipeline.learn("m", None, Engine(answer).api) == way

    run(story)


def test_the_probe_asks_for_chats_with_tools_and_a_completion() -> None:
    async def story() -> None:
        engine = Engine(agrees)
        async with a_pipeline() as pipeline:
            await pipeline.learn("m", None, engine.api)
        assert engine.asked == [{"model": "m", **body} for body in PROBE_BODIES]

    run(story)


def test_a_probe_that_the_engine_refuses_decides_nothing() -> None:
    def refuses_tools(body: dict[str, Any]) -> httpx.Response:
        return httpx.Response(400) if "tools" in body else agrees(body)

    async def story() -> None:
        async with a_pipeline() as pipeline:
            assert await pipeline.learn("m", None, Engine(refuses_tools).api) == "local"

    run(story)


def test_one_difference_is_a_contradiction() -> None:
    def differs_with_tools(body: dict[str, Any]) -> httpx.Response:
        return contradicts(body) if "tools" in body else agrees(body)

    async def story() -> None:
        async with a_pipeline() as pipeline:
            assert await pipeline.learn("m", None, Engine(differs_with_tools).api) == "remote"

    run(story)


def test_without_a_configured_path_the_model_is_where_the_engine_says() -> None:
    async def story() -> None:
        async with a_pipeline(path=None) as pipeline:
            assert await pipeline.learn("m", str(MODEL_PATH), Engine(agrees).api) == "local"

    run(story)


@pytest.mark.parametrize("order", [(agrees, contradicts), (contradicts, agrees)])
def test_one_instance_that_contradicts_ends_local_tokenising(order: tuple[Answer, Answer]) -> None:
    async def story() -> None:
        async with a_pipeline() as pipeline:
            ways = [await pipeline.learn("m", None, Engine(answer).api) for answer in order]
            assert ways[-1] == "remote"

    run(story)


def test_an_instance_that_came_back_right_contradicts_no_more() -> None:
    async def story() -> None:
        engine = Engine(contradicts)
        async with a_pipeline() as pipeline:
            assert await pipeline.learn("m", None, engine.api) == "remote"
            engine.answer = agrees
            assert await pipeline.learn("m", None, engine.api) == "local"

    run(story)


@pytest.mark.parametrize("answer", [breaks_down, is_missing])
def test_an_instance_that_can_not_be_asked_changes_nothing(answer: Answer) -> None:
    async def story() -> None:
        async with a_pipeline() as pipeline:
            assert await pipeline.learn("m", None, Engine(agrees).api) == "local"
            assert await pipeline.learn("m", None, Engine(answer).api) == "local"

    run(story)


def test_c106_a_directory_that_can_not_be_loaded_is_tried_once_a_minute(tmp_path: Path) -> None:
    async def story() -> None:
        clock = Clock()
        async with a_pipeline(path=tmp_path / "alias", clock=clock) as pipeline:
            engine = Engine(agrees)
            assert await pipeline.learn("m", None, engine.api) == "remote"
            (tmp_path / "alias").symlink_to(MODEL_PATH)
            clock.now += RELOAD_AFTER_S - 1
            assert await pipeline.learn("m", None, engine.api) == "remote"
            clock.now += 1
            assert await pipeline.learn("m", None, engine.api) == "local"

    run(story)


# --- locally --------------------------------------------------------------------------------------


def test_c39_a_chat_has_the_hashes_of_its_rendered_prompt() -> None:
    async def story() -> None:
        fields = {"tools": [{"type": "function", "function": {"name": "f"}}]}
        ids = ids_of({"messages": MESSAGES, **fields})
        assert len(ids) > 4
        assert await read_locally(fields) == exact_here(ids)

    run(story)


@pytest.mark.parametrize("prompt", ["hello world", ["hello world", "another"]])
def test_a_completion_is_read_by_its_first_prompt(prompt: object) -> None:
    async def story() -> None:
        ids = ids_of({"prompt": "hello world"})
        assert await read_locally({"prompt": prompt}, COMPLETION) == exact_here(ids)

    run(story)


def test_a_prompt_read_exactly_is_known_by_its_text_too() -> None:
    async def story() -> None:
        long = [{"role": "user", "content": "hello " * 100}]
        prompt = (await read_locally({"messages": long, "cache_salt": "t1"})).prompt
        assert prompt is not None
        assert prompt.is_exact
        assert prompt.chains[TEXT_SPACE] == hash_text(orjson.dumps(long), ("m", "t1"))
        assert len(prompt.chains[TEXT_SPACE]) == 2

    run(story)


@pytest.mark.parametrize("mode", ["auto", "local", "remote", "off"])
@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7], [8]]])
def test_given_token_ids_need_no_tokenizer(prompt: object, mode: str) -> None:
    async def story() -> None:
        async with a_pipeline(mode=mode) as pipeline:
            read_ = await read(pipeline, {"prompt": prompt, "cache_salt": "t1"}, COMPLETION)
            assert read_ == exact([5, 6, 7], salt="t1")

    run(story)


@pytest.mark.parametrize("stray", [{"prompt": [5, 6]}, {"prompt": "x"}])
def test_a_chats_stray_prompt_is_not_read(stray: dict[str, object]) -> None:
    async def story() -> None:
        assert await read_locally(stray) == exact_here(ids_of({"messages": MESSAGES}))

    run(story)


def test_a_completions_stray_messages_are_not_read() -> None:
    async def story() -> None:
        fields = {"prompt": [5, 6], "messages": MESSAGES}
        assert await read_locally(fields, COMPLETION) == exact([5, 6])

    run(story)


def test_a_salt_isolates_from_the_first_block_on() -> None:
    async def story() -> None:
        ids = ids_of({"messages": MESSAGES})
        salted = await read_locally({"cache_salt": "t1"})
        assert salted == exact_here(ids, salt="t1")
        assert salted != exact_here(ids)

    run(story)


def test_c44_a_prompt_has_a_chain_for_each_space_of_its_model() -> None:
    async def story() -> None:
        spaces = (SPACE, ADAPTER_SPACE, BlockSpace(4), TEXT_SPACE)
        ids = ids_of({"messages": MESSAGES})
        assert await read_locally({}, spaces=spaces) == exact_here(ids, *spaces[:3])

    run(story)


# --- remotely -------------------------------------------------------------------------------------


async def read_remotely(engine: Engine, fields: Mapping[str, Any], route: Any = CHAT) -> ReadPrompt:
    async with a_pipeline(mode="remote", remote=engine) as pipeline:
        await pipeline.learn("m", None, Engine(agrees).api)
        return await read(pipeline, fields, route)


def test_the_engine_is_asked_for_what_changes_the_prompt() -> None:
    async def story() -> None:
        engine = Engine(lambda _: tokens([5, 6, 7, 8]))
        fields = {
            "temperature": 1,
            "chat_template_kwargs": {"enable_thinking": False},
            "continue_final_message": True,
            "add_generation_prompt": False,
        }
        assert await read_remotely(engine, fields) == exact([5, 6, 7, 8])
        assert engine.asked == [
            {
                "model": "m",
                "messages": MESSAGES,
                "chat_template_kwargs": {"enable_thinking": False},
                "add_generation_prompt": False,
                "continue_final_message": True,
            }
        ]

    run(story)


def test_reasoning_is_asked_for_by_the_name_that_tokenize_knows() -> None:
    async def story() -> None:
        engine = Engine(lambda _: tokens([5]))
        turns = [
            {"role": "assistant", "content": "a", "reasoning_content": "r"},
            {"role": "assistant", "content": "b", "reasoning_content": "r", "reasoning": "s"},
            {"role": "user", "content": "c"},
        ]
        await read_remotely(engine, {"messages": turns})
        assert engine.asked[0]["messages"] == [
            {"role": "assistant", "content": "a", "reasoning": "r"},
            {"role": "assistant", "content": "b", "reasoning": "s"},
            {"role": "user", "content": "c"},
        ]

    run(story)


@pytest.mark.parametrize(
    ("answer", "fields", "fallback"),
    [
        (breaks_down, {}, "tokenize_call"),
        (is_missing, {}, "tokenize_call"),
        (lambda _: httpx.Response(200, content=b"<html>"), {}, "tokenize_call"),
        (lambda _: httpx.Response(200, json={"tokens": ["x"]}), {}, "tokenize_call"),
        (lambda _: tokens([-1]), {}, "refused"),
        (agrees, {"reasoning_effort": "low"}, "remote_fields"),
        (agrees, {"chat_template": "x"}, "remote_fields"),
    ],
)
def test_what_the_engine_does_not_tell_is_known_by_text(
    answer: Answer, fields: dict[str, object], fallback: str
) -> None:
    async def story() -> None:
        text = orjson.dumps(MESSAGES)
        assert await read_remotely(Engine(answer), fields) == by_text(text, fallback)

    run(story)


# --- by text --------------------------------------------------------------------------------------


def test_switched_off_every_prompt_is_known_by_text_and_that_is_no_fallback() -> None:
    async def story() -> None:
        async with a_pipeline(mode="off") as pipeline:
            tools = [{"type": "function", "function": {"name": "f"}}]
            chat = await read(pipeline, {"tools": tools, "cache_salt": "t1"})
            assert chat == by_text(orjson.dumps(tools) + orjson.dumps(MESSAGES), None, salt="t1")
            completion = await read(pipeline, {"prompt": "abcdefgh"}, COMPLETION)
            assert completion == by_text(b'"abcdefgh"', None)

    run(story)


def test_a_model_that_nobody_tokenises_is_known_by_text() -> None:
    async def story() -> None:
        async with a_pipeline() as pipeline:
            assert await read(pipeline, {}) == by_text(orjson.dumps(MESSAGES), "no_tokenizer")

    run(story)


def test_a_prompt_that_can_not_be_ready_in_time_is_not_waited_for() -> None:
    async def story() -> None:
        long = [{"role": "user", "content": "x" * 10_000}]
        read_ = await read_locally({"messages": long}, budget_s=1e-6)
        assert read_ == by_text(orjson.dumps(long), "budget")

    run(story)


@pytest.mark.parametrize(
    ("fields", "fallback"),
    [
        ({"chat_template": "x"}, "request_template"),
        ({"truncate_prompt_tokens": 4}, "truncation"),
        ({"tools": []}, "refused"),
        ({"continue_final_message": True}, "refused"),
    ],
)
def test_c39_a_chat_that_only_the_engine_renders_is_known_by_text(
    fields: dict[str, object], fallback: str
) -> None:
    async def story() -> None:
        read_ = await read_locally(fields)
        assert (read_.fallback, read_.prompt and read_.prompt.is_exact) == (fallback, False)

    run(story)


@pytest.mark.parametrize(
    ("fields", "fallback"),
    [
        ({"prompt": "a", "suffix": "b"}, "prompt_form"),
        ({"prompt": ""}, "prompt_form"),
        ({"prompt": []}, "prompt_form"),
        ({"prompt": [[]]}, "prompt_form"),
        ({"prompt": [None]}, "prompt_form"),
        ({"prompt_embeds": "x"}, "prompt_form"),
        ({"prompt": [1, "a"]}, "refused"),
        ({"prompt": [-1]}, "refused"),
        ({"prompt": [2**32]}, "refused"),
        ({"prompt": [True]}, "refused"),
        ({"prompt": "a", "truncate_prompt_tokens": 1}, "truncation"),
    ],
)
def test_a_completion_of_another_form_is_known_by_text(
    fields: dict[str, object], fallback: str
) -> None:
    async def story() -> None:
        read_ = await read_locally(fields, COMPLETION)
        assert (read_.fallback, read_.prompt and read_.prompt.is_exact) == (fallback, False)

    run(story)


def test_a_body_nested_too_deeply_to_be_written_is_known_by_its_bytes() -> None:
    async def story() -> None:
        nested = b"[" * 300 + b"]" * 300
        raw = b'{"model":"m","messages":[{"role":"user","content":' + nested + b"}]}"
        async with a_pipeline(mode="off") as pipeline:
            assert await pipeline.read(CHAT, parse_body(raw, CHAT)) == by_text(raw, None)

    run(story)


# --- what is not read at all ----------------------------------------------------------------------


def test_a_route_without_a_prompt_is_not_read() -> None:
    async def story() -> None:
        route = PROXIED["/v1/embeddings"]
        assert await read_locally({"input": "x"}, route) == ReadPrompt(None)

    run(story)


def test_c19_a_lenient_body_is_not_read() -> None:
    async def story() -> None:
        raw = b'{"model":"m","messages":[{"role":"user","content":"x \\ud83d y"}]}'
        async with a_pipeline() as pipeline:
            body = parse_body(raw, CHAT)
            assert await pipeline.read(CHAT, body) == ReadPrompt(None, "lenient_body")

    run(story)


@pytest.mark.parametrize(
    ("fields", "is_read"),
    [
        ({"prompt_logprobs": 0}, False),
        ({"prompt_logprobs": None}, True),
        ({"echo": True}, False),
        ({"echo": True, "top_logprobs": None}, True),
        ({"logprobs": True, "top_logprobs": 2}, True),
    ],
)
def test_a_chat_whose_prompts_logits_are_wanted_reuses_nothing(
    fields: dict[str, object], is_read: bool
) -> None:
    async def story() -> None:
        assert ((await read_locally(fields)).prompt is not None) is is_read

    run(story)


@pytest.mark.parametrize(
    ("fields", "is_read"),
    [
        ({"prompt_logprobs": 1}, False),
        ({"echo": True, "logprobs": 0}, False),
        ({"echo": True}, True),
        ({"logprobs": 1}, True),
    ],
)
def test_a_completion_whose_prompts_logits_are_wanted_reuses_nothing(
    fields: dict[str, object], is_read: bool
) -> None:
    async def story() -> None:
        read_ = await read_locally({"prompt": "a b c", **fields}, COMPLETION)
        assert (read_.prompt is not None) is is_read

    run(story)


def test_too_many_waiting_prompts_are_refused() -> None:
    async def story() -> None:
        async with a_pipeline(waiting_max=0) as pipeline:
            with pytest.raises(GatewayError) as refused:
                await read(pipeline, {})
            assert (refused.value.status, refused.value.code) == (503, "queue_full")
            assert pipeline.waiting == 0

    run(story)


# --- side calls -----------------------------------------------------------------------------------


def test_a_side_call_is_bounded_as_a_whole() -> None:
    async def never(_: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def story() -> None:
        api = EngineApi("http://engine", timeout_s=0.01, transport=httpx.MockTransport(never))
        with pytest.raises(EngineCallFailed, match="/health: no answer in time") as failed:
            await api.check_health()
        assert not failed.value.is_gone

    run(story)


def because(error: httpx.HTTPError, cause: Exception) -> httpx.HTTPError:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_gone"),
    [
        (because(httpx.ConnectError("failed"), ConnectionRefusedError()), True),
        (because(httpx.ReadError(""), ConnectionResetError()), True),
        (because(httpx.ConnectError("failed"), socket.gaierror(-2, "not known")), False),
        (httpx.ConnectTimeout("late"), False),
        (httpx.PoolTimeout("late"), False),
        (httpx.RemoteProtocolError("odd"), False),
    ],
)
def test_only_a_refused_or_reset_connection_proves_that_an_engine_is_gone(
    error: httpx.HTTPError, is_gone: bool
) -> None:
    def fails(_: httpx.Request) -> httpx.Response:
        raise error

    async def story() -> None:
        api = EngineApi("http://engine", timeout_s=5.0, transport=httpx.MockTransport(fails))
        with pytest.raises(EngineCallFailed) as failed:
            await api.check_health()
        assert failed.value.is_gone is is_gone

    run(story)


def test_a_body_nested_too_deeply_can_not_be_asked_for() -> None:
    async def story() -> None:
        nested: list[object] = []
        for _ in range(300):
            nested = [nested]
        with pytest.raises(EngineCallFailed, match="/tokenize: "):
            await Engine(agrees).api.tokenize({"messages": nested})

    run(story)


def test_instances_that_start_together_are_all_heard() -> None:
    async def story() -> None:
        for _ in range(5):
            async with a_pipeline() as pipeline:
                engines = [Engine(answer) for answer in (agrees, contradicts, agrees)]
                await asyncio.gather(*(pipeline.learn("m", None, e.api) for e in engines))
                assert await pipeline.learn("m", None, engines[0].api) == "remote"

    run(story)
