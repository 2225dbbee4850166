"""Sessions whose next turn does not begin like the last: noticed, explained, counted.

An agent that changes what it sent before (its system prompt, the order of its tools, an old message) pays for
its whole history again, and nobody tells it. Here the turn before is remembered by its session key, without its
text, so that a turn which shares less with it than it could is told why.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moongate.gateway.dialects.body import name_session
from moongate.gateway.prompts.prompt_outline import (
    Cause,
    Difference,
    Outline,
    TextMemory,
    find_difference,
    outline_of,
)
from moongate.router import BlockSpace, Prompt
from moongate.router.model import TEXT_SPACE, BlockHash

logger = logging.getLogger(__name__)

SESSIONS_MAX = 1_000
"""The latest, of about 15 KB each; one that is found no more has lost nothing but its report."""

LINES_MAX = 4
"""Conversations under one key: sub-agents send their parent's."""

TEXT_BYTES_MAX = 33_554_432
"""Of hashes of messages: of 530 MB of text; or of the texts, where they are kept."""

LOST_TOKENS_MIN = 256
"""A turn that lost less than this, or than `LOST_SHARE` of what it could reuse, has not diverged: templates
render the last few tokens otherwise once an answer follows."""

LOST_SHARE = 0.1

MARK_BLOCKS = 8
"""Every so many blocks one is remembered, to tell how much is shared; of long prompts, fewer."""

MARKS_MAX = 64

ALIKE_SHARE = 0.5
"""A turn that has so many of the messages of the turn before goes on with it; else it is another line."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """One turn that did not begin like the turn before. `session`: a hash of its key."""

    session: str
    model: str
    could_reuse_tokens: int  # the turn before was so long
    shared_tokens: int
    difference: Difference

    @property
    def lost_tokens(self) -> int:
        return self.could_reuse_tokens - self.shared_tokens

    def as_json(self) -> dict[str, Any]:
        told = {name: value for name, value in asdict(self.difference).items() if value is not None}
        return {
            "session": self.session,
            "model": self.model,
            "could_reuse_tokens": self.could_reuse_tokens,
            "shared_tokens": self.shared_tokens,
            "lost_tokens": self.lost_tokens,
            **told,
            "cause": self.difference.cause.value,
        }


@dataclass(frozen=True, slots=True)
class _Turn:
    """The last turn of a line: its outline, and blocks of its prompt by their places."""

    outline: Outline
    space: BlockSpace
    marks: Mapping[int, BlockHash]  # by how many blocks precede and include it


class Divergences:
    """Remembers sessions. `on_divergence` is called for each that is found."""

    def __init__(self, on_divergence: Callable[[Divergence], None], *, keeps_text: bool) -> None:
        self._on_divergence = on_divergence
        self._keeps_text = keeps_text
        self._texts = TextMemory(TEXT_BYTES_MAX, keeps_text=keeps_text)
        self._sessions: OrderedDict[tuple[str, str], deque[_Turn]] = OrderedDict()

    def keep_text(self, *, keeps_text: bool) -> None:
        """Keep texts from now on, or none any more, nor those that are kept."""
        if keeps_text != self._keeps_text:
            self._keeps_text = keeps_text
            self._texts = TextMemory(TEXT_BYTES_MAX, keeps_text=keeps_text)

    def note(
        self,
        session_key: str,
        model: str,
        fields: Mapping[str, Any],
        salt: str | None,
        prompt: Prompt,
    ) -> Divergence | None:
        """Take in a session's next turn; return how it diverged, if it did."""
        turn = self._turn(fields, salt, prompt)
        if turn is None:
            return None
        lines = self._sessions.setdefault((model, session_key), deque(maxlen=LINES_MAX))
        self._sessions.move_to_end((model, session_key))
        if len(self._sessions) > SESSIONS_MAX:
            self._sessions.popitem(last=False)
        before = _line_of(turn, lines)
        found = self._compare(session_key, model, before, turn, prompt)
        if before is not None:
            lines.remove(before)
        lines.append(turn)
        if found is not None:
            self._report(found)
        return found

    def explain(
        self,
        session_key: str,
        model: str,
        fields: Mapping[str, Any],
        salt: str | None,
        prompt: Prompt,
    ) -> Divergence | None:
        """Return how a turn would diverge; nothing is remembered of it."""
        turn, lines = self._turn(fields, salt, prompt), self._sessions.get((model, session_key))
        if turn is None or lines is None:
            return None
        return self._compare(session_key, model, _line_of(turn, lines), turn, prompt)

    def forget(self, session_key: str, model: str) -> None:
        """Forget a session: it has ended, and another one may take its key."""
        self._sessions.pop((model, session_key), None)

    def _turn(self, fields: Mapping[str, Any], salt: str | None, prompt: Prompt) -> _Turn | None:
        space, chain = next(iter(prompt.chains.items()), (TEXT_SPACE, ()))
        if space == TEXT_SPACE or not prompt.is_exact or not chain:
            return None
        step = max(MARK_BLOCKS, len(chain) // MARKS_MAX)
        marks = {count: chain[count - 1] for count in range(step, len(chain) + 1, step)}
        marks[len(chain)] = chain[-1]
        outline = outline_of(fields, salt, self._texts)
        if outline is None:
            return None
        return _Turn(outline, space, marks)

    def _compare(
        self, session_key: str, model: str, before: _Turn | None, turn: _Turn, prompt: Prompt
    ) -> Divergence | None:
        if before is None or before.space not in prompt.chains:
            return None
        shared = _shared_blocks(before.marks, prompt.chains[before.space])
        shared_tokens = shared * (before.space.block_size_tokens or 0)
        could = max(before.marks) * (before.space.block_size_tokens or 0)
        if could - shared_tokens < max(LOST_TOKENS_MIN, LOST_SHARE * could):
            return None
        difference = find_difference(before.outline, turn.outline, self._texts)
        if difference is None:
            difference = Difference(Cause.TEMPLATE)
        name = name_session(session_key)
        return Divergence(name, model, could, shared_tokens, difference)

    def _report(self, found: Divergence) -> None:
        self._on_divergence(found)
        told = found.as_json()
        logger.info(
            "session %s reuses %d of %d tokens: %s", found.session, found.shared_tokens,
            found.could_reuse_tokens, ", ".join(f"{k} {v!r}" for k, v in told.items() if k in _LOGGED),
        )  # fmt: skip


_LOGGED = ("cause", "message", "role", "byte", "bytes_before", "bytes_now")


def _line_of(turn: _Turn, lines: Sequence[_Turn]) -> _Turn | None:
    """Return the turn that this one goes on with: the one most like it, if it is enough so."""
    best = max(lines, key=lambda before: before.outline.shared_with(turn.outline), default=None)
    if best is None:
        return None
    alike = best.outline.shared_with(turn.outline)
    count = min(len({*best.outline.messages}), len({*turn.outline.messages}))
    return best if alike and alike >= ALIKE_SHARE * count else None


def _shared_blocks(marks: Mapping[int, BlockHash], chain: Sequence[BlockHash]) -> int:
    """Return how many leading blocks are shared, to `MARK_BLOCKS`."""
    alike = (
        count for count, block in marks.items() if count <= len(chain) and chain[count - 1] == block
    )
    return max(alike, default=0)
