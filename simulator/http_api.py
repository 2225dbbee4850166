"""The routes of a simulated engine: bodies in, generations on a rank, JSON or event streams out.

Responsible for HTTP: rendering off the event loop, choosing the rank, streaming, and aborting when
the client leaves, before or after the first byte. Not for the JSON itself (`openai_wire.py`) or for
what is generated (`engine.py`).
"""

import asyncio
import contextlib
import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, ParamSpec, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive as Receive_
from starlette.types import Scope
from starlette.types import Send as Send_

from moongate.engine_plugins.vllm_render import ModelRenderer, RenderError
from moongate.simulator import openai_wire
from moongate.simulator.answers import Answers
from moongate.simulator.blocks import CacheNamespace
from moongate.simulator.debugging import Debugging, ReceivedRequest
from moongate.simulator.engine import EngineRequest
from moongate.simulator.metrics_wire import render_metrics
from moongate.simulator.openai_wire import (
    ApiError,
    Envelope,
    GenerateOptions,
    Json,
    Usage,
)
from moongate.simulator.raw_answer import RawAnswer
from moongate.simulator.responses_wire import ResponseEnvelope, parse_response
from moongate.simulator.runner import (
    AbortedError,
    EngineDeadError,
    Generation,
    GenerationFailedError,
    RankRunner,
)
from moongate.simulator.script import Script
from moongate.simulator.telling import Teller
from moongate.simulator.transfer import (
    EngineFatalError,
    Handoff,
    HandoffSettings,
    NixlSource,
    Receive,
    Send,
    nixl_answer,
)

VERSION = "0.32.0+moongate-sim"
"""The release whose wire is spoken, marked so that nobody takes it for the real thing."""

TOKEN_ID_MAX = 2**32 - 1
"""What the tokenizers library can decode; greater ids raise an OverflowError in it."""

CLIENT_CLOSED_STATUS = 499
"""Status of an answer that nobody reads: the client left while it sent its body."""

_Read = tuple[GenerateOptions, list[list[int]], tuple[RawAnswer, ...]]
"""What a body asks for, its prompts as ids, and what the answers will be, if that is known."""

_Reader = Callable[[Json], Awaitable[_Read]]
"""Raises ApiError."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the routes tell about the model."""

    name: str
    root: str
    """The directory of the tokenizer."""
    max_model_len_tokens: int
    answer_tokens: int
    """Length of an answer for which no limit was asked."""


class SimApi:
    """The HTTP side of one simulated engine."""

    def __init__(
        self,
        model: ServedModel,
        renderer: ModelRenderer,
        runners: Mapping[int, RankRunner],
        kv_event_sources: Callable[[], Json],
        *,
        handoffs: HandoffSettings,
        handoff_address: tuple[str, int],
        debugging: Debugging,
        script: Script | None = None,
    ) -> None:
        """`runners` by global rank; `kv_event_sources` is asked when the route is called.

        `handoff_address`: host and port where decoders come to.
        """
        self._handoffs = handoffs
        self._handoff_address = handoff_address
        self._debugging = debugging
        self._model = model
        self._renderer = renderer
        self._teller = Teller(renderer, script)
        self._runners = runners
        self._kv_event_sources = kv_event_sources
        self._created = int(time.time())
        self._next_rank = itertools.cycle(runners)
        self._next_number = itertools.count()

    def app(self) -> Starlette:
        routes = [
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/responses", self.responses, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/kv_event_sources", self.kv_event_sources, methods=["GET"]),
            Route("/reset_prefix_cache", self.reset_prefix_cache, methods=["POST"]),
            Route("/sim/requests", self.sim_requests, methods=["GET"]),
            Route("/sim/cache", self.sim_cache, methods=["GET"]),
        ]
        # /v1/embeddings and the like get a 404: a generate-only vLLM doesn't register them either.
        handlers: dict[Any, Any] = {
            ApiError: _on_api_error,
            HTTPException: _on_http_exception,
            EngineDeadError: _on_engine_dead,
            GenerationFailedError: _on_generation_failed,
            ClientDisconnect: _on_client_left,
        }
        return Starlette(routes=routes, exception_handlers=handlers)

    # -- generating ---------------------------------------------------------------------------

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, self._read_chat)

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, self._read_completion)

    async def responses(self, request: Request) -> Response:
        body = await _read_body(request)
        await self._meet_fault(ReceivedRequest(request.url.path, dict(request.headers), body))
        options, prompt, raw_answers = await _render(self._read_response, body)
        self._check_prompt(prompt)
        runner = self._runners[self._rank(request)]
        session_id = options.session_id or request.headers.get("x-session-id") or None
        requests = self._engine_requests(options, [prompt], session_id, None, raw_answers)
        places = {requests[0].request_id: (0, 0)}
        answers = Answers(places, [prompt], self._renderer.decode, raw_answers)
        given_id = body.get("request_id")
        envelope = ResponseEnvelope(
            given_id if isinstance(given_id, str) else f"resp_{uuid.uuid4().hex}",
            uuid.uuid4().hex,
            int(time.time()),
            self._model.name,
            body,
        )
        generation = Generation(runner, requests)
        if options.is_stream:
            return _EventStream(_stream_response(envelope, answers, generation), generation)
        await _collect(request.receive, answers, generation)
        return _json(envelope.completed(answers.choices()[0], answers.usage()))

    def _read_response(
        self, body: Json
    ) -> tuple[GenerateOptions, list[int], tuple[RawAnswer, ...]]:
        """Raises: ApiError, RenderError."""
        options, chat = parse_response(body)
        self._check_model(body)
        return options, *self._read_messages(chat, None, options)

    async def _generate(self, request: Request, read: _Reader) -> Response:
        body = await _read_body(request)
        await self._meet_fault(ReceivedRequest(request.url.path, dict(request.headers), body))
        runner: RankRunner | None = None
        try:
            options, prompts, raw_answers = await read(body)
            for prompt in prompts:
                self._check_prompt(prompt)
            runner = self._runners[self._rank(request)]
        except ApiError:
            self._decline(body, runner or next(iter(self._runners.values())))
            raise
        handoff = self._read_handoff(options, runner)
        return await self._answer(request, options, prompts, raw_answers, runner, handoff)

    async def _read_chat(self, body: Json) -> _Read:
        openai_wire.check_messages(body)
        options = openai_wire.parse_options(body, is_chat=True)
        self._check_model(body)
        reused = openai_wire.reused_token_ids(body)
        ids, raw_answers = await _render(self._read_messages, body, reused, options)
        return options, [ids], raw_answers

    def _read_messages(
        self, chat: Json, reused: list[int] | None, options: GenerateOptions
    ) -> tuple[list[int], tuple[RawAnswer, ...]]:
        """Return the prompt of a chat, and what the answers will be. Raises: ApiError, RenderError.

        Who wants tokens without end asks for no answer: a gateway's prefill, or a benchmark.
        """
        ids = self._renderer.chat_token_ids(chat) if reused is None else reused
        if options.ignores_end:
            return ids, ()
        return ids, self._teller.answers(chat, ids, options.choices)

    async def _read_completion(self, body: Json) -> _Read:
        given = openai_wire.parse_prompts(body)
        options = openai_wire.parse_options(body, is_chat=False)
        self._check_model(body)
        has_special_tokens = body.get("add_special_tokens") is not False
        prompts = [
            await _render(
                self._renderer.completion_token_ids, prompt, add_special_tokens=has_special_tokens
            )
            for prompt in given
        ]
        return options, prompts, ()

    async def _answer(
        self,
        request: Request,
        options: GenerateOptions,
        prompts: list[list[int]],
        raw_answers: tuple[RawAnswer, ...],
        runner: RankRunner,
        handoff: Handoff | None,
    ) -> Response:
        kind = "chatcmpl" if options.is_chat else "cmpl"
        base_id = request.headers.get("x-request-id") or uuid.uuid4().hex
        envelope = Envelope(f"{kind}-{base_id}", int(time.time()), self._model.name, options)
        session_id = options.session_id or request.headers.get("x-session-id") or None
        requests = self._engine_requests(options, prompts, session_id, handoff, raw_answers)
        places = {
            one.request_id: (index // options.choices, index) for index, one in enumerate(requests)
        }
        cached_elsewhere_tokens = _cached_elsewhere_tokens(options, handoff)
        answers = Answers(
            places, prompts, self._renderer.decode, raw_answers, cached_elsewhere_tokens
        )
        generation = Generation(runner, requests)
        if options.is_stream:
            return _EventStream(_stream(envelope, answers, generation), generation)
        await _collect(request.receive, answers, generation)
        usage = answers.usage()
        params = self._handoff_answer(runner, requests[0], usage)
        return _json(envelope.response(answers.choices(), usage, params))

    async def _meet_fault(self, received: ReceivedRequest) -> None:
        """Do what a test wants to happen to this request. Raises ApiError."""
        fault = self._debugging.take(received)
        if fault is None:
            return
        await asyncio.sleep(fault.delay_s)
        if fault.status is not None:
            status = HTTPStatus(fault.status)
            raise ApiError(fault.message, status=status, kind=status.phrase)

    def _read_handoff(self, options: GenerateOptions, runner: RankRunner) -> Handoff | None:
        """Raises EngineDeadError: some parameters are no request's fault but the engine's end."""
        try:
            return self._handoffs.parse(options.kv_transfer_params)
        except EngineFatalError as error:
            runner.die(error)
            raise EngineDeadError from error

    def _handoff_answer(
        self, runner: RankRunner, request: EngineRequest, usage: Usage
    ) -> Json | None:
        """Return what a decoder needs to know of this prefill; None if it needs nothing."""
        if not isinstance(request.handoff, Send) or request.handoff.transfer_id is not None:
            return None
        host, port = self._handoff_address
        return nixl_answer(
            NixlSource(host, port, runner.engine_id, request.request_id),
            runner.model.held_block_ids(request.request_id) or (),
            prompt_tokens=len(request.prompt_token_ids),
            cached_tokens=usage.cached_tokens or 0,
        )

    def _decline(self, body: Json, runner: RankRunner) -> None:
        """Free what a prefill engine holds for a request that is refused."""
        params = body.get("kv_transfer_params")
        with contextlib.suppress(EngineFatalError):
            handoff = self._handoffs.parse(params if isinstance(params, dict) else None)
            if isinstance(handoff, Receive) and handoff.source is not None:
                runner.decline(handoff.source)

    def _engine_requests(
        self,
        options: GenerateOptions,
        prompts: list[list[int]],
        session_id: str | None,
        handoff: Handoff | None,
        raw_answers: Sequence[RawAnswer],
    ) -> list[EngineRequest]:
        """One engine request for each prompt and choice, in the order of the answers.

        A request that names a limit gets exactly that many tokens; one that names none is answered
        in `answer_tokens`. Answers that are known end with their last token.
        """
        ends_itself = options.max_tokens is None and not options.ignores_end
        requests = [
            EngineRequest(
                # A client's x-request-id may repeat, so it can't name the engine's request.
                request_id=f"{next(self._next_number)}",
                prompt_token_ids=prompt,
                max_tokens=options.max_tokens or self._model.max_model_len_tokens,
                stop_after_tokens=self._model.answer_tokens if ends_itself else None,
                choice=choice,
                namespace=CacheNamespace(cache_salt=options.cache_salt),
                session_id=session_id,
                handoff=handoff,
            )
            for prompt in prompts
            for choice in range(options.choices)
        ]
        if not raw_answers:
            return requests
        return [
            _with_answer(request, raw) for request, raw in zip(requests, raw_answers, strict=True)
        ]

    def _rank(self, request: Request) -> int:
        """Return the rank that the header names, or the next one in turn. Raises ApiError."""
        try:
            rank = int(request.headers.get("x-data-parallel-rank", ""))
        except ValueError:
            return next(self._next_rank)  # absent or no number: the engine ignores it, too
        if rank not in self._runners:
            raise ApiError(
                f"data_parallel_rank {rank} is out of range "
                f"[{min(self._runners)}, {max(self._runners) + 1})."
            )
        return rank

    def _check_model(self, body: Mapping[str, Any]) -> None:
        model = body.get("model")
        if model and model != self._model.name:
            raise openai_wire.unknown_model(model, self._model.name)

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        limit = self._model.max_model_len_tokens
        if not prompt:
            raise ApiError("The decoder prompt cannot be empty", param="prompt")
        if max(prompt) >= self._renderer.vocabulary_size:
            raise ApiError(f"Token id {max(prompt)} is out of vocabulary", param="prompt")
        if len(prompt) > limit:
            raise openai_wire.prompt_too_long(len(prompt), limit)
        if len(prompt) == limit:
            raise ApiError("max_tokens must be at least 1, got 0.", param="max_tokens")

    # -- the rest -----------------------------------------------------------------------------

    async def models(self, _: Request) -> Response:
        model = self._model
        return _json(
            openai_wire.model_list(
                model.name, model.root, model.max_model_len_tokens, self._created
            )
        )

    async def tokenize(self, request: Request) -> Response:
        body = await _read_body(request)
        self._check_model(body)
        if "messages" in body:
            openai_wire.check_messages(body)
            ids = await _render(self._renderer.chat_token_ids, body)
        elif isinstance(body.get("prompt"), str):
            ids = await _render(
                self._renderer.completion_token_ids,
                body["prompt"],
                add_special_tokens=body.get("add_special_tokens") is not False,
            )
        else:
            raise openai_wire.invalid("prompt", "Field required")
        limit = self._model.max_model_len_tokens
        return _json({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": None})

    async def detokenize(self, request: Request) -> Response:
        body = await _read_body(request)
        self._check_model(body)
        tokens = body.get("tokens")
        if not openai_wire.is_token_ids(tokens) or max(tokens, default=0) > TOKEN_ID_MAX:
            raise openai_wire.invalid("tokens", "Input should be a valid list of token ids")
        return _json({"prompt": await _render(self._renderer.decode, tokens)})

    async def health(self, _: Request) -> Response:
        is_alive = all(runner.is_alive for runner in self._runners.values())
        return Response(status_code=200 if is_alive else 503)

    async def version(self, _: Request) -> Response:
        return _json({"version": VERSION})

    async def metrics(self, _: Request) -> Response:
        profile = next(iter(self._runners.values())).model.profile
        statistics = {rank: one.model.statistics() for rank, one in self._runners.items()}
        return PlainTextResponse(
            render_metrics(self._model.name, profile, statistics),
            media_type="text/plain; version=0.0.4",
        )

    async def kv_event_sources(self, _: Request) -> Response:
        return _json(self._kv_event_sources())

    async def sim_requests(self, _: Request) -> Response:
        """No route of the engine's: what it was sent, for tests in other processes."""
        return _json([one.as_json() for one in self._debugging.received])

    async def sim_cache(self, _: Request) -> Response:
        """No route of the engine's: by rank, the digests (hex) of the blocks that it has cached."""
        caches = {rank: one.model.pool.cached_copies() for rank, one in self._runners.items()}
        return _json({str(rank): [d.hex() for d in digests] for rank, digests in caches.items()})

    async def reset_prefix_cache(self, _: Request) -> Response:
        resets = [runner.model.reset_prefix_cache() for runner in self._runners.values()]
        return _json({"success": all(resets)})


# -- answers --------------------------------------------------------------------------------------


async def _collect(receive: Receive_, answers: Answers, generation: Generation) -> None:
    """Wait for all answers, unless the client leaves or the engine stops before."""
    watcher = asyncio.create_task(_abort_when_left(receive, generation))
    try:
        async for output in generation.outputs():
            answers.add(output)
    except AbortedError as error:
        raise EngineDeadError from error  # nobody reads it if it was the client that left
    finally:
        watcher.cancel()
        generation.abort()


def _with_answer(request: EngineRequest, raw: RawAnswer) -> EngineRequest:
    """Return a request whose answer is known."""
    tokens = len(raw.token_ids)
    breaks_off = raw.answer.finish == "length"
    return replace(
        request,
        answer_token_ids=raw.token_ids,
        stop_after_tokens=None if breaks_off else tokens,
        max_tokens=min(request.max_tokens, tokens) if breaks_off else request.max_tokens,
    )


def _cached_elsewhere_tokens(options: GenerateOptions, handoff: Handoff | None) -> int | None:
    """Return what the prefill engine had cached, if somebody says so."""
    told = (options.kv_transfer_params or {}).get("remote_prefill_cached_tokens")
    return told if isinstance(handoff, Receive) and type(told) is int else None


async def _stream(
    envelope: Envelope, answers: Answers, generation: Generation
) -> AsyncIterator[bytes]:
    """Yield server-sent events. Raises AbortedError when the client left."""
    options = envelope.options
    is_opened = not options.is_chat
    try:
        async for output in generation.outputs():
            if not is_opened:
                is_opened = True
                (prompt,) = answers.prompts
                for index in range(options.choices):
                    yield _event(envelope.role_chunk(index, prompt, Usage(len(prompt), 0, None)))
            delta = answers.add(output)
            if not envelope.skips(delta):
                yield _event(envelope.delta_chunk(delta, answers.running_usage(output)))
        if options.includes_usage:
            yield _event(envelope.usage_chunk(answers.usage()))
    except EngineDeadError:
        yield _event(_ENGINE_DEAD.body())
    except GenerationFailedError:
        yield _event(_GENERATION_FAILED.body())
    yield b"data: [DONE]\n\n"


async def _stream_response(
    envelope: ResponseEnvelope, answers: Answers, generation: Generation
) -> AsyncIterator[bytes]:
    """Yield the events of a response. Raises AbortedError when the client left."""
    yield envelope.begin()
    try:
        async for output in generation.outputs():
            yield envelope.delta(answers.add(output))
        yield envelope.end(answers.choices()[0], answers.usage())
    except EngineDeadError:
        yield envelope.failed(_ENGINE_DEAD.message)
    except GenerationFailedError:
        yield envelope.failed(_GENERATION_FAILED.message)


class _EventStream(Response):
    """Sends events as they come, and aborts the generation when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], generation: Generation) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._events = events
        self._generation = generation

    async def __call__(self, _: Scope, receive: Receive_, send: Send_) -> None:
        watcher = asyncio.create_task(_abort_when_left(receive, self._generation))
        try:
            # Headers leave at once, as from the engine: the first byte may be long in coming.
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except (AbortedError, OSError):
            # The client left (some servers tell it by an OSError from `send`), or the engine stops:
            # then the stream breaks off without its end, as that of a killed engine.
            return
        finally:
            watcher.cancel()
            self._generation.abort()


async def _abort_when_left(receive: Receive_, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.abort()


def _event(body: Json) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def _json(body: object, status: int = 200) -> Response:
    return Response(
        json.dumps(body, separators=(",", ":")), status_code=status, media_type="application/json"
    )


# -- requests and errors --------------------------------------------------------------------------


async def _read_body(request: Request) -> Json:
    raw = await request.body()
    return openai_wire.parse_body(request.headers.get("content-type", ""), raw)


async def _render(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call the renderer in a thread: a long prompt takes hundreds of milliseconds."""
    try:
        return await asyncio.to_thread(function, *args, **kwargs)
    except RenderError as error:
        raise ApiError(str(error)) from error


_ENGINE_DEAD = ApiError(
    "EngineCore encountered an issue. See stack trace for the root cause.",
    status=HTTPStatus.INTERNAL_SERVER_ERROR,
    kind="InternalServerError",
)


_GENERATION_FAILED = ApiError(
    "Internal server error",
    status=HTTPStatus.INTERNAL_SERVER_ERROR,
    kind="InternalServerError",
)


async def _on_api_error(_: Request, error: ApiError) -> Response:
    return _json(error.body(), error.status)


async def _on_engine_dead(_: Request, __: EngineDeadError) -> Response:
    return _json(_ENGINE_DEAD.body(), _ENGINE_DEAD.status)


async def _on_generation_failed(_: Request, __: GenerationFailedError) -> Response:
    return _json(_GENERATION_FAILED.body(), _GENERATION_FAILED.status)


async def _on_client_left(_: Request, __: ClientDisconnect) -> Response:
    return Response(status_code=CLIENT_CLOSED_STATUS)


async def _on_http_exception(_: Request, error: HTTPException) -> Response:
    status = HTTPStatus(error.status_code)
    return _json(ApiError(error.detail, status=status, kind=status.phrase).body(), status)
