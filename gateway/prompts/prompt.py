"""From a body to what routing knows of its prompt: rendered in full, tokenised where it is new.

Each model is tokenised in one of three ways. *Local*: with the model directory's own tokenizer and
chat template, once the parity probe has shown for an instance that this gives the very ids that the
engine gets. *Remote*: the engine's `/tokenize`. *None*: by text.

A prompt that can't be had exactly within the budget is known by its beginning, as far as that was
tokenised before; failing that, by its text in chunks, which still leads a session back to where it was
forwarded. Both are marked as inexact.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moongate.engine_plugins.vllm_render import (
    ModelDirectoryError,
    ModelRenderer,
    PromptRefused,
    PromptUnsupported,
    TemplateManners,
)
from moongate.gateway.dialects.body import Body
from moongate.gateway.dialects.prompt_fields import (
    NO_TEXT_TAG,
    TEXT_BYTES_MAX,
    given_ids,
    has_given_ids,
    hash_body_text,
    prompt_fields,
    read_salt,
    read_text,
    skips_cache,
    with_reasoning_name,
    with_tags,
)
from moongate.gateway.dialects.routes import PromptKind, Route
from moongate.gateway.errors import GatewayError
from moongate.gateway.instances.engine_api import EngineApi, EngineCallFailed
from moongate.gateway.prompts.engine_rendering import EngineRendering
from moongate.gateway.prompts.parity import PromptForm, form_of, probe
from moongate.gateway.prompts.tokenizing import Tokenized, Tokenizing
from moongate.router import BlockSpace, Prompt
from moongate.router.blocks import TOKEN_BYTES, hash_prompt, pack_tokens
from moongate.router.model import BYTES_PER_TOKEN, TEXT_SPACE

logger = logging.getLogger(__name__)

RELOAD_AFTER_S = 60.0
"""A model directory that could not be loaded is not tried again before."""

READ_BYTES_MAX = 16_777_216
"""Larger bodies are known by their first bytes: no context takes so much text, so they are images, and
reading them would hold everybody up (30 MiB: 50 ms)."""

RENDER_INLINE_BYTES = 2_000_000
"""Larger bodies are rendered in a thread: it takes about a ms per MB."""

SIZE_BYTES_MAX = 1 << 20
"""What an unread body counts as at most: it may be images."""

IMAGE_BYTES = 4096
"""What an image counts as, in bytes of text: about 1,000 tokens."""

REMOTE_FIELDS = (
    "messages", "prompt", "tools", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message", "add_special_tokens",
)  # fmt: skip
REMOTE_UNKNOWN_FIELDS = ("reasoning_effort", "documents", "chat_template", "truncate_prompt_tokens")
"""Fields that change the prompt and that `/tokenize` does not take (vLLM 0.32)."""


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """What is known of a prompt. `fallback`: the fixed word for why it isn't known exactly.

    `tokenized`: its ids, where they were made here, of a prompt of this `form`.
    """

    prompt: Prompt | None
    fallback: str | None = None
    tokenized: Tokenized | None = None
    form: PromptForm = PromptForm.PLAIN
    # Of the chat that it is, or becomes.
    fields: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    # The ids, where they were not made here.
    packed: bytes | None = field(default=None, compare=False, repr=False)
    has_media: bool = False

    @property
    def is_nameable(self) -> bool:
        """Tell whether the pool can be asked for its blocks: ids alone don't name those of images."""
        return self.prompt is not None and not self.has_media

    def tokens(self) -> bytes:
        """Return the ids of a prompt that is known exactly, packed."""
        if self.packed is not None:
            return self.packed
        return self.tokenized.tokens() if self.tokenized is not None else b""


@dataclass(slots=True)
class _Model:
    """How a model's prompts are tokenised, and what each instance's probe said of the renderer."""

    loaded: ModelRenderer | None = None
    verdicts: dict[EngineApi, Mapping[PromptForm, bool]] = field(default_factory=dict)
    is_told: bool = False  # by the operator, to tokenise locally unless an engine contradicts
    has_remote: bool = False

    def renderer_for(self, form: PromptForm) -> ModelRenderer | None:
        """Return the renderer if it has been shown to be right, and by nobody to be wrong here."""
        verdicts = self.verdicts.values()
        is_right = any(True in verdict.values() for verdict in verdicts)
        is_trusted = is_right or (self.is_told and not any(verdicts))
        is_wrong = any(verdict.get(form) is False for verdict in verdicts)
        return self.loaded if is_trusted and not is_wrong else None

    def note_renderer(self, renderer: ModelRenderer) -> None:
        if renderer is not self.loaded:
            self.loaded = renderer
            self.verdicts.clear()


class PromptPipeline:
    """Reads prompts. `spaces(model)` and `remotes(model)` ask the router and the fleet: engines that have
    the model, the least loaded first."""

    def __init__(
        self,
        *,
        mode: str,
        path: str | None,
        budget_s: float,
        waiting_max: int,
        memory_bytes_max: int,
        spaces: Callable[[str], Iterable[BlockSpace]],
        remotes: Callable[[str], Iterable[EngineApi]],
        clock: Callable[[], float],
        load: Callable[[Path], ModelRenderer] = ModelRenderer.load,
    ) -> None:
        self._load_renderer = load
        self._mode = mode
        self._path = path
        self._budget_s = budget_s
        self._waiting_max = waiting_max
        self._spaces = spaces
        self._remotes = remotes
        self._clock = clock
        self._models: dict[str, _Model] = {}
        self._renderers: dict[Path, ModelRenderer] = {}
        self._failed_at: dict[Path, float] = {}
        self._takers: set[EngineApi] = set()
        self._loading = asyncio.Lock()
        self._rendering = EngineRendering(budget_s)
        self._tokenizing = Tokenizing(budget_s=budget_s, memory_bytes_max=memory_bytes_max)
        self.waiting = 0

    def close(self) -> None:
        self._tokenizing.close()

    # --- which way --------------------------------------------------------------------------------

    async def learn(
        self,
        model: str,
        root: str | None,
        api: EngineApi,
        *,
        takes_ids: bool = False,
        renders: bool = False,
    ) -> str:
        """Find out how an instance's model is tokenised: `local`, `remote` or `none`.

        Called for each instance that serves it. What one contradicts of the local tokenizer is
        tokenised locally for none: better asked than wrong. One that can't be asked now has no say:
        what it said before it may have said as another process. `takes_ids`: the engine is known to
        take ids in place of a text. `renders`: it has routes that tell prompts.
        """
        (self._takers.add if takes_ids else self._takers.discard)(api)
        if self._mode == "off":
            return "none"
        self._rendering.note(api, renders=renders and self._mode != "local")
        known = self._models.setdefault(model, _Model(is_told=self._mode == "local"))
        loaded = None if self._mode == "remote" else await self._load(self._path or root)
        if loaded is not None:
            known.note_renderer(loaded)
        if known.loaded is not None or self._mode in ("auto", "remote"):
            await self._compare(model, known, api)
            self._warn_of_contradictions(model, root, known.verdicts.get(api, {}))
        if any(known.renderer_for(form) is not None for form in PromptForm):
            return "local"
        return "remote" if known.has_remote else "none"

    def set_limits(self, *, budget_s: float, waiting_max: int, memory_bytes_max: int) -> None:
        """Let these hold from now on. What is remembered shrinks when more is to be remembered."""
        self._budget_s = self._tokenizing.budget_s = self._rendering.budget_s = budget_s
        self._waiting_max = waiting_max
        self._tokenizing.memory.bytes_max = memory_bytes_max

    def forget(self, api: EngineApi) -> None:
        """Forget an instance that is here no more."""
        self._takers.discard(api)
        self._rendering.note(api, renders=False)
        for known in self._models.values():
            known.verdicts.pop(api, None)

    async def _compare(self, model: str, known: _Model, api: EngineApi) -> None:
        renderer = known.loaded
        verdicts, answers = await probe(model, renderer, api)
        known.has_remote |= answers and self._mode in ("auto", "remote")
        if renderer is known.loaded:
            known.verdicts[api] = verdicts

    def _warn_of_contradictions(
        self, model: str, root: str | None, verdicts: Mapping[PromptForm, bool]
    ) -> None:
        forms = [form.value for form, agrees in verdicts.items() if not agrees]
        if forms:
            logger.warning(
                "model %s: the tokenizer in %s gives other ids than the engine for prompts that are:"
                " %s", model, self._path or root, ", ".join(forms),
            )  # fmt: skip

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
                loaded = await self._tokenizing.in_thread(self._load_renderer, path)
            except ModelDirectoryError as error:
                self._failed_at[path] = self._clock()
                logger.warning("no local tokenizer: %s", error)
                return None
            if not loaded.boundaries.marks:
                logger.info("%s: no safe place to cut prompts; each is encoded as a whole", path)
            self._renderers[path] = loaded
        return self._renderers[path]

    @property
    def is_busy(self) -> bool:
        """Tell whether prompts are being encoded, waited for or not."""
        return self._tokenizing.effort.backlog_bytes > 0

    @property
    def memory_bytes(self) -> int:
        """Return what is remembered of prompts, about."""
        return self._tokenizing.memory.bytes_used

    def agrees_with(self, model: str, api: EngineApi, form: PromptForm) -> bool:
        """Tell whether this very instance was asked, and gave the ids that are made here."""
        known = self._models.get(model)
        return known is not None and known.verdicts.get(api, {}).get(form, False)

    def takes_ids(self, api: EngineApi) -> bool:
        """Tell whether an instance is known to take token ids in place of a chat's text."""
        return api in self._takers

    def manners(self, model: str) -> TemplateManners | None:
        """Return the manners of a model's templates, None where they aren't known here."""
        known = self._models.get(model)
        return known.loaded.manners if known is not None and known.loaded is not None else None

    def is_repeatable(self, model: str) -> bool:
        """Tell whether the model's template renders the same at any time and place."""
        known = self._models.get(model)
        return known is not None and known.loaded is not None and not known.loaded.tells_time

    # --- reading ----------------------------------------------------------------------------------

    async def read(self, route: Route, body: Body) -> ReadPrompt:
        """Return what is known of the body's prompt within the budget.

        Raises: GatewayError (503) when too many wait already.
        """
        if route.kind is PromptKind.NONE or skips_cache(route, body.top):
            return ReadPrompt(None)
        if len(body.raw) > READ_BYTES_MAX:
            return ReadPrompt(_text_prompt(body.raw, body), "too_large")
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
            if has_given_ids(route, body):
                return self._read_given_ids(route, body)
            if self._mode == "off":
                return ReadPrompt(_text_prompt(read_text(route, body), body))
            fields = prompt_fields(route, body.fields, self.manners(body.model))
            form = form_of(fields)
            renderer = known.renderer_for(form)
            if renderer is not None:
                read = await self._read_locally(route, body, fields, renderer, form)
                return replace(read, fields=fields)
            if known.has_remote:
                return replace(await self._read_remotely(body, fields), fields=fields)
            reason = "no_tokenizer"
        except TimeoutError:
            reason = "budget"
        except PromptUnsupported as error:
            told = await self._read_by_engine(route, body, error.reason)
            if told is not None:
                return told
            reason = error.reason
        except (PromptRefused, RecursionError):
            reason = "refused"  # the engine will say so better than we can
        except EngineCallFailed:
            reason = "tokenize_call"
        return ReadPrompt(_text_prompt(read_text(route, body), body), reason)

    def _read_given_ids(self, route: Route, body: Body) -> ReadPrompt:
        """Raises: PromptRefused, PromptUnsupported."""
        if body.fields.get("truncate_prompt_tokens") is not None:
            raise PromptUnsupported("truncation")
        return self._prompt_of(given_ids(prompt_fields(route, body.fields, None)["prompt"]), body)

    async def _read_by_engine(self, route: Route, body: Body, reason: str) -> ReadPrompt | None:
        """Return what an engine tells of a prompt that isn't known here; None: none does."""
        assert body.model is not None
        engines, spaces = self._remotes(body.model), self._exact_spaces(body)
        told = await self._rendering.read(route, body, reason, engines, spaces)
        if told is None:
            return None
        prompt, tokens, media = told
        return ReadPrompt(prompt, packed=tokens, has_media=bool(media))

    async def _read_locally(
        self,
        route: Route,
        body: Body,
        fields: Mapping[str, Any],
        renderer: ModelRenderer,
        form: PromptForm,
    ) -> ReadPrompt:
        """Raises: PromptRefused, PromptUnsupported."""
        try:
            text, special = await self._render(renderer, fields, len(body.raw))
            tokenized = await self._tokenizing.tokenize(
                renderer, text, add_special_tokens=special, salt=read_salt(body)
            )
        except PromptUnsupported as error:
            tagged = with_tags(fields)
            if tagged is None:
                raise
            told = await self._read_by_engine(route, body, error.reason)
            if told is not None:
                return told
            tokenized = await self._tokenize_beginning(body, tagged, renderer)
            return self._read_pieces(route, body, tokenized, form, error.reason)
        return self._read_pieces(route, body, tokenized, form, "budget")

    async def _tokenize_beginning(
        self, body: Body, tagged: Mapping[str, Any], renderer: ModelRenderer
    ) -> Tokenized:
        """Return a prompt up to the first of its images. Raises: PromptRefused, PromptUnsupported."""
        text, special = await self._render(renderer, tagged, len(body.raw))
        beginning, *others = text.split(NO_TEXT_TAG)
        if not others:
            raise PromptUnsupported("multimodal")  # the template leaves it out
        tokenized = await self._tokenizing.tokenize_beginning(
            renderer, beginning, add_special_tokens=special, salt=read_salt(body)
        )
        following = sum(map(len, others)) + len(others) * IMAGE_BYTES
        return replace(tokenized, unknown_bytes=tokenized.unknown_bytes + following)

    def _read_pieces(
        self, route: Route, body: Body, tokenized: Tokenized, form: PromptForm, reason: str
    ) -> ReadPrompt:
        """Return what was tokenised. `reason`: why, if that isn't all."""
        prompt = self._prompt_of_pieces(tokenized, body)
        if prompt.is_exact:
            return ReadPrompt(prompt, tokenized=tokenized, form=form)
        if not any(prompt.chains.values()):
            prompt = _text_prompt(read_text(route, body), body)  # not even a block is known
        return ReadPrompt(prompt, reason)

    async def _render(
        self, renderer: ModelRenderer, fields: Mapping[str, Any], size: int
    ) -> tuple[str, bool]:
        """Return the prompt's text, and whether it gets special tokens.

        Raises: PromptRefused, PromptUnsupported.
        """
        if fields.get("truncate_prompt_tokens") is not None:
            raise PromptUnsupported("truncation")
        if "messages" not in fields:
            return fields["prompt"], fields.get("add_special_tokens", True) is True
        special = fields.get("add_special_tokens") is True
        if size > RENDER_INLINE_BYTES:
            return await self._tokenizing.in_thread(renderer.chat_text, fields), special
        return renderer.chat_text(fields), special

    async def _read_remotely(self, body: Body, fields: Mapping[str, Any]) -> ReadPrompt:
        """Raises: TimeoutError, PromptRefused, PromptUnsupported, EngineCallFailed."""
        assert body.model is not None
        async with asyncio.timeout(self._budget_s):
            ids = await self._ask_engine(body.model, fields)
        return self._prompt_of(ids, body)

    async def _ask_engine(self, model: str, fields: Mapping[str, Any]) -> Sequence[int]:
        if any(fields.get(name) is not None for name in REMOTE_UNKNOWN_FIELDS):
            raise PromptUnsupported("remote_fields")
        api = next(iter(self._remotes(model)), None)
        if api is None:
            raise PromptUnsupported("no_tokenizer")
        body = {name: fields[name] for name in REMOTE_FIELDS if name in fields}
        if "messages" in body:
            body["messages"] = [with_reasoning_name(message) for message in body["messages"]]
        return await api.tokenize({"model": model, **body}, timeout_s=self._budget_s)

    # --- ids to prompts ---------------------------------------------------------------------------

    def _prompt_of(self, ids: Sequence[int], body: Body) -> ReadPrompt:
        """Raises: PromptRefused."""
        try:
            tokens = pack_tokens(ids)
        except (OverflowError, TypeError) as error:
            raise PromptRefused("token ids must be integers that a vocabulary can have") from error
        salt = read_salt(body)
        chains = {space: hash_prompt(space, tokens, salt) for space in self._exact_spaces(body)}
        return ReadPrompt(Prompt(len(ids), chains), packed=tokens)

    def _prompt_of_pieces(self, tokenized: Tokenized, body: Body) -> Prompt:
        tokens, salt = tokenized.tokens(), read_salt(body)
        hash_pieces = self._tokenizing.memory.hash_pieces
        chains = {
            space: hash_pieces(tokenized.keys, tokenized.pieces, tokens, space, salt)
            for space in self._exact_spaces(body)
        }
        count = len(tokens) // TOKEN_BYTES + tokenized.unknown_bytes // BYTES_PER_TOKEN
        return Prompt(count, chains, is_exact=tokenized.is_whole)

    def _exact_spaces(self, body: Body) -> list[BlockSpace]:
        assert body.model is not None
        return [space for space in self._spaces(body.model) if space != TEXT_SPACE]


def _text_prompt(text: bytes, body: Body) -> Prompt:
    """Return the prompt as its text tells it."""
    text = text[:TEXT_BYTES_MAX]
    chains = {TEXT_SPACE: hash_body_text(text, body)}
    size = len(text) if len(text) < TEXT_BYTES_MAX else min(len(body.raw), SIZE_BYTES_MAX)
    return Prompt(size // BYTES_PER_TOKEN, chains, is_exact=False)
