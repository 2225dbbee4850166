"""The five workloads of the side-by-side benchmark: request bodies, and how they are played.

Pure but for reading the text, which is the standard library's own source: real text, the same on
every machine with the same Python. A round's seed chooses other excerpts of it, so that no router
profits from an earlier round; one seed always gives the same bytes. Sizes are counted in characters
of message text; JSON's escapes make bodies about 5 % larger.
"""

from __future__ import annotations

import functools
import json
import random
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MODEL = "bench"
"""The name that mock engines serve and requests ask for."""
BLOCK_SIZE_TOKENS = 16
"""Of the mock engines; vLLM's default on GPUs."""

Message = dict[str, str]

SYSTEM_TEXT = "Answer as a programmer's assistant: read what the tools say, and keep it short."
DISTINCT_BODIES = 16
"""`small`, `agent320k` and `stream200` repeat this many bodies in turn."""

SHORT_CHARACTERS, SHORT_MESSAGES = 1_400, 3
LONG_CHARACTERS, LONG_MESSAGES = 308_000, 80
NEW_TURN_CHARACTERS = 1_024

SESSION_TURNS = 12
SESSION_FIRST_CHARACTERS, SESSION_LAST_CHARACTERS = 40_000, 308_000
QUESTION_CHARACTERS = 1_500
REPLY_CHARACTERS_MIN, REPLY_CHARACTERS_MAX = 300, 9_000


@dataclass(frozen=True, slots=True)
class Workload:
    """What is sent, and what a whole answer looks like."""

    name: str
    sequences: tuple[tuple[bytes, ...], ...]
    """Each is played in order by one client; different ones run at the same time."""
    clients: int
    events: int | None = None
    """SSE data events of an answer, `[DONE]` among them. None: the answer is one JSON object."""
    warm_up_sequences: int = 0
    """How many of the first sequences are played before the measurement begins."""

    @property
    def requests(self) -> int:
        return sum(len(sequence) for sequence in self.sequences)

    @property
    def body_bytes_mean(self) -> float:
        return sum(len(body) for bodies in self.sequences for body in bodies) / self.requests


def make_workload(name: str, seed: int, scale: float = 1.0) -> Workload:
    """Return a workload; `scale` multiplies the number of requests (sessions), never their sizes.

    Raises: KeyError for a name that `WORKLOADS` does not have.
    """
    # Seeded by text: hashing it does not depend on PYTHONHASHSEED.
    return WORKLOADS[name](random.Random(f"{seed} {name}"), scale)


def _make_small(chance: random.Random, scale: float) -> Workload:
    bodies = _distinct_bodies(chance, SHORT_CHARACTERS, SHORT_MESSAGES, answer_tokens=16)
    return Workload("small", _repeat(bodies, 3_000, scale), clients=32, warm_up_sequences=200)


def _make_agent320k(chance: random.Random, scale: float) -> Workload:
    bodies = _distinct_bodies(chance, LONG_CHARACTERS, LONG_MESSAGES, answer_tokens=16)
    return Workload("agent320k", _repeat(bodies, 200, scale), clients=8, warm_up_sequences=16)


def _make_turn320k(chance: random.Random, scale: float) -> Workload:
    """Conversations that engines and router know from the warm-up, each time with one new turn.

    They are also sent once more as they are: an agent that repeats a failed call does this.
    """
    known = [_conversation(chance, LONG_CHARACTERS, LONG_MESSAGES) for _ in range(DISTINCT_BODIES)]
    bodies = [_body(messages, 16) for messages in known]
    for number in range(_scaled(200, scale)):
        turn = {"role": "user", "content": excerpt(chance, NEW_TURN_CHARACTERS)}
        bodies.append(_body([*known[number % DISTINCT_BODIES], turn], 16))
    sequences = tuple((body,) for body in bodies)
    return Workload("turn320k", sequences, clients=8, warm_up_sequences=DISTINCT_BODIES)


def _make_stream200(chance: random.Random, scale: float) -> Workload:
    bodies = _distinct_bodies(chance, SHORT_CHARACTERS, SHORT_MESSAGES, 200, is_stream=True)
    sequences = _repeat(bodies, 48, scale)
    return Workload("stream200", sequences, clients=16, events=201, warm_up_sequences=4)


def _make_session(chance: random.Random, scale: float) -> Workload:
    sessions = tuple(_session(chance) for _ in range(_scaled(20, scale)))
    return Workload("session", sessions, clients=4, events=21)


WORKLOADS: Mapping[str, Callable[[random.Random, float], Workload]] = {
    "small": _make_small,
    "agent320k": _make_agent320k,
    "turn320k": _make_turn320k,
    "stream200": _make_stream200,
    "session": _make_session,
}


# --- conversations --------------------------------------------------------------------------------


def _session(chance: random.Random) -> tuple[bytes, ...]:
    """Return the bodies of one agent's session: each holds all of the one before, and more."""
    prompt_characters = SESSION_FIRST_CHARACTERS - QUESTION_CHARACTERS
    messages = [
        {"role": "system", "content": excerpt(chance, prompt_characters)},
        {"role": "user", "content": excerpt(chance, QUESTION_CHARACTERS)},
    ]
    characters = SESSION_FIRST_CHARACTERS
    growth = (SESSION_LAST_CHARACTERS - SESSION_FIRST_CHARACTERS) / (SESSION_TURNS - 1)
    bodies = []
    for turn in range(SESSION_TURNS):
        while characters < SESSION_FIRST_CHARACTERS + growth * turn:
            exchange = _exchange(chance, call_id=f"call-{len(messages)}")
            messages += exchange
            characters += sum(len(message["content"]) for message in exchange)
        bodies.append(_body(messages, answer_tokens=20, is_stream=True))
    return tuple(bodies)


def _exchange(chance: random.Random, call_id: str) -> list[Message]:
    """Return what a model said and what its tool answered, which is mostly longer."""
    said = excerpt(chance, _reply_characters(chance, mode=0.0))
    result = excerpt(chance, _reply_characters(chance, mode=0.75))
    return [
        {"role": "assistant", "content": said},
        {"role": "tool", "tool_call_id": call_id, "content": result},
    ]


def _reply_characters(chance: random.Random, mode: float) -> int:
    """Return a length on a logarithmic scale; `mode` 0 prefers short ones, 1 long ones."""
    span = REPLY_CHARACTERS_MAX / REPLY_CHARACTERS_MIN
    return int(REPLY_CHARACTERS_MIN * span ** chance.triangular(0.0, 1.0, mode))


def _conversation(chance: random.Random, characters: int, messages: int) -> list[Message]:
    each = characters // messages
    turns = [
        {"role": ("user", "assistant")[number % 2], "content": excerpt(chance, each)}
        for number in range(messages)
    ]
    return [{"role": "system", "content": SYSTEM_TEXT}, *turns]


def _distinct_bodies(
    chance: random.Random,
    characters: int,
    messages: int,
    answer_tokens: int,
    *,
    is_stream: bool = False,
) -> list[bytes]:
    return [
        _body(_conversation(chance, characters, messages), answer_tokens, is_stream=is_stream)
        for _ in range(DISTINCT_BODIES)
    ]


def _body(messages: Sequence[Message], answer_tokens: int, *, is_stream: bool = False) -> bytes:
    request = {
        "model": MODEL,
        "messages": list(messages),
        "stream": is_stream,
        "max_tokens": answer_tokens,
        "temperature": 0.0,
    }
    # Clients in other languages send text as UTF-8 rather than as escapes.
    return json.dumps(request, ensure_ascii=False).encode()


def _repeat(bodies: Sequence[bytes], requests: int, scale: float) -> tuple[tuple[bytes, ...], ...]:
    return tuple((bodies[n % len(bodies)],) for n in range(_scaled(requests, scale)))


def _scaled(count: int, scale: float) -> int:
    return max(1, round(count * scale))


# --- text -----------------------------------------------------------------------------------------


def excerpt(chance: random.Random, characters: int) -> str:
    text = _library_text()
    start = chance.randrange(len(text) - characters)
    return text[start : start + characters]


@functools.cache
def _library_text() -> str:
    library = Path(sysconfig.get_path("stdlib"))
    files = [*sorted(library.glob("*.py")), *sorted(library.glob("asyncio/*.py"))]
    return "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
