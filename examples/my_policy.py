"""A policy of one's own: to the instance with the fewest prompt tokens ahead.

Use it with `policy: {name: "my_policy:FewestTokensAhead"}` and this file's folder on PYTHONPATH.
"""

import heapq
from collections.abc import Sequence

from moongate.router import Candidate, Ranked, Reason
from moongate.router.policy import RandomBelow, Situation


class FewestTokensAhead:
    name = "fewest_tokens_ahead"
    reads_prompts = False

    def rank(
        self, situation: Situation, candidates: Sequence[Candidate], random_below: RandomBelow
    ) -> list[Ranked]:
        first = heapq.nsmallest(
            situation.places, candidates, key=lambda c: (c.queued_prefill_tokens, c.last_chosen)
        )
        return [Ranked(candidate, Reason.LOAD) for candidate in first]
