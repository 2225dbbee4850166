"""Launches for the tests, small and complete; `replace` makes the others."""

from __future__ import annotations

from moongate.engine_plugins.kv_transfer_launch import Handoff, PoolMember
from moongate.engine_plugins.vllm_launch import EngineLaunch

LAUNCH = EngineLaunch(
    model="/models/tiny",
    served_model_name="tiny",
    python=".venv-engine/bin/python",
    port=8101,
    kv_events_port=5601,
    kv_replay_port=6601,
    topic="kv@127.0.0.1:8101@tiny",
)
PREFILL = Handoff(bootstrap_port=8998)
DECODE = Handoff()
NIXL = Handoff("nixl", side_channel_port=5700)
POOL = PoolMember(master="10.0.0.1:50051", config_file="/etc/pool.json")
