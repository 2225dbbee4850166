"""How much of what is reused can come from devices at best, whatever routes. Pure.

A session's KV is of use on a device if it is still there when the session comes back, so keeping it takes room for
as long as the pause lasts. All devices together have so many token-seconds, less what is held while requests are
computed. Two bounds, as if all memory were one and no room were lost between instances:

- *foresight*: the shortest pauses are kept, each for as long as it lasts. Nobody can know them.
- *recency*: all is kept for the same time after its last use, the longest for which there is room. Where the longer
  a session has paused, the longer it will still pause (as with agents), no rule that doesn't know the future does
  better.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Pause(NamedTuple):
    """Between two turns of a session. `reused_tokens` 0: it did not come back."""

    seconds: float
    kept_tokens: int
    reused_tokens: int


class Bounds(NamedTuple):
    """Shares of all reused tokens."""

    foresight: float
    recency: float
    kept_s: float  # for how long recency can keep what was used


def device_bounds(pauses: Sequence[Pause], room_token_s: float, reused_tokens: int) -> Bounds:
    """Return what share of `reused_tokens` could have come from devices with this room."""
    if not reused_tokens:
        return Bounds(0.0, 0.0, 0.0)
    room, foreseen = max(room_token_s, 0.0), 0.0
    for pause in sorted(p for p in pauses if p.reused_tokens):
        needed = max(pause.seconds * pause.kept_tokens, 1.0)
        share = min(room / needed, 1.0)
        foreseen += share * pause.reused_tokens
        room -= share * needed
    kept_s = _longest(pauses, room_token_s)
    recent = sum(p.reused_tokens for p in pauses if p.seconds <= kept_s)
    return Bounds(min(foreseen / reused_tokens, 1.0), min(recent / reused_tokens, 1.0), kept_s)


def _longest(pauses: Sequence[Pause], room_token_s: float) -> float:
    """Return for how long all can be kept, at most as long as the longest pause."""
    low, high = 0.0, max((p.seconds for p in pauses), default=0.0)
    for _ in range(60):
        middle = (low + high) / 2
        needed = sum(min(p.seconds, middle) * p.kept_tokens for p in pauses)
        low, high = (middle, high) if needed <= room_token_s else (low, middle)
    return high
