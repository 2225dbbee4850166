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

A request part of whose KV is elsewhere, in a shared pool or at a prefill engine, gets its blocks and is
*parked* until it is here (`loading.py`); the steps of others go on. Then it is *loaded*, and the next
to run. A prefill that was made for a decoder keeps its blocks after its end: they are *held* until
`release`.

State changes when a step is *started*: what it returns holds from `ends_at` on, and the driver must
not tell anybody before, but for `receives`, which it starts at once. What happens by itself between
steps, happens in the first step from `wakes_at()` on. Limits: `max_num_seqs` running; the waiting
queue has none, as in vLLM: the gateway in front is what must bound it.

Source: vLLM 0.32.0 `v1/core/sched/scheduler.py` (policy `fcfs`, no speculation).
"""

import enum
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
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
from moongate.simulator.loading import Link, LoadingArea
from moongate.simulator.pooling import SharedPool
from moongate.simulator.statistics import Counters, EngineStatistics, PrefillOrigin
from moongate.simulator.transfer import Handoff, NixlSource, Receive, Send

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
    kv_bytes_per_token: int = 131_072
    """KV of one token, all layers together: a model of 8 G parameters has this much."""
    kv_link_bytes_per_s: float = 10e9
    """How fast KV comes from a pool or from a prefill engine."""

    @property
    def block_bytes(self) -> int:
        return self.kv_bytes_per_token * self.block_size_tokens

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
        "kv_bytes_per_token",
        "kv_link_bytes_per_s",
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
    answer_token_ids: Sequence[int] = ()
    """What is sampled, as far as it goes; empty: what the model's sampler draws."""
    choice: int = 0
    """Tells the answers to one prompt apart when several are asked for."""
    namespace: CacheNamespace = NO_NAMESPACE
    session_id: str | None = None
    handoff: Handoff | None = None
    """Of a request whose prefill and decode are done by two engines."""


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One sampled token."""

    request_id: str
    token_id: int
    cached_tokens: int
    """Prompt tokens that were reused, or came from elsewhere, when the request was first admitted."""
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
    receives: tuple[EngineRequest, ...] = ()
    """Requests whose KV is to be asked for now, not at `ends_at`; each ends in `kv_arriving` or
    `kv_failed`."""


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

    __slots__ = (
        "computed_tokens",
        "has_received",
        "origin",
        "output_tokens",
        "prefill_end_tokens",
        "request",
        "seed",
        "stored_blocks",
        "tokens",
    )

    def __init__(self, request: EngineRequest, tokens: TokenSequence, seed: bytes) -> None:
        self.request = request
        self.tokens = tokens
        self.seed = seed
        self.computed_tokens = 0
        self.output_tokens = 0
        self.origin: PrefillOrigin | None = None  # unknown until first admitted
        self.has_received = False  # a prompt is asked for once, whatever comes of it
        self.prefill_end_tokens = 0  # of the tokens as they were when last admitted
        self.stored_blocks = 0  # leading blocks that were given to the pool since then

    @property
    def uncomputed_tokens(self) -> int:
        return len(self.tokens) - self.computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Only the token sampled last is uncomputed: neither prompt nor recomputing."""
        return self.output_tokens > 0 and self.uncomputed_tokens == 1


class _Batch:
    """Who computes how many tokens in the step being put together."""

    __slots__ = (
        "budget_tokens",
        "decode_tokens",
        "has_preempted",
        "now",
        "prefill_tokens",
        "receives",
        "work",
    )

    def __init__(self, budget_tokens: int, now: float) -> None:
        self.budget_tokens = budget_tokens
        self.now = now
        self.receives: list[EngineRequest] = []
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
        shared_pool: SharedPool | None = None,
        has_connector: bool = False,
        recomputes_failed_loads: bool = False,
    ) -> None:
        """`has_connector`: KV may come from elsewhere, if only by a hand-off.

        `recomputes_failed_loads`: what else than to end a request with an error if its KV does not
        come (`kv_load_failure_policy`).
        """
        self.profile = profile
        self.pool = BlockPool(profile.blocks, profile.block_size_tokens)
        self._sample_token = sample_token or make_sampler(range(256))
        self._root = make_root_digest(hash_seed)
        self._hasher = hasher
        self._generations: dict[str, _Generation] = {}
        self._running: list[_Generation] = []
        self._waiting: deque[_Generation] = deque()
        self._parked: dict[str, _Generation] = {}
        self._loaded: deque[_Generation] = deque()
        self._held: dict[str, TokenSequence] = {}
        self._loading = LoadingArea()
        self._link = Link(profile.kv_link_bytes_per_s)
        self._shared_pool = shared_pool
        self._has_connector = has_connector or shared_pool is not None
        self._recomputes_failed_loads = recomputes_failed_loads
        self._pool_events: list[KvEvent] = []
        self._counters = Counters()
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
        if request_id in self._parked:
            self._loading.abandon(request_id)
            self._forget(generation, "abort")
            return True
        for queue in (self._running, self._loaded, self._waiting):
            if generation in queue:
                queue.remove(generation)
        self.pool.free(generation.tokens)
        self._forget(generation, "abort")
        return True

    def is_loading(self, request_id: str) -> bool:
        """Return whether it is parked, or was when it was cancelled."""
        return request_id in self._parked

    def kv_arriving(self, request_id: str, now: float) -> None:
        """The prefill engine begins to send the prompt's KV of a request that is in `receives`."""
        self._advance(now)
        tokens = self._parked[request_id].tokens
        lacking_blocks = len(tokens.block_ids) - tokens.cached_blocks
        arrives_at = self._link.carry(lacking_blocks * self.profile.block_bytes, now)
        self._loading.set_arrival(request_id, arrives_at)

    def kv_failed(self, request_id: str, now: float) -> bool:
        """The prompt's KV will not come. Return whether that ended the request with an error."""
        self._advance(now)
        generation = self._parked.pop(request_id)
        is_wanted = self._loading.remove(request_id)
        self.pool.free(generation.tokens)
        if not is_wanted:
            return False
        if self._recomputes_failed_loads:
            generation.computed_tokens = 0
            self._waiting.appendleft(generation)
            return False
        self._forget(generation, "error")
        return True

    def held_block_ids(self, request_id: str) -> tuple[int, ...] | None:
        """Return the blocks that a finished prefill holds; None if it holds none."""
        tokens = self._held.get(request_id)
        return None if tokens is None else tuple(tokens.block_ids)

    def release(self, request_id: str, now: float) -> None:
        """Free what a finished prefill holds."""
        self._advance(now)
        self.pool.free(self._held.pop(request_id))

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block; refused (False) while a request holds one."""
        return self.pool.reset()

    def step(self, now: float) -> StepResult | None:
        """Start one step, not before the last one is over; None when there is nothing to do.

        An idle engine keeps the events of a reset back until its next step, as vLLM does. A step
        that computes nothing, but asks for KV, preempts, or tells what was stored, takes no time.
        """
        self._advance(now)
        assert now >= self._busy_until, (now, self._busy_until)
        self._settle(now)
        batch = _Batch(self.profile.max_num_batched_tokens, now)
        self._schedule_running(batch)
        if not batch.has_preempted:
            self._schedule_waiting(batch)
        # After a preemption nobody was let in, who perhaps has all it needs: the next step will.
        if not (batch.work or batch.receives or self._pool_events or batch.has_preempted):
            return None
        self._busy_until = now + self._duration_s(batch)
        outputs = [self._compute(generation, tokens) for generation, tokens in batch.work]
        return StepResult(
            ends_at=self._busy_until,
            outputs=tuple(output for output in outputs if output is not None),
            events=self._take_events(),
            prefill_tokens=batch.prefill_tokens,
            decode_tokens=batch.decode_tokens,
            receives=tuple(batch.receives),
        )

    def wakes_at(self) -> float | None:
        """Return when an idle engine has a next step to do; None: not by itself."""
        return self._loading.next_arrival_at()

    # -- what it shows ------------------------------------------------------------------------

    def statistics(self) -> EngineStatistics:
        parked = self._loading.wanted_requests
        waiting = len(self._waiting) + len(self._loaded) + parked
        return self._counters.report(len(self._running), waiting, self.pool.usage)

    # -- what happens by itself ---------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Let in what is here, and put into the pool what has been computed."""
        for request_id in self._loading.arrived(now):
            generation = self._parked.pop(request_id)
            if self._loading.remove(request_id):
                self._finish_load(generation)
            else:
                self.pool.free(generation.tokens)
        if self._shared_pool is not None:
            self._pool_events += self._shared_pool.settle(now)

    def _finish_load(self, generation: _Generation) -> None:
        self.pool.cache_blocks(generation.tokens, generation.computed_tokens)
        if not generation.uncomputed_tokens:
            generation.computed_tokens -= 1  # the last one is computed to sample from it
        self._loaded.append(generation)

    def _take_events(self) -> tuple[KvEvent, ...]:
        events = (*self._pool_events, *self.pool.take_events())
        self._pool_events.clear()
        return events

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
        while self._has_place(batch) and self._loaded:
            self._run(self._loaded.popleft(), batch)
        while self._has_place(batch) and self._waiting and self._admit(self._waiting[0], batch):
            pass

    def _has_place(self, batch: _Batch) -> bool:
        return batch.budget_tokens > 0 and len(self._running) < self.profile.max_num_seqs

    def _admit(self, generation: _Generation, batch: _Batch) -> bool:
        """Reuse what is cached, and run or park the first waiting request; False if it is too big.

        All its tokens must fit, not only the first chunk: otherwise several long prompts would be
        admitted together and then preempt each other (`scheduler_reserve_full_isl`).
        """
        tokens = generation.tokens
        reused = self.pool.find_cached_prefix(tokens)
        if not self.pool.has_room(tokens, len(tokens), reused):
            return False
        self._waiting.popleft()
        generation.computed_tokens = len(reused) * self.profile.block_size_tokens
        origin = self._find_external(generation)
        if generation.origin is None:
            generation.origin = origin
            self._counters.count_admission(len(tokens), origin, has_connector=self._has_connector)
        generation.prefill_end_tokens = len(tokens)
        generation.stored_blocks = 0
        if origin.external_tokens:
            self._park(generation, reused, origin.external_tokens, batch)
        else:
            self._run(generation, batch, reused)
        return True

    def _find_external(self, generation: _Generation) -> PrefillOrigin:
        """Return what of a request is computed already, and what of the rest is elsewhere."""
        local_tokens, tokens = generation.computed_tokens, generation.tokens
        handoff = generation.request.handoff
        if isinstance(handoff, Receive) and not generation.has_received:
            source = "external_unspecified" if isinstance(handoff.source, NixlSource) else "p2p"
            return PrefillOrigin(local_tokens, len(tokens) - local_tokens, source)
        if self._shared_pool is None:
            return PrefillOrigin(local_tokens, 0)
        size = self.profile.block_size_tokens
        first, last = local_tokens // size, (len(tokens) - 1) // size
        return PrefillOrigin(
            local_tokens, self._shared_pool.take_prefix(tokens, first, last) * size
        )

    def _park(
        self, generation: _Generation, reused: Sequence[int], external_tokens: int, batch: _Batch
    ) -> None:
        """Give a request all its blocks and wait for the KV that is elsewhere.

        *Why* all: two that are loaded and lack room for the rest would block each other for ever.
        """
        tokens, request = generation.tokens, generation.request
        has_slots = self.pool.allocate_slots(tokens, len(tokens), reused, is_cached=False)
        assert has_slots, "there was room for all"
        generation.computed_tokens += external_tokens
        self._parked[request.request_id] = generation
        if isinstance(request.handoff, Receive) and not generation.has_received:
            generation.has_received = True
            self._loading.park(request.request_id, arrives_at=None)
            batch.receives.append(request)
        else:
            size_bytes = external_tokens * self.profile.kv_bytes_per_token
            self._loading.park(request.request_id, self._link.carry(size_bytes, batch.now))

    def _run(self, generation: _Generation, batch: _Batch, reused: Sequence[int] = ()) -> None:
        """Compute the first chunk of what is not computed."""
        chunk_tokens = min(generation.uncomputed_tokens, batch.budget_tokens)
        last_token = generation.computed_tokens + chunk_tokens
        has_slots = self.pool.allocate_slots(generation.tokens, last_token, reused)
        assert has_slots, "room for all tokens is room for the first ones"
        batch.add(generation, chunk_tokens)
        self._running.append(generation)

    def _duration_s(self, batch: _Batch) -> float:
        if not batch.work:
            return 0.0
        duration_s = self.profile.step_overhead_ms / 1000
        duration_s += batch.prefill_tokens / self.profile.prefill_tokens_per_s
        if batch.decode_tokens:
            duration_s += 1 / self.profile.decode_tokens_per_s
        return duration_s

    # -- computing ----------------------------------------------------------------------------

    def _compute(self, generation: _Generation, tokens: int) -> TokenOutput | None:
        """Count `tokens` as computed; sample one if that was all of them."""
        generation.computed_tokens += tokens
        self._store(generation)
        if generation.uncomputed_tokens:
            return None
        assert generation.origin is not None, "admitted before it computes"
        if not generation.output_tokens:
            self._counters.count_first_token(len(generation.tokens), generation.origin)
        token_id = self._next_token(generation)
        generation.tokens.append(token_id)
        generation.output_tokens += 1
        self._counters.generation_tokens += 1
        finish_reason = self._finish_reason(generation)
        if finish_reason is not None:
            self._running.remove(generation)
            self._finish(generation, finish_reason)
        return TokenOutput(
            generation.request.request_id, token_id, generation.origin.cached_tokens, finish_reason
        )

    def _next_token(self, generation: _Generation) -> int:
        index, known = generation.output_tokens, generation.request.answer_token_ids
        if index < len(known):
            return known[index]
        return self._sample_token(generation.seed, index)

    def _store(self, generation: _Generation) -> None:
        """Give the pool the blocks of the prompt that are computed when this step is over.

        All of them, and it takes those that it lacks: what was reused here may have been evicted
        there.
        """
        if self._shared_pool is None:
            return
        tokens = min(generation.computed_tokens, generation.prefill_end_tokens)
        last, first = tokens // self.profile.block_size_tokens, generation.stored_blocks
        generation.stored_blocks = max(first, last)
        self._shared_pool.put_later(generation.tokens, first, last, self._busy_until)

    def _finish_reason(self, generation: _Generation) -> FinishReason | None:
        request = generation.request
        if generation.output_tokens == request.stop_after_tokens:
            return FinishReason.STOP
        if generation.output_tokens == request.max_tokens:
            return FinishReason.LENGTH
        if len(generation.tokens) == self.profile.max_model_len_tokens:
            return FinishReason.LENGTH
        return None

    def _finish(self, generation: _Generation, reason: FinishReason) -> None:
        if _is_held(generation.request.handoff, reason):
            self._held[generation.request.request_id] = generation.tokens
        else:
            self.pool.free(generation.tokens)
        self._forget(generation, reason.value)

    def _forget(self, generation: _Generation, reason: str) -> None:
        del self._generations[generation.request.request_id]
        self._counters.finished_requests[reason] += 1

    def _advance(self, now: float) -> None:
        assert now >= self._now, ("time runs forward", now, self._now)
        self._now = now


def _is_held(handoff: Handoff | None, reason: FinishReason) -> bool:
    """Return whether a prefill that ended like this keeps its blocks for a decoder."""
    if not isinstance(handoff, Send):
        return False
    return reason is FinishReason.LENGTH or handoff.holds_when_stopped
