"""Prefill on one instance, decode on another: what is said to each, and when. Pure.

Theory of operation. The prefill leg is sent first, and the decode leg once it is answered. So the decode
side never waits for blocks that will not come: with both legs at once a prefill that fails or is
cancelled would leave the blocks which the decode side has set aside waiting for the engine's own time
limit (vLLM 0.32: 480 s), and every retry some more (decision 11).

Once a prefill is answered its instance keeps the blocks until somebody has fetched them. So after a
prefill that was answered, with what they can be fetched by, a decode leg is always delivered: where the
client has left, or nobody could take its request, as one for a single token that nobody reads (a
*release*). Nothing is ever cancelled in between.

    new -> prefilling -> decoding -> streaming -> over
                            | ^
                            +-+ redeliver: it did not reach its instance

Families: Mooncake, where the gateway names the transfer and looks the engine up at its bootstrap server;
NIXL, where the prefill's answer has what the decode side needs. A MultiConnector is of the family of
its part that hands over.

Source: vLLM 0.32 `kv_connector/v1/mooncake/mooncake_connector.py`, `nixl/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

TransferParams = Mapping[str, Any]
"""`kv_transfer_params` of a request or an answer."""


class HandoffKind(Enum):
    """The connector family by which blocks go from an instance to another."""

    MOONCAKE = "mooncake"
    NIXL = "nixl"


# --- what is to be done ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendPrefill:
    """Send the request for one token, with these parameters, to the prefill instance."""

    params: TransferParams


@dataclass(frozen=True, slots=True)
class SendDecode:
    """Send the request to the decode instance. `is_release`: for one token, that nobody reads.

    `params` None: as an ordinary request, since there is nothing to be fetched.
    """

    params: TransferParams | None
    is_release: bool = False


@dataclass(frozen=True, slots=True)
class CancelDecode:
    """End the decode leg: its client has left, and the engine has it."""


@dataclass(frozen=True, slots=True)
class NothingLeft:
    """The hand-off is over, and nothing is kept for it."""


# --- what happened --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrefillAnswer:
    """What the prefill leg brought.

    `is_held`: it ended by its length. Mooncake keeps the blocks of no other; NIXL of any.
    """

    is_held: bool
    params: TransferParams | None = None  # of the answer
    cached_tokens: int | None = None  # that it did not have to compute
    bootstrap_url: str | None = None  # Mooncake: where the decode side asks for the workers
    engine_id: str | None = None  # Mooncake: as the bootstrap server says now


class _State(Enum):
    NEW = "new"
    PREFILLING = "prefilling"
    DECODING = "decoding"  # sent, and nothing has come yet
    STREAMING = "streaming"  # its first byte has come
    OVER = "over"


class HandoffError(Exception):
    """A prefill was answered, but not with what its blocks can be fetched by."""


@dataclass(slots=True)
class Handoff:
    """One request's hand-off. Call a method for what happened, and do what it returns.

    `transfer_id` is the gateway's name for it, different from any other.
    """

    kind: HandoffKind
    transfer_id: str
    has_client: bool = True
    _state: _State = _State.NEW
    _decode_params: TransferParams | None = None

    @property
    def is_decoding(self) -> bool:
        """Tell whether a decode leg is on its way, and nothing of its answer has come."""
        return self._state is _State.DECODING

    @property
    def is_over(self) -> bool:
        return self._state is _State.OVER

    def begin(self) -> SendPrefill:
        assert self._state is _State.NEW, self._state
        self._state = _State.PREFILLING
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        if self.kind is HandoffKind.MOONCAKE:
            return SendPrefill({**params, "transfer_id": self.transfer_id})
        others = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
        return SendPrefill({**params, **dict.fromkeys(others)})

    def prefill_answered(self, answer: PrefillAnswer) -> SendDecode | NothingLeft:
        """Raises: HandoffError where the answer lacks what the decode side needs."""
        assert self._state is _State.PREFILLING, self._state
        try:
            self._decode_params = self._find_params(answer)
        except HandoffError:
            self._state = _State.OVER
            raise
        return self._send()

    def prefill_failed(self) -> NothingLeft:
        """It was refused, or failed: nothing is kept on the prefill side."""
        assert self._state is _State.PREFILLING, self._state
        self._state = _State.OVER
        return NothingLeft()

    def redeliver(self) -> SendDecode | NothingLeft:
        """The decode leg did not reach its instance: send it to another one, or again."""
        assert self._state is _State.DECODING, self._state
        return self._send()

    def decode_began(self) -> CancelDecode | None:
        """The decode leg's first byte came, so the engine has it, and the blocks."""
        assert self._state is _State.DECODING, self._state
        self._state = _State.STREAMING
        return None if self.has_client else self._cancel()

    def decode_ended(self) -> NothingLeft:
        """Its answer is complete, or it failed after it had, or may have, reached its instance."""
        assert self._state in (_State.DECODING, _State.STREAMING), self._state
        self._state = _State.OVER
        return NothingLeft()

    def client_left(self) -> CancelDecode | NothingLeft | None:
        """Return what to do at once; None: what is under way goes on, until it has been delivered."""
        self.has_client = False
        match self._state:
            case _State.STREAMING:
                return self._cancel()
            case _State.NEW | _State.OVER:
                self._state = _State.OVER
                return NothingLeft()
            case _State.PREFILLING | _State.DECODING:
                return None

    def _send(self) -> SendDecode | NothingLeft:
        if self._decode_params is None and not self.has_client:
            self._state = _State.OVER
            return NothingLeft()
        self._state = _State.DECODING
        return SendDecode(self._decode_params, is_release=not self.has_client)

    def _cancel(self) -> CancelDecode:
        self._state = _State.OVER
        return CancelDecode()

    def _find_params(self, answer: PrefillAnswer) -> TransferParams | None:
        """Return the decode leg's parameters, None if nothing is kept. Raises: HandoffError."""
        if self.kind is HandoffKind.NIXL:
            return _nixl_params(answer)
        return self._mooncake_params(answer) if answer.is_held else None

    def _mooncake_params(self, answer: PrefillAnswer) -> TransferParams:
        if answer.bootstrap_url is None or answer.engine_id is None:
            raise HandoffError("the prefill instance's bootstrap server does not name its engine")
        params: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_bootstrap_addr": answer.bootstrap_url,
            "remote_engine_id": answer.engine_id,
            "transfer_id": self.transfer_id,
        }
        if answer.cached_tokens is not None:
            # Else the usage would say that all of the prompt had been cached.
            params["remote_prefill_cached_tokens"] = answer.cached_tokens
        return params


def _nixl_params(answer: PrefillAnswer) -> TransferParams:
    params = answer.params or {}
    is_push = params.get("transfer_mode") == "push"
    # A decode instance that is told to read no blocks ends by an assertion of its scheduler.
    if not params.get("remote_engine_id") or not (is_push or params.get("remote_block_ids")):
        raise HandoffError("the prefill instance's answer does not say where the blocks are")
    return params  # unchanged: whatever else the connector puts there it will want back
