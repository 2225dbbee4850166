"""Prefill here, decode there: what a request's `kv_transfer_params` ask for, and what is held for it.

Responsible for reading both handshakes' parameters by vLLM's rules, and for which finished prefills
wait for which decoder. Not for blocks (`engine.py`) or sockets (`handoff.py`). Pure: time is an
argument.

Theory of operation. With Mooncake both legs carry a `transfer_id`. The prefill engine knows a
transfer from when its prefill was submitted or a decoder asked for it, whichever was first. The
prefill ends by length: the transfer is *ready*, and its blocks are held until a decoder takes it or
its time is over. It ends otherwise: the transfer is forgotten, and decoders that wait for it wait
until their own limit. With NIXL the prefill's answer names the request, which takes the place of the
transfer id, and its time is a lease that the decoder prolongs while it has the request.

Source: vLLM 0.32.0 `distributed/kv_transfer/kv_connector/v1/` `mooncake/mooncake_connector.py`,
`nixl/pull_scheduler.py`, `nixl/base_scheduler.py`, `nixl/base_worker.py`.
"""

import enum
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)


class Role(enum.Enum):
    """The part that an engine plays (`kv_both`, `kv_producer`, `kv_consumer`)."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class Connector(enum.Enum):
    """How KV leaves and enters an engine, besides a pool."""

    NONE = "none"
    MOONCAKE = "mooncake"
    NIXL = "nixl"
    MULTI = "multi"
    """Mooncake's hand-off first, and a pool for what no hand-off brings."""

    @property
    def is_mooncake(self) -> bool:
        return self in (Connector.MOONCAKE, Connector.MULTI)


class EngineFatalError(Exception):
    """The request breaks an assertion of the engine's scheduler: the engine dies of it."""


@dataclass(frozen=True, slots=True)
class MooncakeSource:
    """Where a decoder gets a prompt's KV: the prefill engine, found by its bootstrap server."""

    bootstrap_url: str
    engine_id: str
    transfer_id: str


@dataclass(frozen=True, slots=True)
class NixlSource:
    """Where a decoder gets a prompt's KV: the prefill's answer said it."""

    host: str
    port: int
    engine_id: str
    request_id: str
    """The prefill engine's own name of the request."""


Source = MooncakeSource | NixlSource


@dataclass(frozen=True, slots=True)
class Send:
    """This prefill is for a decoder."""

    transfer_id: str | None
    """None: the request's own id takes its place (NIXL)."""
    holds_when_stopped: bool = False
    """Whether the blocks are held, too, when the answer ended by itself."""


@dataclass(frozen=True, slots=True)
class Receive:
    """The KV of this prompt comes from a prefill engine."""

    source: Source | None
    """None: nobody was named, so that it never comes."""


Handoff = Send | Receive


def parse_handoff(
    params: Mapping[str, Any] | None, connector: Connector, role: Role
) -> Handoff | None:
    """Return what `kv_transfer_params` ask of this engine; None if nothing.

    Raises: EngineFatalError.
    """
    if not params or not (params.get("do_remote_prefill") or params.get("do_remote_decode")):
        return None
    if connector is Connector.NONE:
        logger.warning("kv_transfer_params without a connector are ignored")
        return None
    if params.get("do_remote_prefill"):
        return _parse_receive(params, connector, role)
    return _parse_send(params, connector, role)


def _parse_receive(params: Mapping[str, Any], connector: Connector, role: Role) -> Receive:
    if connector.is_mooncake:
        if role is Role.PREFILL:
            raise EngineFatalError("do_remote_prefill at an engine that only prefills")
        return Receive(_mooncake_source(params))
    if not params.get("remote_block_ids"):
        raise EngineFatalError("do_remote_prefill without remote_block_ids")
    return Receive(_nixl_source(params))


def _mooncake_source(params: Mapping[str, Any]) -> MooncakeSource | None:
    names = ("remote_bootstrap_addr", "remote_engine_id", "transfer_id")
    if not all(name in params for name in names):
        logger.warning("incomplete kv_transfer_params: %s", dict(params))
        return None
    url, engine_id, transfer_id = (str(params[name]) for name in names)
    return MooncakeSource(url, engine_id, transfer_id)


def _nixl_source(params: Mapping[str, Any]) -> NixlSource | None:
    names = ("remote_host", "remote_port", "remote_engine_id", "remote_request_id")
    if not all(name in params for name in names):
        logger.warning("incomplete kv_transfer_params: %s", dict(params))
        return None
    host, port, engine_id, request_id = (params[name] for name in names)
    return NixlSource(str(host), int(port), str(engine_id), str(request_id))


def _parse_send(params: Mapping[str, Any], connector: Connector, role: Role) -> Send | None:
    if not connector.is_mooncake:
        return Send(transfer_id=None, holds_when_stopped=True)
    if role is Role.DECODE:
        raise EngineFatalError("do_remote_decode at an engine that only decodes")
    if not params.get("transfer_id"):
        logger.warning("do_remote_decode without a transfer_id")
        return None
    return Send(str(params["transfer_id"]))


@dataclass(frozen=True, slots=True)
class HandoffSettings:
    """How one engine takes part in hand-offs."""

    connector: Connector = Connector.NONE
    role: Role = Role.BOTH
    waits_for_nobody: bool = False
    """Whether a decode leg that names no prefill engine waits for ever; else it is computed here.

    vLLM 0.32 says that it is computed, and waits: its scheduler has parked it by then.
    """

    def parse(self, params: Mapping[str, Any] | None) -> Handoff | None:
        """Raises: EngineFatalError."""
        handoff = parse_handoff(params, self.connector, self.role)
        is_for_nobody = isinstance(handoff, Receive) and handoff.source is None
        return None if is_for_nobody and not self.waits_for_nobody else handoff


def nixl_answer(
    source: NixlSource, block_ids: Sequence[int], *, prompt_tokens: int, cached_tokens: int
) -> dict[str, Any]:
    """Return the `kv_transfer_params` that a prefill's answer brings, for the decode leg as it is."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(block_ids)],
        "remote_engine_id": source.engine_id,
        "remote_request_id": source.request_id,
        "remote_host": source.host,
        "remote_port": source.port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": prompt_tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": cached_tokens,
    }


# -- the prefill engine's side --------------------------------------------------------------------


@dataclass(slots=True)
class _Transfer:
    request_id: str | None = None  # of the prefill; None while only a decoder has asked
    is_ready: bool = False
    expires_at: float = float("inf")
    waiters: list[Callable[[], None]] = field(default_factory=list)


class Outbox:
    """The transfers of one prefill rank, by transfer id. Limit: each is gone when its time is."""

    def __init__(self, hold_s: float) -> None:
        """`hold_s`: how long the blocks of a finished prefill wait for a decoder."""
        self._hold_s = hold_s
        self._transfers: dict[str, _Transfer] = {}

    def __len__(self) -> int:
        return len(self._transfers)

    def expect(self, transfer_id: str, request_id: str) -> None:
        """A prefill was submitted."""
        transfer = self._transfers.setdefault(transfer_id, _Transfer())
        transfer.request_id = transfer.request_id or request_id

    def hold(self, transfer_id: str, request_id: str, now: float) -> None:
        """A prefill ended, and its blocks are held.

        One that was held under the same id already is not found again: its blocks stay held for
        ever, as the engine's own do (several choices of one prefill).
        """
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return
        transfer.request_id = request_id
        transfer.is_ready = True
        transfer.expires_at = now + self._hold_s
        waiters, transfer.waiters = transfer.waiters, []
        for tell in waiters:
            tell()

    def forget(self, transfer_id: str) -> None:
        """A prefill ended and holds nothing; who waits for it is not told."""
        self._transfers.pop(transfer_id, None)

    def wait(self, transfer_id: str, tell: Callable[[], None]) -> None:
        """Call `tell` when the transfer is ready, at once if it is."""
        transfer = self._transfers.setdefault(transfer_id, _Transfer())
        if transfer.is_ready:
            tell()
        else:
            transfer.waiters.append(tell)

    def take(self, transfer_id: str) -> str | None:
        """Remove a ready transfer and return its prefill's request id; None if there is none."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or not transfer.is_ready:
            return None
        del self._transfers[transfer_id]
        return transfer.request_id

    def prolong(self, transfer_id: str, expires_at: float) -> None:
        """A decoder still wants it."""
        transfer = self._transfers.get(transfer_id)
        if transfer is not None and transfer.is_ready:
            transfer.expires_at = max(transfer.expires_at, expires_at)

    def take_expired(self, now: float) -> list[str]:
        """Remove transfers whose time is over; return their prefills' request ids."""
        expired = [
            (transfer_id, transfer)
            for transfer_id, transfer in self._transfers.items()
            if transfer.is_ready and transfer.expires_at <= now
        ]
        for transfer_id, _ in expired:
            del self._transfers[transfer_id]
        return [transfer.request_id for _, transfer in expired if transfer.request_id is not None]

    def next_expiry_at(self) -> float | None:
        times = [one.expires_at for one in self._transfers.values() if one.is_ready]
        return min(times, default=None)
