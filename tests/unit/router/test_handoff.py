"""A hand-off's order of things: what is sent, when, and that no blocks are left behind."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moongate.router.handoff import (
    CancelDecode,
    Handoff,
    HandoffError,
    HandoffKind,
    NothingLeft,
    PrefillAnswer,
    SendDecode,
    SendPrefill,
)

URL, ENGINE = "http://p:8998", "e-1"
MOONCAKE_ANSWER = PrefillAnswer(is_held=True, bootstrap_url=URL, engine_id=ENGINE)
NIXL_PARAMS = {"remote_engine_id": "e", "remote_block_ids": [[1]], "what_else": {"x": [1]}}
NIXL_ANSWER = PrefillAnswer(is_held=True, params=NIXL_PARAMS)


def prefilling(kind: HandoffKind = HandoffKind.MOONCAKE) -> Handoff:
    handoff = Handoff(kind, "t-1")
    handoff.begin()
    return handoff


def decoding(kind: HandoffKind = HandoffKind.MOONCAKE) -> Handoff:
    handoff = prefilling(kind)
    handoff.prefill_answered(MOONCAKE_ANSWER if kind is HandoffKind.MOONCAKE else NIXL_ANSWER)
    return handoff


# --- what is said ---------------------------------------------------------------------------------


def test_mooncakes_legs_share_the_gateways_name_of_the_transfer() -> None:
    handoff = Handoff(HandoffKind.MOONCAKE, "t-1")
    assert handoff.begin() == SendPrefill(
        {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t-1"}
    )
    assert handoff.prefill_answered(MOONCAKE_ANSWER) == SendDecode(
        {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_bootstrap_addr": URL,
            "remote_engine_id": ENGINE,
            "transfer_id": "t-1",
        }
    )


@pytest.mark.parametrize("count", [0, 7])
def test_mooncakes_decode_side_is_told_what_was_cached_on_the_other(count: int) -> None:
    answer = PrefillAnswer(True, None, count, URL, ENGINE)
    action = prefilling().prefill_answered(answer)
    assert isinstance(action, SendDecode)
    assert action.params is not None
    assert action.params["remote_prefill_cached_tokens"] == count


def test_mooncake_keeps_nothing_of_a_prefill_that_ended_by_itself() -> None:
    answer = PrefillAnswer(is_held=False, bootstrap_url=URL, engine_id=ENGINE)
    assert prefilling().prefill_answered(answer) == SendDecode(None)


@pytest.mark.parametrize(("url", "engine"), [(None, ENGINE), (URL, None)])
def test_mooncakes_blocks_cannot_be_found_without_their_engine(
    url: str | None, engine: str | None
) -> None:
    handoff = prefilling()
    with pytest.raises(HandoffError, match="does not name its engine"):
        handoff.prefill_answered(PrefillAnswer(True, None, 0, url, engine))
    assert handoff.is_over


def test_nixls_prefill_leg_asks_for_what_its_answer_brings() -> None:
    handoff = Handoff(HandoffKind.NIXL, "t-1")
    assert handoff.begin() == SendPrefill(
        {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
    )
    action = handoff.prefill_answered(PrefillAnswer(is_held=False, params=NIXL_PARAMS))
    assert isinstance(action, SendDecode)
    assert action.params is NIXL_PARAMS  # unchanged, however it ended


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"remote_block_ids": [[1]]},
        {"remote_engine_id": "e"},
        {"remote_engine_id": "e", "remote_block_ids": []},
        {"remote_engine_id": "", "transfer_mode": "push"},
    ],
)
def test_nixls_decode_side_must_be_told_where_the_blocks_are(params: dict[str, Any] | None) -> None:
    handoff = prefilling(HandoffKind.NIXL)
    with pytest.raises(HandoffError, match="where the blocks are"):
        handoff.prefill_answered(PrefillAnswer(True, params))
    assert handoff.is_over


def test_nixls_blocks_that_are_pushed_need_no_numbers() -> None:
    params = {"remote_engine_id": "e", "transfer_mode": "push"}
    action = prefilling(HandoffKind.NIXL).prefill_answered(PrefillAnswer(True, params))
    assert action == SendDecode(params)


# --- and when -------------------------------------------------------------------------------------


def test_an_answer_that_begins_and_ends_leaves_nothing() -> None:
    handoff = decoding()
    on_its_way = [handoff.is_decoding]
    assert handoff.decode_began() is None
    on_its_way.append(handoff.is_decoding)
    assert on_its_way == [True, False]
    assert handoff.decode_ended() == NothingLeft()
    assert handoff.client_left() == NothingLeft()


def test_a_prefill_that_failed_leaves_nothing() -> None:
    handoff = prefilling()
    assert handoff.prefill_failed() == NothingLeft()
    assert handoff.is_over


@pytest.mark.parametrize("kind", list(HandoffKind))
def test_a_decode_leg_that_did_not_arrive_is_sent_again_as_it_was(kind: HandoffKind) -> None:
    handoff = prefilling(kind)
    first = handoff.prefill_answered(
        MOONCAKE_ANSWER if kind is HandoffKind.MOONCAKE else NIXL_ANSWER
    )
    assert handoff.redeliver() == first


def test_a_client_that_leaves_before_anything_was_sent_leaves_nothing() -> None:
    handoff = Handoff(HandoffKind.MOONCAKE, "t-1")
    assert handoff.client_left() == NothingLeft()
    with pytest.raises(AssertionError):
        handoff.begin()


def test_a_client_that_leaves_during_prefill_cancels_nothing_and_its_blocks_are_released() -> None:
    handoff = prefilling()
    assert handoff.client_left() is None
    action = handoff.prefill_answered(MOONCAKE_ANSWER)
    assert isinstance(action, SendDecode)
    assert (action.is_release, action.params is None) == (True, False)
    assert handoff.decode_began() == CancelDecode()
    assert handoff.is_over


def test_a_client_that_leaves_a_prefill_that_keeps_nothing_needs_no_release() -> None:
    handoff = prefilling()
    handoff.client_left()
    assert handoff.prefill_answered(PrefillAnswer(is_held=False)) == NothingLeft()
    assert handoff.is_over


def test_a_client_that_leaves_while_the_decode_leg_is_on_its_way_cancels_it_once_it_is_there() -> (
    None
):
    handoff = decoding()
    assert handoff.client_left() is None
    assert handoff.decode_began() == CancelDecode()


def test_what_did_not_arrive_for_a_client_that_left_is_sent_again_as_a_release() -> None:
    handoff = decoding()
    handoff.client_left()
    action = handoff.redeliver()
    assert isinstance(action, SendDecode)
    assert action.is_release


def test_what_did_not_arrive_and_fetches_nothing_is_not_sent_again_for_nobody() -> None:
    handoff = prefilling()
    handoff.prefill_answered(PrefillAnswer(is_held=False))
    handoff.client_left()
    assert handoff.redeliver() == NothingLeft()


def test_a_client_that_leaves_a_stream_ends_it() -> None:
    handoff = decoding()
    handoff.decode_began()
    assert handoff.client_left() == CancelDecode()


class Handoffs(RuleBasedStateMachine):
    """Events in any order that can happen, and the truth about the prefill instance's blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.handoff = Handoff(HandoffKind.MOONCAKE, "t-1")
        self.sent: list[object] = []
        self.is_prefilling = False
        self.is_on_its_way = False  # a decode leg, of which nothing has come
        self.is_streaming = False
        self.is_held = False  # blocks, that nobody has come for
        self.has_client = True

    def send(self, action: object) -> None:
        assert not self.is_prefilling
        assert not self.is_on_its_way
        self.sent.append(action)
        if isinstance(action, SendDecode):
            assert (action.params is not None) == self.is_held
            assert action.is_release == (not self.has_client)
            self.is_on_its_way = True
        elif isinstance(action, SendPrefill):
            self.is_prefilling = True

    @precondition(lambda self: not self.sent and self.has_client)
    @rule()
    def begin(self) -> None:
        self.send(self.handoff.begin())

    @precondition(lambda self: self.is_prefilling)
    @rule(is_held=st.booleans())
    def prefill_answered(self, is_held: bool) -> None:
        self.is_prefilling, self.is_held = False, is_held
        self.send(self.handoff.prefill_answered(PrefillAnswer(is_held, None, 0, URL, ENGINE)))

    @precondition(lambda self: self.is_prefilling)
    @rule()
    def prefill_failed(self) -> None:
        self.is_prefilling = False
        assert self.handoff.prefill_failed() == NothingLeft()

    @precondition(lambda self: self.is_on_its_way)
    @rule()
    def decode_did_not_arrive(self) -> None:
        self.is_on_its_way = False
        self.send(self.handoff.redeliver())

    @precondition(lambda self: self.is_on_its_way)
    @rule()
    def decode_began(self) -> None:
        self.is_on_its_way = self.is_held = False
        self.is_streaming = self.has_client
        assert (self.handoff.decode_began() == CancelDecode()) == (not self.has_client)

    @precondition(lambda self: self.is_on_its_way or self.is_streaming)
    @rule()
    def decode_failed_or_ended(self) -> None:
        self.is_on_its_way = self.is_streaming = self.is_held = False
        assert self.handoff.decode_ended() == NothingLeft()

    @rule()
    def nothing_happens(self) -> None:
        """So that there is always something to do."""

    @precondition(lambda self: self.has_client)
    @rule()
    def client_left(self) -> None:
        self.has_client = False
        action = self.handoff.client_left()
        assert (action == CancelDecode()) == self.is_streaming
        assert (action is None) == (self.is_prefilling or self.is_on_its_way)
        self.is_streaming = False

    @invariant()
    def held_blocks_have_a_decode_leg_on_its_way(self) -> None:
        assert not self.is_held or self.is_on_its_way

    @invariant()
    def a_prefill_is_sent_once_and_only_a_leg_that_did_not_arrive_twice(self) -> None:
        assert sum(isinstance(action, SendPrefill) for action in self.sent) <= 1

    @invariant()
    def it_is_over_when_nothing_is_under_way(self) -> None:
        is_under_way = self.is_prefilling or self.is_on_its_way or self.is_streaming
        has_begun = bool(self.sent) or not self.has_client
        assert self.handoff.is_over == (has_begun and not is_under_way)

    @invariant()
    def nothing_is_sent_after_the_end(self) -> None:
        if self.handoff.is_over:
            for late in (self.handoff.begin, self.handoff.redeliver, self.handoff.decode_began):
                with pytest.raises(AssertionError):
                    late()


TestHandoffs = Handoffs.TestCase
TestHandoffs.settings = settings(
    max_examples=150, stateful_step_count=12, deadline=None, derandomize=True, database=None
)
