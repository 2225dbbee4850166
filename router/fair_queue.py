"""Requests that wait, and which of them is next.

Theory of operation. Tenants share by tokens: one that has had more waits until the others have had as much.
Within a tenant priorities count, the lower first, but a class that was passed over `PASSED_MAX` times is next,
whatever waits before it. Within a class sessions share by deficit round robin (`rounds.py`), so that those of
short turns go on while those of long prompts collect what these cost. Within a session the first is first.

What a request costs is estimated when it starts. Once it is known, the difference is taken or given back
(`correct`): of a tenant also while nothing of it waits, as long as others do; of a session only while it waits,
since a client may call its next one otherwise. But only if others could have started in its stead. Else nobody
lost anything by it, and what it was charged with it did not have to wait for.

Nothing here knows of time or of instances: whether a request can start is asked of whoever takes, by its kind.

Invariants: every request is in one session, of one class, of one tenant; none of these is empty.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from moongate.router.model import Request, RequestId
from moongate.router.rounds import Rounds

QUANTUM_TOKENS = 4096
"""More than most turns of agents have to compute, so that these go one by one, and a small part of a long
history."""

PASSED_MAX = 8
"""How often a class may be passed over in favour of those before it."""


class Kind(NamedTuple):
    """What tells which instances could take a request."""

    model: str
    may_hand_over: bool = False
    stays_whole: bool = False


def kind_of(request: Request) -> Kind:
    return Kind(request.model, request.may_hand_over, request.stays_whole)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits. `tokens`: expected to be computed for it, prompt and answer; at least 1."""

    request: Request
    tokens: int
    deadline: float  # it may start until then

    @property
    def kind(self) -> Kind:
        return kind_of(self.request)

    @property
    def session(self) -> str:
        """Return what shares with others of its kind; a request that names no session is one."""
        request = self.request
        return request.session_key or request.tie_key or f"\0{request.id}"


class Taken(NamedTuple):
    """A request that is next, and whether others could have started in its stead."""

    waiting: Waiting
    has_rivals: bool  # other tenants' requests
    has_siblings: bool  # those of other sessions of its class


CanStart = Callable[[Kind], bool]


@dataclass(slots=True)
class _Amount:
    """How much waits of one kind."""

    count: int = 0
    tokens: int = 0


@dataclass(slots=True)
class _Amounts:
    """How much waits, by kind. Kinds of which none waits are absent."""

    kinds: dict[Kind, _Amount] = field(default_factory=dict)
    count: int = 0

    def add(self, waiting: Waiting) -> None:
        amount = self.kinds.setdefault(waiting.kind, _Amount())
        amount.count += 1
        amount.tokens += waiting.tokens
        self.count += 1

    def remove(self, waiting: Waiting) -> None:
        amount = self.kinds[waiting.kind]
        amount.count -= 1
        amount.tokens -= waiting.tokens
        self.count -= 1
        if not amount.count:
            del self.kinds[waiting.kind]

    def can_any(self, can_start: CanStart) -> bool:
        return any(map(can_start, self.kinds))

    def tokens(self, kinds: Collection[Kind]) -> int:
        """Return the tokens of these kinds together. Cost: O(kinds that wait)."""
        return sum(amount.tokens for kind, amount in self.kinds.items() if kind in kinds)


@dataclass(slots=True)
class _Sizes:
    """How much the sessions of a class have waiting of one kind, and how many have about how much.

    *Why* by powers of two: what all of them have of a share each must not cost a look at each.
    """

    sessions: dict[str, int] = field(default_factory=dict)
    _counts: Counter[int] = field(default_factory=Counter)  # by how many bits their tokens have
    _sums: Counter[int] = field(default_factory=Counter)

    def change(self, session: str, by: int) -> None:
        before = self.sessions.get(session, 0)
        after = self.sessions[session] = before + by
        if before:
            self._note(before, -1)
        if after:
            self._note(after, 1)
        else:
            del self.sessions[session]

    def _note(self, tokens: int, sign: int) -> None:
        bits = tokens.bit_length()
        self._counts[bits] += sign
        self._sums[bits] += sign * tokens
        if not self._counts[bits]:
            del self._counts[bits], self._sums[bits]

    def up_to(self, share: int, but: str) -> int:
        """Return about how much all but one session have together, of each no more than its share."""
        whole = sum(min(self._sums[bits], count * share) for bits, count in self._counts.items())
        return max(whole - min(self.sessions.get(but, 0), share), 0)


@dataclass(slots=True)
class _Class:
    """The sessions of one priority of one tenant."""

    rounds: Rounds[str] = field(default_factory=lambda: Rounds(QUANTUM_TOKENS))
    sessions: dict[str, dict[RequestId, Waiting]] = field(default_factory=dict)
    amounts: _Amounts = field(default_factory=_Amounts)
    sizes: dict[Kind, _Sizes] = field(default_factory=dict)
    passed: int = 0

    def add(self, waiting: Waiting) -> None:
        self.sessions.setdefault(waiting.session, {})[waiting.request.id] = waiting
        self.rounds.join(waiting.session)
        self.amounts.add(waiting)
        self.sizes.setdefault(waiting.kind, _Sizes()).change(waiting.session, waiting.tokens)

    def remove(self, waiting: Waiting) -> None:
        session = self.sessions[waiting.session]
        del session[waiting.request.id]
        self.amounts.remove(waiting)
        sizes = self.sizes[waiting.kind]
        sizes.change(waiting.session, -waiting.tokens)
        if not sizes.sessions:
            del self.sizes[waiting.kind]
        if not session:
            del self.sessions[waiting.session]
            self.rounds.leave(waiting.session)

    def find(self, can_start: CanStart) -> Waiting | None:
        """Return what is next. None: nothing can start."""
        if not self.amounts.can_any(can_start):
            return None

        def first_of(session: str) -> Waiting | None:
            members = self.sessions[session].values()
            return next((waiting for waiting in members if can_start(waiting.kind)), None)

        def cost_of(session: str) -> int | None:
            waiting = first_of(session)
            return waiting.tokens if waiting is not None else None

        session = self.rounds.find(cost_of)
        return first_of(session) if session is not None else None

    def tokens_before(self, waiting: Waiting, kinds: Collection[Kind]) -> int:
        """Return about how many tokens of the class are served before a request at its end."""
        session = waiting.session
        sizes = [sizes for kind, sizes in self.sizes.items() if kind in kinds]
        own = sum(each.sessions.get(session, 0) for each in sizes)
        # By then each other session has had so many rounds, too.
        share = _rounded(own + waiting.tokens)
        return own + sum(each.up_to(share, but=session) for each in sizes)


@dataclass(slots=True)
class _Tenant:
    """All that waits of one tenant, by priority."""

    classes: dict[int, _Class] = field(default_factory=dict)
    amounts: _Amounts = field(default_factory=_Amounts)

    def add(self, waiting: Waiting) -> None:
        self.classes.setdefault(waiting.request.priority, _Class()).add(waiting)
        self.amounts.add(waiting)

    def remove(self, waiting: Waiting) -> None:
        self.amounts.remove(waiting)
        members = self.classes[waiting.request.priority]
        members.remove(waiting)
        if not members.sessions:
            del self.classes[waiting.request.priority]

    def find(self, can_start: CanStart) -> Waiting | None:
        """Return what is next. None: nothing can start."""
        if not self.amounts.can_any(can_start):
            return None
        in_order = sorted(self.classes)
        due = [p for p in in_order if self.classes[p].passed >= PASSED_MAX]
        found = (self.classes[p].find(can_start) for p in dict.fromkeys([*due, *in_order]))
        return next((waiting for waiting in found if waiting is not None), None)

    def charge(self, waiting: Waiting) -> None:
        """What was found is served."""
        taken = waiting.request.priority
        for priority, members in self.classes.items():
            if priority > taken:
                members.passed += 1
        self.classes[taken].passed = 0
        self.classes[taken].rounds.charge(waiting.session, waiting.tokens)

    def has_siblings(self, waiting: Waiting, can_start: CanStart) -> bool:
        """Tell whether another session of its class has something that could start."""
        sizes = self.classes[waiting.request.priority].sizes.items()
        startable = (each.sessions for kind, each in sizes if can_start(kind))
        return any(len(sessions) > (waiting.session in sessions) for sessions in startable)

    def correct(self, waiting: Waiting, more: int) -> None:
        """It has cost so much more than it was charged for, or less."""
        members = self.classes.get(waiting.request.priority)
        if members is not None:
            members.rounds.correct(waiting.session, more)

    def tokens_before(self, waiting: Waiting, kinds: Collection[Kind]) -> int:
        """Return about how many of the tenant's tokens are served before a request at its end."""
        priority = waiting.request.priority
        before = sum(c.amounts.tokens(kinds) for p, c in self.classes.items() if p < priority)
        members = self.classes.get(priority)
        return before + (members.tokens_before(waiting, kinds) if members is not None else 0)


@dataclass(slots=True)
class FairQueue:
    """All that waits. Its bound is kept by whoever adds; see `find_excess`."""

    _tenants: dict[str, _Tenant] = field(default_factory=dict)
    _rounds: Rounds[str] = field(default_factory=lambda: Rounds(QUANTUM_TOKENS))
    _waiting: dict[RequestId, Waiting] = field(default_factory=dict)
    _amounts: _Amounts = field(default_factory=_Amounts)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiting]:
        """Return all that wait, those that came first first."""
        return iter(self._waiting.values())

    @property
    def kinds(self) -> Collection[Kind]:
        """Return the kinds of which some wait."""
        return self._amounts.kinds.keys()

    def tokens(self, kinds: Collection[Kind]) -> int:
        """Return what all that wait of these kinds cost together. Cost: O(kinds that wait)."""
        return self._amounts.tokens(kinds)

    def find(self, request_id: RequestId) -> Waiting | None:
        return self._waiting.get(request_id)

    def add(self, waiting: Waiting) -> None:
        request = waiting.request
        assert request.id not in self._waiting, request.id
        assert waiting.tokens > 0, waiting
        self._waiting[request.id] = waiting
        self._amounts.add(waiting)
        self._tenants.setdefault(request.tenant, _Tenant()).add(waiting)
        self._rounds.join(request.tenant)

    def remove(self, request_id: RequestId) -> Waiting | None:
        """Take a request out that is not to start. None: it doesn't wait."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._amounts.remove(waiting)
            self._tenants[waiting.request.tenant].remove(waiting)
            self._forget_if_empty(waiting.request.tenant)
        return waiting

    def take(self, can_start: CanStart) -> Taken | None:
        """Remove and return the request that is next of those that can start. None: none can.

        Cost: O(kinds that wait) if none can, else O(requests that wait), at most.
        """
        if not self._amounts.can_any(can_start):
            return None
        found: dict[str, Waiting | None] = {}

        def cost_of(tenant: str) -> int | None:
            if tenant not in found:
                found[tenant] = self._tenants[tenant].find(can_start)
            waiting = found[tenant]
            return waiting.tokens if waiting is not None else None

        tenant = self._rounds.find(cost_of)
        waiting = found[tenant] if tenant is not None else None
        if tenant is None or waiting is None:
            return None
        others = (each for name, each in self._tenants.items() if name != tenant)
        taken = Taken(
            waiting,
            any(other.amounts.can_any(can_start) for other in others),
            self._tenants[tenant].has_siblings(waiting, can_start),
        )
        self._rounds.charge(tenant, waiting.tokens)
        self._tenants[tenant].charge(waiting)
        self.remove(waiting.request.id)
        return taken

    def correct(self, taken: Taken, tokens: int) -> None:
        """What was taken is over, and has cost so many tokens."""
        waiting = taken.waiting
        more, tenant = tokens - waiting.tokens, waiting.request.tenant
        if taken.has_rivals:
            self._rounds.correct(tenant, more, owes=True)
        if taken.has_siblings and tenant in self._tenants:
            self._tenants[tenant].correct(waiting, more)

    def _forget_if_empty(self, tenant: str) -> None:
        if not self._tenants[tenant].amounts.count:
            del self._tenants[tenant]
            self._rounds.leave(tenant, owes=True)

    def tokens_before(self, waiting: Waiting, kinds: Collection[Kind]) -> int:
        """Return about how many tokens of these kinds are served before a request that is added now.

        Cost: O(tenants + classes of its own, each times the kinds that wait).
        """
        tenant = self._tenants.get(waiting.request.tenant)
        own = tenant.tokens_before(waiting, kinds) if tenant is not None else 0
        share = _rounded(own + waiting.tokens)
        others = (t for name, t in self._tenants.items() if name != waiting.request.tenant)
        return own + sum(min(other.amounts.tokens(kinds), share) for other in others)

    def find_excess(self, newcomer: Waiting) -> Waiting:
        """Return which request has to go, where the one that came last is one too many.

        Of the tenant that has most waiting, of the kind of which it has most, of its last class, of the
        session that has most there: the last one. So whoever sends much can't keep the others out. Of equals
        those of the newcomer, else those that came last.
        Cost: O(requests of one class); once for each request that is refused so.
        """
        tenants, came = self._tenants, newcomer.request.tenant
        name = max(reversed(tenants), key=lambda name: (tenants[name].amounts.count, name == came))
        kinds, newest = tenants[name].amounts.kinds, newcomer.kind
        kind = max(reversed(kinds), key=lambda kind: (kinds[kind].count, kind == newest))
        last = max(p for p, members in tenants[name].classes.items() if kind in members.sizes)
        members, own = tenants[name].classes[last], newcomer.session
        lengths = {
            session: len(members.sessions[session]) for session in members.sizes[kind].sessions
        }
        longest = max(reversed(lengths), key=lambda session: (lengths[session], session == own))
        of_session = reversed(members.sessions[longest].values())
        return next(waiting for waiting in of_session if waiting.kind == kind)


def _rounded(tokens: int) -> int:
    """Return what a flow has been given when it can serve so many tokens."""
    return math.ceil(tokens / QUANTUM_TOKENS) * QUANTUM_TOKENS
