"""Which request continues which, told by the blocks alone."""

from itertools import count

from moongate.router.lineage import (
    SESSIONS_REMEMBERED,
    Lineage,
    Lineages,
    RecentSessions,
    SessionNumber,
)
from moongate.router.model import BlockHash, Holder

from .builders import A, B

H = [BlockHash(bytes([n])) for n in range(9)]


def find(lineages: Lineages, chain: list[BlockHash], shared_blocks: int) -> Lineage:
    return lineages.depart(chain, lineages.find_history(chain), shared_blocks)


def forward(lineages: Lineages, chain: list[BlockHash], shared_blocks: int = 0) -> Lineage:
    """Find a prompt's lineage and note it, as the router does; return what was found."""
    lineage = find(lineages, chain, shared_blocks)
    lineages.note(chain, lineage, shared_blocks)
    return lineage


def test_an_unknown_prompt_continues_nothing() -> None:
    assert forward(Lineages(), H[:3]) == Lineage(history_blocks=0, departures=0)


def test_the_next_turn_continues_the_one_before_up_to_its_tail() -> None:
    lineages = Lineages()
    forward(lineages, H[:3])
    assert forward(lineages, H[:5]) == Lineage(history_blocks=3, departures=0)
    assert forward(lineages, H[:6]) == Lineage(history_blocks=5, departures=0)


def test_a_fork_departs_where_another_turn_went_on() -> None:
    lineages = Lineages()
    forward(lineages, H[:3])
    forward(lineages, H[:4])
    assert forward(lineages, [*H[:3], H[8]]) == Lineage(history_blocks=3, departures=1)


def test_a_prompt_sent_again_continues_all_of_itself() -> None:
    lineages = Lineages()
    forward(lineages, H[:3])
    assert forward(lineages, H[:3]) == Lineage(history_blocks=3, departures=0)
    assert forward(lineages, H[:3]) == Lineage(history_blocks=3, departures=1)


def test_sessions_that_share_a_beginning_are_counted_at_its_end() -> None:
    lineages = Lineages()
    forward(lineages, [*H[:2], H[5]])
    assert forward(lineages, [*H[:2], H[6]], shared_blocks=2) == Lineage(0, departures=0)
    assert forward(lineages, [*H[:2], H[7]], shared_blocks=2) == Lineage(0, departures=1)
    assert forward(lineages, [*H[:2], H[8]], shared_blocks=2) == Lineage(0, departures=2)


def test_a_prompt_without_blocks_is_not_remembered() -> None:
    lineages = Lineages()
    assert forward(lineages, []) == Lineage()
    assert len(lineages) == 0


def test_past_the_limit_the_tail_used_least_recently_is_forgotten() -> None:
    lineages = Lineages(tails_max=2)
    forward(lineages, [H[0]])
    forward(lineages, [H[1]])
    forward(lineages, [H[0]])
    forward(lineages, [H[2]])
    assert len(lineages) == 2
    assert find(lineages, [H[1], H[5]], 0) == Lineage()
    assert find(lineages, [H[0], H[5]], 0) == Lineage(1, departures=1)


def test_past_the_limit_the_departure_used_least_recently_is_forgotten() -> None:
    lineages = Lineages(tails_max=1)
    forward(lineages, [H[0], H[4]], shared_blocks=1)
    forward(lineages, [H[1], H[5]], shared_blocks=1)
    assert find(lineages, [H[0], H[6]], 1) == Lineage(0, departures=0)
    assert find(lineages, [H[1], H[6]], 1) == Lineage(0, departures=1)


def note(lineages: Lineages, chain: list[BlockHash], *, is_last: bool = False) -> int | None:
    return lineages.note(chain, find(lineages, chain, 0), 0, is_last=is_last)


def test_turns_belong_to_their_session_and_forks_to_one_of_their_own() -> None:
    lineages = Lineages()
    first, other = note(lineages, H[:3]), note(lineages, [H[5], H[6]])
    assert len({first, other, None}) == 3
    assert note(lineages, H[:4]) == first
    fork = note(lineages, [*H[:3], H[8]])
    assert fork not in (first, other, None)
    assert note(lineages, [*H[:3], H[8], H[7]]) == fork
    assert note(lineages, H[:5]) == first
    assert note(lineages, []) is None


def test_nothing_goes_on_from_the_last_turn_of_a_session() -> None:
    lineages = Lineages()
    first = note(lineages, H[:3])
    assert note(lineages, H[:4], is_last=True) == first
    assert find(lineages, H[:5], 0).history_blocks == 3


def test_only_the_last_sessions_count_as_recent() -> None:
    sessions = RecentSessions()
    numbers = map(SessionNumber, count())
    sessions.note(next(numbers), Holder(A))
    for _ in range(SESSIONS_REMEMBERED - 1):
        sessions.note(next(numbers), Holder(B))
    assert (sessions.count(Holder(A)), sessions.count(Holder(B))) == (1, SESSIONS_REMEMBERED - 1)
    sessions.note(next(numbers), Holder(B))
    assert (sessions.count(Holder(A)), sessions.count(Holder(B))) == (0, SESSIONS_REMEMBERED)
    sessions.note(next(numbers), Holder(A))
    assert (sessions.count(Holder(A)), sessions.count(Holder(B))) == (1, SESSIONS_REMEMBERED - 1)


def test_a_session_that_ended_is_not_recent_any_more() -> None:
    sessions = RecentSessions()
    sessions.note(SessionNumber(1), Holder(A))
    sessions.note(SessionNumber(2), Holder(A))
    assert sessions.end(SessionNumber(1)) == (Holder(A),)
    assert sessions.count(Holder(A)) == 1
    assert sessions.end(SessionNumber(1)) == ()
    assert sessions.end(SessionNumber(2)) == (Holder(A),)
    assert sessions.count(Holder(A)) == 0
