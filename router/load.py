"""What each holder was given and has not finished.

Counted from our own forwards, at the moment of deciding, so that it is never stale; other clients
of an engine are not seen here.

Invariant: a holder's load equals the sum over the reservations on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from moongate.router.model import Holder, RequestId


@dataclass(slots=True)
class Load:
    """Work given to a holder and unfinished."""

    active_requests: int = 0
    queued_prefill_tokens: int = 0  # of requests whose first byte has not come
    active_blocks: int = 0  # prompt blocks of unfinished requests


@dataclass(slots=True)
class Reservation:
    holder: Holder
    prefill_tokens: int  # zero once the first byte came
    blocks: int


class LoadTable:
    """The reservations of all unfinished requests, and their sums."""

    def __init__(self) -> None:
        self._loads: dict[Holder, Load] = {}
        self._reservations: dict[RequestId, Reservation] = {}

    def get(self, holder: Holder) -> Load:
        """Return the holder's load: a snapshot for reading, zeros when it has none."""
        return self._loads.get(holder) or Load()

    def reserve(
        self, request_id: RequestId, holder: Holder, prefill_tokens: int, blocks: int
    ) -> None:
        assert request_id not in self._reservations, request_id
        self._reservations[request_id] = Reservation(holder, prefill_tokens, blocks)
        load = self._loads.setdefault(holder, Load())
        load.active_requests += 1
        load.queued_prefill_tokens += prefill_tokens
        load.active_blocks += blocks

    def end_prefill(self, request_id: RequestId) -> None:
        reservation = self._reservations[request_id]
        self._loads[reservation.holder].queued_prefill_tokens -= reservation.prefill_tokens
        reservation.prefill_tokens = 0

    def release(self, request_id: RequestId) -> None:
        """Take back the request's reservation; without one, do nothing."""
        reservation = self._reservations.pop(request_id, None)
        if reservation is None:
            return
        load = self._loads[reservation.holder]
        load.active_requests -= 1
        load.queued_prefill_tokens -= reservation.prefill_tokens
        load.active_blocks -= reservation.blocks
        if load.active_requests == 0:
            del self._loads[reservation.holder]

    @property
    def reservations(self) -> dict[RequestId, Reservation]:
        return self._reservations

    @property
    def loads(self) -> dict[Holder, Load]:
        return self._loads
