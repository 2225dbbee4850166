"""Deficit round robin: who is next of several that wait, so that each gets as much as the others.

Each flow is visited in turn, is given a quantum of tokens at each visit, and is served as long as what it has
been given covers what its next request costs. So a flow of large requests waits for several rounds while those
of small ones go on, and none is passed over for good.

*Source:* Shreedhar and Varghese, "Efficient fair queueing using deficit round robin" (SIGCOMM 1995).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True)
class Rounds(Generic[Key]):
    """The flows that wait, in the order of their next visits.

    Invariant: a flow's deficit is less than what its next request costs plus a quantum.
    """

    quantum: int
    _deficits: dict[Key, int] = field(default_factory=dict)
    _is_topped: bool = False  # the first one has got its quantum of this visit

    def __len__(self) -> int:
        return len(self._deficits)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._deficits)

    def __contains__(self, key: object) -> bool:
        return key in self._deficits

    def join(self, key: Key) -> None:
        """Let a flow wait, behind those that do already. What it once had left is forgotten."""
        self._deficits.setdefault(key, 0)

    def leave(self, key: Key) -> None:
        if next(iter(self._deficits)) == key:
            self._is_topped = False
        del self._deficits[key]

    def find(self, cost_of: Callable[[Key], int | None]) -> Key | None:
        """Return the flow whose turn it is: the same one until it is charged, or can't be served any more.

        `cost_of` None: the flow can't be served now; it is passed over, and given nothing. None: none can.
        Cost: O(flows), whatever requests cost.
        """
        visited = 0
        while visited < len(self._deficits):
            key = next(iter(self._deficits))
            cost = cost_of(key)
            if cost is not None:
                if not self._is_topped:
                    self._deficits[key] += self.quantum
                    self._is_topped = True
                if self._deficits[key] >= cost:
                    return key
            self._rotate(key)
            visited += 1
            if visited == len(self._deficits) and self._skip_rounds(cost_of):
                visited = 0
        return None

    def charge(self, key: Key, cost: int) -> None:
        """The flow that was found is served."""
        assert self._deficits[key] >= cost, (key, cost)
        self._deficits[key] -= cost

    def _rotate(self, key: Key) -> None:
        self._deficits[key] = self._deficits.pop(key)
        self._is_topped = False

    def _skip_rounds(self, cost_of: Callable[[Key], int | None]) -> bool:
        """Let the rounds pass in which nobody would be served. Return whether anybody can be at all."""
        costs = {key: cost for key in self._deficits if (cost := cost_of(key)) is not None}
        if not costs:
            return False
        needed = (-((self._deficits[key] - cost) // self.quantum) for key, cost in costs.items())
        skipped = min(needed) - 1
        for key in costs:
            self._deficits[key] += skipped * self.quantum
        return True
