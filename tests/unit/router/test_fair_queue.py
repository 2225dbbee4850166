"""Which of the requests that wait is next: tenants, priorities, sessions; and who goes when there are too many."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from moongate.router.fair_queue import (
    PASSED_MAX,
    QUANTUM_TOKENS,
    CanStart,
    FairQueue,
    Kind,
    Waiting,
)
from moongate.router.model import Request, RequestId

from .builders import MODEL


def one(
    name: str,
    tokens: int = 1000,
    *,
    session: str | None = None,
    tenant: str = "",
    priority: int = 0,
    model: str = MODEL,
    deadline: float = 30.0,
) -> Waiting:
    request = Request(RequestId(name), model, session_key=session, tenant=tenant, priority=priority)
    return Waiting(request, tokens, deadline)


def queue_of(*waiting: Waiting) -> FairQueue:
    queue = FairQueue()
    for each in waiting:
        queue.add(each)
    return queue


def anything(_: Kind) -> bool:
    return True


def take(queue: FairQueue, can_start: CanStart = anything) -> Waiting | None:
    taken = queue.take(can_start)
    return taken.waiting if taken is not None else None


def tokens(queue: FairQueue) -> int:
    return queue.tokens(queue.kinds)


def tokens_before(queue: FairQueue, waiting: Waiting) -> int:
    return queue.tokens_before(waiting, queue.kinds)


def drain(queue: FairQueue) -> list[str]:
    """Take all, and return the names in order."""
    names: list[str] = []
    while (waiting := take(queue)) is not None:
        names.append(waiting.request.id)
    assert len(queue) == 0
    assert tokens(queue) == 0
    return names


# --- sessions -------------------------------------------------------------------------------------


def test_those_that_are_alike_go_as_they_came() -> None:
    names = [f"r{n}" for n in range(20)]
    assert drain(queue_of(*(one(name) for name in names))) == names


def test_within_a_session_the_first_is_first() -> None:
    queue = queue_of(one("a1", 50_000, session="a"), one("a2", 10, session="a"), one("b"))
    assert drain(queue) == ["b", "a1", "a2"]


def test_one_session_with_much_does_not_hold_up_the_others() -> None:
    """Forty turns of one session of 4,000 tokens each, before one turn of each of five others."""
    many = [one(f"a{n}", 4000, session="a") for n in range(40)]
    others = [one(f"{name}", 4000, session=name) for name in "bcdef"]
    order = drain(queue_of(*many, *others))
    assert max(order.index(name) for name in "bcdef") <= 6


def test_short_turns_go_before_a_long_prompt_that_came_first() -> None:
    long = one("long", 100_000, session="l")
    short = [one(f"s{n}", 2000, session=f"s{n}") for n in range(30)]
    assert drain(queue_of(long, *short)).index("long") == 30


def test_a_long_prompt_gets_its_turn_though_short_ones_go_on_coming() -> None:
    queue = queue_of(one("long", 100_000, session="l"))
    for n in range(4):
        queue.add(one(f"s{n}", 2000, session=f"s{n}"))
    taken: list[str] = []
    while "long" not in taken:
        waiting = take(queue)
        assert waiting is not None
        taken.append(waiting.request.id)
        queue.add(one(f"t{len(taken)}", 2000, session=waiting.session))
        assert len(taken) < 1000
    # 25 rounds, in each of which the four others start one request: they come anew each time.
    assert len(taken) <= 25 * 4 + 1


# --- priorities -----------------------------------------------------------------------------------


def test_the_lower_priority_is_sooner() -> None:
    queue = queue_of(one("p5", priority=5), one("p1", priority=1), one("p-3", priority=-3))
    assert drain(queue) == ["p-3", "p1", "p5"]


def test_a_class_that_was_passed_over_often_enough_is_next() -> None:
    queue = queue_of(one("late", priority=9), *(one(f"r{n}") for n in range(20)))
    assert drain(queue).index("late") == PASSED_MAX


def test_priorities_count_within_a_tenant_only() -> None:
    """Else whoever asks for most would have everything."""
    eager = [one(f"a{n}", 8000, tenant="a", priority=-99) for n in range(10)]
    modest = [one(f"b{n}", 8000, tenant="b") for n in range(10)]
    first = drain(queue_of(*eager, *modest))[:10]
    assert Counter(name[0] for name in first) == {"a": 5, "b": 5}


# --- tenants --------------------------------------------------------------------------------------


def test_tenants_share_by_tokens_however_many_requests_and_sessions_they_have() -> None:
    many = [one(f"a{n}", 1000, tenant="a", session=f"a{n}") for n in range(200)]
    few = [one(f"b{n}", 10_000, tenant="b", session="b") for n in range(20)]
    queue, served = queue_of(*many, *few), Counter[str]()
    for _ in range(66):
        waiting = take(queue)
        assert waiting is not None
        served[waiting.request.tenant] += waiting.tokens
    assert abs(served["a"] - served["b"]) <= QUANTUM_TOKENS + 10_000


# --- what can't start, and leaves -----------------------------------------------------------------


def test_what_can_not_start_holds_nobody_up() -> None:
    queue = queue_of(one("x", model="x", session="s"), one("m", session="s"), one("n"))

    def is_m(kind: Kind) -> bool:
        return kind.model == MODEL

    taken = [take(queue, is_m) for _ in range(3)]
    assert [w.request.id if w else None for w in taken] == ["m", "n", None]
    assert drain(queue) == ["x"]


def test_who_leaves_is_gone() -> None:
    queue = queue_of(one("a"), one("b"), one("c"))
    removed = queue.remove(RequestId("b"))
    assert removed is not None
    assert queue.remove(RequestId("b")) is None
    assert queue.find(RequestId("b")) is None
    assert tokens(queue) == 2000
    assert drain(queue) == ["a", "c"]


# --- how much comes before ------------------------------------------------------------------------


def test_a_short_turn_is_told_that_only_a_part_of_long_prompts_comes_before_it() -> None:
    queue = queue_of(*(one(f"l{n}", 100_000, session=f"l{n}") for n in range(3)))
    assert tokens_before(queue, one("short", 2000)) == 3 * QUANTUM_TOKENS
    assert tokens_before(queue, one("next", 2000, session="l0")) == 300_000
    assert tokens_before(queue, one("sooner", 2000, priority=-1)) == 0
    assert tokens_before(queue, one("later", 2000, priority=1)) == 300_000
    assert tokens_before(queue, one("other", 2000, tenant="t")) == QUANTUM_TOKENS


# --- too many -------------------------------------------------------------------------------------


def excess(queue: FairQueue, newcomer: Waiting) -> str:
    queue.add(newcomer)
    return queue.find_excess(newcomer).request.id


def test_whoever_has_most_waiting_loses_the_last() -> None:
    queue = queue_of(*(one(f"a{n}", tenant="a") for n in range(3)), one("b1", tenant="b"))
    assert excess(queue, one("b2", tenant="b")) == "a2"
    assert excess(queue, one("a3", tenant="a")) == "a3"


def test_of_equals_the_newcomer_goes() -> None:
    queue = queue_of(one("a1", session="a"), one("b1", session="b"))
    assert excess(queue, one("c1", session="c")) == "c1"


def test_the_last_class_loses_before_the_others() -> None:
    queue = queue_of(*(one(f"a{n}", session="a") for n in range(3)), one("z", priority=1))
    assert excess(queue, one("new")) == "z"


# --- whatever happens -----------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.data())
def test_nothing_is_lost_and_nothing_stays(data: st.DataObject) -> None:
    """Conservation: what is added is taken, removed, or still there; and the bookkeeping is emptied."""
    queue = FairQueue()
    added: dict[RequestId, Waiting] = {}
    gone: set[RequestId] = set()
    for number in range(data.draw(st.integers(0, 40))):
        match data.draw(st.sampled_from(["add", "add", "take", "remove"])):
            case "add":
                waiting = one(
                    f"r{number}",
                    data.draw(st.integers(1, 200_000)),
                    session=data.draw(st.sampled_from(["s", "t", None])),
                    tenant=data.draw(st.sampled_from(["", "a", "b"])),
                    priority=data.draw(st.integers(-2, 2)),
                    model=data.draw(st.sampled_from([MODEL, "x"])),
                )
                before = tokens_before(queue, waiting)
                assert 0 <= before <= tokens(queue) + QUANTUM_TOKENS
                queue.add(waiting)
                added[waiting.request.id] = waiting
            case "take":
                models = data.draw(st.sampled_from([{MODEL}, {"x"}, {MODEL, "x"}]))
                taken = take(queue, lambda kind, models=models: kind.model in models)  # type: ignore[misc]
                could = [w for i, w in added.items() if i not in gone and w.request.model in models]
                assert (taken is not None) == bool(could)
                if taken is not None:
                    assert taken in could
                    gone.add(taken.request.id)
            case _:
                if added:
                    request_id = data.draw(st.sampled_from(sorted(added)))
                    assert (queue.remove(request_id) is None) == (request_id in gone)
                    gone.add(request_id)
        assert {w.request.id for w in queue} == added.keys() - gone
    assert len(drain(queue)) == len(added) - len(gone)
    assert not queue._tenants
    assert not queue._rounds


@settings(max_examples=60)
@given(
    st.integers(1, 150_000),
    st.lists(st.tuples(st.integers(1, 20_000), st.sampled_from("ab"), st.integers(0, 1)),
             min_size=1, max_size=12),
)  # fmt: skip
def test_a_request_starts_though_others_come_without_end(
    tokens: int, others: list[tuple[int, str, int]]
) -> None:
    """No starvation, whatever the others cost, and whatever their tenants and priorities."""
    queue = queue_of(one("late", tokens, session="late", tenant="a", priority=1))

    def add(number: int) -> None:
        cost, tenant, priority = others[number % len(others)]
        queue.add(
            one(f"r{number}", cost, session=f"s{number % 12}", tenant=tenant, priority=priority)
        )

    for number in range(len(others)):
        add(number)
    rounds = -(-tokens // QUANTUM_TOKENS)
    # Of its own tenant's: each round of its class, of which every ninth at least is its class's turn.
    steps_max = (
        (rounds + 2)
        * (QUANTUM_TOKENS + 20_000)
        * 13
        * (PASSED_MAX + 1)
        * 2
        // min(cost for cost, _, _ in others)
    )
    for step in range(len(others), len(others) + steps_max):
        waiting = take(queue)
        assert waiting is not None
        if waiting.request.id == "late":
            return
        add(step)
        if step > 20_000:
            return  # costs are so small that it would take too long to wait for it
    raise AssertionError("it never starts")
