"""A stream of 20 minutes, 1,000 others and 5,000 idle connections on one gateway process."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak_scale import SCALE
from standing_checks import check_stood
from standing_load import Standing, stand

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

LONG = Standing(duration_s=1200.0 * SCALE, streams=1000, idle=5000, rest_s=min(50.0, 600 * SCALE))
RSS_MB_MAX = 600


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_nothing_is_dropped_in_twenty_minutes(tmp_path: Path) -> None:
    stood = await stand(LONG, tmp_path)
    print(stood)
    check_stood(stood, LONG, rss_mb_max=RSS_MB_MAX)
