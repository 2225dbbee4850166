"""What was put in comes out: the costs of prefills from their times."""

from __future__ import annotations

import random

import pytest

from moongate.simulator.calibration import Prefill, fit_timing
from moongate.simulator.step_timing import StepTiming

TRUE = StepTiming(overhead_ms=12.0, prefill_token_us=90.0, prefill_context_ns=20.0)


def measured(noise: float, count: int = 200) -> list[Prefill]:
    chance = random.Random(1)
    prefills = []
    for _ in range(count):
        tokens, reused = chance.randint(30, 1500), chance.randint(0, 3000)
        ttft_s = TRUE.prefill_s(tokens, reused) * chance.uniform(1 - noise, 1 + noise)
        prefills.append(Prefill(tokens, reused, ttft_s))
    return prefills


def test_exact_times_give_the_exact_costs() -> None:
    fitted = fit_timing(measured(noise=0.0))
    assert fitted.overhead_ms == pytest.approx(12.0)
    assert fitted.prefill_token_us == pytest.approx(90.0)
    assert fitted.prefill_context_ns == pytest.approx(20.0)


def test_noise_is_averaged_out() -> None:
    fitted = fit_timing(measured(noise=0.2))
    assert fitted.prefill_s(800, 1000) == pytest.approx(TRUE.prefill_s(800, 1000), rel=0.05)


def test_no_cost_is_negative() -> None:
    prefills = [Prefill(n, 0, 0.010 + n**0.5 * 1e-3) for n in range(50, 1000, 50)]
    fitted = fit_timing(prefills)
    assert min(fitted.overhead_ms, fitted.prefill_token_us, fitted.prefill_context_ns) >= 0


def test_too_little_to_go_by_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 3"):
        fit_timing(measured(0.0, count=2))
