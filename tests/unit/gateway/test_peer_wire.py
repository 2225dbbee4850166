"""Messages between gateways: what is written is read, and nothing else is."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moongate.gateway.replicas import peer_wire
from moongate.gateway.replicas.peer_wire import PeerMessageError
from moongate.router import (
    EndPrediction,
    Holder,
    InstanceId,
    Load,
    PeerId,
    PeerLeft,
    PeerLoad,
    PeerPredicted,
    PeerPredictionEnded,
    PeerReported,
    RequestId,
    SharePrediction,
)
from moongate.router.model import BlockHash

A, B = Holder(InstanceId("a")), Holder(InstanceId("b"), 1)
P, R = PeerId("p"), RequestId("r")
BLOCKS = (BlockHash(b"1" * 16), BlockHash(b"2" * 16))
LOADS = [(A, PeerLoad(Load(1, 2, 3), 4)), (B, PeerLoad(Load(), 0))]


def test_what_is_written_is_read_in_its_order() -> None:
    steps: list[SharePrediction | EndPrediction] = [
        SharePrediction(R, A, BLOCKS, BLOCKS[1], 60.0),
        EndPrediction(R, is_void=True),
        SharePrediction(R, B, (), None, 1.0),
    ]
    message = peer_wire.read(peer_wire.write(P, 7, 5.0, LOADS, steps, is_whole=True))
    assert (message.peer, message.sequence) == ("p", 7)
    assert message.events == [
        PeerReported(P, tuple(LOADS), is_whole=True, lease_s=5.0),
        PeerPredicted(P, R, A, BLOCKS, BLOCKS[1], 60.0),
        PeerPredictionEnded(P, R, is_void=True),
        PeerPredicted(P, R, B, (), None, 1.0),
    ]


def test_who_leaves_says_nothing_else() -> None:
    message = peer_wire.read(peer_wire.write(P, 7, 5.0, LOADS, [], has_left=True))
    assert message.events == [PeerLeft(P)]


def test_a_cold_prompt_of_80_k_tokens_is_some_10_kb() -> None:
    blocks = tuple(BlockHash(b"%016d" % n) for n in range(80_000 // 128))
    step = SharePrediction(RequestId("r" * 36), A, blocks, blocks[-1], 60.0)
    assert len(peer_wire.write(P, 1, 5.0, LOADS, [step])) < 11_500


@pytest.mark.parametrize(
    "change",
    [
        {0: 2}, {1: ""}, {1: "p" * 301}, {2: -1}, {3: 0}, {3: -5}, {3: 1e9}, {4: 1}, {6: [["a"]]},
        {6: [["a", None, -1, 0, 0, 0]]}, {6: [["a", None, 1 << 50, 0, 0, 0]]}, {7: [["x"]]},
        {7: [["p", "r", "a", None, [b"short"], None, 1.0]]},
        {7: [["p", "r", "a", None, [], None, 0]]}, {7: [["e", "", True]]},
    ],
)  # fmt: skip
def test_what_is_out_of_bounds_is_refused(change: dict[int, object]) -> None:
    parts = msgspec.msgpack.decode(peer_wire.write(P, 7, 5.0, LOADS, []))
    for position, value in change.items():
        parts[position] = value
    with pytest.raises(PeerMessageError):
        peer_wire.read(msgspec.msgpack.encode(parts))


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        message = peer_wire.read(data)
    except PeerMessageError:
        return
    assert message.events


@given(st.data())
def test_a_message_with_a_few_wrong_bytes_is_read_or_refused(data: st.DataObject) -> None:
    steps: list[SharePrediction | EndPrediction] = [
        SharePrediction(R, A, BLOCKS, BLOCKS[1], 60.0),
        EndPrediction(R),
    ]
    message = bytearray(peer_wire.write(P, 7, 5.0, LOADS, steps))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(message) - 1))
        message[position] = data.draw(st.integers(0, 255))
    try:
        events = peer_wire.read(bytes(message)).events
    except PeerMessageError:
        return
    assert events
