"""Conversations to hold with a model: what each turn sends and when, from settings and a number.

Pure: text, lengths and pauses come from the seed and the conversation's number, time and answers are
arguments. Whoever drives a conversation asks for the next turn, sends it, and tells it the answer;
`None` means that it is over. A real answer becomes part of the history, as with a real agent, but
for replayed traces, whose next prompt is what was recorded.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from moongate.loadtest.settings import Preset, Shape, WorkloadSettings
from moongate.loadtest.traces import (
    TraceConversation,
    TraceError,
    TraceFormat,
    TraceRequest,
    TraceSet,
    find_traces,
)
from moongate.loadtest.words import TokenCosts, join, make_text, make_words

Message = dict[str, Any]

PAUSE_SIGMA = 1.18
"""Of the log-normal pauses: with the published median of 5.2 s it gives the published P99, 81.4 s."""
PAUSE_OVER_MEDIAN_MAX = 16.0
TURN_SIGMA = 0.8
"""Of the log-normal lengths of what tools return: a few hundred to a few thousand tokens."""
TURNS_SIGMA = 0.5
TURNS_OVER_MEDIAN_MAX = 4
TOOL_TOKENS_MIN = 16
USER_SPEAKS_EVERY = 5
"""Of so many turns one begins with the user's words, the others with what a tool returned."""

MESSAGE_TOKENS = 512
"""A replayed prompt is cut into messages of this many tokens, at the same places in all prompts."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What to send."""

    number: int  # from 1
    body: Mapping[str, Any]
    """Of a chat request, without `model` and `stream`."""
    pause_s: float
    """Since the answer before it, or since the conversation began."""


class Conversation(Protocol):
    """One session's turns. `id` is unique in a run."""

    @property
    def id(self) -> str: ...

    def next_turn(self) -> Turn | None:
        """Return the next turn, None if the conversation is over."""

    def answered(self, text: str) -> None:
        """Take the answer to the turn before."""


class Workload:
    """Makes a run's conversations, one after the other.

    Raises: TraceError, from the constructor and from `begin`.
    """

    def __init__(self, settings: WorkloadSettings) -> None:
        self.settings = settings
        self._numbers = itertools.count()
        self._recorded: Iterator[_Recorded] | None = None
        if settings.preset is Preset.TRACE:
            self._recorded = _endless(_choose_traces(settings), settings)

    def begin(self, since_start_s: float) -> Conversation:
        """Return a new conversation that begins now, `since_start_s` after the run did."""
        settings, number = self.settings, next(self._numbers)
        name = f"{settings.preset.value}-{settings.seed}-{number}"
        match settings.preset:
            case Preset.AGENTS:
                return AgentSession(name, settings)
            case Preset.SHARED_PROMPT:
                return Question(
                    name, settings, f"{settings.seed}/{number % settings.shared_prompts}"
                )
            case Preset.COLD_BURST:
                burst = math.floor(since_start_s / settings.shape.think_s)
                return Question(name, settings, f"{settings.seed}/burst {burst}")
            case Preset.TRACE:
                assert self._recorded is not None
                return TraceReplay(name, next(self._recorded), settings)

    def starts_after_s(self, since_start_s: float) -> float:
        """Return how long after now a user's next conversation begins, in a closed loop."""
        shape = self.settings.shape
        match self.settings.preset:
            case Preset.COLD_BURST:  # all at once
                return shape.think_s - since_start_s % shape.think_s
            case _:
                return shape.think_s


# --- agents ---------------------------------------------------------------------------------------


class AgentSession:
    """An agent at work: it calls tools, reads what they return, and resends all of it each turn."""

    def __init__(self, name: str, settings: WorkloadSettings) -> None:
        self.id = name
        self._settings, self._costs = settings, settings.costs
        self._chance = random.Random(f"agents/{name}")
        shape = settings.shape
        self._turns = _turn_count(shape, self._chance)
        self._number = 0
        self._tokens = 0  # of the prompt so far, as far as it is known from outside
        self._messages: list[Message] = []

    def next_turn(self) -> Turn | None:
        self._number += 1
        first = self._number == 1
        pause_s = 0.0 if first else _pause_s(self._settings.shape.think_s, self._chance)
        more = self._opening() if first else [self._tool_result()]
        self._messages += more
        if self._number > self._turns or self._tokens > self._settings.context_tokens_max:
            return None
        return Turn(self._number, self._body(), pause_s)

    def answered(self, text: str) -> None:
        self._tokens += self._settings.shape.answer_tokens + self._costs.per_answer
        message: Message = {"role": "assistant", "content": text}
        if self._has_tools and not self._user_speaks_next:
            message["tool_calls"] = [
                {
                    "id": f"call_{self._number}",
                    "type": "function",
                    "function": {"name": "read_file", "arguments": '{"path": "src/main.py"}'},
                }
            ]
        self._messages.append(message)

    @property
    def _has_tools(self) -> bool:
        return self._settings.has_tools

    @property
    def _user_speaks_next(self) -> bool:
        return (self._number + 1) % USER_SPEAKS_EVERY == 0

    def _opening(self) -> list[Message]:
        settings, shape = self._settings, self._settings.shape
        messages = []
        tools = self._costs.tools if self._has_tools else 0
        if shape.system_tokens:
            whose = str(settings.seed) if settings.shares_system else self.id
            system = self._message("system", f"{whose}/system", shape.system_tokens - tools)
            messages.append(system)
        self._tokens += tools + self._costs.per_request
        messages.append(self._message("user", f"{self.id}/1", shape.first_tokens))
        return messages

    def _tool_result(self) -> Message:
        shape, costs = self._settings.shape, self._costs
        mean = max(shape.turn_tokens - shape.answer_tokens - costs.per_answer, TOOL_TOKENS_MIN)
        tokens = max(_log_normal_mean(mean, TURN_SIGMA, self._chance), TOOL_TOKENS_MIN)
        is_tool = self._has_tools and self._number % USER_SPEAKS_EVERY != 0
        message = self._message(
            "tool" if is_tool else "user", f"{self.id}/{self._number}", min(tokens, 8 * mean)
        )
        if is_tool:
            message["tool_call_id"] = f"call_{self._number - 1}"
        return message

    def _message(self, role: str, name: str, tokens: float) -> Message:
        words = self._costs.words_for(tokens - self._costs.per_message)
        self._tokens += round(words * self._costs.per_word) + self._costs.per_message
        return {"role": role, "content": make_text(name, words)}

    def _body(self) -> Mapping[str, Any]:
        body = _body(self._messages, self._settings.shape.answer_tokens, self._settings)
        # vLLM refuses "auto" unless it was started with a parser of calls; the tools are in the prompt
        # with "none" too.
        return body | {"tools": TOOLS, "tool_choice": "none"} if self._has_tools else body


def _turn_count(shape: Shape, chance: random.Random) -> int:
    turns = round(shape.turns * math.exp(chance.gauss(0.0, TURNS_SIGMA)))
    return min(max(turns, 1), TURNS_OVER_MEDIAN_MAX * shape.turns)


def _pause_s(median_s: float, chance: random.Random) -> float:
    return median_s * min(math.exp(chance.gauss(0.0, PAUSE_SIGMA)), PAUSE_OVER_MEDIAN_MAX)


def _log_normal_mean(mean: float, sigma: float, chance: random.Random) -> float:
    """Return a log-normal number with this mean, whose logarithm deviates by `sigma`."""
    return mean * math.exp(chance.gauss(0.0, sigma) - sigma * sigma / 2)


def _tool(name: str, description: str, argument: str, meaning: str) -> Mapping[str, Any]:
    properties = {argument: {"type": "string", "description": meaning}}
    parameters = {"type": "object", "properties": properties, "required": [argument]}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS: list[Mapping[str, Any]] = [
    _tool("read_file", "Return a text file of the project.", "path", "Its path in the project."),
    _tool("search", "Return the lines that match.", "pattern", "A regular expression."),
    _tool("run", "Run a command and return what it prints.", "command", "The command line."),
    _tool("edit", "Apply a change to a file.", "patch", "The change, as a unified diff."),
]


# --- shared prompts and bursts --------------------------------------------------------------------


@dataclass(slots=True)
class Question:
    """One short question behind a long system prompt, which others that name the same one share."""

    id: str
    settings: WorkloadSettings
    system_name: str
    _is_asked: bool = False

    def next_turn(self) -> Turn | None:
        if self._is_asked:
            return None
        self._is_asked = True
        shape, costs = self.settings.shape, self.settings.costs
        messages = [
            {"role": role, "content": make_text(name, costs.words_for(tokens - costs.per_message))}
            for role, name, tokens in (
                ("system", f"{self.system_name}/system", shape.system_tokens),
                ("user", f"{self.id}/1", shape.first_tokens),
            )
            if tokens
        ]
        return Turn(1, _body(messages, shape.answer_tokens, self.settings), 0.0)

    def answered(self, text: str) -> None:
        """There is nothing more to say."""


# --- traces ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A conversation of a trace, and how often the trace was begun before."""

    conversation: TraceConversation
    lap: int


def _choose_traces(settings: WorkloadSettings) -> TraceSet:
    assert settings.traces is not None
    found = find_traces(settings.traces)
    if settings.trace_format is None:
        return next(found[name] for name in TraceFormat if name in found)
    if settings.trace_format not in found:
        there = ", ".join(name.value for name in found)
        wanted = settings.trace_format.value
        raise TraceError(f"{settings.traces}: no {wanted} traces there, only {there}")
    return found[settings.trace_format]


def _endless(traces: TraceSet, settings: WorkloadSettings) -> Iterator[_Recorded]:
    """Yield what can be sent of a trace over and over; each lap has texts of its own."""
    for lap in itertools.count():
        is_empty = True
        for conversation in traces.read(shares_system=settings.shares_system):
            if conversation.requests[:1] and _fits(conversation.requests[0], settings):
                is_empty = False
                yield _Recorded(conversation, lap)
        if is_empty:
            raise TraceError(
                f"{settings.traces}: no conversation begins with a prompt of at most "
                f"{settings.context_tokens_max} tokens (--context-max)"
            )


def _fits(request: TraceRequest, settings: WorkloadSettings) -> bool:
    return 0 < request.prompt_tokens <= settings.context_tokens_max


class TraceReplay:
    """A recorded conversation: prompts as long as the recorded ones that share what those shared."""

    def __init__(self, name: str, recorded: _Recorded, settings: WorkloadSettings) -> None:
        self.id = f"{name}-{recorded.conversation.id}"
        self._settings = settings
        self._requests = recorded.conversation.requests
        # Blocks have the same text wherever they occur, so laps must differ by name.
        self._prompts = ReplayedPrompts(
            recorded.conversation.block_size_tokens,
            f"{settings.seed}/{recorded.lap}",
            self.id,
            settings.costs,
        )
        self._number = 0

    def next_turn(self) -> Turn | None:
        settings = self._settings
        if self._number == len(self._requests):
            return None
        request = self._requests[self._number]
        if not _fits(request, settings):
            return None
        self._number += 1
        answer_tokens = min(request.output_tokens, settings.shape.answer_tokens)
        body = _body(self._prompts.messages(request), answer_tokens, settings)
        return Turn(self._number, body, request.think_s / settings.speed)

    def answered(self, text: str) -> None:
        """The next prompt is as recorded, so the answer is not part of it."""


@dataclass(slots=True)
class ReplayedPrompts:
    """Turns prompts that are known by block ids into messages.

    The text is cut into messages at the same places in all prompts, users and assistants by turns. What
    a message costs beside its words is taken off the words of its last block, or of what follows the
    last full block: so blocks end where they did or a little later, and two prompts share as many of
    an engine's blocks as the recorded ones did.
    """

    block_size_tokens: int
    world: str
    """Blocks of the same id have the same text within a world."""
    owner: str
    """Names what is nobody else's: the words after a prompt's last full block."""
    costs: TokenCosts
    _groups: list[tuple[Sequence[int], Message]] = field(default_factory=list)

    def messages(self, request: TraceRequest) -> list[Message]:
        """Return a prompt of `request.prompt_tokens` tokens; a few more if its end leaves no room."""
        size = self.block_size_tokens
        blocks = request.blocks[: request.prompt_tokens // size]
        step = max(MESSAGE_TOKENS // size, 1)
        groups = [blocks[at : at + step] for at in range(0, len(blocks), step)]
        known = self._groups
        self._groups = [
            known[n]
            if n < len(known) and known[n][0] == ids
            else (ids, self._group(n, ids, is_full=len(ids) == step))
            for n, ids in enumerate(groups)
        ]
        messages = [message for _, message in self._groups]
        tokens = request.prompt_tokens - len(blocks) * size
        if groups and len(groups[-1]) < step:  # that message's own cost has yet to be taken off
            is_answer = messages[-1]["role"] == "assistant"
            tokens -= self.costs.per_answer if is_answer else self.costs.per_message
        return self._with_tail(messages, tokens, request)

    def _group(self, number: int, ids: Sequence[int], *, is_full: bool) -> Message:
        is_answer = number % 2 == 1
        overhead = self.costs.per_answer if is_answer else self.costs.per_message
        words: list[str] = []
        for place, block in enumerate(ids):
            is_last = is_full and place == len(ids) - 1
            tokens = self.block_size_tokens - (overhead if is_last else 0)
            own = make_words(f"{self.world}/{block}", self.costs.words_for(tokens) + 1)
            # A block's first word is made for a message's beginning.
            words += own[:-1] if place == 0 else own[1:]
        return {"role": "assistant" if is_answer else "user", "content": join(words)}

    def _with_tail(
        self, messages: list[Message], tokens: int, request: TraceRequest
    ) -> list[Message]:
        """Return the prompt with what is its own: so many tokens, the opening of the answer included.

        The last message is the user's. `tokens` may be less than nothing.
        """
        name = f"{self.owner}/{request.prompt_tokens}/{len(messages)}"
        tokens -= self.costs.per_request
        if messages and messages[-1]["role"] == "user":
            if tokens > 0:
                tail = make_words(name, self.costs.words_for(tokens) + 1)[1:]
                messages[-1] = messages[-1] | {"content": join([messages[-1]["content"], *tail])}
            return messages
        words = self.costs.words_for(tokens - self.costs.per_message)
        return [*messages, {"role": "user", "content": make_text(name, words)}]


def _body(
    messages: Sequence[Message], answer_tokens: int, settings: WorkloadSettings
) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": list(messages), "max_tokens": answer_tokens}
    body["temperature"] = 0
    if settings.ignores_eos:
        body["ignore_eos"] = True
    return body


# --- arrivals -------------------------------------------------------------------------------------


def poisson_arrivals(rate_per_s: float, chance: Callable[[], float]) -> Iterator[float]:
    """Yield moments since the start (s), `rate_per_s` a second on average, however long others take.

    `chance`: returns numbers from 0 to below 1.
    """
    at_s = 0.0
    while True:
        at_s += -math.log(1.0 - chance()) / rate_per_s
        yield at_s
