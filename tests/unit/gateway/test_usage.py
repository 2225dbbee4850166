"""The cached tokens that an engine reports, found in passing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moongate.gateway.dialects.usage import TAIL_BYTES, UsageReader

USAGE = (
    b'"usage":{"prompt_tokens":64,"total_tokens":65,"completion_tokens":1,'
    b'"prompt_tokens_details":{"cached_tokens":48}}'
)


def test_what_the_pool_gave_is_reported_apart() -> None:
    reader = UsageReader()
    reader.feed(
        b"{" + USAGE + b',"kv_transfer_params":{"moongate":{"device_tokens":16,"pool_tokens":32}}}'
    )
    assert (reader.cached_tokens(), reader.pool_tokens()) == (48, 32)
    other = UsageReader()
    other.feed(b"{" + USAGE + b',"kv_transfer_params":null}')
    assert other.pool_tokens() is None


def reported(*chunks: bytes) -> int | None:
    reader = UsageReader()
    for chunk in chunks:
        reader.feed(chunk)
    return reader.cached_tokens()


def test_an_answer_reports_its_hit() -> None:
    assert reported(b'{"id":"c","choices":[],' + USAGE + b',"kv_transfer_params":null}') == 48


def test_a_stream_reports_its_hit_before_the_end_mark() -> None:
    last = b'data: {"choices":[],' + USAGE + b"}\n\n"
    assert reported(b'data: {"choices":[{}]}\n\n', last, b"data: [DONE]\n\n") == 48


def test_of_several_reports_the_last_counts() -> None:
    assert reported(b'{"cached_tokens": 0}', b'{"cached_tokens" : 16}') == 16


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b'{"usage":{"prompt_tokens":64,"prompt_tokens_details":null}}',
        b'{"usage":{"prompt_tokens_details":{"cached_tokens":null}}}',
        b'{"content":"{\\"cached_tokens\\": 7}"}',
        b"\x1f\x8b\x08\x00",
    ],
)
def test_where_nothing_is_reported_nothing_is_told(answer: bytes) -> None:
    assert reported(answer) is None


def test_only_the_end_of_an_answer_is_searched() -> None:
    assert reported(USAGE + b" " * TAIL_BYTES) is None
    assert reported(b" " * 3 * TAIL_BYTES + USAGE) == 48


@settings(deadline=None)
@given(st.lists(st.integers(0, len(USAGE)), max_size=6))
def test_any_split_reports_the_same(cuts: list[int]) -> None:
    ends = [*sorted(cuts), len(USAGE)]
    assert reported(*(USAGE[a:b] for a, b in zip([0, *ends], ends, strict=False))) == 48
