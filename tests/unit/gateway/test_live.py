"""Frames for viewers, of a view that a test controls."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from moongate.gateway.admin.live import SHARE_MAX, VIEWERS_MAX, LiveFeed, TooManyViewers

pytestmark = pytest.mark.asyncio

TICK_S = 0.005


class View:
    """Two parts, one of which a test changes."""

    def __init__(self) -> None:
        self.made = 0
        self.value: Any = 0

    def parts(self) -> dict[str, Any]:
        self.made += 1
        if isinstance(self.value, Exception):
            raise self.value
        return {"same": [1], "value": self.value}

    def now_s(self) -> float:
        return float(self.made)


def make_feed(view: View) -> LiveFeed:
    return LiveFeed(view, lambda: False, tick_s=TICK_S)


async def take(frames: AsyncGenerator[bytes, None]) -> dict[str, Any]:
    frame = await anext(frames)
    head, data, *rest = frame.split(b"\n")
    assert (head, rest) == (b"event: frame", [b"", b""])
    taken: dict[str, Any] = json.loads(data.removeprefix(b"data: "))
    return taken


async def test_the_first_frame_is_whole_and_the_next_has_what_changed() -> None:
    view = View()
    frames = make_feed(view).watch()
    first = await take(frames)
    assert first == {"now_s": 1.0, "is_whole": True, "parts": {"same": [1], "value": 0}}
    view.value = 5
    second = await take(frames)
    assert second == {"now_s": 2.0, "is_whole": False, "parts": {"value": 5}}
    assert (await take(frames))["parts"] == {}
    await frames.aclose()


async def test_nothing_is_made_while_nobody_watches() -> None:
    view = View()
    feed = make_feed(view)
    frames = feed.watch()
    await take(frames)
    await frames.aclose()
    made = view.made
    await asyncio.sleep(TICK_S * 5)
    assert (view.made, feed.viewers) == (made, 0)
    again = feed.watch()
    assert (await take(again))["is_whole"]
    await again.aclose()


async def test_all_viewers_get_the_same_frame_made_once() -> None:
    view = View()
    feed = make_feed(view)
    watching = [feed.watch() for _ in range(10)]
    whole = [await anext(frames) for frames in watching]
    assert len(set(whole)) == 1
    assert view.made == 1
    changes = await asyncio.gather(*(anext(frames) for frames in watching))
    assert len({id(frame) for frame in changes}) == 1
    for frames in watching:
        await frames.aclose()


async def test_a_viewer_that_is_behind_gets_one_whole_frame_and_nothing_old() -> None:
    view = View()
    feed = make_feed(view)
    quick, slow = feed.watch(), feed.watch()
    await take(slow)
    await take(quick)
    for number in range(4):
        view.value = number
        await take(quick)
    late = await take(slow)
    assert late["is_whole"]
    assert late["parts"]["value"] == 3
    await quick.aclose()
    await slow.aclose()


async def test_frames_that_take_long_are_made_less_often() -> None:
    view = View()
    making_s = 0.02

    class Slow(View):
        def parts(self) -> dict[str, Any]:
            end = asyncio.get_running_loop().time() + making_s
            while asyncio.get_running_loop().time() < end:
                pass
            return super().parts()

    view = Slow()
    frames = make_feed(view).watch()
    await take(frames)
    await take(frames)
    began = asyncio.get_running_loop().time()
    await take(frames)
    assert asyncio.get_running_loop().time() - began >= making_s / SHARE_MAX - making_s
    await frames.aclose()


async def test_one_viewer_too_many_is_refused() -> None:
    feed = make_feed(View())
    watching = [feed.watch() for _ in range(VIEWERS_MAX)]
    for frames in watching:
        await take(frames)
    with pytest.raises(TooManyViewers):
        await anext(feed.watch())
    for frames in watching:
        await frames.aclose()


async def test_streams_end_once_the_gateway_stops() -> None:
    is_stopping = False
    feed = LiveFeed(View(), lambda: is_stopping, tick_s=TICK_S)
    frames = feed.watch()
    await take(frames)
    is_stopping = True
    async with asyncio.timeout(2):
        rest = [frame async for frame in frames]
    assert len(rest) <= 2
    assert feed.viewers == 0


async def test_a_bug_in_a_part_does_not_end_the_stream(caplog: pytest.LogCaptureFixture) -> None:
    view = View()
    frames = make_feed(view).watch()
    await take(frames)
    with caplog.at_level(logging.ERROR):
        view.value = ZeroDivisionError("a bug")
        async with asyncio.timeout(5):
            while "the live view could not be made" not in caplog.text:
                await asyncio.sleep(TICK_S)
    view.value = 7
    assert (await take(frames))["parts"]["value"] == 7
    await frames.aclose()
