"""Three minutes of faults, one every five seconds, under 64 agents; tests/helpers/chaos.py says how."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import Plan, run_storm
from soak_scale import SCALE
from storm_checks import check_storm
from storm_faults import FAULTS

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

GROWTH_MB_PER_MINUTE_MAX = 6.0
"""While conversations are new all the time, and what is remembered of them is bounded."""


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_a_storm_leaves_nothing_behind(tmp_path: Path) -> None:
    plan = Plan(clean_s=48.0 * SCALE, faults=max(round(36 * SCALE), len(FAULTS)))
    report = await run_storm(plan, tmp_path)
    print(report)
    check_storm(report)
    assert report.growth.slope_mb_per_minute() <= GROWTH_MB_PER_MINUTE_MAX, str(report)
