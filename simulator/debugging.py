"""What tests see of a simulated engine, and what they do to it: requests as they came, and faults.

Responsible for remembering and for deciding which request fails how. Not for failing (`http_api.py`).
Pure. Nothing here is part of a real engine.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RECEIVED_MAX = 512
"""Requests remembered; at the limit the oldest is forgotten."""


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """One request for an answer, as it came."""

    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {"path": self.path, "headers": dict(self.headers), "body": dict(self.body)}


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to a request in place of an answer."""

    status: int | None = None
    """None: it is answered after all."""
    delay_s: float = 0.0
    message: str = "injected fault"


@dataclass(slots=True)
class Debugging:
    """The requests that came, and the faults that are due."""

    received: deque[ReceivedRequest] = field(default_factory=lambda: deque(maxlen=RECEIVED_MAX))
    always: Fault | None = None
    """What happens to every request."""
    _due: deque[Fault] = field(default_factory=deque)

    def fail_next(self, *, status: int | None = 500, delay_s: float = 0.0, count: int = 1) -> None:
        """Let the next `count` requests end like this; `status` None only delays them."""
        self._due.extend([Fault(status, delay_s)] * count)

    def take(self, request: ReceivedRequest) -> Fault | None:
        """Remember a request and return what is to happen to it."""
        self.received.append(request)
        return self._due.popleft() if self._due else self.always
