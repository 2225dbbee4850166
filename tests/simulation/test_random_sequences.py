"""Ten thousand random histories of a fleet: the core's invariants hold after each step.

The seeds are fixed; `MOONGATE_FRESH_SEEDS=1` draws others, and a failure names its own. To see one
again: `History(random.Random(seed)).run(STEPS)`.
"""

import os
import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .histories import History

STEPS = 50
CHUNKS, SEQUENCES_PER_CHUNK = 20, 500
IS_FRESH = os.environ.get("MOONGATE_FRESH_SEEDS") == "1"
FIRST_SEED = random.SystemRandom().randrange(2**40) if IS_FRESH else 0


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_the_invariants_hold_after_each_step_and_the_index_converges(chunk: int) -> None:
    converged: Counter[bool] = Counter()
    for number in range(SEQUENCES_PER_CHUNK):
        seed = FIRST_SEED + chunk * SEQUENCES_PER_CHUNK + number
        history = History(random.Random(seed))
        try:
            history.run(STEPS)
        except Exception as error:
            error.add_note(f"seed {seed}, step {len(history.recording)}: {history.recording[-1]}")
            raise
        converged[history.converged] += 1
    assert converged[True] > SEQUENCES_PER_CHUNK // 4, "the comparison has become idle"


@settings(
    max_examples=100,
    deadline=None,
    derandomize=not IS_FRESH,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.randoms(use_true_random=False))
def test_no_shorter_history_breaks_an_invariant(chance: random.Random) -> None:
    History(chance).run(steps=12)
