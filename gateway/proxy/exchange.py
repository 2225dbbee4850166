"""One request from its body to the end of its answer: the state that the parts of the hot path share.

It decides nothing. The parts live as long as the gateway and are given an exchange with each call; a
field that changes is written by the one part that is named above it, and read by others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moongate.gateway.auth.access import Meter
from moongate.gateway.config.settings import Settings
from moongate.gateway.dialects.aliases import Renaming
from moongate.gateway.dialects.body import Body
from moongate.gateway.dialects.routes import Route
from moongate.gateway.dialects.usage import UsageReader
from moongate.gateway.pool.pooling import PromptTokens
from moongate.gateway.prompts.prompt import ReadPrompt
from moongate.gateway.proxy.account import Account
from moongate.gateway.proxy.client import Client
from moongate.gateway.proxy.handing_over import HandoffRun
from moongate.gateway.proxy.reservation import Reservation, ToldTokens
from moongate.gateway.responses.response_turns import ResponseTurn
from moongate.router import RequestId

NOT_READ = ReadPrompt(None)
"""Of a prompt at which the policy doesn't look."""


@dataclass(slots=True, eq=False, repr=False)
class Exchange:
    """One request under way."""

    # As it began.
    id: RequestId  # ours; a client's is the account's
    settings: Settings  # a reload is for those that come after
    client: Client
    route: Route
    headers: Mapping[str, str]
    meter: Meter | None  # of its tenant's rates; None: nothing limits it
    account: Account
    reservation: Reservation

    # Written by `intake.py`, before the core is asked.
    body: Body = field(init=False)  # as engines may get it
    read: ReadPrompt = NOT_READ
    turn: ResponseTurn | None = None  # whose answer is read in passing
    renaming: Renaming | None = None  # of a model that has an alias
    drops_usage: bool = False  # asked for by us, not by the client
    pool_prompt: PromptTokens | None = None  # as the pool names it, where there is one

    # Written by `attempts.py` and `pairs.py`: of the attempt under way.
    handoff: HandoffRun | None = None

    # Written by `engine_answers.py`, while the answer passes.
    # Of a stream, as far as it has come; of another answer once it is complete.
    usage: UsageReader = field(default_factory=UsageReader)
    is_stream: bool = False  # of events, and it has begun
    opening: Sequence[bytes] = ()  # of a stream: its first events, as the client got them

    @property
    def has_one_choice(self) -> bool:
        """Tell whether what an engine reports as completion tokens is one answer's length."""
        return self.body.top.get("n") in (None, 1)

    @property
    def has_exact_prompt(self) -> bool:
        """Tell whether the prompt's token ids are the engine's very own."""
        return self.read.prompt is not None and self.read.prompt.is_exact

    def told_tokens(self) -> ToldTokens:
        """Return what the answer has come to: all of it, or a stream as far as it came."""
        usage = self.usage
        told = usage.completion_tokens()
        generated = told if told is not None or not self.is_stream else usage.events
        return ToldTokens(generated, usage.prompt_tokens() if self.route.is_cached else None)
