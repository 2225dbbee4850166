"""Which request continues which, told by the prompts alone.

A turn of an agent session resends the prompt of the turn before, so the last full block of that
earlier prompt (its tail) is among the new prompt's blocks. No session key is needed, and forks and
sub-agents are found the same way. A tail from which many requests depart is no session but a shared
beginning (a system prompt); so departures are counted.

Bounded: the least recently used tails and departure points are forgotten.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, NewType

from moongate.router.model import BlockHash, Holder

SessionNumber = NewType("SessionNumber", int)
"""Tells sessions apart within one router; says nothing of the keys that clients give."""

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

    @property
    def continues(self) -> bool:
        """Tell whether it is the next turn of a session; a fork is another session's first."""
        return self.history_blocks > 0 and self.departures == 0


class RecentSessions:
    """Where the last sessions began: each will come back there, turn after turn, until it ends."""

    def __init__(self) -> None:
        self._holders: OrderedDict[SessionNumber, Holder] = OrderedDict()
        self._counts: Counter[Holder] = Counter()
        self._elsewhere: dict[Holder, int] = {}  # begun by other gateways

    def note(self, session: SessionNumber, holder: Holder) -> tuple[Holder, ...]:
        """Note that a session began on this holder. Return those whose count has changed."""
        self._holders[session] = holder
        self._counts[holder] += 1
        if len(self._holders) <= SESSIONS_REMEMBERED:
            return (holder,)
        _, oldest = self._holders.popitem(last=False)
        self._discount(oldest)
        return holder, oldest

    def end(self, session: SessionNumber) -> tuple[Holder, ...]:
        """Note that a session will not come back. Return those whose count has changed."""
        holder = self._holders.pop(session, None)
        if holder is None:
            return ()
        self._discount(holder)
        return (holder,)

    def count(self, holder: Holder) -> int:
        return self._counts.get(holder, 0) + self._elsewhere.get(holder, 0)

    def count_own(self, holder: Holder) -> int:
        """Return how many began here by way of this gateway."""
        return self._counts.get(holder, 0)

    def set_elsewhere(self, holder: Holder, count: int) -> None:
        """Note how many began there by way of all other gateways together."""
        if count:
            self._elsewhere[holder] = count
        else:
            self._elsewhere.pop(holder, None)

    @property
    def holders(self) -> list[Holder]:
        """Return those on which some began by way of this gateway."""
        return [*self._counts]

    def _discount(self, holder: Holder) -> None:
        self._counts[holder] -= 1
        if not self._counts[holder]:
            del self._counts[holder]


class Lineages:
    """The tails of recent prompts. `tails_max` bounds them, and the departure points as well."""

    def __init__(self, tails_max: int = 65_536) -> None:
        self._tails_max = tails_max
        self._tails: OrderedDict[BlockHash, SessionNumber] = OrderedDict()
        self._departures: OrderedDict[BlockHash, int] = OrderedDict()
        self._sessions = 0

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

    def note(
        self,
        chain: Sequence[BlockHash],
        lineage: Lineage,
        shared_blocks: int,
        *,
        is_last: bool = False,
    ) -> SessionNumber | None:
        """Remember a prompt that was forwarded: its departure (as found), and its tail.

        Returns which session it belongs to, None if nothing is known of the prompt. `is_last`: the
        session ends with it, so nothing will go on from its tail.
        """
        if not chain:
            return None
        depth = lineage.history_blocks or shared_blocks
        session = self._tails.get(chain[depth - 1]) if lineage.continues else None
        if session is None:
            self._sessions += 1
            session = SessionNumber(self._sessions)
        if depth:
            self._departures[chain[depth - 1]] = lineage.departures + 1
            _touch(self._departures, chain[depth - 1], self._tails_max)
        if not is_last:
            self._tails[chain[-1]] = session
            _touch(self._tails, chain[-1], self._tails_max)
        return session

    def note_elsewhere(self, tail: BlockHash) -> None:
        """Remember the end of a prompt that another gateway forwarded: the next turn may come here."""
        if tail not in self._tails:
            self._sessions += 1
            self._tails[tail] = SessionNumber(self._sessions)
        _touch(self._tails, tail, self._tails_max)

    def __len__(self) -> int:
        return len(self._tails)


def _touch(
    table: OrderedDict[BlockHash, int] | OrderedDict[BlockHash, SessionNumber],
    key: BlockHash,
    entries_max: int,
) -> None:
    table.move_to_end(key)
    if len(table) > entries_max:
        table.popitem(last=False)
