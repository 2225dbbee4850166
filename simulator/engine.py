"""One rank of a simulated engine: continuous batching over a block pool, with time as an argument.

Responsible for which request computes how many tokens in which step, how long the step lasts, what
is sampled and when a request ends. Not for sockets (`server.py`) or for prompts as text. Pure: the
driver passes `now` and calls `step` again when the step it was given is over.

Theory of operation. A request has tokens (prompt, then what was sampled) and a count of computed
ones; each step brings requests nearer to "all computed", and a request that gets there samples one
more token. So prefill, chunked prefill, decode and recomputing after a preemption are one rule.
Running requests are served first, in the order they were admitted; then waiting ones, first come
first served, as long as token budget, places and blocks last. If a running request finds no block,
the last running one is preempted: it loses its blocks and goes to the head of the queue, and no
request is admitted in that step.

State changes when a step is *started*: what it returns holds from `ends_at` on, and the driver must
not tell anybody before. Limits: `max_num_seqs` running; the waiting queue has none, as in vLLM: the
gateway in front is what must bound it.

Source: vLLM 0.32.0 `v1/core/sched/scheduler.py` (policy `fcfs`, no speculation, no connector).
"""

import enum
import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moongate.simulator.blocks import (
    DEFAULT_HASH_SEED,
    NO_NAMESPACE,
    BlockDigest,
    BlockHasher,
    BlockPool,
    CacheNamespace,
    KvEvent,
    TokenSequence,
    hash_block,
    make_root_digest,
)

Sampler = Callable[[bytes, int], int]
"""(seed of the answer, index of the token in the answer) -> token id."""


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """How big and how fast one rank is."""

    blocks: int = 8193
    """Physical KV blocks, the null block included."""
    block_size_tokens: int = 16
    prefill_tokens_per_s: float = 10_000.0
    """Prompt tokens computed per second, whatever the number of requests they belong to."""
    decode_tokens_per_s: float = 100.0
    """Tokens per second of one decoding request. Others decode in the same step at no extra cost:
    decoding is bound by reading the weights once."""
    max_num_seqs: int = 256
    """Running requests at most."""
    max_num_batched_tokens: int = 8192
    """Tokens computed in one step at most."""
    max_model_len_tokens: int = 131_072
    """Prompt and answer together at most."""
    step_overhead_ms: float = 1.0
    """Added to each step: scheduling, launching, sampling."""

    def __post_init__(self) -> None:
        """Raises ValueError for a profile that no engine could start with."""
        _require_positive(self)
        if self.step_overhead_ms < 0:
            raise ValueError(f"step_overhead_ms must not be negative, got {self.step_overhead_ms}")
        if self.max_model_len_tokens > self.capacity_tokens:
            raise ValueError(
                f"{self.blocks} blocks of {self.block_size_tokens} tokens (one is the null block) "
                f"hold {self.capacity_tokens} tokens, fewer than the longest request, "
                f"max_model_len_tokens = {self.max_model_len_tokens}"
            )

    @property
    def capacity_tokens(self) -> int:
        return (self.blocks - 1) * self.block_size_tokens


def _require_positive(profile: EngineProfile) -> None:
    for name in (
        "blocks",
        "block_size_tokens",
        "prefill_tokens_per_s",
        "decode_tokens_per_s",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_model_len_tokens",
    ):
        if not getattr(profile, name) > 0:
            raise ValueError(f"{name} must be more than 0, got {getattr(profile, name)}")


class FinishReason(enum.Enum):
    LENGTH = "length"
    """`max_tokens` were sampled, or the model's length is reached."""
    STOP = "stop"
    """The answer ended by itself."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to generate."""

    request_id: str
    prompt_token_ids: Sequence[int]
    max_tokens: int
    """Sampled tokens at most."""
    stop_after_tokens: int | None = None
    """The answer ends by itself after this many tokens; None: it never does."""
    choice: int = 0
    """Tells the answers to one prompt apart when several are asked for."""
    namespace: CacheNamespace = NO_NAMESPACE
    session_id: str | None = None


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One sampled token."""

    request_id: str
    token_id: int
    cached_tokens: int
    """Prompt tokens that were reused when the request was first admitted."""
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step does; it counts from `ends_at` on."""

    ends_at: float
    outputs: tuple[TokenOutput, ...]
    events: tuple[KvEvent, ...]
    """To be published before the outputs are sent."""
    prefill_tokens: int
    decode_tokens: int


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Gauges now, and counters since the start."""

    running_requests: int
    waiting_requests: int
    kv_cache_usage: float
    """0.0 to 1.0"""
    prefix_queries_tokens: int
    """Tokens of the requests admitted so far, preempted ones counted once."""
    prefix_hits_tokens: int
    """Those of them that were reused."""
    prompt_tokens: int
    """Prompt tokens of requests that sampled their first token."""
    generation_tokens: int
    preemptions: int
    finished_requests: Mapping[str, int]
    """By finish reason, `abort` included."""


def make_sampler(vocabulary: Sequence[int]) -> Sampler:
    """Return a sampler that draws from `vocabulary`, always the same for the same seed and index.

    *Why* not a stateful generator: a token must not depend on what else runs in the same step.
    """
    assert vocabulary, "nothing to sample from"

    def sample(seed: bytes, index: int) -> int:
        draw = hashlib.blake2b(seed + index.to_bytes(8, "big"), digest_size=8).digest()
        return vocabulary[int.from_bytes(draw, "big") % len(vocabulary)]

    return sample


class _Generation:
    """A submitted request and how far it is."""

    __slots__ = ("cached_tokens", "computed_tokens", "output_tokens", "request", "seed", "tokens")

    def __init__(self, request: EngineRequest, tokens: TokenSequence, seed: bytes) -> None:
        self.request = request
        self.tokens = tokens
        self.seed = seed
        self.computed_tokens = 0
        self.output_tokens = 0
        self.cached_tokens: int | None = None  # unknown until first admitted

    @property
    def uncomputed_tokens(self) -> int:
        return len(self.tokens) - self.computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Only the token sampled last is uncomputed: neither prompt nor recomputing."""
        return self.output_tokens > 0 and self.uncomputed_tokens == 1


class _Batch:
    """Who computes how many tokens in the step being put together."""

    __slots__ = ("budget_tokens", "decode_tokens", "has_preempted", "prefill_tokens", "work")

    def __init__(self, budget_tokens: int) -> None:
        self.budget_tokens = budget_tokens
        self.work: list[tuple[_Generation, int]] = []
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.has_preempted = False

    def add(self, generation: _Generation, tokens: int) -> None:
        self.work.append((generation, tokens))
        self.budget_tokens -= tokens
        if generation.is_decoding:
            self.decode_tokens += tokens
        else:
            self.prefill_tokens += tokens


@dataclass(slots=True)
class _Counters:
    """What `EngineStatistics` reports as counters, in the making."""

    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0


def _answer_seed(request: EngineRequest, tokens: TokenSequence, root: BlockDigest) -> bytes:
    """Return what decides the answer: the whole prompt, its namespace, and which choice it is."""
    full_blocks = len(tokens.digests)
    last_digest = tokens.digests[-1] if full_blocks else root
    rest = tokens.tokens_of_blocks(full_blocks, full_blocks + 1)
    return hashlib.blake2b(
        last_digest + repr((request.choice, rest)).encode(), digest_size=16
    ).digest()


class EngineModel:
    """The scheduler and cache of one rank. Cost of a step: O(requests in it + blocks touched)."""

    def __init__(
        self,
        profile: EngineProfile,
        *,
        sample_token: Sampler | None = None,
        hash_seed: str = DEFAULT_HASH_SEED,
        hasher: BlockHasher = hash_block,
    ) -> None:
        self.profile = profile
        self.pool = BlockPool(profile.blocks, profile.block_size_tokens)
        self._sample_token = sample_token or make_sampler(range(256))
        self._root = make_root_digest(hash_seed)
        self._hasher = hasher
        self._generations: dict[str, _Generation] = {}
        self._running: list[_Generation] = []
        self._waiting: deque[_Generation] = deque()
        self._counters = _Counters()
        self._finished = {"length": 0, "stop": 0, "abort": 0}
        self._now = float("-inf")
        self._busy_until = float("-inf")

    # -- what can happen to it ----------------------------------------------------------------

    def submit(self, request: EngineRequest, now: float) -> None:
        """Queue `request`. Its id must be new, and prompt plus one token must fit the model."""
        self._advance(now)
        assert request.request_id not in self._generations, request.request_id
        assert 0 < len(request.prompt_token_ids) < self.profile.max_model_len_tokens, request
        assert request.max_tokens > 0, request
        tokens = TokenSequence(
            request.prompt_token_ids,
            block_size_tokens=self.profile.block_size_tokens,
            root=self._root,
            namespace=request.namespace,
            session_id=request.session_id,
            hasher=self._hasher,
        )
        generation = _Generation(request, tokens, _answer_seed(request, tokens, self._root))
        self._generations[request.request_id] = generation
        self._waiting.append(generation)

    def cancel(self, request_id: str, now: float) -> bool:
        """Forget the request and free its blocks; False if it is unknown or has ended."""
        self._advance(now)
        generation = self._generations.get(request_id)
        if generation is None:
            return False
        if generation in self._running:
            self._running.remove(generation)
        else:
            self._waiting.remove(generation)
        self._end(generation, "abort")
        return True

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block; refused (False) while a request holds one."""
        return self.pool.reset()

    def step(self, now: float) -> StepResult | None:
        """Start one step, not before the last one is over; None when nothing is to be computed.

        An idle engine keeps the events of a reset back until its next step, as vLLM does.
        """
        self._advance(now)
        assert now >= self._busy_until, (now, self._busy_until)
        batch = _Batch(self.profile.max_num_batched_tokens)
        self._schedule_running(batch)
        if not batch.has_preempted:
            self._schedule_waiting(batch)
        if not batch.work:
            return None
        self._busy_until = now + self._duration_s(batch)
        outputs = [self._compute(generation, tokens) for generation, tokens in batch.work]
        return StepResult(
            ends_at=self._busy_until,
            outputs=tuple(output for output in outputs if output is not None),
            events=self.pool.take_events(),
            prefill_tokens=batch.prefill_tokens,
            decode_tokens=batch.decode_tokens,
        )

    # -- what it shows ------------------------------------------------------------------------

    def statistics(self) -> EngineStatistics:
        counters = self._counters
        return EngineStatistics(
            running_requests=len(self._running),
            waiting_requests=len(self._waiting),
            kv_cache_usage=self.pool.usage,
            prefix_queries_tokens=counters.prefix_queries_tokens,
            prefix_hits_tokens=counters.prefix_hits_tokens,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            preemptions=counters.preemptions,
            finished_requests=dict(self._finished),
        )

    # -- scheduling ---------------------------------------------------------------------------

    def _schedule_running(self, batch: _Batch) -> None:
        index = 0
        while index < len(self._running) and batch.budget_tokens > 0:
            generation = self._running[index]
            tokens = min(generation.uncomputed_tokens, batch.budget_tokens)
            if not self._make_room(generation, tokens, batch):
                break
            batch.add(generation, tokens)
            index += 1

    def _make_room(self, generation: _Generation, tokens: int, batch: _Batch) -> bool:
        """Allocate, preempting from the end of the running requests; False if it was itself."""
        while not self.pool.allocate_slots(generation.tokens, generation.computed_tokens + tokens):
            victim = self._running.pop()
            self._preempt(victim)
            batch.has_preempted = True
            if victim is generation:
                return False
        return True

    def _preempt(self, victim: _Generation) -> None:
        self.pool.free(victim.tokens)
        victim.computed_tokens = 0
        self._waiting.appendleft(victim)
        self._counters.preemptions += 1

    def _schedule_waiting(self, batch: _Batch) -> None:
        while (
            self._waiting
            and batch.budget_tokens > 0
            and len(self._running) < self.profile.max_num_seqs
            and self._admit(self._waiting[0], batch)
        ):
            self._running.append(self._waiting.popleft())

    def _admit(self, generation: _Generation, batch: _Batch) -> bool:
        """Reuse what is cached and allocate the first chunk; False, and no change, if full.

        All its tokens must fit, not only the first chunk: otherwise several long prompts would be
        admitted together and then preempt each other (`scheduler_reserve_full_isl`).
        """
        tokens = generation.tokens
        reused = self.pool.find_cached_prefix(tokens)
        reused_tokens = len(reused) * self.profile.block_size_tokens
        chunk_tokens = min(len(tokens) - reused_tokens, batch.budget_tokens)
        if not self.pool.has_room(tokens, len(tokens), reused):
            return False
        has_slots = self.pool.allocate_slots(tokens, reused_tokens + chunk_tokens, reused)
        assert has_slots, "room for all tokens is room for the first ones"
        generation.computed_tokens = reused_tokens
        if generation.cached_tokens is None:
            generation.cached_tokens = reused_tokens
            self._counters.prefix_queries_tokens += len(tokens)
            self._counters.prefix_hits_tokens += reused_tokens
        batch.add(generation, chunk_tokens)
        return True

    def _duration_s(self, batch: _Batch) -> float:
        duration_s = self.profile.step_overhead_ms / 1000
        duration_s += batch.prefill_tokens / self.profile.prefill_tokens_per_s
        if batch.decode_tokens:
            duration_s += 1 / self.profile.decode_tokens_per_s
        return duration_s

    # -- computing ----------------------------------------------------------------------------

    def _compute(self, generation: _Generation, tokens: int) -> TokenOutput | None:
        """Count `tokens` as computed; sample one if that was all of them."""
        generation.computed_tokens += tokens
        if generation.uncomputed_tokens:
            return None
        assert generation.cached_tokens is not None, "admitted before it computes"
        if not generation.output_tokens:
            self._counters.prompt_tokens += len(generation.tokens)
        token_id = self._sample_token(generation.seed, generation.output_tokens)
        generation.tokens.append(token_id)
        generation.output_tokens += 1
        self._counters.generation_tokens += 1
        finish_reason = self._finish_reason(generation)
        if finish_reason is not None:
            self._running.remove(generation)
            self._end(generation, finish_reason.value)
        return TokenOutput(
            generation.request.request_id, token_id, generation.cached_tokens, finish_reason
        )

    def _finish_reason(self, generation: _Generation) -> FinishReason | None:
        request = generation.request
        if generation.output_tokens == request.stop_after_tokens:
            return FinishReason.STOP
        if generation.output_tokens == request.max_tokens:
            return FinishReason.LENGTH
        if len(generation.tokens) == self.profile.max_model_len_tokens:
            return FinishReason.LENGTH
        return None

    def _end(self, generation: _Generation, reason: str) -> None:
        self.pool.free(generation.tokens)
        del self._generations[generation.request.request_id]
        self._finished[reason] += 1

    def _advance(self, now: float) -> None:
        assert now >= self._now, ("time runs forward", now, self._now)
        self._now = now
