"""What the shared pool holds of a prompt, asked in time for routing.

Theory of operation. Every instance that uses the pool is a `Member`; what it announces tells how it
names blocks (its key space). Before a request is routed, the pool is asked for its prefix, once for each
key space, unless the answer can't matter or is known (decision 10). All that waits has a budget; what was
seen within it counts. A pool that does not answer is left alone until a check finds it well again
(`pool_health.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from moongate.gateway.driver import Driver
from moongate.gateway.pool.pool_health import PoolHealth
from moongate.kvpool.digests import DigestKeys, DigestMemory
from moongate.kvpool.directory import PoolDirectory, PoolPrefix
from moongate.kvpool.keys import ONE_SHARD, Shard, model_part
from moongate.kvpool.lookup import PrefixLookup, learn_shards
from moongate.kvpool.members import KeyRules, Member
from moongate.kvpool.store import PoolState, PoolStore, PoolUnavailable
from moongate.router import (
    BatchReceived,
    InstanceId,
    InstancePooled,
    KeySpace,
    NotePooled,
    PoolChecked,
    PoolPart,
    Prompt,
    Request,
    Role,
)
from moongate.router.events import BlocksStored
from moongate.router.model import BlockHash, ModelCard

logger = logging.getLogger(__name__)

SAMPLE_INTERVAL_S = 20.0
"""How often a block that an engine must have stored is looked for, to see that keys are made right."""

STORED_WITHIN_S = 1.0
"""How long an engine takes at most, after an answer, to store what it computed for it."""

SAMPLES_MISSED_MAX = 3
"""So many in a row that aren't there: keys are made otherwise (less than a minute of traffic)."""

NAMELESS_MAX = 3
"""So many first blocks that no known scheme names: it is another."""

NOTHING_ANNOUNCED: Mapping[str, Any] = {}

HINT_WEIGHT = 0.8
"""What a token is worth that an engine announced as stored, and that nobody has seen since."""


@dataclass(slots=True)
class PoolCounts:
    """For metrics and `/admin/index`."""

    lookups: int = 0
    asked_keys: int = 0
    round_trips: int = 0
    key_mismatches: int = 0  # key spaces, or processes, whose keys are made otherwise
    shortfalls: int = 0  # answers for which an engine found less in the pool than was there


@dataclass(slots=True)
class _Space:
    """One key space: what is known of the pool in its terms."""

    directory: PoolDirectory = field(default_factory=PoolDirectory)
    digests: DigestMemory = field(default_factory=DigestMemory)
    shards: Sequence[Shard] = ONE_SHARD
    is_confirmed: bool = False  # a block was found where it had to be
    sampled_at: float | None = None
    samples_missed: int = 0


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A prompt whose blocks can be named: its ids (packed), and what isolates them."""

    prompt: Prompt
    tokens: Callable[[], bytes]
    salt: str | None = None
    card: ModelCard | None = None  # of the adapter that it is for

    @property
    def every_keys(self) -> DigestKeys | None:
        if self.card is None or not self.card.is_adapter:
            return None
        return (("lora", self.card.name, self.card.root or ""),)

    @property
    def first_keys(self) -> DigestKeys | None:
        salt = (("cache_salt", self.salt),) if self.salt else ()
        return (*(self.every_keys or ()), *salt) or None


class _Turn(NamedTuple):
    """A prompt as one key space knows it."""

    member: Member
    space: _Space
    chain: Sequence[BlockHash]
    usable_blocks: int
    block_size_tokens: int


class Pooling:
    """Asks one pool. `start` it inside the event loop, and `close` it."""

    def __init__(
        self,
        store: PoolStore,
        driver: Driver,
        clock: Callable[[], float],
        *,
        budget_s: float,
        rules: KeyRules,
        on_lookup: Callable[[float], None],
        stored_within_s: float = STORED_WITHIN_S,
    ) -> None:
        self._store = store
        self._driver = driver
        self._clock = clock
        self.budget_s = budget_s
        self._rules = rules
        self._on_lookup = on_lookup
        self._stored_within_s = stored_within_s
        self._members: dict[InstanceId, Member] = {}
        self._spaces: dict[KeySpace, _Space] = {}  # those that a member has
        self._epochs = itertools.count()
        self._checking: asyncio.Task[None] | None = None
        self._sampling: set[asyncio.Task[None]] = set()
        self.health = PoolHealth(store, clock, self._forget_all, on_checked=self._tell_core)
        self.counts = PoolCounts()

    def start(self) -> None:
        self._driver.on_batch = self._observe
        self._driver.on_pooled = self._note_pooled
        self._checking = asyncio.create_task(self.health.keep_checking())

    async def close(self) -> None:
        tasks = [*self._sampling, *([self._checking] if self._checking is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._store.close()

    def _tell_core(self, state: PoolState | None) -> None:
        """Let the core know whether the pool is up (None: it isn't), and how full."""
        if state is None:
            self._driver.handle(PoolChecked(is_up=False))
        else:
            self._driver.handle(PoolChecked(is_up=True, use=state.use))

    def _forget_all(self) -> None:
        for space in self._spaces.values():
            space.directory.forget_all()

    # --- the members ------------------------------------------------------------------------------

    def describe(
        self,
        instance_id: InstanceId,
        root: str | None,
        block_size_tokens: int | None,
        uses_pool: bool | None,
        announced: Mapping[str, Any] = NOTHING_ANNOUNCED,
    ) -> None:
        """Take in what discovery found of an instance.

        `root`: where it loaded its model from. `uses_pool` None: it doesn't show. `announced`: what it
        said of itself: its hash algorithm and seed, its pool, and its parallel sizes.
        """
        member = self._members.get(instance_id)
        if member is None:
            member = Member(instance_id, self._rules, epochs=self._epochs)
            self._members[instance_id] = member
        member.model = model_part(root) if root is not None else None
        member.block_size_tokens = member.block_size_tokens or block_size_tokens
        if uses_pool is not None:
            member.uses_pool = uses_pool
        member.note_announced(announced)
        self._presume(member)
        self._note_key_space(member)

    def forget(self, instance_id: InstanceId) -> None:
        """Forget an instance that is here no more."""
        self._members.pop(instance_id, None)
        self._drop_spaces()

    def restarted(self, instance_id: InstanceId) -> None:
        """Note that the process is gone: the next one may have other names for blocks."""
        member = self._members.get(instance_id)
        if member is not None:
            member.restarted()
            self._note_key_space(member)

    def _observe(self, event: BatchReceived) -> None:
        """Learn from what an instance announces how it names blocks. Cost: O(its blocks), mostly."""
        member = self._members.get(event.source.instance_id)
        if member is None:
            return
        state = self._driver.core.sources.find(event.source)
        if state is not None and member.note_feed(event.source, state.feed.epoch):
            self._note_key_space(member)
        stored = [part for part in event.events if isinstance(part, BlocksStored)]
        if not stored or member.probe.is_done:
            return
        for part in stored:
            member.observe(part)
        self._report_nameless(member)
        self._note_key_space(member)
        self._presume_of_peers(member)

    def _presume_of_peers(self, member: Member) -> None:
        """Presume of its peers what one has just shown. Once for each process: O(members x unknown)."""
        if not member.probe.is_done:
            return
        for peer in self._members.values():
            self._presume(peer)
            self._note_key_space(peer)

    def _report_nameless(self, member: Member) -> None:
        """Say once of a process that its blocks can't be named."""
        is_nameless = member.scheme is None and member.probe.mismatches >= NAMELESS_MAX
        if not is_nameless or member.is_reported or member.uses_pool is False:
            return
        member.is_reported = True
        self.counts.key_mismatches += 1
        logger.error("instance %s: %s", member.instance_id, _nameless(member))

    def _presume(self, member: Member) -> None:
        """Let an instance that has not shown how it names blocks be as others of its model."""
        if member.scheme is not None:
            return
        peers = (m for m in self._members.values() if m.model == member.model and m.probe.is_done)
        member.presumed = next((peer.scheme for peer in peers), None)

    def _note_key_space(self, member: Member) -> None:
        instance = self._driver.core.fleet.find(member.instance_id)
        key_space = member.key_space
        if instance is None or instance.key_space == key_space:
            return
        if key_space is not None:
            logger.info(
                "instance %s: blocks in the pool are %s", member.instance_id, key_space.name
            )
            space = self._spaces.setdefault(key_space, _Space())
            if not space.is_confirmed and member.shards is not None:
                space.shards = member.shards
        self._driver.handle(InstancePooled(member.instance_id, key_space))
        self._drop_spaces()

    def _drop_spaces(self) -> None:
        """Drop what is known in terms that no member uses any more: up to 80 MB of digests each."""
        used = {member.key_space for member in self._members.values()}
        for key_space in self._spaces.keys() - used:
            del self._spaces[key_space]

    def _note_pooled(self, command: NotePooled) -> None:
        space = self._space_of(command.instance_id)
        if space is not None and self.health.is_up:
            space.directory.note_stored(command.blocks, self._clock())

    def _space_of(self, instance_id: InstanceId) -> _Space | None:
        member = self._members.get(instance_id)
        key_space = member.key_space if member is not None else None
        return self._spaces.get(key_space) if key_space is not None else None

    # --- asking -----------------------------------------------------------------------------------

    async def enrich(self, request: Request, known: PromptTokens) -> Request:
        """Return the request with what the pool holds of its prompt, as far as that can matter."""
        if not self.health.is_up or not known.prompt.is_exact:
            return request
        may_ask = self.health.may_ask and not self._driver.core.covers(request, self._clock())
        parts: dict[KeySpace, PoolPart | None] = {}
        unknown: dict[KeySpace, tuple[_Turn, int | None]] = {}
        for key_space, member in self._members_for(request.model).items():
            turn = self._turn(member, known)
            if turn is None:
                continue
            recalled = turn.space.directory.recall(turn.chain, turn.usable_blocks, self._clock())
            if may_ask and not recalled.is_fresh:
                history = self._driver.core.find_history(turn.chain)
                unknown[key_space] = turn, recalled.likely_blocks or history or None
            else:
                weight = 1.0 if recalled.is_fresh else HINT_WEIGHT
                parts[key_space] = _as_part(recalled.prefix, turn.block_size_tokens, weight)
        asked = (self._ask(turn, known, likely) for turn, likely in unknown.values())
        # At the same time: together they have one budget.
        parts |= zip(unknown, await asyncio.gather(*asked), strict=True)
        pool = {key_space: part for key_space, part in parts.items() if part is not None}
        return replace(request, pool=pool) if pool else request

    def _members_for(self, model: str) -> dict[KeySpace, Member]:
        """Return one member for each key space in which a request for the model could find blocks."""
        members: dict[KeySpace, Member] = {}
        for instance in self._driver.core.fleet.serving(model):
            member = self._members.get(instance.spec.id)
            key_space = member.key_space if member is not None else None
            if instance.is_healthy and member is not None and key_space is not None:
                members.setdefault(key_space, member)
        return members

    def _turn(self, member: Member, known: PromptTokens) -> _Turn | None:
        """Return the prompt as this member's key space knows it. None: nothing of it can be there."""
        space, size = self._space_of(member.instance_id), member.block_size_tokens
        prompt = known.prompt
        found = next((s for s in prompt.chains if s.block_size_tokens == size), None)
        if space is None or found is None or not size:
            return None
        part = prompt.known_in(found)
        if not part.usable_blocks:
            return None
        return _Turn(member, space, part.chain, part.usable_blocks, size)

    async def _ask(self, turn: _Turn, known: PromptTokens, likely: int | None) -> PoolPart | None:
        """Return what the pool answers within the budget. None: nothing, or it can't be known."""
        lookup = self._prepare(turn, known)
        if lookup is None:
            return None
        began = self._clock()
        try:
            async with asyncio.timeout(self.budget_s):
                prefix = await lookup.run(likely)
            turn.space.directory.note_answer(turn.chain, turn.usable_blocks, prefix, self._clock())
        except TimeoutError:
            self.health.look_up_overran()
            prefix = lookup.seen_so_far()
        except PoolUnavailable as error:
            self.health.look_up_failed(str(error))
            return None
        finally:
            self.counts.lookups += 1
            self.counts.asked_keys += lookup.asked_keys
            self.counts.round_trips += lookup.round_trips
            self._on_lookup(self._clock() - began)
        return _as_part(prefix, turn.block_size_tokens, 1.0)

    def _prepare(self, turn: _Turn, known: PromptTokens) -> PrefixLookup | None:
        """Return the question for a turn's prefix. None: its keys can't be told."""
        member, tokens = turn.member, known.tokens()
        first, scheme = member.first_digest(turn.chain, tokens, known.first_keys), member.scheme
        if first is None or scheme is None:
            return None
        digests = turn.space.digests.digest(
            scheme.algorithm, turn.chain, tokens, turn.block_size_tokens, first, known.every_keys
        )
        return PrefixLookup(
            self._store,
            member.layout(turn.space.shards),
            digests[: turn.usable_blocks],
            has_holes=self.health.has_holes,
        )

    # --- afterwards -------------------------------------------------------------------------------

    def answered(
        self,
        instance_id: InstanceId,
        known: PromptTokens,
        expected_tokens: int,
        cached_tokens: int | None,
    ) -> None:
        """Compare an answer with what was expected of the pool, and look whether keys are made right.

        `instance_id`: where the prompt was computed. `expected_tokens`: from device and pool together, 0
        if nothing from the pool; `cached_tokens`: as the engine reports, None if it doesn't.
        """
        member = self._members.get(instance_id)
        turn = self._turn(member, known) if member is not None else None
        if turn is None:
            return
        directory = turn.space.directory
        if cached_tokens is not None and cached_tokens < expected_tokens - turn.block_size_tokens:
            self.counts.shortfalls += 1
            directory.forget(turn.chain)
        else:
            directory.outdate(turn.chain)
        if self._is_sample_due(turn, known):
            turn.space.sampled_at = self._clock()
            task = asyncio.create_task(self._sample(turn, known))
            self._sampling.add(task)
            task.add_done_callback(self._sampling.discard)

    def _is_sample_due(self, turn: _Turn, known: PromptTokens) -> bool:
        sampled_at = turn.space.sampled_at
        instance = self._driver.core.fleet.find(turn.member.instance_id)
        # One that only decodes stores nothing.
        can_store = instance is not None and instance.spec.role is not Role.DECODE
        is_due = sampled_at is None or self._clock() - sampled_at >= SAMPLE_INTERVAL_S
        return self.health.is_up and is_due and can_store and not known.salt

    async def _sample(self, turn: _Turn, known: PromptTokens) -> None:
        """Look for a block that the instance must have stored by now; learn in which parts it did."""
        member, space = turn.member, turn.space
        first = member.first_digest(turn.chain, known.tokens(), known.first_keys)
        if first is None:
            return
        await asyncio.sleep(self._stored_within_s)
        try:
            shards = await learn_shards(self._store, member.layout(), first)
        except PoolUnavailable:
            return  # the regular check will say so
        if shards is not None:
            space.is_confirmed, space.samples_missed = True, 0
            if self._rules.shards is None:
                space.shards = shards
            return
        if space.is_confirmed and self.health.has_holes:
            return  # keys were right, and a pool that is too small loses them
        space.samples_missed += 1
        if space.samples_missed == SAMPLES_MISSED_MAX:
            self.counts.key_mismatches += 1
            space.samples_missed = 0
            logger.error(
                "instance %s: what it stores is not in the pool under the keys that are looked for,"
                " such as %s; set pool.cache_prefix or pool.namespace as its engine has them",
                member.instance_id, member.layout().keys(first)[0],
            )  # fmt: skip

    # --- telling ----------------------------------------------------------------------------------

    def as_json(self) -> dict[str, object]:
        """Return what `/admin/index` says of the pool."""
        health, counts = self.health, self.counts
        state = health.state
        return {
            "up": health.is_up,
            "keys": state.key_count if state is not None else None,
            "allocated_bytes": state.allocated_bytes if state is not None else None,
            "capacity_bytes": state.capacity_bytes if state is not None else None,
            "evicted_keys": state.evicted_keys if state is not None else None,
            "lookups": counts.lookups,
            "asked_keys": counts.asked_keys,
            "round_trips": counts.round_trips,
            "failures": health.counts.failures,
            "overruns": health.counts.overruns,
            "restarts": health.counts.restarts,
            "key_mismatches": counts.key_mismatches,
            "shortfalls": counts.shortfalls,
            "members": [self._member_as_json(member) for member in self._members.values()],
        }

    def _member_as_json(self, member: Member) -> dict[str, object]:
        key_space, space = member.key_space, self._space_of(member.instance_id)
        return {
            "instance": member.instance_id,
            "key_space": key_space.name if key_space is not None else None,
            "unknown_because": _unknown_because(member),
            "keys_confirmed": space.is_confirmed if space is not None else False,
            "shards": len(space.shards) if space is not None else None,
            "known_prefixes": len(space.directory) if space is not None else 0,
            "announced_blocks": space.directory.hints if space is not None else 0,
        }


def _unknown_because(member: Member) -> str | None:
    """Return why no key space is known of a member."""
    if member.foreign_because is not None:
        return f"it uses another pool: {member.foreign_because}"
    if member.uses_pool is False:
        return "the engine uses no pool"
    if member.model is None:
        return "it doesn't say where it loaded its model from"
    if not member.has_askable_keys:
        return f"the name of its model's directory has a comma, at which keys are split: {member.model}"
    if member.block_size_tokens is None:
        return "its block size isn't known yet"
    if member.scheme is None:
        has_tried = member.probe.mismatches
        return _nameless(member) if has_tried else "it has announced no first block of a prompt yet"
    return None


def _nameless(member: Member) -> str:
    return (
        "none of the known hash algorithms and seeds names its blocks"
        f" ({member.probe.mismatches} tried); set pool.hash_seeds to its PYTHONHASHSEED"
    )


def _as_part(prefix: PoolPrefix, block_size_tokens: int, weight: float) -> PoolPart | None:
    if not prefix.blocks:
        return None
    return PoolPart(
        tokens=prefix.blocks * block_size_tokens,
        bytes_per_token=prefix.bytes_per_block / block_size_tokens,
        host=prefix.endpoint.rpartition(":")[0],
        on_disk=prefix.on_disk,
        weight=weight,
    )
