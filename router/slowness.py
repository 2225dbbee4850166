"""Instances that are slower than the others of their kind: noticed by their first-byte times, and given less.

Theory of operation. Each first byte is compared with what was expected of it: the prompts before it and its own,
at the rate and the speed that are known (`rates.py`), and a basic time that all of a kind have in common. What is
left is the instance's own: the mean of these ratios, as logarithms, next to that of the middle instance of its
kind. So a fleet that is slow as a whole makes none of its instances slow, and what `rates.py` learns of an
instance's speed isn't counted again. Policies that read no prompts know of no rates, and have this alone.

Bounded and decaying: one observation counts for little, small differences are chance, and what isn't seen any more
is believed less and less, so that an instance that gets nothing is tried again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

SLOWNESS_MAX = 8.0
"""What an instance is found to be slower than the others, at most; so it still gets some requests."""

RATIO_MAX = 8.0
"""What a single observation counts at most."""

CHANCE = math.log(1.5)
"""Differences that are taken as chance; from twice as much on they count in full."""

MEMORY = 16.0
"""Observations of an instance that count, about."""

CAUTION = 3.0
"""The weight, in observations, of an instance's being like the others."""

WEIGHT_MIN = 2.0
"""Instances of which less is known are not compared."""

HALF_LIFE_S = 30.0
"""What is known counts half after so long, if nothing is seen any more."""

REVIEW_S = 1.0
"""How often it is looked at who is slow."""

CHANGE_MIN = 0.05
"""Changes of an instance's slowness that are not worth telling."""

BASE_STEP = 1.05
BASE_MS_PRIOR, BASE_MS_MIN, BASE_MS_MAX = 20.0, 1.0, 60_000.0
"""The basic time goes up or down by a twentieth with each observation: it follows the middle one, whatever the
others are."""

Kind = tuple[str, str]
"""A role and a model: what makes instances comparable."""


@dataclass(slots=True)
class Latency:
    """What is known of one instance's first-byte times."""

    mean: float = 0.0  # of the logarithms of observed over expected
    weight: float = 0.0  # in observations
    slowness: float = 1.0  # next to the others, as told last; 1: like them, or not known

    def observe(self, ratio: float) -> None:
        seen = math.log(min(max(ratio, 1 / RATIO_MAX), RATIO_MAX))
        self.weight = min(self.weight + 1, MEMORY)
        self.mean += (seen - self.mean) / self.weight


@dataclass(slots=True)
class Latencies:
    """What all instances are compared by."""

    _base_ms: dict[Kind, float] = field(default_factory=dict)
    _reviewed_at: float = -math.inf

    def observe(self, latency: Latency, kind: Kind, expected_ms: float, elapsed_ms: float) -> None:
        """Learn from one first byte. `expected_ms`: what of it is known to have been necessary."""
        base_ms = self._base_ms.get(kind, BASE_MS_PRIOR)
        latency.observe(elapsed_ms / (expected_ms + base_ms))
        step = BASE_STEP if elapsed_ms > expected_ms + base_ms else 1 / BASE_STEP
        self._base_ms[kind] = min(max(base_ms * step, BASE_MS_MIN), BASE_MS_MAX)

    def is_due(self, now: float) -> bool:
        return now >= self._reviewed_at + REVIEW_S

    def review(self, latencies: Iterable[tuple[Kind, Latency]], now: float) -> list[Latency]:
        """Find out who is slow. Return those of whom something else is known now than before.

        Cost: O(instances), once in a while.
        """
        kept = 0.5 ** ((now - self._reviewed_at) / HALF_LIFE_S)
        self._reviewed_at = now
        kinds: dict[Kind, list[Latency]] = {}
        for kind, latency in latencies:
            latency.weight *= kept
            kinds.setdefault(kind, []).append(latency)
        self._base_ms = {kind: ms for kind, ms in self._base_ms.items() if kind in kinds}
        changed: list[Latency] = []
        for alike in kinds.values():
            known = [latency.mean for latency in alike if latency.weight >= WEIGHT_MIN]
            middle = statistics.median_low(known) if len(known) > 1 else math.inf
            changed += [latency for latency in alike if _tell(latency, middle)]
        return changed


def _tell(latency: Latency, middle: float) -> bool:
    """Set an instance's slowness. Return whether it is another one."""
    weight = latency.weight
    excess = max(latency.mean - middle, 0.0) * weight / (weight + CAUTION)
    excess = max(min(excess, 2 * (excess - CHANCE)), 0.0)
    slowness = min(math.exp(excess), SLOWNESS_MAX)
    is_same = abs(slowness - latency.slowness) < CHANGE_MIN and slowness != 1.0
    if is_same or slowness == latency.slowness:
        return False
    latency.slowness = slowness
    return True
