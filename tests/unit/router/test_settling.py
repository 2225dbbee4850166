"""Answers that have ended and whose blocks the engine has yet to announce."""

from moongate.router.model import BlockHash, Holder, RequestId
from moongate.router.settling import ANNOUNCED_WITHIN_S, WATCHES_MAX, Settling

from .builders import A, B

HA, HB = Holder(A), Holder(B)
R, S = RequestId("r"), RequestId("s")
H = [BlockHash(bytes([n])) for n in range(8)]
X = [BlockHash(bytes([100 + n])) for n in range(4)]


def watching(prompt_tokens: int = 7) -> Settling:
    """Return one that watches the answer to a prompt of seven tokens, three blocks of two."""
    settling = Settling()
    settling.forwarded(R, HA, H[:3], prompt_tokens, block_tokens=2)
    return settling


def test_an_answer_under_way_is_nothing_to_wait_for() -> None:
    assert watching().is_settled(H[2], now=0.0)


def test_an_answer_is_settled_with_its_last_full_block() -> None:
    settling = watching()
    assert not settling.has_pending()
    settling.finished(R, completion_tokens=4, now=0.0)  # 7 + 4 - 1 computed: five blocks
    assert settling.has_pending()
    assert not settling.is_settled(H[2], now=0.0)
    settling.stored(HA, H[2], X[:1])
    assert not settling.is_settled(H[2], now=0.0)
    settling.stored(HA, X[0], X[1:2])
    assert settling.is_settled(H[2], now=0.0)
    assert not settling.has_pending()
    assert len(settling) == 0


def test_the_last_token_is_never_computed_and_fills_nothing() -> None:
    settling = watching(prompt_tokens=6)
    settling.finished(R, completion_tokens=2, now=0.0)  # 6 + 2 - 1 computed: three blocks
    assert settling.is_settled(H[2], now=0.0)
    assert len(settling) == 0


def test_blocks_announced_before_the_end_count() -> None:
    settling = watching()
    settling.stored(HA, H[2], X[:2])
    settling.finished(R, completion_tokens=4, now=0.0)
    assert settling.is_settled(H[2], now=0.0)


def test_blocks_of_others_do_not_count() -> None:
    settling = watching()
    settling.stored(HB, H[2], X[:2])  # another cache
    settling.stored(HA, H[1], X[:2])  # another place
    settling.stored(HA, H[2], ())
    settling.finished(R, completion_tokens=4, now=0.0)
    assert not settling.is_settled(H[2], now=0.0)


def test_an_answer_of_unknown_length_is_not_waited_for() -> None:
    settling = watching()
    settling.finished(R, completion_tokens=None, now=0.0)
    assert settling.is_settled(H[2], now=0.0)
    assert len(settling) == 0


def test_what_has_not_come_in_time_is_not_waited_for() -> None:
    settling = watching()
    settling.finished(R, completion_tokens=4, now=5.0)
    assert not settling.is_settled(H[2], now=4.9 + ANNOUNCED_WITHIN_S)
    assert settling.is_settled(H[2], now=5.0 + ANNOUNCED_WITHIN_S)


def test_a_prompt_of_less_than_a_block_is_not_watched() -> None:
    settling = Settling()
    settling.forwarded(R, HA, [], 1, block_tokens=2)
    settling.finished(R, completion_tokens=4, now=0.0)
    assert len(settling) == 0


def test_a_dropped_watch_leaves_nothing() -> None:
    settling = watching()
    settling.drop(R)
    settling.drop(S)
    settling.stored(HA, H[2], X[:1])
    assert settling.is_settled(H[2], now=0.0)


def test_a_second_request_with_the_same_prompt_is_the_one_watched() -> None:
    settling = watching()
    settling.forwarded(S, HA, H[:3], 7, block_tokens=2)
    settling.drop(R)
    settling.finished(S, completion_tokens=4, now=0.0)
    settling.stored(HA, H[2], X[:2])
    assert settling.is_settled(H[2], now=0.0)


def test_the_oldest_watches_are_forgotten() -> None:
    settling = watching()
    for n in range(WATCHES_MAX):
        tail = BlockHash(n.to_bytes(4, "big"))
        settling.forwarded(RequestId(f"n{n}"), HA, [tail], 2, block_tokens=2)
    assert len(settling) == WATCHES_MAX
    settling.finished(R, completion_tokens=4, now=0.0)
    assert settling.is_settled(H[2], now=0.0)
