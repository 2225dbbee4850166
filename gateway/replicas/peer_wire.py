"""Messages between gateways before the same fleet, to and from events and commands of the core.

Pure. One message has all that a gateway did in some milliseconds: the loads of the holders that changed
(as they are, so that the last one counts), or of all; and what it predicted, in order. MessagePack arrays,
about 30 bytes for a holder and 60 for a request, with 18 more for each 128 tokens of a cold prompt.

Bytes from outside are checked here: `read` returns events that the core can take, or raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

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
from moongate.router.peers import PeerEvent

VERSION = 1
"""Gateways of other versions are not understood, and go by what they know themselves."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=300)]
_Hash = Annotated[bytes, msgspec.Meta(min_length=8, max_length=32)]


class PeerMessageError(ValueError):
    """Bytes that are no message of this version."""


class _Load(msgspec.Struct, array_like=True, frozen=True):
    instance: _Name
    rank: _Count | None
    active_requests: _Count
    queued_prefill_tokens: _Count
    active_blocks: _Count
    recent_sessions: _Count


class _Predicted(msgspec.Struct, array_like=True, frozen=True, tag="p"):
    request: _Name
    instance: _Name
    rank: _Count | None
    blocks: Annotated[list[_Hash], msgspec.Meta(max_length=100_000)]
    tail: _Hash | None
    lifetime_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)]


class _Ended(msgspec.Struct, array_like=True, frozen=True, tag="e"):
    request: _Name
    is_void: bool


class Message(msgspec.Struct, array_like=True, frozen=True):
    """What one gateway tells the others at a time. `sequence` rises with each."""

    version: int
    peer: _Name
    sequence: _Count
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=3600)]
    is_whole: bool
    has_left: bool
    loads: Annotated[list[_Load], msgspec.Meta(max_length=100_000)]
    steps: Annotated[list[_Predicted | _Ended], msgspec.Meta(max_length=100_000)]

    @property
    def events(self) -> list[PeerEvent]:
        """Return what it says, as events of the core."""
        peer = PeerId(self.peer)
        if self.has_left:
            return [PeerLeft(peer)]
        loads = tuple((_holder(one), _peer_load(one)) for one in self.loads)
        return [
            PeerReported(peer, loads, self.is_whole, self.lease_s),
            *(_event(peer, step) for step in self.steps),
        ]


def write(
    peer: PeerId,
    sequence: int,
    lease_s: float,
    loads: Sequence[tuple[Holder, PeerLoad]],
    steps: Sequence[SharePrediction | EndPrediction],
    *,
    is_whole: bool = False,
    has_left: bool = False,
) -> bytes:
    """Return a message."""
    lines = [
        _Load(
            holder.instance_id,
            holder.rank,
            one.load.active_requests,
            one.load.queued_prefill_tokens,
            one.load.active_blocks,
            one.recent_sessions,
        )
        for holder, one in loads
    ]
    told = [_step(step) for step in steps]
    return _encode(Message(VERSION, peer, sequence, lease_s, is_whole, has_left, lines, told))


def read(data: bytes) -> Message:
    """Return what a message says. Raises: PeerMessageError."""
    try:
        message = _decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise PeerMessageError(str(error)) from error
    if message.version != VERSION:
        raise PeerMessageError(f"version {message.version}, expected {VERSION}")
    return message


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


def _holder(one: _Load | _Predicted) -> Holder:
    return Holder(InstanceId(one.instance), one.rank)


def _peer_load(one: _Load) -> PeerLoad:
    load = Load(one.active_requests, one.queued_prefill_tokens, one.active_blocks)
    return PeerLoad(load, one.recent_sessions)


def _step(step: SharePrediction | EndPrediction) -> _Predicted | _Ended:
    if isinstance(step, EndPrediction):
        return _Ended(step.request_id, step.is_void)
    instance_id, rank = step.holder
    blocks: list[bytes] = [*step.blocks]
    return _Predicted(step.request_id, instance_id, rank, blocks, step.tail, step.lifetime_s)


def _event(peer: PeerId, step: _Predicted | _Ended) -> PeerPredicted | PeerPredictionEnded:
    request_id = RequestId(step.request)
    if isinstance(step, _Ended):
        return PeerPredictionEnded(peer, request_id, step.is_void)
    blocks = tuple(BlockHash(block) for block in step.blocks)
    tail = BlockHash(step.tail) if step.tail is not None else None
    return PeerPredicted(peer, request_id, _holder(step), blocks, tail, step.lifetime_s)
