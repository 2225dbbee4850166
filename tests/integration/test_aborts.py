"""200 clients that leave at random points: engines stop for each of them, and nothing stays reserved."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field

import pytest
from fake_engine import FakeEngine, Received, chat_answer, stream_event
from live_gateway import live_gateway, until
from raw_client import post, raw_client

from moongate.router import Event, RequestArrived, RequestFinished, RequestId
from moongate.router import Outcome as CoreOutcome

pytestmark = pytest.mark.timeout(60)

CLIENTS = 200
SEED = 200
LONGEST_S = 1.2  # of a client's patience; an answer takes half of it
PIECES, PIECE_S = 20, 0.03
SEEN_S = 5.0


class Watched:
    """What engines saw of requests, by the number that each brought."""

    def __init__(self) -> None:
        self.came: set[int] = set()
        self.finished: set[int] = set()
        self.cancelled: set[int] = set()

    async def act(self, request: Received) -> None:
        """Answer slowly, in a stream or as a whole, and note if nobody waits for the end of it."""
        body = request.json()
        number = body["x_number"]
        self.came.add(number)
        try:
            if body.get("stream"):
                await self._stream(request)
            else:
                await _pause(request, PIECES * PIECE_S)
                await request.answer(200, chat_answer())
        except ConnectionError:
            self.cancelled.add(number)
            raise
        self.finished.add(number)

    async def _stream(self, request: Received) -> None:
        await _pause(request, PIECE_S)
        await request.start_stream()
        for n in range(PIECES):
            await request.send_chunk(stream_event(f"piece {n}"))
            await _pause(request, PIECE_S)
        await request.send_chunk(b"data: [DONE]\n\n")
        await request.send_chunk(b"")


async def _pause(request: Received, pause_s: float) -> None:
    """Compute for a while. Raises: ConnectionError, as soon as nobody waits for it."""
    try:
        async with asyncio.timeout(pause_s):
            await request.client_left.wait()
    except TimeoutError:
        return
    raise ConnectionResetError


def a_request(number: int, *, is_stream: bool) -> bytes:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": f"prompt {number} " * 20}],
        "stream": is_stream,
        "x_number": number,
    }
    headers = ("content-type: application/json", f"x-session-id: {number}")
    return post(json.dumps(body).encode(), *headers)


@dataclass(slots=True)
class Account:
    """What the gateway's core was told of requests, by the number that each had as its session."""

    numbers: dict[RequestId, int] = field(default_factory=dict)
    ends: dict[int, CoreOutcome] = field(default_factory=dict)

    def note(self, _: float, event: Event) -> None:
        match event:
            case RequestArrived(request=request):
                assert request.session_key is not None
                self.numbers[request.id] = int(request.session_key)
            case RequestFinished(request_id=request_id, outcome=outcome):
                number = self.numbers[request_id]
                assert number not in self.ends, "ended twice"
                self.ends[number] = outcome

    def ended(self, outcome: CoreOutcome) -> set[int]:
        return {number for number, end in self.ends.items() if end is outcome}


async def leave_in_the_middle(port: int, number: int, chance: random.Random) -> bool:
    """Send a request, or only a part of it, and leave at some time. Return whether it was whole."""
    request = a_request(number, is_stream=chance.random() < 0.7)
    is_whole = chance.random() < 0.9
    await asyncio.sleep(chance.random())
    async with raw_client(port) as client:
        await client.send(request if is_whole else request[: chance.randrange(len(request))])
        await asyncio.sleep(chance.random() * LONGEST_S)
        if chance.random() < 0.5:
            client.writer.transport.abort()
    return is_whole


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_engines_see_a_cancel_for_each_client_that_left_before_its_answer_ended() -> None:
    watched, account, chance = Watched(), Account(), random.Random(SEED)
    async with (
        FakeEngine(watched.act) as a,
        FakeEngine(watched.act) as b,
        FakeEngine(watched.act) as c,
        live_gateway([a.url, b.url, c.url], recorder=account.note) as gateway,
    ):
        leaving = (leave_in_the_middle(gateway.port, n, chance) for n in range(CLIENTS))
        whole = sum(await asyncio.gather(*leaving))
        left_at = time.monotonic()
        await until(lambda: gateway.inflight() == 0, SEEN_S)
        await until(lambda: watched.came == watched.cancelled | watched.finished, SEEN_S)
        assert time.monotonic() - left_at < SEEN_S
        assert await gateway.metric("moongate_inflight_requests") == 0

        # What reached an engine and was unfinished when its client left, no more and no less.
        left, answered = account.ended(CoreOutcome.CLIENT_LEFT), account.ended(CoreOutcome.ANSWERED)
        assert watched.cancelled == (left & watched.came) - watched.finished
        assert len(watched.cancelled) > CLIENTS / 4, "too few to tell anything"
        # Who had all of it got it from an engine that had sent all of it.
        assert answered <= watched.finished - watched.cancelled
        assert len(answered) > CLIENTS / 10, "too few to tell anything"
        # An engine may end as its client leaves, but rarely. (Others leave before their request is sent.)
        assert len(left & watched.finished) < CLIENTS / 10

        # Each whole request is counted once, as what it came to; the others never were any.
        counted = "moongate_requests_total"
        assert len(account.ends) == len(account.numbers) == len(left) + len(answered)
        assert await gateway.metric(counted) == whole
        assert await gateway.metric(counted, code="200") == len(answered)
        assert await gateway.metric(counted, code="499") == whole - len(answered)
        assert await gateway.metric("moongate_broken_off_total") == 0
        assert await gateway.metric("moongate_retries_total") == 0
        states = (await gateway.client.get("/admin/instances")).json()["instances"]
        assert {instance["state"] for instance in states} == {"up"}
