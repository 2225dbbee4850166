"""The exact command line and environment of an engine, and what is refused."""

import shlex
from dataclasses import replace

import pytest
from launches import LAUNCH, NIXL, POOL, PREFILL

from moongate.engine_plugins.launch_command import (
    LaunchCommand,
    LaunchError,
    shell_script,
)
from moongate.engine_plugins.vllm_launch import build_command, check_together

EVENTS = (
    '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5601",'
    '"replay_endpoint":"tcp://*:6601","topic":"kv@127.0.0.1:8101@tiny"}'
)


def test_the_smallest_launch_gives_events_prefix_caching_and_token_details() -> None:
    assert build_command(LAUNCH) == LaunchCommand(
        argv=(
            *(".venv-engine/bin/python", "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", "/models/tiny", "--served-model-name", "tiny"),
            *("--host", "127.0.0.1", "--port", "8101"),
            *("--enable-prefix-caching", "--kv-events-config", EVENTS),
            *("--enforce-eager", "--enable-prompt-tokens-details"),
        ),
        environment={
            "PYTHONHASHSEED": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONSAFEPATH": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        },
    )


def test_every_setting_becomes_a_flag_or_a_variable() -> None:
    launch = replace(
        LAUNCH,
        host="0.0.0.0",
        block_size_tokens=64,
        max_model_len_tokens=16_384,
        dtype="float32",
        gpu_blocks_override=1024,
        kv_cache_space_gib=2,
        threads=3,
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
        tensor_parallel=4,
        pipeline_parallel=2,
        data_parallel=3,
        advertise_host="10.0.0.7",
        shutdown_timeout_s=20,
        extra_args=("--seed", "7"),
    )
    assert build_command(launch) == LaunchCommand(
        argv=(
            *(".venv-engine/bin/python", "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", "/models/tiny", "--served-model-name", "tiny"),
            *("--host", "0.0.0.0", "--port", "8101"),
            *("--dtype", "float32", "--max-model-len", "16384"),
            *("--tensor-parallel-size", "4", "--pipeline-parallel-size", "2"),
            *("--data-parallel-size", "3"),
            *("--enable-prefix-caching", "--block-size", "64"),
            *("--num-gpu-blocks-override", "1024", "--kv-events-config", EVENTS),
            *("--enforce-eager", "--enable-prompt-tokens-details"),
            *("--shutdown-timeout", "20"),
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
            *("--seed", "7"),
        ),
        environment={
            "PYTHONHASHSEED": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONSAFEPATH": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "3",
            "VLLM_HOST_IP": "10.0.0.7",
        },
    )


def test_a_gpu_engine_compiles_and_gets_no_cpu_variables() -> None:
    command = build_command(replace(LAUNCH, device="gpu", threads=3))
    assert "--enforce-eager" not in command.argv
    assert command.environment == {
        "PYTHONHASHSEED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONSAFEPATH": "1",
        "HF_HUB_OFFLINE": "1",
    }


def test_a_model_named_on_a_hub_may_be_fetched() -> None:
    assert "HF_HUB_OFFLINE" not in build_command(replace(LAUNCH, model="org/name")).environment


def test_token_details_can_be_left_out() -> None:
    command = build_command(replace(LAUNCH, prompt_tokens_details=False))
    assert "--enable-prompt-tokens-details" not in command.argv


def test_a_shell_script_survives_a_shell() -> None:
    command = build_command(replace(LAUNCH, model="/my models/it's tiny"))
    words = shlex.split(shell_script(command))
    assert words[:5] == [
        "PYTHONHASHSEED=0",
        "VLLM_NO_USAGE_STATS=1",
        "PYTHONSAFEPATH=1",
        "HF_HUB_OFFLINE=1",
        "VLLM_CPU_KVCACHE_SPACE=1",
    ]
    assert tuple(words[5:]) == command.argv


def test_a_shell_script_quotes_only_what_needs_it() -> None:
    command = LaunchCommand(argv=("python", "-m", "x y"), environment={"A": "1", "B": "$c"})
    assert shell_script(command) == "A=1 B='$c' python -m 'x y'"


def test_a_shell_script_writes_the_files_first() -> None:
    command = LaunchCommand(argv=("x",), environment={"A": "1"}, files={"/my f": "{\n}\n"})
    assert shell_script(command) == "cat > '/my f' <<'END'\n{\n}\nEND\nA=1 x"


def test_a_shell_script_makes_the_folder_of_its_files() -> None:
    file = "/a b/c/f.json"
    command = LaunchCommand(argv=("x",), environment={"F": file}, files={file: "{}"})
    for home in (None, "", "/", "/h", "/a b/c/f"):
        assert shell_script(command, home) == (
            "mkdir -p '/a b/c'\ncat > '/a b/c/f.json' <<'END'\n{}\nEND\nF='/a b/c/f.json' x"
        )


@pytest.mark.parametrize("home", ["/h", "/h/"])
def test_a_shell_script_leaves_the_home_to_whoever_runs_it(home: str) -> None:
    file = "/h/.cache/f.json"
    command = LaunchCommand(argv=("x",), environment={"F": file, "O": "/h/o"}, files={file: "{}"})
    assert shell_script(command, home) == (
        'mkdir -p "$HOME"/.cache\n'
        "cat > \"$HOME\"/.cache/f.json <<'END'\n{}\nEND\n"
        'F="$HOME"/.cache/f.json O=/h/o x'
    )


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"port": 0},
            "port: 0 is not a port; choose one from 1 to 65535",
        ),
        (
            {"kv_replay_port": 65_536},
            "kv_replay_port: 65536 is not a port; choose one from 1 to 65535",
        ),
        (
            {"kv_events_port": 8101},
            "kv_events_port: 8101 clashes with port, 8101; choose ports of their own",
        ),
        (
            {"kv_replay_port": 5601},
            "kv_replay_port: 5601 clashes with kv_events_port, 5601; choose ports of their own",
        ),
        (
            {"block_size_tokens": 16},
            "block_size_tokens: 16 doesn't work on a CPU; choose a multiple of 32, such as 32",
        ),
        (
            {"block_size_tokens": 90},
            "block_size_tokens: 90 doesn't work on a CPU; choose a multiple of 32, such as 96",
        ),
        ({"threads": 0}, "threads: 0 is too small; choose 1 or more"),
        ({"kv_cache_space_gib": 0}, "kv_cache_space_gib: 0 is too small; choose 1 or more"),
        ({"gpu_blocks_override": -1}, "gpu_blocks_override: -1 is too small; choose 1 or more"),
        ({"data_parallel": 0}, "data_parallel: 0 is too small; choose 1 or more"),
        ({"shutdown_timeout_s": -1}, "shutdown_timeout_s: -1 is too small; choose 0 or more"),
        (
            {"data_parallel": 2, "kv_events_port": 6600},
            (
                "kv_replay_port: 6601 to 6602 clashes with kv_events_port, 6600 to 6601;"
                " choose ports of their own"
            ),
        ),
        (
            {"data_parallel": 2, "kv_replay_port": 65_535},
            "kv_replay_port: 65535 to 65536 are not all ports; choose from 1 to 65535",
        ),
        ({"max_model_len_tokens": 0}, "max_model_len_tokens: 0 is too small; choose 1 or more"),
        ({"block_size_tokens": 0}, "block_size_tokens: 0 is too small; choose 1 or more"),
        (
            {
                "gpu_blocks_override": 512,
                "block_size_tokens": 32,
                "max_model_len_tokens": 16_384,
            },
            (
                "gpu_blocks_override: 512 blocks of 32 tokens can't hold one request of"
                " max_model_len_tokens = 16384; choose 513 blocks or more, or a shorter length"
            ),
        ),
        ({"served_model_name": ""}, "served_model_name: is empty; give it a value"),
        (
            {"enable_auto_tool_choice": True},
            "enable_auto_tool_choice: needs tool_call_parser; 'hermes' is right for ChatML models",
        ),
        (
            {"extra_args": ("--port", "9")},
            "extra_args: --port is set by the launch itself; leave it out there",
        ),
        (
            {"extra_args": ("--kv_events_config={}",)},
            "extra_args: --kv-events-config is set by the launch itself; leave it out there",
        ),
    ],
)
def test_what_cannot_start_is_refused_with_what_would_be_right(
    change: dict[str, object], complaint: str
) -> None:
    with pytest.raises(LaunchError) as caught:
        build_command(replace(LAUNCH, **change))  # type: ignore[arg-type]
    assert str(caught.value) == complaint


def test_one_block_more_than_the_longest_request_is_enough() -> None:
    launch = replace(LAUNCH, gpu_blocks_override=513, block_size_tokens=32)
    build_command(replace(launch, max_model_len_tokens=16_384))


def test_any_block_size_goes_on_a_gpu() -> None:
    command = build_command(replace(LAUNCH, device="gpu", block_size_tokens=16))
    assert command.argv[command.argv.index("--block-size") + 1] == "16"


def test_a_value_that_looks_like_one_of_our_flags_elsewhere_is_no_clash() -> None:
    command = build_command(replace(LAUNCH, extra_args=("--seed", "1", "--load-format", "auto")))
    assert command.argv[-4:] == ("--seed", "1", "--load-format", "auto")


# --- several engines on one host ------------------------------------------------------------------


def test_engines_of_one_host_with_ports_of_their_own_go_together() -> None:
    other = replace(LAUNCH, port=8102, kv_events_port=5602, kv_replay_port=6602)
    check_together([replace(LAUNCH, pool=POOL), replace(other, pool=POOL)])


@pytest.mark.parametrize(
    ("first", "second", "complaint"),
    [
        (
            {},
            {"kv_events_port": 5601},
            (
                "kv_events_port of the engine on 8102: 5601 clashes with kv_events_port of the engine on"
                " 8101, 5601; choose ports of their own"
            ),
        ),
        (
            {"data_parallel": 2},
            {},
            (
                "kv_events_port of the engine on 8102: 5602 clashes with kv_events_port of the engine on"
                " 8101, 5601 to 5602; choose ports of their own"
            ),
        ),
        (
            {"role": "prefill", "handoff": PREFILL},
            {"role": "prefill", "handoff": PREFILL},
            (
                "bootstrap_port of the engine on 8102: 8998 clashes with bootstrap_port of the engine on"
                " 8101, 8998; choose ports of their own"
            ),
        ),
        (
            {"role": "prefill", "handoff": NIXL},
            {"kv_events_port": 5700},
            (
                "kv_events_port of the engine on 8102: 5700 clashes with side_channel_port of the engine"
                " on 8101, 5700; choose ports of their own"
            ),
        ),
        (
            {"pool": replace(POOL, lookup_id=8102)},
            {"pool": POOL},
            (
                "lookup_id: 8102 is that of the engines on ports 8101 and 8102; give each engine of a"
                " host its own"
            ),
        ),
    ],
)
def test_engines_of_one_host_that_would_take_each_others_are_refused(
    first: dict[str, object], second: dict[str, object], complaint: str
) -> None:
    other = {"port": 8102, "kv_events_port": 5602, "kv_replay_port": 6602, **second}
    with pytest.raises(LaunchError) as caught:
        check_together([replace(LAUNCH, **first), replace(LAUNCH, **other)])  # type: ignore[arg-type]
    assert str(caught.value) == complaint
