"""What vLLM publishes, in both forms, as router events; and what is no such message."""

import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moongate.engine_plugins.vllm_wire import (
    REMOVED_FIELDS,
    STORED_FIELDS,
    Frame,
    WireError,
    _decode_payload,
    _decode_tolerantly,
    decode_batch,
    format_replay_request,
    parse_live_frames,
    parse_replay_frames,
)
from moongate.router.events import (
    BatchReceived,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    BlocksUnreadable,
    KvEvent,
)
from moongate.router.model import WHOLE_PREFIX, InstanceId, SourceId, Tier

SOURCE = SourceId(InstanceId("a"))
END = (-1).to_bytes(8, "big", signed=True)

STORED: dict[str, Any] = {
    "type": "BlockStored",
    "block_hashes": [11, 12],
    "parent_block_hash": 10,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
}
STORED_EVENT = BlocksStored(
    engine_hashes=(11, 12),
    parent=10,
    tokens=struct.pack("=4I", 1, 2, 3, 4),
    block_size_tokens=2,
    tier=Tier.DEVICE,
)
REMOVED: dict[str, Any] = {"type": "BlockRemoved", "block_hashes": [11], "medium": "GPU"}


def batch_of(payload: bytes) -> BatchReceived:
    return decode_batch(SOURCE, Frame(b"", 7, payload))


def decoded(*events: object) -> tuple[KvEvent, ...]:
    return batch_of(msgspec.msgpack.encode([1.5, list(events), 0])).events


def stored(**fields: object) -> KvEvent:
    """Return what becomes of the stored event with these fields in place of its own."""
    (event,) = decoded({**STORED, **fields})
    return event


def positional(event: dict[str, Any], names: tuple[str, ...]) -> list[object]:
    """Return the event in the older form, up to its last given field."""
    given_names = [index for index, name in enumerate(names) if name in event]
    return [event["type"], *(event.get(name) for name in names[: given_names[-1] + 1])]


# --- events ---------------------------------------------------------------------------------------


def test_a_stored_event_as_a_map() -> None:
    assert decoded(STORED) == (STORED_EVENT,)


def test_c55_a_stored_event_as_an_array_says_the_same() -> None:
    assert decoded(positional(STORED, STORED_FIELDS)) == (STORED_EVENT,)


def test_c55_an_array_that_ends_with_the_block_size_is_complete() -> None:
    assert decoded(["BlockStored", [11, 12], 10, [1, 2, 3, 4], 2]) == (STORED_EVENT,)


def test_surplus_tail_fields_are_left_out() -> None:
    event = [*positional(STORED, STORED_FIELDS), None, None, None, None, None, None, "s", "new"]
    assert decoded(event, {**STORED, "new_2027": [1]}) == (STORED_EVENT, STORED_EVENT)


def test_a_root_block_has_no_parent() -> None:
    assert stored(parent_block_hash=None) == BlocksStored(
        (11, 12), None, STORED_EVENT.tokens, 2, Tier.DEVICE
    )


def test_hashes_may_be_raw_digests() -> None:
    event = stored(block_hashes=[b"\x01" * 32, b"\x02" * 32], parent_block_hash=b"\x00" * 32)
    assert isinstance(event, BlocksStored)
    assert event.engine_hashes == (b"\x01" * 32, b"\x02" * 32)
    assert event.parent == b"\x00" * 32


def test_a_hash_may_fill_64_bits() -> None:
    event = stored(block_hashes=[2**64 - 1], token_ids=[1, 2])
    assert isinstance(event, BlocksStored)
    assert event.engine_hashes == (2**64 - 1,)


@pytest.mark.parametrize(
    "event", [REMOVED, positional(REMOVED, REMOVED_FIELDS), ["BlockRemoved", [11]]]
)
def test_a_removed_event_in_each_form(event: object) -> None:
    assert decoded(event) == (BlocksRemoved((11,), Tier.DEVICE),)


@pytest.mark.parametrize("event", [{"type": "AllBlocksCleared"}, ["AllBlocksCleared"]])
def test_a_cleared_event_in_each_form(event: object) -> None:
    assert decoded(event) == (BlocksCleared(),)


def test_the_events_of_a_batch_keep_their_order() -> None:
    assert decoded(REMOVED, STORED, ["AllBlocksCleared"]) == (
        BlocksRemoved((11,), Tier.DEVICE),
        STORED_EVENT,
        BlocksCleared(),
    )


# --- media ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("medium", "locality", "tier"),
    [
        (None, None, Tier.DEVICE),
        ("GPU", None, Tier.DEVICE),
        ("gpu", "LOCAL", Tier.DEVICE),
        ("CPU", None, Tier.HOST),
        ("CPU", "LOCAL", Tier.HOST),
        ("CPU", "REMOTE", Tier.POOL),
        ("cpu", None, Tier.POOL),
        ("cpu", "LOCAL", Tier.HOST),
        ("STORAGE", None, Tier.DISK),
        ("STORAGE", "LOCAL", Tier.DISK),
        ("storage", "REMOTE", Tier.POOL),
    ],
)
def test_medium_and_locality_give_the_tier(
    medium: str | None, locality: str | None, tier: Tier
) -> None:
    removed = {**REMOVED, "medium": medium, "locality": locality}
    event = stored(medium=medium, locality=locality)
    assert isinstance(event, BlocksStored)
    assert (event.tier, *decoded(removed)) == (tier, BlocksRemoved((11,), tier))


@pytest.mark.parametrize("medium", ["CPU", "cpu", "STORAGE"])
def test_a_placeholder_without_tokens_says_nothing(medium: str) -> None:
    placeholder = {**STORED, "medium": medium, "token_ids": [], "block_size": 0}
    assert decoded(placeholder, STORED) == (STORED_EVENT,)
    assert decoded(positional(placeholder, STORED_FIELDS), STORED) == (STORED_EVENT,)


# --- extra keys, adapters, groups -----------------------------------------------------------------


def extra_keys_of(event: KvEvent) -> object:
    assert isinstance(event, BlocksStored)
    return event.extra_keys


def test_c44_the_adapter_is_no_extra_key_of_its_own() -> None:
    event = stored(lora_name="ad-1", extra_keys=[["ad-1"], ["ad-1"]])
    assert isinstance(event, BlocksStored)
    assert (event.lora_name, event.extra_keys) == ("ad-1", None)


def test_c44_what_follows_the_adapter_stays() -> None:
    event = stored(lora_name="ad-1", extra_keys=[["ad-1", ["img", 3], "salt"], ["ad-1"]])
    assert extra_keys_of(event) == ((("img", 3), "salt"), None)


def test_c44_a_salt_that_reads_like_the_adapter_stays() -> None:
    event = stored(lora_name="ad-1", extra_keys=[["ad-1", "ad-1"], ["ad-1"]])
    assert extra_keys_of(event) == (("ad-1",), None)


def test_c44_only_the_first_key_can_be_the_adapter() -> None:
    event = stored(lora_name="ad-1", extra_keys=[[["img", 3], "ad-1"], None])
    assert extra_keys_of(event) == ((("img", 3), "ad-1"), None)


def test_without_an_adapter_the_first_key_is_kept() -> None:
    assert extra_keys_of(stored(extra_keys=[["salt"], None])) == (("salt",), None)


def test_tagged_keys_read_as_the_untagged() -> None:
    tagged = [["lora", "ad-1", "/p"], ["mm", "img", 3], ["cache_salt", "s"]]
    event = stored(lora_name="ad-1", extra_keys=[tagged, [["prompt_embeds", b"\x01"]]])
    assert extra_keys_of(event) == ((("img", 3), "s"), (b"\x01",))


def test_an_image_whose_identifier_is_a_tag_is_still_an_image() -> None:
    assert extra_keys_of(stored(extra_keys=[[["mm", 3]], None])) == ((("mm", 3),), None)


@pytest.mark.parametrize("keys", [None, [None, None], [[], []]])
def test_no_extra_keys_in_any_form_are_none(keys: object) -> None:
    assert extra_keys_of(stored(extra_keys=keys)) is None


@pytest.mark.parametrize(
    ("kind", "is_full"),
    [
        (None, True),
        ("full_attention", True),
        ("mla_attention", True),
        ("sink_full_attention", True),
        ("sliding_window", False),
        ("mamba", False),
        ("new_kind_2027", False),
    ],
)
def test_the_kind_tells_which_groups_need_the_whole_prefix(kind: str | None, is_full: bool) -> None:
    event = stored(kv_cache_spec_kind=kind, group_idx=1)
    assert isinstance(event, BlocksStored)
    assert (event.is_full_attention, event.group) == (is_full, 1)


@pytest.mark.parametrize(
    ("kind", "window", "needed_tokens"),
    [
        (None, None, None),
        (None, 512, None),
        ("full_attention", None, WHOLE_PREFIX),
        ("mla_attention", None, WHOLE_PREFIX),
        ("sliding_window", 512, 511),
        ("sliding_window_mla", 2, 1),
        ("sliding_window", 1, 1),
        ("sliding_window", None, 1),
        ("mamba", None, 1),
        ("chunked_local_attention", None, 1),
        ("cross_attention", None, None),
        ("new_kind_2027", 512, None),
    ],
)
def test_the_kind_tells_how_far_back_a_group_is_needed(
    kind: str | None, window: int | None, needed_tokens: int | None
) -> None:
    fields = {"kv_cache_spec_kind": kind, "kv_cache_spec_sliding_window": window, "group_idx": 1}
    (event,) = decoded({**STORED, **fields})
    (array,) = decoded(positional({**STORED, **fields}, STORED_FIELDS))
    assert isinstance(event, BlocksStored)
    assert event.needed_tokens == needed_tokens
    assert array == event


@pytest.mark.parametrize("window", [-1, True, "512", 512.0])
def test_a_window_of_the_wrong_form_is_named(window: object) -> None:
    event = stored(kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=window)
    assert event == BlocksUnreadable("kv_cache_spec_sliding_window")


def test_a_group_may_store_fewer_blocks_than_it_tells_tokens_of() -> None:
    event = stored(block_hashes=[12], kv_cache_spec_kind="sliding_window", group_idx=1)
    assert isinstance(event, BlocksStored)
    assert (event.engine_hashes, event.tokens) == ((12,), STORED_EVENT.tokens)


def test_a_removal_names_its_group() -> None:
    assert decoded({**REMOVED, "group_idx": 2}) == (BlocksRemoved((11,), Tier.DEVICE, 2),)


def test_c46_the_event_says_its_own_block_size() -> None:
    event = stored(block_size=64)
    assert isinstance(event, BlocksStored)
    assert event.block_size_tokens == 64


# --- what can't be understood ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"block_hashes": None}, "block_hashes"),
        ({"block_hashes": ["x"]}, "block_hashes"),
        ({"block_hashes": [True]}, "block_hashes"),
        ({"block_hashes": [1.0]}, "block_hashes"),
        ({"parent_block_hash": "x"}, "parent_block_hash"),
        ({"token_ids": None}, "token_ids"),
        ({"token_ids": "abc"}, "token_ids"),
        ({"token_ids": [-1, 2]}, "token_ids"),
        ({"token_ids": [2**32, 2]}, "token_ids"),
        ({"token_ids": [1.0, 2]}, "token_ids"),
        ({"block_size": None}, "block_size"),
        ({"block_size": -1}, "block_size"),
        ({"block_size": True}, "block_size"),
        ({"lora_name": 7}, "lora_name"),
        ({"medium": "TAPE"}, "medium"),
        ({"medium": 1}, "medium"),
        ({"extra_keys": "x"}, "extra_keys"),
        ({"extra_keys": ["x"]}, "extra_keys"),
        ({"group_idx": -1}, "group_idx"),
        ({"group_idx": "0"}, "group_idx"),
        ({"kv_cache_spec_kind": ["full_attention"]}, "kv_cache_spec_kind"),
        ({"kv_cache_spec_kind": {}}, "kv_cache_spec_kind"),
        ({"type": "BlockMoved"}, "event_type"),
        ({"type": None}, "event_type"),
        ({"type": ["BlockStored"]}, "event_type"),
    ],
)
def test_a_field_of_the_wrong_form_is_named(fields: dict[str, object], reason: str) -> None:
    assert stored(**fields) == BlocksUnreadable(reason)


@pytest.mark.parametrize("event", [7, None, "BlockStored", [], b"x"])
def test_an_event_that_is_no_map_and_no_array_is_named(event: object) -> None:
    assert decoded(event) == (BlocksUnreadable("event_shape"),)


@pytest.mark.parametrize("key", [[["x"], 1], [{"a": 1}, 1]])
def test_an_extra_key_of_unknown_form_is_kept_as_it_is(key: list[object]) -> None:
    assert extra_keys_of(stored(extra_keys=[[key], None])) == ((tuple(key),), None)


def test_one_odd_event_loses_no_other() -> None:
    assert decoded(STORED, {"type": "BlockStored"}, STORED) == (
        STORED_EVENT,
        BlocksUnreadable("block_hashes"),
        STORED_EVENT,
    )


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "payload"),
        (b"not msgpack", "payload"),
        (b"\x93\x01\x91\xa2\xff\xfe\x00", "payload"),
        (b"\x91" * 100_000, "payload"),
        (msgspec.msgpack.encode([1.0, []]) + b"\x00", "payload"),
        (msgspec.msgpack.encode({"events": []}), "batch_shape"),
        (msgspec.msgpack.encode([1.0]), "batch_shape"),
        (msgspec.msgpack.encode([1.0, {}]), "batch_shape"),
        (msgspec.msgpack.encode([1.0, [], -1]), "rank"),
        (msgspec.msgpack.encode([1.0, [], "0"]), "rank"),
    ],
)
def test_c62_a_payload_of_the_wrong_form_is_a_batch_that_says_so(
    payload: bytes, reason: str
) -> None:
    batch = batch_of(payload)
    assert (batch.sequence, batch.events, batch.rank) == (7, (BlocksUnreadable(reason),), None)


@pytest.mark.parametrize("event", [{**STORED, "block_size": -1}, {**REMOVED, "group_idx": -1}])
def test_one_odd_event_of_the_declared_types_loses_no_other(event: object) -> None:
    events = decoded(REMOVED, event, STORED)
    assert (events[0], events[2]) == (BlocksRemoved((11,), Tier.DEVICE), STORED_EVENT)
    assert isinstance(events[1], BlocksUnreadable)


# --- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tail", "rank"), [([], None), ([None], None), ([0], 0), ([3], 3), ([3, "new"], 3)]
)
def test_the_rank_may_be_missing(tail: list[object], rank: int | None) -> None:
    assert batch_of(msgspec.msgpack.encode([1.0, [], *tail])).rank == rank


def test_a_batch_names_its_source_and_replay() -> None:
    batch = decode_batch(SOURCE, Frame(b"topic", 7, msgspec.msgpack.encode([1.0, []])), replay_id=4)
    assert (batch.source, batch.sequence, batch.replay_id) == (SOURCE, 7, 4)


def test_the_digest_tells_batches_apart_that_differ_in_time_only() -> None:
    first, again, later = (
        batch_of(msgspec.msgpack.encode([at, [STORED]])).digest for at in (1.0, 1.0, 2.0)
    )
    assert first == again
    assert first != later


# --- frames ---------------------------------------------------------------------------------------


def test_a_live_message_has_topic_sequence_and_payload() -> None:
    frames = [b"kv@a", (258).to_bytes(8, "big"), b"p"]
    assert parse_live_frames(frames) == Frame(b"kv@a", 258, b"p")


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"p"], "frame_count"),
        ([], "frame_count"),
        ([b"", bytes(8), b"p", b""], "frame_count"),
        ([b"t", bytes(4), b"p"], "sequence_size"),
        ([b"t", b"", b"p"], "sequence_size"),
        (
            [b"t", b"\xff" * 8, b""],
            "sequence_value",
        ),  # would be earlier than any, after a restart too
        ([b"t", b"\x80" + bytes(7), b"p"], "sequence_value"),
    ],
)
def test_c62_live_frames_of_another_form_are_refused_by_reason(
    frames: list[bytes], reason: str
) -> None:
    with pytest.raises(WireError) as refused:
        parse_live_frames(frames)
    assert refused.value.reason == reason


@pytest.mark.parametrize(
    "frames",
    [
        [(5).to_bytes(8, "big"), b"p"],
        [b"", (5).to_bytes(8, "big"), b"p"],
        [b"kv@a", (5).to_bytes(8, "big"), b"p"],
        [b"", b"kv@a", (5).to_bytes(8, "big"), b"p"],
        [b"", b"", (5).to_bytes(8, "big"), b"p"],
    ],
)
def test_c61_a_replayed_batch_with_or_without_topic_and_delimiter(frames: list[bytes]) -> None:
    frame = parse_replay_frames(frames)
    assert (frame.sequence, frame.payload, frame.is_end_of_replay) == (5, b"p", False)


@pytest.mark.parametrize(
    "frames", [[END, b""], [b"", END, b""], [b"", b"", END, b""], [b"kv@a", END, b""]]
)
def test_c61_the_end_mark_ends_a_replay(frames: list[bytes]) -> None:
    assert parse_replay_frames(frames).is_end_of_replay


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"p"], "frame_count"),
        ([b"x", b"t", bytes(8), b"p"], "frame_count"),
        ([b"", b"t", bytes(7), b"p"], "sequence_size"),
        ([b"t", b"\xff" * 7 + b"\xfe", b"p"], "sequence_value"),
    ],
)
def test_c61_replay_frames_of_another_form_are_refused_by_reason(
    frames: list[bytes], reason: str
) -> None:
    with pytest.raises(WireError) as refused:
        parse_replay_frames(frames)
    assert refused.value.reason == reason


def test_a_replay_request_is_a_delimiter_and_a_sequence() -> None:
    assert format_replay_request(258) == [b"", b"\0\0\0\0\0\0\1\2"]


# --- anything at all ------------------------------------------------------------------------------


class _Stored(msgspec.Struct, omit_defaults=True, tag="BlockStored"):
    """The event as vLLM 0.32 declares it, for an encoding that is not ours."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class _OldStored(msgspec.Struct, array_like=True, omit_defaults=True, tag="BlockStored"):
    """The event as earlier releases declared it."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    lora_name: str | None = None


class _Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


HASHES = st.integers(0, 2**64 - 1) | st.binary(min_size=32, max_size=32)


@settings(deadline=None)
@given(
    hashes=st.lists(HASHES, min_size=1, max_size=4),
    parent=st.none() | HASHES,
    block_size=st.integers(1, 4),
    lora=st.none() | st.just("ad"),
    rank=st.none() | st.integers(0, 7),
)
def test_what_the_engines_own_shapes_encode_comes_out_again(
    hashes: list[int | bytes],
    parent: int | bytes | None,
    block_size: int,
    lora: str | None,
    rank: int | None,
) -> None:
    tokens = list(range(len(hashes) * block_size))
    common = (hashes, parent, tokens, block_size, None, "GPU", lora)
    payload = msgspec.msgpack.encode(_Batch(1.0, [_Stored(*common), _OldStored(*common)], rank))
    expected = BlocksStored(
        engine_hashes=tuple(hashes),
        parent=parent,
        tokens=struct.pack(f"={len(tokens)}I", *tokens),
        block_size_tokens=block_size,
        tier=Tier.DEVICE,
        lora_name=lora,
    )
    batch = batch_of(payload)
    assert (batch.events, batch.rank) == ((expected, expected), rank)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.binary(max_size=4)
)
KEYS = st.sampled_from(["type", *STORED_FIELDS]) | st.text(max_size=3)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
ODD_FIELDS = st.dictionaries(st.sampled_from(STORED_FIELDS), VALUES, max_size=6)
ODD_EVENTS = (
    VALUES
    | ODD_FIELDS.map(lambda fields: {**STORED, **fields})
    | ODD_FIELDS.map(lambda fields: positional({**STORED, **fields}, STORED_FIELDS))
    | ODD_FIELDS.map(lambda fields: {**REMOVED, **fields})
)


@settings(deadline=None)
@given(st.binary(max_size=64))
def test_no_bytes_raise(payload: bytes) -> None:
    assert batch_of(payload).sequence == 7


@settings(deadline=None)
@given(
    events=st.lists(ODD_EVENTS | st.just(STORED) | st.just(REMOVED), max_size=4),
    tail=st.lists(VALUES, max_size=2),
)
def test_a_batch_read_by_types_says_what_it_says_field_by_field(
    events: list[object], tail: list[object]
) -> None:
    payload = msgspec.msgpack.encode([1.5, events, *tail])
    assert _outcome(_decode_payload, payload) == _outcome(_decode_tolerantly, payload)


def _outcome(decode: Callable[[bytes], object], payload: bytes) -> object:
    try:
        return decode(payload)
    except WireError as error:
        return error.reason


@settings(deadline=None)
@given(before=st.lists(ODD_EVENTS, max_size=3), after=st.lists(ODD_EVENTS, max_size=3))
def test_no_event_raises_or_loses_its_neighbours(before: list[object], after: list[object]) -> None:
    marked = {**STORED, "block_hashes": [b"the good one"], "token_ids": [1, 2]}
    events = decoded(*before, marked, *after)
    good = [e for e in events if getattr(e, "engine_hashes", None) == (b"the good one",)]
    assert good == [BlocksStored((b"the good one",), 10, struct.pack("=2I", 1, 2), 2, Tier.DEVICE)]
