"""Agent sessions on raw sockets, many at once and cheap, and what each turn's client saw.

A session has a conversation of some turns, then begins another one; all share a system prompt. Text
comes from a seed. A turn's outcome is judged as a client would: is it an answer, an error in the shape
that SDKs know, or neither?
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from raw_client import RawAnswer, RawClient, post, raw_client

ERROR_STATUSES = frozenset({429, 502, 503, 504})
"""What a client may be told when engines fail: all of these say that it may try again."""

TURN_S = 40.0


class Outcome(Enum):
    ANSWERED = "answered"
    REFUSED = "refused"  # an error in place of an answer
    BROKEN = "broken"  # an answer that ends with an error
    LEFT = "left"  # by this client
    MALFORMED = "malformed"  # nothing that a client could make sense of


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn as its client saw it. Times of the loop's clock."""

    outcome: Outcome
    status: int
    began_at: float
    first_at: float | None
    ended_at: float
    expected_tokens: int = 0  # by the receipt
    cached_tokens: int = 0  # by the engine
    told: str = ""  # of an error, or what was wrong with it

    @property
    def took_s(self) -> float:
        return self.ended_at - self.began_at


@dataclass(frozen=True, slots=True)
class Shape:
    """What conversations are like. Tokens are words here, near enough."""

    seed: str
    system_words: int = 600
    turn_words: tuple[int, int] = (20, 120)
    turns: int = 8
    answer_tokens: int = 16
    pause_s: float = 1.0  # between turns, at the median
    streamed: float = 0.9  # of turns


@dataclass(slots=True)
class Session:
    """One agent: `run` takes turns until told to stop; `turns` is what came of them."""

    number: int
    port: int
    shape: Shape
    note: Callable[[Turn], None]
    messages: list[dict[str, Any]] = field(default_factory=list)
    _connection: contextlib.AsyncExitStack | None = None
    _client: RawClient | None = None

    async def run(self, stop: asyncio.Event) -> None:
        chance = random.Random(f"{self.shape.seed}/{self.number}")
        await asyncio.sleep(chance.random() * self.shape.pause_s)
        while not stop.is_set():
            if len(self.messages) > 2 * self.shape.turns:
                self.messages = []
            self._ask(chance)
            turn = await self.take_turn(is_stream=chance.random() < self.shape.streamed)
            self.note(turn)
            if turn.outcome is not Outcome.ANSWERED:
                self.messages.pop()  # it will ask something else
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(chance.expovariate(0.7 / self.shape.pause_s)):
                    await stop.wait()

    def _ask(self, chance: random.Random) -> None:
        if not self.messages:
            words = text(random.Random(self.shape.seed), self.shape.system_words)
            self.messages.append({"role": "system", "content": words})
        words = text(chance, chance.randint(*self.shape.turn_words))
        self.messages.append({"role": "user", "content": words})

    async def take_turn(self, *, is_stream: bool) -> Turn:
        """Send the conversation as it is. An answer becomes part of it."""
        body = {"model": "m", "messages": self.messages, "max_tokens": self.shape.answer_tokens}
        if is_stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        request = post(json.dumps(body).encode(), "content-type: application/json")
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        try:
            async with asyncio.timeout(TURN_S):
                client = await self._connect()
                await client.send(request)
                turn, answer = await read_turn(client, began_at)
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError) as error:
            await self.close()
            return Turn(Outcome.MALFORMED, 0, began_at, None, loop.time(), told=repr(error))
        if turn.outcome is Outcome.ANSWERED:
            self.messages.append({"role": "assistant", "content": answer})
        return turn

    async def _connect(self) -> RawClient:
        if self._client is None or self._client.reader.at_eof():
            await self.close()
            self._connection = contextlib.AsyncExitStack()
            self._client = await self._connection.enter_async_context(raw_client(self.port))
        return self._client

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.aclose()
        self._connection = self._client = None


async def read_turn(client: RawClient, began_at: float) -> tuple[Turn, str]:
    """Read an answer to its end; return it with its text."""
    loop = asyncio.get_running_loop()
    status, headers = await client.head(TURN_S)
    expected = int(headers.get("x-moongate-device-tokens", 0))
    if headers.get("transfer-encoding") != "chunked":
        length = int(headers["content-length"])
        answer = RawAnswer(status, headers, await client.reader.readexactly(length))
        return _whole_turn(answer, began_at, loop.time(), expected)
    first_at, pieces = None, []
    async for piece in client.chunks():
        first_at = first_at or loop.time()
        pieces.append(piece)
    events = [e for e in b"".join(pieces).split(b"\n\n") if e]
    found = judge_stream(status, headers, events)
    turn = Turn(
        found.outcome, status, began_at, first_at, loop.time(), expected, found.cached_tokens,
        found.told,
    )  # fmt: skip
    return turn, found.text


def _whole_turn(
    answer: RawAnswer, began_at: float, ended_at: float, expected: int
) -> tuple[Turn, str]:
    if answer.status == 200:
        value = answer.json()
        cached = _cached_tokens(value.get("usage"))
        turn = Turn(Outcome.ANSWERED, 200, began_at, ended_at, ended_at, expected, cached)
        return turn, value["choices"][0]["message"]["content"]
    problem = problem_of_refusal(answer)
    outcome = Outcome.REFUSED if problem is None else Outcome.MALFORMED
    told = problem or answer.json()["error"]["code"]
    return Turn(outcome, answer.status, began_at, None, ended_at, told=told), ""


@dataclass(frozen=True, slots=True)
class Judged:
    """What a whole stream was."""

    outcome: Outcome
    text: str = ""
    cached_tokens: int = 0
    told: str = ""


def judge_stream(status: int, headers: dict[str, str], events: list[bytes]) -> Judged:
    """Tell what a stream's events amount to. What isn't an event of ours, an engine said."""
    if status != 200 or not headers.get("x-request-id"):
        return Judged(Outcome.MALFORMED, told=f"a stream with {status} and {sorted(headers)}")
    if not events or events[-1] != b"data: [DONE]":
        return Judged(Outcome.MALFORMED, told=f"a stream that ends with {events[-1:]}")
    words, cached = [], 0
    for event in events[:-1]:
        if not event.startswith(b"data: {"):
            continue
        value = json.loads(event.removeprefix(b"data: "))
        if "error" in value:
            problem = problem_of_error(value)
            outcome = Outcome.BROKEN if problem is None else Outcome.MALFORMED
            return Judged(outcome, told=problem or value["error"]["code"])
        cached = max(cached, _cached_tokens(value.get("usage")))
        words += [choice["delta"].get("content") or "" for choice in value["choices"]]
    return Judged(Outcome.ANSWERED, "".join(words), cached)


def problem_of_refusal(answer: RawAnswer) -> str | None:
    """Return what is wrong with an error in place of an answer, None if nothing is."""
    if answer.status not in ERROR_STATUSES:
        return f"status {answer.status}"
    if not answer.headers.get("x-request-id"):
        return "no x-request-id"
    if answer.headers.get("content-type") != "application/json":
        return f"content-type {answer.headers.get('content-type')}"
    if answer.status in (429, 503) and "retry-after" not in answer.headers:
        return f"{answer.status} without retry-after"
    try:
        return problem_of_error(answer.json())
    except ValueError as error:
        return f"no JSON: {error}"


def problem_of_error(value: Any) -> str | None:
    """Return what is wrong with an error object, None if nothing is."""
    error = value.get("error") if isinstance(value, dict) else None
    if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"}:
        return f"no error object: {value!r:.200}"
    if not all(isinstance(error[key], str) and error[key] for key in ("message", "type", "code")):
        return f"an empty error: {error!r:.200}"
    return None


def _cached_tokens(usage: dict[str, Any] | None) -> int:
    details = (usage or {}).get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def text(chance: random.Random, words: int) -> str:
    return " ".join(
        f"{chance.choice('bdfgklmnprst')}{chance.randrange(1000)}" for _ in range(words)
    )


def percentile(values: list[float], share: float) -> float:
    """Return the value that `share` of all don't exceed; there must be some."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def count(turns: list[Turn]) -> Counter[str]:
    """Return how many turns ended in which way, by words."""
    return Counter(f"{t.outcome.value} {t.status} {t.told}".strip() for t in turns)
