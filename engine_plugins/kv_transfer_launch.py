"""How an engine's KV cache reaches other engines: `--kv-transfer-config` and what belongs to it.

Responsible for the connectors of one engine (the hand-off from prefill to decode, membership in a
Mooncake pool, or both), their environment variables, and the pool's configuration file. Pure: it
writes no file and asks no host; `vllm_launch.py` puts the parts together.

Stock connectors do each of it. `connectors="moongate"` takes the subclasses of `vllm_connectors.py`
for what those lack; hand-off by Mooncake together with a pool needs them, see there.

Source: vLLM 0.32.0 `config/kv_transfer.py`, `distributed/mooncake_store.py`,
`distributed/kv_transfer/kv_connector/v1/{mooncake,nixl}`, each tried on the CPU build, but for RDMA
and NVLink, which were only checked against vLLM's own parsers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from moongate.engine_plugins.launch_command import LaunchError, PortRange

Role = Literal["both", "prefill", "decode"]
HandoffConnector = Literal["mooncake", "nixl"]
Protocol = Literal["tcp", "rdma"]
PoolMode = Literal["embedded", "standalone-store"]
OnLoadFailure = Literal["recompute", "fail"]
Connectors = Literal["stock", "moongate"]

CONNECTORS_MODULE = "moongate.engine_plugins.vllm_connectors"
"""Where vLLM finds our connectors; the module imports vLLM, so it is only named here."""

GIB = 1024**3
SEGMENT_BYTES_DEFAULT = 4 * GIB
BUFFER_BYTES_DEFAULT = GIB

METADATA_IN_PEERS = "P2PHANDSHAKE"
"""Peers tell each other where their memory lies; no metadata server is needed."""

_KV_ROLES: Mapping[Role, str] = {
    "both": "kv_both",
    "prefill": "kv_producer",
    "decode": "kv_consumer",
}


@dataclass(frozen=True, slots=True)
class Network:
    """What KV caches travel over, for the hand-off and the pool alike."""

    protocol: Protocol = "tcp"
    device_names: tuple[str, ...] = ()
    """RDMA devices such as `mlx5_0`; none leaves the choice to Mooncake or UCX. With a GPU build and
    the kernel module `nvidia_peermem` they read the GPU's memory themselves (GPUDirect)."""
    nvlink_fabric: bool = False
    """Multi-node NVLink (racks such as GB200 NVL72) in place of RDMA: the KV cache is allocated as
    fabric memory, which in vLLM 0.32 only a pool member does. Needs a Mooncake built with USE_MNNVL,
    which the published wheels for CPUs aren't."""


TCP = Network()


@dataclass(frozen=True, slots=True)
class Handoff:
    """The prompt's KV blocks go from one engine's device to another's, without a pool between."""

    connector: HandoffConnector = "mooncake"
    bootstrap_port: int | None = None
    """Mooncake, all but decode: HTTP on all interfaces, where the decode side learns the workers'
    addresses."""
    side_channel_port: int | None = None
    """NIXL: each rank's agent answers hand-shakes on this port plus its data-parallel rank."""


@dataclass(frozen=True, slots=True)
class PoolMember:
    """Membership in a Mooncake pool: blocks are looked up there, and put there once computed."""

    master: str
    """`host:port` of `mooncake_master`."""
    config_file: str
    """Path of the JSON file that vLLM reads its pool settings from; to be written before the start."""
    mode: PoolMode = "embedded"
    """`embedded`: each worker lends memory, which dies with it. `standalone-store`: it lends none; a
    `mooncake_client` process holds the blocks and, if it has one, the disk."""
    segment_bytes: int | None = None
    """Memory that each worker (rank) lends. None: 4 GiB when embedded, else 0."""
    buffer_bytes: int = BUFFER_BYTES_DEFAULT
    """Memory of each worker to receive blocks in."""
    lookup_id: int | None = None
    """Names the socket over which the scheduler asks its own worker what the pool has. A host's
    engines need different ones: with equal ones an engine asks its neighbour, and hangs once that
    one has died. None: the HTTP port."""
    store_offloads: bool = False
    """The store process has a disk; blocks that come from there are staged in smaller portions."""
    save_decode_cache: bool = False
    """Put generated blocks as well, not only prompts'."""
    cache_prefix: str = ""
    """Put before all keys; engines share only what has the same prefix."""
    tenant_id: str | None = None


@dataclass(frozen=True, slots=True)
class TransferLaunch:
    """All that the connectors of one engine need to know."""

    role: Role
    handoff: Handoff | None
    pool: PoolMember | None
    network: Network
    connectors: Connectors | None
    on_load_failure: OnLoadFailure
    advertise_host: str | None
    http_port: int
    ranks: int
    """Data-parallel ranks behind this HTTP port."""


def transfer_config(launch: TransferLaunch) -> dict[str, Any] | None:
    """Return the value of `--kv-transfer-config`; None: the engine keeps its cache to itself.

    Of several connectors the first that has tokens of a request loads them. The hand-off comes
    first, since a decode request must fetch from its prefill engine, which otherwise would keep the
    blocks until a time-out.
    """
    parts = list(_connectors(launch))
    if not parts:
        return None
    if len(parts) == 1:
        config = parts[0]
    else:
        config = {
            "kv_connector": "MultiConnector",
            "kv_role": _KV_ROLES[launch.role],
            "kv_connector_extra_config": {"connectors": parts},
        }
        if _has_ours(launch):
            config["kv_connector_module_path"] = CONNECTORS_MODULE
    # Read at the top only, also with several connectors.
    return {**config, "kv_load_failure_policy": launch.on_load_failure}


def transfer_environment(launch: TransferLaunch) -> dict[str, str]:
    """Return the environment variables that the connectors read."""
    environment: dict[str, str] = {}
    network, handoff = launch.network, launch.handoff
    if handoff is not None and handoff.bootstrap_port is not None:
        environment["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(handoff.bootstrap_port)
    if handoff is not None and handoff.side_channel_port is not None:
        environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(handoff.side_channel_port)
        if launch.advertise_host is not None:
            environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] = launch.advertise_host
        if network.device_names:
            environment["UCX_NET_DEVICES"] = ",".join(f"{d}:1" for d in network.device_names)
    if launch.pool is not None:
        environment["MOONCAKE_CONFIG_PATH"] = launch.pool.config_file
        # Pool keys hold whole digests, so only whole digests can be looked up there.
        environment["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "0"
    if network.nvlink_fabric:
        # Otherwise Mooncake takes RDMA wherever it finds a device for it.
        environment["MC_FORCE_MNNVL"] = "1"
    return environment


def transfer_files(launch: TransferLaunch) -> dict[str, str]:
    """Return the files, path to content, that the connectors read."""
    pool = launch.pool
    if pool is None:
        return {}
    return {pool.config_file: json.dumps(_pool_settings(pool, launch.network), indent=2) + "\n"}


def transfer_ports(launch: TransferLaunch) -> Iterator[PortRange]:
    """Iterate over the ports that the connectors listen on, at known numbers."""
    handoff = launch.handoff
    if handoff is not None and handoff.bootstrap_port is not None:
        yield PortRange("bootstrap_port", handoff.bootstrap_port)
    if handoff is not None and handoff.side_channel_port is not None:
        yield PortRange("side_channel_port", handoff.side_channel_port, launch.ranks)


def lookup_id(launch: TransferLaunch) -> int | None:
    """Return what names the engine's look-up socket on its host; None: it has none."""
    if launch.pool is None:
        return None
    return launch.http_port if launch.pool.lookup_id is None else launch.pool.lookup_id


def _has_ours(launch: TransferLaunch) -> bool:
    if launch.connectors is None:
        return _needs_ours(launch)
    return launch.connectors == "moongate"


def _needs_ours(launch: TransferLaunch) -> bool:
    """Tell whether vLLM's MultiConnector would hold MooncakeConnector, which it dies of."""
    return _is_mooncake(launch) and launch.pool is not None


def _is_mooncake(launch: TransferLaunch) -> bool:
    return launch.handoff is not None and launch.handoff.connector == "mooncake"


# --- connectors -----------------------------------------------------------------------------------


def _connectors(launch: TransferLaunch) -> Iterator[dict[str, Any]]:
    role = _KV_ROLES[launch.role]
    if launch.handoff is not None:
        yield _handoff(launch, launch.handoff, role)
    if launch.pool is not None:
        yield _pool(launch, launch.pool, role)


def _handoff(launch: TransferLaunch, handoff: Handoff, role: str) -> dict[str, Any]:
    if handoff.connector == "nixl":
        return {"kv_connector": "NixlConnector", "kv_role": role}
    network = launch.network
    extra: dict[str, Any] = {"mooncake_protocol": network.protocol}
    if network.device_names:
        extra["device_name"] = ",".join(network.device_names)
    return _ours_or_stock(launch, "MoongateHandoffConnector", "MooncakeConnector", role, extra)


def _pool(launch: TransferLaunch, pool: PoolMember, role: str) -> dict[str, Any]:
    extra: dict[str, Any] = {"lookup_rpc_port": lookup_id(launch)}
    if pool.save_decode_cache:
        extra["save_decode_cache"] = True
    if pool.cache_prefix:
        extra["cache_prefix"] = pool.cache_prefix
    if launch.network.nvlink_fabric:
        extra["custom_mem_pool"] = "NVLINK"
    return _ours_or_stock(launch, "MoongateStoreConnector", "MooncakeStoreConnector", role, extra)


def _ours_or_stock(
    launch: TransferLaunch, ours: str, stock: str, role: str, extra: dict[str, Any]
) -> dict[str, Any]:
    config = {"kv_role": role, "kv_connector_extra_config": extra}
    if not _has_ours(launch):
        return {"kv_connector": stock, **config}
    return {"kv_connector": ours, **config, "kv_connector_module_path": CONNECTORS_MODULE}


def _pool_settings(pool: PoolMember, network: Network) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "mode": pool.mode,
        "metadata_server": METADATA_IN_PEERS,
        "master_server_address": pool.master,
        "global_segment_size": segment_bytes(pool),
        "local_buffer_size": pool.buffer_bytes,
        "protocol": network.protocol,
        "device_name": ",".join(network.device_names),
        "enable_offload": pool.store_offloads,
    }
    if pool.tenant_id is not None:
        settings["tenant_id"] = pool.tenant_id
    return settings


def segment_bytes(pool: PoolMember) -> int:
    """Return the memory that each worker lends to the pool."""
    if pool.segment_bytes is not None:
        return pool.segment_bytes
    return SEGMENT_BYTES_DEFAULT if pool.mode == "embedded" else 0


# --- what can't work ------------------------------------------------------------------------------


def check_transfer(launch: TransferLaunch) -> None:
    """Raises: LaunchError."""
    if launch.role != "both" and launch.handoff is None:
        raise LaunchError(
            f"role: {launch.role} needs a connector to hand prompts over with; set handoff"
            " (mooncake or nixl), or choose role both"
        )
    check_network(launch.network)
    if launch.handoff is not None:
        _check_handoff(launch.handoff, launch.role)
    if launch.pool is not None:
        _check_pool(launch.pool)
    if launch.network.nvlink_fabric and launch.network.protocol != "rdma":
        raise LaunchError("nvlink_fabric: goes with protocol rdma, in whose place it is taken")
    if launch.network.nvlink_fabric and launch.pool is None:
        raise LaunchError(
            "nvlink_fabric: only a pool member allocates its cache as fabric memory; set pool"
        )
    if launch.connectors == "moongate" and launch.pool is None and not _is_mooncake(launch):
        raise LaunchError("connectors: moongate has none for this launch; choose stock")
    if launch.connectors == "stock" and _needs_ours(launch):
        raise LaunchError(
            "connectors: vLLM's own MultiConnector ends an engine of hand-off and pool with its first"
            " hand-off (vllm#43828); choose moongate"
        )


def check_network(network: Network) -> None:
    """Raises: LaunchError."""
    if network.protocol == "tcp" and network.device_names:
        raise LaunchError(
            "device_names: tcp takes no RDMA device; choose protocol rdma, or leave them out"
        )
    for name in network.device_names:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            raise LaunchError(f"device_names: {name!r} is no device; give names such as mlx5_0")


def _check_handoff(handoff: Handoff, role: Role) -> None:
    if handoff.connector == "nixl":
        if handoff.bootstrap_port is not None:
            raise LaunchError("bootstrap_port: NIXL has none; leave it out, or choose mooncake")
        if handoff.side_channel_port is None:
            raise LaunchError("side_channel_port: NIXL needs one; choose a port, such as 5700")
        return
    if handoff.side_channel_port is not None:
        raise LaunchError("side_channel_port: only NIXL has one; leave it out, or choose nixl")
    if role == "decode" and handoff.bootstrap_port is not None:
        raise LaunchError(
            "bootstrap_port: a decode engine has none, it asks the prefill engine's; leave it out"
        )
    if role != "decode" and handoff.bootstrap_port is None:
        raise LaunchError(
            f"bootstrap_port: role {role} needs one with mooncake; choose a port, such as 8998"
        )


def _check_pool(pool: PoolMember) -> None:
    check_master(pool.master)
    if not pool.config_file:
        raise LaunchError("config_file: is empty; name a file to write the pool's settings to")
    segment = segment_bytes(pool)
    if pool.mode == "embedded" and segment <= 0:
        raise LaunchError(
            f"segment_bytes: {segment} lends the pool nothing; give a size such as"
            f" {SEGMENT_BYTES_DEFAULT}, or choose mode standalone-store"
        )
    if pool.mode == "standalone-store" and segment != 0:
        raise LaunchError(
            f"segment_bytes: {segment} in mode standalone-store, where the store process holds the"
            " blocks; give 0, or choose mode embedded"
        )
    if pool.buffer_bytes <= 0:
        raise LaunchError(
            f"buffer_bytes: {pool.buffer_bytes} holds no block; give a size such as {GIB}"
        )
    if pool.lookup_id is not None and pool.lookup_id < 0:
        raise LaunchError(f"lookup_id: {pool.lookup_id} is negative; choose any number from 0")
    if pool.store_offloads and pool.mode == "embedded":
        raise LaunchError(
            "store_offloads: in mode embedded no store process has a disk; choose standalone-store"
        )


def check_master(master: str) -> None:
    """Raises: LaunchError."""
    host, colon, port = master.rpartition(":")
    if not host or not colon or not port.isdigit():
        raise LaunchError(f"master: {master!r} is not host:port; give one such as 10.0.0.1:50051")


def check_lookups_differ(launches: Sequence[TransferLaunch]) -> None:
    """Raises: LaunchError if two engines of one host would share a look-up socket."""
    taken: dict[int, int] = {}
    for launch in launches:
        name = lookup_id(launch)
        if name is None:
            continue
        if name in taken:
            raise LaunchError(
                f"lookup_id: {name} is that of the engines on ports {taken[name]} and"
                f" {launch.http_port}; give each engine of a host its own"
            )
        taken[name] = launch.http_port
