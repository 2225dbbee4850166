"""Hot prefixes: when a beginning that many prompts share is put onto one more instance, and onto which.

A request that goes where its beginning is not gets it from the pool, and its first token waits for that;
several that come together get it several times over, since an engine doesn't see that another request is
fetching the same. A *seeding* gets it once, ahead of them: a request for one token whose prompt is that
beginning.

Theory of operation. Each request departs from what is known of its prompt (`lineage.py`); departures from
one point are its demand. When an answer begins (by then those that came together with it have been
placed), and all holders of its beginning are busy, the least busy of the instances that lack it is seeded,
if the demand is enough for one holder more, the pool has the beginning, and nothing is short: places, what
may begin in a minute, the pool, the instance's cache. A seeding is load of its instance while it runs. What
came of it the instance's own events say; nothing is assumed.

Nothing flaps: an instance is not seeded with the same twice in a minute, even if it has lost it again, and
one that failed is not seeded at all for so long.

Invariants: at most `at_once_max` seedings run, at most one on each instance, each with its reservation; at
most `per_minute_max` begin in any minute; only unfinished requests are watched.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from moongate.router.candidates import CandidateTable, Seat
from moongate.router.choosing import Choice
from moongate.router.commands import Seed
from moongate.router.events import PoolChecked, SeedingEnded
from moongate.router.fleet import Fleet
from moongate.router.index import OwnershipIndex
from moongate.router.load import LoadTable
from moongate.router.model import (
    TEXT_SPACE,
    BlockHash,
    BlockSpace,
    Holder,
    Request,
    RequestId,
)
from moongate.router.policy import Candidate

DEMAND_S = 10.0
"""For how long a departure counts, about: long enough to see the first sub-agents of a fan-out when the
rest comes, short enough that what was popular a minute ago is no reason."""

POINTS_MAX = 4096
"""Beginnings whose demand is counted; the least recently used are forgotten."""

RECENT_S = 60.0
"""The minute of `per_minute_max`. An instance that lost within it what it was seeded with lacks room."""


@dataclass(frozen=True, slots=True)
class SeedingLimits:
    """What bounds seedings. See docs/configuration.md for the reasons."""

    at_once_max: int = 4  # in the fleet; an instance has one at a time
    per_minute_max: int = 20
    demand_per_s_min: float = 0.1  # departures a second that are worth a holder
    busy_requests: int = 2  # unfinished requests with which a holder of weight 1 is busy
    prefix_tokens_min: int = 1024  # to be got from the pool
    pool_use_max: float = 0.95  # allocated over capacity
    kv_use_max: float = 0.7  # of an instance's cache: unfinished requests, and the seeding
    needs_pool_use: bool = True  # a pool that doesn't say how full it is counts as full


class Site(NamedTuple):
    """An instance's cache, as far as it matters for one beginning."""

    holder: Holder
    lacking_tokens: int  # of the beginning
    pooled_tokens: int  # of those, what the pool has for it
    busyness: float  # unfinished requests for its weight
    queue_ms: float  # prefill ahead
    fetch_ms: float  # what getting the beginning from the pool takes here
    kv_use: float | None  # with the seeding; None: its size is not known
    is_seeded: bool = False  # now, with this
    is_barred: bool = False  # now with something else, or lately and to no avail

    def is_busy(self, limits: SeedingLimits) -> bool:
        """Tell whether the next request does better elsewhere: soon, or as prefill takes longer."""
        return self.busyness >= limits.busy_requests or self.queue_ms > self.fetch_ms > 0


def find_target(sites: Sequence[Site], demand_per_s: float, limits: SeedingLimits) -> Site | None:
    """Return the site that should get the beginning. None: none should.

    A site that lacks less than `prefix_tokens_min` of it counts as a holder. One whose cache's size is
    not known is left alone.
    """
    holders = [s for s in sites if s.lacking_tokens < limits.prefix_tokens_min]
    count = len(holders) + sum(s.is_seeded for s in sites)
    if not holders or demand_per_s < limits.demand_per_s_min * count:
        return None
    if not all(holder.is_busy(limits) for holder in holders):
        return None
    least_busy = min(holder.busyness for holder in holders)
    able = [
        s
        for s in sites
        if s.pooled_tokens >= limits.prefix_tokens_min
        and s.kv_use is not None
        and s.kv_use <= limits.kv_use_max
        and not (s.is_seeded or s.is_barred or s.is_busy(limits))
        and s.busyness < least_busy
    ]
    return min(able, key=lambda s: (s.busyness, s.queue_ms, s.holder), default=None)


class Demand:
    """How often requests depart from each point, as a rate that fades."""

    def __init__(self, points_max: int = POINTS_MAX) -> None:
        self._points_max = points_max
        self._points: OrderedDict[BlockHash, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._points)

    def note(self, point: BlockHash, now: float) -> None:
        """Count a departure."""
        self._points[point] = self._count(point, now) + 1, now
        self._points.move_to_end(point)
        if len(self._points) > self._points_max:
            self._points.popitem(last=False)

    def rate_per_s(self, point: BlockHash, now: float) -> float:
        """Return the departures a second."""
        return self._count(point, now) / DEMAND_S

    def _count(self, point: BlockHash, now: float) -> float:
        count, at = self._points.get(point, (0.0, now))
        return count * math.exp((at - now) / DEMAND_S)


class Beginning(NamedTuple):
    """So many leading blocks of a prompt's chain, in this space."""

    chain: Sequence[BlockHash]
    blocks: int
    space: BlockSpace

    @property
    def point(self) -> BlockHash:
        return self.chain[self.blocks - 1]

    @property
    def tokens(self) -> int:
        return self.blocks * self.space.block_size_tokens


class _Place(NamedTuple):
    """An instance that could take a request, and what it lacks of the beginning."""

    seat: Seat
    candidate: Candidate
    lacking_tokens: int


class Running(NamedTuple):
    """A seeding under way."""

    holder: Holder
    point: BlockHash


class _Begun(NamedTuple):
    """A seeding that began lately."""

    at: float
    holder: Holder
    point: BlockHash


@dataclass(slots=True)
class Seeder:
    """The seedings of a fleet. Reads the parts of the core, and reserves what it begins."""

    limits: SeedingLimits
    fleet: Fleet
    index: OwnershipIndex
    loads: LoadTable
    candidates: CandidateTable
    demand: Demand = field(default_factory=Demand)
    watched: dict[RequestId, tuple[Request, Beginning]] = field(default_factory=dict)
    running: dict[RequestId, Running] = field(default_factory=dict)
    _begun: deque[_Begun] = field(default_factory=deque)
    _failed: dict[Holder, float] = field(default_factory=dict)  # when
    _is_pool_up: bool = False
    _pool_use: float | None = None
    _count: int = 0

    # --- what happens -----------------------------------------------------------------------------

    def pool_checked(self, event: PoolChecked) -> None:
        self._is_pool_up, self._pool_use = event.is_up, event.use

    def placed(self, request: Request, choice: Choice, now: float) -> None:
        """Count where a request departs that was just placed."""
        beginning = _find_beginning(request, choice)
        if beginning is None:
            return
        self.demand.note(beginning.point, now)
        if request.pool:
            self.watched[request.id] = request, beginning

    def began(self, request_id: RequestId, now: float) -> list[Seed]:
        """Seed an instance if that is due, now that the request's answer has begun."""
        request, beginning = self.watched.pop(request_id, (None, None))
        if request is None or beginning is None or not self._may_begin(now):
            return []
        target = self._find_target(request, beginning, now)
        return [self._begin(request, beginning, target, now)] if target is not None else []

    def gave_up(self, request_id: RequestId) -> None:
        """Forget a request whose answer won't begin."""
        self.watched.pop(request_id, None)

    def ended(self, event: SeedingEnded, now: float) -> None:
        """Give back what a seeding had reserved."""
        holder, _ = self.running.pop(event.seeding_id)
        self.loads.release(event.seeding_id)
        self.candidates.touch(holder)
        if not event.is_done:
            self._failed[holder] = now

    # --- whether ----------------------------------------------------------------------------------

    def _may_begin(self, now: float) -> bool:
        """Tell whether a seeding may begin anywhere."""
        limits, use, begun = self.limits, self._pool_use, self._begun
        while begun and now - begun[0].at >= RECENT_S:
            begun.popleft()
        has_room = not limits.needs_pool_use if use is None else use <= limits.pool_use_max
        return (
            self._is_pool_up
            and has_room
            and len(self.running) < limits.at_once_max
            and len(begun) < limits.per_minute_max
        )

    # --- where ------------------------------------------------------------------------------------

    def _find_target(self, request: Request, beginning: Beginning, now: float) -> Site | None:
        """Return where the beginning should go, of the instances that could take the request.

        Looks at holders first: mostly one of them is not busy, and that is all there is to know.
        """
        demand_per_s, limits = self.demand.rate_per_s(beginning.point, now), self.limits
        places = self._find_places(request, beginning, now)
        holders = [p for p in places if p.lacking_tokens < limits.prefix_tokens_min]
        if demand_per_s < limits.demand_per_s_min * len(holders):
            return None
        sites: list[Site] = []
        for place in holders:
            sites.append(self._make_site(place, request, beginning))
            if not sites[-1].is_busy(limits):
                return None
        barred = self._find_barred(beginning.point, now)
        sites += (
            self._make_site(place, request, beginning, is_barred=place.seat.holder in barred)
            for place in places
            if place.lacking_tokens >= limits.prefix_tokens_min
        )
        return find_target(sites, demand_per_s, limits)

    def _find_places(self, request: Request, beginning: Beginning, now: float) -> list[_Place]:
        """Return the instances whose blocks are comparable, and what each lacks."""
        space, tokens = beginning.space, beginning.tokens
        group = self.candidates.group(request.model, now)
        overlaps = self.index.find_overlaps(
            beginning.chain, beginning.blocks, group.masks.get(space, 0), beginning.blocks
        )
        held = {h: o.blocks * space.block_size_tokens for h, o in overlaps.items()}
        members = self.candidates.members(group)
        return [
            _Place(seat, candidate, tokens - held.get(seat.holder, 0))
            for seat, candidate in zip(group.seats, members, strict=True)
            if group.spaces[seat.holder] == space
        ]

    def _find_barred(self, point: BlockHash, now: float) -> set[Holder]:
        """Return the holders that are not to be seeded with this now."""
        self._failed = {h: at for h, at in self._failed.items() if now - at < RECENT_S}
        busy = {running.holder for running in self.running.values()}
        return busy | self._failed.keys() | {b.holder for b in self._begun if b.point == point}

    def _make_site(
        self, place: _Place, request: Request, beginning: Beginning, *, is_barred: bool = False
    ) -> Site:
        holder, instance = place.seat.holder, place.seat.instance
        candidate, tokens = place.candidate, beginning.tokens
        part = instance.part_of(request.pool)
        if part is not None and part.weight < 1:
            part = None  # announced, but nobody has seen it there
        capacity = instance.facts.capacity_blocks if instance.facts is not None else None
        blocks = self.loads.get(holder).active_blocks + beginning.blocks
        tokens_per_ms = self.fleet.tokens_per_ms * candidate.weight
        pooled_tokens = min(part.tokens, tokens) if part is not None else 0
        fetch_ms = self.fleet.fetch_ms_per_token(part, instance) * tokens if part is not None else 0
        return Site(
            holder,
            lacking_tokens=place.lacking_tokens,
            pooled_tokens=pooled_tokens - (tokens - place.lacking_tokens),
            busyness=candidate.active_requests / candidate.weight,
            queue_ms=candidate.queued_prefill_tokens / tokens_per_ms,
            fetch_ms=fetch_ms,
            kv_use=blocks / capacity if capacity else None,
            is_seeded=Running(holder, beginning.point) in self.running.values(),
            is_barred=is_barred,
        )

    def _begin(self, request: Request, beginning: Beginning, site: Site, now: float) -> Seed:
        self._count += 1
        seeding_id, holder = RequestId(f"seeding/{self._count}"), site.holder
        tokens = beginning.tokens - site.lacking_tokens + site.pooled_tokens
        self._begun.append(_Begun(now, holder, beginning.point))
        self.running[seeding_id] = Running(holder, beginning.point)
        # Nothing is to be computed but the last block.
        self.loads.reserve(seeding_id, holder, prefill_tokens=0, blocks=beginning.blocks)
        self.candidates.touch(holder)
        return Seed(seeding_id, holder, request.id, request.model, tokens)


def _find_beginning(request: Request, choice: Choice) -> Beginning | None:
    """Return where the request departs, if others went on from there before.

    None as well for a hand-off, and where the prompt's token ids are not certain.
    """
    chain, shared_blocks, lineage = choice.departure
    prompt, blocks = request.prompt, lineage.history_blocks or shared_blocks
    if not (lineage.departures and blocks) or choice.prefill is not None:
        return None
    if prompt is None or not prompt.is_exact:
        return None
    space = next((s for s, known in prompt.chains.items() if known is chain), TEXT_SPACE)
    return Beginning(chain, blocks, space) if space != TEXT_SPACE else None
