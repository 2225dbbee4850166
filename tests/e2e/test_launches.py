"""Every kind of launch is understood by vLLM's own parsers, and by Mooncake's programs."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launches import DECODE, LAUNCH, NIXL, POOL, PREFILL
from processes import ENGINE_PYTHON, PROJECT

from moongate.engine_plugins.kv_transfer_launch import Network, PoolMember
from moongate.engine_plugins.store_launch import (
    MasterLaunch,
    StoreLaunch,
    build_master_command,
    build_store_command,
)
from moongate.engine_plugins.vllm_launch import SERVER_MODULE, EngineLaunch, build_command

pytestmark = pytest.mark.skipif(
    not ENGINE_PYTHON.exists(), reason="needs .venv-engine; make setup-engine"
)

GIB = 1024**3
V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
MOONCAKE = f"{V1}.mooncake.mooncake_connector.MooncakeConnector"
STORE = f"{V1}.mooncake.store.connector.MooncakeStoreConnector"
NIXL_CLASS = f"{V1}.nixl.connector.NixlPullConnector"
OURS = "moongate.engine_plugins.vllm_connectors"
RDMA = Network("rdma", ("mlx5_0", "mlx5_1"))
OUTSIDE = PoolMember(
    master="10.0.0.1:50051",
    config_file="/p.json",
    mode="standalone-store",
    store_offloads=True,
    save_decode_cache=True,
    cache_prefix="blue",
    tenant_id="t",
)

LAUNCHES: dict[str, EngineLaunch] = {
    "plain": LAUNCH,
    "everything": replace(
        LAUNCH,
        dtype="float32",
        block_size_tokens=64,
        max_model_len_tokens=4096,
        gpu_blocks_override=100,
        threads=1,
        tensor_parallel=2,
        pipeline_parallel=2,
        data_parallel=2,
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
        shutdown_timeout_s=30,
        advertise_host="10.0.0.7",
    ),
    "prefill": replace(LAUNCH, role="prefill", handoff=PREFILL),
    "decode": replace(LAUNCH, role="decode", handoff=DECODE, network=RDMA),
    "both": replace(LAUNCH, handoff=PREFILL),
    "nixl": replace(LAUNCH, role="prefill", handoff=NIXL, network=RDMA, advertise_host="10.0.0.7"),
    "embedded": replace(LAUNCH, pool=replace(POOL, segment_bytes=512 * 1024**2)),
    "outside": replace(LAUNCH, pool=OUTSIDE, network=RDMA),
    "our hand-off": replace(LAUNCH, role="decode", handoff=DECODE, connectors="moongate"),
    "ours": replace(LAUNCH, pool=POOL, connectors="moongate"),
    "fabric": replace(LAUNCH, device="gpu", pool=POOL, network=Network("rdma", nvlink_fabric=True)),
    "prefill with pool": replace(LAUNCH, role="prefill", handoff=PREFILL, pool=POOL),
    "decode with pool": replace(LAUNCH, role="decode", handoff=DECODE, pool=OUTSIDE),
    "nixl with pool": replace(LAUNCH, role="decode", handoff=NIXL, pool=POOL),
}


@pytest.fixture(scope="module")
def understood() -> dict[str, Any]:
    """Return what vLLM made of each launch; one process for all, since it takes its time to start."""
    launches = []
    for launch in LAUNCHES.values():
        command = build_command(launch)
        start = command.argv.index(SERVER_MODULE) + 1
        launches.append(
            {
                "arguments": command.argv[start:],
                "environment": dict(command.environment),
                "files": dict(command.files),
            }
        )
    answers = subprocess.run(
        [ENGINE_PYTHON, PROJECT / "tests" / "e2e" / "launch_checker.py"],
        input=json.dumps(launches),
        env={**os.environ, "PYTHONSAFEPATH": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert answers.returncode == 0, answers.stderr[-4000:]
    return dict(zip(LAUNCHES, json.loads(answers.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", LAUNCHES)
def test_addresses_are_those_that_gateways_are_told(understood: dict[str, Any], name: str) -> None:
    answer = understood[name]
    assert (answer["port"], answer["models"]) == (8101, ["tiny"])
    assert answer["events"] == "tcp://*:5601"
    assert answer["ranks"] == LAUNCHES[name].data_parallel
    assert answer["unknown_variables"] == []


@pytest.mark.parametrize(
    ("name", "connectors"),
    [
        ("plain", []),
        ("prefill", [["MooncakeConnector", "kv_producer", MOONCAKE]]),
        ("decode", [["MooncakeConnector", "kv_consumer", MOONCAKE]]),
        ("both", [["MooncakeConnector", "kv_both", MOONCAKE]]),
        ("nixl", [["NixlConnector", "kv_producer", NIXL_CLASS]]),
        ("embedded", [["MooncakeStoreConnector", "kv_both", STORE]]),
        ("outside", [["MooncakeStoreConnector", "kv_both", STORE]]),
        ("ours", [["MoongateStoreConnector", "kv_both", f"{OURS}.MoongateStoreConnector"]]),
        (
            "our hand-off",
            [["MoongateHandoffConnector", "kv_consumer", f"{OURS}.MoongateHandoffConnector"]],
        ),
        ("fabric", [["MooncakeStoreConnector", "kv_both", STORE]]),
        (
            "prefill with pool",
            [
                ["MultiConnector", "kv_producer", f"{OURS}.MultiConnector"],
                ["MoongateHandoffConnector", "kv_producer", f"{OURS}.MoongateHandoffConnector"],
                ["MoongateStoreConnector", "kv_producer", f"{OURS}.MoongateStoreConnector"],
            ],
        ),
        (
            "decode with pool",
            [
                ["MultiConnector", "kv_consumer", f"{OURS}.MultiConnector"],
                ["MoongateHandoffConnector", "kv_consumer", f"{OURS}.MoongateHandoffConnector"],
                ["MoongateStoreConnector", "kv_consumer", f"{OURS}.MoongateStoreConnector"],
            ],
        ),
        (
            "nixl with pool",
            [
                ["MultiConnector", "kv_consumer", f"{V1}.multi_connector.MultiConnector"],
                ["NixlConnector", "kv_consumer", NIXL_CLASS],
                ["MooncakeStoreConnector", "kv_consumer", STORE],
            ],
        ),
    ],
)
def test_vllm_finds_the_connectors(
    understood: dict[str, Any], name: str, connectors: list[list[str]]
) -> None:
    assert understood[name]["connectors"] == connectors
    assert understood[name]["policy"] == ("recompute" if connectors else None)


def test_variables_arrive(understood: dict[str, Any]) -> None:
    assert understood["prefill"]["bootstrap_port"] == 8998
    assert understood["nixl"]["side_channel_port"] == 5700
    assert understood["embedded"]["whole_digests"] is True


def test_vllm_reads_the_pools_settings(understood: dict[str, Any]) -> None:
    assert understood["plain"]["pool"] == []
    assert understood["embedded"]["pool"] == [
        {
            "mode": "embedded",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": "10.0.0.1:50051",
            "global_segment_size": GIB // 2,
            "local_buffer_size": GIB,
            "protocol": "tcp",
            "device_name": "",
            "enable_offload": False,
            "tenant_id": "default",
        }
    ]
    assert understood["outside"]["pool"] == [
        {
            "mode": "standalone-store",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": "10.0.0.1:50051",
            "global_segment_size": 0,
            "local_buffer_size": GIB,
            "protocol": "rdma",
            "device_name": "mlx5_0,mlx5_1",
            "enable_offload": True,
            "tenant_id": "t",
        }
    ]


def _flags_of(program: str) -> set[str]:
    """Return the flags that one of Mooncake's programs says it has."""
    path = ENGINE_PYTHON.parent / program
    shown = subprocess.run(
        [path, "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    return set(re.findall(r"^ +-(\w+) ", shown.stdout, re.MULTILINE))


def test_mooncake_has_the_flags_of_a_store_and_a_master() -> None:
    store = StoreLaunch(
        program="mooncake_client",
        host="10.0.0.2",
        master="10.0.0.1:50051",
        segment_bytes=GIB,
        network=RDMA,
        disk_folder="/nvme",
        tenant_id="t",
    )
    master = MasterLaunch("mooncake_master", has_disks=True)
    for command in (build_store_command(store), build_master_command(master)):
        program, *arguments = command.argv
        ours = {argument.removeprefix("--").partition("=")[0] for argument in arguments}
        assert ours - _flags_of(program) == set()


def test_mooncake_knows_the_variables_of_a_disk() -> None:
    """They are only read while it runs, and a wrong one would silently do nothing."""
    store = StoreLaunch(
        program="mooncake_client",
        host="h",
        master="m:1",
        segment_bytes=GIB,
        disk_folder="/nvme",
        disk_bytes=GIB,
    )
    find = "import mooncake; print(mooncake.__path__[0])"
    folder = subprocess.check_output([ENGINE_PYTHON, "-c", find], text=True, timeout=60).strip()
    binary = Path(folder, "mooncake_client").read_bytes()
    names = build_store_command(store).environment
    assert [name for name in names if name.encode() not in binary] == []
