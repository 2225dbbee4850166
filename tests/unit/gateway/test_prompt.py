"""From bodies to prompts, with the simulator's real tokenizer and an engine made of a function."""

import asyncio
import contextlib
import json
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_styles import BUILDS, SIMULATOR_MODEL, STYLES, Message, conversations, texts, tools

from moongate.engine_plugins.vllm_render import ModelRenderer, PromptRefused
from moongate.gateway.dialects.body import parse_body
from moongate.gateway.dialects.prompt_fields import NO_TEXT_TAG
from moongate.gateway.dialects.routes import PROXIED
from moongate.gateway.errors import GatewayError
from moongate.gateway.instances.engine_api import EngineApi, EngineCallFailed
from moongate.gateway.prompts.parity import PROBE_BODIES, PromptForm
from moongate.gateway.prompts.prompt import RELOAD_AFTER_S, PromptPipeline, ReadPrompt
from moongate.router import BlockSpace, Prompt
from moongate.router.blocks import hash_prompt, hash_text, pack_tokens
from moongate.router.model import TEXT_SPACE

RENDERER = ModelRenderer.load(SIMULATOR_MODEL)
SPACE = BlockSpace(2)
ADAPTER_SPACE = BlockSpace(2, "ad-1")
CHAT, COMPLETION = PROXIED["/v1/chat/completions"], PROXIED["/v1/completions"]
MESSAGES = [{"role": "user", "content": "hello world"}]

Answer = Callable[[dict[str, Any]], httpx.Response]


def tokens(ids: Sequence[int]) -> httpx.Response:
    return httpx.Response(200, json={"count": len(ids), "max_model_len": 99, "tokens": [*ids]})


def ids_of(body: Mapping[str, Any], renderer: ModelRenderer = RENDERER) -> list[int]:
    if "messages" in body:
        return renderer.chat_token_ids(body)
    return renderer.completion_token_ids(body["prompt"])


def agrees(body: dict[str, Any]) -> httpx.Response:
    """Tokenise as an engine with the same model does."""
    return tokens(ids_of(body))


def agrees_with(renderer: ModelRenderer) -> Answer:
    return lambda body: tokens(ids_of(body, renderer))


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
    path: Path | None = SIMULATOR_MODEL,
    budget_s: float = 10.0,
    waiting_max: int = 8,
    memory_bytes_max: int = 1 << 24,
    spaces: Sequence[BlockSpace] = (SPACE, TEXT_SPACE),
    remote: Engine | None = None,
    clock: Clock | None = None,
) -> AsyncIterator[PromptPipeline]:
    pipeline = PromptPipeline(
        mode=mode,
        path=str(path) if path is not None else None,
        budget_s=budget_s,
        waiting_max=waiting_max,
        memory_bytes_max=memory_bytes_max,
        spaces=lambda _: spaces,
        remotes=lambda _: [remote.api] if remote is not None else [],
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


def check_exact(
    read_: ReadPrompt, ids: Sequence[int], *spaces: BlockSpace, salt: str | None = None
) -> None:
    """Check a prompt that was read with the local tokenizer."""
    assert (read_.prompt, read_.fallback) == (exact(ids, *spaces, salt=salt).prompt, None)
    assert read_.tokenized is not None
    assert json.loads(read_.tokenized.ids_json()) == list(ids)


def by_text(text: bytes, fallback: str | None, *, salt: str | None = None) -> ReadPrompt:
    chain = hash_text(text, ("m", salt))
    return ReadPrompt(Prompt(len(text) // 4, {TEXT_SPACE: chain}, is_exact=False), fallback)


# --- which way a model is tokenised ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "path", "answer", "way"),
    [
        ("auto", SIMULATOR_MODEL, agrees, "local"),
        ("auto", SIMULATOR_MODEL, contradicts, "remote"),
        ("auto", SIMULATOR_MODEL, is_missing, "none"),
        ("auto", SIMULATOR_MODEL, breaks_down, "none"),
        ("auto", None, agrees, "remote"),
        ("auto", None, is_missing, "none"),
        ("local", SIMULATOR_MODEL, agrees, "local"),
        ("local", SIMULATOR_MODEL, contradicts, "none"),
        ("remote", SIMULATOR_MODEL, agrees, "remote"),
        ("off", SIMULATOR_MODEL, agrees, "none"),
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
        assert engine.asked == [{"model": "m", **body} for body in PROBE_BODIES.values()]

    run(story)


def test_a_probe_that_the_engine_refuses_decides_nothing() -> None:
    def refuses_tools(body: dict[str, Any]) -> httpx.Response:
        return httpx.Response(400) if "tools" in body else agrees(body)

    async def story() -> None:
        async with a_pipeline() as pipeline:
            assert await pipeline.learn("m", None, Engine(refuses_tools).api) == "local"

    run(story)


RICH_FIELDS: tuple[dict[str, Any], ...] = (
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    {
        "messages": [
            *MESSAGES,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
        ]
    },
)


@pytest.mark.parametrize("rich", RICH_FIELDS)
def test_what_an_engine_contradicts_is_left_to_it_and_nothing_else(rich: dict[str, Any]) -> None:
    def differs_with_tools(body: dict[str, Any]) -> httpx.Response:
        return contradicts(body) if "tools" in body else agrees(body)

    async def story() -> None:
        remote, engine = Engine(lambda _: tokens([1, 2, 3, 4])), Engine(differs_with_tools)
        async with a_pipeline(remote=remote) as pipeline:
            await pipeline.learn("m", None, Engine(agrees).api)
            assert await pipeline.learn("m", None, engine.api) == "local"
            plain = await read(pipeline, {})
            assert (plain.form, plain.tokenized is not None) == (PromptForm.PLAIN, True)
            assert await read(pipeline, rich) == exact([1, 2, 3, 4])
            assert pipeline.agrees_with("m", engine.api, PromptForm.PLAIN)
            assert not pipeline.agrees_with("m", engine.api, PromptForm.RICH)
            engine.answer = agrees
            await pipeline.learn("m", None, engine.api)
            assert (await read(pipeline, rich)).form is PromptForm.RICH

    run(story)


def test_what_the_engine_renders_and_the_local_template_can_not_is_a_contradiction(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        (tmp_path / "tokenizer.json").write_bytes((SIMULATOR_MODEL / "tokenizer.json").read_bytes())
        remote = Engine(lambda _: tokens([1, 2, 3, 4]))
        async with a_pipeline(path=tmp_path, remote=remote) as pipeline:
            assert await pipeline.learn("m", None, Engine(agrees).api) == "local"
            assert await read(pipeline, {}) == exact([1, 2, 3, 4])
            completion = await read(pipeline, {"prompt": "hello world"}, COMPLETION)
            assert completion.form is PromptForm.COMPLETION

    run(story)


def test_only_an_instance_that_was_compared_agrees() -> None:
    async def story() -> None:
        asked, silent = Engine(agrees).api, Engine(is_missing).api
        async with a_pipeline(mode="local") as pipeline:
            assert not pipeline.agrees_with("m", asked, PromptForm.PLAIN)
            assert not pipeline.is_repeatable("m")
            for api in (asked, silent):
                assert await pipeline.learn("m", None, api, takes_ids=api is asked) == "local"
            for form in PromptForm:
                assert pipeline.agrees_with("m", asked, form)
                assert not pipeline.agrees_with("m", silent, form)
            assert [pipeline.takes_ids(api) for api in (asked, silent)] == [True, False]
            assert pipeline.is_repeatable("m")
            await pipeline.learn("m", None, asked)
            assert not pipeline.takes_ids(asked)

    run(story)


def test_a_template_with_a_clock_is_not_repeatable(tmp_path: Path) -> None:
    async def story() -> None:
        path = directory_of("chatml", "byte_level", tmp_path)
        with (path / "chat_template.jinja").open("a") as file:
            file.write("{% if clock %}{{ strftime_now('%d') }}{% endif %}")
        renderer = ModelRenderer.load(path)
        async with a_pipeline(path=path) as pipeline:
            await pipeline.learn("m", None, Engine(agrees_with(renderer)).api)
            assert not pipeline.is_repeatable("m")

    run(story)


def test_without_safe_cuts_prompts_are_read_as_wholes(tmp_path: Path) -> None:
    async def story() -> None:
        path = directory_of("chatml", "byte_level", tmp_path)
        (path / "chat_template.jinja").write_text("{{ messages | tojson }}")
        (path / "tokenizer_config.json").unlink()
        renderer = ModelRenderer.load(path)
        assert renderer.boundaries.marks == ()
        async with a_pipeline(path=path) as pipeline:
            await pipeline.learn("m", None, Engine(agrees_with(renderer)).api)
            for messages in (HISTORY, [*HISTORY, *REST], HISTORY):
                ids = ids_of({"messages": messages}, renderer)
                check_exact(await read(pipeline, {"messages": messages}), ids)

    run(story)


def test_without_a_configured_path_the_model_is_where_the_engine_says() -> None:
    async def story() -> None:
        async with a_pipeline(path=None) as pipeline:
            assert await pipeline.learn("m", str(SIMULATOR_MODEL), Engine(agrees).api) == "local"

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
            (tmp_path / "alias").symlink_to(SIMULATOR_MODEL)
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
        check_exact(await read_locally(fields), ids)

    run(story)


@pytest.mark.parametrize("prompt", ["hello world", ["hello world", "another"]])
def test_a_completion_is_read_by_its_first_prompt(prompt: object) -> None:
    async def story() -> None:
        ids = ids_of({"prompt": "hello world"})
        check_exact(await read_locally({"prompt": prompt}, COMPLETION), ids)

    run(story)


def test_a_prompt_read_exactly_has_no_chain_of_its_text() -> None:
    async def story() -> None:
        long = [{"role": "user", "content": "hello " * 100}]
        prompt = (await read_locally({"messages": long})).prompt
        assert prompt is not None
        assert set(prompt.chains) == {SPACE}

    run(story)


def test_a_large_body_is_rendered_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moongate.gateway.prompts.prompt.RENDER_INLINE_BYTES", 0)
    threads: list[str] = []

    def chat_text(self: ModelRenderer, body: Mapping[str, Any]) -> str:
        threads.append(threading.current_thread().name)
        return chat_text_of(self, body)

    chat_text_of = ModelRenderer.chat_text

    async def story() -> None:
        async with a_pipeline() as pipeline:
            await pipeline.learn("m", None, Engine(agrees).api)
            monkeypatch.setattr(ModelRenderer, "chat_text", chat_text)
            read_ = await read(pipeline, {})
            assert [name.startswith("tokenize") for name in threads] == [True]
            check_exact(read_, ids_of({"messages": MESSAGES}))

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
        check_exact(await read_locally(stray), ids_of({"messages": MESSAGES}))

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
        check_exact(salted, ids, salt="t1")
        assert salted.prompt != exact(ids).prompt

    run(story)


def test_c44_a_prompt_has_a_chain_for_each_space_of_its_model() -> None:
    async def story() -> None:
        spaces = (SPACE, ADAPTER_SPACE, BlockSpace(4), TEXT_SPACE)
        ids = ids_of({"messages": MESSAGES})
        check_exact(await read_locally({}, spaces=spaces), ids, *spaces[:3])

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


RESPONSES, ANTHROPIC = PROXIED["/v1/responses"], PROXIED["/v1/messages"]


def test_a_message_is_known_as_the_chat_that_it_becomes() -> None:
    async def story() -> None:
        blocks = [{"type": "text", "text": "hello world"}]
        fields = {"system": "be", "messages": [{"role": "user", "content": blocks}]}
        chat = {"messages": [{"role": "system", "content": "be"}, *MESSAGES]}
        check_exact(await read_locally(fields, ANTHROPIC), RENDERER.chat_token_ids(chat))

    run(story)


def test_a_response_is_known_as_the_chat_that_it_becomes() -> None:
    async def story() -> None:
        fields = {"instructions": "be", "input": "hello world"}
        chat = {"messages": [{"role": "system", "content": "be"}, *MESSAGES]}
        ids = RENDERER.chat_token_ids({**chat, "add_special_tokens": True})
        check_exact(await read_locally(fields, RESPONSES), ids)

    run(story)


def test_the_engine_is_asked_for_the_chat_that_a_response_becomes() -> None:
    async def story() -> None:
        engine = Engine(lambda _: tokens([5, 6, 7, 8]))
        read_ = await read_remotely(engine, {"input": "hello world"}, RESPONSES)
        assert read_ == exact([5, 6, 7, 8])
        assert engine.asked == [
            {
                "model": "m",
                "messages": MESSAGES,
                "add_generation_prompt": True,
                "continue_final_message": False,
                "add_special_tokens": True,
            }
        ]

    run(story)


@pytest.mark.parametrize(
    ("route", "fields", "text", "reason"),
    [
        (
            RESPONSES,
            {"input": "x", "previous_response_id": "resp_1", "instructions": "be"},
            b'"be""resp_1""x"',
            "previous_response",
        ),
        (RESPONSES, {"input": [3]}, b"[3]", "refused"),
        (RESPONSES, {}, b"", "refused"),
        (
            ANTHROPIC,
            {"system": "s", "tools": [], "messages": MESSAGES},
            b'[]"s"[{"role":"user","content":"hello world"}]',
            "no_tools",
        ),
    ],
)
def test_a_response_or_message_that_only_the_engine_can_read_is_known_by_text(
    route: Any, fields: Mapping[str, Any], text: bytes, reason: str
) -> None:
    async def story() -> None:
        assert await read_locally(fields, route) == by_text(text, reason)

    run(story)


def test_a_message_with_an_image_is_known_by_what_is_before_it() -> None:
    async def story() -> None:
        image = {"type": "image", "source": {"type": "base64", "data": "x"}}
        messages = [
            *MESSAGES,
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": [image]},
        ]
        read_ = await read_locally({"messages": messages}, ANTHROPIC)
        assert read_.fallback == "multimodal"
        whole = RENDERER.chat_token_ids({"messages": messages[:2]})
        assert known_part(read_, whole) > 0

    run(story)


def test_without_an_engine_to_ask_a_prompt_is_known_by_text() -> None:
    async def story() -> None:
        async with a_pipeline(mode="remote", remote=None) as pipeline:
            await pipeline.learn("m", None, Engine(agrees).api)
            assert await read(pipeline, {}) == by_text(orjson.dumps(MESSAGES), "no_tokenizer")

    run(story)


def test_a_completion_is_asked_for_as_it_is() -> None:
    async def story() -> None:
        engine = Engine(lambda _: tokens([5, 6]))
        fields = {"prompt": "a", "add_special_tokens": False}
        assert await read_remotely(engine, fields, COMPLETION) == exact([5, 6])
        assert engine.asked == [{"model": "m", **fields}]

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
        ({"messages": [{"role": "user", "content": [{"type": []}]}]}, "multimodal"),
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
        ({"prompt": [["a"]]}, "prompt_form"),
        ({"prompt": [None]}, "prompt_form"),
        ({"prompt_embeds": "x"}, "prompt_form"),
        ({"prompt": [1, "a"]}, "refused"),
        ({"prompt": [-1]}, "refused"),
        ({"prompt": [2**32]}, "refused"),
        ({"prompt": [True]}, "refused"),
        ({"prompt": "a", "truncate_prompt_tokens": 1}, "truncation"),
        ({"prompt": [1, 2], "truncate_prompt_tokens": 1}, "truncation"),
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


# --- in part --------------------------------------------------------------------------------------

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
HISTORY: list[Message] = [
    {"role": "system", "content": "You look at pictures. " * 9},
    {"role": "user", "content": "hello " * 30},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nShow me one. " * 9},
]
LOOK: Message = {"role": "user", "content": [{"type": "text", "text": "Look:"}, IMAGE]}
REST: list[Message] = [
    {"role": "assistant", "content": "A cat."},
    {"role": "user", "content": "And what does it do?"},
]


def is_slow(pipeline: PromptPipeline, slow: bool = True) -> None:
    pipeline._tokenizing.effort.bytes_per_s = 1e-6 if slow else 1e9


async def all_done(pipeline: PromptPipeline) -> None:
    while pipeline._tokenizing._under_way:
        await asyncio.wait(set(pipeline._tokenizing._under_way.values()))


def known_part(read_: ReadPrompt, whole: Sequence[int]) -> int:
    """Return how many blocks are known of a prompt; they are the first ones of the whole."""
    prompt = read_.prompt
    assert prompt is not None
    assert (prompt.is_exact, set(prompt.chains), read_.tokenized) == (False, {SPACE}, None)
    chain = list(prompt.chains[SPACE])
    assert chain == hash_prompt(SPACE, pack_tokens(whole))[: len(chain)]
    return len(chain)


def test_what_is_not_ready_in_time_is_known_by_its_beginning() -> None:
    async def story() -> None:
        async with a_pipeline() as pipeline:
            await pipeline.learn("m", None, Engine(agrees).api)
            await read(pipeline, {"messages": HISTORY})
            is_slow(pipeline)
            longer = [*HISTORY, {"role": "user", "content": "x" * 10_000}]
            read_ = await read(pipeline, {"messages": longer})
            assert (read_.fallback, pipeline.is_busy) == ("budget", True)
            ids = ids_of({"messages": longer})
            # All of the history, but not what opens the next message.
            history_tokens = len(ids_of({"messages": HISTORY, "add_generation_prompt": False}))
            assert known_part(read_, ids) in range(history_tokens // 2 - 4, history_tokens // 2 + 1)
            assert read_.prompt is not None
            assert read_.prompt.token_count in range(history_tokens + 2490, history_tokens + 2520)
            await all_done(pipeline)
            assert not pipeline.is_busy
            check_exact(await read(pipeline, {"messages": longer}), ids)

    run(story)


def test_where_nothing_is_known_in_time_the_text_is() -> None:
    async def story() -> None:
        async with a_pipeline() as pipeline:
            await pipeline.learn("m", None, Engine(agrees).api)
            is_slow(pipeline)
            read_ = await read(pipeline, {"messages": HISTORY})
            assert read_ == by_text(orjson.dumps(HISTORY), "budget")

    run(story)


def test_a_conversation_with_an_image_is_known_by_the_messages_before_it() -> None:
    async def story() -> None:
        read_ = await read_locally({"messages": [*HISTORY, LOOK, *REST]})
        assert read_.fallback == "multimodal"
        before = ids_of({"messages": HISTORY, "add_generation_prompt": False})
        as_text = [*HISTORY, {"role": "user", "content": "Look:"}, *REST]
        assert known_part(read_, ids_of({"messages": as_text})) >= len(before) // 2 - 4

    run(story)


def test_what_follows_an_image_counts_as_not_known() -> None:
    async def story() -> None:
        counts = []
        for following in ([], [{"role": "user", "content": "x" * 40_000}]):
            read_ = await read_locally({"messages": [*HISTORY, LOOK, *following]})
            assert read_.prompt is not None
            counts.append(read_.prompt.token_count)
        before = len(ids_of({"messages": HISTORY, "add_generation_prompt": False}))
        assert counts[0] > before + 900  # the image itself
        assert counts[1] >= counts[0] + 10_000

    run(story)


@pytest.mark.parametrize("content", [[IMAGE], [{"type": "text", "text": "a", "uuid": "u"}]])
def test_a_conversation_that_begins_with_an_image_is_known_by_its_text(content: object) -> None:
    async def story() -> None:
        messages = [{"role": "user", "content": content}, *REST]
        read_ = await read_locally({"messages": messages})
        assert read_ == by_text(orjson.dumps(messages), "multimodal")

    run(story)


def test_a_text_that_looks_like_the_place_of_an_image_only_ends_what_is_known() -> None:
    async def story() -> None:
        said = [*HISTORY, {"role": "user", "content": f"a {NO_TEXT_TAG}"}, *HISTORY[1:]]
        read_ = await read_locally({"messages": [*said, LOOK]})
        ids = ids_of({"messages": [*said, {"role": "user", "content": "Look:"}]})
        history = ids_of({"messages": HISTORY, "add_generation_prompt": False})
        assert 0 < known_part(read_, ids) <= len(history) // 2 + 4
        check_exact(await read_locally({"messages": said}), ids_of({"messages": said}))

    run(story)


def test_c39_what_only_the_engine_renders_is_known_by_text_with_an_image_too() -> None:
    async def story() -> None:
        messages = [*HISTORY, LOOK]
        for fields, fallback in (
            ({"chat_template": "x"}, "request_template"),
            ({"truncate_prompt_tokens": 4}, "truncation"),
        ):
            read_ = await read_locally({"messages": messages, **fields})
            assert read_ == by_text(orjson.dumps(messages), fallback)

    run(story)


def directory_of(style: str, build: str, parent: Path) -> Path:
    """Make a model directory of a template and a tokenizer."""
    directory = parent / f"{style}-{build}"
    directory.mkdir()
    BUILDS[build](STYLES[style].control_tokens).save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(STYLES[style].template, encoding="utf-8")
    special = {"bos_token": STYLES[style].bos_token, "eos_token": STYLES[style].eos_token}
    (directory / "tokenizer_config.json").write_text(json.dumps(special), encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def directories() -> Iterator[Mapping[str, Path]]:
    builds = {"chatml": "simulator", "llama_3": "splitting", "qwen_3": "byte_level"}
    builds |= {"mistral": "legacy_llama", "deepseek": "bpe_first"}
    with tempfile.TemporaryDirectory() as parent:
        yield {style: directory_of(style, build, Path(parent)) for style, build in builds.items()}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("looks_like", ["", "Look:", "\n\nx", "<think>a</think>b"])
@pytest.mark.parametrize(
    "rest", [[], REST, [*REST, {"role": "developer", "content": "Be brief."}, REST[1]]]
)
def test_before_an_image_is_known_only_what_stands_there_in_the_whole_prompt(
    style: str, looks_like: str, rest: list[Message], directories: Mapping[str, Path]
) -> None:
    """Templates render earlier messages by later ones: thoughts go, system messages move."""

    async def story() -> None:
        path = directories[style]
        renderer = ModelRenderer.load(path)
        async with a_pipeline(path=path) as pipeline:
            await pipeline.learn("m", None, Engine(agrees_with(renderer)).api)
            read_ = await read(pipeline, {"messages": [*HISTORY, LOOK, *rest]})
            as_text = [*HISTORY, {"role": "user", "content": looks_like}, *rest]
            assert read_.fallback == "multimodal"
            assert known_part(read_, ids_of({"messages": as_text}, renderer)) > 0

    run(story)


def test_a_template_that_leaves_the_image_out_tells_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        path = directory_of("chatml", "simulator", tmp_path)
        (path / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
        renderer = ModelRenderer.load(path)
        async with a_pipeline(path=path) as pipeline:
            await pipeline.learn("m", None, Engine(agrees_with(renderer)).api)
            messages = [*HISTORY, LOOK]
            read_ = await read(pipeline, {"messages": messages})
            assert read_ == by_text(orjson.dumps(messages), "multimodal")

    run(story)


# --- any history ----------------------------------------------------------------------------------


class Histories:
    """Conversations that grow, fork and are rewritten, as agents do it."""

    def __init__(self, data: st.DataObject, style: str) -> None:
        self._draw = data.draw
        markers = STYLES[style].control_tokens
        self._text = texts(markers)
        self._talk = conversations(markers, turns_max=1)
        self._all: list[list[Message]] = [self._draw(self._talk)]

    def change_one(self) -> list[Message]:
        change = self._draw(
            st.sampled_from(
                [self._append, self._append, self._fork, self._rewrite, self._cut, self._forget]
            )
        )
        number = self._draw(st.integers(0, len(self._all) - 1))
        changed = change(self._all[number])
        if changed:
            self._all[number] = changed
        return self._all[number]

    def _append(self, messages: list[Message]) -> list[Message]:
        answer = {"role": "assistant", "content": self._draw(self._text)}
        more = [m for m in self._draw(self._talk) if m["role"] != "system"]
        return [*messages, answer, *more] if messages[-1]["role"] == "user" else messages + more

    def _fork(self, messages: list[Message]) -> list[Message]:
        self._all.append(messages)
        return self._append(messages)

    def _rewrite(self, messages: list[Message]) -> list[Message]:
        number = self._draw(st.integers(0, len(messages) - 1))
        rewritten = {**messages[number], "content": self._draw(self._text)}
        return [*messages[:number], rewritten, *messages[number + 1 :]]

    def _cut(self, messages: list[Message]) -> list[Message]:
        """Drop the oldest messages but for the system's."""
        is_kept = messages[0]["role"] == "system"
        return messages[:is_kept] + messages[is_kept + self._draw(st.integers(0, 3)) :]

    def _forget(self, messages: list[Message]) -> list[Message]:
        """Drop what the model thought."""
        return [{**m, "content": m["content"].split("</think>")[-1]} for m in messages]


@pytest.mark.parametrize("style", STYLES)
@settings(deadline=None, max_examples=12)
@given(data=st.data(), memory_bytes_max=st.sampled_from([0, 4_000, 1 << 24]))
def test_whatever_was_read_before_a_prompt_is_read_as_if_it_were_the_first(
    style: str, data: st.DataObject, memory_bytes_max: int, directories: Mapping[str, Path]
) -> None:
    spaces = (SPACE, ADAPTER_SPACE, BlockSpace(16))

    async def story() -> None:
        path = directories[style]
        renderer = ModelRenderer.load(path)
        histories = Histories(data, style)
        async with a_pipeline(
            path=path, memory_bytes_max=memory_bytes_max, spaces=(*spaces, TEXT_SPACE)
        ) as pipeline:
            await pipeline.learn("m", None, Engine(agrees_with(renderer)).api)
            for _ in range(data.draw(st.integers(1, 12))):
                fields: dict[str, Any] = {"messages": histories.change_one()}
                fields["tools"] = data.draw(tools())
                salt = data.draw(st.sampled_from([None, None, "t1"]))
                slow = data.draw(st.sampled_from([False, False, True]))
                is_slow(pipeline, slow)
                read_ = await read(pipeline, {**fields, "cache_salt": salt})
                try:
                    ids = ids_of(fields, renderer)
                except PromptRefused:
                    assert read_.fallback == "refused"
                    continue
                if read_.fallback is None:
                    check_exact(read_, ids, *spaces, salt=salt)
                    continue
                assert (read_.fallback, slow) == ("budget", True)
                assert read_.prompt is not None
                for space in read_.prompt.chains.keys() & spaces:
                    chain = list(read_.prompt.chains[space])
                    assert chain == hash_prompt(space, pack_tokens(ids), salt)[: len(chain)]

    run(story)


names = st.sampled_from(
    ["type", "text", "refusal", "thinking", "role", "content", "uuid", "name", "function",
     "parameters", "arguments", "tool_calls", "reasoning", "id"]
)  # fmt: skip
words = st.sampled_from(
    ["text", "image_url", "user", "assistant", "system", "tool", "function", ""]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)
messages_of_any_form = st.lists(
    values
    | st.fixed_dictionaries({"role": words}, optional={"content": values, "tool_calls": values}),
    min_size=1,
    max_size=3,
)
odd_fields = ("tools", "chat_template_kwargs", "documents", "add_generation_prompt", "cache_salt")
fields_of_any_form = st.fixed_dictionaries(
    {"messages": messages_of_any_form}, optional=dict.fromkeys(odd_fields, values)
)


@settings(deadline=None, max_examples=30)
@given(chats=st.lists(fields_of_any_form, max_size=4), prompts=st.lists(values, max_size=4))
def test_c39_a_body_of_any_form_is_read_or_left_to_the_engine(
    chats: list[dict[str, Any]], prompts: list[object]
) -> None:
    async def story() -> None:
        async with a_pipeline() as pipeline:
            await pipeline.learn("m", None, Engine(agrees).api)
            jobs = [(CHAT, fields) for fields in chats]
            jobs += [(COMPLETION, {"prompt": prompt}) for prompt in prompts]
            for route, fields in jobs:
                with contextlib.suppress(GatewayError):
                    read_ = await read(pipeline, fields, route)
                    is_exact = read_.prompt is not None and read_.prompt.is_exact
                    assert is_exact or read_.fallback is not None or read_.prompt is None

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
