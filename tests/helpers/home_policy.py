"""A policy under which a prompt never leaves whoever has it: another holder then has it from a seeding."""

from __future__ import annotations

from collections.abc import Sequence

from moongate.router import Candidate, Ranked, Reason
from moongate.router.policy import RandomBelow, Situation


class Home:
    """To whom has the most of the prompt, whatever else is to be done there."""

    name = "home"
    reads_prompts = True

    def rank(
        self, situation: Situation, candidates: Sequence[Candidate], random_below: RandomBelow
    ) -> list[Ranked]:
        order = sorted(candidates, key=lambda c: (-c.overlap_tokens, c.holder))
        return [Ranked(candidate, Reason.DEVICE_PREFIX) for candidate in order]
