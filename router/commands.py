"""What the router can ask for: frozen, imperative. The edge performs them and decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from moongate.router.load import PeerLoad
from moongate.router.model import BlockHash, Holder, InstanceId, Reason, RequestId, SourceId
from moongate.router.policy import Ranked


class Decision(NamedTuple):
    """The outcome of one ranking. The route receipt is made from it."""

    policy: str
    reason: Reason
    prompt_tokens: int | None  # None: not known
    device_tokens: int
    pool_tokens: int  # beyond those
    ranking: tuple[Ranked, ...]  # of all candidates, or the first few
    prefill: Ranked | None = None  # on another instance; tokens are then what that one reuses

    @property
    def chosen(self) -> Ranked:
        return self.ranking[0]

    @property
    def runner_up(self) -> Ranked | None:
        return self.ranking[1] if len(self.ranking) > 1 else None

    @property
    def reused_tokens(self) -> int:
        """Return the prompt tokens that are expected to be reused."""
        return self.device_tokens + self.pool_tokens

    @property
    def recompute_tokens(self) -> int:
        """Return the prompt tokens that are expected to be computed; 0 if the prompt isn't known."""
        return max((self.prompt_tokens or 0) - self.reused_tokens, 0)


@dataclass(frozen=True, slots=True)
class Forward:
    """Send the request to this holder (rank `None`: without a rank header)."""

    request_id: RequestId
    holder: Holder
    decision: Decision
    attempt: int  # 1 for the first
    prefill: Holder | None = None  # send the prefill leg there first
    is_redelivery: bool = (
        False  # of a decode leg that didn't reach its instance; its prefill stands
    )


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep the request: no instance has room for it now. A `Forward` or a `Reject` follows, with other events."""

    request_id: RequestId


class RejectReason(Enum):
    UNKNOWN_MODEL = "unknown_model"
    NO_INSTANCE = "no_instance"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"  # it has waited for as long as it may, or would wait for longer


@dataclass(frozen=True, slots=True)
class Reject:
    """Refuse the request; nothing was forwarded or reserved."""

    request_id: RequestId
    reason: RejectReason
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class RelayFailure:
    """No further attempt: the failure just reported goes to the client."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class RequestReplay:
    """Ask the publisher for all batches from this sequence on; an earlier request is void."""

    source: SourceId
    from_sequence: int
    replay_id: int


@dataclass(frozen=True, slots=True)
class NotePooled:
    """Remember that the instance just announced these blocks, by our names, as stored in the pool."""

    instance_id: InstanceId
    blocks: Sequence[BlockHash]


@dataclass(frozen=True, slots=True)
class Seed:
    """Let the holder get the first tokens of a request's prompt, for those to come (`seeding.py`).

    It follows the arrival of that request, in the same step.
    """

    seeding_id: RequestId
    holder: Holder
    request_id: RequestId
    model: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Check this instance's health now, beside the regular checks."""

    instance_id: InstanceId


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send a `WakeUp` at this time (monotonic seconds), or soon after."""

    at: float


@dataclass(frozen=True, slots=True)
class ShareLoad:
    """Tell the other gateways what this one has given the holder, now in all."""

    holder: Holder
    load: PeerLoad


@dataclass(frozen=True, slots=True)
class SharePrediction:
    """Tell the other gateways that the holder will have these blocks, with all before each of them.

    `tail`: the last block of the prompt, with which the session's next turn will begin.
    """

    request_id: RequestId
    holder: Holder
    blocks: tuple[BlockHash, ...]
    tail: BlockHash | None
    lifetime_s: float


@dataclass(frozen=True, slots=True)
class EndPrediction:
    """Tell the other gateways that this request is over; `is_void`: it was never sent."""

    request_id: RequestId
    is_void: bool = False


PeerCommand = ShareLoad | SharePrediction | EndPrediction

Command = (
    Forward
    | Hold
    | Reject
    | RelayFailure
    | RequestReplay
    | NotePooled
    | Seed
    | Probe
    | PeerCommand
    | WakeAt
)
