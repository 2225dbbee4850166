"""The vocabulary of the routing core as types.

Values only: no behaviour beyond what follows from the values themselves. Ids are `NewType`s so
that a URL, a model name and an id can't be mixed up; absent is `None`, never -1.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import NamedTuple, NewType

InstanceId = NewType("InstanceId", str)
RequestId = NewType("RequestId", str)

PeerId = NewType("PeerId", str)
"""Another gateway's process; one that starts anew is another."""

BlockHash = NewType("BlockHash", bytes)
"""Our name for a block together with its whole prefix (see `blocks.py`)."""

EngineHash = int | bytes
"""The engine's name for a block, as published: opaque. An int of 64 bits, or the raw digest."""

ExtraKeys = tuple[object, ...]
"""What isolates a block beside its tokens: cache salt, multimodal hashes. Never empty."""


class Role(Enum):
    """What an instance may be asked to do."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Duty(Enum):
    """What a request wants of an instance: which roles may take it."""

    ALL = "all"  # compute the prompt and the answer; what is left to do after a hand-off as well
    PREFILL = "prefill"  # compute the prompt for another instance
    RECEIVE = "receive"  # fetch what another has prefilled, and answer
    WHOLE = "whole"  # both, on one that never works for another


class Tier(Enum):
    """Where a copy of a block lives, fastest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    POOL = "pool"


class Trust(IntEnum):
    """How far what we hold about a source's blocks can be believed. Also the metric's value."""

    APPROXIMATE = 0  # no events: only predictions from our own forwards
    DEGRADED = 1  # events, but some were lost and could not be replayed
    EXACT = 2  # every event since the cache was last known to be empty


class Reason(Enum):
    """Why a request went where it went (`x-moongate-reason`)."""

    DEVICE_PREFIX = "device_prefix"
    POOL_PREFIX = "pool_prefix"
    SESSION = "session"
    LOAD = "load"
    ONLY_CHOICE = "only_choice"
    FALLBACK = "fallback"


class Holder(NamedTuple):
    """One cache: a data-parallel rank of an instance. Rank `None`: the instance has just one."""

    instance_id: InstanceId
    rank: int | None = None

    def __str__(self) -> str:
        return self.instance_id if self.rank is None else f"{self.instance_id}@{self.rank}"


class SourceId(NamedTuple):
    """One stream of KV events: a publisher of an instance, named by the rank it was opened for."""

    instance_id: InstanceId
    publisher: int = 0


class BlockSpace(NamedTuple):
    """What must agree, beside the tokens, for two blocks to be the same: the root of a chain.

    The model is not in it: an instance serves one base model, and candidates are chosen by model
    before blocks are looked at. `block_size_tokens` 0 is the space of text chunks, in which a
    prompt lies that could not be tokenised.
    """

    block_size_tokens: int
    lora_name: str | None = None


WHOLE_PREFIX = sys.maxsize
"""The needed tokens of a KV group in which every token looks back at all those before it."""


class SideGroup(NamedTuple):
    """A KV group beside the one that the index's blocks are of, and what reuse asks of it.

    A prefix can be reused up to where this group, too, holds its last `needed_blocks` (or all of it,
    where there are fewer): layers that look back only over a window need no more.
    """

    number: int  # `group_idx` of the engine's events
    needed_blocks: int | None  # of its own; None: all of a prefix
    stride_blocks: int  # of the index, that one of its own spans


TEXT_SPACE = BlockSpace(0)
TEXT_CHUNK_BYTES = 256
BYTES_PER_TOKEN = 4
"""English and code in common tokenizers; only used where a prompt could not be tokenised."""


class ModelCard(NamedTuple):
    """A name under which an instance answers. `is_adapter`: a LoRA adapter on the base model."""

    name: str
    is_adapter: bool = False
    root: str | None = None  # where the engine loaded it from, as `/v1/models` says
    max_model_len_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """What the operator said about an instance."""

    id: InstanceId
    role: Role = Role.BOTH
    weight: float = 1.0  # relative speed; 2.0 takes twice the load of 1.0
    host: str = ""  # on which it runs; "": not known
    # Whether it can fetch what another has prefilled. None: not told; it does where nobody else can.
    receives: bool | None = None


@dataclass(frozen=True, slots=True)
class InstanceFacts:
    """What discovery found out about an instance."""

    models: tuple[ModelCard, ...]
    block_size_tokens: int | None = None  # None: not told; events will say
    capacity_blocks: int | None = None  # of one rank
    ranks: tuple[int, ...] = ()  # global data-parallel ranks; empty: one cache, no rank header
    address: str = ""  # of the host that it runs on; "": not known


class KnownPart(NamedTuple):
    """What a prompt is known by: the hashes of its leading blocks in one space, or of its text."""

    chain: Sequence[BlockHash]
    block_tokens: int  # that a block stands for
    usable_blocks: int  # that can be reused: the engine always computes the last token itself
    is_text: bool


class KeySpace(NamedTuple):
    """Instances of one key space find each other's blocks in the pool: they name them alike."""

    name: str


class PoolPart(NamedTuple):
    """What the pool holds of a prompt, for the instances of one key space.

    `weight`: how far that is believed, 1 for an answer of the pool, less for an announcement.
    """

    tokens: int  # of the leading full blocks
    bytes_per_token: float
    host: str = ""  # where the copies lie; "": not known
    on_disk: bool = False
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is known of a request's prompt: its length, and the hashes of its full blocks.

    An exact prompt has one chain for each block space found in the fleet for the request's model.
    An inexact one has either such chains of just a leading part of it, the part that was known
    already, or nothing but the chain of its text in `TEXT_SPACE`; `token_count` is an estimate of
    the whole.
    """

    token_count: int
    chains: Mapping[BlockSpace, Sequence[BlockHash]]
    is_exact: bool = True

    def known_in(self, space: BlockSpace) -> KnownPart:
        """Return what is known of the prompt where blocks are of this space."""
        chain = self.chains.get(space)
        if chain is None:
            space, chain = TEXT_SPACE, self.chains.get(TEXT_SPACE, ())
        block_tokens = space.block_size_tokens or TEXT_CHUNK_BYTES // BYTES_PER_TOKEN
        # Source: vLLM 0.32 `KVCacheManager.get_computed_blocks` (hit length <= tokens - 1).
        usable_blocks = min(len(chain), max(self.token_count - 1, 0) // block_tokens)
        return KnownPart(chain, block_tokens, usable_blocks, is_text=space == TEXT_SPACE)


@dataclass(frozen=True, slots=True)
class Request:
    """One request as far as routing needs it."""

    id: RequestId
    model: str
    prompt: Prompt | None = None  # None: nothing is known that could be reused
    is_prompt_missing: bool = False  # it should have been known, and could not be read
    session_key: str | None = None
    tie_key: str | None = None  # decides between equal costs only: the user behind many sessions
    policy: str | None = None  # a policy asked for by name, already allowed
    pool: Mapping[KeySpace, PoolPart] = field(default_factory=dict)  # what it holds of the prompt
    may_hand_over: bool = False  # prefill and decode may be on different instances
    stays_whole: bool = False  # a decode instance can't do it, not even alone
    ends_session: bool = False  # the client says that no other turn follows
    tenant: str = ""  # whose key it has; "": no keys are asked for
    priority: int = 0  # within its tenant, where it has to wait: lower is sooner
    size_tokens: int = 0  # of the body, about: what is known where the prompt isn't
    answers: int = 1  # that it asks for: choices, of each of its prompts; 0: none is generated
    answer_tokens_max: int | None = None  # of each, as the engine obeys it; None: no limit
    wait_s_max: float | None = None  # that the client allows before it starts; None: it doesn't say

    @property
    def prompt_tokens(self) -> int | None:
        """Return the prompt's length; None: not known."""
        return self.prompt.token_count if self.prompt is not None else None
