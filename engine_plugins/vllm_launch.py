"""The command line and environment with which a vLLM engine does what the router needs.

Responsible for one instance: KV events with replay, a fixed hash seed, prefix caching and
cached-token counts in `usage`, its ranks and its ports; how its cache reaches other engines is
`kv_transfer_launch.py`'s. It is pure: it starts nothing, reads and writes no file, and never imports
vLLM; the caller runs the result or prints it. It isn't responsible for free ports or for whether the
model exists; it refuses only what no machine could start.

Source: the flags and variables of vLLM 0.32.0, each tried on the CPU build.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from moongate.engine_plugins.kv_transfer_launch import (
    TCP,
    Connectors,
    Handoff,
    Network,
    OnLoadFailure,
    PoolMember,
    Role,
    TransferLaunch,
    check_lookups_differ,
    check_transfer,
    transfer_config,
    transfer_environment,
    transfer_files,
    transfer_ports,
)
from moongate.engine_plugins.launch_command import (
    LaunchCommand,
    LaunchError,
    PortRange,
    check_counts,
    check_ports,
)

Device = Literal["cpu", "gpu"]

# The `vllm` command fails in the CPU build, whose distribution has another name ("No package
# metadata was found for vllm"); the module works in both builds.
SERVER_MODULE = "vllm.entrypoints.openai.api_server"

HASH_SEED = "0"
"""Block hashes start from it; engines that share a pool need the same one."""

CPU_BLOCK_SIZE_MULTIPLE_TOKENS = 32  # The CPU attention kernels take no other block sizes.

_COUNTS = (
    "block_size_tokens",
    "max_model_len_tokens",
    "gpu_blocks_override",
    "kv_cache_space_gib",
    "threads",
    "tensor_parallel",
    "pipeline_parallel",
    "data_parallel",
)


@dataclass(frozen=True, slots=True)
class EngineLaunch:
    """What to start, where it listens, and how much of the machine it may take."""

    model: str
    """Directory of the model, or its name on a hub."""
    served_model_name: str
    """The name that requests and KV events use."""
    python: str
    """Path of the interpreter that has vLLM, such as `.venv-engine/bin/python`."""
    port: int
    """OpenAI HTTP."""
    kv_events_port: int
    """ZMQ PUB; each data-parallel rank adds its number. It listens on all interfaces: vLLM would
    *connect* to any address without `*`."""
    kv_replay_port: int
    """ZMQ ROUTER that sends missed event batches again; each rank adds its number."""
    topic: str
    """First frame of each event batch, by convention `kv@<host:port>@<model>`."""
    host: str = "127.0.0.1"
    """Address that HTTP listens on."""
    device: Device = "cpu"
    block_size_tokens: int | None = None
    """None leaves it to the engine; on a CPU a multiple of 32."""
    max_model_len_tokens: int | None = None
    """Longest prompt and answer together; None means what the model was made for."""
    dtype: str | None = None
    """None means the model's own. On a CPU without AVX512-BF16, float32 is ten times faster."""
    gpu_blocks_override: int | None = None
    """Blocks of KV cache, on a CPU as well; None fills the space that there is. One of them stays
    unused, and the others must hold `max_model_len_tokens`."""
    kv_cache_space_gib: int = 1
    """CPU only: memory for the KV cache. It takes whole GiB; override the blocks for less."""
    threads: int | None = None
    """CPU only: OpenMP threads, bound to no core so that engines share them. None lets vLLM bind
    one thread to each core."""
    prompt_tokens_details: bool = True
    """Report cached tokens in `usage`."""
    enable_auto_tool_choice: bool = False
    """Let the model decide to call tools; needs `tool_call_parser`."""
    tool_call_parser: str | None = None
    """How the model writes tool calls, such as `hermes`."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    """Ranks with a cache each behind the one HTTP port."""
    role: Role = "both"
    """`prefill` and `decode` hand prompts over and need a `handoff`; `both` may have one."""
    handoff: Handoff | None = None
    pool: PoolMember | None = None
    network: Network = TCP
    connectors: Connectors | None = None
    """`moongate` takes our subclasses, which the engine's environment must have. None: the stock
    ones, where they work (see `kv_transfer_launch.py`)."""
    on_load_failure: OnLoadFailure = "recompute"
    """What becomes of a request whose blocks could not be fetched; vLLM's own default fails it."""
    advertise_host: str | None = None
    """Address at which other machines reach this one. None: vLLM takes that of the default route."""
    shutdown_timeout_s: int | None = None
    """What running requests get to end after SIGTERM; None: nothing, they are aborted."""
    extra_args: tuple[str, ...] = ()
    """Passed on unchanged, after everything else."""


def build_command(launch: EngineLaunch) -> LaunchCommand:
    """Return the command that starts `launch`.

    Raises: `LaunchError` for a launch that cannot work.
    """
    _check(launch)
    arguments = tuple(_arguments(launch))
    _check_extra_args(launch.extra_args, arguments)
    argv = (launch.python, "-m", SERVER_MODULE, *arguments, *launch.extra_args)
    return LaunchCommand(
        argv=argv, environment=_environment(launch), files=transfer_files(_transfer(launch))
    )


def check_together(launches: Sequence[EngineLaunch]) -> None:
    """Raises: LaunchError if engines of one host would take each other's ports or sockets."""
    check_ports(
        PortRange(f"{ports.name} of the engine on {launch.port}", ports.first, ports.count)
        for launch in launches
        for ports in _ports(launch)
    )
    check_lookups_differ([_transfer(launch) for launch in launches])


def _transfer(launch: EngineLaunch) -> TransferLaunch:
    return TransferLaunch(
        role=launch.role,
        handoff=launch.handoff,
        pool=launch.pool,
        network=launch.network,
        connectors=launch.connectors,
        on_load_failure=launch.on_load_failure,
        advertise_host=launch.advertise_host,
        http_port=launch.port,
        ranks=launch.data_parallel,
    )


def _arguments(launch: EngineLaunch) -> Iterator[str]:
    yield from ("--model", launch.model, "--served-model-name", launch.served_model_name)
    yield from ("--host", launch.host, "--port", str(launch.port))
    if launch.dtype is not None:
        yield from ("--dtype", launch.dtype)
    if launch.max_model_len_tokens is not None:
        yield from ("--max-model-len", str(launch.max_model_len_tokens))
    yield from _parallel_arguments(launch)
    yield from _cache_arguments(launch)
    config = transfer_config(_transfer(launch))
    if config is not None:
        yield from ("--kv-transfer-config", _compact(config))
    if launch.device == "cpu":
        # Compiling takes longer than it saves here, and would need a compiler at run time.
        yield "--enforce-eager"
    if launch.prompt_tokens_details:
        yield "--enable-prompt-tokens-details"
    if launch.shutdown_timeout_s is not None:
        yield from ("--shutdown-timeout", str(launch.shutdown_timeout_s))
    if launch.enable_auto_tool_choice:
        yield "--enable-auto-tool-choice"
    if launch.tool_call_parser is not None:
        yield from ("--tool-call-parser", launch.tool_call_parser)


def _parallel_arguments(launch: EngineLaunch) -> Iterator[str]:
    for flag, size in (
        ("--tensor-parallel-size", launch.tensor_parallel),
        ("--pipeline-parallel-size", launch.pipeline_parallel),
        ("--data-parallel-size", launch.data_parallel),
    ):
        if size != 1:
            yield from (flag, str(size))


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _cache_arguments(launch: EngineLaunch) -> Iterator[str]:
    yield "--enable-prefix-caching"
    if launch.block_size_tokens is not None:
        yield from ("--block-size", str(launch.block_size_tokens))
    if launch.gpu_blocks_override is not None:
        yield from ("--num-gpu-blocks-override", str(launch.gpu_blocks_override))
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{launch.kv_events_port}",
        "replay_endpoint": f"tcp://*:{launch.kv_replay_port}",
        "topic": launch.topic,
    }
    yield from ("--kv-events-config", _compact(events))


def _environment(launch: EngineLaunch) -> dict[str, str]:
    environment = {
        "PYTHONHASHSEED": HASH_SEED,
        "VLLM_NO_USAGE_STATS": "1",
        # Python would look in the current folder first, where a checkout's folders and its metadata
        # hide installed packages and our plugin.
        "PYTHONSAFEPATH": "1",
    }
    if launch.model.startswith(("/", "./", "../")):
        # A model directory is complete: asking a hub about it only delays the start.
        environment["HF_HUB_OFFLINE"] = "1"
    if launch.device == "cpu":
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(launch.kv_cache_space_gib)
        if launch.threads is not None:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            environment["OMP_NUM_THREADS"] = str(launch.threads)
    if launch.advertise_host is not None:
        environment["VLLM_HOST_IP"] = launch.advertise_host
    return environment | transfer_environment(_transfer(launch))


def _check(launch: EngineLaunch) -> None:
    _check_texts(launch)
    check_counts(launch, _COUNTS)
    check_counts(launch, ("shutdown_timeout_s",), least=0)
    check_ports(_ports(launch))
    check_transfer(_transfer(launch))
    _check_fabric(launch)
    _check_block_size(launch)
    _check_blocks_hold_longest(launch)
    if launch.enable_auto_tool_choice and launch.tool_call_parser is None:
        raise LaunchError(
            "enable_auto_tool_choice: needs tool_call_parser; 'hermes' is right for ChatML models"
        )


def _check_texts(launch: EngineLaunch) -> None:
    for name in ("model", "served_model_name", "python", "topic", "host"):
        if not getattr(launch, name):
            raise LaunchError(f"{name}: is empty; give it a value")


def _ports(launch: EngineLaunch) -> Iterator[PortRange]:
    yield PortRange("port", launch.port)
    yield PortRange("kv_events_port", launch.kv_events_port, launch.data_parallel)
    yield PortRange("kv_replay_port", launch.kv_replay_port, launch.data_parallel)
    yield from transfer_ports(_transfer(launch))


def _check_fabric(launch: EngineLaunch) -> None:
    if launch.network.nvlink_fabric and launch.device == "cpu":
        raise LaunchError("nvlink_fabric: a CPU has no NVLink; choose device gpu")
    if launch.network.nvlink_fabric and "--enable-sleep-mode" in launch.extra_args:
        raise LaunchError(
            "nvlink_fabric: sleep mode allocates the cache by itself; leave --enable-sleep-mode out"
        )


def _check_block_size(launch: EngineLaunch) -> None:
    size = launch.block_size_tokens
    multiple = CPU_BLOCK_SIZE_MULTIPLE_TOKENS
    if launch.device == "cpu" and size is not None and size % multiple != 0:
        nearest = max(1, round(size / multiple)) * multiple
        raise LaunchError(
            f"block_size_tokens: {size} doesn't work on a CPU; choose a multiple of {multiple},"
            f" such as {nearest}"
        )


def _check_blocks_hold_longest(launch: EngineLaunch) -> None:
    blocks, size = launch.gpu_blocks_override, launch.block_size_tokens
    length = launch.max_model_len_tokens
    if blocks is None or size is None or length is None:
        return
    # The engine keeps one block for itself, and won't start unless the others hold one request of
    # the greatest length ("To serve at least one request with the model's max seq len ...").
    needed = math.ceil(length / size) + 1
    if blocks < needed:
        raise LaunchError(
            f"gpu_blocks_override: {blocks} blocks of {size} tokens can't hold one request of"
            f" max_model_len_tokens = {length}; choose {needed} blocks or more, or a shorter length"
        )


def _check_extra_args(extra_args: tuple[str, ...], arguments: tuple[str, ...]) -> None:
    # vLLM takes the last of two equal flags, so ports or events would silently be others than
    # the ones that the gateway is told.
    ours = {argument for argument in arguments if argument.startswith("--")}
    for argument in extra_args:
        flag = argument.partition("=")[0].replace("_", "-")
        if flag.startswith("--") and flag in ours:
            raise LaunchError(f"extra_args: {flag} is set by the launch itself; leave it out there")
