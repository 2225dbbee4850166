"""The command line and environment of a Mooncake pool's own processes: its master and its stores.

A store process lends memory, and a disk if it has one, to the pool, so that blocks outlive the
engines that computed them. Pure, like `vllm_launch.py`.

Source: the flags and variables of Mooncake 0.3.13.post1 (`mooncake_master --help`,
`mooncake_client --help`, and the variables named in those programs).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moongate.engine_plugins.kv_transfer_launch import (
    GIB,
    METADATA_IN_PEERS,
    TCP,
    Network,
    check_master,
    check_network,
)
from moongate.engine_plugins.launch_command import (
    LaunchCommand,
    LaunchError,
    PortRange,
    check_counts,
    check_ports,
)

DISK_BUFFER_BYTES_DEFAULT = GIB


@dataclass(frozen=True, slots=True)
class StoreLaunch:
    """One `mooncake_client` process that holds blocks for a pool."""

    program: str
    """Path of `mooncake_client`, such as `.venv-engine/bin/mooncake_client`."""
    host: str
    """This machine's address as engines and the master reach it; it becomes the segment's name."""
    master: str
    """`host:port` of `mooncake_master`."""
    segment_bytes: int
    """Memory lent to the pool."""
    port: int = 50_052
    """TCP port for requests to this process."""
    network: Network = TCP
    disk_folder: str | None = None
    """Existing, empty or its own, folder of the disk tier. None: memory only."""
    disk_bytes: int | None = None
    """Limit of the disk tier. None: 90 % of what is free there."""
    disk_buffer_bytes: int = DISK_BUFFER_BYTES_DEFAULT
    """Memory through which blocks go to the disk and back."""
    threads: int = 1
    tenant_id: str | None = None


@dataclass(frozen=True, slots=True)
class MasterLaunch:
    """The `mooncake_master` process of a pool, which knows where each block lies."""

    program: str
    """Path of `mooncake_master`, such as `.venv-engine/bin/mooncake_master`."""
    port: int = 50_051
    """RPC of engines and stores."""
    metrics_port: int = 9003
    """HTTP: metrics, and the look-ups of the gateway."""
    has_disks: bool = False
    """Stores of this pool have a disk tier."""


def build_store_command(launch: StoreLaunch) -> LaunchCommand:
    """Return the command that starts a store process.

    Raises: LaunchError for a launch that cannot work.
    """
    _check(launch)
    return LaunchCommand((launch.program, *_arguments(launch)), _environment(launch))


def build_master_command(launch: MasterLaunch) -> LaunchCommand:
    """Return the command that starts a pool's master. Raises: LaunchError."""
    if not launch.program:
        raise LaunchError("program: is empty; give the path of mooncake_master")
    check_ports([PortRange("port", launch.port), PortRange("metrics_port", launch.metrics_port)])
    argv = [launch.program, f"--rpc_port={launch.port}", f"--metrics_port={launch.metrics_port}"]
    if launch.has_disks:
        argv.append("--enable_offload=true")
    return LaunchCommand(tuple(argv), {})


def _arguments(launch: StoreLaunch) -> Iterator[str]:
    yield f"--host={launch.host}"
    yield f"--port={launch.port}"
    yield f"--master_server_address={launch.master}"
    yield f"--metadata_server={METADATA_IN_PEERS}"
    yield f"--protocol={launch.network.protocol}"
    if launch.network.device_names:
        yield f"--device_names={','.join(launch.network.device_names)}"
    yield f"--global_segment_size={launch.segment_bytes}"
    yield f"--threads={launch.threads}"
    if launch.tenant_id is not None:
        yield f"--tenant_id={launch.tenant_id}"
    if launch.disk_folder is not None:
        yield "--enable_offload=true"


def _environment(launch: StoreLaunch) -> dict[str, str]:
    if launch.disk_folder is None:
        return {}
    environment = {
        "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": launch.disk_folder,
        "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(launch.disk_buffer_bytes),
    }
    if launch.disk_bytes is not None:
        # What the master is told, and what the backend that fills the folder keeps to.
        environment["MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES"] = str(launch.disk_bytes)
        environment["MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE"] = str(launch.disk_bytes)
    return environment


def _check(launch: StoreLaunch) -> None:
    for name in ("program", "host"):
        if not getattr(launch, name):
            raise LaunchError(f"{name}: is empty; give it a value")
    check_master(launch.master)
    check_ports([PortRange("port", launch.port)])
    check_network(launch.network)
    check_counts(launch, ("segment_bytes", "disk_bytes", "disk_buffer_bytes", "threads"))
    if launch.network.nvlink_fabric:
        raise LaunchError("nvlink_fabric: a store process has no GPU memory to share; leave it out")
    if launch.disk_folder is not None and not launch.disk_folder.startswith("/"):
        raise LaunchError(
            f"disk_folder: {launch.disk_folder!r} is not absolute, and Mooncake takes no other"
        )
    if launch.disk_folder is None and launch.disk_bytes is not None:
        raise LaunchError("disk_bytes: without disk_folder there is no disk; name one")
