"""A recording of (now, event) replays to the same commands, whatever the hash seed of the process."""

import hashlib
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from moongate.router import Command

from .histories import History

REPLAY = """
import hashlib, pickle, random, sys
from moongate.router import RouterCore, make_policy

with open(sys.argv[1], "rb") as file:
    policy, others, seed, limits, recording = pickle.load(file)
core = RouterCore(
    make_policy(policy), random.Random(seed).randrange, limits, [make_policy(o) for o in others]
)
digest = hashlib.sha256()
for now, event in recording:
    for command in core.handle(event, now):
        digest.update(repr(command).encode())
print(digest.hexdigest())
"""


def digest_of(commands: Iterable[Command]) -> str:
    digest = hashlib.sha256()
    for command in commands:
        digest.update(repr(command).encode())
    return digest.hexdigest()


@pytest.mark.parametrize(
    ("seed", "policy"),
    [
        (4, "kv_cost"),
        (1, "kv_cost"),  # with hand-offs
        (36, "prefix_affinity"),
        (30, "random"),
        (24, "power_of_two"),
    ],
)
def test_a_recording_replays_to_the_same_commands(seed: int, policy: str, tmp_path: Path) -> None:
    history = History(random.Random(seed))
    history.run(steps=1000)
    assert history.policy == policy
    assert len(history.commands) > 200  # a recording worth replaying
    path = tmp_path / "recording.pickle"
    others = ["least_loaded", "session_hash"]
    path.write_bytes(
        pickle.dumps((history.policy, others, history.seed, history.limits, history.recording))
    )
    for hash_seed in ("0", "4711"):
        replayed = subprocess.run(
            [sys.executable, "-c", REPLAY, str(path)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert replayed.stdout.strip() == digest_of(history.commands)
