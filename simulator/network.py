"""What carries KV between nodes: links that are used by one transfer after another.

Responsible for when bytes that are asked for now are there. Not for which bytes (`shared_store.py`). Pure.

A node has a link in, one out, and one to its own memory. A transfer from several nodes takes its share of each
one's way out and all of it on its own way in, and ends with the slowest. With two paths (DualPath) what is
loaded comes in through a partner's link as well, which hands it on over a network that is not modelled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moongate.simulator.loading import Link


@dataclass(frozen=True, slots=True)
class NetworkShape:
    """The links of each node."""

    node_bytes_per_s: float  # in, and as much out: all interfaces of a node together
    memory_bytes_per_s: float  # from its own memory into its accelerators
    stream_bytes_per_s: float  # of one transfer between two engines at most
    latency_s: float = 0.0005  # of a transfer, beside its bytes


class Network:
    """The links of a fleet's nodes, by number."""

    def __init__(self, shape: NetworkShape, nodes: int) -> None:
        self.shape = shape
        rate = shape.node_bytes_per_s
        self._ways_in = [Link(rate) for _ in range(nodes)]
        self._ways_out = [Link(rate) for _ in range(nodes)]
        self._memories = [Link(shape.memory_bytes_per_s) for _ in range(nodes)]

    def load(
        self, to: int, parts: Mapping[int, float], now: float, partner: int | None = None
    ) -> float:
        """Return when bytes that lie in nodes' memories are in a node's accelerators.

        `partner`: whose way in is used as well.
        """
        ends = [now]
        remote = 0.0
        for node, size in parts.items():
            if node == to:
                ends.append(self._memories[to].carry(size, now))
            else:
                ends.append(self._ways_out[node].carry(size, now))
                remote += size
        if remote:
            ends.append(self._come_in(to, remote, now, partner))
        return max(ends) + self.shape.latency_s

    def _come_in(self, to: int, size: float, now: float, partner: int | None) -> float:
        own = self._ways_in[to]
        if partner is None or partner == to:
            return own.carry(size, now)
        other, rate = self._ways_in[partner], self.shape.node_bytes_per_s
        # Both ways end at the same time, if neither is too busy to take part.
        ahead = other.free_at(now) - own.free_at(now)
        share = min(max((size + ahead * rate) / 2, 0.0), size)
        own_end = own.carry(share, now) if share else now
        return max(own_end, other.carry(size - share, now) if size > share else now)

    def hand_over(self, sender: int, to: int, size: float, now: float) -> float:
        """Return when bytes have come from an engine to another."""
        alone = now + size / self.shape.stream_bytes_per_s
        if sender == to:
            return alone + self.shape.latency_s
        shared = (self._ways_out[sender].carry(size, now), self._ways_in[to].carry(size, now))
        return max(alone, *shared) + self.shape.latency_s
