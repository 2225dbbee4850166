"""Event payloads and replays, byte for byte as the engine writes them."""

import msgspec
import pytest

from moongate.simulator.blocks import (
    AllBlocksCleared,
    BlockDigest,
    BlockRemoved,
    BlockStored,
    KvEvent,
    PoolBlockStored,
)
from moongate.simulator.event_wire import (
    END_OF_REPLAY,
    BatchEncoder,
    DigestForm,
    EventForm,
    ReplayBuffer,
    encode_sequence,
)

A, B = BlockDigest(bytes(31) + b"\x0a"), BlockDigest(bytes(24) + b"\xff" * 7 + b"\x0b")
A_INT, B_INT = 0x0A, 0xFFFFFFFFFFFFFF0B

STORED = BlockStored((A, B), None, (1, 2, 3, 4), (None, None), None, None)
SALTED = BlockStored(
    digests=(B,),
    parent=A,
    token_ids=(3, 4),
    extra_keys=((("lora", "french", ""), ("cache_salt", "s")),),
    lora_name="french",
    session_id="agent-1",
)


def decode(
    event: KvEvent,
    event_form: EventForm = EventForm.MAP,
    digest_form: DigestForm = DigestForm.INT,
) -> object:
    encoder = BatchEncoder(
        rank=3, block_size_tokens=2, event_form=event_form, digest_form=digest_form
    )
    time_s, events, rank = msgspec.msgpack.decode(encoder.encode([event], 1.5))
    assert (time_s, rank) == (1.5, 3)
    (one,) = events
    return one


def test_a_stored_event_leaves_out_what_is_default_but_not_what_has_no_default() -> None:
    assert decode(STORED) == {
        "type": "BlockStored",
        "block_hashes": [A_INT, B_INT],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None, None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def test_a_block_in_the_pool_is_told_as_the_store_connector_does() -> None:
    event = PoolBlockStored(B, A, (3, 4))
    fields = {
        "block_hashes": [B_INT],
        "parent_block_hash": A_INT,
        "token_ids": [3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "cpu",
        "lora_name": None,
    }
    assert decode(event) == {"type": "BlockStored", **fields, "group_idx": 0}
    assert decode(event, EventForm.ARRAY) == ["BlockStored", *fields.values()]


def test_extra_keys_are_published_without_tags_and_session_when_there_is_one() -> None:
    event = decode(SALTED)
    assert isinstance(event, dict)
    assert event["extra_keys"] == [["french", "s"]]
    assert (event["parent_block_hash"], event["session_id"]) == (A_INT, "agent-1")


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (STORED, ["BlockStored", [A_INT, B_INT], None, [1, 2, 3, 4], 2, None, "GPU", None]),
        (
            SALTED,
            ["BlockStored", [B_INT], A_INT, [3, 4], 2, None, "GPU", "french", [["french", "s"]]],
        ),
        (BlockRemoved(A), ["BlockRemoved", [A_INT], "GPU"]),
        (AllBlocksCleared(), ["AllBlocksCleared"]),
    ],
)
def test_the_older_form_is_positional(event: KvEvent, expected: list[object]) -> None:
    assert decode(event, EventForm.ARRAY) == expected


def test_removed_and_cleared_events_carry_a_tag() -> None:
    assert decode(BlockRemoved(B)) == {
        "type": "BlockRemoved",
        "block_hashes": [B_INT],
        "medium": "GPU",
        "group_idx": 0,
    }
    assert decode(AllBlocksCleared()) == {"type": "AllBlocksCleared"}


def test_digests_may_be_whole() -> None:
    event = decode(BlockRemoved(B), digest_form=DigestForm.BYTES)
    assert isinstance(event, dict)
    assert event["block_hashes"] == [B]


def test_a_replay_starts_where_it_was_asked_and_ends_with_the_mark() -> None:
    buffer = ReplayBuffer()
    for number in range(3):
        buffer.append(number, b"%d" % number)
    assert buffer.replies(1, topic=b"t") == [
        (b"", b"t", encode_sequence(1), b"1"),
        (b"", b"t", encode_sequence(2), b"2"),
        (b"", b"", END_OF_REPLAY, b""),
    ]


def test_older_replays_have_no_topic_frame() -> None:
    buffer = ReplayBuffer()
    buffer.append(0, b"0")
    assert buffer.replies(0, topic=b"t", has_topic_frame=False) == [
        (b"", encode_sequence(0), b"0"),
        (b"", END_OF_REPLAY, b""),
    ]


def test_the_buffer_forgets_the_oldest_batch() -> None:
    buffer = ReplayBuffer(batches_max=2)
    for number in range(4):
        buffer.append(number, b"")
    assert buffer.replies(0, topic=b"")[0][2] == encode_sequence(2)
