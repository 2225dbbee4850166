"""What `moongate simulate --preset` runs: each preset is a list of trials.

docs/simulation.md says what each shows. Gaps between turns are as recorded, but at most `GAP_S_MAX`; where a
report tells its own, at most that.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moongate.loadtest.traces import TraceFormat, find_traces
from moongate.simulator import generators
from moongate.simulator.conversations import Workload, from_traces
from moongate.simulator.faults import Fault
from moongate.simulator.profiles import GB200_KIMI, H200_LLAMA70, NVLINK_GB200, Profile
from moongate.simulator.trial import Trial

GAP_S_MAX = 600.0
REPORT_GAP_S_MAX = 81.4  # the report's 99th percentile
REPORT_SESSIONS = 75  # for 12 GPUs, in the report
HOUR_S = 3600.0
CHAT_PROMPT_TOKENS_MAX = 131_072


@dataclass(frozen=True, slots=True)
class Given:
    """What a preset is run with."""

    seed: int
    traces: Path | None  # None: made-up workloads only
    horizon_s: float = HOUR_S

    def agents(self, gap_s_max: float, prompt_tokens_max: int) -> Workload:
        """Return recorded agents' conversations where there are any, else made-up ones.

        Raises: TraceError, ValueError for traces that can't be played.
        """
        if self.traces is None:
            return generators.codex_like(self.seed)
        found = find_traces(self.traces)
        kind = next((k for k in (TraceFormat.AGENTIC, TraceFormat.MESSAGES) if k in found), None)
        if kind is None:
            raise ValueError(f"{self.traces}: no conversations in it (agentic or messages traces)")
        # Blocks are shared only where the recording says so.
        read = found[kind].read(shares_system=False)
        return from_traces(
            kind.value, read, prompt_tokens_max=prompt_tokens_max, gap_s_max=gap_s_max
        )

    def chats(self) -> Workload | None:
        """Return the recorded Mooncake requests, if there are any."""
        found = {} if self.traces is None else find_traces(self.traces)
        kind = TraceFormat.MOONCAKE
        if kind not in found:
            return None
        return from_traces(
            kind.value, found[kind].read(), prompt_tokens_max=CHAT_PROMPT_TOKENS_MAX, gap_s_max=0.0
        )


# --- the report -----------------------------------------------------------------------------------


def paper_12(given: Given) -> list[Trial]:
    """The report's table: one prefill and one decode group, with a pool and without."""
    trials: list[Trial] = []
    workloads = [given.agents(REPORT_GAP_S_MAX, GB200_KIMI.prompt_tokens_max)]
    if given.traces is not None:
        workloads.append(generators.codex_like(given.seed))
    for workload in workloads:
        base = _report(given, workload, 1, "75 sessions")
        trials += [
            replace(base, name="none/round_robin", has_pool=False),
            base,
            replace(base, load="75 sessions, DualPath", dual_path=True),
            replace(
                base,
                load="75 sessions, NVLink",
                profile=replace(GB200_KIMI, network=NVLINK_GB200),
            ),
            _with_policy(base, "kv_cost"),
        ]
    return trials


def paper_60(given: Given) -> list[Trial]:
    """The report's scaling, 12 to 60 GPUs."""
    agents = given.agents(REPORT_GAP_S_MAX, GB200_KIMI.prompt_tokens_max)
    trials: list[Trial] = []
    for workload in (agents, generators.report_scaling(given.seed)):
        for groups in range(1, 6):
            base = _report(given, workload, groups, f"{REPORT_SESSIONS * groups} sessions")
            trials += [base, _with_policy(base, "kv_cost")]
    return trials


def _report(given: Given, workload: Workload, groups: int, load: str) -> Trial:
    return Trial(
        "pool/round_robin",
        GB200_KIMI,
        groups,
        workload,
        "round_robin",
        given.seed,
        load,
        horizon_s=given.horizon_s,
        warm_s=given.horizon_s / 3,
        users=REPORT_SESSIONS * groups,
    )


# --- routing on top of a pool ---------------------------------------------------------------------

INSTANCES = 16
SESSIONS = 131
"""Alive at once: with the H200 profile's own memory that is the roomy fleet."""


def roomy(given: Given) -> list[Trial]:
    """The fleet's HBM is 1.5 times the KV of the sessions alive."""
    return _pressed(given, 1.5)


def tight(given: Given) -> list[Trial]:
    """The fleet's HBM is 0.3 times the KV of the sessions alive."""
    return _pressed(given, 0.3)


def _pressed(given: Given, share: float) -> list[Trial]:
    base = _on_top_of_a_pool(given, share)
    pooled = [base, *(_with_policy(base, p) for p in ("least_loaded", "session_hash", "kv_cost"))]
    alone = [
        replace(_with_policy(base, p), name=f"none/{p}", has_pool=False)
        for p in ("round_robin", "session_hash", "prefix_affinity", "kv_cost")
    ]
    return [*pooled, *alone]


def _on_top_of_a_pool(given: Given, share: float) -> Trial:
    workload = given.agents(GAP_S_MAX, H200_LLAMA70.prompt_tokens_max)
    profile = with_memory(H200_LLAMA70, workload, INSTANCES, SESSIONS, share)
    return Trial(
        "pool/round_robin",
        profile,
        INSTANCES,
        workload,
        "round_robin",
        given.seed,
        f"{SESSIONS} sessions",
        horizon_s=given.horizon_s,
        warm_s=given.horizon_s / 3,
        users=SESSIONS,
        ramp_s=300.0,
    )


def with_memory(
    profile: Profile, workload: Workload, instances: int, sessions: int, share: float
) -> Profile:
    """Return the profile with so much HBM that the fleet has `share` of what living sessions' KV is.

    A session's KV is taken as its prompt's, at a turn taken by chance. At least one longest prompt fits.
    """
    mean = statistics.fmean(t.prompt_tokens for s in workload.scripts for t in s.turns)
    longest = max(t.prompt_tokens + t.answer_tokens for s in workload.scripts for t in s.turns)
    tokens = max(int(mean * sessions * share / instances), longest + workload.block_tokens)
    return replace(profile, group=tuple(replace(s, kv_tokens=tokens) for s in profile.group))


def affinity(given: Given) -> list[Trial]:
    """Without a pool: `kv_cost` against the policies that keep sessions, on workloads of all kinds."""
    agents = given.agents(GAP_S_MAX, H200_LLAMA70.prompt_tokens_max)
    workloads = [
        (agents, 48),
        (generators.fan_out(given.seed), 96),
        (generators.churn(given.seed), 32),
        (generators.skewed(given.seed), 48),
    ]
    trials = [
        Trial(
            f"none/{policy}",
            H200_LLAMA70,
            8,
            workload,
            policy,
            given.seed,
            f"{users} sessions",
            horizon_s=given.horizon_s,
            warm_s=given.horizon_s / 3,
            users=users,
            has_pool=False,
        )
        for workload, users in workloads
        for policy in ("round_robin", "session_hash", "prefix_affinity", "kv_cost")
    ]
    chats = given.chats()
    if chats is not None:
        first = next(trial for trial in trials)
        trials += [
            replace(
                _with_policy(first, policy),
                name=f"none/{policy}",
                workload=chats,
                users=0,
                load="as recorded",
                groups=16,
            )
            for policy in ("round_robin", "session_hash", "prefix_affinity", "kv_cost")
        ]
    return trials


# --- the terms of the cost ------------------------------------------------------------------------

LEFT_OUT: Mapping[str, Mapping[str, float]] = {
    "": {},
    "active": {"active_request_ms": 0.0},
    "sessions": {"session_ms": 0.0},
    "history": {"history_weight": 0.0},
    "stall": {"stall_ms": 0.0, "stall_weight": 0.0},
}
"""By what a run leaves out of `kv_cost`: the options that do."""


def ablation(given: Given) -> list[Trial]:
    """`kv_cost` whole, and without each of its terms that can be left out."""
    alone = _eight_alone(given)
    pooled = _with_policy(_on_top_of_a_pool(given, 1.5), "kv_cost")
    fan_out = replace(alone, workload=generators.fan_out(given.seed), users=96, load="96 sessions")
    pairs = _with_policy(
        _report(
            given, given.agents(REPORT_GAP_S_MAX, GB200_KIMI.prompt_tokens_max), 1, "75 sessions"
        ),
        "kv_cost",
    )
    return [
        replace(
            base,
            options=dict(options),
            load=f"{base.load}, no {left_out}" if left_out else base.load,
        )
        for base in (pooled, alone, fan_out, pairs)
        for left_out, options in LEFT_OUT.items()
        if (left_out == "stall") <= (base is pairs)
    ]


# --- size and faults ------------------------------------------------------------------------------


def scale_1000(given: Given) -> list[Trial]:
    """What a decision costs, from 8 to 1,000 instances that hold 10,000 blocks each."""
    workload = generators.codex_like(given.seed)
    trials: list[Trial] = []
    for instances in (8, 32, 125, 500, 1000):
        profile = replace(
            H200_LLAMA70,
            group=tuple(
                replace(s, kv_tokens=12_000 * workload.block_tokens) for s in H200_LLAMA70.group
            ),
        )
        sessions = instances * 8
        trials.append(
            Trial(
                "none/kv_cost",
                profile,
                instances,
                workload,
                "kv_cost",
                given.seed,
                f"{sessions} sessions",
                horizon_s=given.horizon_s / 6,
                warm_s=given.horizon_s / 12,
                users=sessions,
                has_pool=False,
                ramp_s=given.horizon_s / 12,
            )
        )
    return trials


FAULTS = (
    None,
    Fault("5 % of events lost", lost_share=0.05),
    Fault("5 % lost, no replay", lost_share=0.05, has_replay=False),
    Fault("events 2 s late", late_s=2.0),
    Fault("events twice", repeated_share=0.2),
    Fault("one of eight 3x slow", slow=1),
    Fault("one crashes for 60 s", crashed=1),
    Fault("one cut off for 60 s", cut_off=1),
)


def faults(given: Given) -> list[Trial]:
    """Wrong knowledge and failing engines: eight instances without a pool, and two gateways."""
    base = _eight_alone(given)
    trials = []
    half_way_s = given.horizon_s / 2
    for told in FAULTS:
        fault = replace(told, at_s=half_way_s) if told is not None else None
        trials.append(replace(base, fault=fault))
        if fault is None or fault.slow or fault.crashed:
            trials.append(replace(_with_policy(base, "round_robin"), fault=fault))
    return [*trials, replace(base, gateways=2, load="48 sessions, 2 gateways")]


def _eight_alone(given: Given) -> Trial:
    """Return agents under `kv_cost` on eight instances without a pool."""
    return Trial(
        "none/kv_cost",
        H200_LLAMA70,
        8,
        given.agents(GAP_S_MAX, H200_LLAMA70.prompt_tokens_max),
        "kv_cost",
        given.seed,
        "48 sessions",
        horizon_s=given.horizon_s,
        warm_s=given.horizon_s / 3,
        users=48,
        has_pool=False,
        ramp_s=300.0,
    )


def _with_policy(trial: Trial, policy: str) -> Trial:
    return replace(trial, policy=policy, name=f"{trial.name.split('/')[0]}/{policy}")


PRESETS: Mapping[str, Callable[[Given], Sequence[Trial]]] = {
    "paper-12": paper_12,
    "paper-60": paper_60,
    "roomy": roomy,
    "tight": tight,
    "affinity": affinity,
    "ablation": ablation,
    "scale-1000": scale_1000,
    "faults": faults,
}
