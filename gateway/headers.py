"""Which headers cross the gateway, in which direction.

Hop-by-hop headers never do (RFC 9110 section 7.6.1), nor does anything that frames a message, since
each side frames its own. A client's credentials go to an engine only where the operator says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

RawHeaders = Collection[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
CREDENTIALS = frozenset({b"authorization", b"x-api-key", b"api-key", b"cookie"})
REPLACED_IN_REQUESTS = frozenset(
    # The rank is ours to choose: a client's would name a cache that this instance may not have.
    {b"host", b"content-length", b"expect", b"x-request-id", b"x-data-parallel-rank"}
)
REQUEST_ID_CHARS_MAX = 128


def read_headers(raw: RawHeaders) -> dict[str, str]:
    """Return the headers as text, names in lower case; of repeated ones the first."""
    headers: dict[str, str] = {}
    for name, value in raw:
        headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1").strip())
    return headers


def request_headers(
    raw: RawHeaders, *, request_id: str, forward_credentials: bool, api_key: str | None
) -> list[tuple[str, str]]:
    """Return the headers that an engine gets. Its own key, where it has one, replaces any other."""
    dropped = HOP_BY_HOP | REPLACED_IN_REQUESTS | _named_by_connection(raw)
    if not forward_credentials or api_key is not None:
        dropped |= CREDENTIALS
    headers = [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in raw
        if name.lower() not in dropped and not name.lower().startswith(b"x-moongate-")
    ]
    headers.append(("x-request-id", request_id))
    if api_key is not None:
        headers.append(("authorization", f"Bearer {api_key}"))
    return headers


def response_headers(raw: RawHeaders, ours: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Return the headers that a client gets: the engine's, and ours in place of equal names.

    The date is left to the server that sends the answer, which adds its own.
    """
    own = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in ours.items()]
    dropped = HOP_BY_HOP | {b"date"} | _named_by_connection(raw) | {name for name, _ in own}
    kept = [(name.lower(), value) for name, value in raw if name.lower() not in dropped]
    return kept + own


def _named_by_connection(raw: RawHeaders) -> set[bytes]:
    """Return the headers that the connection header declares hop-by-hop."""
    return {
        part.strip().lower()
        for name, value in raw
        if name.lower() == b"connection"
        for part in value.split(b",")
    }


def clean_request_id(given: str | None) -> str | None:
    """Return a client's request id if it can be echoed and logged safely, else None."""
    if not given or len(given) > REQUEST_ID_CHARS_MAX:
        return None
    return given if all("!" <= char <= "~" for char in given) else None
