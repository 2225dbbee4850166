"""Sends one turn and measures its answer, under gevent.

Runs in locust's process. A connection is kept for a conversation's turns; one that the server closed
meanwhile is opened again, once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import orjson
from gevent import Timeout
from geventhttpclient.client import HTTPClient
from geventhttpclient.response import (
    HTTPConnectionClosed,
    HTTPParseError,
    HTTPSocketPoolResponse,
)

from moongate.loadtest.answers import AnswerReader
from moongate.loadtest.conversations import Conversation, Turn
from moongate.loadtest.records import CUT_OFF, ERROR_TEXT_MAX, OK, TurnRecord
from moongate.loadtest.settings import ROUTE

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 600.0
"""Without a byte for so long, a turn has failed; a gateway's own limit should come first."""
READ_BYTES = 65536
HTTP_OK = 200

RECEIPT_NUMBERS = {
    "routed_prompt_tokens": "x-moongate-prompt-tokens",
    "device_tokens": "x-moongate-device-tokens",
    "pool_tokens": "x-moongate-pool-tokens",
}
RECEIPT_NAMES = {
    "instance": "x-moongate-instance",
    "prefill_instance": "x-moongate-prefill-instance",
    "policy": "x-moongate-policy",
    "reason": "x-moongate-reason",
}


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to ask, and how."""

    url: str
    model: str
    api_key: str | None = None
    sends_session_ids: bool = True
    ca: str | None = None  # file with the roots that are trusted; None: the usual ones


@dataclass(frozen=True, slots=True)
class Answered:
    """A turn's record, the answer's text and the gaps between its tokens (ms)."""

    record: TurnRecord
    text: str
    gaps_ms: list[float]


class Sender:
    """One conversation's connection. `start_s`: the run's beginning on `time.perf_counter`."""

    def __init__(
        self, target: Target, start_s: float, on_answered: Callable[[Answered], None]
    ) -> None:
        self._target = target
        self._on_answered = on_answered
        self._start_s = start_s
        self._path = urlsplit(target.url).path.rstrip("/") + ROUTE
        self._client: HTTPClient | None = None

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def send(self, conversation: Conversation, turn: Turn, due_s: float) -> Answered:
        """Send a turn and read its answer to the end. All trouble is in the record.

        `due_s`: on `time.perf_counter`. If the greenlet is killed meanwhile, `on_answered` still gets
        the record, as cut off, before the exception goes on.
        """
        record = TurnRecord(conversation.id, turn.number, due_s - self._start_s, outcome=CUT_OFF)
        reader = AnswerReader()
        body = {
            "model": self._target.model,
            **turn.body,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        data, headers = orjson.dumps(body), self._headers(conversation)
        sent_s = time.perf_counter()
        record.sent_s = sent_s - self._start_s
        answered: Answered | None = None
        try:
            record.outcome = self._exchange(data, headers, record, reader)
        except (OSError, HTTPParseError, Timeout) as error:
            record.outcome = self._name_trouble(record, error)
        finally:
            _complete(record, reader, sent_s, due_s)
            answered = Answered(record, reader.text, reader.gaps_ms)
            self._on_answered(answered)
        return answered

    def _headers(self, conversation: Conversation) -> dict[str, str]:
        headers = {"content-type": "application/json", "accept": "text/event-stream"}
        if self._target.sends_session_ids:
            headers["x-session-id"] = conversation.id
        if self._target.api_key:
            headers["authorization"] = f"Bearer {self._target.api_key}"
        return headers

    def _exchange(
        self, data: bytes, headers: Mapping[str, str], record: TurnRecord, reader: AnswerReader
    ) -> str:
        """Send, read, and return the outcome."""
        answer = self._post(data, headers)
        try:
            record.status = answer.status_code
            _read_receipt(answer, record)
            if record.status != HTTP_OK:
                record.error = answer.read()[:ERROR_TEXT_MAX].decode(errors="replace")
                return f"http_{record.status}"
            while line := answer.readline(b"\n"):
                reader.feed(line, time.perf_counter())
        finally:
            answer.release()  # closes the connection unless all was read
        if reader.error is not None:
            record.error = reader.error[:ERROR_TEXT_MAX]
            return "error_event"
        return OK if reader.is_complete else "broken_off"

    def _post(self, data: bytes, headers: Mapping[str, str]) -> HTTPSocketPoolResponse:
        if self._client is not None:
            try:
                return self._client.post(self._path, data, dict(headers))
            except (HTTPConnectionClosed, BrokenPipeError, ConnectionResetError):
                self.close()  # closed by the server while nothing was said
        self._client = HTTPClient.from_url(
            self._target.url,
            connection_timeout=CONNECT_TIMEOUT_S,
            network_timeout=READ_TIMEOUT_S,
            block_size=READ_BYTES,
            ssl_options={"ca_certs": self._target.ca} if self._target.ca is not None else None,
        )
        return self._client.post(self._path, data, dict(headers))

    def _name_trouble(self, record: TurnRecord, error: BaseException) -> str:
        self.close()
        record.error = f"{type(error).__name__}: {error}"[:ERROR_TEXT_MAX]
        if isinstance(error, TimeoutError | Timeout):
            return "timeout"
        return "connection" if record.status is None else "broken_off"


def _complete(record: TurnRecord, reader: AnswerReader, sent_s: float, due_s: float) -> None:
    record.e2e_ms = (time.perf_counter() - sent_s) * 1000
    if reader.first_s is not None:
        record.ttft_ms = (reader.first_s - sent_s) * 1000
        record.ttft_due_ms = (reader.first_s - min(due_s, sent_s)) * 1000
    if reader.gaps_ms:
        record.itl_ms_mean = sum(reader.gaps_ms) / len(reader.gaps_ms)
        record.itl_ms_max = max(reader.gaps_ms)
    used = reader.usage_tokens("prompt_tokens")
    record.prompt_tokens = record.routed_prompt_tokens if used is None else used
    record.output_tokens = reader.usage_tokens("completion_tokens")
    record.cached_tokens = reader.cached_tokens()


def _read_receipt(answer: Any, record: TurnRecord) -> None:
    for name, header in RECEIPT_NAMES.items():
        value = answer.get(header)
        setattr(record, name, value if isinstance(value, str) else None)
    for name, header in RECEIPT_NUMBERS.items():
        value = answer.get(header)
        is_number = isinstance(value, str) and value.isdecimal()
        setattr(record, name, int(value) if is_number else None)
