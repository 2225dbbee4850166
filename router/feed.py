"""One event source: put its batches in order, notice what is missing, and say how far to trust it.

Theory of operation. A publisher numbers its batches from 0. A feed is either LIVE (the next batch
is `expected`) or SYNCING (it has asked for a replay and keeps live batches back until that ends).

- Opened: replay from 0, since all that was published before the subscription stood is missing.
- Live batch later than expected: a gap. Ask for `expected` once, keep what comes, apply in order.
- Live batch earlier than expected: a duplicate if its bytes are those that were applied under this
  number, else the publisher started again: forget everything (a new epoch) and start over.
- Reconnected, silent for long, or contradicted by its engine: verify. Ask from the last applied batch; its bytes tell whether
  this is still the same publisher, and what follows it is what was missed.
- What a replay can't bring back is lost: the source is DEGRADED until its cache is known to be
  empty (a clear, or a restart).

A feed returns what to apply and what to ask; it knows nothing of blocks. Time is passed in.
Source: vLLM 0.32 `ZmqEventPublisher` (sequence from 0, bounded replay buffer, end mark).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum

from moongate.router.events import BatchReceived, KvEvent
from moongate.router.model import Trust

PENDING_BATCHES_MAX = 20_000
"""Live batches kept back during one replay; twice vLLM's own replay buffer. Past it the replay is
given up and what it would have brought counts as lost."""

REMEMBERED_DIGESTS = 256
"""Applied batches whose bytes are remembered, to tell a duplicate from a restart."""

VERIFY_AFTER_SYNC_S = 1.0
"""A batch published while the subscription was being set up can miss both replay and stream; one
more look soon afterwards finds it even if the engine has gone idle."""

VERIFY_IDLE_S = 30.0
"""A silent source is asked whether anything was missed (a dropped last message shows no gap)."""

DOUBT_PAUSE_S = 5.0
"""How often at most a source is asked anew because an engine's report contradicts what it said. The
report may also be right for another reason: some requests read no cache."""

REPLAY_PATIENCE_S = 10.0
"""A replay that has not ended by then is taken as unanswered. The edge has a shorter time-out."""


class _State(Enum):
    LIVE = "live"
    SYNCING = "syncing"
    VERIFYING = "verifying"  # syncing, and the first batch must be the one applied last
    CUT = "cut"  # without connection: what comes may be from another publisher


@dataclass(frozen=True, slots=True)
class Apply:
    """These events are next, in this order."""

    events: tuple[KvEvent, ...]
    rank: int | None


@dataclass(frozen=True, slots=True)
class Forget:
    """The publisher's cache was lost: what it announced is void. A new epoch begins."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Request a replay from this sequence. Its batches and its end carry `replay_id`."""

    from_sequence: int
    replay_id: int


FeedAction = Apply | Forget | Ask


@dataclass(slots=True)
class FeedCounts:
    batches: int = 0
    duplicates: int = 0
    gap_batches: int = 0  # found missing in the stream
    lost_batches: int = 0  # of those, never recovered
    replays: int = 0
    restarts: int = 0


@dataclass(slots=True)
class Feed:
    """The order of one source's batches. Call a method for what happened, perform what it returns."""

    has_replay: bool
    epoch: int = 1
    counts: FeedCounts = field(default_factory=FeedCounts)
    expected: int = 0
    _state: _State = _State.LIVE
    _replay: Ask = Ask(0, 0)  # the last one asked for; what belongs to an earlier one is ignored
    _replay_deadline: float = 0.0
    _replay_batches: int = 0  # that came with it so far
    _repeats: int = 0  # how often it was asked for again from the same sequence, in a row
    # What is kept back, each with the replay that was the last one asked for when it came.
    _pending: list[tuple[int, BatchReceived]] = field(default_factory=list)
    _digests: OrderedDict[int, bytes] = field(default_factory=OrderedDict)
    _is_started: bool = False  # a batch was applied, or a replay said that there is none
    _has_lost: bool = False  # something that was announced is not known
    _is_unsure: bool = False  # a replay had no answer, so something may have been lost
    _verify_at: float | None = None
    _certain: int | None = (
        None  # the batch that is asked for, until a publisher shows that it has it
    )
    _doubt_from: float = 0.0  # the next doubt is heeded from then on

    # --- what happened ----------------------------------------------------------------------------

    @property
    def trust(self) -> Trust:
        if not self._is_started:
            return Trust.APPROXIMATE  # it has said nothing yet, and perhaps never will
        return Trust.DEGRADED if self._has_lost or self._is_unsure else Trust.EXACT

    @property
    def is_live(self) -> bool:
        """Tell whether nothing is being replayed or verified."""
        return self._state is _State.LIVE

    def opened(self, now: float) -> list[FeedAction]:
        return [self._ask(0, _State.SYNCING, now)] if self.has_replay else []

    def connection_lost(self) -> None:
        """Whoever speaks next may be another publisher: keep back what it says until verified."""
        if self.has_replay:
            self._pending.clear()  # a replay has it, if this publisher is still there
            self._state = _State.CUT

    def reconnected(self, now: float) -> list[FeedAction]:
        """Find out whether this is still the publisher that we know."""
        if self._state is not _State.CUT:
            self._pending.clear()
        if self.has_replay:
            return [self._verify(now)]
        # Nobody can tell what happened meanwhile; believing the old blocks would be a guess.
        actions = self._restart()
        self.distrust()
        return actions

    def received(self, batch: BatchReceived, now: float) -> list[FeedAction]:
        self._verify_at = now + VERIFY_IDLE_S
        if batch.replay_id is not None:
            return self._replayed(batch, now)
        if self._state is _State.LIVE:
            return self._live(batch, now)
        self._keep_back(batch)
        if len(self._pending) > PENDING_BATCHES_MAX:
            return self._end_replay(is_complete=False, now=now)
        return []

    def replay_ended(self, replay_id: int, is_complete: bool, now: float) -> list[FeedAction]:
        """Close the replay and go on with what came meanwhile."""
        if not self._is_replaying or replay_id != self._replay.replay_id:
            return []  # of a replay that was given up
        if not is_complete and self._replay_batches > 0:
            # It got somewhere: its rest was dropped on the way (a ROUTER drops what its peer does
            # not take in quickly), and can be had from there.
            return [self._ask(self.expected, _State.SYNCING, now)]
        return self._end_replay(is_complete, now)

    def doubted(self, now: float) -> list[FeedAction]:
        """What was announced seems not to be so: look now whether anything was missed."""
        if self._state is not _State.LIVE or not self.has_replay or now < self._doubt_from:
            return []
        self._doubt_from = now + DOUBT_PAUSE_S
        return [self._verify(now)]

    def woke(self, now: float) -> list[FeedAction]:
        due = self.next_wake()
        if due is None or now < due:
            return []
        if self._state is _State.LIVE:
            return [self._verify(now)]
        return self._end_replay(is_complete=False, now=now)

    def next_wake(self) -> float | None:
        match self._state:
            case _State.LIVE:
                return self._verify_at if self.has_replay else None
            case _State.CUT:
                return None
            case _:
                return self._replay_deadline

    def distrust(self) -> None:
        """Note that events could not be understood or used."""
        self._has_lost = True

    def believe(self) -> None:
        """Note that the cache is known again: what may have been missed concerned lost blocks."""
        self._has_lost = self._is_unsure = False

    # --- the stream -------------------------------------------------------------------------------

    def _live(self, batch: BatchReceived, now: float) -> list[FeedAction]:
        if batch.sequence == self.expected:
            return self._apply(batch)
        if batch.sequence < self.expected:
            return self._earlier(batch, now)
        missing = batch.sequence - self.expected
        if self._is_started or self.has_replay:
            self.counts.gap_batches += missing
        if not self.has_replay:
            # Also a stream joined in its middle: what was stored before is not known.
            return self._lose_until(batch)
        self._keep_back(batch)
        return [self._ask(self.expected, _State.SYNCING, now)]

    def _earlier(self, batch: BatchReceived, now: float) -> list[FeedAction]:
        if self._digests.get(batch.sequence) == batch.digest:
            self.counts.duplicates += 1
            return []
        return self._restart() + self._live(batch, now)

    # --- replays ----------------------------------------------------------------------------------

    def _replayed(self, batch: BatchReceived, now: float) -> list[FeedAction]:
        if not self._is_replaying or batch.replay_id != self._replay.replay_id:
            return []
        self._replay_batches += 1
        actions: list[FeedAction] = []
        if self._state is _State.VERIFYING:
            if self._digests.get(batch.sequence) == batch.digest:
                self._state = _State.SYNCING
                self._certain = None
                return []
            # Another publisher, or one that has forgotten our place: nothing we know is certain.
            actions += self._restart()
            self._state = _State.SYNCING
            if batch.sequence > 0:
                return [*actions, self._ask(0, _State.SYNCING, now)]
        if batch.sequence < self.expected:
            return actions
        if batch.sequence > self.expected and self._replay_batches > 1:
            # A buffer has no holes, so these were dropped on the way. Only what is missing before
            # a replay's first batch is gone.
            return [*actions, self._ask(self.expected, _State.SYNCING, now)]
        return actions + self._lose_until(batch)

    @property
    def _is_replaying(self) -> bool:
        return self._state in (_State.SYNCING, _State.VERIFYING)

    def _end_replay(self, is_complete: bool, now: float) -> list[FeedAction]:
        is_other_publisher = self._state is _State.VERIFYING and is_complete
        self._state = _State.LIVE
        actions: list[FeedAction] = []
        if is_other_publisher:
            # The buffer always has the last batch, so one that lacks ours is another publisher's.
            actions += self._restart()
        self._is_unsure = not is_complete
        is_first_sync = not self._is_started
        self._is_started = self._is_started or is_complete
        is_soon = is_first_sync and is_complete
        self._verify_at = now + (VERIFY_AFTER_SYNC_S if is_soon else VERIFY_IDLE_S)
        return actions + self._drain(is_complete, now)

    def _drain(self, is_complete: bool, now: float) -> list[FeedAction]:
        """Apply what was kept back. A hole that the replay could have filled and didn't is lost."""
        actions: list[FeedAction] = []
        replay_id = self._replay.replay_id
        pending, self._pending = self._pending, []
        for came_with, batch in pending:
            is_beyond = batch.sequence > self.expected
            if self._state is not _State.LIVE:
                # An earlier one of these asked for a replay.
                self._pending.append((came_with, batch))
            elif batch.sequence < self.expected and came_with < replay_id:
                # Asked after it came, the publisher begins later: it has forgotten this batch.
                # As news of a restart it would be asked about for ever.
                continue
            elif (
                is_beyond
                and self._replay.from_sequence == self.expected
                and self._is_hopeless(is_complete)
            ):
                actions += self._lose_until(batch)
            else:
                actions += self._live(batch, now)
        return actions

    def _keep_back(self, batch: BatchReceived) -> None:
        self._pending.append((self._replay.replay_id, batch))

    def _is_hopeless(self, is_complete: bool) -> bool:
        """Tell whether asking again for the same sequence is of no use.

        A first, empty replay can have been answered just before the batch was published; a gap
        that a replay was asked to fill, and one that was not answered, will not be filled.
        """
        is_first_empty = self._replay_batches == 0 and self._replay.from_sequence == 0
        return not (is_complete and is_first_empty and self._repeats == 0)

    # --- steps ------------------------------------------------------------------------------------

    def _apply(self, batch: BatchReceived) -> list[FeedAction]:
        if batch.sequence == 0:
            self.believe()  # a publisher begins with an empty cache
        self.expected = batch.sequence + 1
        self.counts.batches += 1
        self._is_started = True
        self._digests[batch.sequence] = batch.digest
        if len(self._digests) > REMEMBERED_DIGESTS:
            self._digests.popitem(last=False)
        return [Apply(batch.events, batch.rank)]

    def _lose_until(self, batch: BatchReceived) -> list[FeedAction]:
        """Apply a batch, giving up on those before it that are missing."""
        missing = batch.sequence - self.expected
        if missing:
            self.counts.lost_batches += missing
            self.distrust()
        return self._apply(batch)

    def _restart(self) -> list[FeedAction]:
        self.counts.restarts += 1
        self.epoch += 1
        self.expected = 0
        self._has_lost = self._is_unsure = False
        self._digests.clear()
        self._certain = None
        self._is_started = False
        return [Forget()]

    def _verify(self, now: float) -> Ask:
        """Ask for the last batch that is certainly of the publisher that we know.

        Batches that came after a question without an answer may be of another one already.
        """
        if self.expected == 0:
            return self._ask(0, _State.SYNCING, now)
        if self._certain is None:
            self._certain = self.expected - 1
        return self._ask(self._certain, _State.VERIFYING, now)

    def _ask(self, from_sequence: int, state: _State, now: float) -> Ask:
        self._state = state
        is_repeat = self._replay.replay_id > 0 and self._replay.from_sequence == from_sequence
        self._repeats = self._repeats + 1 if is_repeat else 0
        self._replay = Ask(from_sequence, self._replay.replay_id + 1)
        self._replay_deadline = now + REPLAY_PATIENCE_S
        self._replay_batches = 0
        self.counts.replays += 1
        return self._replay
