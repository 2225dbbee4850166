"""The command line and environment with which a vLLM engine does what the router needs.

Responsible for one instance of role `both`: KV events with replay, a fixed hash seed, prefix
caching and cached-token counts in `usage`. It is pure: it starts nothing, reads no file, and never
imports vLLM; the caller runs the result or prints it. It isn't responsible for free ports or for
whether the model exists; it refuses only what no machine could start.

Source: the flags and variables of vLLM 0.32.0, each tried on the CPU build.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Device = Literal["cpu", "gpu"]

# The `vllm` command fails in the CPU build, whose distribution has another name ("No package
# metadata was found for vllm"); the module works in both builds.
SERVER_MODULE = "vllm.entrypoints.openai.api_server"

CPU_BLOCK_SIZE_MULTIPLE_TOKENS = 32  # The CPU attention kernels take no other block sizes.
PORT_MAX = 65_535


class LaunchError(ValueError):
    """A launch that no engine could start from; the text names the field and a right value."""


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
    """ZMQ PUB. It listens on all interfaces: vLLM would *connect* to any address without `*`."""
    kv_replay_port: int
    """ZMQ ROUTER that sends missed event batches again."""
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
    extra_args: tuple[str, ...] = ()
    """Passed on unchanged, after everything else."""


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """What to run, and the environment variables to add to the caller's own."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]


def build_command(launch: EngineLaunch) -> LaunchCommand:
    """Return the command that starts `launch`.

    Raises: `LaunchError` for a launch that cannot work.
    """
    _check(launch)
    arguments = tuple(_arguments(launch))
    _check_extra_args(launch.extra_args, arguments)
    argv = (launch.python, "-m", SERVER_MODULE, *arguments, *launch.extra_args)
    return LaunchCommand(argv=argv, environment=_environment(launch))


def shell_line(command: LaunchCommand) -> str:
    """Return `command` as one line to paste into a POSIX shell."""
    assignments = [f"{name}={shlex.quote(value)}" for name, value in command.environment.items()]
    return " ".join([*assignments, shlex.join(command.argv)])


def _arguments(launch: EngineLaunch) -> Iterator[str]:
    yield from ("--model", launch.model, "--served-model-name", launch.served_model_name)
    yield from ("--host", launch.host, "--port", str(launch.port))
    if launch.dtype is not None:
        yield from ("--dtype", launch.dtype)
    if launch.max_model_len_tokens is not None:
        yield from ("--max-model-len", str(launch.max_model_len_tokens))
    yield from _cache_arguments(launch)
    if launch.device == "cpu":
        # Compiling takes longer than it saves here, and would need a compiler at run time.
        yield "--enforce-eager"
    if launch.prompt_tokens_details:
        yield "--enable-prompt-tokens-details"
    if launch.enable_auto_tool_choice:
        yield "--enable-auto-tool-choice"
    if launch.tool_call_parser is not None:
        yield from ("--tool-call-parser", launch.tool_call_parser)


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
    yield from ("--kv-events-config", json.dumps(events, separators=(",", ":")))


def _environment(launch: EngineLaunch) -> dict[str, str]:
    environment = {
        # Block hashes start from this seed; engines that share a pool need the same one.
        "PYTHONHASHSEED": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if launch.model.startswith(("/", "./", "../")):
        # A model directory is complete: asking a hub about it only delays the start.
        environment["HF_HUB_OFFLINE"] = "1"
    if launch.device == "cpu":
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(launch.kv_cache_space_gib)
        if launch.threads is not None:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            environment["OMP_NUM_THREADS"] = str(launch.threads)
    return environment


def _check(launch: EngineLaunch) -> None:
    _check_texts(launch)
    _check_ports(launch)
    _check_counts(launch)
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


def _check_ports(launch: EngineLaunch) -> None:
    taken: dict[int, str] = {}
    for name in ("port", "kv_events_port", "kv_replay_port"):
        port: int = getattr(launch, name)
        if not 1 <= port <= PORT_MAX:
            raise LaunchError(f"{name}: {port} is not a port; choose one from 1 to {PORT_MAX}")
        if port in taken:
            raise LaunchError(
                f"{name}: {port} is already {taken[port]}; choose three different ports"
            )
        taken[port] = name


def _check_counts(launch: EngineLaunch) -> None:
    for name in (
        "block_size_tokens",
        "max_model_len_tokens",
        "gpu_blocks_override",
        "kv_cache_space_gib",
        "threads",
    ):
        count: int | None = getattr(launch, name)
        if count is not None and count < 1:
            raise LaunchError(f"{name}: {count} is too small; choose 1 or more")


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
            raise LaunchError(f"extra_args: {flag} is set already; use the launch's own field")
