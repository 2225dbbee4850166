"""Block events as the bytes that vLLM publishes, and the buffer that it re-sends them from.

Responsible for the payload of a batch in the current and in the older form, and for which batches a
replay gets. Not for sockets (see `publisher.py`). Pure: the time of a batch is an argument.

Source: vLLM 0.32.0 `distributed/kv_events.py`; the array form is that of the releases before
vllm#42892.
"""

import enum
from collections import deque
from collections.abc import Sequence
from typing import Any, assert_never

import msgspec

from moongate.simulator.blocks import (
    AllBlocksCleared,
    BlockDigest,
    BlockRemoved,
    BlockStored,
    ExtraKeys,
    KvEvent,
    PoolBlockStored,
)

MEDIUM = "GPU"
"""What the engine calls the tier of its own cache, whatever the hardware."""

POOL_MEDIUM = "cpu"
"""What the store connector calls the shared pool, in lower case."""

GROUP_INDEX = 0
"""The simulated model has one KV cache group, of full attention."""

GROUP_KIND = "full_attention"

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

BUFFER_BATCHES_MAX = 10_000
"""The engine's own default (`buffer_steps`); at the limit the oldest batch is forgotten."""

_encoder = msgspec.msgpack.Encoder()


class EventForm(enum.Enum):
    """How one event lies in a batch."""

    MAP = "map"
    """Named fields and a `type` tag; fields at their default are left out."""
    ARRAY = "array"
    """The tag, then the fields by position: older engines."""


class DigestForm(enum.Enum):
    """How a block digest is written."""

    INT = "int"
    """The low 64 bits as an integer: the engine's default."""
    BYTES = "bytes"
    """All 32 bytes (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0)."""


def encode_sequence(sequence: int) -> bytes:
    return sequence.to_bytes(8, "big")


def external_digest(digest: BlockDigest, form: DigestForm) -> int | bytes:
    """Return the name of a block as subscribers see it."""
    return digest if form is DigestForm.BYTES else int.from_bytes(digest[-8:], "big")


class BatchEncoder:
    """Puts the events of one step into a payload: [time, events, rank]."""

    def __init__(
        self,
        *,
        rank: int,
        block_size_tokens: int,
        event_form: EventForm = EventForm.MAP,
        digest_form: DigestForm = DigestForm.INT,
    ) -> None:
        self._rank = rank
        self._block_size_tokens = block_size_tokens
        self._event_form = event_form
        self._digest_form = digest_form

    def encode(self, events: Sequence[KvEvent], time_s: float) -> bytes:
        """Return the msgpack payload; `time_s` is seconds since the epoch."""
        encode_event = self._as_map if self._event_form is EventForm.MAP else self._as_array
        return _encoder.encode([time_s, [encode_event(event) for event in events], self._rank])

    def _as_map(self, event: KvEvent) -> dict[str, Any]:
        match event:
            case BlockStored():
                return self._stored_as_map(event)
            case PoolBlockStored():
                return self._pooled_as_map(event)
            case BlockRemoved():
                return {
                    "type": "BlockRemoved",
                    "block_hashes": [self._digest(event.digest)],
                    "medium": MEDIUM,
                    "group_idx": GROUP_INDEX,
                }
            case AllBlocksCleared():
                return {"type": "AllBlocksCleared"}
            case _:
                assert_never(event)

    def _stored_as_map(self, event: BlockStored) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": [self._digest(digest) for digest in event.digests],
            "parent_block_hash": self._parent(event.parent),
            "token_ids": event.token_ids,
            "block_size": self._block_size_tokens,
            "lora_id": None,  # deprecated, but without a default, so it is always there
            "medium": MEDIUM,
            "lora_name": event.lora_name,
            "extra_keys": [_untagged(keys) for keys in event.extra_keys],
            "group_idx": GROUP_INDEX,
            "kv_cache_spec_kind": GROUP_KIND,
        }
        if event.session_id is not None:
            fields["session_id"] = event.session_id
        return fields

    def _pooled_as_map(self, event: PoolBlockStored) -> dict[str, Any]:
        return {
            "type": "BlockStored",
            **self._pooled_fields(event),
            "group_idx": GROUP_INDEX,
        }

    def _pooled_fields(self, event: PoolBlockStored) -> dict[str, Any]:
        """Return the fields that both forms have, in their order: the connector fills no others."""
        return {
            "block_hashes": [self._digest(event.digest)],
            "parent_block_hash": self._parent(event.parent),
            "token_ids": event.token_ids,
            "block_size": self._block_size_tokens,
            "lora_id": None,
            "medium": POOL_MEDIUM,
            "lora_name": None,
        }

    def _as_array(self, event: KvEvent) -> list[Any]:
        match event:
            case BlockStored():
                return self._stored_as_array(event)
            case PoolBlockStored():
                return ["BlockStored", *self._pooled_fields(event).values()]
            case BlockRemoved():
                return ["BlockRemoved", [self._digest(event.digest)], MEDIUM]
            case AllBlocksCleared():
                return ["AllBlocksCleared"]
            case _:
                assert_never(event)

    def _stored_as_array(self, event: BlockStored) -> list[Any]:
        fields: list[Any] = [
            "BlockStored",
            [self._digest(digest) for digest in event.digests],
            self._parent(event.parent),
            event.token_ids,
            self._block_size_tokens,
            None,  # lora_id
            MEDIUM,
            event.lora_name,
        ]
        if any(event.extra_keys):  # trailing defaults are left out
            fields.append([_untagged(keys) for keys in event.extra_keys])
        return fields

    def _parent(self, parent: BlockDigest | None) -> int | bytes | None:
        return None if parent is None else self._digest(parent)

    def _digest(self, digest: BlockDigest) -> int | bytes:
        return external_digest(digest, self._digest_form)


def _untagged(keys: ExtraKeys | None) -> list[str] | None:
    """Publish extra keys as the engine does: values without tags, and no LoRA path."""
    return None if keys is None else [key[1] for key in keys]


class ReplayBuffer:
    """The last batches of one publisher, by sequence."""

    def __init__(self, batches_max: int = BUFFER_BATCHES_MAX) -> None:
        self._batches: deque[tuple[int, bytes]] = deque(maxlen=batches_max)

    def append(self, sequence: int, payload: bytes) -> None:
        self._batches.append((sequence, payload))

    def replies(
        self, start_sequence: int, *, topic: bytes, has_topic_frame: bool = True
    ) -> list[tuple[bytes, ...]]:
        """Return the replies to one request, oldest batch first and the end mark last.

        Each is the frames after the identity: empty delimiter, topic, sequence, payload. Without
        `has_topic_frame`, as in older engines, the topic is missing. A first sequence greater than
        `start_sequence` means that the gap can't be repaired.
        """
        head: tuple[bytes, ...] = (b"", topic) if has_topic_frame else (b"",)
        end_head = head[:1] + (b"",) * (len(head) - 1)
        replies = [
            (*head, encode_sequence(sequence), payload)
            for sequence, payload in self._batches
            if sequence >= start_sequence
        ]
        return [*replies, (*end_head, END_OF_REPLAY, b"")]
