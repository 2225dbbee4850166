"""What can happen to the router: frozen, in the past tense, without behaviour.

Each carries what the edge knows at that moment; the time of it is the `now` of `handle`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from moongate.router.load import PeerLoad
from moongate.router.model import (
    BlockHash,
    EngineHash,
    ExtraKeys,
    Holder,
    InstanceFacts,
    InstanceId,
    InstanceSpec,
    KeySpace,
    PeerId,
    Request,
    RequestId,
    SourceId,
    Tier,
)

if TYPE_CHECKING:  # these modules import this one
    from moongate.router.core import RouterLimits
    from moongate.router.policy import Policy
    from moongate.router.seeding import SeedingLimits

# --- the operator ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reconfigured:
    """The operator wants it otherwise from now on. What is known of fleet, caches and load stays.

    `others`: policies that a request may name. `limits.index_blocks_max` stays what it was, and so does
    whether anything is seeded: `seeding` counts only where it was and still is.
    """

    policy: Policy
    others: Sequence[Policy]
    limits: RouterLimits
    seeding: SeedingLimits | None


# --- the fleet ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InstanceAdded:
    spec: InstanceSpec


@dataclass(frozen=True, slots=True)
class InstanceChanged:
    """The operator says otherwise what an instance is for. It is the same engine, with the same cache."""

    spec: InstanceSpec


@dataclass(frozen=True, slots=True)
class InstanceRemoved:
    instance_id: InstanceId


@dataclass(frozen=True, slots=True)
class InstanceDescribed:
    """Discovery answered. Facts replace the earlier ones."""

    instance_id: InstanceId
    facts: InstanceFacts


@dataclass(frozen=True, slots=True)
class InstanceProbed:
    """A health check ended. `is_gone`: refused or reset, so nothing listens there any more."""

    instance_id: InstanceId
    is_healthy: bool
    is_gone: bool = False


@dataclass(frozen=True, slots=True)
class InstanceDraining:
    """The instance gets no more work (or again); what it has under way goes on."""

    instance_id: InstanceId
    is_draining: bool


@dataclass(frozen=True, slots=True)
class InstancePooled:
    """How the instance names blocks in a shared pool is known now. None: it doesn't use one."""

    instance_id: InstanceId
    key_space: KeySpace | None


# --- KV events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """An engine holds these full blocks now. `tokens` is their ids as native uint32 bytes."""

    engine_hashes: tuple[EngineHash, ...]
    parent: EngineHash | None
    tokens: bytes
    block_size_tokens: int
    tier: Tier
    lora_name: str | None = None
    extra_keys: tuple[ExtraKeys | None, ...] | None = None  # one per block; None: none has any
    group: int = 0
    is_full_attention: bool = True
    needed_tokens: int | None = None
    """How far back from a position the group must be held for reuse there, `WHOLE_PREFIX` for all of
    it. None: not told, or it has no say in reuse. Of the group that decides, it is not read."""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """One physical copy of each of these blocks is gone from `tier`."""

    engine_hashes: tuple[EngineHash, ...]
    tier: Tier
    group: int = 0


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """The engine emptied its prefix cache."""


@dataclass(frozen=True, slots=True)
class BlocksUnreadable:
    """An event, or a whole batch, that could not be understood; `reason` is a fixed word."""

    reason: str


KvEvent = BlocksStored | BlocksRemoved | BlocksCleared | BlocksUnreadable


@dataclass(frozen=True, slots=True)
class SourceOpened:
    """A subscription to a publisher stands. Without replay, a gap can't be repaired."""

    source: SourceId
    has_replay: bool
    rank: int | None = None  # whose cache it speaks of, as far as known before its first batch


@dataclass(frozen=True, slots=True)
class SourceLost:
    """The connection to the publisher ended. Report it before what comes over a new one."""

    source: SourceId


@dataclass(frozen=True, slots=True)
class SourceReconnected:
    """The connection was lost and stands again: the publisher may be a new process."""

    source: SourceId


@dataclass(frozen=True, slots=True)
class SourceClosed:
    source: SourceId


@dataclass(frozen=True, slots=True)
class BatchReceived:
    """One message of a publisher. `digest` names its exact bytes (timestamp and all)."""

    source: SourceId
    sequence: int
    events: tuple[KvEvent, ...]
    digest: bytes
    rank: int | None = None
    replay_id: int | None = None  # None: live


@dataclass(frozen=True, slots=True)
class ReplayEnded:
    """The publisher sent all it had, or (`is_complete` False) did not answer in time."""

    source: SourceId
    replay_id: int
    is_complete: bool


# --- requests -------------------------------------------------------------------------------------


class FailureKind(Enum):
    """How an attempt failed before its first byte reached the client."""

    UNREACHABLE = "unreachable"  # refused, or no route: the engine is gone
    NO_CONNECTION = "no_connection"  # none in time: no proof that it is gone
    DISCONNECTED = "disconnected"  # reset or closed before an answer
    TIMEOUT = "timeout"  # no proof that it is gone; the edge has cancelled the attempt
    STATUS = "status"  # answered, with a status of 500 or more
    FULL = "full"  # not sent: the edge has as many requests there as it may have
    RATE_LIMITED = "rate_limited"  # answered with 429: it has no room now, and has done nothing

    @property
    def was_sent(self) -> bool:
        """Tell whether the engine has taken the request, or may have."""
        return self not in (
            FailureKind.UNREACHABLE,
            FailureKind.NO_CONNECTION,
            FailureKind.FULL,
            FailureKind.RATE_LIMITED,
        )

    @property
    def is_refusal(self) -> bool:
        """Tell whether there was no room, which is no fault of anybody's."""
        return self in (FailureKind.FULL, FailureKind.RATE_LIMITED)


@dataclass(frozen=True, slots=True)
class RequestArrived:
    request: Request


@dataclass(frozen=True, slots=True)
class PrefillEnded:
    """The prefill leg of a hand-off was answered; the decode leg is sent next.

    `is_held`: its instance keeps the blocks; else the decode leg computes the prompt.
    """

    request_id: RequestId
    is_held: bool = True


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """The prefill leg of a hand-off failed; nothing of it is kept anywhere."""

    request_id: RequestId
    kind: FailureKind
    status: int | None = None


@dataclass(frozen=True, slots=True)
class RequestFirstByte:
    """The first byte of the answer's body came, so prefill is over.

    `shows_prefill`: it came with the first token (of a stream), so that its time tells how long
    prefill took. A whole answer, or an error, tells nothing of the kind.
    """

    request_id: RequestId
    shows_prefill: bool = False


@dataclass(frozen=True, slots=True)
class RequestFailed:
    request_id: RequestId
    kind: FailureKind
    status: int | None = None


class Outcome(Enum):
    """How a forwarded request ended."""

    ANSWERED = "answered"  # to the end, whatever the answer says
    REFUSED = "refused"  # with 400 to 499: its own fault, which says nothing of its instance
    CLIENT_LEFT = "client_left"
    BROKEN_OFF = "broken_off"  # by the engine, after its answer had begun


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """The request is over, and the engine works on it no more. Of one on hold: its client has left."""

    request_id: RequestId
    outcome: Outcome
    completion_tokens: int | None = None  # of an answer with one choice; None: not told
    cached_tokens: int | None = None  # of the prompt, by the engine's report; None: not told
    generated_tokens: int | None = None  # of all answers, as far as they came; None: not known
    prompt_tokens: int | None = None  # by the engine's report; None: not told


# --- the pool -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolChecked:
    """The shared pool was asked how it is. `use`: allocated over capacity; None: it doesn't say."""

    is_up: bool
    use: float | None = None


@dataclass(frozen=True, slots=True)
class SeedingEnded:
    """A seeding is over. `is_done`: the engine answered it."""

    seeding_id: RequestId
    is_done: bool


# --- other gateways -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PeerReported:
    """Another gateway told what it has given these holders; `is_whole`: and it has given no others any.

    It holds for `lease_s` from now, and what it said before with it.
    """

    peer: PeerId
    loads: tuple[tuple[Holder, PeerLoad], ...]
    is_whole: bool
    lease_s: float


@dataclass(frozen=True, slots=True)
class PeerPredicted:
    """Another gateway has forwarded a prompt that ends in `tail`: the holder will have these blocks.

    Each stands for all before it (`foreign_predictions.py`).
    """

    peer: PeerId
    request_id: RequestId
    holder: Holder
    blocks: tuple[BlockHash, ...]
    tail: BlockHash | None
    lifetime_s: float


@dataclass(frozen=True, slots=True)
class PeerPredictionEnded:
    """That request is over: events tell by now what came of it. `is_void`: it was never sent."""

    peer: PeerId
    request_id: RequestId
    is_void: bool = False


@dataclass(frozen=True, slots=True)
class PeerLeft:
    """Another gateway has stopped, and has nothing under way."""

    peer: PeerId


# --- time -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WakeUp:
    """The time asked for by a `WakeAt` has come."""


Event = (
    Reconfigured
    | InstanceAdded
    | InstanceChanged
    | InstanceRemoved
    | InstanceDescribed
    | InstanceProbed
    | InstancePooled
    | InstanceDraining
    | SourceOpened
    | SourceLost
    | SourceReconnected
    | SourceClosed
    | BatchReceived
    | ReplayEnded
    | RequestArrived
    | PrefillEnded
    | PrefillFailed
    | RequestFirstByte
    | RequestFailed
    | RequestFinished
    | PoolChecked
    | SeedingEnded
    | PeerReported
    | PeerPredicted
    | PeerPredictionEnded
    | PeerLeft
    | WakeUp
)
