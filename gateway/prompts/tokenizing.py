"""Texts to token ids: only what is new of them, in threads, within a time budget.

A text is cut into pieces (`boundaries.py`); those that are remembered cost a look-up, a few new bytes
are encoded at once, more go to threads, in as many batches as are worth a thread. A piece that is being
encoded for one request is not encoded again for another that comes meanwhile. What can't be ready
within the budget is begun all the same and remembered, and the request goes by what is known.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from moongate.engine_plugins.vllm_render import ModelRenderer, PromptUnsupported
from moongate.gateway.prompts.prompt_memory import (
    Key,
    Opening,
    Piece,
    PromptMemory,
    name_piece,
)
from moongate.router.blocks import pack_tokens

logger = logging.getLogger(__name__)

T = TypeVar("T")

INLINE_BYTES = 8192
"""New text of up to this size is encoded in the event loop: it takes some ms, and a thread's result
can be as long in coming where other work wants the processor."""

OPENING_GROWTH = 1.125
"""An opening is taken for a longer one only where that is so much longer."""

BATCH_BYTES_MIN = 16_384
"""Less than this is not worth a thread of its own."""

BYTES_PER_S_PRIOR = 1_000_000.0
"""SmolLM2's tokenizer on one slow core."""

OBSERVED_BYTES_MIN = 2_000
"""Shorter texts say more about fixed overheads than about the speed."""

SPEED_SMOOTHING = 0.2
"""The weight of the latest text in the speed that is expected: about the last five count."""

PATIENCE = 15.0
"""What should have been ready is waited for up to so many budgets: the machine is busy, and on a guess
a history may be computed again, which costs more than the wait."""

BACKLOG_BYTES_MAX = 64_000_000
"""Past so much text in the threads no more is begun for requests that don't wait for it."""


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The leading pieces of a text that are known, and how much text (bytes) follows unknown."""

    keys: Sequence[Key]
    pieces: Sequence[Piece]
    unknown_bytes: int = 0

    @property
    def is_whole(self) -> bool:
        return self.unknown_bytes == 0

    def tokens(self) -> bytes:
        """Return the ids as packed uint32."""
        return b"".join([piece.tokens for piece in self.pieces])

    def ids_json(self) -> bytes:
        """Return the ids as a JSON array."""
        return b"[%b]" % b",".join([p.ids_json for p in self.pieces if p.tokens])


@dataclass(slots=True)
class Effort:
    """What the threads have to do, and how fast they do it, in processor time.

    A text that can't be ready within the budget is known in advance, so nobody waits for it in vain;
    one that can be is waited for even where the machine is slow to give it the processor.
    """

    threads: int
    bytes_per_s: float = BYTES_PER_S_PRIOR
    backlog_bytes: int = 0

    def expected_s(self, batches: Sequence[Sequence[_New]]) -> float:
        """Return when these batches will be done if the threads take them after all else."""
        sizes = [sum(len(new.data) for new in batch) for batch in batches]
        shared = (self.backlog_bytes + sum(sizes)) / self.threads
        return max(shared, *sizes, 0) / self.bytes_per_s

    def observe(self, size: int, processor_s: float) -> None:
        if size >= OBSERVED_BYTES_MIN and processor_s > 0:
            self.bytes_per_s += SPEED_SMOOTHING * (size / processor_s - self.bytes_per_s)


class _New(NamedTuple):
    """A piece of a text, not looked up yet."""

    key: Key
    text: str
    data: bytes  # the text in UTF-8


Encoded = Mapping[Key, Piece]


class Tokenizing:
    """Tokenises for all models. Create it inside the event loop, and `close` it."""

    def __init__(self, *, budget_s: float, memory_bytes_max: int) -> None:
        self.budget_s = budget_s
        self.memory = PromptMemory(memory_bytes_max)
        threads = os.cpu_count() or 1
        # The tokenizers library leaves the interpreter lock, so threads do run side by side.
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self.effort = Effort(threads)
        self._under_way: dict[Key, asyncio.Future[Encoded]] = {}
        self._tags: dict[ModelRenderer, bytes] = {}

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def tokenize(
        self,
        renderer: ModelRenderer,
        text: str,
        *,
        add_special_tokens: bool = False,
        salt: str | None = None,
    ) -> Tokenized:
        """Return the ids of a text as far as they are known within the budget.

        What is remembered under a salt is found under the same only: how long an answer takes tells
        nobody else that a text was sent before. Raises: PromptUnsupported.
        """
        frame = renderer.frame if add_special_tokens else ([], [])
        if frame is None:
            return await self._tokenize_framed(renderer, text)
        tag, boundaries = self._tag(renderer, salt), renderer.boundaries
        opening = self.memory.find_opening(text, tag, boundaries.is_cut)
        news = _cut(boundaries.split(text[len(opening.text) :] if opening else text), tag)
        found = await self._find(renderer, news)
        whole = _put_together(news, found, frame, opening)
        if whole.is_whole and len(news) > 1:
            self._remember_opening(text, tag, news, whole, opening)
        return whole

    def _remember_opening(
        self,
        text: str,
        tag: bytes,
        news: Sequence[_New],
        whole: Tokenized,
        extended: Opening | None,
    ) -> None:
        """Remember all but the last piece, which opens the answer that the next turn will have."""
        end = len(text) - len(news[-1].text)
        if extended is not None and end < len(extended.text) * OPENING_GROWTH:
            return  # what follows the old one is little, and others may go on from there
        count = len(news) - 1 + (len(extended.keys) if extended is not None else 0)
        start = next(n for n, piece in enumerate(whole.pieces) if piece.text)  # behind the frame
        opening = Opening(
            text[:end], whole.keys[start : start + count], whole.pieces[start : start + count]
        )
        self.memory.add_opening(opening, tag, extended)

    async def tokenize_beginning(
        self,
        renderer: ModelRenderer,
        text: str,
        *,
        add_special_tokens: bool = False,
        salt: str | None = None,
    ) -> Tokenized:
        """Return what is known of a text that goes on: never its last piece, which may be longer.

        Raises: PromptUnsupported.
        """
        frame = renderer.frame if add_special_tokens else ([], [])
        *news, last = _cut(renderer.boundaries.split(text), self._tag(renderer, salt))
        following_bytes = max(len(last.data), 1)
        if frame is None:  # what comes first depends on what isn't known
            return Tokenized([], [], following_bytes)
        known = _put_together(news, await self._find(renderer, news), (frame[0], []))
        return Tokenized(known.keys, known.pieces, known.unknown_bytes + following_bytes)

    def _tag(self, renderer: ModelRenderer, salt: str | None = None) -> bytes:
        tag = self._tags.setdefault(renderer, len(self._tags).to_bytes(2, "big"))
        return tag if salt is None else tag + hashlib.sha256(salt.encode()).digest()

    async def _find(
        self, renderer: ModelRenderer, news: Sequence[_New]
    ) -> Mapping[Key, Piece | None]:
        """Return the pieces that are remembered, or encoded in time."""
        found = {new.key: self.memory.find_piece(new.key, new.data) for new in news}
        missing = {new.key: new for new in news if found[new.key] is None}
        if missing:
            found |= await self._encode(renderer, list(missing.values()))
        return found

    async def _tokenize_framed(self, renderer: ModelRenderer, text: str) -> Tokenized:
        """Tokenise as a whole: what special tokens the text gets depends on it."""
        ids = await self.in_thread(lambda: renderer.encode(text, add_special_tokens=True))
        piece = Piece(_utf8(text), pack_tokens(ids))
        return Tokenized([name_piece(piece.text, self._tag(renderer) + b"framed")], [piece])

    async def _encode(self, renderer: ModelRenderer, missing: Sequence[_New]) -> Encoded:
        """Return what is known of the missing pieces in time."""
        own = [new for new in missing if new.key not in self._under_way]
        if len(own) == len(missing) and self._is_quick(sum(len(new.data) for new in own)):
            return self._encode_at_once(renderer, own)
        batches = _share_out(own, self.effort.threads)
        is_in_time = self.effort.expected_s(batches) <= self.budget_s
        others = {self._under_way[n.key] for n in missing if n.key in self._under_way}
        if not is_in_time and self.effort.backlog_bytes > BACKLOG_BYTES_MAX:
            batches = []
        waited = {*others, *(self._begin(renderer, batch) for batch in batches)}
        if is_in_time and waited:
            await asyncio.wait(waited, timeout=self.budget_s * PATIENCE)
        encoded: dict[Key, Piece] = {}
        for future in waited:
            is_done = future.done() and not future.cancelled()  # they are as it is closed
            if is_done and future.exception() is None:
                encoded |= future.result()
        return encoded

    def _encode_at_once(self, renderer: ModelRenderer, news: Sequence[_New]) -> Encoded:
        try:
            encoded, _ = _encode_batch(renderer, news)
        except Exception:  # whatever the library fails at, it is the text that isn't known
            logger.exception("a text could not be tokenised")
            return {}
        self._remember(encoded)
        return encoded

    def _is_quick(self, size: int) -> bool:
        return size <= INLINE_BYTES and size / self.effort.bytes_per_s <= self.budget_s

    def _begin(self, renderer: ModelRenderer, batch: Sequence[_New]) -> asyncio.Future[Encoded]:
        """Encode in a thread; whoever asked may leave, what was begun is finished and remembered."""
        size = sum(len(new.data) for new in batch)
        future: asyncio.Future[Encoded] = asyncio.get_running_loop().create_future()
        self.effort.backlog_bytes += size
        self._under_way |= dict.fromkeys([new.key for new in batch], future)
        job = asyncio.ensure_future(self.in_thread(_encode_batch, renderer, batch))

        def finish(done: asyncio.Future[tuple[Encoded, float]]) -> None:
            self.effort.backlog_bytes -= size
            for new in batch:
                del self._under_way[new.key]
            if done.cancelled():
                future.cancel()
            elif (error := done.exception()) is not None:
                logger.error("a text could not be tokenised", exc_info=error)
                future.set_exception(error)
                future.exception()  # nobody may be waiting any more
            else:
                encoded, processor_s = done.result()
                self.effort.observe(size, processor_s)
                self._remember(encoded)
                future.set_result(encoded)

        job.add_done_callback(finish)
        return future

    def _remember(self, encoded: Encoded) -> None:
        for key, piece in encoded.items():
            self.memory.add_piece(key, piece)


def _cut(pieces: Iterable[str], tag: bytes) -> list[_New]:
    news = []
    for text in pieces:
        data = _utf8(text)
        news.append(_New(name_piece(data, tag), text, data))
    return news


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise PromptUnsupported("lone_surrogate") from error


def _put_together(
    news: Sequence[_New],
    found: Mapping[Key, Piece | None],
    frame: tuple[list[int], list[int]],
    opening: Opening | None = None,
) -> Tokenized:
    keys: list[Key] = []
    pieces: list[Piece] = []
    before, after = frame
    if before:
        _add_frame(before, keys, pieces)
    if opening is not None:
        keys += opening.keys
        pieces += opening.pieces
    for position, new in enumerate(news):
        piece = found.get(new.key)
        # What another request had encoded meanwhile is of the same name; of the same text it must be too.
        if piece is None or piece.text != new.data:
            return Tokenized(keys, pieces, sum(len(rest.data) for rest in news[position:]))
        keys.append(new.key)
        pieces.append(piece)
    if after:
        _add_frame(after, keys, pieces)
    return Tokenized(keys, pieces)


def _add_frame(ids: Sequence[int], keys: list[Key], pieces: list[Piece]) -> None:
    piece = Piece(b"", pack_tokens(ids))
    keys.append(name_piece(piece.tokens, b"frame"))
    pieces.append(piece)


def _share_out(news: Sequence[_New], threads: int) -> list[list[_New]]:
    """Return the pieces in as many batches as are worth a thread, about equally large."""
    worth = sum(len(new.data) for new in news) // BATCH_BYTES_MIN
    count = max(1, min(threads, worth))
    batches: list[list[_New]] = [[] for _ in range(count)]
    sizes = [0] * count
    for new in sorted(news, key=lambda new: -len(new.data)):
        least = sizes.index(min(sizes))
        batches[least].append(new)
        sizes[least] += len(new.data)
    return [batch for batch in batches if batch]


def _encode_batch(renderer: ModelRenderer, news: Sequence[_New]) -> tuple[Encoded, float]:
    """Return the pieces encoded, and the processor time that it took."""
    began = time.thread_time()
    ids = renderer.encode_pieces([new.text for new in news])
    encoded = {
        new.key: Piece(new.data, pack_tokens(own)) for new, own in zip(news, ids, strict=True)
    }
    return encoded, time.thread_time() - began
