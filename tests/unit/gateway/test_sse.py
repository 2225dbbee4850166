"""A stream of bytes comes out whole, in whole events."""

import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moongate.gateway.dialects.sse import (
    HELD_BYTES_MAX,
    EventCutter,
    EventSplitter,
    ends_stream,
    split_events,
)

BREAKS = ("\n\n", "\r\n\r\n", "\r\r")


def fed(*chunks: bytes) -> tuple[list[bytes], bytes]:
    """Return what came out for each chunk, and what is held at the end."""
    splitter = EventSplitter()
    return [splitter.feed(chunk) for chunk in chunks], splitter.held


def test_half_an_event_waits_for_its_other_half() -> None:
    assert fed(b"data: a", b"b\n", b"\ndata: c") == ([b"", b"", b"data: ab\n\n"], b"data: c")


def test_several_events_come_out_together() -> None:
    assert fed(b"data: a\n\ndata: b\n\nda") == ([b"data: a\n\ndata: b\n\n"], b"da")


@pytest.mark.parametrize("end", [end.encode() for end in BREAKS])
def test_each_form_of_empty_line_ends_an_event(end: bytes) -> None:
    assert fed(b"data: a" + end) == ([b"data: a" + end], b"")


@pytest.mark.parametrize("cut", range(1, 4))
def test_an_empty_line_may_come_in_pieces(cut: int) -> None:
    end = b"\r\n\r\n"
    out, held = fed(b"data: a" + end[:cut], end[cut:])
    assert (b"".join(out), held) == (b"data: a\r\n\r\n", b"")


def test_c03_a_character_cut_in_the_middle_is_whole_again() -> None:
    event = "data: 北京🙂\n\n".encode()
    out, held = fed(*(event[n : n + 1] for n in range(len(event))))
    assert ([chunk for chunk in out if chunk], held) == ([event], b"")


def test_an_event_without_end_is_not_gathered_without_end() -> None:
    piece = b"x" * (HELD_BYTES_MAX // 2 + 1)
    out, held = fed(b"data: a\n\n" + piece, piece, b"y")
    assert out == [b"data: a\n\n", piece + piece, b""]
    assert held == b"y"


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1, max_size=8)
EVENTS = st.builds(
    lambda lines, end: end[: len(end) // 2].join(lines) + end,
    st.lists(TEXTS.map("data: {}".format), min_size=1, max_size=3),
    st.sampled_from(BREAKS),
)


@settings(deadline=None)
@given(events=st.lists(EVENTS, max_size=5), rest=st.just("") | TEXTS, data=st.data())
def test_any_split_gives_the_same_bytes_in_whole_events(
    events: list[str], rest: str, data: st.DataObject
) -> None:
    stream = "".join([*events, rest]).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    out, held = fed(*pieces)
    assert b"".join(out) + held == stream
    ends = {len("".join(events[:n]).encode()) for n in range(len(events) + 1)}
    given_out = 0
    for chunk in out:
        given_out += len(chunk)
        assert given_out in ends
    assert held == rest.encode()


ENDS = [
    b"data: [DONE]\n\n",
    b"data:[DONE]\n\n",
    b'data: {"error":{"message":"x"}}\n\n',
    b'data: {"error": {"message":"x"}}\n\n',
    b'data: {"error":"x"}\n\n',
    b"event: error\ndata: {}\n\n",
    b"event:error\ndata: {}\n\n",
    b"event: message_stop\ndata: {}\n\n",
    b"event: response.completed\ndata: {}\n\n",
    b"event: response.failed\ndata: {}\n\n",
    b"event: response.incomplete\ndata: {}\n\n",
]


@pytest.mark.parametrize("end", ENDS)
def test_c12_each_family_of_apis_has_its_ends(end: bytes) -> None:
    before = b'data: {"x":1}\n\n'
    assert ends_stream(end)
    assert ends_stream(before + end)
    assert ends_stream(end + b": a comment\n\n")
    assert ends_stream((before + end).replace(b"\n", b"\r\n"))


@pytest.mark.parametrize(
    "events",
    [
        b"",
        b": ping\n\n",
        b'data: {"content":"say data: [DONE]"}\n\n',
        b'data: {"content":"\\ndata: [DONE]\\n"}\n\n',
        b'data: {"error":null,"choices":[]}\n\n',
        b'data: {"error": null}\n\n',
        b'data: {"errors":{"x":1}}\n\n',
        b'data: {"choices":[],"error":{"message":"x"}}\n\n',
        b"event: error_count\ndata: {}\n\n",
        b"event: message_stopped\ndata: {}\n\n",
        b"event: response.completed_part\ndata: {}\n\n",
        b"event: response.output_text.done\ndata: {}\n\n",
        b"event: message_start\ndata: {}\n\n",
        b"x data: [DONE]\n\n",
    ],
)
def test_what_only_looks_like_an_end_is_none(events: bytes) -> None:
    assert not ends_stream(events)


def test_a_piece_of_a_long_event_is_no_end_since_its_rest_follows() -> None:
    piece = b"event: response.completed\ndata: " + b"x" * (HELD_BYTES_MAX + 1)
    out, _ = fed(piece, b"\n\n")
    assert out == [piece, b"\n\n"]
    assert [ends_stream(events) for events in out] == [False, False]


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_events_are_split_without_losing_a_byte(end: bytes) -> None:
    first, second, begun = b"data: 1" + end, b"event: x\ndata: 2" + end, b"data: 3"
    assert split_events(first + second + begun) == ([first, second], begun)
    assert split_events(first) == ([first], b"")
    assert split_events(begun) == ([], begun)
    assert split_events(b"") == ([], b"")


# --- what a long event costs ----------------------------------------------------------------------


def seconds_of(feed: Callable[[bytes], object], pieces: int) -> float:
    """Return the processor time of a long event that comes in pieces of 4 KiB."""
    piece = b"x" * 4096
    began = time.process_time()
    for _ in range(pieces):
        feed(piece)
    feed(b"\n\n")
    return time.process_time() - began


@pytest.mark.parametrize(
    "feeding", [lambda: EventSplitter(1 << 30).feed, lambda: EventCutter().feed]
)
def test_an_event_of_eight_times_the_size_costs_about_eight_times_as_much(
    feeding: Callable[[], Callable[[bytes], object]],
) -> None:
    """Where each piece were looked at with all before it, it would be 64 times."""
    short = min(seconds_of(feeding(), 500) for _ in range(5))
    long = min(seconds_of(feeding(), 4000) for _ in range(3))
    assert long < 24 * short


@settings(deadline=None)
@given(stream=st.lists(st.sampled_from([b"\n", b"\r", b"a", b"data"]), max_size=30), data=st.data())
def test_events_are_cut_as_if_they_had_come_at_once(
    stream: list[bytes], data: st.DataObject
) -> None:
    whole = b"".join(stream)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    cutter = EventCutter()
    events: list[bytes] = []
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        events += cutter.feed(whole[start:end])
    assert (events, cutter.held) == split_events(whole)
    assert cutter.held_bytes == len(cutter.held)
