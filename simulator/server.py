"""A simulated engine on real sockets: configuration, lifecycle, and the command line's flags.

Responsible for wiring model, publishers and HTTP together, for binding, and for starting and
stopping in order. Not for behaviour: that is `engine.py` (what is computed), `runner.py` (when) and
`http_api.py` (what is answered).
"""

import argparse
import asyncio
import enum
import logging
import os
import signal
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop
import zmq

from moongate.engine_plugins.vllm_render import ModelDirectoryError, ModelRenderer
from moongate.kvpool.keys import KeyLayout, model_part
from moongate.kvpool.memory import MemoryPool
from moongate.simulator.blocks import DEFAULT_HASH_SEED
from moongate.simulator.debugging import Debugging, ReceivedRequest
from moongate.simulator.engine import EngineModel, EngineProfile, Sampler, make_sampler
from moongate.simulator.event_wire import (
    BUFFER_BATCHES_MAX,
    BatchEncoder,
    DigestForm,
    EventForm,
)
from moongate.simulator.handoff import HOLD_S, LEASE_S, HandoffApi, HandoffTimes, Inbox
from moongate.simulator.http_api import ServedModel, SimApi
from moongate.simulator.openai_wire import Json
from moongate.simulator.pooling import SharedPool
from moongate.simulator.publisher import (
    PUB_QUEUE_BATCHES_MAX,
    EventPublisher,
    PublisherSettings,
)
from moongate.simulator.runner import RankRunner
from moongate.simulator.script import Script, load_script
from moongate.simulator.serving import SocketServer
from moongate.simulator.transfer import Connector, HandoffSettings, Outbox, Role

logger = logging.getLogger(__name__)

BUNDLED_TOKENIZER = Path(__file__).parent / "model"

MODEL_LEN_TOKENS_MAX = 131_072
"""Longest request of a simulated engine whose cache is big enough for it."""

PORT_MAX = 65_535

OUTPUT_TOKEN_IDS_SCANNED = 8192
"""How far into the vocabulary to look for tokens to answer with."""


SCRIPT_HELP = "rules for what chats are answered, YAML or JSON lines: docs/simulated-engines.md (default: none)"


class PoolSegment(enum.Enum):
    """Where what an engine puts into a pool lies."""

    EMBEDDED = "embedded"
    """In the engine's process: it is lost with it."""
    STANDALONE = "standalone"
    """In a process of its own, which outlives engines."""


class SimConfigError(ValueError):
    """A setting no simulated engine can start with; the message says which and why."""


@dataclass(frozen=True, slots=True)
class SimEngineConfig:
    """Everything one simulated engine is started with."""

    profile: EngineProfile = EngineProfile()  # noqa: RUF009 -- frozen, so it may be shared
    host: str = "127.0.0.1"
    port: int = 0
    """0: any free one; so for every port here."""
    role: Role = Role.BOTH
    connector: Connector = Connector.NONE
    bootstrap_port: int = 0
    """Where decoders come to: Mooncake's bootstrap server, or NIXL's side channel. Only an engine that
    prefills has it."""
    transfer_hold_s: float = HOLD_S
    """How long the blocks of a prefill wait for a Mooncake decoder, and a decoder for a prefill."""
    lease_s: float = LEASE_S
    """So for NIXL; a decoder that has the request prolongs it."""
    recomputes_failed_loads: bool = False
    """Whether a request whose KV does not come is computed here; else it fails, vLLM's default."""
    waits_for_nobody: bool = False
    """See `HandoffSettings`."""
    pool_segment: PoolSegment = PoolSegment.EMBEDDED
    model: str = "sim"
    """The name it is served under."""
    tokenizer: Path = BUNDLED_TOKENIZER
    kv_events_port: int | None = None
    """Rank r publishes at this port + r. None: no events."""
    kv_replay_port: int | None = None
    """Rank r answers replays at this port + r. None: no replay."""
    topic: str = ""
    data_parallel_size: int = 1
    data_parallel_start_rank: int = 0
    answer_tokens: int = 128
    """Length of an answer when the request sets no limit."""
    script: Script | None = None
    """What it answers to chats; None, or where no rule holds: any text."""
    hash_seed: str = DEFAULT_HASH_SEED
    """What block digests start from (PYTHONHASHSEED of a real engine)."""
    event_form: EventForm = EventForm.MAP
    digest_form: DigestForm = DigestForm.INT
    has_replay_topic_frame: bool = True

    def __post_init__(self) -> None:
        """Raises SimConfigError."""
        if self.data_parallel_size < 1 or self.data_parallel_start_rank < 0:
            raise SimConfigError("data parallel size must be at least 1, start rank at least 0")
        if self.answer_tokens < 1:
            raise SimConfigError(f"answer tokens must be at least 1, got {self.answer_tokens}")
        if self.kv_events_port is None and self.kv_replay_port is not None:
            raise SimConfigError("a replay port needs an events port")
        if min(self.transfer_hold_s, self.lease_s) <= 0:
            raise SimConfigError("hold time and lease must be more than 0 s")
        if self.role is not Role.BOTH and self.connector is Connector.NONE:
            raise SimConfigError(f"role {self.role.value} needs a connector")
        self._check_ports()

    @property
    def handoffs(self) -> HandoffSettings:
        return HandoffSettings(self.connector, self.role, self.waits_for_nobody)

    @property
    def has_handoff_server(self) -> bool:
        return self.connector is not Connector.NONE and self.role is not Role.DECODE

    @property
    def ranks(self) -> range:
        """The global data-parallel ranks."""
        start = self.data_parallel_start_rank
        return range(start, start + self.data_parallel_size)

    def rank_port(self, base: int | None, rank: int) -> int | None:
        """Return the port of `rank`; 0 stays 0 and None stays None."""
        return base + rank if base else base

    def _check_ports(self) -> None:
        bases = {
            "port": self.port,
            "bootstrap": self.bootstrap_port,
            "events": self.kv_events_port,
            "replay": self.kv_replay_port,
        }
        used: dict[int, str] = {}
        for name, base in bases.items():
            ranks = range(1) if name in ("port", "bootstrap") else self.ranks
            for port in (self.rank_port(base, rank) for rank in ranks):
                if not port:
                    continue
                if not 0 < port <= PORT_MAX:
                    raise SimConfigError(f"{name} port {port} is not between 0 and {PORT_MAX}")
                if port in used:
                    raise SimConfigError(f"port {port} is used twice: {used[port]} and {name}")
                used[port] = name


class SimEngine:
    """One simulated engine in this process.

    `start` binds and serves, and then the addresses are known; `stop` aborts what runs; `crash` ends
    everything as a kill would. Each is called once, on the same event loop.
    """

    def __init__(self, config: SimEngineConfig, pool: MemoryPool | None = None) -> None:
        """`pool`: shared with other engines of this process. Raises SimConfigError."""
        if config.connector is Connector.MULTI and pool is None:
            raise SimConfigError(
                "connector multi needs a pool, and simulated engines share one only in a process"
            )
        if config.connector in (Connector.MOONCAKE, Connector.NIXL) and pool is not None:
            raise SimConfigError(f"connector {config.connector.value} has no pool; multi has")
        self._config = config
        self._pool = pool
        self._times = HandoffTimes(config.transfer_hold_s, config.lease_s)
        self._inbox: Inbox | None = None
        self._servers: list[SocketServer] = []
        self.debugging = Debugging()
        """What it was sent, and faults to inject."""
        self.handoff_api: HandoffApi | None = None
        self.runners: dict[int, RankRunner] = {}
        """By global rank."""
        self.port: int | None = None
        self.bootstrap_port: int | None = None

    @property
    def url(self) -> str:
        assert self.port is not None, "started"
        return f"http://{_reachable(self._config.host)}:{self.port}"

    @property
    def bootstrap_url(self) -> str | None:
        """Where decoders come to; None if this engine does not prefill for others."""
        if self.bootstrap_port is None:
            return None
        return f"http://{_reachable(self._config.host)}:{self.bootstrap_port}"

    @property
    def received(self) -> Sequence[ReceivedRequest]:
        """Return the requests for answers that came, oldest first."""
        return self.debugging.received

    @property
    def pool_endpoint(self) -> str:
        """Return the name of the segment that this engine's blocks are put into."""
        is_embedded = self._config.pool_segment is PoolSegment.EMBEDDED
        return f"{_reachable(self._config.host)}:{self.port}" if is_embedded else "standalone"

    @property
    def kv_events_endpoint(self) -> str | None:
        """Where the first rank publishes, to connect to; None without events."""
        return self.rank_endpoints(self._config.ranks[0])[0]

    @property
    def kv_replay_endpoint(self) -> str | None:
        return self.rank_endpoints(self._config.ranks[0])[1]

    def rank_endpoints(self, rank: int) -> tuple[str | None, str | None]:
        """Return where `rank` publishes and replays, to connect to."""
        publisher = self.runners[rank].publisher
        if publisher is None:
            return None, None
        host = _reachable(self._config.host)
        return _endpoint(host, publisher.port), _endpoint(host, publisher.replay_port)

    async def start(self) -> None:
        """Raises SimConfigError for an unusable tokenizer, OSError for an address in use."""
        config = self._config
        renderer = await asyncio.to_thread(_load_renderer, config.tokenizer)
        sampler = make_sampler(await asyncio.to_thread(output_token_ids, renderer.decode))
        try:
            listener = self._listen(config.port)
            self.port = listener.port
            if config.has_handoff_server:
                handoff_listener = self._listen(config.bootstrap_port)
                self.bootstrap_port = handoff_listener.port
                self.handoff_api = HandoffApi(self.runners, self._handoff_address, self._times)
                handoff_listener.serve(self.handoff_api.app())
            await self._start_ranks(sampler)
        except OSError:
            await self.stop()
            raise
        listener.serve(self._api(renderer).app())

    async def stop(self) -> None:
        """End by itself: what runs is aborted, open connections get a moment to end."""
        # The ranks first: that ends the open streams, for which the server would wait.
        await asyncio.gather(*(runner.stop() for runner in self.runners.values()))
        await asyncio.gather(*(server.stop() for server in self._servers))
        await self._leave()

    async def crash(self) -> None:
        """End as a killed process does: all connections break off at once, whatever is on them."""
        for server in self._servers:
            await server.cut()
        await self.stop()

    async def _leave(self) -> None:
        if self._inbox is not None:
            await self._inbox.close()
        if self._pool is not None and self._config.pool_segment is PoolSegment.EMBEDDED:
            self._pool.remove_endpoint(self.pool_endpoint)

    def _listen(self, port: int) -> SocketServer:
        server = SocketServer(self._config.host, port)
        self._servers.append(server)
        return server

    def _handoff_address(self) -> str:
        return f"{_reachable(self._config.host)}:{self.bootstrap_port}"

    async def _start_ranks(self, sampler: Sampler) -> None:
        """Raises OSError."""
        config = self._config
        if config.connector is not Connector.NONE:
            self._inbox = Inbox(self._times)
        engine_id = str(uuid.uuid4())
        for rank in config.ranks:
            suffix = f"_dp{rank}" if config.data_parallel_size > 1 else ""
            runner = RankRunner(
                rank,
                self._model(sampler),
                self._publisher(rank),
                engine_id=engine_id + suffix,
                outbox=Outbox(self._hold_s) if config.has_handoff_server else None,
                inbox=self._inbox,
            )
            self.runners[rank] = runner
            try:
                await runner.start()
            except zmq.ZMQError as error:
                raise OSError(error.errno, f"cannot bind a KV event socket: {error}") from error

    @property
    def _hold_s(self) -> float:
        is_nixl = self._config.connector is Connector.NIXL
        return self._times.lease_s if is_nixl else self._times.hold_s

    def _model(self, sampler: Sampler) -> EngineModel:
        config = self._config
        return EngineModel(
            config.profile,
            sample_token=sampler,
            hash_seed=config.hash_seed,
            shared_pool=self._shared_pool(),
            has_connector=config.connector is not Connector.NONE,
            recomputes_failed_loads=config.recomputes_failed_loads,
        )

    def _shared_pool(self) -> SharedPool | None:
        if self._pool is None:
            return None
        return SharedPool(
            self._pool,
            KeyLayout(model_part(str(self._config.tokenizer))),
            block_bytes=self._config.profile.block_bytes,
            endpoint=self.pool_endpoint,
            stores=self._config.role is not Role.DECODE,
            # vLLM's MultiConnector does not pass its connectors' store events on.
            publishes=self._config.connector is not Connector.MULTI,
        )

    def kv_event_sources(self) -> Json:
        """Return what `/kv_event_sources` answers: the publisher's settings, by rank."""
        return {
            str(rank): {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": _endpoint("*", runner.publisher.port),
                "replay_endpoint": _endpoint("*", runner.publisher.replay_port),
                "buffer_steps": BUFFER_BATCHES_MAX,
                "hwm": PUB_QUEUE_BATCHES_MAX,
                "max_queue_size": PUB_QUEUE_BATCHES_MAX,
                "topic": self._config.topic,
            }
            for rank, runner in self.runners.items()
            if runner.publisher is not None
        }

    def _publisher(self, rank: int) -> EventPublisher | None:
        config = self._config
        port = config.rank_port(config.kv_events_port, rank)
        if port is None:
            return None
        encoder = BatchEncoder(
            rank=rank,
            block_size_tokens=config.profile.block_size_tokens,
            event_form=config.event_form,
            digest_form=config.digest_form,
        )
        settings = PublisherSettings(
            host=config.host,
            port=port,
            replay_port=config.rank_port(config.kv_replay_port, rank),
            topic=config.topic,
            has_replay_topic_frame=config.has_replay_topic_frame,
        )
        return EventPublisher(settings, encoder)

    def _api(self, renderer: ModelRenderer) -> SimApi:
        config = self._config
        model = ServedModel(
            name=config.model,
            root=str(config.tokenizer),
            max_model_len_tokens=config.profile.max_model_len_tokens,
            answer_tokens=config.answer_tokens,
        )
        return SimApi(
            model,
            renderer,
            self.runners,
            self.kv_event_sources,
            handoffs=config.handoffs,
            handoff_address=(_reachable(config.host), self.bootstrap_port or 0),
            debugging=self.debugging,
            script=config.script,
        )


def output_token_ids(decode: Callable[[Sequence[int]], str]) -> list[int]:
    """Return the tokens that an answer may consist of: whole, printable ASCII text each.

    *Why*: concatenated pieces of a stream must equal the whole answer for any tokenizer, and some
    split a character over several tokens.
    """
    candidates = ((token_id, decode([token_id])) for token_id in range(OUTPUT_TOKEN_IDS_SCANNED))
    ids = [
        token_id for token_id, text in candidates if text and text.isascii() and text.isprintable()
    ]
    if not ids:
        raise SimConfigError("the tokenizer has no printable ASCII tokens to answer with")
    return ids


def _load_renderer(directory: Path) -> ModelRenderer:
    try:
        return ModelRenderer.load(directory)
    except (OSError, ModelDirectoryError) as error:
        raise SimConfigError(f"cannot load the tokenizer in {directory}: {error}") from error


def _reachable(host: str) -> str:
    """Return an address to connect to for one that is bound to."""
    return "127.0.0.1" if host == "0.0.0.0" else host


def _endpoint(host: str, port: int | None) -> str | None:
    return None if port is None else f"tcp://{host}:{port}"


# -- command line -----------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `moongate sim-engine`."""
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to bind, ZMQ too (default %(default)s)")
    add("--port", type=_port, required=True, help="HTTP port; 0 takes any free one")
    add("--model", default="sim", help="served model name (default %(default)s)")
    add("--tokenizer", type=Path, metavar="DIR", help="model directory (default: a small own one)")
    add("--script", type=Path, metavar="FILE", help=SCRIPT_HELP)
    add("--kv-events-port", type=_port, metavar="K", help="ZMQ PUB port, + rank (default: none)")
    add("--kv-replay-port", type=_port, metavar="K", help="ZMQ ROUTER port, + rank (default: none)")
    add("--topic", default="", help="topic of the events (default: empty)")
    for flag, kind, default, meaning in _number_flags(EngineProfile()):
        add(flag, type=kind, default=default, metavar="N", help=f"{meaning} (default %(default)s)")
    add(
        "--role",
        choices=[role.value for role in Role],
        default="both",
        help="what it does of requests that two engines share (default %(default)s)",
    )
    add(
        "--kv-connector",
        choices=[connector.value for connector in Connector],
        help="how they share: multi (a pool, too) only in process (default: mooncake with a role)",
    )
    add(
        "--bootstrap-port",
        type=_port,
        default=0,
        metavar="P",
        help="Mooncake's bootstrap server or NIXL's side channel (default: any free one)",
    )
    add(
        "--data-parallel-start-rank",
        type=int,
        default=0,
        metavar="N",
        help="global number of the first rank (default %(default)s)",
    )


def _number_flags(
    profile: EngineProfile,
) -> list[tuple[str, Callable[[str], float], float, str]]:
    """Return flag, type, default and meaning of the flags whose value must be above zero."""
    whole, rate = _positive(int, "a whole number"), _positive(float, "a number")
    return [
        ("--blocks", whole, profile.blocks, "KV blocks per rank, one of them unusable"),
        ("--block-size", whole, profile.block_size_tokens, "tokens in a block"),
        (
            "--prefill-tokens-per-s",
            rate,
            profile.prefill_tokens_per_s,
            "prompt tokens computed per second",
        ),
        (
            "--decode-tokens-per-s",
            rate,
            profile.decode_tokens_per_s,
            "tokens per second of each decoding request",
        ),
        ("--max-num-seqs", whole, profile.max_num_seqs, "running requests at most"),
        ("--data-parallel-size", whole, 1, "ranks, each with its own cache and publisher"),
        ("--kv-bytes-per-token", whole, profile.kv_bytes_per_token, "bytes of KV of one token"),
        (
            "--kv-link-bytes-per-s",
            rate,
            profile.kv_link_bytes_per_s,
            "bytes of KV per second from another engine",
        ),
        ("--transfer-hold-s", rate, HOLD_S, "seconds that a prefill's blocks wait for a decoder"),
    ]


def config_from_arguments(namespace: argparse.Namespace) -> SimEngineConfig:
    """Return the configuration. Raises SimConfigError, for which a command exits with 2; ScriptError.

    The longest request follows from the cache, up to `MODEL_LEN_TOKENS_MAX`; digests start from
    PYTHONHASHSEED when it is set, as in a real engine.
    """
    capacity_tokens = (namespace.blocks - 1) * namespace.block_size
    if capacity_tokens < 2:
        raise SimConfigError("--blocks and --block-size leave no room for a prompt and an answer")
    try:
        profile = EngineProfile(
            blocks=namespace.blocks,
            block_size_tokens=namespace.block_size,
            prefill_tokens_per_s=namespace.prefill_tokens_per_s,
            decode_tokens_per_s=namespace.decode_tokens_per_s,
            max_num_seqs=namespace.max_num_seqs,
            max_model_len_tokens=min(MODEL_LEN_TOKENS_MAX, capacity_tokens),
            kv_bytes_per_token=namespace.kv_bytes_per_token,
            kv_link_bytes_per_s=namespace.kv_link_bytes_per_s,
        )
    except ValueError as error:
        raise SimConfigError(str(error)) from error
    role = Role(namespace.role)
    default = Connector.NONE if role is Role.BOTH else Connector.MOONCAKE
    connector = Connector(namespace.kv_connector) if namespace.kv_connector else default
    if connector is Connector.MULTI:
        raise SimConfigError(
            "--kv-connector multi needs a pool, which engines share only in process"
        )
    return SimEngineConfig(
        profile=profile,
        role=role,
        connector=connector,
        bootstrap_port=namespace.bootstrap_port,
        transfer_hold_s=namespace.transfer_hold_s,
        host=namespace.host,
        port=namespace.port,
        model=namespace.model,
        tokenizer=namespace.tokenizer or BUNDLED_TOKENIZER,
        kv_events_port=namespace.kv_events_port,
        kv_replay_port=namespace.kv_replay_port,
        topic=namespace.topic,
        data_parallel_size=namespace.data_parallel_size,
        data_parallel_start_rank=namespace.data_parallel_start_rank,
        hash_seed=os.environ.get("PYTHONHASHSEED", DEFAULT_HASH_SEED),
        script=None if namespace.script is None else load_script(namespace.script),
    )


def run(config: SimEngineConfig) -> int:
    """Serve until SIGINT or SIGTERM; return the exit code (1: an address in use, 2: bad value)."""
    return uvloop.run(_run_until_signal(config))


async def _run_until_signal(config: SimEngineConfig) -> int:
    engine, signalled = SimEngine(config), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, signalled.set)
    try:
        await engine.start()
    except (OSError, SimConfigError) as error:
        print(f"sim-engine: {error}", file=sys.stderr)
        return 2 if isinstance(error, SimConfigError) else 1
    decoders = f", for decoders {engine.bootstrap_url}" if engine.bootstrap_url else ""
    print(f"sim-engine: {config.model} at {engine.url}{decoders}", flush=True)
    await signalled.wait()
    await engine.stop()
    return 0


def _positive(kind: Callable[[str], float], what: str) -> Callable[[str], float]:
    """Return an argparse type for numbers above zero."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be more than 0, got {text}")
        return value

    return parse


def _port(text: str) -> int:
    """Parse a port, 0 included."""
    if not text.isdecimal() or int(text) > PORT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (0 to {PORT_MAX})")
    return int(text)
