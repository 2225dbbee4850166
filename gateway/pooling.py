"""What the shared pool holds of a prompt, asked in time for routing.

Theory of operation. Every instance that uses the pool is a `Member`; what it announces tells how it
names blocks (its key space). Before a request is routed, the pool is asked for its prefix, once for each
key space, unless the answer can't matter or is known (decision 10). All that waits has a budget. A pool
that does not answer is left alone, and nothing that was known of it is believed, until a check in the
background finds it well again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from moongate.gateway.driver import Driver
from moongate.kvpool.digests import DigestKeys, DigestMemory
from moongate.kvpool.directory import PoolDirectory, PoolPrefix
from moongate.kvpool.keys import ONE_SHARD, Shard, model_part
from moongate.kvpool.lookup import PrefixLookup, learn_shards
from moongate.kvpool.members import KeyRules, Member
from moongate.kvpool.store import PoolState, PoolStore, PoolUnavailable
from moongate.router import (
    BatchReceived,
    BlockSpace,
    InstanceId,
    InstancePooled,
    KeySpace,
    NotePooled,
    PoolChecked,
    PoolPart,
    Prompt,
    Request,
)
from moongate.router.events import BlocksStored
from moongate.router.model import BlockHash, ModelCard

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 2.0
"""How often the pool is asked how it is; a restart is noticed, and an end, within this."""

SAMPLE_INTERVAL_S = 20.0
"""How often a block that an engine must have stored is looked for, to see that keys are made right."""

STORED_WITHIN_S = 1.0
"""How long an engine takes at most, after an answer, to store what it computed for it."""

SAMPLES_MISSED_MAX = 3
"""So many in a row that aren't there: keys are made otherwise (less than a minute of traffic)."""

HINT_WEIGHT = 0.8
"""What a token is worth that an engine announced as stored, and that nobody has seen since."""


@dataclass(slots=True)
class PoolCounts:
    """For metrics and `/admin/index`."""

    lookups: int = 0
    asked_keys: int = 0
    round_trips: int = 0
    failures: int = 0
    overruns: int = 0  # look-ups that took more than their budget
    restarts: int = 0
    key_mismatches: int = 0
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
    ) -> None:
        self._store = store
        self._driver = driver
        self._clock = clock
        self._budget_s = budget_s
        self._rules = rules
        self._on_lookup = on_lookup
        self._members: dict[InstanceId, Member] = {}
        self._spaces: dict[KeySpace, _Space] = {}
        self._checking: asyncio.Task[None] | None = None
        self._check_now = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_up = False
        self._is_suspect = False  # it was too slow, and has not been checked since
        self.state: PoolState | None = None
        self.counts = PoolCounts()

    def start(self) -> None:
        self._driver.on_batch = self._observe
        self._driver.on_pooled = self._note_pooled
        self._checking = asyncio.create_task(self._keep_checking())

    async def close(self) -> None:
        tasks = [*self._tasks, *([self._checking] if self._checking is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._store.close()

    # --- the pool's health ------------------------------------------------------------------------

    async def _keep_checking(self) -> None:
        while True:
            self._check_now.clear()
            await self._check()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._check_now.wait(), CHECK_INTERVAL_S)

    async def _check(self) -> None:
        try:
            state = await self._store.check()
        except PoolUnavailable as error:
            if self.is_up or self.state is None:
                logger.warning("the pool does not answer; routing goes on without it: %s", error)
            self._set_down()
            return
        before = self.state
        if before is not None and before.epoch != state.epoch:
            logger.warning("the pool was restarted: what it held is gone")
            self.counts.restarts += 1
            self._forget_all()
        if not self.is_up:
            logger.info("the pool answers: %s keys", state.key_count)
        self.is_up, self._is_suspect, self.state = True, False, state
        self._driver.handle(PoolChecked(is_up=True, use=state.use))

    def _set_down(self) -> None:
        self.is_up = False
        self._driver.handle(PoolChecked(is_up=False))
        self.counts.failures += 1
        self._forget_all()

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
    ) -> None:
        """Take in what discovery found of an instance.

        `root`: where it loaded its model from. `uses_pool` None: it doesn't show.
        """
        member = self._members.setdefault(instance_id, Member(instance_id, self._rules))
        member.model = model_part(root) if root is not None else None
        member.block_size_tokens = member.block_size_tokens or block_size_tokens
        if uses_pool is not None:
            member.uses_pool = uses_pool
        self._presume(member)
        self._note_key_space(member)

    def restarted(self, instance_id: InstanceId) -> None:
        """Note that the instance may be another process now, with other names for blocks."""
        member = self._members.get(instance_id)
        if member is not None:
            member.restarted()

    def _observe(self, event: BatchReceived) -> None:
        """Learn from what an instance announces how it names blocks."""
        member = self._members.get(event.source.instance_id)
        if member is None or member.probe.is_done:
            return
        for part in event.events:
            if isinstance(part, BlocksStored):
                member.observe(part)
        # What one shows is presumed of its peers.
        for peer in self._members.values():
            self._presume(peer)
            self._note_key_space(peer)

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
            self._spaces.setdefault(key_space, _Space())
        self._driver.handle(InstancePooled(member.instance_id, key_space))

    def _note_pooled(self, command: NotePooled) -> None:
        space = self._space_of(command.instance_id)
        if space is not None and self.is_up:
            space.directory.note_stored(command.blocks, self._clock())

    def _space_of(self, instance_id: InstanceId) -> _Space | None:
        member = self._members.get(instance_id)
        key_space = member.key_space if member is not None else None
        return self._spaces.get(key_space) if key_space is not None else None

    # --- asking -----------------------------------------------------------------------------------

    async def enrich(self, request: Request, known: PromptTokens) -> Request:
        """Return the request with what the pool holds of its prompt, as far as that can matter."""
        if not self.is_up or not known.prompt.is_exact:
            return request
        may_ask = not self._is_suspect and not self._driver.core.covers(request, self._clock())
        parts: dict[KeySpace, PoolPart] = {}
        for member in self._members_for(request.model):
            assert member.key_space is not None
            part = await self._part(member, known, may_ask=may_ask)
            if part is not None:
                parts[member.key_space] = part
        return replace(request, pool=parts) if parts else request

    def _members_for(self, model: str) -> list[Member]:
        """Return one member for each key space in which a request for the model could find blocks."""
        members: dict[KeySpace, Member] = {}
        for instance in self._driver.core.fleet.serving(model):
            member = self._members.get(instance.spec.id)
            if member is not None and (key_space := member.key_space) is not None:
                members.setdefault(key_space, member)
        return list(members.values())

    async def _part(self, member: Member, known: PromptTokens, *, may_ask: bool) -> PoolPart | None:
        """Return what the pool has for the key space of this member, None for nothing."""
        key_space, size = member.key_space, member.block_size_tokens
        assert key_space is not None
        assert size is not None
        space = self._spaces[key_space]
        chain = self._chain(known, size)
        usable = known.prompt.known_in(chain[0]).usable_blocks if chain is not None else 0
        if chain is None or not usable:
            return None
        blocks = chain[1]
        recalled = space.directory.recall(blocks, usable, self._clock())
        if recalled.is_fresh or not may_ask:
            weight = 1.0 if recalled.is_fresh else HINT_WEIGHT
            return _as_part(recalled.prefix, size, weight)
        likely = recalled.likely_blocks or self._driver.core.find_history(blocks) or None
        prefix = await self._ask(member, space, known, blocks, usable, likely)
        if prefix is None:
            return None
        space.directory.note_answer(blocks, prefix, self._clock())
        return _as_part(prefix, size, 1.0)

    def _chain(
        self, known: PromptTokens, size: int
    ) -> tuple[BlockSpace, Sequence[BlockHash]] | None:
        """Return the prompt's chain of blocks of this size."""
        for space, chain in known.prompt.chains.items():
            if space.block_size_tokens == size:
                return space, chain
        return None

    async def _ask(
        self,
        member: Member,
        space: _Space,
        known: PromptTokens,
        chain: Sequence[BlockHash],
        usable: int,
        likely: int | None,
    ) -> PoolPrefix | None:
        """Ask the pool, within the budget. None: it can't be known."""
        tokens, scheme = known.tokens(), member.scheme
        first = member.first_digest(chain, tokens, known.first_keys)
        if first is None or scheme is None:
            return None
        assert member.block_size_tokens is not None
        digests = space.digests.digest(
            scheme.algorithm, chain, tokens, member.block_size_tokens, first, known.every_keys
        )
        lookup = PrefixLookup(self._store, member.layout(space.shards), digests[:usable])
        began = self._clock()
        try:
            async with asyncio.timeout(self._budget_s):
                return await lookup.run(likely)
        except TimeoutError:
            # The machine may be busy as well, so that is no proof. It is asked how it is, and no
            # turn waits for it until it has said so.
            self.counts.overruns += 1
            self._is_suspect = True
            self._check_now.set()
            return None
        except PoolUnavailable as error:
            logger.warning("the pool can't be asked: %s", error)
            self._set_down()
            self._check_now.set()
            return None
        finally:
            self.counts.lookups += 1
            self.counts.asked_keys += lookup.asked_keys
            self.counts.round_trips += lookup.round_trips
            self._on_lookup(self._clock() - began)

    # --- afterwards -------------------------------------------------------------------------------

    def answered(
        self,
        instance_id: InstanceId,
        known: PromptTokens,
        expected_tokens: int,
        cached_tokens: int | None,
    ) -> None:
        """Compare an answer with what was expected of the pool, and look whether keys are made right.

        `expected_tokens`: from device and pool together; `cached_tokens`: as the engine reports, None
        if it doesn't.
        """
        member, space = self._members.get(instance_id), self._space_of(instance_id)
        if member is None or space is None or member.block_size_tokens is None:
            return
        chain = self._chain(known, member.block_size_tokens)
        if chain is None or not chain[1]:
            return
        if cached_tokens is not None and cached_tokens < expected_tokens - member.block_size_tokens:
            self.counts.shortfalls += 1
            space.directory.forget(chain[1])
        now = self._clock()
        is_due = space.sampled_at is None or now - space.sampled_at >= SAMPLE_INTERVAL_S
        if self.is_up and is_due and not known.salt:
            space.sampled_at = now
            task = asyncio.create_task(self._sample(member, space, known, chain[1]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _sample(
        self, member: Member, space: _Space, known: PromptTokens, chain: Sequence[BlockHash]
    ) -> None:
        """Look for a block that the instance must have stored by now; learn in which parts it did."""
        first = member.first_digest(chain, known.tokens(), known.first_keys)
        if first is None:
            return
        await asyncio.sleep(STORED_WITHIN_S)
        try:
            shards = await learn_shards(self._store, member.layout(), first)
        except PoolUnavailable:
            return  # the regular check will say so
        if shards is not None:
            space.is_confirmed, space.samples_missed = True, 0
            if self._rules.shards is None:
                space.shards = shards
            return
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
        state = self.state
        counts = self.counts
        return {
            "up": self.is_up,
            "keys": state.key_count if state is not None else None,
            "allocated_bytes": state.allocated_bytes if state is not None else None,
            "capacity_bytes": state.capacity_bytes if state is not None else None,
            "evicted_keys": state.evicted_keys if state is not None else None,
            "lookups": counts.lookups,
            "asked_keys": counts.asked_keys,
            "round_trips": counts.round_trips,
            "failures": counts.failures,
            "overruns": counts.overruns,
            "restarts": counts.restarts,
            "key_mismatches": counts.key_mismatches,
            "shortfalls": counts.shortfalls,
            "members": [self._member_as_json(member) for member in self._members.values()],
        }

    def _member_as_json(self, member: Member) -> dict[str, object]:
        key_space, space = member.key_space, self._space_of(member.instance_id)
        reason = None
        if member.uses_pool is False:
            reason = "the engine uses no pool"
        elif member.scheme is None:
            mismatches = member.probe.mismatches
            reason = (
                f"none of the known hash algorithms and seeds names its blocks ({mismatches} tried);"
                " set pool.hash_seeds to its PYTHONHASHSEED"
                if mismatches else "it has announced no first block of a prompt yet"
            )  # fmt: skip
        return {
            "instance": member.instance_id,
            "key_space": key_space.name if key_space is not None else None,
            "unknown_because": reason,
            "keys_confirmed": space.is_confirmed if space is not None else False,
            "shards": len(space.shards) if space is not None else None,
            "known_prefixes": len(space.directory) if space is not None else 0,
            "announced_blocks": space.directory.hints if space is not None else 0,
        }


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
