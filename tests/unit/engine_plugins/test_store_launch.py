"""A pool's own processes: exact command lines, and what is refused."""

from dataclasses import replace

import pytest

from moongate.engine_plugins.kv_transfer_launch import Network
from moongate.engine_plugins.launch_command import LaunchCommand, LaunchError
from moongate.engine_plugins.store_launch import (
    MasterLaunch,
    StoreLaunch,
    build_master_command,
    build_store_command,
)

STORE = StoreLaunch(
    program="mooncake_client", host="10.0.0.2", master="10.0.0.1:50051", segment_bytes=1024
)


def test_a_store_in_memory() -> None:
    assert build_store_command(STORE) == LaunchCommand(
        argv=(
            *("mooncake_client", "--host=10.0.0.2", "--port=50052"),
            *("--master_server_address=10.0.0.1:50051", "--metadata_server=P2PHANDSHAKE"),
            *("--protocol=tcp", "--global_segment_size=1024", "--threads=1"),
        ),
        environment={},
    )


def test_a_store_with_a_disk_over_rdma() -> None:
    launch = replace(
        STORE,
        network=Network("rdma", ("mlx5_0", "mlx5_1")),
        disk_folder="/nvme/pool",
        disk_bytes=4096,
        disk_buffer_bytes=512,
        threads=8,
        tenant_id="t",
    )
    assert build_store_command(launch) == LaunchCommand(
        argv=(
            *("mooncake_client", "--host=10.0.0.2", "--port=50052"),
            *("--master_server_address=10.0.0.1:50051", "--metadata_server=P2PHANDSHAKE"),
            *("--protocol=rdma", "--device_names=mlx5_0,mlx5_1", "--global_segment_size=1024"),
            *("--threads=8", "--tenant_id=t", "--enable_offload=true"),
        ),
        environment={
            "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": "/nvme/pool",
            "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": "512",
            "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": "4096",
            "MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE": "4096",
        },
    )


def test_a_disk_without_a_limit_is_filled_as_mooncake_likes() -> None:
    environment = build_store_command(replace(STORE, disk_folder="/nvme")).environment
    assert "MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE" not in environment


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"program": ""}, "program: is empty; give it a value"),
        ({"host": ""}, "host: is empty; give it a value"),
        ({"master": "x"}, "master: 'x' is not host:port; give one such as 10.0.0.1:50051"),
        ({"port": 0}, "port: 0 is not a port; choose one from 1 to 65535"),
        ({"segment_bytes": 0}, "segment_bytes: 0 is too small; choose 1 or more"),
        ({"threads": 0}, "threads: 0 is too small; choose 1 or more"),
        (
            {"network": Network("tcp", ("mlx5_0",))},
            "device_names: tcp takes no RDMA device; choose protocol rdma, or leave them out",
        ),
        (
            {"network": Network("rdma", nvlink_fabric=True)},
            "nvlink_fabric: a store process has no GPU memory to share; leave it out",
        ),
        (
            {"disk_folder": "pool"},
            "disk_folder: 'pool' is not absolute, and Mooncake takes no other",
        ),
        ({"disk_bytes": 1}, "disk_bytes: without disk_folder there is no disk; name one"),
        (
            {"disk_folder": "/d", "disk_bytes": 0},
            "disk_bytes: 0 is too small; choose 1 or more",
        ),
    ],
)
def test_a_store_that_can_not_be_is_refused(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(LaunchError) as caught:
        build_store_command(replace(STORE, **change))  # type: ignore[arg-type]
    assert str(caught.value) == complaint


def test_a_master() -> None:
    assert build_master_command(MasterLaunch("mooncake_master")).argv == (
        *("mooncake_master", "--rpc_port=50051", "--metrics_port=9003"),
    )


def test_the_master_of_stores_with_disks() -> None:
    launch = MasterLaunch("m", port=1, metrics_port=2, has_disks=True)
    assert build_master_command(launch).argv == (
        *("m", "--rpc_port=1", "--metrics_port=2", "--enable_offload=true"),
    )


@pytest.mark.parametrize(
    ("launch", "complaint"),
    [
        (MasterLaunch(""), "program: is empty; give the path of mooncake_master"),
        (
            MasterLaunch("m", port=9003),
            "metrics_port: 9003 clashes with port, 9003; choose ports of their own",
        ),
    ],
)
def test_a_master_that_can_not_be_is_refused(launch: MasterLaunch, complaint: str) -> None:
    with pytest.raises(LaunchError) as caught:
        build_master_command(launch)
    assert str(caught.value) == complaint
