"""What devices can hold between turns, at best."""

from __future__ import annotations

from moongate.simulator.bounds import Pause, device_bounds

PAUSES = [Pause(10.0, 100, 100), Pause(1.0, 100, 100), Pause(100.0, 100, 0)]


def test_with_foresight_the_shortest_pauses_are_kept() -> None:
    assert device_bounds(PAUSES, 100.0, 200).foresight == 0.5
    assert device_bounds(PAUSES, 100.0 + 500.0, 200).foresight == 0.75


def test_without_it_all_is_kept_for_as_long_as_there_is_room() -> None:
    bounds = device_bounds(PAUSES, 500.0, 200)  # 1 s + two of 2 s
    assert round(bounds.kept_s, 6) == 2.0
    assert bounds.recency == 0.5
    assert device_bounds(PAUSES, 1e6, 200).recency == 1.0


def test_no_room_and_nothing_reused_are_no_errors() -> None:
    assert device_bounds(PAUSES, -5.0, 200).foresight == 0.0
    assert device_bounds([], 100.0, 0) == (0.0, 0.0, 0.0)
