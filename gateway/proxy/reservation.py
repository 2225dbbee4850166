"""What the core holds for one request, and what it is told of it from its placement on.

Invariant: what was reserved is given back once, whatever ends the request; and not before a hand-off
that goes on without its client has come to its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from moongate.gateway.driver import Driver, RequestCommand
from moongate.router import (
    FailureKind,
    Forward,
    Outcome,
    PrefillEnded,
    PrefillFailed,
    RequestFailed,
    RequestFinished,
    RequestFirstByte,
    RequestId,
)


class ToldTokens(NamedTuple):
    """What a request came to: the tokens of all its answers, as far as they came, and of its prompt. None: not told."""

    generated: int | None = None
    prompt: int | None = None


NOTHING_TOLD = ToldTokens()


class Reservation:
    """One request's. Nothing is reserved until it `begin`s."""

    __slots__ = ("_driver", "_id", "is_adopted", "is_held")

    def __init__(self, driver: Driver, request_id: RequestId) -> None:
        self._driver = driver
        self._id = request_id
        self.is_held = False  # the core waits for our RequestFinished
        self.is_adopted = False  # the request's hand-off goes on without it

    def begin(self) -> None:
        """The core has said where the request goes."""
        self.is_held = True

    def failed(
        self, kind: FailureKind, status: int | None = None, *, is_prefill: bool = False
    ) -> RequestCommand | None:
        """Tell of a failed attempt, and return whether there is another: Forward, if there is."""
        event = PrefillFailed if is_prefill else RequestFailed
        command = self._driver.handle(event(self._id, kind, status))
        if not isinstance(command, Forward):
            self.is_held = False
        return command

    def prefilled(self, is_held: bool) -> None:
        """The prefill leg was answered. `is_held`: its blocks are kept for the decode leg."""
        self._driver.handle(PrefillEnded(self._id, is_held))

    def first_byte(self, *, shows_prefill: bool) -> None:
        """The answer begins. `shows_prefill`: it does so only once the prompt is computed."""
        self._driver.handle(RequestFirstByte(self._id, shows_prefill))

    def finish(
        self,
        outcome: Outcome,
        completion_tokens: int | None = None,
        cached_tokens: int | None = None,
        *,
        told: Callable[[], ToldTokens] | None = None,
    ) -> None:
        """Give it back, once. Tokens: as the engine reported them. `told`: asked where requests may have to wait."""
        if self.is_held and not self.is_adopted:
            self.is_held = False
            is_charged = self._driver.core.admission is not None
            all_told = told() if told is not None and is_charged else NOTHING_TOLD
            finished = RequestFinished(
                self._id, outcome, completion_tokens, cached_tokens, *all_told
            )
            self._driver.handle(finished)
