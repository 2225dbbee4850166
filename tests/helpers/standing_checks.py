"""What must be so of a standing load, however long it was."""

from __future__ import annotations

from standing_load import Standing, Stood


def check_stood(stood: Stood, load: Standing, *, rss_mb_max: float) -> None:
    told = str(stood)
    assert not stood.dropped, told
    assert stood.pieces_missing == 0, told
    assert stood.streams_whole == load.streams + 1, told
    assert stood.long_pieces == round(load.duration_s / load.long_piece_s), told
    assert stood.idle_requests % load.idle == 0, told
    assert stood.idle_requests >= load.idle, told
    assert stood.counted == load.streams + 1, told
    assert stood.inflight == 0, told
    assert max(stood.gateway_bytes) <= rss_mb_max * 1e6, told
