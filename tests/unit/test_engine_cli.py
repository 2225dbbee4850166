"""`moongate engine …`: from words to what is printed, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from moongate import engine_cli
from moongate.cli import main
from moongate.engine_cli import size_bytes
from moongate.engine_plugins.kv_transfer_launch import Handoff, Network, PoolMember
from moongate.engine_plugins.option_names import option_of
from moongate.engine_plugins.store_launch import MasterLaunch, StoreLaunch
from moongate.engine_plugins.vllm_launch import EngineLaunch

WITHOUT_OPTION = {
    *("topic", "extra_args", "network", "connector", "has_disks", "prompt_tokens_details"),
    *("gpu_blocks_override", "kv_cache_space_gib", "enable_auto_tool_choice", "tool_call_parser"),
}
"""Fields that `moongate engine` sets by itself, or whose refusals it can't bring about."""

ENGINE = ["engine", "command", "--model", "/m/tiny", "--device", "cpu"]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """Return the words of the last printed line, which is the command."""
    assert main(words) == 0
    return shlex.split(capsys.readouterr().out.splitlines()[-1])


def config_of(words: list[str]) -> Any:
    return json.loads(words[words.index("--kv-transfer-config") + 1])


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 2
    return capsys.readouterr().err.removeprefix("moongate: ").rstrip("\n")


# --- engines --------------------------------------------------------------------------------------


def test_a_prefill_engine_hands_over_by_mooncake_unless_told_otherwise(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = printed(capsys, *ENGINE, "--role", "prefill")
    assert config_of(words)["kv_connector"] == "MooncakeConnector"
    assert "VLLM_MOONCAKE_BOOTSTRAP_PORT=8998" in words


def test_a_decode_engine_has_no_bootstrap_port(capsys: pytest.CaptureFixture[str]) -> None:
    words = printed(
        capsys, *ENGINE, "--role", "decode", "--protocol", "rdma", "--device-name", "a,b"
    )
    assert config_of(words)["kv_role"] == "kv_consumer"
    assert config_of(words)["kv_connector_extra_config"]["device_name"] == "a,b"
    assert not [word for word in words if word.startswith("VLLM_MOONCAKE")]


def test_nixl_has_a_side_channel(capsys: pytest.CaptureFixture[str]) -> None:
    words = printed(capsys, *ENGINE, "--role", "prefill", "--kv-connector", "nixl")
    assert config_of(words)["kv_connector"] == "NixlConnector"
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT=5700" in words


def test_ranks_and_limits_are_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--tensor-parallel-size", "2", "--shutdown-timeout", "9", "--threads", "1"]
    words = printed(capsys, *ENGINE, *given, "--advertise-host", "10.0.0.7")
    assert words[words.index("--tensor-parallel-size") + 1] == "2"
    assert words[words.index("--shutdown-timeout") + 1] == "9"
    assert "OMP_NUM_THREADS=1" in words
    assert "kv@10.0.0.7:8101@tiny" in words[words.index("--kv-events-config") + 1]


def test_a_pool_members_settings_are_shown_as_a_file_to_write(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main([*ENGINE, "--port", "8103", "--pool", "--segment-size", "512MB"]) == 0
    document, command = capsys.readouterr().out.rsplit("\nEND\n", 1)
    file = tmp_path / "moongate" / "mooncake-8103.json"
    making, first, settings = document.split("\n", 2)
    assert making == f"mkdir -p {file.parent}"
    assert first == f"cat > {file} <<'END'"
    assert json.loads(settings)["global_segment_size"] == 512 * 1024**2
    assert f"MOONCAKE_CONFIG_PATH={file}" in shlex.split(command)
    assert not file.exists()


def test_store_process_mode_lends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--pool", "--pool-mode", "standalone-store", "--store-offloads", "--master", "h:1"]
    assert main([*ENGINE, *words, "--mooncake-config", "/tmp/p.json"]) == 0
    settings = json.loads(capsys.readouterr().out.split("'END'\n")[1].split("END\n")[0])
    assert settings["global_segment_size"] == 0
    assert settings["master_server_address"] == "h:1"
    assert settings["enable_offload"] is True


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["--role", "prefill", "--kv-connector", "none"],
            (
                "--role: prefill needs a connector to hand prompts over with; set --kv-connector"
                " (mooncake or nixl), or choose --role both"
            ),
        ),
        (
            ["--bootstrap-port", "8998"],
            "--bootstrap-port: without --kv-connector nothing is handed over",
        ),
        (
            ["--side-channel-port", "5700"],
            "--side-channel-port: without --kv-connector nothing is handed over",
        ),
        (
            ["--role", "decode", "--bootstrap-port", "8998"],
            "--bootstrap-port: a decode engine has none, it asks the prefill engine's; leave it out",
        ),
        (
            ["--pool", "--segment-size", "0"],
            (
                "--segment-size: 0 lends the pool nothing; give a size such as 4294967296, or choose"
                " --pool-mode standalone-store"
            ),
        ),
        (
            ["--device-name", "mlx5_0"],
            ("--device-name: tcp takes no RDMA device; choose --protocol rdma, or leave them out"),
        ),
        (
            ["--nvlink-fabric", "--pool"],
            "--nvlink-fabric: goes with --protocol rdma, in whose place it is taken",
        ),
        (
            ["--port", "5601"],
            "--kv-events-port: 5601 clashes with --port, 5601; choose ports of their own",
        ),
        (
            ["--", "--port", "8102"],
            "after --: --port is set by the launch itself; leave it out there",
        ),
        (["--lookup-id", "3"], "--lookup-id: only with --pool"),
        (["--segment-size", "1GB"], "--segment-size: only with --pool"),
        (["--pool-mode", "standalone-store"], "--pool-mode: only with --pool"),
        (["--save-decode-cache"], "--save-decode-cache: only with --pool"),
    ],
)
def test_engines_that_can_not_be_are_refused(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, *ENGINE, *words) == problem


def test_a_refusal_names_options_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    helped = ""
    for action in ("serve", "store-serve", "master-serve"):
        with pytest.raises(SystemExit):
            main(["engine", action, "--help"])
        helped += capsys.readouterr().out
    launches = (EngineLaunch, Handoff, PoolMember, Network, StoreLaunch, MasterLaunch)
    fields = {field.name for launch in launches for field in dataclasses.fields(launch)}
    named = {option_of(name) for name in fields - WITHOUT_OPTION}
    assert {option for option in named if f"  {option}" not in helped} == set()


# --- a pool's own processes -----------------------------------------------------------------------


def test_a_stores_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["engine", "store-command", "--host", "10.0.0.2", "--segment-size", "2GB"]
    assert printed(capsys, *words, "--disk", "/nvme", "--disk-size", "1TB") == [
        "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH=/nvme",
        "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES=1073741824",
        "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES=1099511627776",
        "MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE=1099511627776",
        *("mooncake_client", "--host=10.0.0.2", "--port=50052"),
        *("--master_server_address=127.0.0.1:50051", "--metadata_server=P2PHANDSHAKE"),
        *("--protocol=tcp", "--global_segment_size=2147483648", "--threads=1"),
        "--enable_offload=true",
    ]


def test_a_masters_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = printed(capsys, "engine", "master-command", "--program", "/b/mooncake_master")
    assert words == ["/b/mooncake_master", "--rpc_port=50051", "--metrics_port=9003"]


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("7", 7), ("7b", 7), ("1.5 kB", 1536), ("512MB", 512 << 20), ("4GB", 4 << 30)],
)
def test_sizes(text: str, size: int) -> None:
    assert size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "4G", "-1GB", "4GiB", "1e3", "four"])
def test_what_is_no_size_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*ENGINE, "--pool", f"--segment-size={text}"])
    assert ended.value.code == 2
    assert "expected a size such as 512MB or 4GB" in capsys.readouterr().err


# --- starting -------------------------------------------------------------------------------------


SERVE = ["engine", "serve", "--model", "/m/tiny", "--python", "/nowhere/python"]


def test_rdma_needs_a_device_on_the_machine_that_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_cli, "RDMA_DEVICES", tmp_path)
    words = [*SERVE, "--role", "decode", "--protocol", "rdma"]
    assert refused(capsys, *words) == (
        f"--protocol: rdma, but this machine has no RDMA device ({tmp_path}); choose tcp"
    )
    (tmp_path / "mlx5_0").mkdir()
    assert main(words) == 1
    assert capsys.readouterr().err == "moongate: /nowhere/python: No such file or directory\n"
    assert refused(capsys, *words, "--device-name", "mlx5_1") == (
        "--device-name: no mlx5_1 here; this machine has mlx5_0"
    )


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["--announce", "gateway:8000"],
            "--announce: 'gateway:8000' is no http address of a gateway",
        ),
        (
            ["--announce", "http://g:8000", "--host", "0.0.0.0"],
            (
                "--advertise-host: an engine that listens on '0.0.0.0' can't be announced as that; name"
                " the address at which gateways reach this machine"
            ),
        ),
        (
            ["--announce", "http://g:8000", "--announce-id", "a b"],
            "--announce-id: 'a b'; choose 1 to 64 letters, digits, dots, dashes and underscores",
        ),
    ],
)
def test_announcements_that_can_not_be_are_refused(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, *SERVE, *words) == problem


def test_an_announced_engine_that_is_not_there_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SERVE, "--announce", "http://127.0.0.1:9"]) == 1
    assert capsys.readouterr().err == "moongate: /nowhere/python: No such file or directory\n"


@pytest.mark.parametrize("action", ["command", "serve"])
def test_every_option_of_an_engine_states_its_default(
    action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["engine", action, "--help"])
    _, *options = re.split(r"\n  --(?! ARG)", capsys.readouterr().out)
    stated = {text.split()[0]: "default: " in " ".join(text.split()) for text in options}
    switches = {"model", "pool", "store-offloads", "save-decode-cache", "nvlink-fabric"}
    assert {name for name, is_stated in stated.items() if not is_stated} == switches
