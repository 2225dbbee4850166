"""The `moongate` command: parses words, imports a component when its command runs, maps errors to
exit codes (0 done, 1 failed, 2 used wrongly, 141 when nobody reads the output any more)."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from moongate import __version__
from moongate.engine_cli import add_engine_commands
from moongate.engine_cli import count as _count
from moongate.engine_cli import port as _port

if TYPE_CHECKING:
    import httpx

Command = Callable[[argparse.Namespace], int]

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
EXIT_PIPE = 141
"""As of a program that SIGPIPE ends."""

ADMIN_KEY_ENV = "MOONGATE_ADMIN_KEY"
"""Variable with the key for a gateway's /admin, unless another is named."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage of thirty options before it. Commands' parsers
    are of this class too."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        if self._subparsers is not None:
            self._refuse_unknown_options(words)
        return super().parse_known_args(words, namespace)

    def _refuse_unknown_options(self, words: Sequence[str]) -> None:
        """Refuse those before a command's name. argparse takes their values for that name, and
        complains of these."""
        names = {
            name for a in self._actions if a.nargs == argparse.PARSER for name in a.choices or ()
        }
        for word in words:
            if word == "--" or word in names:
                return
            flag = word.partition("=")[0]
            if flag.startswith("--") and not any(
                known.startswith(flag) for known in self._option_string_actions
            ):
                self.error(f"unrecognized arguments: {word}")

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    try:
        try:
            return _run(arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # at the interpreter's end nobody could catch what it raises
    except BrokenPipeError:  # who reads our output wants no more of it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    except KeyboardInterrupt:
        return EXIT_FAILED


def _run(arguments: Sequence[str] | None) -> int:
    options = _make_parser().parse_args(arguments)
    logging.basicConfig(
        level=options.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    for name in ("httpx", "uvicorn.error"):  # these log each health check, and each start and stop
        logging.getLogger(name).setLevel(logging.WARNING)
    command: Command = options.command
    return command(options)


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="moongate",
        description="OpenAI-compatible gateway and cache-aware request router for vLLM.",
    )
    parser.add_argument("--version", action="version", version=f"moongate {__version__}")
    parser.add_argument(
        "--log-level", default="info", choices=("debug", "info", "warning", "error"),
        help="what is logged to standard error (default: info)",
    )  # fmt: skip
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (
        _add_serve, _add_up, _add_check, _add_explain, _add_sim_engine, _add_simulate,
    ):  # fmt: skip
        add(commands)
    add_engine_commands(commands)
    _add_loadtest(commands)
    return parser


Commands = argparse._SubParsersAction  # noqa: SLF001 - argparse has no public name for it


# --- serve, check ---------------------------------------------------------------------------------


def _add_serve(commands: Commands) -> None:  # type: ignore[type-arg]
    parser = commands.add_parser("serve", help="run the gateway")
    parser.add_argument(
        "-c", "--config", type=Path, required=True, help="configuration file (YAML)"
    )
    parser.add_argument("--host", help="address to listen on, in place of the file's listen.host")
    parser.add_argument(
        "--port", type=_port, help="port to listen on, in place of the file's listen.port; 0: any"
    )
    parser.add_argument(
        "--workers", type=_count, default=1, metavar="N",
        help="processes that serve, behind one address (default: 1)",
    )  # fmt: skip
    parser.add_argument("--hub", help=argparse.SUPPRESS)  # of a worker: where it meets the others
    parser.set_defaults(command=_serve)


def _serve(options: argparse.Namespace) -> int:
    from moongate.gateway.config.config_file import ConfigFile
    from moongate.gateway.config.settings_text import SettingsError
    from moongate.gateway.telemetry.logs import use_format

    try:
        loaded = ConfigFile(options.config, host=options.host, port=options.port).load()
    except SettingsError as error:
        return _fail(*error.problems)
    from moongate.gateway import server  # what serves takes a while to import

    use_format(loaded.settings.observability.log_format)
    try:
        if options.workers > 1:
            from moongate.gateway.replicas import workers

            shared = ("-m", "moongate.cli", "--log-level", options.log_level)
            arguments = [*shared, "serve", "-c", str(options.config.absolute())]
            return workers.run(loaded.settings, options.workers, arguments)
        server.run(loaded, options.hub)
    except server.ListenError as error:
        return _fail(str(error))
    return EXIT_OK


def _add_check(commands: Commands) -> None:  # type: ignore[type-arg]
    parser = commands.add_parser("check", help="validate a configuration file")
    parser.add_argument(
        "-c", "--config", type=Path, required=True, help="configuration file (YAML)"
    )
    parser.set_defaults(command=_check)


def _check(options: argparse.Namespace) -> int:
    from moongate.gateway.config.settings_text import SettingsError, load_settings

    try:
        settings = load_settings(options.config)
    except SettingsError as error:
        return _fail(*error.problems)
    names = ", ".join(instance.id for instance in settings.instances)
    told = f"instances {names}" if names else "instances: none (they announce themselves)"
    if settings.discovery.kind == "dns":
        told = f"instances {names or 'none'}, and those that {settings.discovery.name} leads to"
    print(f"{options.config}: ok; policy {settings.policy.name}, {told}")
    return EXIT_OK


# --- up -------------------------------------------------------------------------------------------


def _add_up(commands: Commands) -> None:  # type: ignore[type-arg]
    parser = commands.add_parser(
        "up", help="gateway and engines on this machine, to try it", description="Ctrl-C stops all."
    )
    parser.add_argument(
        "--engines", type=_count, default=3, metavar="N", help="how many engines (default: 3)"
    )
    parser.add_argument(
        "--engine", choices=("sim", "vllm"), default="sim",
        help="simulated engines, or vLLM from .venv-engine (default: sim)",
    )  # fmt: skip
    parser.add_argument(
        "--model", help="model directory (vllm), or one with a tokenizer (sim; default: its own)"
    )
    parser.add_argument(
        "--port", type=_port, default=8000, help="the gateway's port (default: 8000)"
    )
    parser.add_argument("--policy", default="kv_cost", help="routing policy (default: kv_cost)")
    parser.add_argument(
        "--pd", action="store_true", help="simulated engines: one prefills, the others decode"
    )
    parser.add_argument(
        "--script", type=Path, metavar="FILE",
        help="simulated engines: rules for what they answer (docs/simulated-engines.md)",
    )  # fmt: skip
    parser.set_defaults(command=_up)


def _up(options: argparse.Namespace) -> int:
    from moongate import local_stack
    from moongate.gateway.server import ListenError
    from moongate.gateway.telemetry.logs import use_format
    from moongate.router.policy import PolicyError, make_policy
    from moongate.simulator.script import ScriptError

    use_format("text")
    python: str | None = None
    if options.pd and options.engine != "sim":
        return _misused("--pd is for simulated engines")
    if options.script is not None and options.engine != "sim":
        return _misused("--script is for simulated engines")
    if options.pd and options.engines < 2:
        return _misused("--pd needs at least 2 engines: one prefills, the others decode")
    try:
        make_policy(options.policy)
        if options.engine == "vllm":
            if options.model is None:
                return _misused("--engine vllm needs --model DIR")
            python = local_stack.default_engine_python(Path(__file__).parent)
        return local_stack.run(
            local_stack.StackOptions(
                engines=options.engines,
                engine=options.engine,
                port=options.port,
                model=options.model,
                policy=options.policy,
                python=python,
                pd=options.pd,
                script=options.script,
            )
        )
    except PolicyError as error:
        return _misused(str(error))
    except (ListenError, local_stack.StackError) as error:
        return _fail(str(error))
    except ScriptError as error:
        return _fail(*str(error).splitlines())


# --- explain --------------------------------------------------------------------------------------


def _add_explain(commands: Commands) -> None:  # type: ignore[type-arg]
    parser = commands.add_parser("explain", help="why a request would go where, without sending it")
    parser.add_argument(
        "-f", "--file", type=Path, required=True, help="request body (JSON), of any route"
    )
    parser.add_argument(
        "--route", help="the route that it is for, such as /v1/messages (default: by its fields)"
    )
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="gateway (default: http://127.0.0.1:8000)"
    )
    parser.add_argument(
        "--admin-key-env", metavar="NAME",
        help="variable with the gateway's admin key (default: MOONGATE_ADMIN_KEY, if it is set)",
    )  # fmt: skip
    parser.add_argument("--tenant", metavar="NAME", help="whose request it would be")
    parser.add_argument(
        "--session", metavar="KEY",
        help="the session that its client names in x-session-id (default: by its fields)",
    )  # fmt: skip
    parser.add_argument(
        "--ca", type=Path, metavar="FILE", help="roots to trust for an https gateway (PEM)"
    )
    parser.set_defaults(command=_explain)


def _explain(options: argparse.Namespace) -> int:
    import ssl

    import httpx

    from moongate.loadtest.settings import server_root

    try:
        verify = ssl.create_default_context(cafile=options.ca)
    except (OSError, ssl.SSLError) as error:
        return _fail(f"--ca {options.ca}: {error.strerror or error}")
    try:
        body = options.file.read_bytes()
    except OSError as error:
        return _fail(f"{options.file}: {error.strerror}")
    key = os.environ.get(options.admin_key_env or ADMIN_KEY_ENV)
    if options.admin_key_env is not None and not key:
        return _misused(f"--admin-key-env: the variable {options.admin_key_env} is not set")
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    if options.session is not None:
        headers["x-session-id"] = options.session
    url = server_root(options.url)
    try:
        given = {"route": options.route, "tenant": options.tenant}
        answer = httpx.post(
            f"{url}/admin/explain", content=body, timeout=30.0, trust_env=False,
            headers=headers, params={name: value for name, value in given.items() if value},
            verify=verify,
        )  # fmt: skip
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return _fail(f"{options.url}: {error}; is the gateway there? --url says where")
    if answer.status_code != httpx.codes.OK:
        return _fail(f"{options.url} answered {answer.status_code}: {_explanation(answer)}")
    try:
        print(json.dumps(answer.json(), indent=2))
    except ValueError:
        return _fail(f"{options.url} is no gateway: its answer is not JSON")
    return EXIT_OK


def _explanation(answer: httpx.Response) -> str:
    """Return what is wrong in one line, as far as the answer says it."""
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "it is no gateway" if answer.status_code == 404 else answer.reason_phrase
    hint = f"; set {ADMIN_KEY_ENV}, or name another variable with --admin-key-env"
    return message + (hint if answer.status_code == 401 else "")


# --- engines --------------------------------------------------------------------------------------


def _add_sim_engine(commands: Commands) -> None:  # type: ignore[type-arg]
    try:
        from moongate.simulator import server as sim
    except ModuleNotFoundError:
        return  # in an engine's environment, where only `moongate engine` has what it needs

    parser = commands.add_parser(
        "sim-engine", help="one simulated engine: OpenAI HTTP, KV events and metrics as vLLM's"
    )
    sim.add_arguments(parser)
    parser.set_defaults(command=_sim_engine)


def _sim_engine(options: argparse.Namespace) -> int:
    from moongate.simulator import server as sim
    from moongate.simulator.script import ScriptError

    try:
        config = sim.config_from_arguments(options)
    except sim.SimConfigError as error:
        return _misused(str(error))
    except ScriptError as error:
        return _fail(*str(error).splitlines())
    return sim.run(config)


# --- simulate -------------------------------------------------------------------------------------


def _add_simulate(commands: Commands) -> None:  # type: ignore[type-arg]
    parser = commands.add_parser(
        "simulate", help="a fleet in virtual time under several policies, as a table",
        description="Drives the real routing core on recorded or made-up agents' conversations.",
    )  # fmt: skip
    parser.add_argument(
        "--preset", required=True, metavar="NAME",
        help="what is run: paper-12, paper-60, roomy, tight, affinity, ablation, scale-1000 or faults",
    )  # fmt: skip
    parser.add_argument(
        "--traces", type=Path, metavar="DIR",
        help="recorded traces to play (default: conversations made up like Codex')",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=1, help="of all chance (default: 1)")
    parser.add_argument(
        "--minutes", type=float, default=60.0,
        help="virtual minutes of each run; the first third isn't measured (default: 60)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    parser.add_argument(
        "--plots", type=Path, metavar="DIR", help="write plots (SVG) to this folder"
    )
    parser.set_defaults(command=_simulate)


def _simulate(options: argparse.Namespace) -> int:
    from moongate.simulator import command
    from moongate.simulator.presets import PRESETS

    if options.preset not in PRESETS:
        return _misused(f"unknown preset {options.preset!r}; known: {', '.join(PRESETS)}")
    if options.minutes <= 0:
        return _misused(f"--minutes must be more than 0, got {options.minutes}")
    try:
        command.simulate(
            options.preset, seed=options.seed, traces=options.traces, json_file=options.json,
            plots=options.plots, minutes=options.minutes,
        )  # fmt: skip
    except BrokenPipeError:
        raise  # `main` knows what to do
    except (command.SimulateError, OSError) as error:
        return _fail(str(error))
    return EXIT_OK


# --- load -----------------------------------------------------------------------------------------


def _add_loadtest(commands: Commands) -> None:  # type: ignore[type-arg]
    try:
        from moongate.loadtest.commands import add_loadtest_commands
    except ModuleNotFoundError:
        return  # in an engine's environment, as above

    add_loadtest_commands(commands)


# --- failing --------------------------------------------------------------------------------------


def _fail(*problems: str) -> int:
    for problem in problems:
        print(f"moongate: {problem}", file=sys.stderr)
    return EXIT_FAILED


def _misused(problem: str) -> int:
    print(f"moongate: {problem}", file=sys.stderr)
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
