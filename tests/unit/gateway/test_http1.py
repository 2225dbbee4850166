"""An engine's bytes as an answer: what is one, what is none, and what its connection is good for then."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moongate.gateway.proxy.http1 import (
    HEADER_BYTES_MAX,
    AnswerReader,
    MalformedAnswer,
    format_request,
)

Headers = list[tuple[bytes, bytes]]

WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def read(*pieces: bytes, ends: bool = False) -> AnswerReader:
    reader = AnswerReader()
    for piece in pieces:
        reader.feed(piece)
    if ends:
        reader.end()
    return reader


def answer(*pieces: bytes, ends: bool = False) -> tuple[int, Headers, bytes]:
    """Return a complete answer's status, headers and body."""
    reader = read(*pieces, ends=ends)
    assert reader.is_complete
    return reader.status, reader.headers, reader.take_body()


def refusal(*pieces: bytes, ends: bool = False) -> str:
    with pytest.raises(MalformedAnswer) as refused:
        read(*pieces, ends=ends)
    return str(refused.value)


def single(data: bytes) -> list[bytes]:
    return [data[n : n + 1] for n in range(len(data))]


# --- requests -------------------------------------------------------------------------------------


def test_a_request_has_its_host_first_and_its_length_last() -> None:
    headers = [(b"Content-Type", b"application/json"), (b"x-odd", b"\xe9"), (b"x", b"1")]
    assert format_request("/v1/x?a=%20b", "h:1", headers, 7) == (
        b"POST /v1/x?a=%20b HTTP/1.1\r\nhost: h:1\r\nContent-Type: application/json\r\n"
        b"x-odd: \xe9\r\nx: 1\r\ncontent-length: 7\r\n\r\n"
    )


def test_a_request_may_have_no_headers_and_no_body() -> None:
    assert format_request("/", "h", [], 0) == (
        b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 0\r\n\r\n"
    )


# --- whole answers --------------------------------------------------------------------------------


def test_a_length_tells_where_the_body_ends() -> None:
    reader = read(WHOLE)
    assert (reader.status, reader.headers) == (200, [(b"content-length", b"2")])
    assert (reader.take_body(), reader.take_body()) == (b"ok", b"")
    assert reader.may_continue


def test_repeated_headers_stay_and_names_are_in_lower_case() -> None:
    head = b"HTTP/1.1 200 OK\r\nX-A: 1\r\nset-cookie: a\r\nset-cookie: b\r\nx-e:\r\n"
    assert answer(head + b"content-length: 0\r\n\r\n")[1] == [
        (b"x-a", b"1"),
        (b"set-cookie", b"a"),
        (b"set-cookie", b"b"),
        (b"x-e", b""),
        (b"content-length", b"0"),
    ]


def test_chunks_are_taken_out_of_their_framing() -> None:
    reader = read(CHUNKED, b"2\r\nok\r\n", b"3;a=b\r\n!!!\r\n")
    assert (reader.take_body(), reader.is_complete) == (b"ok!!!", False)
    reader.feed(b"0\r\n\r\n")
    assert (reader.take_body(), reader.is_complete, reader.may_continue) == (b"", True, True)


def test_trailers_are_no_headers() -> None:
    trailed = CHUNKED + b"2\r\nok\r\n0\r\nx-t: 1\r\nx-u: 2\r\n\r\n"
    for pieces in ([trailed], single(trailed)):
        assert answer(*pieces) == (200, [(b"transfer-encoding", b"chunked")], b"ok")


@pytest.mark.parametrize("status", [204, 304])
def test_an_answer_without_a_body_ends_with_its_head(status: int) -> None:
    reader = read(b"HTTP/1.1 %d X\r\ncontent-length: 5\r\n\r\n" % status)
    assert (reader.status, reader.is_complete, reader.may_continue) == (status, True, True)


def test_without_length_or_chunks_the_end_of_the_connection_is_the_end() -> None:
    reader = read(b"HTTP/1.1 200 OK\r\nx: 1\r\n\r\n", b"so", b"me")
    assert not reader.is_complete
    reader.end()
    assert (reader.take_body(), reader.is_complete, reader.may_continue) == (b"some", True, False)


# --- interim answers ------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [100, 102, 103, 199])
@pytest.mark.parametrize("cut", [False, True])
def test_an_interim_answer_is_left_out(status: int, cut: bool) -> None:
    data = b"HTTP/1.1 %d X\r\nlink: a\r\n\r\n" % status + WHOLE
    pieces = single(data) if cut else [data]
    assert answer(*pieces) == (200, [(b"content-length", b"2")], b"ok")


def test_several_interim_answers_are_left_out() -> None:
    interim = b"HTTP/1.1 100 X\r\n\r\nHTTP/1.1 103 X\r\nlink: a\r\n\r\n"
    assert answer(interim + WHOLE)[2] == b"ok"


def test_interim_answers_without_end_are_refused() -> None:
    interim = b"HTTP/1.1 103 X\r\nlink: " + b"a" * 1000 + b"\r\n\r\n"
    assert "more than" in refusal(*[interim] * 80)


@pytest.mark.parametrize("headers", [b"", b"connection: upgrade\r\nupgrade: h2c\r\n"])
def test_nobody_asked_for_another_protocol(headers: bytes) -> None:
    assert refusal(b"HTTP/1.1 101 X\r\n" + headers + b"\r\n" + WHOLE) == "unexpected status 101"


def test_an_offer_of_another_protocol_changes_nothing() -> None:
    offer = b"HTTP/1.1 200 OK\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 2\r\n\r\n"
    assert answer(offer, b"ok")[2] == b"ok"


# --- may the connection be used again -------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "may_continue"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nConnection: x, Close\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\nconnection: keep-alive\r\n\r\n", True),
        (b"HTTP/1.1 500 X\r\ncontent-length: 2\r\n\r\n", True),
    ],
)
def test_a_connection_is_used_again_if_both_sides_may(head: bytes, may_continue: bool) -> None:
    reader = read(head + b"ok")
    assert (reader.is_complete, reader.may_continue) == (True, may_continue)


def test_an_answer_that_has_not_ended_keeps_its_connection() -> None:
    assert not read(WHOLE[:-1]).may_continue


@pytest.mark.parametrize(
    "surplus", [b"H", b"x", b"\r\nx", WHOLE, b"\x00", b"HTTP/1.1 100 X\r\n\r\n"]
)
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("first", [WHOLE, CHUNKED + b"2\r\nok\r\n0\r\n\r\n"])
def test_bytes_behind_the_end_are_no_part_of_it_and_spoil_the_connection(
    first: bytes, cut: bool, surplus: bytes
) -> None:
    reader = read(first, surplus) if cut else read(first + surplus)
    headers = reader.headers.copy()
    assert (reader.status, reader.take_body(), reader.is_complete) == (200, b"ok", True)
    assert (len(headers), reader.may_continue) == (1, False)


def test_bytes_behind_an_answer_that_closes_are_no_part_of_it() -> None:
    closing = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok"
    reader = read(closing, WHOLE)
    assert (reader.take_body(), reader.may_continue) == (b"ok", False)


# --- ends that come too early ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"HTTP/1.1 100 X\r\n\r\n",
        WHOLE[:-1],
        CHUNKED,
        CHUNKED + b"5\r\nok",
        CHUNKED + b"2\r\nok\r\n",
        CHUNKED + b"2\r\nok\r\n0\r\nx: 1\r\n",
    ],
)
def test_an_end_before_the_answers_own_is_noticed(data: bytes) -> None:
    reader = read(data) if data else read()
    with pytest.raises(MalformedAnswer, match="ended before the answer"):
        reader.end()


def test_an_end_behind_the_answers_own_means_nothing() -> None:
    assert answer(WHOLE, ends=True)[2] == b"ok"


# --- what is no answer ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"garbage\r\n\r\n",
        b"\x16\x03\x01\x00",
        b"GET / HTTP/1.1\r\n\r\n",
        b"HTTP/3.0 200 OK\r\n\r\n",
        b"HTTP/1.1 20x OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nspace : 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: a\x00b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: a\rb\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: a\r\n folded\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\ncontent-length: 0\n\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 0\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: +1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 0x1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2, 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-length: 2\r\n\r\nok",
        CHUNKED + b"2\nok\n0\n\n",
        CHUNKED + b"x\r\n",
        CHUNKED + b"-2\r\nok\r\n",
        CHUNKED + b"2\r\nokay\r\n",
        CHUNKED + b"ffffffffffffffffff\r\n",
        CHUNKED + b"0\r\ncontent-length: 9\r\n\r\n",
    ],
)
@pytest.mark.parametrize("cut", [False, True])
def test_what_could_be_read_in_two_ways_is_no_answer(data: bytes, cut: bool) -> None:
    assert refusal(*(single(data) if cut else [data]))


@pytest.mark.parametrize(
    "codings",
    [
        b"transfer-encoding: gzip\r\n",
        b"transfer-encoding: gzip, chunked\r\n",
        b"transfer-encoding: chunked, chunked\r\n",
        b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: identity\r\n",
        b"transfer-encoding:\r\n",
    ],
)
def test_no_other_coding_is_taken_than_chunked(codings: bytes) -> None:
    assert refusal(b"HTTP/1.1 200 OK\r\n" + codings + b"\r\n2\r\nok\r\n0\r\n\r\n")


def test_a_refused_coding_is_named() -> None:
    refused = refusal(b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n")
    assert refused == "unknown transfer-encoding b'gzip'"


@pytest.mark.parametrize("status", [b"000", b"099", b"600", b"999"])
def test_a_status_that_has_no_meaning_is_no_answer(status: bytes) -> None:
    refused = refusal(b"HTTP/1.1 " + status + b" X\r\ncontent-length: 0\r\n\r\n")
    assert refused == f"unexpected status {int(status)}"


def test_what_is_refused_never_had_a_head() -> None:
    reader = AnswerReader()
    with pytest.raises(MalformedAnswer):
        reader.feed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n")
    assert (reader.has_head, reader.status, reader.is_complete) == (False, 0, False)


def test_what_came_of_a_body_before_it_went_wrong_can_be_taken() -> None:
    reader = AnswerReader()
    with pytest.raises(MalformedAnswer):
        reader.feed(CHUNKED + b"2\r\nok\r\nwrong")
    assert (reader.take_body(), reader.is_complete) == (b"ok", False)


# --- limits ---------------------------------------------------------------------------------------


def test_one_header_without_end_is_refused() -> None:
    pieces = [b"a" * 10_000] * 10
    assert "more than 65536 bytes" in refusal(b"HTTP/1.1 200 OK\r\nx: ", *pieces)


def test_many_headers_are_refused_in_pieces_and_at_once() -> None:
    lines = [b"x-%d: %s\r\n" % (n, b"a" * 90) for n in range(1000)]
    assert "more than 65536 bytes" in refusal(b"HTTP/1.1 200 OK\r\n", *lines)
    whole = b"HTTP/1.1 200 OK\r\n" + b"".join(lines) + b"content-length: 0\r\n\r\n"
    assert "more than 65536 bytes" in refusal(whole)


def test_headers_at_the_limit_pass() -> None:
    value = b"a" * (HEADER_BYTES_MAX - len(b"x" + b"content-length" + b"0"))
    head = b"HTTP/1.1 200 OK\r\nx: " + value + b"\r\ncontent-length: 0\r\n\r\n"
    assert answer(head)[1][0] == (b"x", value)


def test_a_body_has_no_limit() -> None:
    reader = read(b"HTTP/1.1 200 OK\r\n\r\n")
    taken = 0
    for _ in range(100):
        reader.feed(b"x" * 100_000)
        taken += len(reader.take_body())
    assert taken == 10_000_000


# --- any split ------------------------------------------------------------------------------------

NAMES = st.text("abcXYZ-", min_size=1, max_size=6).map(lambda name: f"x-{name}".encode())
VALUES = st.text("azAZ09 ,;=\"'", max_size=10).map(lambda value: value.strip().encode())
EXTRA = st.lists(st.tuples(NAMES, VALUES), max_size=4)
INTERIM = st.sampled_from([b"", b"HTTP/1.1 100 C\r\n\r\n", b"HTTP/1.1 103 E\r\nlink: a\r\n\r\n"])
CHUNKS = st.lists(st.binary(min_size=1, max_size=12), max_size=4)
FRAMING = st.sampled_from(["length", "chunks", "trailers", "close"])


def lines_of(headers: Headers) -> bytes:
    return b"".join(name + b": " + value + b"\r\n" for name, value in headers)


@settings(deadline=None)
@given(INTERIM, EXTRA, CHUNKS, FRAMING, st.integers(200, 599), st.data())
@example(b"HTTP/1.1 100 C\r\n\r\n", [], [b"HTTP/1.1 "], "chunks", 200, None)
def test_any_split_gives_the_same_answer(
    interim: bytes,
    extra: Headers,
    chunks: list[bytes],
    framing: str,
    status: int,
    data: st.DataObject | None,
) -> None:
    if status in (204, 304):
        chunks, framing = [], "length"
    body = b"".join(chunks)
    headers = list(extra)
    if framing == "length":
        headers.append((b"Content-Length", b"%d" % len(body)))
        framed = body
    elif framing == "close":
        framed = body
    else:
        headers.append((b"transfer-encoding", b"Chunked"))
        pieces = [b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks]
        trailers = b"x-t: 1\r\n" if framing == "trailers" else b""
        framed = b"".join([*pieces, b"0\r\n", trailers, b"\r\n"])
    sent = interim + b"HTTP/1.1 %d Some words\r\n" % status + lines_of(headers) + b"\r\n" + framed
    if data is None:
        splits = single(sent)
    else:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=8)))
        splits = [sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    reader = AnswerReader()
    taken = []
    for piece in splits:
        if piece:
            reader.feed(piece)
            taken.append(reader.take_body())
    assert reader.is_complete is (framing != "close")
    reader.end()
    lower = [(name.lower(), value) for name, value in headers]
    assert (reader.status, reader.headers, b"".join(taken)) == (status, lower, body)
    assert reader.may_continue is (framing != "close")


@settings(deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6))
def test_any_bytes_are_an_answer_or_refused(pieces: list[bytes]) -> None:
    for start in (b"", b"HTTP/1.1 200 OK\r\n", CHUNKED, WHOLE):
        reader = AnswerReader()
        try:
            for piece in (start, *pieces):
                if piece:
                    reader.feed(piece)
            reader.end()
        except MalformedAnswer:
            assert not reader.is_complete
        else:
            assert reader.is_complete
