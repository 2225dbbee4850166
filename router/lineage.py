"""Which request continues which, told by the prompts alone.

A turn of an agent session resends the prompt of the turn before, so the last full block of that
earlier prompt (its tail) is among the new prompt's blocks. No session key is needed, and forks and
sub-agents are found the same way. A tail from which many requests depart is no session but a shared
beginning (a system prompt); so departures are counted.

Bounded: the least recently used tails and departure points are forgotten.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

from moongate.router.model import BlockHash, Holder

SESSIONS_REMEMBERED = 64
"""Beginnings of sessions that count as recent; older sessions may have ended long ago."""


class Lineage(NamedTuple):
    """Where a request departs from what is known.

    `history_blocks`: leading blocks up to the tail of the turn it continues, 0 for a new session.
    `departures`: how many earlier requests went on from the same point. A turn that continues its
    session has 0, a fork 1, the next session with a popular system prompt many.
    """

    history_blocks: int = 0
    departures: int = 0


class RecentSessions:
    """Where the last sessions began: each will come back there, turn after turn."""

    def __init__(self) -> None:
        self._holders: deque[Holder] = deque()
        self._counts: Counter[Holder] = Counter()

    def note(self, holder: Holder) -> tuple[Holder, ...]:
        """Note that a session began on this holder. Return those whose count has changed."""
        self._holders.append(holder)
        self._counts[holder] += 1
        if len(self._holders) <= SESSIONS_REMEMBERED:
            return (holder,)
        oldest = self._holders.popleft()
        self._counts[oldest] -= 1
        if not self._counts[oldest]:
            del self._counts[oldest]
        return holder, oldest

    def count(self, holder: Holder) -> int:
        return self._counts.get(holder, 0)


class Lineages:
    """The tails of recent prompts. `tails_max` bounds them, and the departure points as well."""

    def __init__(self, tails_max: int = 65_536) -> None:
        self._tails_max = tails_max
        self._tails: OrderedDict[BlockHash, None] = OrderedDict()
        self._departures: OrderedDict[BlockHash, int] = OrderedDict()

    def find_history(self, chain: Sequence[BlockHash]) -> int:
        """Return the leading blocks up to the tail of the turn that a prompt continues, or 0.

        Cost: O(blocks since that turn) for a continuation, O(blocks) for a new session.
        """
        tails = self._tails
        for position in range(len(chain) - 1, -1, -1):
            if chain[position] in tails:
                return position + 1
        return 0

    def depart(
        self, chain: Sequence[BlockHash], history_blocks: int, shared_blocks: int
    ) -> Lineage:
        """Return where a prompt departs: after its history, else after the fleet's longest overlap."""
        depth = history_blocks or shared_blocks
        return Lineage(history_blocks, self._departures.get(chain[depth - 1], 0) if depth else 0)

    def note(self, chain: Sequence[BlockHash], lineage: Lineage, shared_blocks: int) -> None:
        """Remember a prompt that was forwarded: its departure (as found), and its tail."""
        if not chain:
            return
        depth = lineage.history_blocks or shared_blocks
        if depth:
            self._departures[chain[depth - 1]] = lineage.departures + 1
            _touch(self._departures, chain[depth - 1], self._tails_max)
        self._tails[chain[-1]] = None
        _touch(self._tails, chain[-1], self._tails_max)

    def __len__(self) -> int:
        return len(self._tails)


def _touch(
    table: OrderedDict[BlockHash, int] | OrderedDict[BlockHash, None],
    key: BlockHash,
    entries_max: int,
) -> None:
    table.move_to_end(key)
    if len(table) > entries_max:
        table.popitem(last=False)
