"""Kinds of values that several sections have: times, ports, addresses. What is one section's alone stands with it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Annotated
from urllib.parse import SplitResult, urlsplit

import httpx
from pydantic import AfterValidator, Field

HEADER_NAME = re.compile(r"^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}$")
"""RFC 9110 token."""

ON_OFF = {True: "on", False: "off"}
"""YAML reads an unquoted `on` or `off` as true or false."""


def check_url(url: str) -> str:
    """Return an address in the one form that it has here. Raises: ValueError, saying what is right."""
    try:
        parts = urlsplit(url)
    except ValueError as error:  # a bracket too many
        raise ValueError("expected http://host:port") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("expected http://host:port")
    if parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError("expected http://host:port without path, query or user")
    if not has_good_port(parts) or any(char.isspace() for char in url):
        raise ValueError("expected http://host:port with a port from 1 to 65535")
    try:
        parsed = httpx.URL(url)
        host = parsed.raw_host.decode("ascii").lower()
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ValueError(f"expected http://host:port with a valid host ({error})") from error
    # Without a default port, so that one address has one form; ids and urls must be unique.
    port = f":{parsed.port}" if parsed.port is not None else ""
    return f"{parts.scheme}://[{host}]{port}" if ":" in host else f"{parts.scheme}://{host}{port}"


def has_good_port(parts: SplitResult) -> bool:
    """Tell whether an address has a port that can be, or none."""
    try:
        return parts.port != 0 and not parts.netloc.endswith(":")
    except ValueError:
        return False


def nearest(word: str, known_words: Iterable[str], *, known: bool = True) -> str:
    """Return what is said behind a word that isn't known: what may be meant, and (`known`) all there is."""
    words = sorted(known_words)
    near = difflib.get_close_matches(word, words, n=1)
    text = f" (did you mean {near[0]}?)" if near else ""
    return f"{text}; known here: {', '.join(words)}" if known and words else text


Seconds = Annotated[float, Field(gt=0, le=86_400)]
Port = Annotated[int, Field(ge=1, le=65_535)]
Url = Annotated[str, AfterValidator(check_url)]
