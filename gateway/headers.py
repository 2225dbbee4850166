"""Which headers cross the gateway, in which direction.

Hop-by-hop headers never do (RFC 9110 section 7.6.1), nor does anything that frames a message, since
each side frames its own. A client's credentials go to an engine only where the operator says so.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Container, Mapping

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
NEVER_FORWARDED = HOP_BY_HOP | REPLACED_IN_REQUESTS
NEVER_FORWARDED_OR_SECRET = NEVER_FORWARDED | CREDENTIALS
ENGINE_PRIORITY = frozenset({b"x-vllm-priority"})
"""How soon an engine is to compute a request; vLLM 0.32 obeys it in place of the body's field."""
NEVER_ANSWERED = HOP_BY_HOP | {b"date"}
REQUEST_ID_CHARS_MAX = 128
SESSION_END = "x-moongate-session-end"


def read_headers(raw: RawHeaders) -> dict[str, str]:
    """Return the headers as text, names in lower case; of repeated ones the first."""
    headers: dict[str, str] = {}
    for name, value in raw:
        headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1").strip())
    return headers


def request_headers(
    raw: RawHeaders,
    *,
    request_id: str,
    forward_credentials: bool,
    is_secret: Callable[[bytes], bool] | None = None,
    api_key: str | None,
    rank: int | None = None,
    is_of_tenant: bool = False,
) -> list[tuple[bytes, bytes]]:
    """Return the headers that an engine gets, with the data-parallel rank that is to answer.

    Its own key, where it has one, replaces any other. `is_secret`: which values have a client's key in them, so
    that no header carries it, whatever its name. `is_of_tenant`: it may not say that it is to overtake others' requests.
    """
    keeps_credentials = forward_credentials and api_key is None
    dropped = NEVER_FORWARDED if keeps_credentials else NEVER_FORWARDED_OR_SECRET
    headers = [
        header
        for header in _without(raw, dropped, ENGINE_PRIORITY if is_of_tenant else ())
        if not header[0].startswith(b"x-moongate-")
    ]
    if is_secret is not None and not keeps_credentials:
        headers = _without_secrets(headers, is_secret)
    headers.append((b"x-request-id", request_id.encode("latin-1")))
    if api_key is not None:
        headers.append((b"authorization", b"Bearer " + api_key.encode("latin-1")))
    if rank is not None:
        headers.append((b"x-data-parallel-rank", b"%d" % rank))
    return headers


NO_SECRETS = frozenset({b"content-type", b"content-length", b"accept"})
"""Engines need them, and a short key may look like a part of them."""


def _without_secrets(
    headers: list[tuple[bytes, bytes]], is_secret: Callable[[bytes], bool]
) -> list[tuple[bytes, bytes]]:
    # Looked for in all at once, since hardly any has one.
    if not is_secret(b"\n".join([value for _, value in headers])):
        return headers
    return [header for header in headers if header[0] in NO_SECRETS or not is_secret(header[1])]


def response_headers(raw: RawHeaders, ours: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Return the headers that a client gets: the engine's, and ours in place of equal names.

    The date is left to the server that sends the answer, which adds its own.
    """
    own = {name.encode("latin-1"): value.encode("latin-1") for name, value in ours.items()}
    return [*_without(raw, NEVER_ANSWERED, own), *own.items()]


def _without(
    raw: RawHeaders, dropped: Container[bytes], others: Container[bytes]
) -> list[tuple[bytes, bytes]]:
    """Return headers, names in lower case, without these, and without those hop-by-hop."""
    kept, connection = [], b""
    for name, value in raw:
        name = name.lower()  # noqa: PLW2901 - on the hot path
        if name == b"connection":
            connection = b"%b,%b" % (connection, value)
        elif name not in dropped and name not in others:
            kept.append((name, value))
    if not connection:
        return kept
    named = {part.strip() for part in connection.lower().split(b",")}
    return [header for header in kept if header[0] not in named]


_ids = random.Random()  # noqa: S311 - ids are told apart, never relied on


def make_request_id() -> str:
    """Return a new request id: 128 bits of chance as hex, at a tenth of what `uuid4` costs."""
    return f"{_ids.getrandbits(128):032x}"


def clean_request_id(given: str | None, is_secret: Callable[[bytes], bool]) -> str | None:
    """Return a client's request id if it can be echoed and logged safely, else None.

    `is_secret`: what has a key in it.
    """
    if not given or len(given) > REQUEST_ID_CHARS_MAX:
        return None
    is_clean = all("!" <= char <= "~" for char in given) and not is_secret(given.encode())
    return given if is_clean else None


def ends_session(headers: Mapping[str, str]) -> bool:
    """Tell whether a client says that no other turn of its session follows."""
    return headers.get(SESSION_END, "").lower() in ("1", "true")
