"""What a client says of how its request is to wait, and how much it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from moongate.gateway.dialects.body import Body
from moongate.gateway.errors import GatewayError
from moongate.router.model import BYTES_PER_TOKEN

PRIORITY = "x-moongate-priority"
MAX_WAIT = "x-moongate-max-wait-ms"

_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")

_INTEGER = re.compile(r"[+-]?[0-9]{1,9}", re.ASCII)


class WaitingWishes(NamedTuple):
    """See `Request`."""

    priority: int
    wait_s_max: float | None
    answer_tokens_max: int | None
    size_tokens: int


def read_wishes(headers: Mapping[str, str], body: Body) -> WaitingWishes:
    """Return what is said, in headers and in the body. Raises: GatewayError (400)."""
    priority, wait = headers.get(PRIORITY), headers.get(MAX_WAIT)
    return WaitingWishes(
        _integer(PRIORITY, priority) if priority is not None else 0,
        max(_integer(MAX_WAIT, wait), 0) / 1000 if wait is not None else None,
        _answer_tokens_max(body),
        len(body.raw) // BYTES_PER_TOKEN,
    )


def _answer_tokens_max(body: Body) -> int | None:
    """Return the least that a field says which bounds the answer. None: none does."""
    said = (body.top.get(name) for name in _LIMITS)
    limits = [n for n in said if isinstance(n, int) and not isinstance(n, bool) and n > 0]
    return min(limits, default=None)


def _integer(name: str, value: str) -> int:
    if not _INTEGER.fullmatch(value.strip()):
        raise GatewayError(400, f"{name}: expected a whole number", "invalid_request")
    return int(value)
