"""`moongate loadtest`: parses words, runs, prints."""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moongate.loadtest.records import NOT_SENT, TurnRecord
from moongate.loadtest.settings import (
    DEFAULT_URL,
    add_workload_arguments,
    check_first_prompt,
    duration,
    positive_float,
    settings_from,
    whole,
)
from moongate.loadtest.traces import TraceError

if TYPE_CHECKING:
    from moongate.loadtest.running import RunOptions

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2

DEFAULT_POLICIES = ("round_robin", "least_loaded", "session_hash", "prefix_affinity", "kv_cost")
DEFAULT_USERS = 20
DEFAULT_DURATION_S = 60.0
SPAWN_S = 5.0
"""Unless told otherwise, users arrive within this."""
POLICY_DURATION_S = 110.0
"""With the default policies and their stacks' start and end, a comparison takes ten minutes."""

SEED_BELOW = 1_000_000
PORT_MAX = 65_535

Run = Callable[[argparse.Namespace], int]

DESCRIPTION = (
    "Send the turns of many agents to a gateway, or to any server with OpenAI's chat completions, and "
    "measure each from outside: time to first token (TTFT), time between tokens (ITL), reused tokens, "
    "and which instance answered why. Without --rate users wait for their answers (closed loop)."
)


def add_loadtest_commands(commands: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    """Add `loadtest` and its actions to the command line."""
    parser = commands.add_parser(
        "loadtest", help="load a gateway with agent sessions or traces, and report", description=DESCRIPTION
    )  # fmt: skip
    parser.add_argument("--url", default=DEFAULT_URL, help=f"server (default: {DEFAULT_URL})")
    _add_run_arguments(parser, DEFAULT_DURATION_S)
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="variable with the server's API key (default: no key)"
    )
    parser.add_argument(
        "--ca", type=Path, metavar="FILE", help="roots to trust for an https server (PEM)"
    )
    parser.add_argument(
        "--web", action="store_true",
        help="with locust's web UI, to watch the run and change its users",
    )  # fmt: skip
    parser.add_argument(
        "--web-port", type=whole(1, PORT_MAX), default=8089, metavar="PORT",
        help="port of the web UI, on 127.0.0.1 (default: 8089)",
    )  # fmt: skip
    parser.set_defaults(command=_guarded(_run))
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    _add_compare(actions)
    _add_policies(actions)


def _add_run_arguments(parser: argparse.ArgumentParser, duration_s: float) -> None:
    parser.add_argument(
        "--users", type=whole(1), default=DEFAULT_USERS, metavar="N",
        help=f"clients at a time, each with one conversation after the other (default: {DEFAULT_USERS})",
    )  # fmt: skip
    parser.add_argument(
        "--spawn-rate", type=positive_float, metavar="R",
        help=f"users that arrive per second (default: all within {SPAWN_S:g} s)",
    )  # fmt: skip
    parser.add_argument(
        "--duration", type=duration, default=duration_s, metavar="T",
        help=f"how long turns are sent: 90, 60s, 10m, 1h30m (default: {duration_s:g}s); turns under way "
        "then are waited for",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, metavar="DIR",
        help="folder for report.json, requests.csv and report.html (default: one named by the time)",
    )  # fmt: skip
    add_workload_arguments(parser)


def _run(options: argparse.Namespace) -> int:
    from moongate.loadtest import running
    from moongate.loadtest.policies import default_out
    from moongate.loadtest.tables import format_run

    run_options = _run_options(options, options.out or default_out("run"))
    if options.web:
        running.check_web_port(options.web_port)
        print(f"locust's web UI: http://127.0.0.1:{options.web_port}", flush=True)
    report, records = running.run(run_options)
    print(format_run(report))
    print("\n" + "\n".join(str(file) for file in running.list_files(run_options.out)))
    if report["requests"] == report["failures"]:
        return _fail(_why_none(records))
    return EXIT_OK


def _why_none(records: Sequence[TurnRecord]) -> str:
    failures = [
        f"{record.outcome}, {record.error}" if record.error else record.outcome
        for record in records
        if record.outcome != NOT_SENT
    ]
    if not failures:
        return "no turn was sent"
    [(failure, count)] = Counter(failures).most_common(1)
    return f"no turn succeeded; {count} of {len(failures)}: {failure}"


def _run_options(options: argparse.Namespace, out: Path) -> RunOptions:
    """Return a run's options. Raises: _Misused."""
    from moongate.loadtest.running import RunOptions

    try:
        settings = settings_from(options, seed=secrets.randbelow(SEED_BELOW))
        check_first_prompt(settings)
    except ValueError as error:
        raise _Misused(str(error)) from error
    return RunOptions(
        url=getattr(options, "url", DEFAULT_URL),
        settings=settings,
        users=options.users,
        spawn_rate=options.spawn_rate or max(options.users / SPAWN_S, 1.0),
        duration_s=options.duration,
        out=out,
        api_key_env=getattr(options, "api_key_env", None),
        ca=getattr(options, "ca", None),
        web_port=options.web_port if getattr(options, "web", False) else None,
    )


# --- compare --------------------------------------------------------------------------------------


def _add_compare(actions: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    parser = actions.add_parser("compare", help="runs side by side: a table and a page")
    parser.add_argument("runs", type=Path, nargs="+", metavar="DIR", help="folders of earlier runs")
    parser.add_argument(
        "--out", type=Path, dest="page", metavar="FILE", help="page to write (default: none)"
    )
    parser.set_defaults(command=_guarded(_compare))


def _compare(options: argparse.Namespace) -> int:
    from moongate.loadtest.pages import comparison_page
    from moongate.loadtest.running import LoadTestError, read_run
    from moongate.loadtest.tables import comparison_table, difference_warning, facts

    if len(options.runs) < 2:
        raise _Misused("compare needs at least two runs")
    runs = {str(folder): read_run(folder) for folder in options.runs}
    if len(runs) < len(options.runs):
        raise _Misused("compare: a run is named twice")
    reports = {name: report for name, (report, _) in runs.items()}
    print(comparison_table(reports))
    print("\n" + "\n".join(f"{name}: {facts(report)}" for name, report in reports.items()))
    if warning := difference_warning(reports):
        print(f"\n! {warning}")
    if options.page is not None:
        page = comparison_page(reports, {name: records for name, (_, records) in runs.items()})
        try:
            options.page.write_text(page, encoding="utf-8")
        except OSError as error:
            raise LoadTestError(f"--out {options.page}: {error.strerror}") from error
        print(f"\n{options.page}")
    return EXIT_OK


# --- policies -------------------------------------------------------------------------------------


def _add_policies(actions: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    parser = actions.add_parser(
        "policies",
        help="start a stack for each policy (`moongate up`), load it, and compare",
        description="Each policy gets a stack of its own and the same load: same seed, same texts.",
    )
    parser.add_argument(
        "--policies", default=",".join(DEFAULT_POLICIES), metavar="A,B,…",
        help=f"routing policies (default: {', '.join(DEFAULT_POLICIES)}; ten minutes with the default "
        "duration)",
    )  # fmt: skip
    parser.add_argument(
        "--engines", type=whole(1), default=3, metavar="N", help="engines of a stack (default: 3)"
    )
    parser.add_argument(
        "--engine", choices=("sim", "vllm"), default="sim",
        help="simulated engines or real ones (default: sim)",
    )  # fmt: skip
    parser.add_argument("--engine-model", metavar="DIR", help="vllm: the model's directory")
    parser.add_argument(
        "--port", type=whole(0, PORT_MAX), default=0, metavar="PORT",
        help="port of the gateways, one after the other; 0: any that is free (default: 0)",
    )  # fmt: skip
    _add_run_arguments(parser, POLICY_DURATION_S)
    parser.set_defaults(command=_guarded(_policies))


def _check_policies(names: Sequence[str]) -> None:
    """Raises: _Misused for a name that no built-in policy has. One's own `up` loads, or refuses."""
    from moongate.router.policy import PolicyError, make_policy

    for name in names:
        if ":" not in name:
            try:
                make_policy(name)
            except PolicyError as error:
                raise _Misused(f"--policies: {error}") from error


def _policies(options: argparse.Namespace) -> int:
    from moongate.loadtest.policies import compare_policies, default_out
    from moongate.loadtest.tables import comparison_table

    names = [name.strip() for name in options.policies.split(",") if name.strip()]
    if not names:
        raise _Misused("--policies: name at least one policy")
    if len(set(names)) < len(names):
        raise _Misused(f"--policies {options.policies}: name each policy once")
    _check_policies(names)
    if options.engine == "vllm" and options.engine_model is None:
        raise _Misused("--engine vllm needs --engine-model DIR")
    run_options = _run_options(options, options.out or default_out("policies"))
    up_words = ["--engines", str(options.engines), "--engine", options.engine]
    if options.engine_model is not None:
        up_words += ["--model", options.engine_model]
    reports = compare_policies(names, run_options, up_words, options.port)
    preset = run_options.settings.preset
    print(f"\n{preset.value}, {_load(run_options.users, run_options.settings.rate_per_s)}, "
          f"{run_options.duration_s:g} s each, seed {run_options.settings.seed}\n")  # fmt: skip
    print(comparison_table(reports, is_short=True))
    for name, report in reports.items():
        for warning in report["warnings"]:
            print(f"! {name}: {warning}")
    print(f"\n{run_options.out / 'comparison.html'}")
    if any(report["requests"] == report["failures"] for report in reports.values()):
        return _fail("a policy has no turn that succeeded")
    return EXIT_OK


def _load(users: int, rate_per_s: float | None) -> str:
    return (
        f"{users} users" if rate_per_s is None else f"{rate_per_s:g} conversations begun per second"
    )


# --- failing --------------------------------------------------------------------------------------


class _Misused(Exception):
    """The words don't fit together."""


def _guarded(run: Run) -> Run:
    """Return the command with its troubles as exit codes."""

    def guarded(options: argparse.Namespace) -> int:
        from moongate.loadtest.probing import ProbeError
        from moongate.loadtest.running import LoadTestError

        signal.signal(signal.SIGTERM, _terminate)
        try:
            return run(options)
        except _Misused as error:
            print(f"moongate: {error}", file=sys.stderr)
            return EXIT_USAGE
        except (LoadTestError, ProbeError, TraceError) as error:
            return _fail(str(error))

    return guarded


def _terminate(number: int, _: object) -> None:
    """End as by an exception, so that no process that was started is left behind."""
    raise SystemExit(128 + number)


def _fail(problem: str) -> int:
    print(f"moongate: {problem}", file=sys.stderr)
    return EXIT_FAILED
