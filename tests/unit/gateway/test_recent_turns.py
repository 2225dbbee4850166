"""What is remembered of turns and sessions, with prompts written out block by block."""

from collections.abc import Sequence

import pytest

from moongate.gateway.telemetry.receipt import Receipt
from moongate.gateway.telemetry.recent_turns import (
    GROWTH_BLOCKS_MAX,
    MARKS_MAX,
    PERIODS_MAX,
    SESSIONS_MAX,
    TURNS_MAX,
    RecentTurns,
    Turn,
    marks_of,
)
from moongate.router import Decision, Request, RequestId
from moongate.router.model import (
    TEXT_SPACE,
    BlockHash,
    BlockSpace,
    Holder,
    InstanceId,
    PoolPart,
    Prompt,
    Reason,
    Role,
    Trust,
)
from moongate.router.policy import Candidate, Ranked

SPACE = BlockSpace(16)


def blocks(*numbers: int) -> list[BlockHash]:
    return [BlockHash(number.to_bytes(4, "big")) for number in numbers]


def ranked(instance: str, pool: PoolPart | None = None) -> Ranked:
    holder = Holder(InstanceId(instance))
    candidate = Candidate(holder, Role.BOTH, 1.0, Trust.EXACT, 0, 0, 0, pool=pool)
    return Ranked(candidate, Reason.LOAD)


def receipt(*ranking: Ranked, tokens: int | None = 160, reuse: tuple[int, int] = (0, 0)) -> Receipt:
    decision = Decision("kv_cost", Reason.LOAD, tokens, *reuse, ranking)
    return Receipt("r", "/v1/completions", "m", None, False, 0.0, decision)


def forward(*names: str, tokens: int | None = 160, reuse: tuple[int, int] = (0, 0)) -> Receipt:
    return receipt(*map(ranked, names), tokens=tokens, reuse=reuse)


def request(chain: Sequence[BlockHash], key: str | None = None, model: str = "m") -> Request:
    prompt = Prompt(len(chain) * 16 + 5, {SPACE: chain})
    return Request(RequestId("r"), model, prompt, session_key=key)


def turn(recent: RecentTurns, asked: Request, now: float = 1.0) -> Turn:
    return recent.begin(asked, forward("a"), now)


# --- sessions -------------------------------------------------------------------------------------


def test_a_session_is_known_by_its_key_and_model() -> None:
    recent = RecentTurns()
    first = turn(recent, request(blocks(1, 2), "k"))
    again = turn(recent, request(blocks(7, 8, 9), "k"), 2.0)
    other = turn(recent, request(blocks(1, 2), "k", "n"))
    assert first.session is again.session
    assert (again.session.turns, again.session.at, again.session.prompt_tokens) == (2, 2.0, 53)
    assert [other.session.number, other.session.turns] == [2, 1]


def test_without_a_key_a_turn_belongs_to_the_session_whose_prompt_it_begins_with() -> None:
    recent = RecentTurns()
    first = turn(recent, request(blocks(1, 2)))
    other = turn(recent, request(blocks(1, 3)))
    again = turn(recent, request(blocks(1, 2, 4, 5)))
    assert first.session is again.session
    assert other.session is not first.session
    assert (again.session.key, again.session.turns) == (None, 2)


def test_a_fork_of_a_session_without_a_key_is_another_session() -> None:
    recent = RecentTurns()
    first = turn(recent, request(blocks(1, 2)))
    assert turn(recent, request(blocks(1, 2, 3))).session is first.session
    assert turn(recent, request(blocks(1, 2, 4))).session is not first.session


def test_how_far_back_a_turn_is_searched_for_is_bounded() -> None:
    recent = RecentTurns()
    first = turn(recent, request(blocks(0)))
    near = blocks(*range(GROWTH_BLOCKS_MAX))
    assert turn(recent, request(near)).session is first.session
    far = [*near, *blocks(*range(10_000, 10_000 + GROWTH_BLOCKS_MAX))]
    assert turn(recent, request(far)).session is not first.session


def test_the_sessions_longest_without_a_turn_are_forgotten_with_their_tails() -> None:
    recent = RecentTurns()
    first = turn(recent, request(blocks(1)))
    for number in range(SESSIONS_MAX):
        turn(recent, request(blocks(100 + number)))
    assert len(recent.sessions) == SESSIONS_MAX
    assert turn(recent, request(blocks(1, 2))).session is not first.session


def test_a_prompt_of_which_nothing_is_known_is_a_turn_all_the_same() -> None:
    recent = RecentTurns()
    asked = Request(RequestId("r"), "m")
    noted = recent.begin(asked, forward("a", tokens=None), 1.0)
    assert (noted.session.prompt_tokens, noted.session.marks) == (None, {})
    assert not recent.periods


@pytest.mark.parametrize("count", [1, 3, MARKS_MAX, MARKS_MAX + 1, 1000])
def test_marks_are_few_and_the_last_block_is_one(count: int) -> None:
    chain = blocks(*range(count))
    marks = list(marks_of(Prompt(count * 16 + 1, {SPACE: chain}))[SPACE].ends())
    assert len(marks) <= MARKS_MAX
    assert marks[-1] == (count * 16, chain[-1])
    assert all(chain[tokens // 16 - 1] == block for tokens, block in marks)
    assert [tokens for tokens, _ in marks] == sorted({tokens for tokens, _ in marks})


def test_chunks_of_text_stand_for_their_estimated_tokens() -> None:
    prompt = Prompt(500, {TEXT_SPACE: blocks(1, 2)}, is_exact=False)
    assert [tokens for tokens, _ in marks_of(prompt)[TEXT_SPACE].ends()] == [64, 128]


# --- turns ----------------------------------------------------------------------------------------


def test_the_oldest_turns_go() -> None:
    recent = RecentTurns()
    for _ in range(TURNS_MAX + 3):
        turn(recent, request(blocks(1), "k"))
    assert (len(recent.turns), recent.turns[0].number) == (TURNS_MAX, 4)
    assert recent.turn_count == TURNS_MAX + 3


def test_a_second_attempt_is_the_same_turn_elsewhere() -> None:
    recent = RecentTurns()
    noted = recent.begin(request(blocks(1)), forward("a"), 1.0)
    noted.receipt.decision = forward("b").decision
    recent.forward_again(noted)
    assert (noted.instance, noted.session.instance) == ("b", "b")
    assert len(recent.turns) == noted.session.turns == 1


def test_what_the_pool_had_is_the_sessions() -> None:
    part = PoolPart(tokens=96, bytes_per_token=1.0)
    asked = receipt(ranked("a"), ranked("b", part))
    assert RecentTurns().begin(request(blocks(1)), asked, 1.0).session.pool_tokens == 96


def test_reuse_is_added_up_by_periods_and_only_so_many_are_kept() -> None:
    recent = RecentTurns()
    for now in (3.0, 9.9, 10.0):
        recent.begin(request(blocks(1), "k"), forward("a", tokens=100, reuse=(64, 16)), now)
    told = [(p.began_at, p.device, p.pool, p.recompute) for p in recent.periods]
    assert told == [(0.0, 128, 32, 40), (10.0, 64, 16, 20)]
    for number in range(PERIODS_MAX + 5):
        recent.begin(request(blocks(1), "k"), forward("a"), 100.0 + 10 * number)
    assert len(recent.periods) == PERIODS_MAX
