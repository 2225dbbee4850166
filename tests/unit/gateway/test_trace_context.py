"""W3C Trace Context in headers."""

from __future__ import annotations

import pytest

from moongate.gateway.telemetry.trace_context import TraceContext, parse_traceparent, with_context

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"


def test_a_context_is_read_and_written_alike() -> None:
    context = parse_traceparent(GOOD)
    assert context == TraceContext(bytes.fromhex(TRACE), bytes.fromhex(SPAN), is_sampled=True)
    assert context.as_header() == GOOD.encode()


@pytest.mark.parametrize(
    ("text", "is_sampled"),
    [
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),  # with a flag of a later level
        (f"cc-{TRACE}-{SPAN}-01-what-comes-later", True),
    ],
)
def test_flags_and_later_versions_are_read(text: str, is_sampled: bool) -> None:
    context = parse_traceparent(text)
    assert context is not None
    assert context.is_sampled is is_sampled


@pytest.mark.parametrize(
    "text",
    [
        None, "", "x", GOOD.upper(), f"ff-{TRACE}-{SPAN}-01", f"{GOOD}-more", f"{GOOD}\n",
        f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE[1:]}-{SPAN}-01",
    ],
)  # fmt: skip
def test_what_is_no_context_says_nothing(text: str | None) -> None:
    assert parse_traceparent(text) is None


@pytest.mark.parametrize("keeps_state", [True, False])
def test_the_context_that_came_is_replaced(keeps_state: bool) -> None:
    context = TraceContext(b"t" * 16, b"s" * 8, is_sampled=False)
    came = [(b"traceparent", b"old"), (b"a", b"b"), (b"tracestate", b"v=1"), (b"traceparent", b"x")]
    kept = [(b"a", b"b"), (b"tracestate", b"v=1")] if keeps_state else [(b"a", b"b")]
    ours = (
        b"traceparent",
        b"00-%b-%b-00" % ((b"t" * 16).hex().encode(), (b"s" * 8).hex().encode()),
    )
    assert with_context(came, context, keeps_state=keeps_state) == [*kept, ours]
