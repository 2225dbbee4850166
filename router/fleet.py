"""The instances known now: what they are, and whether work may be given to them.

Three things keep an instance from getting work. Health checks found it down (with hysteresis; a
refused connection is proof and needs no second one). Its breaker is open, since requests failed there
(`breaker.py`). Or discovery has not described it yet.

What an instance holds or was given is not here: see `index.py` and `load.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from moongate.router.breaker import Breaker, BreakerLimits
from moongate.router.cost import (
    DISK_BYTES_PER_MS_PRIOR,
    FETCH_BYTES_PER_MS_PRIOR,
    HANDOFF_TOKENS_PER_MS_PRIOR,
    LOCAL_SPEEDUP,
    OBSERVED_BYTES_MIN,
    OBSERVED_TOKENS_MIN,
    LearnedRate,
)
from moongate.router.model import (
    TEXT_SPACE,
    BlockSpace,
    Duty,
    Holder,
    InstanceFacts,
    InstanceId,
    InstanceSpec,
    KeySpace,
    ModelCard,
    PoolPart,
    Role,
)
from moongate.router.rates import PrefillRate, RelativeSpeed
from moongate.router.slowness import Kind, Latencies, Latency

ROLES: Mapping[Duty, frozenset[Role]] = {
    Duty.ALL: frozenset({Role.BOTH, Role.DECODE}),
    Duty.PREFILL: frozenset({Role.PREFILL}),
    Duty.RECEIVE: frozenset({Role.BOTH, Role.DECODE}),
    Duty.WHOLE: frozenset({Role.BOTH}),
}


@dataclass(slots=True)
class InstanceState:
    """One instance as the router knows it."""

    spec: InstanceSpec
    facts: InstanceFacts | None = None
    key_space: KeySpace | None = None  # how it names blocks in the pool; None: it uses none
    is_draining: bool = False  # gets no more work
    is_healthy: bool = False  # not before the first successful check
    was_probed: bool = False
    probes_in_a_row: int = 0  # with the outcome opposite to `is_healthy`
    breaker: Breaker = field(default_factory=Breaker)
    last_chosen: dict[Holder, int] = field(default_factory=dict)
    speed: RelativeSpeed = field(default_factory=RelativeSpeed)  # beyond what the operator said
    latency: Latency = field(default_factory=Latency)  # beyond what its speed explains

    @property
    def holders(self) -> tuple[Holder, ...]:
        ranks = self.facts.ranks if self.facts is not None else ()
        if not ranks:
            return (Holder(self.spec.id),)
        return tuple(Holder(self.spec.id, rank) for rank in ranks)

    def holder_of(self, rank: int | None) -> Holder:
        """Return the holder that a rank named by events stands for.

        An engine without data parallelism calls its only cache rank 0, and takes no rank header.
        """
        ranks = self.facts.ranks if self.facts is not None else ()
        return Holder(self.spec.id, rank if ranks or rank else None)

    def card(self, model: str) -> ModelCard | None:
        """Return the entry under which the instance serves this model, None if it doesn't."""
        models = self.facts.models if self.facts is not None else ()
        return next((card for card in models if card.name == model), None)

    def space(self, model: str, block_size_tokens: int | None) -> BlockSpace:
        """Return the block space of the model's prompts here, `TEXT_SPACE` if not known yet."""
        card = self.card(model)
        if card is None or block_size_tokens is None:
            return TEXT_SPACE
        return BlockSpace(block_size_tokens, model if card.is_adapter else None)

    def part_of(self, pool: Mapping[KeySpace, PoolPart]) -> PoolPart | None:
        """Return what the pool has for this instance. None: nothing, or it uses no pool."""
        return pool.get(self.key_space) if self.key_space is not None else None

    @property
    def weight(self) -> float:
        """Return its speed next to an instance of weight 1: as the operator said, and as was learned."""
        return self.spec.weight * self.speed.factor

    @property
    def kind(self) -> Kind:
        """Return what it has in common with those that it is compared with."""
        models = self.facts.models if self.facts is not None else ()
        return self.spec.role.value, models[0].name if models else ""

    # --- health -----------------------------------------------------------------------------------

    def probed(self, is_healthy: bool, is_gone: bool, up_after: int, down_after: int) -> bool:
        """Note a health check. Return True if the instance just went up or down."""
        self.was_probed = True
        if is_healthy == self.is_healthy:
            self.probes_in_a_row = 0
            return False
        self.probes_in_a_row += 1
        needed = 1 if is_gone else (up_after if is_healthy else down_after)
        if self.probes_in_a_row < needed:
            return False
        self.is_healthy = is_healthy
        self.probes_in_a_row = 0
        return True


class Fleet:
    """All instances, by id, in the order in which they were added."""

    def __init__(
        self, prefill_tokens_per_ms: float, breaker_limits: BreakerLimits | None = None
    ) -> None:
        self._breaker_limits = breaker_limits or BreakerLimits()
        self.prefill = PrefillRate(LearnedRate(prefill_tokens_per_ms, OBSERVED_TOKENS_MIN))
        self._handoff = LearnedRate(HANDOFF_TOKENS_PER_MS_PRIOR, OBSERVED_TOKENS_MIN)
        self._fetch = LearnedRate(FETCH_BYTES_PER_MS_PRIOR, OBSERVED_BYTES_MIN)
        self._fetch_disk = LearnedRate(DISK_BYTES_PER_MS_PRIOR, OBSERVED_BYTES_MIN)
        self.latencies = Latencies()
        self._instances: dict[InstanceId, InstanceState] = {}
        self._prefilling: dict[InstanceId, InstanceState] = {}  # of these, those that do only that
        self._cards: dict[str, ModelCard] | None = None  # made when asked for

    def add(self, spec: InstanceSpec) -> InstanceState:
        assert spec.id not in self._instances, spec.id
        breaker = Breaker(self._breaker_limits)
        state = self._instances[spec.id] = InstanceState(spec, breaker=breaker)
        if spec.role is Role.PREFILL:
            self._prefilling[spec.id] = state
        return state

    def change(self, instance: InstanceState, spec: InstanceSpec) -> None:
        """Note another role, weight or the like of an instance; what is known of it stays."""
        assert instance.spec.id == spec.id, (instance.spec, spec)
        instance.spec = spec
        self._prefilling.pop(spec.id, None)
        if spec.role is Role.PREFILL:
            self._prefilling[spec.id] = instance

    def set_breaker_limits(self, limits: BreakerLimits) -> None:
        self._breaker_limits = limits
        for instance in self:
            instance.breaker.limits = limits

    def describe(self, instance: InstanceState, facts: InstanceFacts) -> None:
        instance.facts = facts
        self._cards = None

    @property
    def tokens_per_ms(self) -> float:
        """Return the expected prefill speed of an instance of weight 1."""
        return self.prefill.per_ms

    def observe_prefill(
        self,
        instance: InstanceState,
        tokens: int,
        reused_tokens: int,
        elapsed_ms: float,
        *,
        is_certain: bool = False,
    ) -> None:
        """Learn from a prefill that had the instance's prefill to itself.

        `is_certain`: what it reused is known, so that it tells how fast this very instance is.
        """
        work_ms = elapsed_ms * instance.spec.weight
        if is_certain and self.prefill.is_fitted and tokens >= OBSERVED_TOKENS_MIN and work_ms > 0:
            instance.speed.observe(self.prefill.expected_ms(tokens, reused_tokens) / work_ms)
        self.prefill.observe(tokens, reused_tokens, work_ms * instance.speed.factor)

    def observe_first_byte(self, instance: InstanceState, tokens: int, elapsed_ms: float) -> None:
        """Learn from a first byte that came after so much work: what was ahead of its prompt, and this itself."""
        expected_ms = tokens / (self.tokens_per_ms * instance.weight)
        self.latencies.observe(instance.latency, instance.kind, expected_ms, elapsed_ms)

    def review_latencies(self, now: float) -> list[InstanceState]:
        """Find out who is slow, if it is time. Return those of whom something else is known now."""
        if not self.latencies.is_due(now):
            return []
        states = list(self._instances.values())
        changed = self.latencies.review(((s.kind, s.latency) for s in states), now)
        return [state for state in states if any(state.latency is one for one in changed)]

    @property
    def handoff_tokens_per_ms(self) -> float:
        """Return the expected speed of a transfer from a prefill to a decode instance."""
        return self._handoff.per_ms

    def observe_handoff(self, tokens: int, elapsed_ms: float) -> None:
        self._handoff.observe(tokens, elapsed_ms)

    def has_prefill(self, model: str) -> bool:
        """Tell whether an instance is there to prefill for others. Cost: O(1) in fleets without any."""
        return any(i.card(model) is not None for i in self._prefilling.values())

    def fetch_ms_per_token(self, part: PoolPart, instance: InstanceState) -> float:
        """Return the expected ms for each token that the instance gets from there."""
        rate = self._fetch_disk if part.on_disk else self._fetch
        return part.bytes_per_token / (rate.per_ms * _nearness(part, instance))

    def observe_fetch(
        self, instance: InstanceState, part: PoolPart, tokens: int, elapsed_ms: float
    ) -> None:
        """Learn from a fetch, the time of which is known apart from the prefill that followed it."""
        rate = self._fetch_disk if part.on_disk else self._fetch
        rate.observe(tokens * part.bytes_per_token, elapsed_ms * _nearness(part, instance))

    def find(self, instance_id: InstanceId) -> InstanceState | None:
        return self._instances.get(instance_id)

    def remove(self, instance_id: InstanceId) -> None:
        del self._instances[instance_id]
        self._prefilling.pop(instance_id, None)
        self._cards = None

    def __len__(self) -> int:
        return len(self._instances)

    def __iter__(self) -> Iterator[InstanceState]:
        return iter(self._instances.values())

    def serving(self, model: str) -> list[InstanceState]:
        """Return the instances that have the model, whatever their state."""
        return [i for i in self._instances.values() if i.card(model) is not None]

    def available(
        self, model: str, now: float, excluded: Iterable[InstanceId], duty: Duty = Duty.ALL
    ) -> list[InstanceState]:
        """Return the instances that may take a request for the model now.

        When the breakers of all that are healthy are open, they are returned all the same: an instance
        that fails some requests is better than none. Not so to prefill, which others can do as well.
        """
        left_out = set(excluded)
        healthy = [
            i
            for i in self.serving(model)
            if i.is_healthy
            and not i.is_draining
            and i.spec.role in ROLES[duty]
            and (duty is not Duty.RECEIVE or self._receives(i, model))
            and i.spec.id not in left_out
        ]
        working = [i for i in healthy if i.breaker.lets_through(now)]
        return working if working or duty is Duty.PREFILL else healthy

    def _receives(self, instance: InstanceState, model: str) -> bool:
        """Tell whether an instance may be given what another has prefilled.

        One that can't would compute it anew, and the blocks would be kept for nobody.
        """
        if instance.spec.role is Role.DECODE or instance.spec.receives is not None:
            return instance.spec.receives is not False
        is_sure = (i.spec.role is Role.DECODE or i.spec.receives for i in self.serving(model))
        return not any(is_sure)

    def model_cards(self) -> Mapping[str, ModelCard]:
        """Return every model that some instance serves, by name."""
        if self._cards is None:
            self._cards = {}
            for instance in self._instances.values():
                for card in instance.facts.models if instance.facts is not None else ():
                    self._cards.setdefault(card.name, card)
        return self._cards


def _nearness(part: PoolPart, instance: InstanceState) -> float:
    """Return how much faster than over a network the instance gets at these copies."""
    address = instance.facts.address if instance.facts is not None else ""
    is_local = bool(part.host) and part.host in (instance.spec.host, address)
    return LOCAL_SPEEDUP if is_local else 1.0
