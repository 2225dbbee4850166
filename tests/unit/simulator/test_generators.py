"""Made-up conversations have the statistics that they are made for."""

from __future__ import annotations

import itertools
import statistics

import pytest

from moongate.simulator.conversations import Script
from moongate.simulator.generators import codex_like


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_codex_like_conversations_have_the_published_statistics(seed: int) -> None:
    scripts = codex_like(seed).scripts
    turns = [turn for script in scripts for turn in script.turns]
    pairs = [pair for script in scripts for pair in itertools.pairwise(script.turns)]
    tokens = sum(turn.prompt_tokens for turn in turns)
    assert len(scripts) == 610
    assert statistics.median(len(s.turns) for s in scripts) == pytest.approx(33, abs=1.5)
    assert statistics.median(s.turns[0].prompt_tokens for s in scripts) == pytest.approx(
        12_000, rel=0.05
    )
    assert at_turn(30, scripts) == pytest.approx(80_000, rel=0.08)
    assert max(turn.prompt_tokens for turn in turns) > 180_000
    growth = statistics.fmean(b.prompt_tokens - a.prompt_tokens for a, b in pairs)
    assert growth == pytest.approx(2_242, rel=0.03)
    assert tokens / sum(turn.answer_tokens for turn in turns) == pytest.approx(131, rel=0.04)
    assert sum(a.prompt_tokens for a, _ in pairs) / tokens == pytest.approx(0.942, abs=0.015)
    gaps_s = sorted(b.gap_s for _, b in pairs)
    assert gaps_s[len(gaps_s) // 2] == pytest.approx(5.2, rel=0.05)
    assert gaps_s[int(len(gaps_s) * 0.99)] == pytest.approx(81.4, rel=0.1)


def at_turn(number: int, scripts: list[Script]) -> float:
    long = [script.turns[number - 1] for script in scripts if len(script.turns) >= number]
    return statistics.median(turn.prompt_tokens for turn in long)


def test_the_same_seed_makes_the_same_conversations() -> None:
    assert codex_like(5, 10).scripts == codex_like(5, 10).scripts
    assert codex_like(5, 10).scripts != codex_like(6, 10).scripts
