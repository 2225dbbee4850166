"""Deficit round robin: shares, bounds, and that nobody is passed over for good."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from moongate.router.rounds import Rounds


def serve(rounds: Rounds[str], costs: dict[str, int]) -> str | None:
    """Serve once. `costs`: of the next requests of those that can be served."""
    key = rounds.find(costs.get)
    if key is not None:
        rounds.charge(key, costs[key])
    return key


def waiting(*keys: str, quantum: int = 10) -> Rounds[str]:
    rounds: Rounds[str] = Rounds(quantum)
    for key in keys:
        rounds.join(key)
    return rounds


def test_equal_requests_are_served_in_turn() -> None:
    rounds = waiting("a", "b")
    assert [serve(rounds, {"a": 10, "b": 10}) for _ in range(4)] == ["a", "b", "a", "b"]


def test_a_large_request_waits_for_its_rounds_while_small_ones_go_on() -> None:
    rounds = waiting("large", "small")
    order = [serve(rounds, {"large": 35, "small": 10}) for _ in range(5)]
    assert order == ["small", "small", "small", "large", "small"]


def test_a_large_request_alone_is_served_at_once() -> None:
    rounds = waiting("large")
    assert serve(rounds, {"large": 10**9}) == "large"


def test_who_can_not_be_served_is_passed_over_and_given_nothing() -> None:
    rounds = waiting("blocked", "b")
    assert [serve(rounds, {"b": 10}) for _ in range(100)] == ["b"] * 100
    order = [serve(rounds, {"blocked": 10, "b": 10}) for _ in range(4)]
    assert Counter(order) == {"blocked": 2, "b": 2}
    assert serve(rounds, {}) is None
    assert serve(waiting(), {"a": 1}) is None


def test_found_is_the_same_one_until_it_is_charged() -> None:
    rounds = waiting("a", "b")
    costs = {"a": 10, "b": 10}
    assert [rounds.find(costs.get) for _ in range(3)] == ["a"] * 3
    rounds.charge("a", 10)
    assert rounds.find(costs.get) == "b"
    rounds.leave("b")
    assert rounds.find(costs.get) == "a"


def test_what_a_flow_has_left_is_forgotten_when_it_leaves() -> None:
    rounds = waiting("a", "b")
    for _ in range(10):
        assert rounds.find({"b": 100}.get) == "b"
        rounds.leave("b")
        rounds.join("b")
    assert list(rounds) == ["a", "b"]


@given(
    st.lists(st.integers(1, 5000), min_size=2, max_size=8),
    st.integers(1, 1000),
    st.integers(1, 300),
)
def test_those_that_always_wait_get_the_same(costs: list[int], quantum: int, count: int) -> None:
    flows = {f"f{n}": cost for n, cost in enumerate(costs)}
    rounds = waiting(*flows, quantum=quantum)
    served = dict.fromkeys(flows, 0)
    for _ in range(count):
        key = serve(rounds, flows)
        assert key is not None
        served[key] += flows[key]
        # At any time: a quantum and the two largest requests apart, at most.
        spread = max(served.values()) - min(served.values())
        assert spread <= quantum + 2 * max(costs), served


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=6), st.integers(1, 500), st.data())
def test_nobody_is_passed_over_for_good(
    costs: list[int], quantum: int, data: st.DataObject
) -> None:
    """Whatever joins meanwhile: a flow is served before the others have had its rounds, each."""
    rounds = waiting("late", quantum=quantum)
    wanted = data.draw(st.integers(1, 5000))
    others = {f"f{n}": cost for n, cost in enumerate(costs)}
    for key in others:
        rounds.join(key)
    spent: Counter[str] = Counter()
    while (found := rounds.find({"late": wanted, **others}.get)) != "late":
        assert found is not None
        key = found
        rounds.charge(key, others[key])
        spent[key] += others[key]
        others[key] = data.draw(st.integers(1, 3000))
        if data.draw(st.booleans()):  # it ends, and comes again
            rounds.leave(key)
            rounds.join(key)
        rounds_needed = -(-wanted // quantum)
        assert all(s <= rounds_needed * quantum + 3000 for s in spent.values()), spent


# --- what turns out to have cost more, or less ----------------------------------------------------


def test_what_has_cost_more_is_made_up_for() -> None:
    rounds = waiting("a", "b")
    costs = {"a": 10, "b": 10}
    assert serve(rounds, costs) == "a"
    rounds.correct("a", 30)  # it cost 40
    assert [serve(rounds, costs) for _ in range(5)] == ["b", "b", "b", "b", "a"]


def test_what_has_cost_less_is_given_back() -> None:
    rounds = waiting("a", "b")
    assert serve(rounds, {"a": 40}) == "a"
    rounds.correct("a", -30)
    assert [serve(rounds, {"a": 10, "b": 10}) for _ in range(6)] == ["a"] * 3 + ["b", "a", "b"]


def test_who_leaves_and_owes_pays_while_the_others_are_served() -> None:
    rounds = waiting("a", "b", "c")
    costs = {"a": 10, "b": 10, "c": 10}
    assert serve(rounds, costs) == "a"
    rounds.leave("a", owes=True)
    rounds.correct("a", 30, owes=True)
    assert (list(rounds), len(rounds), "a" in rounds) == (["b", "c"], 2, False)
    assert [serve(rounds, costs) for _ in range(4)] == ["b", "c", "b", "c"]
    rounds.join("a")
    assert [serve(rounds, costs) for _ in range(6)] == ["b", "c", "b", "c", "a", "b"]


def test_who_has_paid_begins_anew() -> None:
    rounds = waiting("a", "b")
    assert serve(rounds, {"a": 10}) == "a"
    rounds.leave("a", owes=True)
    rounds.correct("a", 30, owes=True)
    assert [serve(rounds, {"b": 10}) for _ in range(10)] == ["b"] * 10
    assert not rounds._owing
    rounds.join("a")
    assert Counter(serve(rounds, {"a": 10, "b": 10}) for _ in range(10)) == {"a": 5, "b": 5}


def test_nobody_owes_where_nobody_waits() -> None:
    rounds = waiting("a", "b")
    rounds.correct("a", 30)
    rounds.leave("a", owes=True)
    rounds.leave("b")
    rounds.correct("b", 30, owes=True)
    assert (len(rounds), rounds._deficits, rounds._owing) == (0, {}, set())


def test_who_has_left_is_given_nothing_back() -> None:
    rounds = waiting("a", "b")
    rounds.leave("a", owes=True)
    rounds.correct("a", -1000, owes=True)
    rounds.join("a")
    assert [serve(rounds, {"a": 10, "b": 10}) for _ in range(4)] == ["b", "a", "b", "a"]


def test_who_owes_is_served_all_the_same_when_alone() -> None:
    rounds = waiting("a", "b")
    rounds.correct("a", 10**9)
    assert serve(rounds, {"a": 10}) == "a"


@given(st.data())
def test_whatever_is_corrected_somebody_is_served(data: st.DataObject) -> None:
    rounds: Rounds[str] = Rounds(100)
    costs: dict[str, int] = {}
    for _ in range(data.draw(st.integers(1, 40))):
        key = data.draw(st.sampled_from("abcd"))
        match data.draw(st.sampled_from(["join", "serve", "leave", "more", "less"])):
            case "join":
                rounds.join(key)
                costs[key] = data.draw(st.integers(1, 1000))
            case "leave" if key in costs:
                rounds.leave(key, owes=data.draw(st.booleans()))
                del costs[key]
            case "more":
                rounds.correct(key, data.draw(st.integers(1, 5000)), owes=True)
            case "less":
                rounds.correct(key, -data.draw(st.integers(1, 5000)), owes=True)
            case _:
                assert (serve(rounds, costs) is None) == (not costs)
        assert set(rounds) == costs.keys()
        assert all(rounds._deficits[owing] < 0 for owing in rounds._owing)
        assert costs or not rounds._owing
