"""Stored responses, by which a conversation can go on anywhere: in memory, bounded, pure.

A response keeps only what its own turn added and holds on to the one that it continued, so a conversation of
many turns is kept once, and none of it goes while a later turn can still be continued.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

OVERHEAD_BYTES = 512
"""What a response takes beside its texts, about."""


@dataclass(slots=True, eq=False)
class StoredResponse:
    """One turn. Items are JSON, with commas between and no brackets around them; so can they be joined."""

    tenant: str
    id: str
    previous: StoredResponse | None
    input_items: bytes
    output_items: bytes
    response: bytes  # the object, as its client got it
    events: bytes = b""  # whole ones, of a stream
    version: str = ""  # tells what was kept under one id, one after the other, apart
    is_stream: bool = False  # that can be told again
    is_running: bool = False  # in the background; nothing can continue it yet
    used_at: float = 0.0
    _uses: int = field(default=0, init=False)  # by the store, and by responses that continue it

    @property
    def size_bytes(self) -> int:
        texts = (self.input_items, self.output_items, self.response, self.events)
        return OVERHEAD_BYTES + sum(map(len, texts))

    def line(self) -> Iterator[StoredResponse]:
        """Iterate over this response and those before it, the latest first."""
        one: StoredResponse | None = self
        while one is not None:
            yield one
            one = one.previous

    def history_bytes(self) -> int:
        """Return about how long the history is, without putting it together."""
        return sum(len(one.output_items) + len(one.input_items) + 2 for one in self.line())

    def history(self) -> bytes:
        """Return the items of the whole conversation, this response's output last."""
        parts = (part for one in self.line() for part in (one.output_items, one.input_items))
        return b",".join([part for part in parts if part][::-1])


class ResponseStore:
    """Keeps responses for `ttl_s` after their last use, in `bytes_max` at most; the longest unused go first.

    `now` is monotonic and never falls.
    """

    def __init__(self, ttl_s: float, bytes_max: int) -> None:
        self._ttl_s = ttl_s
        self.bytes_max = bytes_max
        self._responses: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self.bytes_used = 0

    def __len__(self) -> int:
        return len(self._responses)

    def find(self, tenant: str, response_id: str, now: float) -> StoredResponse | None:
        """Return a tenant's response, None if it has none of this id or it has expired.

        Those that it continues count as used as well. Cost: O(turns before it).
        """
        self._expire(now)
        found = self._responses.get((tenant, response_id))
        if found is None:
            return None
        for one in reversed([*found.line()]):
            one.used_at = now
            if self._responses.get((one.tenant, one.id)) is one:
                self._responses.move_to_end((one.tenant, one.id))
        return found

    def put(self, response: StoredResponse, now: float) -> None:
        """Keep a response, in place of one with the same id; none that is too long with those before it."""
        self._expire(now)
        self.remove(response.tenant, response.id)
        if sum(one.size_bytes for one in response.line()) > self.bytes_max:
            return  # all others would go for it, and then itself
        response.used_at = now
        self._responses[response.tenant, response.id] = response
        self._hold(response)
        while self.bytes_used > self.bytes_max:
            self._release(self._responses.popitem(last=False)[1])

    def remove(self, tenant: str, response_id: str) -> bool:
        """Forget a response; what continues it stays whole. Return whether there was one."""
        found = self._responses.pop((tenant, response_id), None)
        if found is not None:
            self._release(found)
        return found is not None

    def _expire(self, now: float) -> None:
        while self._responses:
            oldest = next(iter(self._responses.values()))
            if now - oldest.used_at < self._ttl_s:
                break
            self._release(self._responses.popitem(last=False)[1])

    def _hold(self, response: StoredResponse) -> None:
        """Count one more use. What had none, or had lost it while a turn went on, takes room again."""
        for one in response.line():
            one._uses += 1  # noqa: SLF001 - its count is this store's business
            if one._uses > 1:  # noqa: SLF001
                break
            self.bytes_used += one.size_bytes

    def _release(self, response: StoredResponse) -> None:
        for one in response.line():
            one._uses -= 1  # noqa: SLF001
            if one._uses:  # noqa: SLF001
                break
            self.bytes_used -= one.size_bytes
