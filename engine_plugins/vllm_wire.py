"""vLLM's KV-event wire <-> router events: pure.

Accepts what vLLM 0.32 sends and what earlier releases sent: events as maps with a `type` tag (since
vllm#42892) or as positional arrays whose first item is the tag, missing and surplus tail fields, and
replay answers with or without a topic frame (vllm#45177). What can't be understood becomes a
`BlocksUnreadable` with a fixed word for a reason, so one odd event loses neither its batch nor the
subscription.

Nearly all batches are of the current form and without a fault. They are read by declared types, in one
go; a batch that doesn't fit these is read again field by field, with the same outcome for what does fit.

Source: vLLM 0.32 `distributed/kv_events.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from moongate.router.blocks import pack_tokens
from moongate.router.events import (
    BatchReceived,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    BlocksUnreadable,
    KvEvent,
)
from moongate.router.model import WHOLE_PREFIX, EngineHash, ExtraKeys, SourceId, Tier

END_OF_REPLAY = -1

STORED_FIELDS = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
    "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window", "locality", "ownership", "session_id",
)  # fmt: skip
REMOVED_FIELDS = ("block_hashes", "medium", "group_idx", "locality", "ownership")
"""The order of fields in the positional form."""

FULL_ATTENTION_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""`kv_cache_spec_kind` of groups that need every block of a prefix. None: not told."""

WINDOW_KINDS = frozenset({"sliding_window", "sliding_window_mla"})
"""Groups whose layers look back over the last `kv_cache_spec_sliding_window` tokens."""

CHECKPOINT_KINDS = frozenset({"mamba", "chunked_local_attention"})
"""Groups of which the last block before a position tells whether work can go on there.

Of a linear-attention group a cached block is the state at its end, and no other is needed. A chunk of
local attention needs its beginning as well, but its size isn't told; its end is what is evicted first.
"""

_EXTRA_KEY_TAGS = frozenset({"lora", "mm", "cache_salt", "prompt_embeds"})

_decode = msgspec.msgpack.Decoder().decode


class _Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: tuple[int | bytes, ...]
    token_ids: list[int]
    block_size: int
    parent_block_hash: int | bytes | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Any = None
    group_idx: Any = None
    kv_cache_spec_kind: Any = None
    kv_cache_spec_sliding_window: Any = None
    locality: Any = None


class _Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: tuple[int | bytes, ...]
    medium: str | None = None
    group_idx: Any = None
    locality: Any = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, array_like=True):
    timestamp: Any
    events: list[_Stored | _Removed | _Cleared]
    rank: int | None = None


_decode_typed = msgspec.msgpack.Decoder(_Batch).decode


class WireError(ValueError):
    """A message that has not the form of the wire. `reason` is a fixed word, for metrics."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Frame:
    """The frames of one message. `sequence` -1 with an empty payload ends a replay."""

    topic: bytes
    sequence: int
    payload: bytes

    @property
    def is_end_of_replay(self) -> bool:
        return self.sequence == END_OF_REPLAY


# --- frames ---------------------------------------------------------------------------------------


def parse_live_frames(frames: Sequence[bytes]) -> Frame:
    """Return the frame of a PUB message: topic, 8-byte big-endian sequence, payload.

    Raises: WireError.
    """
    if len(frames) != 3:
        raise WireError("frame_count", f"expected topic, sequence, payload; got {len(frames)}")
    frame = Frame(frames[0], _parse_sequence(frames[1]), frames[2])
    if frame.is_end_of_replay:
        raise WireError("sequence_value", "the end of a replay, which nobody publishes")
    return frame


def parse_replay_frames(frames: Sequence[bytes]) -> Frame:
    """Return the frame of a replay answer, with (newer) or without (older) a topic frame.

    A leading empty delimiter, which a DEALER socket sees and a REQ socket strips, is left out.
    Raises: WireError.
    """
    rest = frames[1:] if len(frames) in (3, 4) and frames[0] == b"" else frames
    match len(rest):
        case 2:
            return Frame(b"", _parse_sequence(rest[0]), rest[1])
        case 3:
            return Frame(rest[0], _parse_sequence(rest[1]), rest[2])
        case _:
            raise WireError("frame_count", f"expected 2 or 3 replay frames, got {len(frames)}")


def _parse_sequence(frame: bytes) -> int:
    if len(frame) != 8:
        raise WireError("sequence_size", f"expected 8 bytes, got {len(frame)}")
    sequence = int.from_bytes(frame, "big", signed=True)
    if sequence < END_OF_REPLAY:
        raise WireError("sequence_value", f"no batch has the number {sequence}")
    return sequence


def format_replay_request(from_sequence: int) -> list[bytes]:
    """Return the frames that ask a publisher for all batches from this sequence on."""
    return [b"", from_sequence.to_bytes(8, "big")]


# --- batches --------------------------------------------------------------------------------------


def decode_batch(source: SourceId, frame: Frame, replay_id: int | None = None) -> BatchReceived:
    """Return what a message says. A payload that can't be read is a batch that says just that."""
    rank: int | None = None
    try:
        events, rank = _decode_payload(frame.payload)
    except WireError as error:
        events = (BlocksUnreadable(error.reason),)
    return BatchReceived(
        source=source,
        sequence=frame.sequence,
        events=events,
        digest=xxhash.xxh3_128_digest(frame.payload),
        rank=rank,
        replay_id=replay_id,
    )


def _decode_payload(payload: bytes) -> tuple[tuple[KvEvent, ...], int | None]:
    try:
        batch = _decode_typed(payload)
        decoded = [_typed_event(event) for event in batch.events]
        rank = batch.rank
    except (msgspec.DecodeError, RecursionError, WireError):
        return _decode_tolerantly(payload)
    if rank is not None and rank < 0:
        raise WireError("rank", f"expected a rank, got {rank!r}")
    return tuple(event for event in decoded if event is not None), rank


def _typed_event(event: _Stored | _Removed | _Cleared) -> KvEvent | None:
    """As `_decode_event`, but a field of the wrong form raises WireError."""
    if isinstance(event, _Removed):
        tier = _tier(event.medium, event.locality)
        return BlocksRemoved(event.block_hashes, tier, _group(event.group_idx))
    if isinstance(event, _Cleared):
        return BlocksCleared()
    tier = _tier(event.medium, event.locality)
    if tier is not Tier.DEVICE and not event.token_ids:
        return None  # as in `_decode_stored`
    if event.block_size < 0:
        raise WireError("block_size", repr(event.block_size))
    kind = event.kv_cache_spec_kind
    return BlocksStored(
        event.block_hashes,
        event.parent_block_hash,
        _pack(event.token_ids),
        event.block_size,
        tier,
        event.lora_name,
        _extra_keys(event.extra_keys, event.lora_name),
        _group(event.group_idx),
        _is_full_attention(kind),
        None if kind is None else _needed_tokens(kind, event.kv_cache_spec_sliding_window),
    )


def _decode_tolerantly(payload: bytes) -> tuple[tuple[KvEvent, ...], int | None]:
    """Read a batch field by field, so that an odd event is told by its fault and loses no other."""
    try:
        batch = _decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError("payload", str(error)) from error
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise WireError("batch_shape", "expected [timestamp, events, rank]")
    rank = batch[2] if len(batch) > 2 else None
    if rank is not None and not _is_count(rank):
        raise WireError("rank", f"expected a rank, got {rank!r}")
    decoded = (_decode_event(event) for event in batch[1])
    return tuple(event for event in decoded if event is not None), rank


def _decode_event(event: object) -> KvEvent | None:
    """Return the router event, None for a placeholder that says nothing about blocks."""
    try:
        tag, fields = _untag(event)
        match tag:
            case "BlockStored":
                return _decode_stored(fields)
            case "BlockRemoved":
                return _decode_removed(fields)
            case "AllBlocksCleared":
                return BlocksCleared()
            case _:
                raise WireError("event_type", repr(tag)[:80])
    except WireError as error:
        return BlocksUnreadable(error.reason)


def _untag(event: object) -> tuple[object, Mapping[str, Any]]:
    if isinstance(event, dict):
        return event.get("type"), event
    if isinstance(event, list) and event:
        names = STORED_FIELDS if event[0] == "BlockStored" else REMOVED_FIELDS
        return event[0], dict(zip(names, event[1:], strict=False))
    raise WireError("event_shape", f"expected a map or an array, got {type(event).__name__}")


def _decode_stored(fields: Mapping[str, Any]) -> BlocksStored | None:
    tier = _tier(fields.get("medium"), fields.get("locality"))
    token_ids = fields.get("token_ids")
    if tier is not Tier.DEVICE and not token_ids:
        return None  # placeholder of an offloading connector: names blocks without their content
    hashes = _engine_hashes(fields)
    lora_name = fields.get("lora_name")
    if lora_name is not None and not isinstance(lora_name, str):
        raise WireError("lora_name", repr(lora_name)[:80])
    parent = fields.get("parent_block_hash")
    if parent is not None and not _is_engine_hash(parent):
        raise WireError("parent_block_hash", repr(parent)[:80])
    if not _is_count(fields.get("block_size")):
        raise WireError("block_size", repr(fields.get("block_size"))[:80])
    kind = fields.get("kv_cache_spec_kind")
    return BlocksStored(
        engine_hashes=hashes,
        parent=parent,
        tokens=_pack(token_ids),
        block_size_tokens=fields["block_size"],
        tier=tier,
        lora_name=lora_name,
        extra_keys=_extra_keys(fields.get("extra_keys"), lora_name),
        group=_group(fields.get("group_idx")),
        is_full_attention=_is_full_attention(kind),
        needed_tokens=_needed_tokens(kind, fields.get("kv_cache_spec_sliding_window")),
    )


def _decode_removed(fields: Mapping[str, Any]) -> BlocksRemoved:
    tier = _tier(fields.get("medium"), fields.get("locality"))
    return BlocksRemoved(_engine_hashes(fields), tier, _group(fields.get("group_idx")))


def _engine_hashes(fields: Mapping[str, Any]) -> tuple[EngineHash, ...]:
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, list) or not all(_is_engine_hash(h) for h in hashes):
        raise WireError("block_hashes", f"expected a list of hashes, got {type(hashes).__name__}")
    return tuple(hashes)


def _is_engine_hash(value: object) -> bool:
    return isinstance(value, int | bytes) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_full_attention(kind: object) -> bool:
    if kind is not None and not isinstance(kind, str):
        raise WireError("kv_cache_spec_kind", f"expected a text, got {type(kind).__name__}")
    return kind in FULL_ATTENTION_KINDS


def _needed_tokens(kind: str | None, window: object) -> int | None:
    """Return how far back a group must be held for reuse. None: it isn't told, or has no say.

    Source: vLLM 0.32 `v1/core/single_type_kv_cache_manager.py`, `find_longest_cache_hit` of each
    manager (a window of n tokens looks at n - 1 before the next one).
    """
    if kind is None:
        return None
    if kind in FULL_ATTENTION_KINDS:
        return WHOLE_PREFIX
    if kind in WINDOW_KINDS and window is not None:
        if not isinstance(window, int) or not _is_count(window):
            raise WireError("kv_cache_spec_sliding_window", repr(window)[:80])
        return max(window - 1, 1)
    return 1 if kind in WINDOW_KINDS or kind in CHECKPOINT_KINDS else None


def _group(group: object) -> int:
    if group is None:
        return 0
    if not isinstance(group, int) or not _is_count(group):
        raise WireError("group_idx", repr(group)[:80])
    return group


def _pack(token_ids: object) -> bytes:
    if not isinstance(token_ids, list):
        raise WireError("token_ids", f"expected a list, got {type(token_ids).__name__}")
    try:
        return pack_tokens(token_ids)
    except (OverflowError, TypeError) as error:
        raise WireError("token_ids", str(error)) from error


def _tier(medium: object, locality: object) -> Tier:
    """Return where the block lies. Events without a medium are of releases that had only the GPU.

    Lower-case `cpu` without a locality is MooncakeStoreConnector's and means the pool; an
    offloading connector says `CPU`, newer ones with locality LOCAL.
    """
    if medium is None or medium == "GPU" or (isinstance(medium, str) and medium.upper() == "GPU"):
        return Tier.DEVICE
    if not isinstance(medium, str):
        raise WireError("medium", repr(medium)[:80])
    is_shared = locality == "REMOTE" or (medium == "cpu" and locality is None)
    if medium.upper() == "CPU":
        return Tier.POOL if is_shared else Tier.HOST
    if medium.upper() == "STORAGE":
        return Tier.POOL if is_shared else Tier.DISK
    raise WireError("medium", medium[:80])


def _extra_keys(value: object, lora_name: str | None) -> tuple[ExtraKeys | None, ...] | None:
    """Return each block's extra keys without the LoRA name, which the block space has already."""
    if value is None:
        return None
    if not isinstance(value, list):
        raise WireError("extra_keys", f"expected a list, got {type(value).__name__}")
    keys = tuple(_block_extra_keys(entry, lora_name) for entry in value)
    return keys if any(keys) else None


def _block_extra_keys(entry: object, lora_name: str | None) -> ExtraKeys | None:
    if entry is None:
        return None
    if not isinstance(entry, list):
        raise WireError("extra_keys", f"expected a list per block, got {type(entry).__name__}")
    keys = [_untag_key(key) for key in entry]
    # The adapter comes first, and only where there is one: a salt may have the same text.
    if lora_name is not None and keys and keys[0] == lora_name:
        keys = keys[1:]
    return tuple(keys) or None


def _untag_key(key: object) -> object:
    """Return an extra key in the untagged form, in which vLLM 0.32 publishes it."""
    if not isinstance(key, list):
        return key
    tag = key[0] if key and isinstance(key[0], str) else None
    if len(key) > 1 and tag in _EXTRA_KEY_TAGS and (tag != "mm" or len(key) == 3):
        return tuple(key[1:]) if tag == "mm" else key[1]
    return tuple(key)
