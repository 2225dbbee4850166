"""A step's timing from what was measured of a real engine: least squares of relative errors. Pure.

Prompts that were sent one at a time tell what a prefill costs: something at all, something for each token,
something for each token and each one before it. A term that would come out negative is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moongate.simulator.step_timing import StepTiming


class Prefill(NamedTuple):
    """One prompt, alone on its engine, and the time to its first token."""

    tokens: int  # that were computed
    reused_tokens: int
    ttft_s: float

    @property
    def terms(self) -> tuple[float, float, float]:
        """Return what the three costs are multiplied with."""
        return 1.0, float(self.tokens), self.tokens * (self.reused_tokens + self.tokens / 2)


def fit_timing(prefills: Sequence[Prefill]) -> StepTiming:
    """Return the timing that explains these prefills best. Raises ValueError if they are too few."""
    if len(prefills) < 3:
        raise ValueError(f"at least 3 prefills are wanted, got {len(prefills)}")
    used = [0, 1, 2]
    while True:
        costs = _solve(prefills, used)
        worst = min(costs, key=lambda n: costs[n])
        if costs[worst] >= 0:
            break
        used.remove(worst)
    overhead_s, token_s, context_s = (costs.get(n, 0.0) for n in range(3))
    return StepTiming(
        overhead_ms=overhead_s * 1e3,
        prefill_token_us=token_s * 1e6,
        prefill_context_ns=context_s * 1e9,
    )


def _solve(prefills: Sequence[Prefill], used: Sequence[int]) -> dict[int, float]:
    """Return the costs of the used terms (s): where the squares of relative errors are least."""
    rows = [[p.terms[n] / p.ttft_s for n in used] for p in prefills]
    size = len(used)
    matrix = [
        [sum(row[i] * row[j] for row in rows) for j in range(size)] + [sum(row[i] for row in rows)]
        for i in range(size)
    ]
    for i in range(size):  # Gauss; the matrix is positive definite unless all prompts are alike
        if not matrix[i][i]:
            raise ValueError("prompts of different lengths are wanted")
        matrix[i] = [value / matrix[i][i] for value in matrix[i]]
        for j in range(size):
            if j != i:
                factor = matrix[j][i]
                matrix[j] = [a - factor * b for a, b in zip(matrix[j], matrix[i], strict=True)]
    return {n: matrix[i][-1] for i, n in enumerate(used)}
