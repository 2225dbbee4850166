"""One engine in virtual time, coarse where nothing happens: the scheduler of `engine.py` in jumps.

Responsible for who computes how much in which step, how long that takes, and what is cached and evicted by
it. Not for whom requests come from or where KV comes from (`virtual_fleet.py`), nor for blocks (`run_cache.py`).
Pure: the driver passes `now`, and calls `begin` again when the stretch that it was given has ended.

Theory of operation. As in `engine.py`: running requests first, in the order of their admission; then those
whose KV has come; then waiting ones, first come first served, while token budget, places and blocks last. What
`begin` returns is a *stretch*: one step, or, where all that run decode and nobody can be let in, as many steps
as it takes until the first answer ends. What a stretch does is done by `end`. A stretch of several steps can be
cut: `cut` says when the step that is under way will be over.

Limits: `sequences_max` running; the waiting queue has none, as in vLLM.

Source: vLLM 0.32.0 `v1/core/sched/scheduler.py` (policy `fcfs`, no speculation).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from moongate.simulator.content import Branch
from moongate.simulator.run_cache import Hold, RunCache
from moongate.simulator.step_timing import StepTiming, Work


@dataclass(frozen=True, slots=True)
class EngineShape:
    """How big and how fast one engine is."""

    blocks: int  # that can be used
    block_tokens: int
    timing: StepTiming
    sequences_max: int = 256  # running requests
    batch_tokens_max: int = 8192  # computed in one step


class Job:
    """One sequence to compute: a prompt, and the answer's tokens."""

    __slots__ = (
        "answer_tokens",
        "branch",
        "cached_tokens",
        "computed",
        "external_tokens",
        "has_received",
        "hold",
        "id",
        "is_held",
        "prefill_end",
        "prompt_tokens",
        "receives",
        "sampled",
    )

    def __init__(
        self,
        id: str,  # noqa: A002 - the request's own word
        branch: Branch,
        prompt_tokens: int,
        answer_tokens: int,
        *,
        receives: bool = False,
        is_held: bool = False,
    ) -> None:
        """`branch`: the prompt and what the answer adds to it.

        `receives`: its prompt's KV comes from another engine. `is_held`: that one's; it keeps its blocks after
        its end until `Batcher.free`.
        """
        assert prompt_tokens > 0, id
        assert answer_tokens > 0, id
        self.id = id
        self.branch = branch
        self.prompt_tokens = prompt_tokens
        self.answer_tokens = answer_tokens
        self.receives = receives
        self.is_held = is_held
        self.has_received = False
        self.computed = 0
        self.sampled = 0
        self.prefill_end = 0  # tokens that it had when it was last admitted
        self.cached_tokens = -1  # reused or fetched when first admitted; -1: not yet
        self.external_tokens = 0  # of these
        self.hold: Hold | None = None

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.sampled

    @property
    def is_decoding(self) -> bool:
        return self.sampled > 0 and self.tokens - self.computed == 1


@dataclass(slots=True)
class Stretch:
    """What runs from one decision of the scheduler to the next."""

    began_at: float
    ends_at: float
    steps: int
    work: Work
    chunks: list[tuple[Job, int]]  # tokens of each in a step


class Change(NamedTuple):
    """Blocks that are newly cached, or that were evicted: from `first`, before `last`, of their owner."""

    is_stored: bool
    branch: Branch
    first: int
    last: int


@dataclass(slots=True)
class Ended:
    """What a stretch brought."""

    begun: list[Job]  # their first tokens came
    finished: list[Job]
    changes: list[Change]  # of what can be found in the cache
    computed: list[tuple[Job, int]]  # prompts, and how many of their leading blocks are computed


FindExternal = Callable[[Job, int, int], int]
"""(job, first block, last) -> up to where blocks from the first can be had elsewhere."""


def nothing_external(job: Job, first: int, last: int) -> int:
    """Return that there is no place to get blocks from."""
    return first


class Batcher:
    """The scheduler and cache of one engine. Cost of a stretch: O(requests in it)."""

    def __init__(self, shape: EngineShape, find_external: FindExternal = nothing_external) -> None:
        self.shape = shape
        self.slowness = 1.0
        self.preemptions = 0
        self.busy_s = 0.0
        self.running: list[Job] = []
        self.waiting: deque[Job] = deque()
        self.parked: dict[str, Job] = {}
        self._loaded: deque[Job] = deque()
        self._find_external = find_external
        self._changes: list[Change] = []
        self.cache = RunCache(
            shape.blocks, lambda *part: self._changes.append(Change(False, *part))
        )
        self.parking: list[Job] = []
        """Jobs that were parked by the last `begin`: their KV is to be asked for. The driver empties it."""

    # --- what can happen --------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        self.waiting.append(job)

    def arrived(self, job_id: str) -> None:
        """The KV of a parked job is here."""
        job = self.parked.pop(job_id)
        assert job.hold is not None
        self._fill(job, job.computed)
        if job.computed == job.tokens:
            job.computed -= 1  # the last one is computed to sample from it
        self._loaded.append(job)

    def cancel(self, job: Job) -> None:
        """Forget an unfinished job. Nothing of it may be under way: cut the stretch first."""
        for queue in (self.running, self._loaded, self.waiting):
            if job in queue:
                queue.remove(job)
        self.parked.pop(job.id, None)
        self.free(job)

    def free(self, job: Job) -> None:
        """Let go of what a finished prefill holds."""
        if job.hold is not None:
            self.cache.release(job.hold)
            job.hold = None

    def crash(self) -> list[Job]:
        """Lose the cache and all jobs; return these."""
        lost = [*self.running, *self._loaded, *self.waiting, *self.parked.values()]
        self.running.clear()
        self._loaded.clear()
        self.waiting.clear()
        self.parked.clear()
        self.parking.clear()
        self._changes.clear()
        self.cache.clear()
        for job in lost:
            job.hold = None
        return lost

    # --- stretches --------------------------------------------------------------------------------

    def begin(self, now: float) -> Stretch | None:
        """Decide what runs next. None: there is nothing to compute now."""
        chunks: list[tuple[Job, int]] = []
        budget, has_preempted = self._schedule_running(chunks)
        if has_preempted and not chunks:
            budget, _ = self._schedule_running(chunks)
            has_preempted = False
        count = len(chunks)
        if not has_preempted:
            self._schedule_waiting(chunks, budget)
        if not chunks:
            return None
        work = self._work(chunks)
        steps = 1
        if len(chunks) == count and not has_preempted and work.prefill_tokens == 0:
            steps = self._steps_alone(chunks)
        timing = self.shape.timing
        ends_at = now + timing.decode_s(steps, work, self.slowness)
        return Stretch(now, ends_at, steps, work, chunks)

    def cut(self, stretch: Stretch, now: float) -> bool:
        """Let a stretch end with the step that is under way. Return whether that changes its end."""
        if stretch.steps == 1:
            return False
        timing, elapsed_s = self.shape.timing, now - stretch.began_at
        steps = timing.steps_begun(elapsed_s, stretch.steps, stretch.work, self.slowness)
        if steps == stretch.steps:
            return False
        stretch.steps = steps
        duration_s = timing.decode_s(steps, stretch.work, self.slowness)
        stretch.ends_at = max(stretch.began_at + duration_s, now)
        return True

    def end(self, stretch: Stretch) -> Ended:
        """Do what the stretch has done by its end."""
        self.busy_s += stretch.ends_at - stretch.began_at
        ended = Ended([], [], [], [])
        for job, tokens in stretch.chunks:
            if job.hold is not None:  # else it was cancelled
                self._advance(job, tokens, stretch.steps - 1, ended)
        # Only now: what one leaves in its last step the others can't have had in an earlier one.
        for job in ended.finished:
            self.running.remove(job)
            if not job.is_held:
                self.free(job)
        ended.changes[:] = self._changes
        self._changes.clear()
        return ended

    # --- parts ------------------------------------------------------------------------------------

    def _advance(self, job: Job, tokens: int, further_steps: int, ended: Ended) -> None:
        """Count what a job has computed, and sample; `further_steps` only decode."""
        begun_at = job.computed
        job.computed += tokens
        if begun_at < job.prefill_end:
            last = min(job.computed, job.prefill_end) // self.shape.block_tokens
            ended.computed.append((job, last))
        if job.computed < job.tokens:
            return
        if job.sampled == 0:
            ended.begun.append(job)
        job.sampled += 1 + further_steps
        if further_steps:
            job.computed += further_steps
            has_room = self._grow(job, job.computed)
            assert has_room, "a stretch is no longer than there is room for"
        if job.sampled == job.answer_tokens:
            ended.finished.append(job)

    def _work(self, chunks: list[tuple[Job, int]]) -> Work:
        prefill_tokens = sequences = decode_contexts = 0
        prefill_contexts = 0.0
        for job, tokens in chunks:
            if job.is_decoding:
                sequences += 1
                decode_contexts += job.computed
            else:
                prefill_tokens += tokens
                prefill_contexts += tokens * (job.computed + tokens / 2)
        return Work(prefill_tokens, prefill_contexts, sequences, decode_contexts)

    def _steps_alone(self, chunks: list[tuple[Job, int]]) -> int:
        """Return how many steps these can decode until one has ended, or room could be short."""
        steps = min(job.answer_tokens - job.sampled for job, _ in chunks)
        size = self.shape.block_tokens
        room = self.cache.free
        if len(chunks) * (steps // size + 1) <= room:
            return steps
        return max(min(steps, (room // len(chunks) - 1) * size), 1)

    def _schedule_running(self, chunks: list[tuple[Job, int]]) -> tuple[int, bool]:
        """Give each running job its chunk. Return what is left of the budget, and if room was short."""
        budget, index, has_preempted = self.shape.batch_tokens_max, 0, False
        while index < len(self.running) and budget > 0:
            job = self.running[index]
            tokens = min(job.tokens - job.computed, budget)
            while not self._grow(job, job.computed + tokens):
                victim = self.running.pop()
                self._preempt(victim)
                has_preempted = True
                if victim is job:
                    return budget, True
            chunks.append((job, tokens))
            budget -= tokens
            index += 1
        return budget, has_preempted

    def _preempt(self, victim: Job) -> None:
        self.free(victim)
        victim.computed = 0
        self.waiting.appendleft(victim)
        self.preemptions += 1

    def _schedule_waiting(self, chunks: list[tuple[Job, int]], budget: int) -> None:
        places = self.shape.sequences_max
        while budget > 0 and len(self.running) < places:
            if self._loaded:
                budget -= self._run(self._loaded.popleft(), chunks, budget)
            elif self.waiting and self._admit(self.waiting[0]):
                job = self.waiting.popleft()
                if job.id not in self.parked:
                    budget -= self._run(job, chunks, budget)
            else:
                return

    def _run(self, job: Job, chunks: list[tuple[Job, int]], budget: int) -> int:
        tokens = min(job.tokens - job.computed, budget)
        has_room = self._grow(job, job.computed + tokens)
        assert has_room, "room for all tokens is room for the first ones"
        chunks.append((job, tokens))
        self.running.append(job)
        return tokens

    def _admit(self, job: Job) -> bool:
        """Reuse what is cached, and run or park the job; False if there is no room for all of it."""
        size, tokens = self.shape.block_tokens, job.tokens
        reused = self.cache.find(job.branch, (tokens - 1) // size)
        blocks = -(-tokens // size)
        if self.cache.missing(job.branch, reused, blocks) > self.cache.free:
            return False
        job.hold = self.cache.hold(job.branch, reused)
        job.computed = reused * size
        external = self._external_tokens(job, reused)
        if job.cached_tokens < 0:
            job.cached_tokens, job.external_tokens = job.computed + external, external
        job.prefill_end = tokens
        if external:
            has_room = self.cache.allocate(job.hold, blocks)
            assert has_room, "there was room for all"
            job.computed += external
            self.parked[job.id] = job
            self.parking.append(job)
        return True

    def _external_tokens(self, job: Job, reused: int) -> int:
        size = self.shape.block_tokens
        if job.receives and not job.has_received:
            job.has_received = True
            return job.tokens - reused * size
        return (self._find_external(job, reused, (job.tokens - 1) // size) - reused) * size

    def _grow(self, job: Job, tokens: int) -> bool:
        """Make room for the first tokens, and enter what they fill in the cache; False if it is full."""
        assert job.hold is not None
        if not self.cache.allocate(job.hold, -(-tokens // self.shape.block_tokens)):
            return False
        self._fill(job, tokens)
        return True

    def _fill(self, job: Job, tokens: int) -> None:
        assert job.hold is not None
        length = tokens // self.shape.block_tokens
        first = self.cache.fill(job.hold, length)
        if first < length:
            self._changes += (Change(True, *p) for p in job.branch.parts(first, length))
