"""The receipts of the last requests, for operators who ask why a turn went where it did, or was slow.

Bounded: the oldest goes when one more comes. A receipt is here from its first forward on, so requests
under way are among them; the ring holds the very objects that the hot path fills in.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from moongate.gateway.dialects.body import name_session
from moongate.gateway.telemetry.receipt import Receipt

SLOWNESS: Mapping[str, Callable[[Receipt], float]] = {
    "ttft": lambda receipt: receipt.ttft_ms or 0.0,
    "e2e": lambda receipt: receipt.e2e_ms or 0.0,
}
"""By what the slowest can be asked for. Those that don't have it yet come last."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which receipts an operator asks for; None: any.

    `session`: a key (of a tenant's `TENANT/KEY`), or its name. `after`: only those with a higher number.
    """

    session: str | None = None
    instance: str | None = None
    request_id: str | None = None
    after: int = 0

    def takes(self, receipt: Receipt) -> bool:
        if receipt.number <= self.after:
            return False
        if self.request_id is not None and receipt.request_id != self.request_id:
            return False
        if self.instance is not None and not self._takes_instance(receipt):
            return False
        return self.session is None or self._takes_session(receipt.session_key)

    def _takes_instance(self, receipt: Receipt) -> bool:
        decision = receipt.decision
        places = (decision.chosen, decision.prefill)
        return any(p is not None and p.holder.instance_id == self.instance for p in places)

    def _takes_session(self, key: str | None) -> bool:
        return key is not None and self.session in (key, name_session(key))


class RecentReceipts:
    """The last `count_max` of them. About 3 KB each."""

    def __init__(self, count_max: int) -> None:
        self._ring: deque[Receipt] = deque(maxlen=count_max)
        self._count = 0

    def resize(self, count_max: int) -> None:
        """Keep so many from now on, the last ones."""
        self._ring = deque(self._ring, maxlen=count_max)

    def add(self, receipt: Receipt) -> None:
        """Take in a receipt and number it."""
        self._count += 1
        receipt.number = self._count
        self._ring.append(receipt)

    def find(self, wanted: Wanted, limit: int, slowest: str | None = None) -> list[Receipt]:
        """Return the newest first, or the slowest (a key of `SLOWNESS`), `limit` at most."""
        found: Iterable[Receipt] = filter(wanted.takes, reversed(self._ring))
        if slowest is None:
            return list(islice(found, limit))
        return heapq.nlargest(limit, found, SLOWNESS[slowest])
