"""Where a prefix in the pool ends, found with few questions: pure.

A pool evicts from any end of a prefix, but mostly all of one or its tail, so "is it there" is nearly
monotonic along a chain: search as if it were, in batches, and confirm just below the end.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence

FANOUT = 4
"""Positions asked for at a time once both ends of the span are known: divides it by five."""

EXHAUSTIVE_KEYS = 48
"""So few keys are all asked for at once: one round trip, and holes can't hide."""

ROUNDS_MAX = 8
"""A search that takes longer than this (two million blocks) is led astray by holes."""

NEAR = (1, 2, 5, 17, 65)
FAR = (257, 1025, 4097, 16_385)
"""Distances at which a span is looked for: four times as far each time, and from a place that is likely
not too far."""

CONFIRMED = (2, 4)
"""Blocks that are looked at as well: so many before the end, as it is known by then."""

Questions = Generator[Sequence[int], Collection[int], int]
"""Yields positions to ask for, is sent those of them that are there, returns the leading blocks."""


def search_prefix(count: int, likely: int | None = None) -> Questions:
    """Return how many leading blocks of `count` are there.

    `likely`: how many there probably are, such as the length of the turn before; None: all but a tail.
    Takes at most 4 rounds and 24 questions where the end lies within 64 blocks of `likely`, or without
    it within 64 blocks of the chain's end. Where it sees holes, the first one ends the prefix.
    """
    span = _Span(count)
    asked = _first_positions(count, likely)
    rounds = 0
    while asked and rounds < ROUNDS_MAX:
        rounds += 1
        span.note(asked, (yield asked))
        asked = span.next_positions()
    return span.low


def _first_positions(count: int, likely: int | None) -> list[int]:
    if likely is None or likely >= count:
        below = [count - distance for distance in (*NEAR, *FAR)]
        return sorted({p for p in (0, *below) if 0 <= p < count})
    around = [likely - distance for distance in NEAR] + [likely + d - 1 for d in NEAR]
    return sorted({p for p in (*around, likely - FAR[1], count - 1) if 0 <= p < count})


class _Span:
    """What is known: the block before `low` is there, that at `high` is not, or the chain ends there."""

    def __init__(self, count: int) -> None:
        self.low = 0
        self.high = count
        self._asked: set[int] = set()
        self._confirmed_high: int | None = (
            None  # where the span ended when some before it were asked
        )

    def note(self, asked: Sequence[int], there: Collection[int]) -> None:
        """Take in an answer. The first block that is missing ends the prefix, whatever follows it."""
        self._asked.update(asked)
        missing = [p for p in asked if p not in there]
        self.high = min([self.high, *missing])
        if self.low > self.high:
            self.low = 0  # a hole in what seemed to be there; below it nothing is certain
        self.low = max([self.low, *(p + 1 for p in asked if p in there and p < self.high)])

    def next_positions(self) -> list[int]:
        """Return positions that divide the span evenly; at the last, all of it and some before it."""
        unknown = self.high - self.low
        if unknown > FANOUT:
            return [self.low + unknown * (n + 1) // (FANOUT + 1) for n in range(FANOUT)]
        span = list(range(self.low, self.high))
        if self._confirmed_high is not None and self._confirmed_high - self.low <= FANOUT:
            return span  # what was looked at is near enough
        self._confirmed_high = self.high
        before = (self.low - distance for distance in CONFIRMED)
        return sorted([*(p for p in before if p >= 0 and p not in self._asked), *span])
