"""From a body to what routing knows of its prompt: rendered and tokenised once, off the event loop.

Each model is tokenised in one of three ways. *Local*: with the model directory's own tokenizer and
chat template, once the parity probe has shown for an instance that this gives the very ids that the
engine gets. *Remote*: the engine's `/tokenize`. *None*: by text. A prompt that can't be had exactly
within the budget is known by its text in chunks: that still leads a session back to where it was
forwarded, and is marked as inexact.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import orjson

from moongate.engine_plugins.vllm_render import (
    ModelDirectoryError,
    ModelRenderer,
    PromptRefused,
    PromptUnsupported,
)
from moongate.gateway.body import Body
from moongate.gateway.engine_api import FACTS_S, EngineApi, EngineCallFailed
from moongate.gateway.errors import GatewayError
from moongate.gateway.routes import PromptKind, Route
from moongate.router import BlockSpace, Prompt
from moongate.router.blocks import hash_prompt, hash_text, pack_tokens
from moongate.router.model import BYTES_PER_TOKEN, TEXT_SPACE, BlockHash

logger = logging.getLogger(__name__)

T = TypeVar("T")

RELOAD_AFTER_S = 60.0
"""A model directory that could not be loaded is not tried again before."""

BYTES_PER_S_PRIOR = 1_000_000.0
"""SmolLM2's tokenizer on one core (an 89 K-token prompt of 351 KB takes 240 to 460 ms)."""

OBSERVED_BYTES_MIN = 2_000
"""Shorter prompts say more about fixed overheads than about the speed."""

SPEED_SMOOTHING = 0.2

PATIENCE = 15.0
"""A prompt that should have been ready is waited for up to so many budgets: the machine is busy, and
on a guess its history may be computed again, which costs more than the wait."""

REMOTE_FIELDS = (
    "messages", "prompt", "tools", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message", "add_special_tokens",
)  # fmt: skip
REMOTE_UNKNOWN_FIELDS = ("reasoning_effort", "documents", "chat_template", "truncate_prompt_tokens")
"""Fields that change the prompt and that `/tokenize` does not take (vLLM 0.32)."""

PROBE_BODIES: tuple[Mapping[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "Grüße, 世界 🙂\n"}]},
    {
        "messages": [
            {"role": "system", "content": "You are  helpful.\n"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "f", "arguments": '{"x": 1, "y": "<é>"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "done"},
            {"role": "user", "content": "and?"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "description": "d",
                    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
                },
            }
        ],
    },
    {"prompt": " def f():\n\treturn 'x' # 🙂"},
)
"""The parity probe: where local and engine ids differ, they differ on something of this."""


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """What is known of a prompt. `fallback`: the fixed word for why it isn't known exactly."""

    prompt: Prompt | None
    fallback: str | None = None


@dataclass(slots=True)
class _Effort:
    """What the tokenizer has to do, and how fast it does it, in processor time.

    A prompt that can't be ready within the budget is known in advance, so nobody waits for it in
    vain; one that can be is waited for even where the machine is slow to give it the processor.
    """

    bytes_per_s: float = BYTES_PER_S_PRIOR
    backlog_bytes: int = 0

    def expected_s(self, size: int, threads: int) -> float:
        return (self.backlog_bytes + size) / threads / self.bytes_per_s

    def observe(self, size: int, processor_s: float) -> None:
        if size >= OBSERVED_BYTES_MIN and processor_s > 0:
            self.bytes_per_s += SPEED_SMOOTHING * (size / processor_s - self.bytes_per_s)


@dataclass(slots=True)
class _Model:
    """How a model's prompts are tokenised, and what each instance's probe said of the renderer."""

    loaded: ModelRenderer | None = None
    agree: set[EngineApi] = field(default_factory=set)
    contradict: set[EngineApi] = field(default_factory=set)
    has_remote: bool = False

    @property
    def renderer(self) -> ModelRenderer | None:
        """Return the renderer if it has been shown to be right, and by nobody to be wrong."""
        return self.loaded if self.agree and not self.contradict else None

    def note_renderer(self, renderer: ModelRenderer) -> None:
        if renderer is not self.loaded:
            self.loaded = renderer
            self.agree.clear()
            self.contradict.clear()

    def note_verdict(self, api: EngineApi, agrees: bool | None) -> None:
        self.agree.discard(api)
        self.contradict.discard(api)
        if agrees is not None:
            (self.agree if agrees else self.contradict).add(api)


class PromptPipeline:
    """Reads prompts. `spaces(model)` and `remote(model)` ask the router and the fleet."""

    def __init__(
        self,
        *,
        mode: str,
        path: str | None,
        budget_s: float,
        waiting_max: int,
        spaces: Callable[[str], Iterable[BlockSpace]],
        remote: Callable[[str], EngineApi | None],
        clock: Callable[[], float],
    ) -> None:
        self._mode = mode
        self._path = path
        self._budget_s = budget_s
        self._waiting_max = waiting_max
        self._spaces = spaces
        self._remote = remote
        self._clock = clock
        self._models: dict[str, _Model] = {}
        self._renderers: dict[Path, ModelRenderer] = {}
        self._failed_at: dict[Path, float] = {}
        self._loading = asyncio.Lock()
        # The tokenizers library leaves the interpreter lock, so threads do run side by side.
        self._thread_count = os.cpu_count() or 1
        self._threads = ThreadPoolExecutor(self._thread_count, thread_name_prefix="tokenize")
        self._effort = _Effort()
        self.waiting = 0

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- which way --------------------------------------------------------------------------------

    async def learn(self, model: str, root: str | None, api: EngineApi) -> str:
        """Find out how an instance's model is tokenised: `local`, `remote` or `none`.

        Called for each instance that serves it. While one contradicts the local tokenizer nothing
        of the model is tokenised locally: better asked than wrong. One that can't be asked now
        changes nothing.
        """
        if self._mode == "off":
            return "none"
        known = self._models.setdefault(model, _Model())
        loaded = None if self._mode == "remote" else await self._load(self._path or root)
        if loaded is not None:
            known.note_renderer(loaded)
        if known.loaded is not None or self._mode in ("auto", "remote"):
            renderer = known.loaded
            agrees, answers = await self._probe(model, renderer, api)
            if agrees is None and self._mode == "local":
                agrees = True  # the operator said so, and nothing says otherwise
            known.has_remote |= answers and self._mode in ("auto", "remote")
            if renderer is known.loaded:
                known.note_verdict(api, agrees)
            if agrees is False:
                logger.warning(
                    "model %s: the tokenizer in %s gives other ids than the engine",
                    model,
                    self._path or root,
                )
        return "local" if known.renderer is not None else "remote" if known.has_remote else "none"

    async def _load(self, directory: str | None) -> ModelRenderer | None:
        if directory is None:
            return None
        # Instances that start together share one renderer, so that verdicts are of the same.
        async with self._loading:
            return await self._load_once(Path(directory))

    async def _load_once(self, path: Path) -> ModelRenderer | None:
        failed_at = self._failed_at.get(path)
        if failed_at is not None and self._clock() - failed_at < RELOAD_AFTER_S:
            return None
        if path not in self._renderers:
            try:
                self._renderers[path] = await self._in_thread(ModelRenderer.load, path)
            except ModelDirectoryError as error:
                self._failed_at[path] = self._clock()
                logger.warning("no local tokenizer: %s", error)
                return None
        return self._renderers[path]

    async def _probe(
        self, model: str, renderer: ModelRenderer | None, api: EngineApi
    ) -> tuple[bool | None, bool]:
        """Return whether local and engine ids agree, and whether the engine tokenises at all.

        None: there was nothing to compare.
        """
        compared = answered = 0
        for body in PROBE_BODIES:
            try:
                theirs = await api.tokenize({"model": model, **body}, timeout_s=FACTS_S)
            except EngineCallFailed as error:
                if error.status is not None and error.status < 500 and error.status != 404:
                    continue  # refused: a template without tools, say; the engine refuses it always
                return None, answered > 0
            answered += 1
            if renderer is None:
                continue
            try:
                ours = await self._in_thread(_token_ids, renderer, body)
            except (PromptRefused, PromptUnsupported):
                return False, True
            if ours != theirs:
                return False, True
            compared += 1
        return True if compared > 0 else None, answered > 0

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    # --- reading ----------------------------------------------------------------------------------

    async def read(self, route: Route, body: Body) -> ReadPrompt:
        """Return what is known of the body's prompt within the budget.

        Raises: GatewayError (503) when too many wait already.
        """
        if route.kind is PromptKind.NONE or _skips_cache(route, body.fields):
            return ReadPrompt(None)
        if body.is_lenient:
            return ReadPrompt(None, "lenient_body")
        if self.waiting >= self._waiting_max:
            raise GatewayError(
                503, "too many requests wait to be read", "queue_full", headers={"retry-after": "1"}
            )
        self.waiting += 1
        try:
            return await self._read(route, body)
        finally:
            self.waiting -= 1

    async def _read(self, route: Route, body: Body) -> ReadPrompt:
        assert body.model is not None
        known = self._models.get(body.model, _Model())
        try:
            if _has_given_ids(route, body):
                return ReadPrompt(await self._read_given_ids(route, body))
            if self._mode == "off":
                return ReadPrompt(_text_prompt(route, body))
            if known.renderer is not None:
                return ReadPrompt(await self._read_here(route, body, known.renderer))
            if known.has_remote:
                return ReadPrompt(await self._read_remotely(route, body))
            reason = "no_tokenizer"
        except TimeoutError:
            reason = "budget"
        except PromptUnsupported as error:
            reason = error.reason
        except PromptRefused:
            reason = "refused"  # the engine will say so better than we can
        except EngineCallFailed:
            reason = "tokenize_call"
        return ReadPrompt(_text_prompt(route, body), reason)

    async def _read_given_ids(self, route: Route, body: Body) -> Prompt:
        """Raises: RenderError."""
        if body.fields.get("truncate_prompt_tokens") is not None:
            raise PromptUnsupported("truncation")
        prompt = _prompt_fields(route, body.fields)["prompt"]
        return await self._in_thread(
            _make_prompt, _ids_of(prompt), self._exact_spaces(body), _salt(body)
        )

    async def _read_here(self, route: Route, body: Body, renderer: ModelRenderer) -> Prompt:
        """Raises: TimeoutError, RenderError."""
        effort, size = self._effort, len(body.raw)
        if effort.expected_s(size, self._thread_count) > self._budget_s:
            raise TimeoutError
        job = _Job(route, body, _prompt_fields(route, body.fields), self._exact_spaces(body))
        effort.backlog_bytes += size
        task = asyncio.ensure_future(self._in_thread(_read_timed, renderer, job))
        task.add_done_callback(lambda done: self._note_effort(done, size))
        # Shielded: what was begun is finished, and its thread is not left half-way.
        prompt, _ = await asyncio.wait_for(asyncio.shield(task), self._budget_s * PATIENCE)
        return prompt

    def _note_effort(self, done: asyncio.Future[tuple[Prompt, float]], size: int) -> None:
        self._effort.backlog_bytes -= size
        if not done.cancelled() and done.exception() is None:
            self._effort.observe(size, done.result()[1])

    async def _read_remotely(self, route: Route, body: Body) -> Prompt:
        """Raises: TimeoutError, RenderError, EngineCallFailed."""
        assert body.model is not None
        fields = _prompt_fields(route, body.fields)
        ids = await asyncio.wait_for(self._ask_engine(body.model, fields), self._budget_s)
        return await self._in_thread(_make_prompt, ids, self._exact_spaces(body), _salt(body))

    def _exact_spaces(self, body: Body) -> list[BlockSpace]:
        assert body.model is not None
        return [space for space in self._spaces(body.model) if space != TEXT_SPACE]

    async def _ask_engine(self, model: str, fields: Mapping[str, Any]) -> Sequence[int]:
        if any(fields.get(name) is not None for name in REMOTE_UNKNOWN_FIELDS):
            raise PromptUnsupported("remote_fields")
        api = self._remote(model)
        if api is None:
            raise PromptUnsupported("no_tokenizer")
        body = {name: fields[name] for name in REMOTE_FIELDS if name in fields}
        if "messages" in body:
            body["messages"] = [_with_reasoning_name(message) for message in body["messages"]]
        return await api.tokenize({"model": model, **body}, timeout_s=self._budget_s)


# --- steps, run in threads ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Job:
    """One prompt to be tokenised in a thread."""

    route: Route
    body: Body
    fields: Mapping[str, Any]  # with one prompt
    spaces: Sequence[BlockSpace]


def _read_timed(renderer: ModelRenderer, job: _Job) -> tuple[Prompt, float]:
    """Return the prompt, and the processor time that it took.

    It is known by its text too, so that a later turn that can't be tokenised finds its way by that.
    """
    began = time.thread_time()
    prompt = _make_prompt(_token_ids(renderer, job.fields), job.spaces, _salt(job.body))
    chains = {**prompt.chains, TEXT_SPACE: _text_chain(job.route, job.body)}
    return Prompt(prompt.token_count, chains), time.thread_time() - began


def _token_ids(renderer: ModelRenderer, fields: Mapping[str, Any]) -> list[int]:
    if "messages" in fields:
        return renderer.chat_token_ids(fields)
    prompt = fields["prompt"]
    assert isinstance(prompt, str), "given ids need no tokenizer"
    if fields.get("truncate_prompt_tokens") is not None:
        raise PromptUnsupported("truncation")
    special = fields.get("add_special_tokens", True) is True
    return renderer.completion_token_ids(prompt, add_special_tokens=special)


def _make_prompt(ids: Sequence[int], spaces: Sequence[BlockSpace], salt: str | None) -> Prompt:
    try:
        tokens = pack_tokens(ids)
    except (OverflowError, TypeError) as error:
        raise PromptRefused("token ids must be integers that a vocabulary can have") from error
    return Prompt(len(ids), {space: hash_prompt(space, tokens, salt) for space in spaces})


# --- fields ---------------------------------------------------------------------------------------


def _prompt_fields(route: Route, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields with one prompt. A completion of several is routed by its first."""
    if route.kind is PromptKind.CHAT:
        return {name: value for name, value in fields.items() if name != "prompt"}
    prompt = fields.get("prompt")
    if fields.get("suffix") is not None or prompt is None:
        raise PromptUnsupported("prompt_form")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if not isinstance(prompt, str | list) or not prompt:
        raise PromptUnsupported("prompt_form")
    others = {name: value for name, value in fields.items() if name != "messages"}
    return {**others, "prompt": prompt}


def _has_given_ids(route: Route, body: Body) -> bool:
    """Tell whether the prompt is token ids already, so that no tokenizer is needed."""
    if route.kind is not PromptKind.COMPLETION:
        return False
    prompt = body.fields.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        prompt = prompt[0]
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)


def _with_reasoning_name(message: Any) -> Any:
    """Return a message as chat requests become: `/tokenize` knows reasoning by one name only."""
    if not isinstance(message, dict) or message.get("reasoning_content") is None:
        return message
    reasoning = message.get("reasoning")
    others = {name: value for name, value in message.items() if name != "reasoning_content"}
    return {
        **others,
        "reasoning": reasoning if reasoning is not None else message["reasoning_content"],
    }


def _ids_of(prompt: Sequence[Any]) -> list[int]:
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
        raise PromptRefused("prompt: expected token ids")
    return list(prompt)


def _skips_cache(route: Route, fields: Mapping[str, Any]) -> bool:
    """Tell whether the engine will compute the whole prompt, whatever it has cached.

    Source: vLLM 0.32 `KVCacheManager.prefix_cache_lookup_enabled`, and `to_sampling_params` of both
    requests: logits of the prompt are wanted.
    """
    # An echoed chat has the logits of its prompt by default, an echoed completion if asked for.
    is_chat = route.kind is PromptKind.CHAT
    logprobs = fields.get("top_logprobs", 0) if is_chat else fields.get("logprobs")
    echoes_logprobs = bool(fields.get("echo")) and logprobs is not None
    return fields.get("prompt_logprobs") is not None or echoes_logprobs


def _salt(body: Body) -> str | None:
    salt = body.fields.get("cache_salt")
    return salt if isinstance(salt, str) else None


def _text_of(route: Route, body: Body) -> bytes:
    """Return the prompt's text: what comes first in the engine's prompt comes first here."""
    names = (
        ("prompt",)
        if route.kind is PromptKind.COMPLETION
        else ("tools", "chat_template_kwargs", "messages")
    )
    parts = (body.fields.get(name) for name in names)
    try:
        return b"".join(orjson.dumps(part) for part in parts if part is not None)
    except orjson.JSONEncodeError:  # nested more deeply than it writes, though it can be read
        return body.raw


def _text_chain(route: Route, body: Body) -> Sequence[BlockHash]:
    return hash_text(_text_of(route, body), (body.model, _salt(body)))


def _text_prompt(route: Route, body: Body) -> Prompt:
    """Return the prompt as its text tells it."""
    text = _text_of(route, body)
    chain = hash_text(text, (body.model, _salt(body)))
    return Prompt(len(text) // BYTES_PER_TOKEN, {TEXT_SPACE: chain}, is_exact=False)
