"""What those that wait are charged for, and that nothing a client says of it pays: the core, in closed loops."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import pytest

from moongate.router import (
    Command,
    FailureKind,
    Forward,
    Hold,
    Outcome,
    RelayFailure,
    RequestArrived,
    RequestFailed,
    RequestFinished,
    RequestId,
    RouterCore,
    RouterLimits,
)
from moongate.router.admission import ANSWER_TOKENS_PRIOR, AdmissionLimits
from moongate.router.invariants import check

from .builders import A, B, add, facts, make_core, request


def bounded(**limits: Any) -> RouterCore:
    """Return a core with one instance that runs one request."""
    limits = {"queue_requests_max": 10**6, "wait_s_max": 10**6, **limits}
    admission = AdmissionLimits(1, **limits)
    return make_core(A, policy="least_loaded", limits=RouterLimits(admission=admission))


@dataclass
class Tenant:
    """What a tenant asks for, again and again, and what each of its answers has in truth."""

    tokens: int
    loops: int = 20
    outcome: Outcome = Outcome.ANSWERED
    says: dict[str, Any] = field(default_factory=dict)  # fields of its requests


class Contest:
    """Tenants before one instance that runs one request. Each asks anew as soon as it is answered."""

    def __init__(self, **tenants: Tenant) -> None:
        self.core = bounded()
        self.tenants = tenants
        self.running: list[tuple[RequestId, str]] = []
        self.owners: dict[RequestId, str] = {}
        self.starts: Counter[str] = Counter()
        self.used: Counter[str] = Counter()
        self.now = 0.0

    def enter(self, *names: str) -> None:
        for number in range(max(self.tenants[name].loops for name in names)):
            for name in names:
                if number < self.tenants[name].loops:
                    self.ask(name)

    def ask(self, name: str) -> None:
        request_id = RequestId(f"{name}{len(self.owners)}")
        self.owners[request_id] = name
        fields = {"tenant": name, "session_key": request_id, **self.tenants[name].says}
        asked = dataclasses.replace(request(request_id), **fields)
        self._perform(self.core.handle(RequestArrived(asked), self.now))

    def run(self, count: int, *, but: str = "") -> None:
        """Let so many be answered. `but`: the names of those who don't ask anew."""
        for _ in range(count):
            self.now += 0.03
            request_id, name = self.running.pop(0)
            tenant = self.tenants[name]
            self.used[name] += tenant.tokens
            finished = RequestFinished(request_id, tenant.outcome, generated_tokens=tenant.tokens)
            self._perform(self.core.handle(finished, self.now))
            if name not in but:
                self.ask(name)
            check(self.core)

    def forget(self) -> None:
        self.starts.clear()
        self.used.clear()

    def _perform(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Forward):
                name = self.owners[command.request_id]
                self.running.append((command.request_id, name))
                self.starts[name] += 1


# --- shares ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "says",
    [{}, {"answer_tokens_max": 1}, {"answer_tokens_max": 1, "size_tokens": 1}, {"answers": 100}],
)
@pytest.mark.parametrize("outcome", [Outcome.ANSWERED, Outcome.CLIENT_LEFT, Outcome.BROKEN_OFF])
def test_whatever_a_tenant_says_its_share_is_what_its_answers_have(
    says: dict[str, Any], outcome: Outcome
) -> None:
    contest = Contest(a=Tenant(2000), b=Tenant(2000, outcome=outcome, says=says))
    contest.enter("a", "b")
    # Until the lengths of answers are known; and one that says too much waits for that once.
    contest.run(500)
    contest.forget()
    contest.run(400)
    assert abs(contest.starts["a"] - contest.starts["b"]) <= 8


def test_who_asks_for_many_choices_starts_so_many_times_fewer_requests() -> None:
    contest = Contest(a=Tenant(500), b=Tenant(25_000, says={"answers": 50}))
    contest.enter("a", "b")
    contest.run(100)
    contest.forget()
    contest.run(510)
    assert contest.starts["b"] == pytest.approx(10, abs=2)


def test_who_has_nothing_waiting_when_its_answer_ends_pays_for_it_all_the_same() -> None:
    """One request at a time, of which each has as much as a hundred of the other tenant's."""
    contest = Contest(
        a=Tenant(400), b=Tenant(40_000, loops=1, says={"answer_tokens_max": 1, "size_tokens": 1})
    )
    contest.enter("a", "b")
    contest.run(1010)
    assert contest.used["b"] <= contest.used["a"] * 1.3


def test_who_said_too_much_while_nobody_else_waited_has_saved_nothing() -> None:
    contest = Contest(a=Tenant(400), b=Tenant(400, loops=40, says={"answers": 128}))
    contest.enter("b")
    contest.run(200)
    contest.tenants["b"].says = {}
    contest.run(41)  # those that said so before
    contest.enter("a")
    contest.forget()
    contest.run(60)
    # A quantum at a time, which is ten of them.
    assert abs(contest.starts["a"] - contest.starts["b"]) <= 22


def test_what_it_owes_is_forgotten_once_nobody_waits() -> None:
    contest = Contest(
        a=Tenant(400, loops=3), b=Tenant(10**6, loops=2, says={"answer_tokens_max": 1})
    )
    contest.enter("a", "b")
    contest.run(3, but="ab")
    assert contest.core.admission is not None
    rounds = contest.core.admission.queue._rounds
    assert rounds._deficits["b"] < -900_000
    contest.run(2, but="ab")
    assert not rounds._deficits


# --- what is learned ------------------------------------------------------------------------------


def queued_tokens(core: RouterCore, name: str, **fields: Any) -> int:
    """Return what a request is expected to cost that has to wait."""
    asked = dataclasses.replace(request(name), **fields)
    commands = core.handle(RequestArrived(asked), 0.0)
    assert Hold(asked.id) in commands
    assert core.admission is not None
    waiting = core.admission.queue.find(asked.id)
    assert waiting is not None
    return waiting.tokens


def full_core() -> RouterCore:
    core = bounded()
    core.handle(RequestArrived(request("runs")), 0.0)
    return core


def test_a_request_is_expected_to_cost_its_prompt_and_all_its_answers() -> None:
    core = full_core()
    assert queued_tokens(core, "r", size_tokens=1000) == 1000 + ANSWER_TOKENS_PRIOR
    assert queued_tokens(core, "s", size_tokens=1000, answer_tokens_max=10) == 1010
    assert queued_tokens(core, "t", size_tokens=1000, answer_tokens_max=10, answers=50) == 1500
    assert queued_tokens(core, "u", answers=50) == 50 * ANSWER_TOKENS_PRIOR
    assert queued_tokens(core, "v", size_tokens=1000, answers=0) == 1000


@pytest.mark.parametrize(("answers", "learned"), [(1, 100), (50, ANSWER_TOKENS_PRIOR)])
def test_how_long_answers_are_is_learned_where_there_is_one(answers: int, learned: int) -> None:
    """Of several it isn't certain how many they really are."""
    core = bounded()
    for n in range(200):
        asked = dataclasses.replace(request(f"r{n}"), answers=answers)
        core.handle(RequestArrived(asked), 0.0)
        core.handle(RequestFinished(asked.id, Outcome.ANSWERED, generated_tokens=100), 0.0)
    assert core.admission is not None
    assert core.admission.answer_tokens == pytest.approx(learned, rel=0.01)


def corrected(event: RequestFinished | RequestFailed) -> int:
    """Return by how much the share of a request is corrected that was charged with 1,256 tokens."""
    core = full_core()
    assert queued_tokens(core, "r", size_tokens=1000, tenant="a") == 1256
    queued_tokens(core, "other", tenant="b")
    core.handle(RequestFinished(RequestId("runs"), Outcome.ANSWERED), 0.0)
    assert core.admission is not None
    assert core.requests.keys() == {"r"}
    rounds = core.admission.queue._rounds
    queued_tokens(core, "next", tenant="a")
    before = rounds._deficits["a"]
    assert core.admission.started.keys() == {"r"}
    commands = core.handle(event, 0.0)
    assert [c.request_id for c in commands if isinstance(c, Forward)] == ["other"]
    assert core.admission.started.keys() == {"other"}
    assert any(isinstance(c, RelayFailure) for c in commands) == isinstance(event, RequestFailed)
    return before - rounds._deficits["a"]


R = RequestId("r")


@pytest.mark.parametrize(
    ("event", "more"),
    [
        (RequestFinished(R, Outcome.ANSWERED), 0),  # not told: as expected
        (RequestFinished(R, Outcome.CLIENT_LEFT), 0),
        (RequestFinished(R, Outcome.ANSWERED, generated_tokens=256), 0),
        (RequestFinished(R, Outcome.ANSWERED, generated_tokens=56), -200),
        (RequestFinished(R, Outcome.ANSWERED, None, 400, 256), -400),
        (RequestFinished(R, Outcome.ANSWERED, None, None, 256, 7000), 6000),
        (RequestFinished(R, Outcome.ANSWERED, None, 6000, 256, 7000), 0),
        (RequestFinished(R, Outcome.BROKEN_OFF, generated_tokens=3000), 2744),
        (RequestFinished(R, Outcome.REFUSED), -1256),
        (RequestFailed(R, FailureKind.TIMEOUT), -1256),
    ],
)
def test_what_it_has_cost_counts_in_the_end(
    event: RequestFinished | RequestFailed, more: int
) -> None:
    assert corrected(event) == more


# --- what it costs to wait ------------------------------------------------------------------------


def calls_of(core: RouterCore, name: str, **fields: Any) -> int:
    """Return how many functions, of Python's too, are called for a request that has to wait."""
    event = RequestArrived(dataclasses.replace(request(name), **fields))
    calls = 0

    def count(_frame: FrameType, kind: str, _argument: object) -> None:
        nonlocal calls
        calls += kind in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        commands = core.handle(event, 0.0)
    finally:
        sys.setprofile(before)
    assert Hold(event.request.id) in commands
    return calls


@pytest.mark.parametrize("others", ["sessions", "one session", "priorities", "models"])
def test_an_arrival_costs_the_same_however_many_wait(others: str) -> None:
    core = bounded()
    add(core, B, described=facts("x"))
    core.handle(RequestArrived(request("runs")), 0.0)
    core.handle(RequestArrived(request("runs there", model="x")), 0.0)
    costs: list[int] = []
    for count in (20, 4000):
        for n in range(count):
            fields: dict[str, Any] = {
                "session_key": "s" if others == "one session" else None,
                "priority": n % 4 if others == "priorities" else 0,
                "model": ("m", "x")[n % 2] if others == "models" else "m",
                "size_tokens": n,
            }
            waits = dataclasses.replace(request(f"{count}/{n}"), **fields)
            core.handle(RequestArrived(waits), 0.0)
        costs.append(calls_of(core, f"last{count}", size_tokens=100))
    few, many = costs
    assert many <= few * 1.5, costs  # by powers of two of what sessions have
