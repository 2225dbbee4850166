"""Workloads: what conversations ask for, turn by turn, and what their prompts share.

A *script* is a conversation as data: turns of so many tokens after so long a pause. Its prompts lie on *lines*,
which become branches of content when the script is played; a script that is played twice shares with its
first play what it shares with other conversations, and nothing else. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from moongate.loadtest.traces import TraceConversation
from moongate.simulator.content import Branch, Library


class Line(NamedTuple):
    """Where a branch of content leaves another. `is_shared`: it is the same in every play."""

    parent: int | None
    fork: int  # blocks
    is_shared: bool = False


class Turn(NamedTuple):
    """One request. `line`: the prompt, and the answer after it."""

    line: int
    prompt_tokens: int
    answer_tokens: int
    gap_s: float  # from the end of the answer before it


class Script(NamedTuple):
    """One conversation."""

    id: str
    turns: Sequence[Turn]
    starts_at_s: float | None = None  # since the workload's beginning; None: whenever wanted
    key: str | None = None  # that its client sends, where that is not one for each session


@dataclass(slots=True)
class Workload:
    """Scripts, and the lines that their prompts lie on."""

    name: str
    block_tokens: int
    lines: list[Line] = field(default_factory=list)
    scripts: list[Script] = field(default_factory=list)

    def line(self, parent: int | None = None, fork: int = 0, *, is_shared: bool = False) -> int:
        """Add a line and return its number."""
        self.lines.append(Line(parent if fork else None, fork, is_shared))
        return len(self.lines) - 1


class Stage:
    """Turns lines into branches, for plays of a workload's scripts."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._library = Library()
        self._shared: dict[int, Branch] = {}

    def play(self, script: Script) -> Play:
        return Play(self, script)

    def make(self, number: int, own: dict[int, Branch]) -> Branch:
        line = self.workload.lines[number]
        table = self._shared if line.is_shared else own
        branch = table.get(number)
        if branch is None:
            parent = self.make(line.parent, own) if line.parent is not None else None
            branch = table[number] = self._library.branch(parent, line.fork)
        return branch


class Play:
    """One conversation under way."""

    __slots__ = ("_own", "_stage", "next_turn", "script")

    def __init__(self, stage: Stage, script: Script) -> None:
        self._stage = stage
        self._own: dict[int, Branch] = {}
        self.script = script
        self.next_turn = 0

    def branch(self, turn: Turn) -> Branch:
        return self._stage.make(turn.line, self._own)


# --- recorded traces ------------------------------------------------------------------------------


def from_traces(
    name: str,
    conversations: Iterable[TraceConversation],
    *,
    prompt_tokens_max: int,
    gap_s_max: float,
) -> Workload:
    """Return recorded conversations as a workload.

    A conversation ends before the first prompt that is too long; longer pauses are cut to `gap_s_max`.
    Raises ValueError if there is nothing to play, or block sizes differ.
    """
    told = [c for c in conversations if c.requests]
    sizes = {c.block_size_tokens for c in told}
    if len(sizes) != 1:
        raise ValueError(
            f"{name}: conversations with one block size are wanted, got {sorted(sizes)}"
        )
    builder = _Builder(Workload(name, sizes.pop()), _shared_ids(told))
    for conversation in told:
        builder.add(conversation, prompt_tokens_max, gap_s_max)
    if not builder.workload.scripts:
        raise ValueError(f"{name}: no conversation begins with at most {prompt_tokens_max} tokens")
    return builder.workload


def _shared_ids(conversations: Sequence[TraceConversation]) -> set[int]:
    """Return the ids of blocks that several conversations have."""
    seen: set[int] = set()
    shared: set[int] = set()
    for conversation in conversations:
        own = set(itertools.chain.from_iterable(r.blocks for r in conversation.requests))
        shared |= seen & own
        seen |= own
    return shared


class _Builder:
    """Lines of the prompts seen so far. A block's id stands for its whole prefix."""

    def __init__(self, workload: Workload, shared: set[int]) -> None:
        self.workload = workload
        self._shared = shared
        self._line_of: dict[int, int] = {}
        self._ends: list[int] = []  # of each line, where it can be continued

    def add(
        self, conversation: TraceConversation, prompt_tokens_max: int, gap_s_max: float
    ) -> None:
        requests = list(
            itertools.takewhile(
                lambda request: request.prompt_tokens <= prompt_tokens_max, conversation.requests
            )
        )
        size, turns = conversation.block_size_tokens, []
        prompts = [request.blocks[: request.prompt_tokens // size] for request in requests]
        lines = [self._place(prompt) for prompt in prompts]
        for number, request in enumerate(requests):
            prompt, line = prompts[number], lines[number]
            following = prompts[number + 1] if number + 1 < len(prompts) else prompt[:0]
            filled = (request.prompt_tokens + request.output_tokens - 1) // size
            if filled > len(prompt):
                line = self._line_after(prompt, following, line)
            gap_s = min(request.think_s, gap_s_max) if number else 0.0
            turns.append(Turn(line, request.prompt_tokens, request.output_tokens, gap_s))
        if turns:
            script = Script(conversation.id, turns, conversation.starts_at_s)
            self.workload.scripts.append(script)

    def _place(self, prompt: Sequence[int]) -> int:
        """Return the line on which a prompt ends, after adding what of it is new."""
        known, count = self._known(prompt), len(prompt)
        line = self._line_of[prompt[known - 1]] if known else None
        while known < count or line is None:
            is_shared = known < count and prompt[known] in self._shared
            end = known
            while end < count and (prompt[end] in self._shared) == is_shared:
                end += 1
            line = self._continue(line, known, is_shared=is_shared)
            self._line_of.update(dict.fromkeys(prompt[known:end], line))
            self._ends[line] = known = end
        return line

    def _continue(self, line: int | None, at: int, *, is_shared: bool) -> int:
        lines = self.workload.lines
        if line is not None and self._ends[line] == at and lines[line].is_shared == is_shared:
            return line
        self._ends.append(at)
        return self.workload.line(line, at, is_shared=is_shared)

    def _known(self, prompt: Sequence[int]) -> int:
        low, high = 0, len(prompt)
        while low < high:
            middle = (low + high + 1) // 2
            if prompt[middle - 1] in self._line_of:
                low = middle
            else:
                high = middle - 1
        return low

    def _line_after(self, prompt: Sequence[int], following: Sequence[int], line: int) -> int:
        """Return the line of an answer: the next prompt's if that resends it, else one of its own."""
        count = len(prompt)
        if len(following) > count and (not count or following[count - 1] == prompt[-1]):
            return self._line_of[following[count]]
        self._ends.append(count)
        return self.workload.line(line, count)
