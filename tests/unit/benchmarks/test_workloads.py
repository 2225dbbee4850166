"""Workloads have the promised sizes, and the same bytes each time."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.workloads import WORKLOADS, Workload, make_workload

PROJECT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("name", "requests", "clients", "body_bytes", "messages", "events"),
    [
        ("small", 3_000, 32, 1_740, 4, None),
        ("agent320k", 200, 8, 322_500, 81, None),
        ("turn320k", 216, 8, 323_500, 82, None),
        ("stream200", 48, 16, 1_740, 4, 201),
    ],
)
def test_a_workload_has_the_promised_numbers(
    name: str, requests: int, clients: int, body_bytes: int, messages: int, events: int | None
) -> None:
    workload = make_workload(name, seed=0)
    assert (workload.requests, workload.clients, workload.events) == (requests, clients, events)
    # The share of characters that JSON escapes differs between releases of Python.
    assert workload.body_bytes_mean == pytest.approx(body_bytes, rel=0.03)
    assert len(_messages(workload.sequences[-1][0])) == messages


def test_each_turn_of_a_session_holds_the_one_before_and_more() -> None:
    workload = make_workload("session", seed=0)
    assert [len(session) for session in workload.sequences] == [12] * 20
    for session in workload.sequences[:3]:
        turns = [_messages(body) for body in session]
        for before, after in itertools.pairwise(turns):
            assert after[: len(before)] == before
            assert len(after) > len(before)
    assert workload.body_bytes_mean == pytest.approx(186_000, rel=0.03)
    assert len(workload.sequences[0][0]) == pytest.approx(42_000, rel=0.05)
    assert len(workload.sequences[0][-1]) == pytest.approx(326_000, rel=0.05)


def test_a_new_turn_is_a_known_conversation_and_a_message_never_seen() -> None:
    bodies = [body for (body,) in make_workload("turn320k", seed=0).sequences]
    known = [_messages(body) for body in bodies[:16]]
    turns = [_messages(body) for body in bodies[16:]]
    assert all(turn[:-1] == known[number % 16] for number, turn in enumerate(turns))
    assert {len(turn[-1]["content"]) for turn in turns} == {1_024}
    assert len({turn[-1]["content"] for turn in turns}) == 200


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_round_chooses_the_text_and_nothing_else_does(name: str) -> None:
    first = _digest(make_workload(name, seed=1, scale=0.05))
    assert _digest(make_workload(name, seed=1, scale=0.05)) == first
    assert _digest(make_workload(name, seed=2, scale=0.05)) != first


def test_text_does_not_depend_on_the_hash_seed() -> None:
    code = (
        "from benchmarks.workloads import make_workload;"
        "print(make_workload('small', 1, 0.001).sequences)"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=PROJECT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(outputs) == 1


@pytest.mark.parametrize(("scale", "requests"), [(1.0, 48), (0.05, 2), (0.0001, 1)])
def test_scale_changes_the_number_of_requests_only(scale: float, requests: int) -> None:
    workload = make_workload("stream200", seed=0, scale=scale)
    assert workload.requests == requests
    assert workload.sequences[0] == make_workload("stream200", seed=0).sequences[0]


def _messages(body: bytes) -> list[dict[str, str]]:
    messages: list[dict[str, str]] = json.loads(body)["messages"]
    return messages


def _digest(workload: Workload) -> str:
    return hashlib.sha256(repr(workload.sequences).encode()).hexdigest()
