"""Answers with 429, kept while other instances are asked: if all refuse, the client gets the one that asks
for the shortest wait, as it came."""

from __future__ import annotations

import math
import time
from email.utils import parsedate_to_datetime
from typing import NamedTuple

from moongate.gateway.proxy.handing_over import Opened
from moongate.router import Forward


class Refused(NamedTuple):
    """One answer, and where it came from."""

    opened: Opened
    forward: Forward


class Refusals:
    """Those of one request. Holds one answer at most; `close` it in the end."""

    def __init__(self) -> None:
        self._best: Refused | None = None
        self._best_s = math.inf

    def keep(self, refused: Refused) -> None:
        """Keep an answer, unless one is kept that asks for a shorter wait. What isn't kept is closed."""
        wait_s = retry_after_s(refused.opened.answer.header(b"retry-after"), time.time())
        if self._best is not None:
            if wait_s >= self._best_s:
                refused.opened.answer.close()
                return
            self._best.opened.answer.close()
        self._best, self._best_s = refused, wait_s

    def best(self) -> Refused | None:
        """Return what the client is to get. None: nobody has refused."""
        return self._best

    def close(self) -> None:
        if self._best is not None:
            self._best.opened.answer.close()


def retry_after_s(value: str, unix_s: float) -> float:
    """Return the seconds that a `retry-after` asks for, infinity for none or one that can't be read.

    *Source:* RFC 9110, 10.2.3: seconds, or a date.
    """
    value = value.strip()
    if value.isascii() and value.isdecimal() and len(value) < 10:
        return float(value)
    try:
        return max(parsedate_to_datetime(value).timestamp() - unix_s, 0.0)
    except (ValueError, OverflowError):
        return math.inf
