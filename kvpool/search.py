"""Where a prefix in the pool ends, found with few questions: pure.

A pool evicts from any end of a prefix, but mostly all of one or its tail, so "is it there" is nearly
monotonic along a chain: search as if it were, in batches, and confirm just below the end. The first
block is always looked at, since what was stored first is mostly evicted first.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence

FANOUT = 4
"""Positions asked for at a time once both ends of the span are known: divides it by five."""

HOLES_FANOUT = 32
"""And where holes were seen: more of them are likely, and each would cost a round."""

ROUNDS_MAX = 32
"""A search that takes longer than this is led astray by holes; it ends with what was seen."""

BELOW = (1, 2, 5, 17, 65)
"""Distances before the likely end at which a span is looked for: four times as far each time."""

ABOVE = (0, 4, 16, 64)
"""And behind it."""

FAR = (257, 1025, 4097, 16_385)
"""So on, where nothing is known but that it is mostly all of the chain."""

CONFIRMED = (2, 5)
"""Blocks so many before the end, as it is known by then, are looked at as well."""

CONFIRMED_WITHIN = FANOUT + max(CONFIRMED)
"""So near to the end, two blocks that were seen there are enough."""

Questions = Generator[Sequence[int], Collection[int], int]
"""Yields positions to ask for, is sent those of them that are there, returns the leading blocks."""


def search_prefix(count: int, likely: int | None = None) -> Questions:
    """Return how many leading blocks of `count` are there, as if there were no holes.

    The last of them was seen there, and the one behind it was seen missing or the chain ends. Holes that
    aren't asked for aren't noticed; the first one that is ends the prefix.
    `likely`: how many there probably are, such as the length of the turn before; None: all but a tail.
    Cost: at most 4 rounds and 24 questions where the end lies within 64 blocks of `likely` or of the
    chain's end; 1 round where it is `likely`, all, or nothing.
    """
    span = Span(count)
    asked = first_positions(count, likely)
    for _ in range(ROUNDS_MAX):
        if not asked:
            break
        span.note(asked, (yield asked))
        asked = span.next_positions()
    return span.low


def first_positions(count: int, likely: int | None) -> list[int]:
    """Return what to ask for first."""
    if likely is None or likely >= count:
        positions = [0, *(count - distance for distance in (*BELOW, *FAR))]
    else:
        positions = [
            0,
            *(likely - distance for distance in BELOW),
            *(likely + distance for distance in ABOVE),
            *(count - distance for distance in (1, 17, 65)),
        ]
    return sorted({p for p in positions if 0 <= p < count})


class Span:
    """What is known: the block before `low` is there, that at `high` is not, or the chain ends there.

    `low` 0: no block before `high` was seen there.
    """

    def __init__(self, count: int) -> None:
        self.low = 0
        self.high = count
        self._there: set[int] = set()
        self._has_holes = False

    def note(self, asked: Sequence[int], there: Collection[int]) -> None:
        """Take in an answer. The first block that is missing ends the prefix, whatever follows it."""
        self._there.update(p for p in asked if p in there)
        self.high = min([self.high, *(p for p in asked if p not in there)])
        self._has_holes |= max(self._there, default=-1) > self.high
        self.low = max((p + 1 for p in self._there if p < self.high), default=0)

    def next_positions(self) -> list[int]:
        """Return positions that divide the span evenly; at the last, all of it and some before it."""
        unknown, fanout = self.high - self.low, HOLES_FANOUT if self._has_holes else FANOUT
        if unknown > fanout:
            return [self.low + unknown * (n + 1) // (fanout + 1) for n in range(fanout)]
        return sorted([*self._confirming(), *range(self.low, self.high)])

    def _confirming(self) -> list[int]:
        """Return what to look at before the end: where there are holes, further away each time."""
        distances = (*BELOW, *FAR) if self._has_holes else CONFIRMED
        near = range(max(self.low - CONFIRMED_WITHIN, 0), self.low - 1)
        seen = sum(position in self._there for position in near)
        if seen >= min(len(CONFIRMED), len(near)):
            return []
        before = (self.low - distance for distance in distances)
        return [p for p in before if p >= 0 and p not in self._there]
