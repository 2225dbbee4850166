"""The policies: each one's order, and how they are found by name."""

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moongate.router.cost import CostWeights
from moongate.router.model import Holder, InstanceId, Reason, Request, RequestId, Role, Trust
from moongate.router.policy import (
    BUILT_IN,
    Candidate,
    KvCost,
    PlugIn,
    Policy,
    PolicyError,
    PrefixAffinity,
    Ranked,
    RoundRobin,
    Situation,
    make_policy,
)

from .builders import last_of_n

ALL = 1000
"""More places than there are candidates."""


def candidate(
    name: str,
    *,
    rank: int | None = None,
    weight: float = 1.0,
    trust: Trust = Trust.EXACT,
    active: int = 0,
    queued: int = 0,
    sessions: int = 0,
    last_chosen: int = 0,
    overlap: int = 0,
) -> Candidate:
    return Candidate(
        Holder(InstanceId(name), rank),
        Role.BOTH,
        weight,
        trust,
        active,
        queued,
        last_chosen,
        sessions,
        overlap,
    )


def situation(
    prompt_tokens: int = 0,
    session_key: str | None = None,
    history_tokens: int = 0,
    tie_key: str | None = None,
    places: int = ALL,
) -> Situation:
    request = Request(RequestId("r"), "m", session_key=session_key, tie_key=tie_key)
    return Situation(request, prompt_tokens, history_tokens, 0, 10.0, places)


def order(
    policy: Policy,
    *candidates: Candidate,
    given: Situation | None = None,
    random_below: Callable[[int], int] = last_of_n,
) -> list[str]:
    ranked = policy.rank(given or situation(), candidates, random_below)
    return [str(entry.candidate.holder) for entry in ranked]


def reasons(policy: Policy, *candidates: Candidate, given: Situation) -> list[Reason]:
    return [entry.reason for entry in policy.rank(given, candidates, last_of_n)]


# --- without prompts ------------------------------------------------------------------------------


def test_round_robin_takes_the_one_that_waited_longest() -> None:
    found = order(
        make_policy("round_robin"),
        candidate("a", last_chosen=3),
        candidate("b", last_chosen=1),
        candidate("c"),
    )
    assert found == ["c", "b", "a"]


def test_equals_are_ordered_by_name_and_rank() -> None:
    equals = [candidate("b"), candidate("a", rank=1), candidate("a", rank=0)]
    assert order(make_policy("least_loaded"), *equals) == ["a@0", "a@1", "b"]
    by_name = sorted(equals, key=lambda c: c.holder)  # as the core hands them over
    assert order(make_policy("round_robin"), *by_name) == ["a@0", "a@1", "b"]


def test_random_draws_one_after_the_other() -> None:
    found = order(make_policy("random"), candidate("a"), candidate("b"), candidate("c"))
    assert found == ["c", "b", "a"]
    assert order(make_policy("random"), candidate("a"), candidate("b"), random_below=_zero) == [
        "a",
        "b",
    ]


def test_random_gives_every_candidate_the_same_chance() -> None:
    below = random.Random(1).randrange
    candidates = [candidate("a"), candidate("b"), candidate("c")]
    first = Counter(
        order(make_policy("random"), *candidates, random_below=below)[0] for _ in range(3000)
    )
    assert all(900 < count < 1100 for count in first.values())


def test_least_loaded_counts_requests_then_tokens_ahead() -> None:
    found = order(
        make_policy("least_loaded"),
        candidate("a", active=2),
        candidate("b", active=1, queued=500),
        candidate("c", active=1, queued=400),
    )
    assert found == ["c", "b", "a"]


def test_least_loaded_divides_by_weight() -> None:
    found = order(
        make_policy("least_loaded"), candidate("a", active=2), candidate("b", active=3, weight=2.0)
    )
    assert found == ["b", "a"]


def test_power_of_two_takes_the_less_loaded_of_two_picked() -> None:
    # The last of three is drawn, then the last of the other two: a is not looked at.
    found = order(
        make_policy("power_of_two"),
        candidate("a", active=0),
        candidate("b", active=1),
        candidate("c", active=2),
    )
    assert found == ["b", "c", "a"]


def test_power_of_two_works_with_one() -> None:
    assert order(make_policy("power_of_two"), candidate("a")) == ["a"]


def test_a_session_stays_where_it_is_whatever_the_load() -> None:
    policy, given = make_policy("session_hash"), situation(session_key="s")
    names = [candidate(name) for name in "abcd"]
    first = order(policy, *names, given=given)[0]
    loaded = [candidate(name, active=9 if name == first else 0) for name in "dcba"]
    assert order(policy, *loaded, given=given)[0] == first
    assert reasons(policy, *names, given=given) == [Reason.SESSION] * 4


def test_when_a_holder_leaves_only_its_sessions_move() -> None:
    policy = make_policy("session_hash")
    all_four, three = [[candidate(name) for name in names] for names in ("abcd", "abc")]
    moved: Counter[tuple[str, bool]] = Counter()
    for n in range(200):
        given = situation(session_key=f"s{n}")
        before, after = (order(policy, *group, given=given)[0] for group in (all_four, three))
        moved[before, before == after] += 1
    assert all(is_same or before == "d" for before, is_same in moved)
    assert 30 <= moved["d", False] <= 70


def test_without_a_session_key_the_load_decides() -> None:
    policy, given = make_policy("session_hash"), situation()
    found = order(policy, candidate("a", active=1), candidate("b"), given=given)
    assert found == ["b", "a"]
    assert reasons(policy, candidate("a"), given=given) == [Reason.LOAD]


# --- kv_cost --------------------------------------------------------------------------------------


def test_kv_cost_takes_the_holder_of_the_prefix() -> None:
    given = situation(prompt_tokens=1000)
    candidates = candidate("a"), candidate("b", overlap=800)
    ranked = make_policy("kv_cost").rank(given, candidates, last_of_n)
    assert [str(entry.candidate.holder) for entry in ranked] == ["b", "a"]
    assert [entry.cost_ms for entry in ranked] == [20.0, 100.0]
    assert [entry.reason for entry in ranked] == [Reason.DEVICE_PREFIX, Reason.LOAD]
    assert ranked[0].terms_ms["prefill"] == 20.0


def test_kv_cost_goes_elsewhere_when_waiting_costs_more_than_prefilling() -> None:
    given = situation(prompt_tokens=1000)
    holder = candidate("b", overlap=800, queued=900)
    assert order(make_policy("kv_cost"), candidate("a"), holder, given=given) == ["a", "b"]


def test_c33_equal_costs_go_to_whoever_waited_longest() -> None:
    given = situation(prompt_tokens=1000)
    found = order(
        make_policy("kv_cost"),
        candidate("a", last_chosen=2),
        candidate("b", last_chosen=1),
        given=given,
    )
    assert found == ["b", "a"]


def test_equal_costs_are_decided_by_the_tie_key_where_there_is_one() -> None:
    given = situation(prompt_tokens=1000, tie_key="u")
    names = [candidate(name) for name in "abcd"]
    preferred = order(make_policy("session_hash"), *names, given=situation(session_key="u"))
    assert order(make_policy("kv_cost"), *names, given=given) == preferred
    loaded = [candidate(name, active=int(name == preferred[0])) for name in "abcd"]
    assert order(make_policy("kv_cost"), *loaded, given=given) == [*preferred[1:], preferred[0]]


@pytest.mark.parametrize(
    ("trust", "prefill_ms"),
    [(Trust.EXACT, 20.0), (Trust.DEGRADED, 36.0), (Trust.APPROXIMATE, 28.0)],
)
def test_an_overlap_is_worth_what_its_source_is_trusted(trust: Trust, prefill_ms: float) -> None:
    given = situation(prompt_tokens=1000)
    (ranked,) = make_policy("kv_cost").rank(
        given, [candidate("a", overlap=800, trust=trust)], last_of_n
    )
    assert ranked.terms_ms["prefill"] == pytest.approx(prefill_ms)


def test_a_request_without_prompt_goes_by_session_then_load() -> None:
    policy = make_policy("kv_cost")
    given = situation(session_key="s")
    candidates = candidate("a", active=1), candidate("b")
    assert order(policy, *candidates, given=given) == order(
        make_policy("session_hash"), *candidates, given=given
    )
    assert order(policy, *candidates, given=situation()) == ["b", "a"]


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_policy_ranks_each_candidate_once(name: str) -> None:
    candidates = [candidate(n, rank=r, active=r) for n in "ab" for r in range(3)]
    given = situation(prompt_tokens=100, session_key="s")
    found = order(make_policy(name), *candidates, given=given, random_below=_zero)
    assert sorted(found) == sorted(str(c.holder) for c in candidates)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
@pytest.mark.parametrize("places", [1, 2, 5])
def test_the_places_asked_for_are_ranked_as_if_all_were(name: str, places: int) -> None:
    candidates = [candidate(n, rank=r, active=r % 2) for n in "ab" for r in range(3)]
    for key in ("s", None):
        given = situation(prompt_tokens=100, session_key=key, tie_key=key, places=places)
        everyone = given._replace(places=ALL)
        first = order(make_policy(name), *candidates, given=given, random_below=_zero)
        assert len(first) >= places
        whole = order(make_policy(name), *candidates, given=everyone, random_below=_zero)
        assert first == whole[: len(first)]


LOADS = st.builds(
    candidate,
    st.sampled_from("abcdefgh"),
    rank=st.integers(0, 1000),
    weight=st.sampled_from([0.3, 1.0, 2.0]),
    trust=st.sampled_from(Trust),
    active=st.integers(0, 50),
    queued=st.integers(0, 100_000),
    sessions=st.integers(0, 64),
    last_chosen=st.integers(0, 3),
    overlap=st.just(0) | st.integers(0, 5000),
)


@given(
    candidates=st.lists(LOADS, min_size=1, max_size=20, unique_by=lambda c: c.holder),
    prompt_tokens=st.integers(1, 5000),
    history_tokens=st.just(0) | st.integers(1, 5000),
    departures=st.integers(0, 5),
)
def test_what_is_compared_is_the_sum_of_the_terms_that_are_shown(
    candidates: list[Candidate], prompt_tokens: int, history_tokens: int, departures: int
) -> None:
    given_ = Situation(
        Request(RequestId("r"), "m"), prompt_tokens, history_tokens, departures, 7.3, ALL
    )
    ranked = KvCost().rank(given_, sorted(candidates, key=lambda c: c.holder), last_of_n)
    assert [r.cost_ms for r in ranked] == [sum(r.terms_ms.values()) for r in ranked]
    keys = [(r.cost_ms, r.candidate.last_chosen, r.candidate.holder) for r in ranked]
    assert keys == sorted(keys)
    assert len(ranked) == len(candidates)


# --- by name --------------------------------------------------------------------------------------


class Upwards:
    """A policy of somebody else's."""

    name = "upwards"
    reads_prompts = False

    def __init__(self, step: int = 1) -> None:
        self.step = step

    def rank(
        self, situation: Situation, candidates: Sequence[Candidate], random_below: object
    ) -> list[Ranked]:
        return [Ranked(c, Reason.LOAD) for c in candidates]


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_policy_is_found_by_its_name(name: str) -> None:
    policy = make_policy(name)
    assert policy.name == name
    assert policy.reads_prompts == (name in ("kv_cost", "prefix_affinity"))


def test_options_set_the_weights() -> None:
    policy = make_policy("kv_cost", {"history_weight": 3})
    assert policy == KvCost(CostWeights(history_weight=3.0))
    assert make_policy("prefix_affinity") == PrefixAffinity()
    assert make_policy("round_robin", {}) == RoundRobin()


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        (
            "round_robbin",
            {},
            "unknown policy 'round_robbin' (did you mean 'round_robin'?); known: kv_cost, least_",
        ),
        ("random", {"seed": 1}, "policy random has no options, but got seed"),
        (
            "kv_cost",
            {"zzz": 1},
            "policy kv_cost has no option 'zzz'; known: active_request_ms, again_weight, approximate_weight",
        ),
        (
            "kv_cost",
            {"history_wait": 1},
            "policy kv_cost has no option 'history_wait' (did you mean 'history_weight'?); known:",
        ),
        (
            "kv_cost",
            {"history_weight": -1},
            "option history_weight of policy kv_cost must be a number >= 0: -1",
        ),
        (
            "kv_cost",
            {"history_weight": float("nan")},
            "option history_weight of policy kv_cost must be a number >= 0: nan",
        ),
        (
            "kv_cost",
            {"history_weight": True},
            "option history_weight of policy kv_cost must be a number >= 0: True",
        ),
        (
            "kv_cost",
            {"history_weight": "2"},
            "option history_weight of policy kv_cost must be a number >= 0: '2'",
        ),
        (
            "no_such_module:X",
            {},
            "policy 'no_such_module:X' can't be loaded: No module named 'no_such_module'",
        ),
        (
            f"{__name__}:Missing",
            {},
            f"policy '{__name__}:Missing' can't be loaded: module '{__name__}' has no attribute ",
        ),
        (
            f"{__name__}:Upwards",
            {"steps": 2},
            f"policy '{__name__}:Upwards' does not take these options: Upwards.__init__() got an",
        ),
        (
            "fractions:Fraction",
            {},
            "policy 'fractions:Fraction' lacks what a policy has: name, reads_prompts, rank()",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_with_a_hint(
    name: str, options: dict[str, object], text: str
) -> None:
    with pytest.raises(PolicyError) as caught:
        make_policy(name, options)
    assert str(caught.value).startswith(text)


def test_a_policy_of_yours_is_found_by_module_and_class() -> None:
    policy = make_policy(f"{__name__}:Upwards", {"step": 2})
    assert isinstance(policy, PlugIn)
    assert isinstance(policy.policy, Upwards)
    assert policy.policy.step == 2
    assert (policy.name, policy.reads_prompts) == ("upwards", False)
    assert order(policy, candidate("b"), candidate("a", active=1)) == ["b", "a"]


class Wrong(Upwards):
    """A policy that makes the mistake it is told to make."""

    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.mistake = mistake

    def rank(
        self, situation: Situation, candidates: Sequence[Candidate], random_below: object
    ) -> list[Ranked]:
        ranked = super().rank(situation, candidates, random_below)
        match self.mistake:
            case "raises":
                raise RuntimeError("mistake")
            case "forgets":
                return []
            case "invents":
                return [Ranked(candidate("a", active=99), Reason.LOAD)]
            case "repeats":
                return [ranked[0], ranked[0]]
            case _:
                return None  # type: ignore[return-value]


@pytest.mark.parametrize("mistake", ["raises", "forgets", "invents", "repeats", "returns nothing"])
def test_a_policy_of_yours_that_fails_is_replaced_by_load(mistake: str) -> None:
    policy = make_policy(f"{__name__}:Wrong", {"mistake": mistake})
    pair = [candidate("a", active=1), candidate("b")]
    ranked = policy.rank(situation(), pair, last_of_n)
    assert [str(r.candidate.holder) for r in ranked] == ["b", "a"]
    assert {r.reason for r in ranked} == {Reason.FALLBACK}


def test_a_policy_of_yours_may_rank_just_the_one_that_it_chooses() -> None:
    policy = PlugIn(FirstOnly())
    pair = [candidate("a", active=1), candidate("b")]
    ranked = policy.rank(situation(places=2), pair, last_of_n)
    assert [(str(r.candidate.holder), r.reason) for r in ranked] == [("a", Reason.LOAD)]


class FirstOnly(Upwards):
    def rank(
        self, situation: Situation, candidates: Sequence[Candidate], random_below: object
    ) -> list[Ranked]:
        return super().rank(situation, candidates, random_below)[:1]


@pytest.mark.parametrize("name", [":", "x:", ":X", "..x:X"])
def test_half_a_name_is_refused(name: str) -> None:
    with pytest.raises(PolicyError):
        make_policy(name)


def _zero(n: int) -> int:
    return 0
