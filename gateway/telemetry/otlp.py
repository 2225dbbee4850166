"""Spans as OTLP's protobuf bytes. Pure.

By hand and not by OpenTelemetry's SDK: the seven spans of a request would cost it 240 µs, as much as a
small request itself (docs/decisions/0016). The tests decode what comes out with the official package.

A message is its fields one after the other, each with a tag, (number << 3) | wire type, so what many spans
have in common is encoded once, with gaps (`%b`) for their ids and times, which are of fixed length.

Source: opentelemetry-proto 1.x, `trace/v1/trace.proto` and `common/v1/common.proto`, whose numbers
are stable by its promise.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache

FORMATS_MAX = 1024
"""Formats that are kept: of each sequence of forms that came up."""

NAME_BYTES_MAX = 100
"""Of an attribute; so its lengths take one byte each where the value is short."""

SHORT_BYTES_MAX = 16
"""A text of this length needs no longer lengths, whatever its name."""

_IDS_BYTES, _PARENT_BYTES, _TIMES_BYTES = 18 + 10, 10, 9 + 9
_ERROR = b"\x7a\x02\x18\x02"  # field 15: a status with code 2
_INT64 = (1 << 64) - 1


class SpanKind(IntEnum):
    """As OTLP numbers them."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


def varint(number: int) -> bytes:
    """Return a number that is not negative, 7 bits a byte, the lowest first."""
    if number < 0x80:
        return b"%c" % number
    if number < 0x4000:
        return b"%c%c" % (number & 0x7F | 0x80, number >> 7)
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def message(number: int, body: bytes) -> bytes:
    """Return a field that is itself a message, a text or bytes."""
    return b"%c%b%b" % (number << 3 | 2, varint(len(body)), body)


class Key:
    """The name of an attribute, encoded once; with a value it is one attribute of a span."""

    def __init__(self, name: str) -> None:
        assert len(name.encode()) <= NAME_BYTES_MAX, name
        self._head = message(1, name.encode())
        self._size = len(self._head)

    def text(self, value: str) -> bytes:
        encoded = value.encode("utf-8", "replace")
        size = len(encoded)
        if size <= SHORT_BYTES_MAX:
            return b"\x4a%c%b\x12%c\x0a%c%b" % (
                self._size + size + 4, self._head, size + 2, size, encoded
            )  # fmt: skip
        return message(9, self.pair(encoded))

    def pair(self, value: bytes) -> bytes:
        """Return name and text without the field that they are in a span."""
        return self._head + message(2, message(1, value))

    def number(self, value: int) -> bytes:
        encoded = varint(value & _INT64)
        size = len(encoded)
        return b"\x4a%c%b\x12%c\x18%b" % (self._size + size + 3, self._head, size + 1, encoded)

    @property
    def decimal_head(self) -> bytes:
        """Return what precedes the 8 bytes of a decimal number."""
        return b"\x4a%c%b\x12\x09\x21" % (self._size + 11, self._head)


@lru_cache(FORMATS_MAX)
def _decimal_format(names: tuple[str, ...]) -> tuple[struct.Struct, tuple[bytes, ...]]:
    heads = tuple(Key(name).decimal_head for name in names)
    return struct.Struct("<" + "".join(f"{len(head)}sd" for head in heads)), heads


def decimals(names: tuple[str, ...], values: Sequence[float]) -> bytes:
    """Return attributes that are decimal numbers."""
    form, heads = _decimal_format(names)
    pieces: list[bytes | float] = [b""] * (2 * len(names))
    pieces[::2] = heads
    pieces[1::2] = values
    return form.pack(*pieces)


class SpanForm:
    """What spans have in common but for their ids and times. Keep one for all of its spans."""

    __slots__ = ("_head", "_tail", "child_format")

    def __init__(
        self, name: str, kind: SpanKind, attributes: bytes = b"", *, is_error: bool = False
    ) -> None:
        """`child_format` has gaps for: trace id, span id, parent's id, begin, end (unix, ns)."""
        self._head = message(5, name.encode()) + b"\x30%c" % kind
        self._tail = attributes + (_ERROR if is_error else b"")
        size = varint(_IDS_BYTES + _PARENT_BYTES + _TIMES_BYTES + len(self._head) + len(self._tail))
        self.child_format = b"\x12%b\x0a\x10%%b\x12\x08%%b\x22\x08%%b%b\x39%%b\x41%%b%b" % (
            _quoted(size), _quoted(self._head), _quoted(self._tail)
        )  # fmt: skip

    def span(
        self,
        trace_id: bytes,
        span_id: bytes,
        parent_id: bytes | None,
        began: bytes,
        ended: bytes,
        attributes: bytes,
    ) -> bytes:
        """Return one span with attributes of its own."""
        parent = b"\x22\x08%b" % parent_id if parent_id is not None else b""
        body = b"\x0a\x10%b\x12\x08%b%b%b\x39%b\x41%b%b%b" % (
            trace_id, span_id, parent, self._head, began, ended, attributes, self._tail
        )  # fmt: skip
        return message(2, body)


def _quoted(text: bytes) -> bytes:
    return text.replace(b"%", b"%%")


@lru_cache(FORMATS_MAX)
def _joined_format(forms: tuple[SpanForm, ...]) -> bytes:
    return b"".join([form.child_format for form in forms])


def consecutive_spans(
    forms: tuple[SpanForm, ...], trace_id: bytes, parent_id: bytes, first_id: int, times: list[bytes]
) -> bytes:  # fmt: skip
    """Return spans of one parent of which each begins where the one before it ended.

    `times`: one more than spans. Ids rise by one.
    """
    gaps: list[bytes] = []
    began = times[0]
    for number, ended in enumerate(times[1:], first_id):
        gaps += (trace_id, number.to_bytes(8, "big"), parent_id, began, ended)
        began = ended
    return _joined_format(forms) % tuple(gaps)


def resource(attributes: Mapping[str, str]) -> bytes:
    """Return the field of `ResourceSpans` that says whose spans they are."""
    pairs = (message(1, Key(name).pair(value.encode())) for name, value in attributes.items())
    return message(1, b"".join(pairs))


def export_request(resource_field: bytes, scope_name: str, spans: Iterable[bytes]) -> bytes:
    """Return the body of a call to `/v1/traces`."""
    scope = message(1, message(1, scope_name.encode()))
    return message(1, resource_field + message(2, scope + b"".join(spans)))
