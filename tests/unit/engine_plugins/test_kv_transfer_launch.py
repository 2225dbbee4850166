"""The connectors of each role: exact configuration, environment and files, and what is refused."""

import json
from dataclasses import replace
from typing import Any

import pytest
from launches import DECODE, LAUNCH, NIXL, POOL, PREFILL

from moongate.engine_plugins.kv_transfer_launch import Handoff, Network
from moongate.engine_plugins.launch_command import LaunchError
from moongate.engine_plugins.vllm_launch import EngineLaunch, build_command

RDMA = Network("rdma", ("mlx5_0", "mlx5_1"))
FABRIC = Network("rdma", nvlink_fabric=True)
OURS = "moongate.engine_plugins.vllm_connectors"


def config_of(launch: EngineLaunch) -> Any:
    """Return the value of --kv-transfer-config."""
    argv = build_command(launch).argv
    return json.loads(argv[argv.index("--kv-transfer-config") + 1])


def environment_of(launch: EngineLaunch) -> dict[str, str]:
    """Return what the connectors add to the environment of an engine without them."""
    plain = build_command(LAUNCH).environment
    return {k: v for k, v in build_command(launch).environment.items() if k not in plain}


# --- hand-off -------------------------------------------------------------------------------------


def test_an_engine_by_itself_has_no_connector() -> None:
    command = build_command(LAUNCH)
    assert "--kv-transfer-config" not in command.argv
    assert command.files == {}


def test_a_prefill_engine_produces_and_opens_a_bootstrap_server() -> None:
    launch = replace(LAUNCH, role="prefill", handoff=PREFILL)
    assert config_of(launch) == {
        "kv_connector": "MooncakeConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
        "kv_load_failure_policy": "recompute",
    }
    assert environment_of(launch) == {"VLLM_MOONCAKE_BOOTSTRAP_PORT": "8998"}


def test_a_decode_engine_consumes_and_has_no_port_of_its_own() -> None:
    launch = replace(LAUNCH, role="decode", handoff=DECODE, on_load_failure="fail")
    assert config_of(launch) == {
        "kv_connector": "MooncakeConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
        "kv_load_failure_policy": "fail",
    }
    assert environment_of(launch) == {}


def test_an_engine_of_both_roles_may_hand_over_too() -> None:
    config = config_of(replace(LAUNCH, handoff=PREFILL))
    assert (config["kv_connector"], config["kv_role"]) == ("MooncakeConnector", "kv_both")


def test_rdma_devices_are_named_in_one_text() -> None:
    config = config_of(replace(LAUNCH, role="decode", handoff=DECODE, network=RDMA))
    assert config["kv_connector_extra_config"] == {
        "mooncake_protocol": "rdma",
        "device_name": "mlx5_0,mlx5_1",
    }


@pytest.mark.parametrize(
    ("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")]
)
def test_nixl_takes_its_addresses_from_the_environment(role: Any, kv_role: str) -> None:
    launch = replace(LAUNCH, role=role, handoff=NIXL, network=RDMA, advertise_host="10.0.0.7")
    assert config_of(launch) == {
        "kv_connector": "NixlConnector",
        "kv_role": kv_role,
        "kv_load_failure_policy": "recompute",
    }
    assert environment_of(launch) == {
        "VLLM_HOST_IP": "10.0.0.7",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "5700",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.7",
        "UCX_NET_DEVICES": "mlx5_0:1,mlx5_1:1",
    }


def test_nixl_without_devices_or_address_leaves_both_to_it() -> None:
    launch = replace(LAUNCH, role="prefill", handoff=NIXL)
    assert environment_of(launch) == {"VLLM_NIXL_SIDE_CHANNEL_PORT": "5700"}


# --- pool -----------------------------------------------------------------------------------------


def test_a_pool_member_gets_a_file_whole_digests_and_a_lookup_socket_of_its_own() -> None:
    launch = replace(LAUNCH, pool=POOL)
    assert config_of(launch) == {
        "kv_connector": "MooncakeStoreConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lookup_rpc_port": 8101},
        "kv_load_failure_policy": "recompute",
    }
    assert environment_of(launch) == {
        "MOONCAKE_CONFIG_PATH": "/etc/pool.json",
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
    }
    ((path, content),) = build_command(launch).files.items()
    assert path == "/etc/pool.json"
    assert json.loads(content) == {
        "mode": "embedded",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": "10.0.0.1:50051",
        "global_segment_size": 4 * 1024**3,
        "local_buffer_size": 1024**3,
        "protocol": "tcp",
        "device_name": "",
        "enable_offload": False,
    }


def test_with_a_store_process_the_engine_lends_nothing() -> None:
    pool = replace(
        POOL, mode="standalone-store", store_offloads=True, tenant_id="t", buffer_bytes=7
    )
    (content,) = build_command(replace(LAUNCH, pool=pool, network=RDMA)).files.values()
    assert json.loads(content) == {
        "mode": "standalone-store",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": "10.0.0.1:50051",
        "global_segment_size": 0,
        "local_buffer_size": 7,
        "protocol": "rdma",
        "device_name": "mlx5_0,mlx5_1",
        "enable_offload": True,
        "tenant_id": "t",
    }


def test_what_a_member_shares_can_be_chosen() -> None:
    pool = replace(POOL, lookup_id=5, save_decode_cache=True, cache_prefix="blue")
    assert config_of(replace(LAUNCH, pool=pool))["kv_connector_extra_config"] == {
        "lookup_rpc_port": 5,
        "save_decode_cache": True,
        "cache_prefix": "blue",
    }


def test_our_pool_connector_is_loaded_from_our_module() -> None:
    config = config_of(replace(LAUNCH, pool=POOL, connectors="moongate"))
    assert config["kv_connector"] == "MoongateStoreConnector"
    assert config["kv_connector_module_path"] == OURS


def test_multi_node_nvlink_allocates_the_cache_as_fabric_memory() -> None:
    launch = replace(LAUNCH, device="gpu", pool=POOL, network=FABRIC)
    assert config_of(launch)["kv_connector_extra_config"]["custom_mem_pool"] == "NVLINK"
    assert environment_of(launch)["MC_FORCE_MNNVL"] == "1"


# --- both -----------------------------------------------------------------------------------------


def test_the_hand_off_comes_before_the_pool_and_by_our_connectors() -> None:
    launch = replace(LAUNCH, role="prefill", handoff=PREFILL, pool=POOL)
    assert config_of(launch) == {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_producer",
        "kv_connector_module_path": OURS,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "connectors": [
                {
                    "kv_connector": "MoongateHandoffConnector",
                    "kv_role": "kv_producer",
                    "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
                    "kv_connector_module_path": OURS,
                },
                {
                    "kv_connector": "MoongateStoreConnector",
                    "kv_role": "kv_producer",
                    "kv_connector_extra_config": {"lookup_rpc_port": 8101},
                    "kv_connector_module_path": OURS,
                },
            ]
        },
    }


def test_nixl_and_a_pool_go_together_with_stock_connectors() -> None:
    config = config_of(replace(LAUNCH, role="decode", handoff=NIXL, pool=POOL))
    names = [c["kv_connector"] for c in config["kv_connector_extra_config"]["connectors"]]
    assert names == ["NixlConnector", "MooncakeStoreConnector"]
    assert "kv_connector_module_path" not in config


# --- what can't work ------------------------------------------------------------------------------


STORE = replace(POOL, mode="standalone-store")
MADE_OF = {"role": "prefill", "handoff": PREFILL}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"role": "prefill"},
            (
                "role: prefill needs a connector to hand prompts over with; set handoff (mooncake or"
                " nixl), or choose role both"
            ),
        ),
        (
            {"role": "decode", "pool": POOL},
            (
                "role: decode needs a connector to hand prompts over with; set handoff (mooncake or"
                " nixl), or choose role both"
            ),
        ),
        (
            {"role": "decode", "handoff": PREFILL},
            "bootstrap_port: a decode engine has none, it asks the prefill engine's; leave it out",
        ),
        (
            {"role": "prefill", "handoff": Handoff()},
            "bootstrap_port: role prefill needs one with mooncake; choose a port, such as 8998",
        ),
        (
            {"handoff": Handoff()},
            "bootstrap_port: role both needs one with mooncake; choose a port, such as 8998",
        ),
        (
            {"role": "prefill", "handoff": replace(NIXL, bootstrap_port=8998)},
            "bootstrap_port: NIXL has none; leave it out, or choose mooncake",
        ),
        (
            {"role": "prefill", "handoff": Handoff("nixl")},
            "side_channel_port: NIXL needs one; choose a port, such as 5700",
        ),
        (
            {"role": "prefill", "handoff": replace(PREFILL, side_channel_port=5700)},
            "side_channel_port: only NIXL has one; leave it out, or choose nixl",
        ),
        (
            {"role": "prefill", "handoff": Handoff(bootstrap_port=5601)},
            "bootstrap_port: 5601 clashes with kv_events_port, 5601; choose ports of their own",
        ),
        (
            {
                "role": "prefill",
                "handoff": Handoff("nixl", side_channel_port=8100),
                "data_parallel": 2,
            },
            "side_channel_port: 8100 to 8101 clashes with port, 8101; choose ports of their own",
        ),
        (
            {**MADE_OF, "network": Network("tcp", ("mlx5_0",))},
            "device_names: tcp takes no RDMA device; choose protocol rdma, or leave them out",
        ),
        (
            {**MADE_OF, "network": Network("rdma", ("mlx5_0,mlx5_1",))},
            "device_names: 'mlx5_0,mlx5_1' is no device; give names such as mlx5_0",
        ),
        (
            {"pool": POOL, "network": Network("tcp", nvlink_fabric=True)},
            "nvlink_fabric: goes with protocol rdma, in whose place it is taken",
        ),
        (
            {"pool": POOL, "network": FABRIC},
            "nvlink_fabric: a CPU has no NVLink; choose device gpu",
        ),
        (
            {
                "pool": POOL,
                "network": FABRIC,
                "device": "gpu",
                "extra_args": ("--enable-sleep-mode",),
            },
            (
                "nvlink_fabric: sleep mode allocates the cache by itself; leave --enable-sleep-mode"
                " out"
            ),
        ),
        (
            {**MADE_OF, "network": FABRIC},
            "nvlink_fabric: only a pool member allocates its cache as fabric memory; set pool",
        ),
        (
            {"role": "decode", "handoff": NIXL, "connectors": "moongate"},
            "connectors: moongate has none for this launch; choose stock",
        ),
        (
            {**MADE_OF, "pool": POOL, "connectors": "stock"},
            (
                "connectors: vLLM's own MultiConnector ends an engine of hand-off and pool with its first"
                " hand-off (vllm#43828); choose moongate"
            ),
        ),
        (
            {"pool": replace(POOL, master="10.0.0.1")},
            "master: '10.0.0.1' is not host:port; give one such as 10.0.0.1:50051",
        ),
        (
            {"pool": replace(POOL, master=":50051")},
            "master: ':50051' is not host:port; give one such as 10.0.0.1:50051",
        ),
        (
            {"pool": replace(POOL, config_file="")},
            "config_file: is empty; name a file to write the pool's settings to",
        ),
        (
            {"pool": replace(POOL, segment_bytes=0)},
            (
                "segment_bytes: 0 lends the pool nothing; give a size such as 4294967296, or choose mode"
                " standalone-store"
            ),
        ),
        (
            {"pool": replace(STORE, segment_bytes=1024)},
            (
                "segment_bytes: 1024 in mode standalone-store, where the store process holds the blocks;"
                " give 0, or choose mode embedded"
            ),
        ),
        (
            {"pool": replace(POOL, buffer_bytes=0)},
            "buffer_bytes: 0 holds no block; give a size such as 1073741824",
        ),
        (
            {"pool": replace(POOL, lookup_id=-1)},
            "lookup_id: -1 is negative; choose any number from 0",
        ),
        (
            {"pool": replace(POOL, store_offloads=True)},
            "store_offloads: in mode embedded no store process has a disk; choose standalone-store",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_what_would(
    change: dict[str, object], complaint: str
) -> None:
    with pytest.raises(LaunchError) as caught:
        build_command(replace(LAUNCH, **change))  # type: ignore[arg-type]
    assert str(caught.value) == complaint
