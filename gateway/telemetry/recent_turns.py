"""The last turns, and whose they were: what was decided, and what happened afterwards.

For people who look (`live.py`): nothing here decides anything. Noting a turn costs a few microseconds and a
bounded memory, whether anybody looks or not; whatever takes longer is computed when somebody does.

A session is known by its key. A turn without one belongs to the session whose last prompt its own begins with.
Prompts are not kept: of a session's last one a few block hashes are (marks), evenly spread, which is enough to
see how much of it an instance holds.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from moongate.gateway.prompts.divergence import Divergence
from moongate.gateway.telemetry.receipt import Receipt
from moongate.router import Decision, Request
from moongate.router.model import BlockHash, BlockSpace, InstanceId, Prompt

TURNS_MAX = 256
"""Turns that are remembered; the oldest go first."""

SESSIONS_MAX = 256
"""Sessions that are remembered; the ones longest without a turn go first."""

MARKS_MAX = 64
"""Blocks that are kept of a session's last prompt: what is held is known to a 64th of it."""

GROWTH_BLOCKS_MAX = 512
"""How far before its end a prompt without a key is searched for the end of the turn before: 8 K tokens at
block size 16, four times what a turn of an agent adds. Past it the turn counts as a new session."""

DIVERGENCES_MAX = 32
PERIOD_S = 10.0
PERIODS_MAX = 60
"""Reuse is added up by these periods, for ten minutes."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Evenly spread blocks of a chain, and its last one. Tokens are those up to a block's end."""

    blocks: Sequence[BlockHash]
    step_tokens: int
    last_tokens: int

    def ends(self) -> Iterator[tuple[int, BlockHash]]:
        """Yield each block with the leading tokens that end with it."""
        for number, block in enumerate(self.blocks, 1):
            yield min(number * self.step_tokens, self.last_tokens), block


@dataclass(slots=True)
class Session:
    """A session as its last turn left it."""

    number: int  # counts the sessions from 1
    key: str | None  # as the client gave it; None: told by its prompts
    model: str
    turns: int = 0
    at: float = 0.0  # of its last turn
    prompt_tokens: int | None = None
    pool_tokens: int = 0  # leading ones that the pool had of it
    instance: InstanceId | None = None
    marks: Mapping[BlockSpace, Marks] = field(default_factory=dict)  # of its last prompt
    tail: BlockHash | None = None  # the last full block of its last prompt


@dataclass(slots=True)
class Turn:
    """One request that was forwarded, and whose it was."""

    number: int  # counts the turns from 1
    at: float
    session: Session
    receipt: Receipt

    @property
    def instance(self) -> InstanceId:
        return self.receipt.decision.chosen.holder.instance_id

    @property
    def prefill_instance(self) -> InstanceId | None:
        prefill = self.receipt.decision.prefill
        return prefill.holder.instance_id if prefill is not None else None


@dataclass(slots=True)
class Period:
    """Prompt tokens of the turns of one period, by where routing expected them to come from."""

    began_at: float
    device: int = 0
    pool: int = 0
    recompute: int = 0


class RecentTurns:
    """What is remembered of turns. The hot path notes, the live view reads."""

    def __init__(self) -> None:
        self.turns: deque[Turn] = deque(maxlen=TURNS_MAX)
        self.sessions: OrderedDict[tuple[str, str] | int, Session] = OrderedDict()
        self.divergences: deque[tuple[float, Divergence]] = deque(maxlen=DIVERGENCES_MAX)
        self.periods: deque[Period] = deque(maxlen=PERIODS_MAX)
        self.turn_count = 0
        self.session_count = 0
        self._by_tail: dict[BlockHash, int] = {}  # of sessions without a key

    def begin(self, request: Request, receipt: Receipt, now: float) -> Turn:
        """Note a request's first forward. What happens afterwards is written into its receipt."""
        self.turn_count += 1
        decision, session = receipt.decision, self._session_of(request)
        turn = Turn(self.turn_count, now, session, receipt)
        session.turns += 1
        session.at = now
        session.prompt_tokens = request.prompt_tokens
        session.instance = turn.instance
        parts = (ranked.candidate.pool for ranked in decision.ranking)
        session.pool_tokens = max((part.tokens for part in parts if part is not None), default=0)
        self.turns.append(turn)
        self._add_up(decision, now)
        return turn

    def forward_again(self, turn: Turn) -> None:
        """Note that a turn went elsewhere after an attempt that failed, as its receipt says."""
        turn.session.instance = turn.instance

    def note_divergence(self, found: Divergence, now: float) -> None:
        self.divergences.append((now, found))

    # --- sessions ---------------------------------------------------------------------------------

    def _session_of(self, request: Request) -> Session:
        """Return the session that a turn belongs to, with what is kept of the turn's prompt."""
        prompt = request.prompt
        chain = next(iter(prompt.chains.values()), ()) if prompt is not None else ()
        key = self._find_key(request, chain)
        session = self.sessions.get(key) if key is not None else None
        if session is None:
            self.session_count += 1
            session = Session(self.session_count, request.session_key, request.model)
            key = key if key is not None else session.number
            self._make_room()
            self.sessions[key] = session
        assert key is not None
        self.sessions.move_to_end(key)
        if isinstance(key, int):
            self._move_tail(session, chain[-1] if chain else None)
        session.marks = marks_of(prompt) if prompt is not None else {}
        return session

    def _find_key(
        self, request: Request, chain: Sequence[BlockHash]
    ) -> tuple[str, str] | int | None:
        if request.session_key is not None:
            return request.model, request.session_key
        first = max(len(chain) - GROWTH_BLOCKS_MAX, 0)
        for position in range(len(chain) - 1, first - 1, -1):
            number = self._by_tail.get(chain[position])
            if number is not None:
                return number
        return None

    def _move_tail(self, session: Session, tail: BlockHash | None) -> None:
        self._forget_tail(session)
        session.tail = tail
        if tail is not None:
            self._by_tail[tail] = session.number

    def _forget_tail(self, session: Session) -> None:
        if session.tail is not None and self._by_tail.get(session.tail) == session.number:
            del self._by_tail[session.tail]

    def _make_room(self) -> None:
        if len(self.sessions) >= SESSIONS_MAX:
            _, oldest = self.sessions.popitem(last=False)
            self._forget_tail(oldest)

    # --- reuse over time --------------------------------------------------------------------------

    def _add_up(self, decision: Decision, now: float) -> None:
        if decision.prompt_tokens is None:
            return
        began_at = now - now % PERIOD_S
        if not self.periods or self.periods[-1].began_at != began_at:
            self.periods.append(Period(began_at))
        period = self.periods[-1]
        period.device += decision.device_tokens
        period.pool += decision.pool_tokens
        period.recompute += decision.recompute_tokens


def marks_of(prompt: Prompt) -> dict[BlockSpace, Marks]:
    """Return a few blocks of each of the prompt's chains, its last one among them."""
    marks: dict[BlockSpace, Marks] = {}
    for space, chain in prompt.chains.items():
        known = prompt.known_in(space)
        step = max(1, -(-len(chain) // MARKS_MAX))
        blocks = list(chain[step - 1 :: step])
        if len(chain) % step:
            blocks.append(chain[-1])
        marks[space] = Marks(blocks, step * known.block_tokens, len(chain) * known.block_tokens)
    return marks
