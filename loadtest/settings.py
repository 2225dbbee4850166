"""What a load is made of, and the options that say so, for the command and for locust alike.

Pure: `moongate loadtest` and the locustfile offer the same options from one table, so that
`locust -f` on several machines can run what the command runs on one.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any

from moongate.loadtest.traces import TraceFormat
from moongate.loadtest.words import SIMULATED_COSTS, TokenCosts

ENVIRONMENT_PREFIX = "MOONGATE_LOADTEST_"

DEFAULT_URL = "http://127.0.0.1:8000"
ROUTE = "/v1/chat/completions"
"""What turns are sent to, below the server's address."""
CONTEXT_TOKENS_MAX = 120_000
SHARED_PROMPTS = 4


def server_root(url: str) -> str:
    """Return a server's address without what clients add to it."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class Preset(Enum):
    AGENTS = "agents"
    TRACE = "trace"
    SHARED_PROMPT = "shared-prompt"
    COLD_BURST = "cold-burst"


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes and times of a preset's conversations. Tokens are the model's, times seconds."""

    system_tokens: int
    first_tokens: int
    turn_tokens: int
    answer_tokens: int
    turns: int
    think_s: float


SHAPES = {
    # Coding agents as published (see docs/loadtest.md), but for shorter answers: those that a laptop's
    # simulated engines can stream to fifty users.
    Preset.AGENTS: Shape(10_000, 2_000, 2_242, 100, 33, 5.2),
    # Sizes come from the trace; answers are cut at this length.
    Preset.TRACE: Shape(0, 0, 0, 100, 0, 0.0),
    Preset.SHARED_PROMPT: Shape(8_000, 200, 0, 50, 1, 1.0),
    # The system prompt is a burst's own; `think_s` is the time between bursts.
    Preset.COLD_BURST: Shape(8_000, 100, 0, 16, 1, 10.0),
}


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    """Everything that decides what is sent, in what order, and when. The same settings and seed make
    the same load, up to the model's answers."""

    preset: Preset
    seed: int
    shape: Shape
    rate_per_s: float | None = None
    """Open loop: conversations begun per second. None: closed loop, as many as there are users."""
    model: str = ""
    context_tokens_max: int = CONTEXT_TOKENS_MAX
    """A conversation ends before a prompt would be longer."""
    shared_prompts: int = SHARED_PROMPTS
    """Preset shared-prompt: how many system prompts there are."""
    has_tools: bool = True
    shares_system: bool = True
    """Conversations have system prompt and tools in common."""
    sends_session_ids: bool = True
    traces: Path | None = None
    trace_format: TraceFormat | None = None
    speed: float = 1.0
    """Preset trace: recorded pauses are so many times as short."""
    costs: TokenCosts = SIMULATED_COSTS
    ignores_eos: bool = True
    """Answers have their full length (`ignore_eos`, which not every server knows)."""


# --- options --------------------------------------------------------------------------------------


def duration(text: str) -> float:
    """Return seconds from `90`, `60s`, `10m`, `1h30m`. Raises ArgumentTypeError."""
    found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", text.strip())
    if found is None or not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is no duration, such as 60s, 10m or 1h30m")
    hours, minutes, seconds = (float(part or 0) for part in found.groups())
    total = hours * 3600 + minutes * 60 + seconds
    if total <= 0:
        raise argparse.ArgumentTypeError("a duration must be more than 0")
    return total


def positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number greater than 0")
    return value


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a parser of whole numbers from `least` to `most`; None: without end."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        if most is not None and value > most:
            raise argparse.ArgumentTypeError(f"must be at most {most}, got {value}")
        return value

    return parse


def _costs(text: str) -> TokenCosts:
    try:
        per_word, *others = text.split(",")
        message, answer, request, tools = map(int, others)
        return TokenCosts(float(per_word), message, answer, request, tools)
    except ValueError:
        names = "WORD,MESSAGE,ANSWER,REQUEST,TOOLS"
        raise argparse.ArgumentTypeError(f"{text!r} is not {names}") from None


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a load."""

    flag: str
    help: str
    parse: Callable[[str], Any] | None = None  # None: a flag without a value
    metavar: str | None = None
    choices: Sequence[str] | None = None

    @property
    def name(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")


def _defaults(field: str, unit: str) -> str:
    told = ", ".join(
        f"{preset.value} {getattr(shape, field):g}"
        for preset, shape in SHAPES.items()
        if getattr(shape, field)
    )
    return f"{unit} (default: {told})"


OPTIONS: tuple[Option, ...] = (
    Option("--preset", "what to send: agents (multi-turn, growing history), trace (recorded), "
           "shared-prompt (short questions to a few long system prompts), cold-burst (many at once "
           "with a prefix nobody has) (default: agents)", str, choices=[p.value for p in Preset]),
    Option("--rate", "open loop: begin R conversations per second (of the presets other than agents "
           "and agentic traces each is one turn), at random times that don't wait for the server; "
           "--users is not used then", positive_float, "R"),
    Option("--seed", "makes the same texts, lengths, pauses and arrivals again (default: a new one, "
           "which the report tells)", whole(0), "N"),
    Option("--model", "model to ask for (default: the first of /v1/models)", str),
    Option("--system-tokens", _defaults("system_tokens", "tools and system prompt, in tokens"),
           whole(0), "N"),
    Option("--first-tokens", _defaults("first_tokens", "a conversation's first message, in tokens"),
           whole(1), "N"),
    Option("--turn-tokens", _defaults("turn_tokens", "mean growth of a prompt per turn, answer "
           "included, in tokens"), whole(1), "N"),
    Option("--answer-tokens", _defaults("answer_tokens", "length of answers, in tokens; for traces "
           "at most"), whole(1), "N"),
    Option("--turns", _defaults("turns", "median turns of a conversation"), whole(1), "N"),
    Option("--think", _defaults("think_s", "median pause before a turn in seconds; for cold-burst "
           "the time between bursts"), positive_float, "S"),
    Option("--context-max", "a conversation ends before its prompt is longer than this many tokens "
           f"(default: {CONTEXT_TOKENS_MAX})", whole(1), "N"),
    Option("--shared-prompts", f"shared-prompt: how many system prompts (default: {SHARED_PROMPTS})",
           whole(1), "N"),
    Option("--no-tools", "agents: offer no tools; what they return comes as the user's message"),
    Option("--own-system", "system prompts and tools are each conversation's own, instead of shared; "
           "for agentic traces what the ids say"),
    Option("--no-session-ids", "send no x-session-id"),
    Option("--traces", "trace: folder or file (formats: docs/loadtest.md)", Path, "DIR"),
    Option("--trace-format", "trace: which to take where there are several (default: the first of "
           "agentic, mooncake, messages)", str, choices=[f.value for f in TraceFormat]),
    Option("--speed", "trace: recorded pauses pass X times as fast (default: 1)", positive_float, "X"),
)  # fmt: skip

INTERNAL_OPTIONS: tuple[Option, ...] = (
    Option("--token-costs", "what the model's prompts take beside words, as measured by `moongate "
           "loadtest`: tokens a word, a message, an assistant's message, a request, for the tools", _costs, "W,M,A,R,T"),
    Option("--no-ignore-eos", "the server doesn't know ignore_eos: answers may end early"),
)  # fmt: skip


def add_workload_arguments(
    parser: Any, options: Sequence[Option] = OPTIONS, *, for_locust: bool = False
) -> None:
    """Add the options to an argparse parser, or to locust's, which reads environment variables too."""
    for option in options:
        extra: dict[str, Any] = {"dest": option.name, "help": option.help.replace("%", "%%")}
        if for_locust:
            extra |= {
                "env_var": ENVIRONMENT_PREFIX + option.name.upper(),
                "include_in_web_ui": False,
            }
        if option.parse is None:
            extra |= {"action": "store_true"}
        else:
            extra |= {"type": option.parse, "metavar": option.metavar, "choices": option.choices}
        parser.add_argument(option.flag, **extra)


def settings_from(options: argparse.Namespace, *, seed: int) -> WorkloadSettings:
    """Return the settings that parsed options say; `seed` counts where they have none.

    Raises: ValueError for options that don't fit together.
    """
    preset = Preset(options.preset or Preset.AGENTS.value)
    if preset is Preset.TRACE and options.traces is None:
        raise ValueError("--preset trace needs --traces DIR")
    if preset is not Preset.TRACE and options.traces is not None:
        raise ValueError("--traces: only with --preset trace")
    return WorkloadSettings(
        preset=preset,
        seed=seed if options.seed is None else options.seed,
        shape=_shape_from(options, SHAPES[preset]),
        rate_per_s=options.rate,
        model=options.model or "",
        context_tokens_max=options.context_max or CONTEXT_TOKENS_MAX,
        shared_prompts=options.shared_prompts or SHARED_PROMPTS,
        has_tools=not options.no_tools,
        shares_system=not options.own_system,
        sends_session_ids=not options.no_session_ids,
        traces=options.traces,
        trace_format=TraceFormat(options.trace_format) if options.trace_format else None,
        speed=options.speed or 1.0,
        costs=getattr(options, "token_costs", None) or SIMULATED_COSTS,
        ignores_eos=not getattr(options, "no_ignore_eos", False),
    )


def check_first_prompt(settings: WorkloadSettings) -> None:
    """Raises: ValueError if agents' first prompts are already too long, so that nothing would be sent."""
    tokens = settings.shape.system_tokens + settings.shape.first_tokens
    if settings.preset is Preset.AGENTS and tokens > settings.context_tokens_max:
        raise ValueError(
            f"--context-max {settings.context_tokens_max}: nothing would be sent, since first prompts "
            f"have {tokens} tokens (--system-tokens and --first-tokens)"
        )


def _shape_from(options: argparse.Namespace, default: Shape) -> Shape:
    given = {
        field.name: getattr(options, "think" if field.name == "think_s" else field.name)
        for field in fields(Shape)
    }
    return Shape(**{
        name: getattr(default, name) if value is None else value for name, value in given.items()
    })  # fmt: skip


def words_of(settings: WorkloadSettings) -> Iterator[str]:
    """Yield the command-line words that make these settings again."""
    shape, costs = settings.shape, settings.costs
    values: dict[str, Any] = {
        "--preset": settings.preset.value,
        "--seed": settings.seed,
        "--rate": settings.rate_per_s,
        "--model": settings.model or None,
        "--system-tokens": shape.system_tokens,
        "--first-tokens": shape.first_tokens or None,
        "--turn-tokens": shape.turn_tokens or None,
        "--answer-tokens": shape.answer_tokens,
        "--turns": shape.turns or None,
        "--think": shape.think_s or None,
        "--context-max": settings.context_tokens_max,
        "--shared-prompts": settings.shared_prompts,
        "--traces": settings.traces,
        "--trace-format": settings.trace_format.value if settings.trace_format else None,
        "--speed": settings.speed,
        "--token-costs": ",".join(str(value) for value in astuple(costs)),
    }  # fmt: skip
    for flag, value in values.items():
        if value is not None:
            yield from (flag, str(value))
    flags = {
        "--no-tools": not settings.has_tools,
        "--own-system": not settings.shares_system,
        "--no-session-ids": not settings.sends_session_ids,
        "--no-ignore-eos": not settings.ignores_eos,
    }
    yield from (flag for flag, is_set in flags.items() if is_set)
