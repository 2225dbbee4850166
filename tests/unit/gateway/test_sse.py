"""A stream of bytes comes out whole, in whole events."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moongate.gateway.sse import HELD_BYTES_MAX, EventSplitter, ends_stream

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


@pytest.mark.parametrize(
    ("events", "ends"),
    [
        (b"data: [DONE]\n\n", True),
        (b'data: {"x":1}\n\ndata: [DONE]\n\n', True),
        (b'data: {"x":1}\r\n\r\ndata: [DONE]\r\n\r\n', True),
        (b'data: {"content":"say data: [DONE]"}\n\n', False),
        (b'data: {"content":"\\ndata: [DONE]\\n"}\n\n', False),
        (b"", False),
    ],
)
def test_only_a_line_of_its_own_ends_a_stream(events: bytes, ends: bool) -> None:
    assert ends_stream(events) is ends
