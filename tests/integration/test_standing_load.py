"""Many connections and streams on one gateway process; the long form is in tests/soak."""

from __future__ import annotations

from pathlib import Path

import pytest
from standing_checks import check_stood
from standing_load import Standing, stand

pytestmark = pytest.mark.timeout(60)

SHORT = Standing(duration_s=6.0, streams=200, idle=1000, piece_s=0.5, long_piece_s=0.1, rest_s=2.5)
RSS_MB_MAX = 200


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_connections_and_streams_stay_while_others_come(tmp_path: Path) -> None:
    stood = await stand(SHORT, tmp_path)
    print(stood)
    check_stood(stood, SHORT, rss_mb_max=RSS_MB_MAX)
