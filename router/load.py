"""What each holder was given and has not finished.

Counted from our own forwards, at the moment of deciding, so that it is never stale, and beside that what
other gateways say that they have given it (`peers.py`), which is a few ms old. Other clients of an
engine are not seen here.

Invariant: what is ours of a holder's load equals the sum over the reservations on it.
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

    def __add__(self, other: Load) -> Load:
        return Load(
            self.active_requests + other.active_requests,
            self.queued_prefill_tokens + other.queued_prefill_tokens,
            self.active_blocks + other.active_blocks,
        )


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """What one gateway has given a holder and not finished, and the sessions it has lately begun there."""

    load: Load
    recent_sessions: int = 0


@dataclass(slots=True)
class Reservation:
    holder: Holder
    prefill_tokens: int  # zero once the first byte came
    blocks: int


class LoadTable:
    """The reservations of all unfinished requests, and their sums; and what others have reserved."""

    def __init__(self) -> None:
        self._loads: dict[Holder, Load] = {}
        self._elsewhere: dict[Holder, Load] = {}
        self._reservations: dict[RequestId, Reservation] = {}
        self.changed: dict[Holder, None] = {}
        """Holders whose own load changed since it was last looked at, the longest ago first."""

    def get(self, holder: Holder) -> Load:
        """Return the holder's whole load: a snapshot for reading, zeros when it has none."""
        elsewhere = self._elsewhere.get(holder)
        own = self._loads.get(holder) or Load()
        return own if elsewhere is None else own + elsewhere

    def get_own(self, holder: Holder) -> Load:
        """Return what this gateway has given the holder, in the same way."""
        return self._loads.get(holder) or Load()

    def set_elsewhere(self, holder: Holder, load: Load) -> None:
        """Note what all other gateways together have given the holder."""
        if load == Load():
            self._elsewhere.pop(holder, None)
        else:
            self._elsewhere[holder] = load

    def reserve(
        self, request_id: RequestId, holder: Holder, prefill_tokens: int, blocks: int
    ) -> None:
        assert request_id not in self._reservations, request_id
        self._reservations[request_id] = Reservation(holder, prefill_tokens, blocks)
        load = self._loads.setdefault(holder, Load())
        load.active_requests += 1
        load.queued_prefill_tokens += prefill_tokens
        load.active_blocks += blocks
        self.changed[holder] = None

    def end_prefill(self, request_id: RequestId) -> None:
        reservation = self._reservations[request_id]
        self._loads[reservation.holder].queued_prefill_tokens -= reservation.prefill_tokens
        reservation.prefill_tokens = 0
        self.changed[reservation.holder] = None

    def release(self, request_id: RequestId) -> None:
        """Take back the request's reservation; without one, do nothing."""
        reservation = self._reservations.pop(request_id, None)
        if reservation is None:
            return
        load = self._loads[reservation.holder]
        load.active_requests -= 1
        load.queued_prefill_tokens -= reservation.prefill_tokens
        load.active_blocks -= reservation.blocks
        self.changed[reservation.holder] = None
        if load.active_requests == 0:
            del self._loads[reservation.holder]

    @property
    def reservations(self) -> dict[RequestId, Reservation]:
        return self._reservations

    @property
    def loads(self) -> dict[Holder, Load]:
        """Return the loads that are this gateway's own."""
        return self._loads

    @property
    def elsewhere(self) -> dict[Holder, Load]:
        """Return the loads that other gateways have said to have given."""
        return self._elsewhere
