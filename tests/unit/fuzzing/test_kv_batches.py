"""What engines announce, of any form and in any order: the core takes it in, and its invariants hold."""

from __future__ import annotations

from functools import partial

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from odd_values import damaged, quick, tried

from moongate.engine_plugins.vllm_wire import (
    WireError,
    decode_batch,
    parse_live_frames,
    parse_replay_frames,
)
from moongate.router import (
    BatchReceived,
    InstanceAdded,
    InstanceDescribed,
    InstanceFacts,
    InstanceId,
    InstanceProbed,
    InstanceSpec,
    ModelCard,
    ReplayEnded,
    RequestReplay,
    RouterCore,
    SourceId,
    SourceLost,
    SourceOpened,
    SourceReconnected,
    make_policy,
)
from moongate.router.invariants import check

SOURCE = SourceId(InstanceId("a"))
HASHES = st.integers(0, 6) | st.sampled_from([b"x" * 32, b"y" * 32, b"", -1, 2**64 - 1])
ODD = st.none() | st.integers(-2, 40) | st.text(max_size=3) | st.booleans() | st.lists(HASHES)


@st.composite
def kv_events(draw: st.DrawFn) -> object:
    """Return one event: right, nearly right, or anything."""
    kind = draw(st.integers(0, 4))
    if kind == 0:
        return {"type": "AllBlocksCleared"}
    hashes = draw(st.lists(HASHES, max_size=3))
    if kind == 1:
        return {"type": "BlockRemoved", "block_hashes": hashes, "medium": draw(MEDIA)}
    size = draw(st.sampled_from([4, 4, 4, 8, 0, -1]))
    event = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": draw(st.none() | HASHES),
        "token_ids": draw(st.lists(st.integers(0, 3), min_size=0, max_size=12))
        if draw(st.booleans())
        else list(range(max(size, 0) * len(hashes))),
        "block_size": size,
        "lora_id": None,
        "medium": draw(MEDIA),
        "lora_name": draw(st.none() | st.sampled_from(["ad", ""])),
        "extra_keys": draw(st.none() | st.lists(st.none() | st.lists(ODD, max_size=2), max_size=3)),
    }
    if kind == 3:
        event[draw(st.sampled_from(sorted(event)))] = draw(ODD)
    return event


MEDIA = st.sampled_from(["GPU", "cpu", "CPU", "DISK", None, "FLOPPY"])


@st.composite
def frames(draw: st.DrawFn) -> list[bytes]:
    """Return a message as it may come over a socket."""
    sequence = draw(st.integers(0, 8) | st.sampled_from([2**40, 2**63, 2**64 - 1]))
    payload = msgspec.msgpack.encode([1.0, draw(st.lists(kv_events(), max_size=3)), 0])
    if draw(st.integers(0, 4)) == 0:
        payload = draw(damaged(payload))
    whole = [b"topic", sequence.to_bytes(8, "big"), payload]
    shape = draw(st.integers(0, 9))
    return whole if shape else draw(st.lists(st.binary(max_size=9), max_size=4))


def make_core() -> RouterCore:
    core = RouterCore(make_policy("kv_cost"), lambda below: 0)
    instance = SOURCE.instance_id
    core.handle(InstanceAdded(InstanceSpec(instance)), 0.0)
    facts = InstanceFacts(models=(ModelCard("m"),), block_size_tokens=4, capacity_blocks=16)
    core.handle(InstanceDescribed(instance, facts), 0.0)
    core.handle(InstanceProbed(instance, is_healthy=True), 0.0)
    core.handle(SourceOpened(SOURCE, True, None), 0.0)
    return core


@quick
@given(messages=st.lists(frames(), max_size=8), others=st.lists(st.integers(0, 30), max_size=8))
def test_whatever_is_announced_the_core_keeps_its_invariants(
    messages: list[list[bytes]], others: list[int]
) -> None:
    core, replay_id = make_core(), 0
    for n, message in enumerate(messages):
        now = n / 10
        frame = tried(partial(parse_live_frames, message), WireError)
        if isinstance(frame, Exception):
            continue
        commands = [*core.handle(decode_batch(SOURCE, frame), now)]
        what = others[n] if n < len(others) else 99
        if what == 0:
            commands += core.handle(SourceLost(SOURCE), now)
            commands += core.handle(SourceReconnected(SOURCE), now)
        for command in commands:
            if isinstance(command, RequestReplay):
                replay_id = command.replay_id
        if what in (1, 2):
            core.handle(ReplayEnded(SOURCE, replay_id, what == 1), now)
        check(core)


@quick
@given(message=frames() | st.lists(st.binary(max_size=16), max_size=5))
def test_any_frames_are_a_message_or_a_wire_error(message: list[bytes]) -> None:
    for parse in (parse_live_frames, parse_replay_frames):
        frame = tried(partial(parse, message), WireError)
        if not isinstance(frame, Exception):
            assert isinstance(decode_batch(SOURCE, frame), BatchReceived)
