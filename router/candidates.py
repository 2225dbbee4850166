"""The candidates for each model: built once, and kept until something about them changes.

A decision looks at every holder that could take a request, and from one decision to the next little
changes about them. What a candidate is made of lives elsewhere (`fleet.py`, `load.py`, `sources.py`,
`lineage.py`); whoever changes it calls `touch` for one holder, or `reset` when it may matter who is a
candidate at all. Changes of sources are noticed here.

Invariant: what is kept equals what would be built now (`outdated` tells, `invariants.py` asks).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from moongate.router.fleet import Fleet, InstanceState
from moongate.router.index import OwnershipIndex
from moongate.router.lineage import RecentSessions
from moongate.router.load import LoadTable
from moongate.router.model import BlockSpace, Duty, Holder, InstanceId
from moongate.router.policy import Candidate
from moongate.router.sources import Sources


@dataclass(slots=True)
class Seat:
    """A holder's place among the candidates."""

    instance: InstanceState
    holder: Holder
    candidate: Candidate | None = None  # without an overlap; None: to be built
    sharing: Candidate | None = None  # with the overlap that it was asked for last

    def having(self, overlap_tokens: int, confirmed_tokens: int) -> Candidate:
        """Return the candidate with this overlap. It must be built.

        *Why* the last is kept: what many candidates have, a system prompt, they have for every request.
        """
        kept = self.sharing
        if kept is not None and kept[8] == overlap_tokens and kept[9] == confirmed_tokens:
            return kept
        assert self.candidate is not None
        self.sharing = self.candidate.having(overlap_tokens, confirmed_tokens)
        return self.sharing


@dataclass(frozen=True, slots=True)
class Group:
    """The holders that may take a request for one model, in the order of their names."""

    seats: Sequence[Seat]
    positions: Mapping[Holder, int]
    spaces: Mapping[Holder, BlockSpace]  # in which its blocks lie
    masks: Mapping[BlockSpace, int]  # those of one space, as `OwnershipIndex.mask`


class CandidateTable:
    """The groups of all models that were asked for."""

    def __init__(
        self,
        fleet: Fleet,
        index: OwnershipIndex,
        sources: Sources,
        loads: LoadTable,
        sessions: RecentSessions,
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._sources = sources
        self._loads = loads
        self._sessions = sessions
        self._seats: dict[Holder, Seat] = {}
        self._groups: dict[tuple[str, Duty], Group] = {}
        self._spaces: dict[str, frozenset[BlockSpace]] = {}
        self._source_changes = 0  # as of what is kept
        self._touched: set[InstanceId] | None = None  # since they were taken; None: perhaps all

    def touch(self, holder: Holder) -> None:
        """Note that the holder's load, its sessions or its turn changed."""
        if self._touched is not None:
            self._touched.add(holder.instance_id)
        seat = self._seats.get(holder)
        if seat is not None:
            seat.candidate = seat.sharing = None

    def reset(self) -> None:
        """Note that an instance came, went, went up or down, was described, or its breaker changed."""
        self._touched = None
        self._seats.clear()
        self._groups.clear()
        self._spaces.clear()

    def take_touched(self) -> set[InstanceId] | None:
        """Return whose loads may have changed since the last call. None: those of all."""
        touched, self._touched = self._touched, set()
        return touched

    def group(
        self,
        model: str,
        now: float,
        excluded: Collection[InstanceId] = (),
        duty: Duty = Duty.ALL,
    ) -> Group:
        """Return who may take a request for the model now.

        Cost: O(1) for one that is kept. None is kept while a breaker of the model's instances isn't
        closed, since then the time decides; nor is one without the `excluded`, or an empty one (there is no
        bound to the names of models that nobody serves).
        """
        self._follow_sources()
        group = self._groups.get((model, duty)) if not excluded else None
        if group is None:
            group = self._gather(model, now, excluded, duty)
            if group.seats and not excluded and self._are_breakers_closed(model):
                self._groups[model, duty] = group
        return group

    def members(self, group: Group) -> list[Candidate]:
        """Return the group's candidates as they are now, without overlaps."""
        return [seat.candidate or self._fill(seat) for seat in group.seats]

    def space(self, instance: InstanceState, model: str) -> BlockSpace:
        """Return the block space of a model's prompts on an instance."""
        return instance.space(model, self.block_size_tokens(instance))

    def block_size_tokens(self, instance: InstanceState) -> int | None:
        """Return the size of an instance's blocks; None: not known yet.

        What its events say counts more than what discovery or the operator said.
        """
        size = self._sources.block_size_tokens(instance.spec.id)
        if size is None and instance.facts is not None:
            size = instance.facts.block_size_tokens
        return size

    def spaces(self, model: str) -> frozenset[BlockSpace]:
        """Return the block spaces in which a prompt for this model has to be hashed."""
        self._follow_sources()
        spaces = self._spaces.get(model)
        if spaces is None:
            spaces = self._find_spaces(model)
            if spaces:
                self._spaces[model] = spaces
        return spaces

    def outdated(self) -> list[str]:
        """Return the names of what is kept and not right any more: none, if nobody forgot to tell.

        Cost: O(everything that is kept). For `invariants.py`.
        """
        self._follow_sources()
        names = [
            str(seat.holder)
            for seat in self._seats.values()
            if not _is_kept_right(seat, self._build(seat))
        ]
        for (model, duty), group in self._groups.items():
            if group != self._gather(model, -math.inf, (), duty):
                names.append(model)
        for model, spaces in self._spaces.items():
            if spaces != self._find_spaces(model):
                names.append(f"spaces of {model}")
        return names

    def _follow_sources(self) -> None:
        if self._source_changes != self._sources.changes:
            self._source_changes = self._sources.changes
            self.reset()

    def _find_spaces(self, model: str) -> frozenset[BlockSpace]:
        return frozenset(self.space(i, model) for i in self._fleet.serving(model))

    def _are_breakers_closed(self, model: str) -> bool:
        return all(i.breaker.is_closed for i in self._fleet.serving(model))

    def _gather(
        self, model: str, now: float, excluded: Collection[InstanceId], duty: Duty
    ) -> Group:
        seats: list[Seat] = []
        spaces: dict[Holder, BlockSpace] = {}
        for instance in self._fleet.available(model, now, excluded, duty):
            seats += (self._seat(instance, holder) for holder in instance.holders)
            spaces |= dict.fromkeys(instance.holders, self.space(instance, model))
        seats.sort(key=lambda seat: seat.holder)
        positions = {seat.holder: position for position, seat in enumerate(seats)}
        masks = {
            space: self._index.mask(
                holder for holder, lies_in in spaces.items() if lies_in == space
            )
            for space in set(spaces.values())
        }
        return Group(seats, positions, spaces, masks)

    def _seat(self, instance: InstanceState, holder: Holder) -> Seat:
        return self._seats.setdefault(holder, Seat(instance, holder))

    def _fill(self, seat: Seat) -> Candidate:
        seat.candidate = self._build(seat)
        return seat.candidate

    def _build(self, seat: Seat) -> Candidate:
        instance, holder = seat.instance, seat.holder
        load = self._loads.get(holder)
        return Candidate(
            holder,
            instance.spec.role,
            instance.weight,
            self._sources.trust(holder),
            load.active_requests,
            load.queued_prefill_tokens,
            instance.last_chosen.get(holder, 0),
            self._sessions.count(holder),
            slowness=instance.latency.slowness,
        )


def _is_kept_right(seat: Seat, candidate: Candidate) -> bool:
    sharing = seat.sharing
    if sharing is not None and sharing != candidate.having(
        sharing.overlap_tokens, sharing.confirmed_tokens
    ):
        return False
    return seat.candidate is None or seat.candidate == candidate
