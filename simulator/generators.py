"""Made-up workloads: agents with the published statistics of Codex sessions, and what else policies must stand.

Each is a function of a seed. What they share is stated in blocks, so no token is ever made. Pure.
"""

from __future__ import annotations

import math
import random

from moongate.simulator.conversations import Script, Turn, Workload

BLOCK_TOKENS = 64

# What is published of the Codex sessions (610 conversations, SWE-bench Pro).
CODEX_TURNS_MEDIAN = 33
CODEX_FIRST_TOKENS = 12_000
CODEX_GROWTH_TOKENS = 2_242  # mean, a turn
CODEX_INPUT_PER_OUTPUT = 131
CODEX_GAP_S_MEDIAN, CODEX_GAP_S_P99 = 5.2, 81.4
CODEX_REUSABLE = 0.942
# Not published, and chosen so that the generated set has the figures above (tests compare).
CODEX_TURNS_SPREAD = 0.25  # of the logarithm
CODEX_FIRST_SPREAD = 0.25
CODEX_GROWTH_SPREAD = 1.0
CODEX_OUTPUT_TOKENS = 395  # mean
CODEX_OUTPUT_SPREAD = 0.8
CODEX_PROMPT_TOKENS_MAX = 250_000
CODEX_SYSTEM_TOKENS = (
    832  # shared by all: 1.7 % of the prompts, which is what is hit without a pool
)

P99 = 2.3263  # standard deviations of the 99th percentile


def codex_like(seed: int, conversations: int = 610) -> Workload:
    """Return agents' conversations with the published statistics."""
    chance = random.Random(f"codex/{seed}")  # noqa: S311 - to be repeated
    workload = Workload("codex-like", BLOCK_TOKENS)
    system = workload.line(is_shared=True)
    for number in range(conversations):
        count = max(round(_spread(chance, CODEX_TURNS_MEDIAN, CODEX_TURNS_SPREAD)), 1)
        line = workload.line(system, CODEX_SYSTEM_TOKENS // BLOCK_TOKENS)
        tokens = int(_spread(chance, CODEX_FIRST_TOKENS, CODEX_FIRST_SPREAD))
        turns: list[Turn] = []
        while len(turns) < count and tokens <= CODEX_PROMPT_TOKENS_MAX:
            answer = max(int(_mean(chance, CODEX_OUTPUT_TOKENS, CODEX_OUTPUT_SPREAD)), 1)
            gap_spread = math.log(CODEX_GAP_S_P99 / CODEX_GAP_S_MEDIAN) / P99
            gap_s = _spread(chance, CODEX_GAP_S_MEDIAN, gap_spread) if turns else 0.0
            turns.append(Turn(line, tokens, answer, gap_s))
            # An answer is part of what the next prompt grows by.
            growth = _mean(chance, CODEX_GROWTH_TOKENS - CODEX_OUTPUT_TOKENS, CODEX_GROWTH_SPREAD)
            tokens += answer + int(growth)
        workload.scripts.append(Script(f"codex-{number}", turns))
    return workload


def report_scaling(seed: int, conversations: int = 400) -> Workload:
    """Return the synthetic set with which the report was scaled from 12 to 60 GPUs.

    20 K common tokens, 10 K of one's own, then 2,048 a turn, 900 out, 30 turns. Gaps aren't told: 0.
    """
    workload = Workload("report-scaling", BLOCK_TOKENS)
    system = workload.line(is_shared=True)
    for number in range(conversations):
        line = workload.line(system, 20_000 // BLOCK_TOKENS)
        turns = [Turn(line, 30_000 + n * (2_048 + 900), 900, 0.0) for n in range(30)]
        workload.scripts.append(Script(f"scaling-{seed}-{number}", turns))
    return workload


def fan_out(seed: int, prompts: int = 4, conversations: int = 400) -> Workload:
    """Return short conversations that begin with one of few long system prompts, the first the most.

    As of sub-agents: 16 K tokens shared, 2 to 6 turns of 500 to 4,000 tokens.
    """
    chance = random.Random(f"fan-out/{seed}")  # noqa: S311 - to be repeated
    workload = Workload("fan-out", BLOCK_TOKENS)
    shared = [workload.line(is_shared=True) for _ in range(prompts)]
    weights = [1 / (n + 1) for n in range(prompts)]
    for number in range(conversations):
        (system,) = chance.choices(shared, weights)
        line = workload.line(system, 16_384 // BLOCK_TOKENS)
        tokens = 16_384
        turns: list[Turn] = []
        for _ in range(chance.randint(2, 6)):
            tokens += chance.randint(500, 4_000)
            answer = chance.randint(50, 600)
            turns.append(Turn(line, tokens, answer, chance.uniform(1, 10) if turns else 0.0))
            tokens += answer
        workload.scripts.append(Script(f"fan-out-{number}", turns))
    return workload


def churn(seed: int, conversations: int = 600) -> Workload:
    """Return agents among whom three of four conversations are one long prompt that never returns."""
    chance = random.Random(f"churn/{seed}")  # noqa: S311 - to be repeated
    workload = Workload("churn", BLOCK_TOKENS)
    for number in range(conversations):
        line = workload.line()
        turns = _churning_agent(chance, line)
        if number % 4:
            turns = [Turn(line, chance.randint(8_000, 60_000), 100, 0.0)]
        workload.scripts.append(Script(f"churn-{number}", turns))
    return workload


def _churning_agent(chance: random.Random, line: int) -> list[Turn]:
    tokens = 20_000
    turns: list[Turn] = []
    for _ in range(30):
        turns.append(Turn(line, tokens, 300, chance.uniform(2, 20) if turns else 0.0))
        tokens += chance.randint(600, 3_000)
    return turns


def skewed(seed: int, conversations: int = 300, keys: int = 24) -> Workload:
    """Return agents that share few session keys, the first of them the most: each is a user with several.

    Every third adds 2 to 6 K tokens a turn and hardly pauses.
    """
    chance = random.Random(f"skewed/{seed}")  # noqa: S311 - to be repeated
    workload = Workload("skewed", BLOCK_TOKENS)
    weights = [1 / (n + 1) for n in range(keys)]
    for number in range(conversations):
        line, is_busy = workload.line(), number % 3 == 0
        (key,) = chance.choices(range(keys), weights)
        tokens = 10_000
        turns: list[Turn] = []
        for _ in range(20):
            gap_s = chance.uniform(0.5, 2) if is_busy else chance.uniform(5, 20)
            answer = chance.randint(50, 300)
            turns.append(Turn(line, tokens, answer, gap_s if turns else 0.0))
            tokens += answer + (chance.randint(2_000, 6_000) if is_busy else 400)
        workload.scripts.append(Script(f"skewed-{number}", turns, key=f"user-{key}"))
    return workload


def _spread(chance: random.Random, median: float, spread: float) -> float:
    return chance.lognormvariate(math.log(median), spread)


def _mean(chance: random.Random, mean: float, spread: float) -> float:
    return chance.lognormvariate(math.log(mean) - spread**2 / 2, spread)
