"""Spans by hand, decoded by the official package."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from otlp_receiver import attributes, decode_spans, read_attributes

from moongate.gateway.telemetry.otlp import (
    Key,
    SpanForm,
    SpanKind,
    consecutive_spans,
    decimals,
    export_request,
    resource,
    varint,
)

TRACE_ID, SPAN_ID, PARENT_ID = bytes(range(16)), bytes(range(8)), b"p" * 8


def times(*at: int) -> list[bytes]:
    return [ns.to_bytes(8, "little") for ns in at]


def decoded(spans: bytes) -> list[Span]:
    return decode_spans(export_request(resource({}), "moongate", [spans]))


def with_attributes(encoded: bytes) -> dict[str, object]:
    began, ended = times(1, 2)
    form = SpanForm("s", SpanKind.SERVER)
    (span,) = decoded(form.span(TRACE_ID, SPAN_ID, None, began, ended, encoded))
    return attributes(span)


def test_a_span_has_all_that_it_was_given() -> None:
    began, ended = times(1_800_000_000_000_000_001, 1_800_000_000_500_000_002)
    form = SpanForm("POST /v1/x%b", SpanKind.SERVER, is_error=True)
    (span,) = decoded(form.span(TRACE_ID, SPAN_ID, PARENT_ID, began, ended, Key("a").text("ä")))
    assert (span.trace_id, span.span_id, span.parent_span_id) == (TRACE_ID, SPAN_ID, PARENT_ID)
    assert (span.name, span.kind) == ("POST /v1/x%b", Span.SPAN_KIND_SERVER)
    assert span.start_time_unix_nano == 1_800_000_000_000_000_001
    assert span.end_time_unix_nano == 1_800_000_000_500_000_002
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert attributes(span) == {"a": "ä"}


def test_a_span_without_parent_is_a_root() -> None:
    began, ended = times(1, 2)
    form = SpanForm("s", SpanKind.INTERNAL)
    (span,) = decoded(form.span(TRACE_ID, SPAN_ID, None, began, ended, b""))
    assert span.parent_span_id == b""
    assert span.status.code == Status.STATUS_CODE_UNSET


def test_consecutive_spans_begin_where_the_one_before_ended() -> None:
    words = Key("n").text("100 %b")
    forms = (SpanForm("a", SpanKind.INTERNAL), SpanForm("b", SpanKind.CLIENT, words, is_error=True))
    spans = decoded(consecutive_spans(forms, TRACE_ID, PARENT_ID, 255, times(10, 20, 35)))
    assert [(s.name, s.start_time_unix_nano, s.end_time_unix_nano) for s in spans] == [
        ("a", 10, 20),
        ("b", 20, 35),
    ]
    assert [int.from_bytes(s.span_id, "big") for s in spans] == [255, 256]
    assert {s.parent_span_id for s in spans} == {PARENT_ID}
    assert [attributes(s) for s in spans] == [{}, {"n": "100 %b"}]
    assert [s.kind for s in spans] == [Span.SPAN_KIND_INTERNAL, Span.SPAN_KIND_CLIENT]
    assert decoded(consecutive_spans((), TRACE_ID, PARENT_ID, 1, times(10))) == []


@given(st.text(max_size=300), st.text("abcdefghijklmnop.%_", min_size=1, max_size=100))
def test_any_text_comes_out_as_it_went_in(text: str, name: str) -> None:
    expected = text.encode("utf-8", "replace").decode()
    assert with_attributes(Key(name).text(text)) == {name: expected}


@given(st.integers(min_value=-(1 << 63), max_value=(1 << 63) - 1))
def test_any_number_comes_out_as_it_went_in(number: int) -> None:
    assert with_attributes(Key("k" * 100).number(number)) == {"k" * 100: number}


@pytest.mark.parametrize(
    ("number", "encoded"),
    [(0, b"\0"), (127, b"\x7f"), (128, b"\x80\x01"), (16_383, b"\xff\x7f"), (16_384, b"\x80\x80\x01")],
)  # fmt: skip
def test_numbers_take_seven_bits_a_byte(number: int, encoded: bytes) -> None:
    assert varint(number) == encoded


def test_decimal_numbers_keep_their_names() -> None:
    assert with_attributes(decimals(("a", "bb"), [1.5, -0.25])) == {"a": 1.5, "bb": -0.25}
    assert with_attributes(decimals((), [])) == {}


def test_a_call_says_whose_spans_they_are() -> None:
    body = export_request(resource({"service.name": "moongate"}), "scope", [])
    (sent,) = ExportTraceServiceRequest.FromString(body).resource_spans
    assert read_attributes(sent.resource.attributes) == {"service.name": "moongate"}
    assert [scope.scope.name for scope in sent.scope_spans] == ["scope"]
