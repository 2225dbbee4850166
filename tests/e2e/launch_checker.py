"""Run by the engine's Python: vLLM's own parsers read the launches that stand on standard input.

In comes a list of launches (arguments, environment, files); out goes for each what vLLM understood.
It starts no engine.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vllm import envs
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.mooncake_store import MooncakeStoreConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> None:
    launches = json.load(sys.stdin)
    print(json.dumps([understand(launch) for launch in launches]))


def understand(launch: dict[str, Any]) -> dict[str, Any]:
    """Return what vLLM makes of a launch. Raises whatever vLLM raises."""
    with patch.dict(os.environ, launch["environment"]):
        return _understand(launch)


def _understand(launch: dict[str, Any]) -> dict[str, Any]:
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(launch["arguments"])
    validate_parsed_serve_args(parsed)
    arguments = AsyncEngineArgs.from_cli_args(parsed)
    config = arguments.kv_transfer_config
    return {
        "port": parsed.port,
        "models": parsed.served_model_name,
        "events": arguments.kv_events_config.endpoint,
        "ranks": arguments.data_parallel_size,
        "connectors": [] if config is None else connectors(config),
        "policy": None if config is None else config.kv_load_failure_policy,
        "unknown_variables": [
            name
            for name in launch["environment"]
            if name.startswith("VLLM_") and name not in envs.environment_variables
        ],
        "bootstrap_port": envs.VLLM_MOONCAKE_BOOTSTRAP_PORT,
        "side_channel_port": envs.VLLM_NIXL_SIDE_CHANNEL_PORT,
        "whole_digests": not envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES,
        "pool": [pool(content) for content in launch["files"].values()],
    }


def connectors(config: Any) -> list[list[str]]:
    """Return name, role and class of each connector, several ones' parts included."""
    cls = KVConnectorFactory.get_connector_class(config)
    found = [[config.kv_connector, config.kv_role, f"{cls.__module__}.{cls.__name__}"]]
    for part in config.kv_connector_extra_config.get("connectors", ()):
        found += connectors(KVTransferConfig(**part))
    return found


def pool(content: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "pool.json")
        file.write_text(content)
        settings: dict[str, Any] = vars(MooncakeStoreConfig.from_file(str(file)))
        return settings


if __name__ == "__main__":
    main()
