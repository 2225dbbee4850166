"""One run: a workload on a fleet under a policy, and what came of it.

Responsible for wiring instances, pool, gateways and users together, for who asks when, and for what is measured.
Not for which runs there are (`presets.py`). Deterministic by its seed, but for `decision_ms_p50`, which is the
only thing that is measured by a real clock.

Users: in a *closed* loop so many play one conversation after the other, each turn after its pause; in an *open*
one conversations begin by chance at a rate (or when a trace says), whatever becomes of earlier ones. What is
measured is what ended between `warm_s` and `horizon_s`.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from moongate.router import InstanceId, RequestId, RouterCore, RouterLimits, make_policy
from moongate.router.events import KvEvent
from moongate.router.model import Role
from moongate.simulator.batching import Job
from moongate.simulator.bounds import Bounds, Pause, device_bounds
from moongate.simulator.conversations import Play, Script, Stage, Workload
from moongate.simulator.faults import Fault, Mishearing
from moongate.simulator.network import Network
from moongate.simulator.profiles import InstanceShape, Profile
from moongate.simulator.shared_store import SharedStore
from moongate.simulator.virtual_gateway import Exchange, VirtualGateway, spec_of
from moongate.simulator.virtual_instance import Agenda, Listener, VirtualInstance, busy_over_mean

RETRY_S = 1.0
"""After a failed request its client asks again."""

Progress = Callable[[float], object]
"""Told how much of a run is over, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What is run."""

    name: str  # "<pool kind>/<policy>"
    profile: Profile
    groups: int
    workload: Workload
    policy: str
    seed: int
    load: str  # what the rows call it
    horizon_s: float
    warm_s: float
    users: int = 0  # of a closed loop; 0: open
    starts_per_s: float | None = None  # of an open loop; None: when the scripts say
    ramp_s: float = 60.0  # within which users begin
    has_pool: bool = True
    dual_path: bool = False
    gateways: int = 1
    options: dict[str, float] = field(default_factory=dict)  # of the policy
    fault: Fault | None = None
    label: str = ""  # what else tells it from others


class Row(NamedTuple):
    """What came of a run. Hit rates are shares of prompt tokens; loads are those of one role."""

    name: str
    workload: str
    load: str
    fault: str
    instances: int
    gpus: int
    hit_rate: float
    device_hit_rate: float
    pool_hit_rate: float
    throughput: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    e2e_ms_p50: float
    pool_bytes: float
    load_max_over_mean: float
    decision_ms_p50: float
    requests: int
    failures: int


@dataclass(slots=True)
class Result:
    """A row, and what plots are made from."""

    row: Row
    ttft_ms: list[float]
    loads: list[tuple[float, list[float]]]  # (time, busy share of each instance since the last)
    bounds: Bounds  # of the share of reused tokens that comes from devices


@dataclass(eq=False)
class _Run:
    """A trial under way."""

    trial: Trial
    agenda: Agenda = field(default_factory=Agenda)
    ended: list[Exchange] = field(default_factory=list)
    failures: int = 0
    count: int = 0
    plays: int = 0

    def __post_init__(self) -> None:
        trial = self.trial
        self.chance = random.Random(trial.seed)  # noqa: S311 - to be repeated
        self.stage = Stage(trial.workload)
        shapes = [
            (f"{_letter(shape)}{n}", shape)
            for n in range(trial.groups)
            for shape in trial.profile.group
        ]
        self.network = Network(trial.profile.network, len(shapes))
        self.store = self._make_store(len(shapes)) if trial.has_pool else None
        self.instances = {
            InstanceId(name): self._make_instance(name, shape, node)
            for node, (name, shape) in enumerate(shapes)
        }
        self.gateways = [self._make_gateway(n) for n in range(trial.gateways)]
        self._by_request: dict[str, VirtualGateway] = {}
        self.mishearing = Mishearing(trial.fault, self.agenda, trial.seed)

    # --- the fleet --------------------------------------------------------------------------------

    def _make_store(self, instances: int) -> SharedStore:
        profile = self.trial.profile
        block_bytes = profile.group[0].kv_bytes_per_token * self.trial.workload.block_tokens
        return SharedStore(int(profile.pool_bytes_per_instance * instances / block_bytes))

    def _make_instance(self, name: str, shape: InstanceShape, node: int) -> VirtualInstance:
        trial = self.trial
        partner = None
        if trial.dual_path:
            partner = node + 1 if shape.role is Role.PREFILL else (node + 1) % trial.groups
        return VirtualInstance(
            InstanceId(name),
            shape,
            node,
            trial.workload.block_tokens,
            self.agenda,
            self.network,
            Listener(self._begun, self._finished, self._lost, self._published),
            store=self.store,
            partner=partner,
            announces=trial.policy == "kv_cost",
        )

    def _make_gateway(self, number: int) -> VirtualGateway:
        trial = self.trial
        chance = random.Random(f"{trial.seed}/{number}")  # noqa: S311 - to be repeated
        core = RouterCore(
            make_policy(trial.policy, trial.options),
            chance.randrange,
            RouterLimits(
                index_blocks_max=50_000_000,
                prefill_tokens_per_ms=trial.profile.prefill_tokens_per_s / 1000,
            ),
        )
        gateway = VirtualGateway(
            core,
            self.agenda,
            self.instances,
            trial.workload.block_tokens,
            self.store,
            trial.profile.group[0].load_bytes_per_token,
            sends_session_keys=trial.policy == "session_hash",
            has_replay=trial.fault is None or trial.fault.has_replay,
        )
        gateway.join([spec_of(instance) for instance in self.instances.values()])
        return gateway

    # --- what engines tell ------------------------------------------------------------------------

    def _begun(self, job: Job) -> None:
        self._by_request[job.id].begun(job)

    def _finished(self, job: Job) -> None:
        self._by_request[job.id].finished(job)

    def _lost(self, job: Job) -> None:
        gateway = self._by_request.get(job.id)
        if gateway is not None:
            gateway.lost(job)

    def _published(
        self, instance: VirtualInstance, sequence: int, events: tuple[KvEvent, ...]
    ) -> None:
        for gateway in self.gateways:
            self.mishearing.pass_on(gateway, instance.id, sequence, events)

    # --- users ------------------------------------------------------------------------------------

    def ask(self, play: Play, session: str, then: Callable[[], object]) -> None:
        """Send a conversation's next turn; go on with it until it is over, then call `then`."""
        turn = play.script.turns[play.next_turn]
        exchange = Exchange(
            RequestId(f"r{self.count}"),
            play.branch(turn),
            turn.prompt_tokens,
            turn.answer_tokens,
            session,
            play.script.key or session,
            self.agenda.now,
            lambda done: self._answered(done, play, session, then),
        )
        gateway = self.gateways[self.count % len(self.gateways)]
        self.count += 1
        self._by_request[exchange.id] = gateway
        gateway.arrive(exchange)

    def _answered(
        self, exchange: Exchange, play: Play, session: str, then: Callable[[], object]
    ) -> None:
        del self._by_request[exchange.id]
        gap_s = RETRY_S
        if exchange.has_failed:
            self.failures += 1
        else:
            self.ended.append(exchange)
            play.next_turn += 1
            if play.next_turn == len(play.script.turns):
                then()
                return
            gap_s = play.script.turns[play.next_turn].gap_s
        self.agenda.at(self.agenda.now + gap_s, lambda: self.ask(play, session, then))

    def start(self) -> None:
        """Put users, or the beginnings of conversations, on the agenda."""
        trial = self.trial
        scripts = self._shuffled()
        if trial.users:
            for number in range(trial.users):
                at = trial.ramp_s * number / trial.users
                self.agenda.at(at, lambda: self._next_play(scripts))
        elif trial.starts_per_s is not None:
            at = 0.0
            while (at := at + self.chance.expovariate(trial.starts_per_s)) < trial.horizon_s:
                self._begin_at(at, next(scripts))
        else:
            for script in trial.workload.scripts:
                if script.starts_at_s is not None and script.starts_at_s < trial.horizon_s:
                    self._begin_at(script.starts_at_s, script)

    def _begin_at(self, at: float, script: Script) -> None:
        self.agenda.at(at, lambda: self._play(script, lambda: None))

    def _next_play(self, scripts: Iterator[Script]) -> None:
        self._play(next(scripts), lambda: self._next_play(scripts))

    def _play(self, script: Script, then: Callable[[], object]) -> None:
        self.plays += 1
        self.ask(self.stage.play(script), f"s{self.plays}", then)

    def _shuffled(self) -> Iterator[Script]:
        """Yield the scripts in an order by chance, again and again."""
        scripts = list(self.trial.workload.scripts)
        while True:
            self.chance.shuffle(scripts)
            yield from scripts


def _letter(shape: InstanceShape) -> str:
    return {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.BOTH: "both"}[shape.role]


def run(trial: Trial, progress: Progress = lambda share: None) -> Result:
    """Run a trial and return what came of it."""
    under_way = _Run(trial)
    under_way.start()
    if trial.fault is not None:
        trial.fault.plan(under_way.agenda, under_way.gateways)
    instances = list(under_way.instances.values())
    loads: list[tuple[float, list[float]]] = []
    before = [0.0] * len(instances)
    warm_busy, warm_bytes = before, 0.0
    intervals = 60
    for number in range(1, intervals + 1):
        until = trial.horizon_s * number / intervals
        if until - trial.horizon_s / intervals < trial.warm_s <= until:
            under_way.agenda.run(trial.warm_s)
            warm_busy = [i.busy_s for i in instances]
            warm_bytes = sum(i.pool_bytes for i in instances)
        under_way.agenda.run(until)
        busy = [i.busy_s for i in instances]
        share = [(b - a) * intervals / trial.horizon_s for a, b in zip(before, busy, strict=True)]
        loads.append((until, share))
        before = busy
        progress(number / intervals)
    measured = [e for e in under_way.ended if e.ended_at >= trial.warm_s]
    busy = [i.busy_s - w for i, w in zip(instances, warm_busy, strict=True)]
    pool_bytes = sum(i.pool_bytes for i in instances) - warm_bytes
    row = _row(trial, under_way, measured, _imbalance(instances, busy), pool_bytes)
    return Result(row, _ttfts_ms(measured), loads, _bounds(under_way, measured))


def _bounds(under_way: _Run, measured: Sequence[Exchange]) -> Bounds:
    """Return what share of what was reused could have come from devices."""
    trial, last = under_way.trial, dict[str, Exchange]()
    pauses: list[Pause] = []
    held_token_s = 0.0
    for exchange in sorted(under_way.ended, key=lambda e: e.arrived_at):
        before = last.get(exchange.session)
        last[exchange.session] = exchange
        if exchange.ended_at < trial.warm_s:
            continue
        begun_at = exchange.first_token_at or exchange.ended_at
        held_token_s += exchange.prompt_tokens * (exchange.ended_at - begun_at)
        if before is not None:
            pause_s = exchange.arrived_at - before.ended_at
            pauses.append(Pause(pause_s, exchange.cached_tokens, exchange.cached_tokens))
    over = (exchange for exchange in last.values() if exchange.ended_at >= trial.warm_s)
    pauses += (Pause(trial.horizon_s - e.ended_at, e.prompt_tokens, 0) for e in over)
    capacity = sum(i.batcher.shape.blocks * i.block_tokens for i in under_way.instances.values())
    room_token_s = capacity * (trial.horizon_s - trial.warm_s) - held_token_s
    return device_bounds(pauses, room_token_s, sum(e.cached_tokens for e in measured))


def _imbalance(instances: Sequence[VirtualInstance], busy_s: Sequence[float]) -> float:
    """Return the busiest instance's time over its role's mean, of the role where that is the most."""
    roles = {i.shape.role for i in instances}
    return max(
        busy_over_mean([b for i, b in zip(instances, busy_s, strict=True) if i.shape.role is role])
        for role in roles
    )


def _ttfts_ms(exchanges: Sequence[Exchange]) -> list[float]:
    return sorted(
        (e.first_token_at - e.arrived_at) * 1000 for e in exchanges if e.first_token_at is not None
    )


def _row(
    trial: Trial,
    under_way: _Run,
    measured: Sequence[Exchange],
    imbalance: float,
    pool_bytes: float,
) -> Row:
    prompt_tokens = max(sum(e.prompt_tokens for e in measured), 1)
    cached, pooled = (
        sum(e.cached_tokens for e in measured),
        sum(e.pool_tokens for e in measured),
    )
    ttfts_ms = _ttfts_ms(measured)
    e2e_ms = sorted((e.ended_at - e.arrived_at) * 1000 for e in measured)
    decisions_s = [s for gateway in under_way.gateways for s in gateway.decisions_s]
    return Row(
        name=trial.name,
        workload=trial.workload.name,
        load=trial.load,
        fault=trial.fault.name if trial.fault is not None else "",
        instances=len(under_way.instances),
        gpus=trial.groups * trial.profile.gpus,
        hit_rate=cached / prompt_tokens,
        device_hit_rate=(cached - pooled) / prompt_tokens,
        pool_hit_rate=pooled / prompt_tokens,
        throughput=len(measured) / (trial.horizon_s - trial.warm_s),
        ttft_ms_p50=quantile(ttfts_ms, 0.5),
        ttft_ms_p99=quantile(ttfts_ms, 0.99),
        e2e_ms_p50=quantile(e2e_ms, 0.5),
        pool_bytes=pool_bytes,
        load_max_over_mean=imbalance,
        decision_ms_p50=statistics.median(decisions_s) * 1000 if decisions_s else 0.0,
        requests=len(measured),
        failures=under_way.failures,
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which this share lies; 0 of nothing."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0
