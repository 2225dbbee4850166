"""From a request to a decision: who could take it, what it continues, how the policy ranks them.

Reads the router's state and changes none of it (that candidates are kept shows nowhere), so that a dry
run (`explain`) and a real decision are the same code.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moongate.router.candidates import CandidateTable, Group
from moongate.router.commands import Decision
from moongate.router.cost import CostWeights
from moongate.router.fleet import Fleet
from moongate.router.index import OwnershipIndex
from moongate.router.lineage import Lineage, Lineages
from moongate.router.model import (
    TEXT_SPACE,
    BlockHash,
    Duty,
    Holder,
    InstanceId,
    KnownPart,
    Prompt,
    Reason,
    Request,
)
from moongate.router.pairing import choose_pair
from moongate.router.policy import Candidate, Policy, RandomBelow, Ranked, Situation

PLACES = 2
"""The one that is chosen, and the runner-up for the receipt."""


COVERED_QUEUE_MS = 20.0
"""An instance with prefill for longer than this ahead may lose the request to one that fetches."""


class Departure(NamedTuple):
    """A request's place among earlier ones, and the chain in which it was found."""

    chain: Sequence[BlockHash]
    shared_blocks: int  # the longest overlap among the candidates
    lineage: Lineage


class Place(NamedTuple):
    """A candidate chosen, and what is known of the prompt in its blocks."""

    chosen: Candidate
    known: KnownPart


class Choice(NamedTuple):
    """The candidate chosen, why, and where the request departs from earlier ones.

    `prefill`: where its prompt is computed, if that is on another instance.
    """

    chosen: Candidate
    known: KnownPart  # of the prompt, there
    decision: Decision
    departure: Departure
    prefill: Place | None = None


class _Ranking(NamedTuple):
    """What a policy said of a group."""

    ranked: Sequence[Ranked]
    group: Group
    departure: Departure

    def place(self, request: Request, chosen: Candidate) -> Place:
        if request.prompt is None:
            return Place(chosen, NOTHING)
        return Place(chosen, request.prompt.known_in(self.group.spaces[chosen.holder]))


NOTHING = KnownPart((), 1, 0, is_text=True)
NOWHERE = Departure((), 0, Lineage())
"""What is known of a request without a prompt, and where it departs."""


@dataclass(frozen=True, slots=True)
class Chooser:
    """Reads the state it was given; see `choose`."""

    fleet: Fleet
    index: OwnershipIndex
    table: CandidateTable
    lineages: Lineages

    def choose(
        self,
        policy: Policy,
        request: Request,
        random_below: RandomBelow,
        now: float,
        excluded: Collection[InstanceId] = (),
        places: int | None = PLACES,
        duty: Duty = Duty.ALL,
    ) -> Choice | None:
        """Return what `policy` decides for the request now. None: there is no candidate.

        `places`: how many are ranked at least, None for all.
        """
        if not (request.may_hand_over and self.fleet.has_prefill(request.model)):
            duty = Duty.WHOLE if request.stays_whole else duty
            ranking = self._rank(policy, request, random_below, now, excluded, places, duty)
            if ranking is None:
                return None
            return _alone(policy, request, ranking, is_only=len(ranking.group.seats) == 1)
        local = self._rank(policy, request, random_below, now, excluded, None, Duty.ALL)
        if local is None:
            return None
        prefill = self._rank(policy, request, random_below, now, excluded, places, Duty.PREFILL)
        if prefill is None:
            return _alone(policy, request, local, is_only=len(local.group.seats) == 1)
        return self._pair(policy, request, local, prefill, now, excluded)

    def _rank(
        self,
        policy: Policy,
        request: Request,
        random_below: RandomBelow,
        now: float,
        excluded: Collection[InstanceId],
        places: int | None,
        duty: Duty,
    ) -> _Ranking | None:
        """Return the ranking of those that may do this. None: there are none."""
        group = self.table.group(request.model, now, excluded, duty)
        if not group.seats:
            return None
        candidates, departure, history_tokens = self._place(request, group)
        situation = Situation(
            request=request,
            prompt_tokens=request.prompt_tokens or 0,
            history_tokens=history_tokens,
            departures=departure.lineage.departures,
            tokens_per_ms=self.fleet.tokens_per_ms,
            places=len(candidates) if places is None else places,
            context_tokens=self.fleet.prefill.context_tokens,
        )
        return _Ranking(policy.rank(situation, candidates, random_below), group, departure)

    def _pair(
        self,
        policy: Policy,
        request: Request,
        local: _Ranking,
        prefill: _Ranking,
        now: float,
        excluded: Collection[InstanceId],
    ) -> Choice:
        """Return where a request goes that may go to two: to a pair, or to one."""
        weights = getattr(policy, "weights", None)
        receivers = self.table.group(request.model, now, excluded, Duty.RECEIVE).positions
        pair = choose_pair(
            local.ranked,
            [place for place in local.ranked if place.holder in receivers],
            prefill.ranked,
            weights if isinstance(weights, CostWeights) else CostWeights(),
            request.prompt_tokens or 0,
            self.fleet.handoff_tokens_per_ms,
        )
        if pair.prefill is None:
            return _alone(policy, request, local._replace(ranked=pair.ranking), is_only=False)
        chosen, known = local.place(request, pair.ranking[0].candidate)
        decision = _decision(request, policy, pair.ranking, pair.prefill, is_only=False)
        first_leg = prefill.place(request, pair.prefill.candidate)
        # It departs from what prefill instances hold.
        return Choice(chosen, known, decision, prefill.departure, first_leg)

    def find_reuse(self, request: Request, now: float) -> float:
        """Return how many tokens of the prompt are somewhere in the fleet, or in the pool."""
        if request.prompt is None:
            return 0.0
        group = self.table.group(request.model, now)
        chain, block_tokens = _lineage_chain(request.prompt)
        history_tokens = self.lineages.find_history(chain) * block_tokens
        overlaps = self._overlaps(request.prompt, group, history_tokens)
        pooled = (part.tokens * part.weight for part in request.pool.values())
        return max(*(tokens for _, tokens in overlaps.values()), *pooled, 0, 0)

    def is_covered(self, request: Request, now: float) -> bool:
        """See `RouterCore.covers`."""
        assert request.prompt is not None
        chain, block_tokens = _lineage_chain(request.prompt)
        history_tokens = self.lineages.find_history(chain) * block_tokens
        usable_tokens = (request.prompt.token_count - 1) // block_tokens * block_tokens
        enough = min(history_tokens, usable_tokens) or usable_tokens - block_tokens
        # Where a prompt may be computed for another instance, the pool decides whether that pays, even
        # if the one that will answer has all of it.
        is_handed_over = request.may_hand_over and self.fleet.has_prefill(request.model)
        duty = Duty.PREFILL if is_handed_over else Duty.ALL
        group = self.table.group(request.model, now, duty=duty)
        members = self.table.members(group)
        overlaps = self._overlaps(request.prompt, group, history_tokens)
        for holder, (confirmed, _) in overlaps.items():
            queued = members[group.positions[holder]].queued_prefill_tokens
            is_free = queued <= COVERED_QUEUE_MS * self.fleet.tokens_per_ms
            if is_free and confirmed >= enough:
                return True
        return False

    def _place(self, request: Request, group: Group) -> tuple[list[Candidate], Departure, int]:
        """Return the candidates with their overlaps, what the prompt continues, and its tokens."""
        prompt = request.prompt
        if prompt is None:
            return self.table.members(group), NOWHERE, 0
        chain, block_tokens = _lineage_chain(prompt)
        history_blocks = self.lineages.find_history(chain)
        overlaps = self._overlaps(prompt, group, history_blocks * block_tokens)
        pooled_tokens = (part.tokens for part in request.pool.values())
        longest_tokens = max(*map(max, set(overlaps.values())), *pooled_tokens, 0, 0)
        shared_blocks = min(longest_tokens // block_tokens, len(chain))
        lineage = self.lineages.depart(chain, history_blocks, shared_blocks)
        departure = Departure(chain, shared_blocks, lineage)
        candidates = self._candidates(group, overlaps)
        if request.pool:
            self._add_pool(request, group, candidates)
        return candidates, departure, history_blocks * block_tokens

    def _overlaps(
        self, prompt: Prompt, group: Group, likely_tokens: int
    ) -> dict[Holder, tuple[int, int]]:
        """Return in tokens the overlap of each holder that has one: confirmed, and in all."""
        tokens: dict[Holder, tuple[int, int]] = {}
        for space, mask in group.masks.items():
            chain, size, usable_blocks, _ = prompt.known_in(space)
            found = self.index.find_overlaps(chain, usable_blocks, mask, likely_tokens // size)
            in_tokens = {
                o: (o.confirmed_blocks * size, o.blocks * size) for o in set(found.values())
            }
            for holder, overlap in found.items():
                tokens[holder] = in_tokens[overlap]
            foreign = self.index.foreign.find_overlaps(chain, usable_blocks, size)
            for holder, blocks in foreign.items():
                confirmed_tokens, overlap_tokens = tokens.get(holder, (0, 0))
                if group.spaces.get(holder) == space and blocks * size > overlap_tokens:
                    tokens[holder] = confirmed_tokens, blocks * size
        return tokens

    def _candidates(self, group: Group, overlaps: dict[Holder, tuple[int, int]]) -> list[Candidate]:
        """Return the group's candidates, replaced by copies with their overlap where there is one."""
        candidates, seats = self.table.members(group), group.seats
        for holder, (confirmed_tokens, overlap_tokens) in overlaps.items():
            position = group.positions[holder]
            candidates[position] = seats[position].having(overlap_tokens, confirmed_tokens)
        return candidates

    def _add_pool(self, request: Request, group: Group, candidates: list[Candidate]) -> None:
        """Replace those candidates that use the pool by copies with what it has for them."""
        for position, seat in enumerate(group.seats):
            part = seat.instance.part_of(request.pool)
            if part is not None and part.tokens:
                ms_per_token = self.fleet.fetch_ms_per_token(part, seat.instance)
                candidates[position] = candidates[position].fetching(part, ms_per_token)


def _lineage_chain(prompt: Prompt) -> tuple[Sequence[BlockHash], int]:
    """Return the chain by which a prompt's lineage is told, and the tokens of a block.

    Of several that of the smallest blocks.
    """
    real = [space for space in prompt.chains if space != TEXT_SPACE]
    space = min(real, key=lambda s: (s.block_size_tokens, s.lora_name or ""), default=TEXT_SPACE)
    known = prompt.known_in(space)
    return known.chain, known.block_tokens


def _alone(policy: Policy, request: Request, ranking: _Ranking, *, is_only: bool) -> Choice:
    """Return the first of a ranking as where a request goes, to be served by it alone."""
    decision = _decision(request, policy, ranking.ranked, None, is_only=is_only)
    chosen, known = ranking.place(request, ranking.ranked[0].candidate)
    return Choice(chosen, known, decision, ranking.departure)


def _decision(
    request: Request,
    policy: Policy,
    ranked: Sequence[Ranked],
    prefill: Ranked | None,
    *,
    is_only: bool,
) -> Decision:
    computing = prefill or ranked[0]  # where the prompt is
    candidate, reason = computing.candidate, computing.reason
    if is_only and reason is not Reason.POOL_PREFIX:  # that says more than that it was the last one
        reason = Reason.ONLY_CHOICE
    elif policy.reads_prompts and request.is_prompt_missing and reason is Reason.LOAD:
        reason = Reason.FALLBACK
    return Decision(
        policy.name,
        reason,
        request.prompt_tokens,
        candidate.overlap_tokens,
        candidate.pool_tokens,
        tuple(ranked),
        prefill,
    )
