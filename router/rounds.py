"""Deficit round robin: who is next of several that wait, so that each gets as much as the others.

Each flow is visited in turn, is given a quantum of tokens at each visit, and is served as long as what it has
been given covers what its next request costs. So a flow of large requests waits for several rounds while those
of small ones go on, and none is passed over for good.

What a request costs may turn out afterwards to have been more or less: the difference is taken from the flow, or
given to it. A flow that leaves may go on owing: then it is given its quantum at each visit as if it waited, until
it owes nothing. What it has left over when it leaves is forgotten.

*Source:* Shreedhar and Varghese, "Efficient fair queueing using deficit round robin" (SIGCOMM 1995).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True)
class Rounds(Generic[Key]):
    """The flows that wait, in the order of their next visits, and among them those that left and owe.

    Invariants: what one that left has is less than nothing; none is kept where no other waits.
    """

    quantum: int
    _deficits: dict[Key, int] = field(default_factory=dict)
    _owing: set[Key] = field(default_factory=set)  # of these, those that have left
    _is_topped: bool = False  # the first one has got its quantum of this visit

    def __len__(self) -> int:
        return len(self._deficits) - len(self._owing)

    def __iter__(self) -> Iterator[Key]:
        return (key for key in self._deficits if key not in self._owing)

    def __contains__(self, key: object) -> bool:
        return key in self._deficits and key not in self._owing

    def join(self, key: Key) -> None:
        """Let a flow wait, behind those that do already; one that still owes, at its place."""
        self._owing.discard(key)
        self._deficits.setdefault(key, 0)

    def leave(self, key: Key, *, owes: bool = False) -> None:
        """Nothing of the flow waits any more. `owes`: what it has had too much isn't forgotten."""
        if next(iter(self._deficits)) == key:
            self._is_topped = False
        if owes and self._deficits[key] < 0:
            self._owing.add(key)
        else:
            del self._deficits[key]
        self._forget_all_if_none_waits()

    def correct(self, key: Key, more: int, *, owes: bool = False) -> None:
        """What the flow was charged for has cost so much more (or less, below 0) than it was charged.

        Of one that has left it counts only if it was more, and if it `owes` then.
        """
        if key in self._deficits:
            self._deficits[key] -= more
            if key in self._owing and self._deficits[key] >= 0:
                self._forget(key)
        elif owes and more > 0 and self._deficits:
            self._deficits[key] = -more
            self._owing.add(key)

    def _forget(self, key: Key) -> None:
        """One that has left owes nothing any more."""
        self._owing.discard(key)
        del self._deficits[key]

    def _forget_all_if_none_waits(self) -> None:
        if len(self._deficits) == len(self._owing):
            self._deficits.clear()
            self._owing.clear()

    def find(self, cost_of: Callable[[Key], int | None]) -> Key | None:
        """Return the flow whose turn it is: the same one until it is charged, or can't be served any more.

        `cost_of` None: the flow can't be served now; it is passed over, and given nothing. None: none can.
        Those that left and owe pay with each visit, so ask only where some flow can be served.
        Cost: O(flows), whatever requests cost.
        """
        visited = 0
        while visited < len(self._deficits):
            key = next(iter(self._deficits))
            if key in self._owing:
                visited += self._let_pay(key)
            else:
                if self._is_served(key, cost_of(key)):
                    return key
                self._rotate(key)
                visited += 1
            if visited == len(self._deficits) and self._skip_rounds(cost_of):
                visited = 0
        return None

    def _is_served(self, key: Key, cost: int | None) -> bool:
        """Give the first one its quantum of this visit, if it can be served, and tell whether that is enough."""
        if cost is None:
            return False
        if not self._is_topped:
            self._deficits[key] += self.quantum
            self._is_topped = True
        return self._deficits[key] >= cost

    def charge(self, key: Key, cost: int) -> None:
        """The flow that was found is served."""
        assert self._deficits[key] >= cost, (key, cost)
        self._deficits[key] -= cost

    def _let_pay(self, key: Key) -> int:
        """Visit the first one, which has left and owes. Return how many visited ones are kept for it: 1 or 0."""
        self._deficits[key] += self.quantum
        if self._deficits[key] >= 0:
            self._forget(key)
            return 0
        self._rotate(key)
        return 1

    def _rotate(self, key: Key) -> None:
        self._deficits[key] = self._deficits.pop(key)
        self._is_topped = False

    def _skip_rounds(self, cost_of: Callable[[Key], int | None]) -> bool:
        """Let the rounds pass in which nobody would be served. Return whether anybody can be at all."""
        costs = {key: cost for key in self if (cost := cost_of(key)) is not None}
        if not costs:
            return False
        needed = (-((self._deficits[key] - cost) // self.quantum) for key, cost in costs.items())
        skipped = min(needed) - 1
        for key in (*costs, *self._owing):
            self._deficits[key] += skipped * self.quantum
        for key in [key for key in self._owing if self._deficits[key] >= 0]:
            self._forget(key)
        return True
