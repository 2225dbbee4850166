"""What the workers of one machine show together: whichever is asked answers for all.

A worker that is asked asks the others over the hub (`hub.py`), itself among them, and puts the answers
together. Who doesn't answer soon is left out; what the process that started them says counts as one more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable

import msgspec

from moongate.gateway.replicas.shared_state import SharedState, StateUnavailable
from moongate.router import PeerId

logger = logging.getLogger(__name__)

ASK = "ask"
ANSWER_S = 1.0
"""For all to answer; a worker's event loop is never busy for so long."""

Source = Callable[[bytes], Awaitable[bytes]]


class Question(msgspec.Struct, array_like=True, frozen=True):
    """`argument`: whatever the source takes. Answers go to the channel `reply_to`, after the `number`."""

    number: str
    reply_to: str
    what: str
    argument: bytes


class Answer(msgspec.Struct, array_like=True, frozen=True):
    number: str
    peer: str
    content: bytes


encode = msgspec.msgpack.Encoder().encode
read_question = msgspec.msgpack.Decoder(Question).decode
read_answer = msgspec.msgpack.Decoder(Answer).decode


class WorkerViews:
    """`sources`: by what they are asked for. `start` it inside the event loop."""

    def __init__(self, state: SharedState, peer: PeerId) -> None:
        self._state = state
        self._peer = peer
        self._reply_to = f"answer-{peer}"
        self._waiting: dict[str, asyncio.Queue[Answer]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self.sources: dict[str, Source] = {}

    def start(self) -> None:
        self._state.listen(ASK, self._asked)
        self._state.listen(self._reply_to, self._answered)

    async def close(self) -> None:
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)

    async def gather(self, what: str, argument: bytes = b"") -> dict[PeerId, bytes]:
        """Return what each worker says, this one in any case."""
        number = secrets.token_hex(8)
        question = encode(Question(number, self._reply_to, what, argument))
        answers = {self._peer: await self.sources[what](argument)}
        queue = self._waiting[number] = asyncio.Queue()
        try:
            with contextlib.suppress(TimeoutError, StateUnavailable):
                async with asyncio.timeout(ANSWER_S):
                    name = self._state.channel(ASK)
                    (receivers,) = await self._state.tell(lambda p: p.publish(name, question))
                    while len(answers) < receivers:
                        answer = await queue.get()
                        answers[PeerId(answer.peer)] = answer.content
        finally:
            del self._waiting[number]
        return answers

    def _asked(self, data: bytes) -> None:
        question = read_question(data)
        if question.what in self.sources and question.reply_to != self._reply_to:
            task = asyncio.create_task(self._answer(question))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _answer(self, question: Question) -> None:
        try:
            content = await self.sources[question.what](question.argument)
        except Exception:
            logger.exception("a bug of ours")
            return
        answer = encode(Answer(question.number, self._peer, content))
        await self._state.publish(question.reply_to, answer)

    def _answered(self, data: bytes) -> None:
        answer = read_answer(data)
        if answer.number in self._waiting:
            self._waiting[answer.number].put_nowait(answer)
