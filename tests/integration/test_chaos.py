"""Agents work through a storm of faults: nothing is lost that no engine broke, and nothing stays behind.

The short form of tests/soak/test_storm.py: same faults, same checks, times scaled.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import Plan, run_storm
from storm_checks import check_storm

pytestmark = pytest.mark.timeout(90)

SHORT = Plan(
    seed=8,
    clean_s=3.0,
    fault_every_s=0.75,
    faults=15,
    fault_s=0.4,
    gap_s=0.3,
    calm_s=(0.7, 3.0),
    asked_after=24,
)

P99_SLACK_S = 0.5
"""Of a hundred turns the 99th percentile is the slowest, and machines of tests have other things to do."""


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_a_short_storm_leaves_nothing_behind(tmp_path: Path) -> None:
    report = await run_storm(SHORT, tmp_path)
    print(report)
    check_storm(report, p99_slack_s=P99_SLACK_S)
