"""A cache of blocks that counts them in runs, with vLLM's order of reuse and eviction.

Responsible for what is cached of each branch, who holds how much of it, and what is evicted when room is
needed. Not for who asks (`batching.py`), nor for content (`content.py`). Pure.

Theory of operation. Whoever computes a prompt *holds* a length of a branch. What nobody holds stays cached,
in a queue of *runs*: when a hold ends, what it held alone joins the queue's end as one run, the leaf's part
before its parents'. Room is made from the queue's front, and a run loses its last blocks first. That is the
order of vLLM's free queue (a request's blocks are freed in reverse, evicted from the front, and leave the queue
when they are touched), so what is cached of a branch is always its beginning: one number. A hold on a branch
holds its parent up to the fork.

Two requests that compute the same blocks at once each have a copy. The second is counted as `copies` of its
hold, and cannot be found; when the hold ends it is a run that only takes room.

Invariants: `used` = held + queued + copies + unfinished blocks <= `capacity`; of a branch the blocks from its fork to
`cached` are held or in its runs; runs of a branch lie behind each other, the lowest youngest; whatever is
cached of a branch, its parent is cached up to the fork.

Source: vLLM 0.32.0 `v1/core/block_pool.py`, `v1/core/single_type_kv_cache_manager.py` (as `blocks.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from moongate.simulator.content import Branch

Removed = Callable[[Branch, int, int], object]
"""Told of evicted blocks: from the second position, before the third."""


class _Run:
    """Blocks in the queue: of a line, or (None) copies that nobody can find."""

    __slots__ = ("first", "last", "line")

    def __init__(self, line: _Line | None, first: int, last: int) -> None:
        self.line = line
        self.first = first
        self.last = last


class _Line:
    """What is cached of one branch. Ends are positions from the content's beginning."""

    __slots__ = ("branch", "cached", "held", "holders", "runs")

    def __init__(self, branch: Branch) -> None:
        self.branch = branch
        self.cached = branch.fork
        self.held = branch.fork
        self.holders: dict[int, int] = {}  # length -> how many hold it
        self.runs: list[_Run] = []  # the highest, and oldest, first


class Hold:
    """What one request has: leading blocks that can be found, and others."""

    __slots__ = ("blocks", "branch", "copies", "length")

    def __init__(self, branch: Branch) -> None:
        self.branch = branch
        self.length = 0  # leading blocks of the branch that are full and cached
        self.blocks = 0  # physical ones, those not full yet included
        self.copies = 0  # of these, second copies


class RunCache:
    """The blocks of one engine, or of a pool. Cost of a call: O(branches and runs that it concerns)."""

    def __init__(self, capacity: int, removed: Removed | None = None) -> None:
        self.capacity = capacity
        self.used = 0
        self._queued = 0
        self._lines: dict[Branch, _Line] = {}
        self._queue: OrderedDict[_Run, None] = OrderedDict()
        self._removed = removed

    @property
    def free(self) -> int:
        """Return the blocks that can be had: those never used, and those that nobody holds."""
        return self.capacity - self.used + self._queued

    def find(self, branch: Branch, limit: int) -> int:
        """Return how many of the first `limit` blocks are cached."""
        node: Branch | None = branch
        while node is not None:
            if limit > node.fork:
                line = self._lines.get(node)
                if line is not None and line.cached > node.fork:
                    return min(line.cached, limit)
            limit = min(limit, node.fork)
            node = node.parent
        return 0

    def missing(self, branch: Branch, reused: int, blocks: int) -> int:
        """Return how many free blocks it takes to hold `blocks`, the first `reused` of which are cached."""
        return blocks - self._held(branch, reused)

    def _held(self, branch: Branch, limit: int) -> int:
        node: Branch | None = branch
        while node is not None:
            if limit > node.fork:
                line = self._lines.get(node)
                if line is not None and line.held > node.fork:
                    return min(line.held, limit)
            limit = min(limit, node.fork)
            node = node.parent
        return 0

    # --- holding ----------------------------------------------------------------------------------

    def hold(self, branch: Branch, reused: int) -> Hold:
        """Begin a hold on the first `reused` blocks, which are cached."""
        hold = Hold(branch)
        if reused:
            self._add(branch.owner(reused), reused)
        hold.length = hold.blocks = reused
        return hold

    def allocate(self, hold: Hold, blocks: int) -> bool:
        """Give the hold room for its first `blocks` blocks; change nothing and say False if full."""
        fresh = blocks - hold.blocks
        if fresh <= 0:
            return True
        if fresh > self.free:
            return False
        self._evict(self.used + fresh - self.capacity)
        self.used += fresh
        hold.blocks = blocks
        return True

    def fill(self, hold: Hold, length: int) -> int:
        """Note that the first `length` blocks are full. Return from where on they are newly cached."""
        if length <= hold.length:
            return length
        assert length <= hold.blocks, (length, hold.blocks)
        known = max(self.find(hold.branch, length), hold.length)
        hold.copies += known - hold.length
        self._move(hold, length)
        return known

    def _move(self, hold: Hold, length: int) -> None:
        before, branch = hold.length, hold.branch
        self._add(branch.owner(length), length)
        if before:
            self._drop(branch.owner(before), before)
        hold.length = length

    def release(self, hold: Hold) -> None:
        """End the hold: what is full stays cached until its room is needed."""
        self.used -= hold.blocks - hold.length  # not full: of use to nobody
        if hold.copies:
            self._queue[_Run(None, 0, hold.copies)] = None
            self._queued += hold.copies
        if hold.length:
            self._drop(hold.branch.owner(hold.length), hold.length)
        hold.length = hold.blocks = hold.copies = 0

    def touch(self, branch: Branch, length: int) -> None:
        """Make blocks that are cached the last to be evicted."""
        if length:
            owner = branch.owner(length)
            self._add(owner, length)
            self._drop(owner, length)

    def put(self, branch: Branch, length: int) -> int:
        """Cache the first `length` blocks for nobody. Return from where on they are new.

        What doesn't fit at the end is left out.
        """
        known = self.find(branch, length)
        hold = self.hold(branch, known)
        room = min(length - known, self.free)
        self.allocate(hold, known + room)
        self.fill(hold, known + room)
        self.release(hold)
        return known

    def clear(self) -> None:
        """Forget everything, whoever holds it: holds made before are void."""
        self.used = self._queued = 0
        self._lines.clear()
        self._queue.clear()

    # --- lines ------------------------------------------------------------------------------------

    def _add(self, branch: Branch, length: int) -> None:
        """Let one more hold `length` blocks, that end on the branch."""
        line = self._lines.get(branch)
        if line is None:
            line = self._lines[branch] = _Line(branch)
        if not line.holders and branch.parent is not None:
            self._add(branch.parent, branch.fork)
        line.holders[length] = line.holders.get(length, 0) + 1
        if length > line.held:
            self._take_from_queue(line, length)
            line.held = length
            line.cached = max(line.cached, length)

    def _take_from_queue(self, line: _Line, end: int) -> None:
        runs = line.runs
        while runs and runs[-1].first < end:
            run = runs[-1]
            if run.last > end:
                self._queued -= end - run.first
                run.first = end
                return
            self._queued -= run.last - run.first
            runs.pop()
            del self._queue[run]

    def _drop(self, branch: Branch, length: int) -> None:
        line = self._lines[branch]
        line.holders[length] -= 1
        if not line.holders[length]:
            del line.holders[length]
            held = max(line.holders, default=branch.fork)
            if held < line.held:
                run = _Run(line, held, line.held)
                line.runs.append(run)
                self._queue[run] = None
                self._queued += line.held - held
                line.held = held
        if not line.holders:
            if line.cached == branch.fork:
                del self._lines[branch]
            if branch.parent is not None:
                self._drop(branch.parent, branch.fork)

    def _evict(self, count: int) -> None:
        """Make so much room at the front of the queue, if it is more than nothing."""
        while count > 0:
            run = next(iter(self._queue))
            taken = min(count, run.last - run.first)
            run.last -= taken
            self._queued -= taken
            self.used -= taken
            count -= taken
            if run.line is not None:
                self._shorten(run.line, run, taken)
            if run.first == run.last:
                del self._queue[run]

    def _shorten(self, line: _Line, run: _Run, taken: int) -> None:
        line.cached = run.last
        if self._removed is not None:
            self._removed(line.branch, run.last, run.last + taken)
        if run.first == run.last:
            oldest = line.runs.pop(0)
            assert oldest is run, "a branch loses its end first"
            if line.cached == line.branch.fork and not line.holders:
                del self._lines[line.branch]
