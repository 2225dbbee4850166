"""Requests that wait, and which of them is next.

Theory of operation. Tenants share by tokens: one that has had more waits until the others have had as much.
Within a tenant priorities count, the lower first, but a class that was passed over `PASSED_MAX` times is next,
whatever waits before it. Within a class sessions share by deficit round robin (`rounds.py`), so that those of
short turns go on while those of long prompts collect what these cost. Within a session the first is first.

Nothing here knows of time or of instances: whether a request can start is asked of whoever takes.

Invariants: every request is in one session, of one class, of one tenant; none of these is empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from moongate.router.model import Request, RequestId
from moongate.router.rounds import Rounds

QUANTUM_TOKENS = 4096
"""More than most turns of agents have to compute, so that these go one by one, and a small part of a long
history."""

PASSED_MAX = 8
"""How often a class may be passed over in favour of those before it."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits. `tokens`: expected to be computed for it, prompt and answer; at least 1."""

    request: Request
    tokens: int
    deadline: float  # it may start until then

    @property
    def session(self) -> str:
        """Return what shares with others of its kind; a request that names no session is one."""
        request = self.request
        return request.session_key or request.tie_key or f"\0{request.id}"


CanStart = Callable[[Waiting], bool]


@dataclass(slots=True)
class _Class:
    """The sessions of one priority of one tenant."""

    rounds: Rounds[str] = field(default_factory=lambda: Rounds(QUANTUM_TOKENS))
    sessions: dict[str, dict[RequestId, Waiting]] = field(default_factory=dict)
    passed: int = 0

    def add(self, waiting: Waiting) -> None:
        self.sessions.setdefault(waiting.session, {})[waiting.request.id] = waiting
        self.rounds.join(waiting.session)

    def remove(self, waiting: Waiting) -> None:
        session = self.sessions[waiting.session]
        del session[waiting.request.id]
        if not session:
            del self.sessions[waiting.session]
            self.rounds.leave(waiting.session)

    def find(self, can_start: CanStart) -> Waiting | None:
        """Return what is next. None: nothing can start."""

        def first_of(session: str) -> Waiting | None:
            return next(filter(can_start, self.sessions[session].values()), None)

        def cost_of(session: str) -> int | None:
            waiting = first_of(session)
            return waiting.tokens if waiting is not None else None

        session = self.rounds.find(cost_of)
        return first_of(session) if session is not None else None

    def tokens_before(self, waiting: Waiting) -> int:
        """Return about how many tokens of the class are served before a request at its end."""
        own = _tokens(self.sessions.get(waiting.session, {}).values())
        # By then each other session has had so many rounds, too.
        share = math.ceil((own + waiting.tokens) / QUANTUM_TOKENS) * QUANTUM_TOKENS
        others = (s for name, s in self.sessions.items() if name != waiting.session)
        return own + sum(min(_tokens(session.values()), share) for session in others)

    @property
    def tokens(self) -> int:
        return sum(_tokens(session.values()) for session in self.sessions.values())


@dataclass(slots=True)
class _Tenant:
    """All that waits of one tenant, by priority."""

    classes: dict[int, _Class] = field(default_factory=dict)
    count: int = 0

    def add(self, waiting: Waiting) -> None:
        self.classes.setdefault(waiting.request.priority, _Class()).add(waiting)
        self.count += 1

    def remove(self, waiting: Waiting) -> None:
        self.count -= 1
        members = self.classes[waiting.request.priority]
        members.remove(waiting)
        if not members.sessions:
            del self.classes[waiting.request.priority]

    def find(self, can_start: CanStart) -> Waiting | None:
        """Return what is next. None: nothing can start."""
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

    def tokens_before(self, waiting: Waiting) -> int:
        """Return about how many of the tenant's tokens are served before a request at its end."""
        priority = waiting.request.priority
        before = sum(c.tokens for p, c in self.classes.items() if p < priority)
        members = self.classes.get(priority)
        return before + (members.tokens_before(waiting) if members is not None else 0)

    @property
    def tokens(self) -> int:
        return sum(members.tokens for members in self.classes.values())


@dataclass(slots=True)
class FairQueue:
    """All that waits. Its bound is kept by whoever adds; see `find_excess`."""

    _tenants: dict[str, _Tenant] = field(default_factory=dict)
    _rounds: Rounds[str] = field(default_factory=lambda: Rounds(QUANTUM_TOKENS))
    _waiting: dict[RequestId, Waiting] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiting]:
        """Return all that wait, those that came first first."""
        return iter(self._waiting.values())

    @property
    def tokens(self) -> int:
        """Return what all of them cost together."""
        return _tokens(self._waiting.values())

    def find(self, request_id: RequestId) -> Waiting | None:
        return self._waiting.get(request_id)

    def add(self, waiting: Waiting) -> None:
        request = waiting.request
        assert request.id not in self._waiting, request.id
        assert waiting.tokens > 0, waiting
        self._waiting[request.id] = waiting
        self._tenants.setdefault(request.tenant, _Tenant()).add(waiting)
        self._rounds.join(request.tenant)

    def remove(self, request_id: RequestId) -> Waiting | None:
        """Take a request out that is not to start. None: it doesn't wait."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._tenants[waiting.request.tenant].remove(waiting)
            self._forget_if_empty(waiting.request.tenant)
        return waiting

    def take(self, can_start: CanStart) -> Waiting | None:
        """Remove and return the request that is next of those that can start. None: none can.

        Cost: O(requests that wait), at most.
        """
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
        self._rounds.charge(tenant, waiting.tokens)
        self._tenants[tenant].charge(waiting)
        return self.remove(waiting.request.id)

    def _forget_if_empty(self, tenant: str) -> None:
        if not self._tenants[tenant].count:
            del self._tenants[tenant]
            self._rounds.leave(tenant)

    def tokens_before(self, waiting: Waiting) -> int:
        """Return about how many tokens are served before a request that is added now."""
        tenant = self._tenants.get(waiting.request.tenant)
        own = tenant.tokens_before(waiting) if tenant is not None else 0
        share = math.ceil((own + waiting.tokens) / QUANTUM_TOKENS) * QUANTUM_TOKENS
        others = (t for name, t in self._tenants.items() if name != waiting.request.tenant)
        return own + sum(min(other.tokens, share) for other in others)

    def find_excess(self, newcomer: Waiting) -> Waiting:
        """Return which request has to go, where the one that came last is one too many.

        Of the tenant that has most waiting, of its last class, of the session that has most there: the
        last one. So whoever sends much can't keep the others out. Of equals those of the newcomer, else
        those that came last.
        """
        tenants, came = self._tenants, newcomer.request.tenant
        largest = max(reversed(tenants), key=lambda name: (tenants[name].count, name == came))
        classes = tenants[largest].classes
        sessions, own = classes[max(classes)].sessions, newcomer.session
        longest = max(reversed(sessions), key=lambda name: (len(sessions[name]), name == own))
        return next(reversed(sessions[longest].values()))


def _tokens(waiting: Iterable[Waiting]) -> int:
    return sum(one.tokens for one in waiting)
