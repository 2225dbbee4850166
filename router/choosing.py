"""From a request to a decision: who could take it, what it continues, how the policy ranks them.

Reads the router's state and changes none of it, so that a dry run (`explain`) and a real decision
are the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moongate.router.commands import CandidateReport, Decision
from moongate.router.fleet import Fleet, InstanceState
from moongate.router.index import OwnershipIndex
from moongate.router.lineage import Lineage, Lineages, RecentSessions
from moongate.router.load import LoadTable
from moongate.router.model import (
    BlockHash,
    BlockSpace,
    Holder,
    InstanceId,
    Reason,
    Request,
)
from moongate.router.policy import Candidate, Policy, RandomBelow, Ranked, Situation
from moongate.router.sources import Sources


@dataclass(frozen=True, slots=True)
class Departure:
    """A request's place among earlier ones, and the chain in which it was found."""

    chain: Sequence[BlockHash] = ()
    block_tokens: int = 0
    shared_blocks: int = 0  # the longest overlap among the candidates
    lineage: Lineage = field(default_factory=Lineage)


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidate chosen, why, and where the request departs from earlier ones."""

    chosen: Candidate
    decision: Decision
    departure: Departure


@dataclass(frozen=True, slots=True)
class Chooser:
    """Reads the state it was given; see `choose`."""

    fleet: Fleet
    index: OwnershipIndex
    sources: Sources
    loads: LoadTable
    lineages: Lineages
    sessions: RecentSessions

    def choose(
        self,
        policy: Policy,
        request: Request,
        random_below: RandomBelow,
        now: float,
        excluded: Sequence[InstanceId] = (),
    ) -> Choice | None:
        """Return what `policy` decides for the request now. None: there is no candidate."""
        candidates = self._candidates(request, now, excluded)
        if not candidates:
            return None
        departure = self._departure(request, candidates)
        situation = Situation(
            request=request,
            prompt_tokens=request.prompt.token_count if request.prompt is not None else 0,
            history_tokens=departure.lineage.history_blocks * departure.block_tokens,
            departures=departure.lineage.departures,
        )
        ranked = policy.rank(situation, candidates, random_below)
        assert len(ranked) == len(candidates), (policy.name, len(ranked), len(candidates))
        return Choice(ranked[0].candidate, _decision(request, policy, ranked), departure)

    def space(self, instance: InstanceState, model: str) -> BlockSpace:
        """Return the block space of a model's prompts on an instance.

        What its events say counts more than what discovery or the operator said.
        """
        size = self.sources.block_size_tokens(instance.spec.id)
        if size is None and instance.facts is not None:
            size = instance.facts.block_size_tokens
        return instance.space(model, size)

    def spaces(self, model: str) -> set[BlockSpace]:
        """Return the block spaces in which a prompt for this model has to be hashed."""
        return {self.space(instance, model) for instance in self.fleet.serving(model)}

    def usable_chain(self, request: Request, instance: InstanceState) -> Sequence[BlockHash]:
        """Return the hashes of the blocks that the instance could reuse for this request."""
        if request.prompt is None:
            return ()
        space = self.space(instance, request.model)
        return request.prompt.chain(space)[: request.prompt.usable_blocks(space)]

    def _candidates(
        self, request: Request, now: float, excluded: Sequence[InstanceId]
    ) -> list[Candidate]:
        instances = self.fleet.available(request.model, now, excluded)
        overlaps = self._overlaps(request, instances)
        return [
            self._candidate(instance, holder, overlaps.get(holder, (0, 0)))
            for instance in instances
            for holder in instance.holders
        ]

    def _overlaps(
        self, request: Request, instances: Sequence[InstanceState]
    ) -> dict[Holder, tuple[int, int]]:
        """Return each holder's overlap in tokens, confirmed and in all.

        Cost: one walk over the prompt's blocks for each block space, however many instances.
        """
        if request.prompt is None:
            return {}
        holders: dict[BlockSpace, list[Holder]] = {}
        for instance in instances:
            holders.setdefault(self.space(instance, request.model), []).extend(instance.holders)
        tokens: dict[Holder, tuple[int, int]] = {}
        for space, members in holders.items():
            chain, usable = request.prompt.chain(space), request.prompt.usable_blocks(space)
            size = request.prompt.block_tokens(space)
            found = self.index.find_overlaps(chain, usable, members)
            tokens |= {h: (o.confirmed_blocks * size, o.blocks * size) for h, o in found.items()}
        return tokens

    def _candidate(
        self, instance: InstanceState, holder: Holder, overlap_tokens: tuple[int, int]
    ) -> Candidate:
        load = self.loads.get(holder)
        return Candidate(
            holder=holder,
            role=instance.spec.role,
            weight=instance.spec.weight,
            trust=self.sources.trust(holder),
            active_requests=load.active_requests,
            queued_prefill_tokens=load.queued_prefill_tokens,
            tokens_per_ms=self.fleet.tokens_per_ms(instance),
            last_chosen=instance.last_chosen.get(holder, 0),
            overlap_tokens=overlap_tokens[1],
            confirmed_tokens=overlap_tokens[0],
            recent_sessions=self.sessions.count(holder),
        )

    def _departure(self, request: Request, candidates: Sequence[Candidate]) -> Departure:
        """Find out what the request continues. Of several chains that of the smallest blocks counts."""
        prompt = request.prompt
        spaces = [s for s in prompt.chains if prompt.block_tokens(s)] if prompt is not None else []
        if prompt is None or not spaces:
            return Departure()
        space = min(spaces, key=lambda s: (s.block_size_tokens, s.lora_name or ""))
        chain, block_tokens = prompt.chain(space), prompt.block_tokens(space)
        best_overlap_tokens = max(c.overlap_tokens for c in candidates)
        shared_blocks = min(best_overlap_tokens // block_tokens, len(chain))
        lineage = self.lineages.find(chain, shared_blocks)
        return Departure(chain, block_tokens, shared_blocks, lineage)


def _decision(request: Request, policy: Policy, ranked: Sequence[Ranked]) -> Decision:
    best = ranked[0]
    reason = best.reason
    if len(ranked) == 1:
        reason = Reason.ONLY_CHOICE
    elif policy.reads_prompts and request.is_prompt_missing and reason is Reason.LOAD:
        reason = Reason.FALLBACK
    return Decision(
        policy=policy.name,
        reason=reason,
        prompt_tokens=request.prompt.token_count if request.prompt is not None else None,
        device_tokens=best.candidate.overlap_tokens,
        ranking=tuple(_report(entry) for entry in ranked),
    )


def _report(entry: Ranked) -> CandidateReport:
    candidate = entry.candidate
    return CandidateReport(
        holder=candidate.holder,
        overlap_tokens=candidate.overlap_tokens,
        confirmed_tokens=candidate.confirmed_tokens,
        trust=candidate.trust,
        active_requests=candidate.active_requests,
        queued_prefill_tokens=candidate.queued_prefill_tokens,
        cost_ms=entry.cost_ms,
        cost_terms_ms=entry.terms_ms,
    )
