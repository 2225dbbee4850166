"""Which headers cross the gateway."""

from typing import Any

import pytest

from moongate.gateway.headers import (
    CREDENTIALS,
    HOP_BY_HOP,
    clean_request_id,
    make_request_id,
    read_headers,
    request_headers,
    response_headers,
)

Raw = list[tuple[bytes, bytes]]


OURS = (b"x-request-id", b"r1")


def sent(raw: Raw, *, forward: bool = False, api_key: str | None = None) -> Raw:
    return request_headers(raw, request_id="r1", forward_credentials=forward, api_key=api_key)


def test_ordinary_headers_reach_the_engine() -> None:
    raw = [(b"Content-Type", b"application/json"), (b"x-session-id", b"\xe9"), (b"accept", b"*/*")]
    assert sent(raw) == [
        (b"content-type", b"application/json"),
        (b"x-session-id", b"\xe9"),
        (b"accept", b"*/*"),
        OURS,
    ]


@pytest.mark.parametrize(
    "name",
    [
        *sorted(HOP_BY_HOP),
        *(b"host", b"content-length", b"expect", b"x-request-id", b"x-data-parallel-rank"),
        *(b"x-moongate-policy", b"X-Moongate-Priority"),
    ],
)
def test_what_belongs_to_one_connection_or_to_the_gateway_stays(name: bytes) -> None:
    assert sent([(name, b"x"), (name.upper(), b"y")]) == [OURS]


def test_headers_that_the_connection_header_names_stay() -> None:
    raw = [(b"Connection", b"close, X-Private"), (b"x-private", b"1"), (b"x-public", b"2")]
    assert sent(raw) == [(b"x-public", b"2"), OURS]


def test_of_several_connection_headers_each_counts() -> None:
    raw = [(b"connection", b"x-a"), (b"X-A", b"1"), (b"Connection", b" X-B ,"), (b"x-b", b"2")]
    assert sent([*raw, (b"x-c", b"3")]) == [(b"x-c", b"3"), OURS]
    assert response_headers([*raw, (b"x-c", b"3")], {}) == [(b"x-c", b"3")]


@pytest.mark.parametrize("rank", [0, 12])
def test_the_rank_is_the_one_that_was_chosen(rank: int) -> None:
    raw = [(b"X-Data-Parallel-Rank", b"99")]
    headers = request_headers(
        raw, request_id="r1", forward_credentials=False, api_key=None, rank=rank
    )
    assert headers == [OURS, (b"x-data-parallel-rank", str(rank).encode())]


@pytest.mark.parametrize("name", sorted(CREDENTIALS))
def test_a_clients_credentials_go_on_only_where_that_is_wanted(name: bytes) -> None:
    raw = [(name, b"secret")]
    assert sent(raw) == [OURS]
    assert sent(raw, forward=True) == [(name, b"secret"), OURS]


def test_the_engines_own_key_replaces_the_clients() -> None:
    raw = [(b"authorization", b"Bearer client"), (b"x-api-key", b"client")]
    assert sent(raw, forward=True, api_key="engine") == [
        OURS,
        (b"authorization", b"Bearer engine"),
    ]


def test_repeated_headers_are_sent_repeatedly() -> None:
    assert sent([(b"accept", b"a"), (b"accept", b"b")])[:2] == [
        (b"accept", b"a"),
        (b"accept", b"b"),
    ]


def test_an_answers_headers_come_back_with_ours_in_place_of_equal_names() -> None:
    raw = [
        (b"Content-Type", b"application/json"),
        (b"X-Request-Id", b"theirs"),
        (b"Date", b"now"),
        (b"Transfer-Encoding", b"chunked"),
        (b"set-cookie", b"a=1"),
        (b"set-cookie", b"b=2"),
    ]
    assert response_headers(raw, {"x-request-id": "r1"}) == [
        (b"content-type", b"application/json"),
        (b"set-cookie", b"a=1"),
        (b"set-cookie", b"b=2"),
        (b"x-request-id", b"r1"),
    ]


def test_headers_that_the_answers_connection_header_names_stay() -> None:
    raw = [(b"connection", b"x-private"), (b"X-Private", b"1")]
    assert response_headers(raw, {}) == []


def test_of_repeated_headers_the_first_is_read() -> None:
    raw = [(b"X-Session-Id", b" a "), (b"x-session-id", b"b"), (b"x-odd", b"\xe9")]
    assert read_headers(raw) == {"x-session-id": "a", "x-odd": "é"}


def has_key(text: bytes) -> bool:
    return b"sk-1" in text


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("req-1_A.~", "req-1_A.~"),
        ("x" * 128, "x" * 128),
        ("x" * 129, None),
        ("", None),
        (None, None),
        ("a b", None),
        ("a\nb", None),
        ("é", None),
        ("turn-sk-1", None),
    ],
)
def test_a_request_id_is_echoed_if_it_can_be_logged_safely(
    given: str | None, kept: str | None
) -> None:
    assert clean_request_id(given, has_key) == kept


def test_a_request_id_of_ours_is_no_other_and_could_be_a_clients() -> None:
    made = {make_request_id() for _ in range(1000)}
    assert len(made) == 1000
    assert {len(request_id) for request_id in made} == {32}
    assert all(clean_request_id(request_id, has_key) == request_id for request_id in made)


def test_c98_a_header_with_a_key_in_it_is_dropped_whatever_its_name() -> None:
    raw = [(b"X-One", b"k=sk-1; y"), (b"x-two", b"sk-2"), (b"x-three", b"sk"), (b"x-four", b"-1")]

    def forwarded(**named: Any) -> list[bytes]:
        headers = request_headers(raw, request_id="r", is_secret=has_key, **named)
        return [name for name, _ in headers if name.startswith(b"x-") and name != b"x-request-id"]

    others = [b"x-two", b"x-three", b"x-four"]
    assert forwarded(forward_credentials=False, api_key=None) == others
    assert forwarded(forward_credentials=True, api_key="b-1") == others
    assert forwarded(forward_credentials=True, api_key=None) == [b"x-one", *others]


def test_a_tenant_does_not_say_how_soon_an_engine_is_to_compute() -> None:
    raw = [(b"X-VLLM-Priority", b"-5"), (b"x-kept", b"1")]

    def sent(*, is_of_tenant: bool) -> list[bytes]:
        headers = request_headers(
            raw, request_id="r", forward_credentials=True, api_key=None, is_of_tenant=is_of_tenant
        )
        return [name for name, _ in headers]

    assert sent(is_of_tenant=True) == [b"x-kept", b"x-request-id"]
    assert sent(is_of_tenant=False) == [b"x-vllm-priority", b"x-kept", b"x-request-id"]
