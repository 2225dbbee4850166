"""`moongate engine …`: vLLM engines, and a Mooncake pool's own processes, with the right flags.

Parses words into launches and starts or prints what the pure builders of `engine_plugins` return.
It needs the standard library only, since it also runs in an engine's environment, where the rest of
the gateway's dependencies are missing.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from moongate.engine_plugins.kv_transfer_launch import (
    Handoff,
    Network,
    PoolMember,
)
from moongate.engine_plugins.launch_command import LaunchCommand, LaunchError, shell_script
from moongate.engine_plugins.option_names import in_options
from moongate.engine_plugins.registrar import (
    LEASE_S_DEFAULT,
    Announcement,
    Announcer,
    check_announcement,
    default_id,
    http_url,
    make_record,
)
from moongate.engine_plugins.store_launch import (
    MasterLaunch,
    StoreLaunch,
    build_master_command,
    build_store_command,
)
from moongate.engine_plugins.supervisor import supervise
from moongate.engine_plugins.vllm_launch import EngineLaunch, build_command

Build = Callable[[argparse.Namespace], LaunchCommand]

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2

SHUTDOWN_TIMEOUT_S = 30
"""What running requests of an announced engine get to end."""

RDMA_DEVICES = Path("/sys/class/infiniband")

_UNITS = {"": 1, "b": 1, "kb": 1024, "mb": 1024**2, "gb": 1024**3, "tb": 1024**4}


def add_engine_commands(commands: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    """Add `engine` and its actions to the command line."""
    engine = commands.add_parser(
        "engine", help="vLLM with the flags that moongate needs, and Mooncake pools"
    )
    actions = engine.add_subparsers(title="actions", required=True, metavar="ACTION")
    for prefix, what, add_arguments, build in (
        ("", "an engine", _add_engine_arguments, _build_engine),
        ("store-", "a process that holds blocks for a pool", _add_store_arguments, _build_store),
        ("master-", "a pool's master", _add_master_arguments, _build_master),
    ):
        for verb, run, text in (
            ("command", _print, f"print the command line, environment and files of {what}"),
            ("serve", _start, f"start {what}"),
        ):
            parser = actions.add_parser(f"{prefix}{verb}", help=text, description=text.capitalize())
            add_arguments(parser)
            if verb == "serve" and build is _build_engine:
                _add_announcement_arguments(parser.add_argument_group("announcing to gateways"))
            parser.set_defaults(command=run, build=build)


# --- words ----------------------------------------------------------------------------------------


def port(text: str) -> int:
    """Parse a TCP port; 0 is one, for "any free one"."""
    if not text.isdigit() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
    return int(text)


def count(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def size_bytes(text: str) -> int:
    """Parse a size with a unit, each 1,024 times the smaller one; without a unit it is bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]?b?)", text.strip().lower())
    if match is None or match[2] in ("k", "m", "g", "t"):
        raise argparse.ArgumentTypeError(f"expected a size such as 512MB or 4GB, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


# --- engines --------------------------------------------------------------------------------------


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    _add_server_arguments(parser.add_argument_group("server"))
    _add_size_arguments(parser.add_argument_group("model and cache"))
    _add_handoff_arguments(parser.add_argument_group("handing prompts over"))
    _add_pool_arguments(parser.add_argument_group("Mooncake pool"))
    network = parser.add_argument_group("network of hand-off and pool")
    _add_network_arguments(network)
    _add_fabric_argument(network)
    parser.add_argument(
        "extra", nargs=argparse.REMAINDER, metavar="-- ARG ...", help="passed on to vLLM"
    )


def _add_server_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model", required=True, help="model directory, or its name on a hub")
    add("--served-model-name", help="name for clients (default: the model's)")
    add("--host", default="127.0.0.1", help="address that HTTP listens on (default: %(default)s)")
    add("--port", type=port, default=8101, help="HTTP port (default: %(default)s)")
    add(
        "--kv-events-port", type=port, default=5601,
        help="port of the KV events, plus the rank's number (default: %(default)s)",
    )  # fmt: skip
    add(
        "--kv-replay-port", type=port, default=6601,
        help="port that sends missed events again, plus the rank's number (default: %(default)s)",
    )  # fmt: skip
    add(
        "--advertise-host", metavar="HOST",
        help="address at which other machines reach this one (default: that of the default route)",
    )  # fmt: skip
    add(
        "--shutdown-timeout", type=int, metavar="S",
        help="what running requests get to end after SIGTERM, in seconds"
        " (default: 30 when announced, else 0)",
    )  # fmt: skip
    add("--python", default=sys.executable, help="interpreter that has vLLM (default: this one)")


def _add_size_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--device", choices=("cpu", "gpu"), default="gpu", help="(default: %(default)s)")
    add(
        "--block-size", type=count, metavar="TOKENS",
        help="tokens a block; on a CPU a multiple of 32 (default: vLLM's)",
    )  # fmt: skip
    add(
        "--max-model-len", type=count, metavar="TOKENS",
        help="longest prompt and answer together, in tokens (default: the model's)",
    )  # fmt: skip
    add("--dtype", help="such as float32 (default: the model's own)")
    add("--threads", type=count, metavar="N", help="CPU only: threads (default: one for each core)")
    for name, meaning in (
        ("tensor", "shards of each layer"),
        ("pipeline", "stages of layers"),
        ("data", "ranks with a cache each"),
    ):
        add(
            f"--{name}-parallel-size", type=count, default=1, metavar="N",
            help=f"{meaning} (default: %(default)s)",
        )  # fmt: skip


def _add_handoff_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--role", choices=("both", "prefill", "decode"), default="both",
        help="prefill engines compute prompts and hand them over to decode engines (default: both)",
    )  # fmt: skip
    add(
        "--kv-connector", choices=("mooncake", "nixl", "none"),
        help="what hands over (default: mooncake for prefill and decode, none for both)",
    )  # fmt: skip
    add(
        "--bootstrap-port", type=port, metavar="PORT",
        help="mooncake, not decode: HTTP port where decode engines ask for addresses"
        " (default: 8998)",
    )  # fmt: skip
    add(
        "--side-channel-port", type=port, metavar="PORT",
        help="nixl: port for hand-shakes, plus the rank's number (default: 5700)",
    )  # fmt: skip
    add(
        "--on-load-failure", choices=("recompute", "fail"), default="recompute",
        help="what becomes of a request whose blocks can't be fetched (default: %(default)s)",
    )  # fmt: skip


def _add_pool_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--pool", action="store_true", help="be a member of a Mooncake pool")
    add(
        "--master", default="127.0.0.1:50051", metavar="HOST:PORT",
        help="the pool's mooncake_master (default: %(default)s)",
    )  # fmt: skip
    add(
        "--pool-mode", choices=("embedded", "standalone-store"), default="embedded",
        help="who holds the blocks: the engine's own processes, with which they die, or store"
        " processes (default: %(default)s)",
    )  # fmt: skip
    add(
        "--segment-size", type=size_bytes, metavar="SIZE",
        help="memory that each rank lends to the pool, such as 512MB"
        " (default: 4GB when embedded, else 0)",
    )  # fmt: skip
    add(
        "--buffer-size", type=size_bytes, default="1GB", metavar="SIZE",
        help="memory of each rank to receive blocks in (default: %(default)s)",
    )  # fmt: skip
    add(
        "--mooncake-config", metavar="FILE",
        help="where the pool's settings are written for vLLM"
        " (default: ~/.cache/moongate/mooncake-PORT.json)",
    )  # fmt: skip
    add(
        "--lookup-id", type=int, metavar="N",
        help="names the engine's look-up socket (vLLM: lookup_rpc_port); engines of one host need"
        " different ones (default: the HTTP port)",
    )  # fmt: skip
    add("--store-offloads", action="store_true", help="the store processes have a disk")
    add("--save-decode-cache", action="store_true", help="put generated blocks too")
    add("--cache-prefix", default="", help="engines share only under the same one (default: none)")
    add("--tenant-id", help="the pool's tenant (default: Mooncake's default tenant)")
    add(
        "--connectors", choices=("stock", "moongate"),
        help="vLLM's connectors, or ours, which also report what the pool gave to each request"
        " (default: moongate with both hand-off by mooncake and a pool, else stock)",
    )  # fmt: skip


def _add_network_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--protocol", choices=("tcp", "rdma"), default="tcp", help="(default: %(default)s)")
    add(
        "--device-name", type=_names, default=(), metavar="NAME[,NAME]",
        help="RDMA devices, such as mlx5_0,mlx5_1 (default: all that are found)",
    )  # fmt: skip


def _add_fabric_argument(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--nvlink-fabric", action="store_true",
        help="with rdma, in a pool: multi-node NVLink in its place",
    )  # fmt: skip


def _add_announcement_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--announce", type=_names, default=(), metavar="URL[,URL]",
        help="gateways that the engine announces itself to (default: none)",
    )  # fmt: skip
    add("--announce-id", metavar="ID", help="the instance's name (default: its address)")
    add(
        "--lease", type=float, default=LEASE_S_DEFAULT, metavar="S",
        help="how long an announcement holds, in seconds; renewed after a third of it"
        " (default: %(default)g)",
    )  # fmt: skip
    add(
        "--weight", type=float, default=1.0, metavar="W",
        help="speed, relative to other instances (default: %(default)g)",
    )  # fmt: skip
    add(
        "--admin-key-env", default="MOONGATE_ADMIN_KEY", metavar="NAME",
        help="environment variable with the gateways' admin key (default: %(default)s)",
    )  # fmt: skip


def _build_engine(options: argparse.Namespace) -> LaunchCommand:
    return build_command(_engine_launch(options))


def _engine_launch(options: argparse.Namespace) -> EngineLaunch:
    name = options.served_model_name or Path(options.model).name
    extra = options.extra[1:] if options.extra[:1] == ["--"] else options.extra
    reached_at = options.advertise_host or options.host
    return EngineLaunch(
        model=options.model,
        served_model_name=name,
        python=options.python,
        host=options.host,
        port=options.port,
        kv_events_port=options.kv_events_port,
        kv_replay_port=options.kv_replay_port,
        topic=f"kv@{reached_at}:{options.port}@{name}",
        device=options.device,
        block_size_tokens=options.block_size,
        max_model_len_tokens=options.max_model_len,
        dtype=options.dtype,
        threads=options.threads,
        tensor_parallel=options.tensor_parallel_size,
        pipeline_parallel=options.pipeline_parallel_size,
        data_parallel=options.data_parallel_size,
        role=options.role,
        handoff=_handoff(options),
        pool=_pool(options),
        network=_network(options),
        connectors=options.connectors,
        on_load_failure=options.on_load_failure,
        advertise_host=options.advertise_host,
        shutdown_timeout_s=_shutdown_timeout_s(options),
        extra_args=tuple(extra),
    )


def _shutdown_timeout_s(options: argparse.Namespace) -> int | None:
    given: int | None = options.shutdown_timeout
    is_announced = bool(getattr(options, "announce", ()))
    # Gateways send nothing more to an engine that has withdrawn, so what it began can end.
    return SHUTDOWN_TIMEOUT_S if given is None and is_announced else given


def _announcer(options: argparse.Namespace) -> Announcer:
    launch = _engine_launch(options)
    host = "127.0.0.1" if launch.host in ("0.0.0.0", "::") else launch.host
    announcement = Announcement(
        gateways=options.announce,
        instance_id=options.announce_id or default_id(launch),
        record=make_record(launch, weight=options.weight),
        health_url=http_url(host, launch.port) + "/health",
        lease_s=options.lease,
        admin_key=os.environ.get(options.admin_key_env),
    )
    check_announcement(announcement)
    return Announcer(announcement)


def _handoff(options: argparse.Namespace) -> Handoff | None:
    connector: Literal["mooncake", "nixl", "none"] = options.kv_connector or (
        "none" if options.role == "both" else "mooncake"
    )
    bootstrap, side_channel = options.bootstrap_port, options.side_channel_port
    if connector == "none":
        for flag, value in (("--bootstrap-port", bootstrap), ("--side-channel-port", side_channel)):
            if value is not None:
                raise LaunchError(f"{flag}: without --kv-connector nothing is handed over")
        return None
    if connector == "mooncake" and options.role != "decode" and bootstrap is None:
        bootstrap = 8998
    if connector == "nixl" and side_channel is None:
        side_channel = 5700
    return Handoff(connector, bootstrap_port=bootstrap, side_channel_port=side_channel)


def _pool(options: argparse.Namespace) -> PoolMember | None:
    if not options.pool:
        for name in _POOL_ONLY:
            if getattr(options, name) not in (None, False, "", "embedded"):
                raise LaunchError(f"--{name.replace('_', '-')}: only with --pool")
        return None
    file = options.mooncake_config
    return PoolMember(
        master=options.master,
        config_file=str(_default_config(options.port) if file is None else file),
        mode=options.pool_mode,
        segment_bytes=options.segment_size,
        buffer_bytes=options.buffer_size,
        lookup_id=options.lookup_id,
        store_offloads=options.store_offloads,
        save_decode_cache=options.save_decode_cache,
        cache_prefix=options.cache_prefix,
        tenant_id=options.tenant_id,
    )


# Not --master and --buffer-size, which have defaults of their own that would look as if given.
_POOL_ONLY = (
    *("pool_mode", "segment_size", "mooncake_config", "lookup_id", "store_offloads"),
    *("save_decode_cache", "cache_prefix", "tenant_id"),
)


def _default_config(http_port: int) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "moongate" / f"mooncake-{http_port}.json"


def _network(options: argparse.Namespace) -> Network:
    return Network(options.protocol, options.device_name, getattr(options, "nvlink_fabric", False))


# --- a pool's own processes -----------------------------------------------------------------------


def _add_store_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--host", default="127.0.0.1",
        help="this machine's address as engines reach it (default: %(default)s)",
    )  # fmt: skip
    add("--port", type=port, default=50052, help="TCP port (default: %(default)s)")
    add(
        "--master", default="127.0.0.1:50051", metavar="HOST:PORT",
        help="the pool's mooncake_master (default: %(default)s)",
    )  # fmt: skip
    add(
        "--segment-size", type=size_bytes, default="4GB", metavar="SIZE",
        help="memory lent to the pool (default: %(default)s)",
    )  # fmt: skip
    add("--disk", metavar="FOLDER", help="existing folder of the disk tier (default: memory only)")
    add(
        "--disk-size", type=size_bytes, metavar="SIZE",
        help="limit of the disk tier (default: Mooncake's)",
    )  # fmt: skip
    add(
        "--disk-buffer-size", type=size_bytes, default="1GB", metavar="SIZE",
        help="memory through which blocks go to the disk and back (default: %(default)s)",
    )  # fmt: skip
    add("--threads", type=count, default=1, metavar="N", help="(default: %(default)s)")
    add("--tenant-id", help="the pool's tenant (default: Mooncake's default tenant)")
    _add_network_arguments(parser.add_argument_group("network"))
    _add_program_argument(parser, "mooncake_client")


def _build_store(options: argparse.Namespace) -> LaunchCommand:
    return build_store_command(
        StoreLaunch(
            program=options.program,
            host=options.host,
            port=options.port,
            master=options.master,
            segment_bytes=options.segment_size,
            network=_network(options),
            disk_folder=options.disk,
            disk_bytes=options.disk_size,
            disk_buffer_bytes=options.disk_buffer_size,
            threads=options.threads,
            tenant_id=options.tenant_id,
        )
    )


def _add_master_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--port", type=port, default=50051, help="TCP port (default: %(default)s)")
    add(
        "--metrics-port", type=port, default=9003,
        help="HTTP port: metrics, and the gateway's look-ups (default: %(default)s)",
    )  # fmt: skip
    add("--store-offloads", action="store_true", help="the store processes have a disk")
    _add_program_argument(parser, "mooncake_master")


def _build_master(options: argparse.Namespace) -> LaunchCommand:
    return build_master_command(
        MasterLaunch(
            program=options.program,
            port=options.port,
            metrics_port=options.metrics_port,
            has_disks=options.store_offloads,
        )
    )


def _add_program_argument(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument(
        "--program", default=name, metavar="PATH",
        help="the Mooncake program (default: %(default)s, as found on PATH)",
    )  # fmt: skip


# --- what is done ---------------------------------------------------------------------------------


def _print(options: argparse.Namespace) -> int:
    build: Build = options.build
    try:
        print(shell_script(build(options), os.environ.get("HOME")))
    except LaunchError as error:
        return _misused(in_options(str(error)))
    return EXIT_OK


def _start(options: argparse.Namespace) -> int:
    build: Build = options.build
    try:
        command = build(options)
        announcer = _announcer(options) if getattr(options, "announce", ()) else None
        _require_devices(options)
    except LaunchError as error:
        return _misused(in_options(str(error)))
    try:
        _write_files(command)
        if announcer is not None:
            return supervise(command.argv, command.environment, announcer)
        # What is started takes this process's place, so that its signals and exit code are its own.
        os.execvpe(command.argv[0], command.argv, {**os.environ, **command.environment})  # noqa: S606
    except OSError as error:
        return _fail(f"{error.filename or command.argv[0]}: {error.strerror}")


def _require_devices(options: argparse.Namespace) -> None:
    """Raises: LaunchError if this machine lacks the RDMA devices; only one that starts needs them."""
    if getattr(options, "protocol", "tcp") != "rdma":
        return
    found = sorted(path.name for path in RDMA_DEVICES.glob("*"))
    if not found:
        raise LaunchError(
            f"--protocol: rdma, but this machine has no RDMA device ({RDMA_DEVICES}); choose tcp"
        )
    for name in options.device_name:
        if name not in found:
            raise LaunchError(f"--device-name: no {name} here; this machine has {', '.join(found)}")


def _write_files(command: LaunchCommand) -> None:
    for name, content in command.files.items():
        file = Path(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_name(f"{file.name}.{os.getpid()}")
        fresh.write_text(content, encoding="utf-8")
        fresh.replace(file)  # never half a file, should another engine read it just now


def _fail(problem: str) -> int:
    print(f"moongate: {problem}", file=sys.stderr)
    return EXIT_FAILED


def _misused(problem: str) -> int:
    print(f"moongate: {problem}", file=sys.stderr)
    return EXIT_USAGE
