"""How fast prompts are computed: learned from first-token times, for the fleet and for each instance.

A token costs more the more lie before it (attention), so a rate alone would call an instance slow that has
long conversations. Both costs are learned together; what an instance does beyond them is its own speed.

Robust and bounded: a single observation counts for little once others are known, whatever it says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moongate.router.cost import OBSERVED_TOKENS_MIN, RATE_BOUND, LearnedRate, span_tokens

FITTED_AFTER = 12
"""Observations from which on the cost of attention is told apart, and instances are compared."""

FORGETTING = 0.98
"""What an observation counts after the next one: the last fifty or so make the fit."""

OUTLIER_FACTOR = 3.0
"""An observation counts as at most so many times what was expected, or as that part of it: one stall of an
engine, or one prompt that was cached after all, moves little."""

SPEED_BOUND = 4.0
"""What an instance is found to be faster or slower than the fleet, at most."""

SPEED_CHANCE = 0.3
"""Differences that are taken as chance, as logarithms: a third. Else what an instance happens to have would
send its sessions away."""

SPEED_CAUTION = 8
"""The weight, in observations, of an instance's being like the others."""

SPEED_MEMORY = 32
"""Observations of an instance that count, about."""


@dataclass(slots=True)
class RelativeSpeed:
    """How fast an instance is next to its fleet: 1 as long as little is known of it.

    A mean of logarithms, drawn towards 1 by what isn't known, so that a few unlucky observations don't
    keep work, and so better observations, away from it.
    """

    mean: float = 0.0
    weight: float = 0.0

    @property
    def factor(self) -> float:
        believed = self.mean * self.weight / (self.weight + SPEED_CAUTION)
        if abs(believed) <= SPEED_CHANCE:
            return 1.0
        return math.exp(believed - math.copysign(SPEED_CHANCE, believed))

    def observe(self, ratio: float) -> None:
        """Learn from one prefill: the time that was expected of the fleet over the time it took."""
        seen = math.log(min(max(ratio, 1 / SPEED_BOUND), SPEED_BOUND))
        self.weight = min(self.weight + 1, SPEED_MEMORY)
        self.mean += (seen - self.mean) / self.weight


@dataclass(slots=True)
class PrefillRate:
    """The cost of prompt tokens on an instance of weight 1.

    Until enough is known a plain rate; then the least squares of relative errors of two costs: of a token, and
    of a token and one before it.
    """

    plain: LearnedRate
    count: int = 0
    token_ms: float = 0.0  # 0: not fitted yet
    context_ms: float = 0.0
    _uu: float = 0.0
    _uv: float = 0.0
    _vv: float = 0.0
    _u: float = 0.0
    _v: float = 0.0

    @property
    def per_ms(self) -> float:
        """Return how many tokens of a prompt's beginning take a ms."""
        return 1 / self.token_ms if self.token_ms else self.plain.per_ms

    @property
    def context_tokens(self) -> float:
        """Return how many tokens before it make a token cost twice as much."""
        return self.token_ms / self.context_ms if self.context_ms else math.inf

    @property
    def is_fitted(self) -> bool:
        return bool(self.token_ms)

    def expected_ms(self, tokens: float, reused_tokens: float) -> float:
        """Return what it takes to compute tokens that come after others."""
        return span_tokens(reused_tokens, reused_tokens + tokens, self.context_tokens) / self.per_ms

    def observe(self, tokens: int, reused_tokens: int, elapsed_ms: float) -> None:
        """Learn from a prefill that wasn't held up by others."""
        if tokens < OBSERVED_TOKENS_MIN or elapsed_ms <= 0:
            return
        self.plain.observe(tokens, elapsed_ms)
        if self.is_fitted:
            expected_ms = self.expected_ms(tokens, reused_tokens)
            least, most = expected_ms / OUTLIER_FACTOR, expected_ms * OUTLIER_FACTOR
            elapsed_ms = min(max(elapsed_ms, least), most)
        u, v = tokens / elapsed_ms, tokens * (reused_tokens + tokens / 2) / elapsed_ms
        self._uu = self._uu * FORGETTING + u * u
        self._uv = self._uv * FORGETTING + u * v
        self._vv = self._vv * FORGETTING + v * v
        self._u = self._u * FORGETTING + u
        self._v = self._v * FORGETTING + v
        self.count += 1
        if self.count >= FITTED_AFTER:
            self._fit()

    def _fit(self) -> None:
        determinant = self._uu * self._vv - self._uv**2
        token_ms = context_ms = -1.0
        if determinant > 1e-9 * self._uu * self._vv:
            token_ms = (self._u * self._vv - self._v * self._uv) / determinant
            context_ms = (self._v * self._uu - self._u * self._uv) / determinant
        if context_ms < 0:
            token_ms, context_ms = self._u / self._uu, 0.0
        # Attention alone explains nothing: a token always costs something by itself.
        least_ms = 1 / (self.plain.prior * RATE_BOUND)
        if token_ms < least_ms:
            token_ms, context_ms = least_ms, max(self._v - least_ms * self._uv, 0.0) / self._vv
        self.token_ms = min(token_ms, RATE_BOUND / self.plain.prior)
        self.context_ms = context_ms
