"""Whether the shared pool answers, and what it says of itself: asked in the background.

A look-up that is refused makes the pool count as down at once. One that gets no answer in time is no
proof, since the machine may be busy as well: the pool is asked how it is, and no turn waits for it until
it has said so. What was known of the pool is void when it was restarted or a check finds it down.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from moongate.kvpool.store import PoolState, PoolStore, PoolUnavailable

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 2.0
"""How often the pool is asked how it is; a restart is noticed, and an end, within this."""

HOLES_S = 60.0
"""For so long after keys were seen to go, prefixes may have holes where they were."""


@dataclass(slots=True)
class HealthCounts:
    """Since the gateway's start."""

    failures: int = 0  # checks and look-ups without an answer
    overruns: int = 0  # look-ups that took more than their budget
    restarts: int = 0


class PoolHealth:
    """Checks one pool. `on_loss` is called when all that was known of it is void."""

    def __init__(
        self,
        store: PoolStore,
        clock: Callable[[], float],
        on_loss: Callable[[], None],
        *,
        on_checked: Callable[[PoolState | None], None] | None = None,
        interval_s: float | None = None,
    ) -> None:
        """`on_checked` gets what each check found, None where the pool can't be reached."""
        self._store = store
        self._clock = clock
        self._on_loss = on_loss
        self._on_checked = on_checked or (lambda _: None)
        self._interval_s = CHECK_INTERVAL_S if interval_s is None else interval_s
        self._check_now = asyncio.Event()
        self._lost_at: float | None = None
        self.is_up = False
        self._is_suspect = False  # it was too slow, and has not been checked since
        self.state: PoolState | None = None
        self.counts = HealthCounts()

    @property
    def has_holes(self) -> bool:
        """Tell whether keys went lately, from within prefixes perhaps: evicted, or with a segment."""
        return self._lost_at is not None and self._clock() - self._lost_at < HOLES_S

    @property
    def may_ask(self) -> bool:
        """Tell whether a turn may wait for an answer of the pool."""
        return self.is_up and not self._is_suspect

    def look_up_overran(self) -> None:
        """Let nobody wait for the pool until it has said that it is well."""
        self.counts.overruns += 1
        self._is_suspect = True
        self._check_now.set()

    def look_up_failed(self, reason: str) -> None:
        """Leave the pool alone until a check, a very next one, finds it well."""
        self.counts.failures += 1
        if self.is_up:
            logger.warning("the pool can't be asked: %s", reason)
            self.is_up = False
            self._on_checked(None)
            self._check_now.set()

    async def keep_checking(self) -> None:
        while True:
            self._check_now.clear()
            try:
                await self.check()
            except Exception:
                # A bug of ours; a pool that is never checked again would be worse.
                logger.exception("the pool could not be checked")
            # Not `wait_for`, which until Python 3.12 can lose a cancellation.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._check_now.wait()

    async def check(self) -> None:
        """Ask the pool how it is, once."""
        try:
            state = await self._store.check()
        except PoolUnavailable as error:
            if self.is_up or not self.counts.failures:
                logger.warning("the pool does not answer; routing goes on without it: %s", error)
            self.counts.failures += 1
            self.is_up = False
            self._on_loss()
            self._on_checked(None)
            return
        self._compare(self.state, state)
        if not self.is_up:
            logger.info("the pool answers: %s keys", state.key_count)
        self.is_up, self._is_suspect, self.state = True, False, state
        self._on_checked(state)

    def _compare(self, before: PoolState | None, now: PoolState) -> None:
        if before is not None and before.epoch != now.epoch:
            logger.warning("the pool was restarted: what it held is gone")
            self.counts.restarts += 1
            self._lost_at = None
            self._on_loss()
        elif _has_lost(before or PoolState(now.epoch), now):
            self._lost_at = self._clock()


def _has_lost(before: PoolState, now: PoolState) -> bool:
    """Tell whether keys went between two states of one process."""
    return (
        (now.evicted_keys or 0) > (before.evicted_keys or 0)
        or (now.key_count or 0) < (before.key_count or 0)
        or (now.capacity_bytes or 0) < (before.capacity_bytes or 0)
    )
