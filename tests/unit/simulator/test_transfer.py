"""What `kv_transfer_params` ask of an engine, and which transfer a decoder finds."""

from typing import Any

import pytest

from moongate.simulator.loading import Link, LoadingArea
from moongate.simulator.transfer import (
    Connector,
    EngineFatalError,
    Handoff,
    HandoffSettings,
    MooncakeSource,
    NixlSource,
    Outbox,
    Receive,
    Role,
    Send,
    nixl_answer,
    parse_handoff,
)

MOONCAKE, NIXL, MULTI, NONE = (
    Connector.MOONCAKE,
    Connector.NIXL,
    Connector.MULTI,
    Connector.NONE,
)
BOTH, PREFILL, DECODE = Role.BOTH, Role.PREFILL, Role.DECODE

SEND = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t"}
RECEIVE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_bootstrap_addr": "http://h:1",
    "remote_engine_id": "e",
    "transfer_id": "t",
}
READ = nixl_answer(NixlSource("h", 2, "e", "r"), (3, 4), prompt_tokens=7, cached_tokens=4)


def without(params: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in params.items() if key != name}


@pytest.mark.parametrize(
    ("params", "connector", "role", "expected"),
    [
        (None, MOONCAKE, BOTH, None),
        ({}, MOONCAKE, BOTH, None),
        ({"prompt_token_ids": [1]}, NONE, BOTH, None),
        (SEND, NONE, BOTH, None),
        (SEND, MOONCAKE, PREFILL, Send("t")),
        (SEND, MULTI, BOTH, Send("t")),
        (SEND, NIXL, BOTH, Send(None, holds_when_stopped=True)),
        (without(SEND, "transfer_id"), MOONCAKE, PREFILL, None),
        (RECEIVE, MOONCAKE, DECODE, Receive(MooncakeSource("http://h:1", "e", "t"))),
        (without(RECEIVE, "transfer_id"), MOONCAKE, DECODE, Receive(None)),
        (without(RECEIVE, "remote_engine_id"), MULTI, BOTH, Receive(None)),
        (without(RECEIVE, "remote_bootstrap_addr"), MOONCAKE, BOTH, Receive(None)),
        (READ, NIXL, BOTH, Receive(NixlSource("h", 2, "e", "r"))),
        (without(READ, "remote_host"), NIXL, BOTH, Receive(None)),
    ],
)
def test_parameters_ask_for(
    params: dict[str, Any] | None, connector: Connector, role: Role, expected: Handoff | None
) -> None:
    assert parse_handoff(params, connector, role) == expected


@pytest.mark.parametrize(
    ("params", "connector", "role"),
    [
        (RECEIVE, MOONCAKE, PREFILL),
        (SEND, MOONCAKE, DECODE),
        (without(READ, "remote_block_ids"), NIXL, BOTH),
    ],
)
def test_some_parameters_break_the_engine(
    params: dict[str, Any], connector: Connector, role: Role
) -> None:
    with pytest.raises(EngineFatalError):
        parse_handoff(params, connector, role)


def test_who_names_no_prefill_engine_is_computed_or_waits() -> None:
    incomplete = without(RECEIVE, "transfer_id")
    assert HandoffSettings(MOONCAKE, DECODE).parse(incomplete) is None
    patient = HandoffSettings(MOONCAKE, DECODE, waits_for_nobody=True)
    assert patient.parse(incomplete) == Receive(None)


# -- transfers ------------------------------------------------------------------------------------


def test_a_ready_transfer_is_taken_once() -> None:
    outbox = Outbox(hold_s=10.0)
    outbox.expect("t", "r")
    assert outbox.take("t") is None
    outbox.hold("t", "r", now=1.0)
    assert (outbox.take("t"), outbox.take("t"), len(outbox)) == ("r", None, 0)


def test_a_decoder_may_wait_before_the_prefill_is_there() -> None:
    outbox, told = Outbox(hold_s=10.0), list[str]()
    outbox.wait("t", lambda: told.append("first"))
    outbox.expect("t", "r")
    assert told == []
    outbox.hold("t", "r", now=1.0)
    outbox.wait("t", lambda: told.append("second"))
    assert told == ["first", "second"]


def test_who_waits_for_a_forgotten_transfer_is_not_told_even_by_the_next_of_that_id() -> None:
    outbox, told = Outbox(hold_s=10.0), list[str]()
    outbox.wait("t", lambda: told.append("first"))
    outbox.expect("t", "r")
    outbox.forget("t")
    outbox.expect("t", "again")
    outbox.hold("t", "again", now=1.0)
    assert told == []
    assert outbox.take("t") == "again"


def test_a_transfer_expires_from_when_it_was_ready() -> None:
    outbox = Outbox(hold_s=10.0)
    outbox.expect("t", "r")
    assert (outbox.next_expiry_at(), outbox.take_expired(99.0)) == (None, [])
    outbox.hold("t", "r", now=100.0)
    assert outbox.next_expiry_at() == 110.0
    assert outbox.take_expired(109.9) == []
    assert (outbox.take_expired(110.0), len(outbox)) == (["r"], 0)


def test_a_lease_is_prolonged_and_never_shortened() -> None:
    outbox = Outbox(hold_s=10.0)
    outbox.expect("t", "r")
    outbox.hold("t", "r", now=0.0)
    outbox.prolong("t", 5.0)
    assert outbox.next_expiry_at() == 10.0
    outbox.prolong("t", 15.0)
    assert outbox.next_expiry_at() == 15.0
    outbox.prolong("unknown", 99.0)


def test_two_prefills_of_one_transfer_leave_only_the_later_one_to_be_found() -> None:
    outbox = Outbox(hold_s=10.0)
    for request_id in ("first", "second"):
        outbox.expect("t", request_id)
        outbox.hold("t", request_id, now=0.0)
    assert outbox.take("t") == "second"
    assert outbox.take_expired(99.0) == []


# -- loading ------------------------------------------------------------------------------------


def test_a_link_carries_one_after_the_other_and_rests_between() -> None:
    link = Link(bytes_per_s=100.0)
    assert [link.carry(50, 1.0), link.carry(100, 1.0), link.carry(50, 9.0)] == [1.5, 2.5, 9.5]


def test_what_is_parked_arrives_when_it_is_known_to() -> None:
    area = LoadingArea()
    area.park("a", arrives_at=3.0)
    area.park("b", arrives_at=None)
    assert (area.next_arrival_at(), area.arrived(2.9), area.arrived(3.0)) == (3.0, [], ["a"])
    area.set_arrival("b", 1.0)
    assert (area.next_arrival_at(), area.arrived(3.0)) == (1.0, ["a", "b"])
    area.abandon("b")
    assert area.wanted_requests == 1
    assert (area.remove("a"), area.remove("b")) == (True, False)
    assert area.next_arrival_at() is None
