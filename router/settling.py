"""What engines have yet to announce of answers that have ended.

An engine caches the full blocks of an answer and announces each with its parent, but its events can
come later than the answer's end: they leave in a thread that a busy engine seldom lets run (vLLM 0.32
on two shared cores: 11 ms at the median, 0.3 s at the 90th percentile). A turn that follows its
predecessor at once would then be credited with a block too few. How many blocks an answer fills
follows from its length, so here they are counted as they are announced; whoever wants to be exact may
wait a moment for a turn that isn't settled.

Bounded: the oldest watches are forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from moongate.router.model import BlockHash, Holder, RequestId

WATCHES_MAX = 4096

ANNOUNCED_WITHIN_S = 1.0
"""The latest that an engine's events of an answer come after its end."""


@dataclass(slots=True)
class _Watch:
    """One request's answer, from the last full block of its prompt (the tail) on."""

    holder: Holder
    tail: BlockHash
    prompt_tokens: int
    block_tokens: int
    next_parent: BlockHash  # of the block to be announced next
    announced_blocks: int = 0
    expected_blocks: int | None = None  # not known before the answer has ended
    finished_at: float = 0.0

    @property
    def is_announced(self) -> bool:
        return self.expected_blocks is None or self.announced_blocks >= self.expected_blocks


class Settling:
    """The answers under way and just ended, by request and by tail."""

    def __init__(self) -> None:
        self._watches: OrderedDict[RequestId, _Watch] = OrderedDict()
        self._by_parent: dict[tuple[Holder, BlockHash], RequestId] = {}
        self._by_tail: dict[BlockHash, RequestId] = {}
        self._ended: set[RequestId] = set()  # of these, answers that have ended, not all announced

    def forwarded(
        self,
        request_id: RequestId,
        holder: Holder,
        chain: Sequence[BlockHash],
        prompt_tokens: int,
        block_tokens: int,
    ) -> None:
        """Watch for the blocks that follow the prompt's. A prompt of less than one has no tail."""
        if not chain or block_tokens == 0:
            return
        tail = chain[-1]
        self.drop(request_id)
        watch = _Watch(holder, tail, prompt_tokens, block_tokens, next_parent=tail)
        self._watches[request_id] = watch
        self._by_parent[holder, tail] = request_id
        self._by_tail[tail] = request_id
        if len(self._watches) > WATCHES_MAX:
            self.drop(next(iter(self._watches)))

    def stored(self, holder: Holder, parent: BlockHash, blocks: Sequence[BlockHash]) -> None:
        """Note announced blocks that follow `parent`."""
        request_id = self._by_parent.pop((holder, parent), None)
        if request_id is None or not blocks:
            return
        watch = self._watches[request_id]
        watch.announced_blocks += len(blocks)
        watch.next_parent = blocks[-1]
        if watch.expected_blocks is not None and watch.is_announced:
            self.drop(request_id)
        else:
            self._by_parent[holder, watch.next_parent] = request_id

    def finished(self, request_id: RequestId, completion_tokens: int | None, now: float) -> None:
        """Note the length of the answer; None: not known, so nothing is waited for.

        The last token is sampled and never computed, so it fills nothing.
        """
        watch = self._watches.get(request_id)
        if watch is None:
            return
        if not completion_tokens:
            self.drop(request_id)
            return
        size = watch.block_tokens
        computed_tokens = watch.prompt_tokens + completion_tokens - 1
        watch.expected_blocks = computed_tokens // size - watch.prompt_tokens // size
        watch.finished_at = now
        if watch.is_announced:
            self.drop(request_id)
        else:
            self._ended.add(request_id)

    def has_pending(self) -> bool:
        """Tell whether anything is to be announced at all; mostly not, which saves the look-up."""
        return bool(self._ended)

    def is_settled(self, tail: BlockHash, now: float) -> bool:
        """Tell whether all is announced of the answer to the prompt that ends in this block.

        What has not come in the time in which everything comes is not waited for.
        """
        watch = self._watches.get(self._by_tail.get(tail, RequestId("")))
        if watch is None or watch.is_announced:
            return True
        return now - watch.finished_at >= ANNOUNCED_WITHIN_S

    def drop(self, request_id: RequestId) -> None:
        """Stop watching; without a watch, do nothing."""
        watch = self._watches.pop(request_id, None)
        if watch is None:
            return
        self._ended.discard(request_id)
        if self._by_parent.get((watch.holder, watch.next_parent)) == request_id:
            del self._by_parent[watch.holder, watch.next_parent]
        if self._by_tail.get(watch.tail) == request_id:
            del self._by_tail[watch.tail]

    def __len__(self) -> int:
        return len(self._watches)
