"""What is shown of a running gateway, as JSON: the parts of the live view, each made from what is there now.

Times are seconds since the gateway began (`at_s`), so that a part stays the same while nothing happens; tokens are
counts, durations are milliseconds. No text of a prompt is in it. Keys of sessions are cut, and are the clients'
own text: whoever shows them has to treat them so.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from moongate import __version__
from moongate.gateway.admin.api_admin import Readiness, instance_as_json, unready_reasons
from moongate.gateway.dialects.body import name_session
from moongate.gateway.driver import Driver
from moongate.gateway.instances.roster import Roster
from moongate.gateway.pool.pooling import Pooling
from moongate.gateway.prompts.divergence import Divergence
from moongate.gateway.prompts.prompt import PromptPipeline
from moongate.gateway.telemetry.metrics import Metrics
from moongate.gateway.telemetry.receipt import decision_as_json
from moongate.gateway.telemetry.recent_turns import RecentTurns, Session, Turn
from moongate.router import Holder
from moongate.router.fleet import InstanceState

INSTANCES_SHOWN_MAX = 100
SESSIONS_SHOWN_MAX = 24
DECISIONS_SHOWN_MAX = 60
CANDIDATES_SHOWN_MAX = 8
SLOWEST_SHOWN_MAX = 8
DIVERGENCES_SHOWN_MAX = 12
KEY_CHARS_MAX = 40
SLOWEST_S = 300.0
"""A turn that is longer ago is not among the slowest recent ones."""

SHOWN_DIFFERENCES = ("message", "role", "byte", "bytes_before", "bytes_now")
"""Of a divergence; not its excerpts, which are a prompt's text."""

Part = dict[str, Any] | list[Any]


class LiveView:
    """Makes the parts. Reads the core and the edge, and changes nothing."""

    def __init__(
        self,
        driver: Driver,
        roster: Roster,
        metrics: Metrics,
        recent: RecentTurns,
        prompts: PromptPipeline,
        readiness: Readiness,
        pooling: Pooling | None,
    ) -> None:
        self._driver = driver
        self._roster = roster
        self._metrics = metrics
        self._recent = recent
        self._prompts = prompts
        self._readiness = readiness
        self._pooling = pooling
        self._began = driver.clock()
        self._makers: Mapping[str, Callable[[], Part]] = {
            "gateway": self._gateway,
            "totals": self._totals,
            "instances": self._instances,
            "sessions": self._sessions,
            "decisions": self._decisions,
            "slowest": self._slowest,
            "divergences": self._divergences,
            "reuse": self._reuse,
        }

    def now_s(self) -> float:
        """Return the time of what is made now."""
        return self._at(self._driver.clock())

    def parts(self) -> dict[str, Part]:
        """Return all parts. Cost: O(instances + sessions x marks x holders), all of them bounded."""
        return {name: make() for name, make in self._makers.items()}

    def _at(self, now: float) -> float:
        return round(now - self._began, 2)

    # --- the parts --------------------------------------------------------------------------------

    def _gateway(self) -> Part:
        reasons = unready_reasons(self._driver, self._readiness)
        cards = self._driver.core.fleet.model_cards()
        return {
            "version": __version__,
            "policy": self._driver.core.policy.name,
            "models": sorted(cards)[:8],
            "is_draining": self._readiness.is_draining,
            "unready_reasons": reasons,
            "others": len(self._driver.core.peers),  # gateways that tell this one of their load
        }

    def _totals(self) -> Part:
        """Return what `/metrics` says as well, summed over labels that are not shown."""
        metrics, loads = self._metrics, self._driver.core.loads.loads
        receipts = (turn.receipt for turn in self._recent.turns)
        ttft = [receipt.ttft_ms for receipt in receipts if receipt.ttft_ms is not None]
        return {
            "requests": int(metrics.requests.total()),
            "active_requests": sum(load.active_requests for load in loads.values()),
            "queue_requests": self._prompts.waiting + self._requests_held(),
            "rejected": int(metrics.rejected.total()),
            "retries": int(metrics.retries.total()),
            "broken_off": int(metrics.broken_off.total()),
            "divergences": int(metrics.divergences.total()),
            "device_tokens": int(metrics.prompt_tokens.total("device")),
            "pool_tokens": int(metrics.prompt_tokens.total("pool")),
            "recompute_tokens": int(metrics.prompt_tokens.total("recompute")),
            "delivered_cached_tokens": int(metrics.delivered_cached_tokens.total()),
            "ttft_ms_p50": _rounded(statistics.median(ttft)) if ttft else None,
            "turns_seen": len(ttft),
            "pool_up": self._pooling.health.is_up if self._pooling is not None else None,
        }

    def _requests_held(self) -> int:
        admission = self._driver.core.admission
        return len(admission.queue) if admission is not None else 0

    def _instances(self) -> Part:
        fleet = list(self._driver.core.fleet)
        shown = fleet[:INSTANCES_SHOWN_MAX]
        return {
            "count": len(fleet),
            "shown": [self._instance(state) for state in shown],
        }

    def _instance(self, state: InstanceState) -> dict[str, Any]:
        told = instance_as_json(self._driver, self._roster, state)
        del told["lease_s_left"]  # which is another each time
        return told

    def _sessions(self) -> Part:
        known = [s for s in self._recent.sessions.values() if s.key is not None or s.marks]
        latest = known[-SESSIONS_SHOWN_MAX:]
        return {"count": len(known), "shown": [self._session(s) for s in reversed(latest)]}

    def _session(self, session: Session) -> dict[str, Any]:
        confirmed, expected = self._held(session)
        return {
            **_name_of(session),
            "hash": name_session(session.key) if session.key is not None else None,
            "model": session.model[:KEY_CHARS_MAX],
            "turns": session.turns,
            "at_s": self._at(session.at),
            "prompt_tokens": session.prompt_tokens,
            "pool_tokens": session.pool_tokens,
            "instance": session.instance,
            "held": [
                {
                    "instance": holder.instance_id,
                    "rank": holder.rank,
                    "tokens": confirmed.get(holder, 0),
                    "expected_tokens": tokens,
                }
                for holder, tokens in expected.items()
            ],
        }

    def _held(self, session: Session) -> tuple[dict[Holder, int], dict[Holder, int]]:
        """Return how many leading tokens of the session's last prompt each holder has: confirmed, and
        with what is predicted. Holders that have none are absent."""
        confirmed: dict[Holder, int] = {}
        expected: dict[Holder, int] = {}
        for marks in session.marks.values():
            sure: frozenset[Holder] | None = None
            likely: frozenset[Holder] | None = None
            for tokens, block in marks.ends():
                having, predicted = self._driver.core.index.find_holders(block)
                sure = having if sure is None else sure & having
                likely = having | predicted if likely is None else likely & (having | predicted)
                confirmed |= dict.fromkeys(sure, tokens)
                expected |= dict.fromkeys(likely, tokens)
                if not likely:
                    break
        return confirmed, expected

    def _decisions(self) -> Part:
        turns = self._recent.turns
        latest = list(turns)[-DECISIONS_SHOWN_MAX:]
        return {
            "count": self._recent.turn_count,
            "shown": [self._decision(turn) for turn in reversed(latest)],
        }

    def _decision(self, turn: Turn) -> dict[str, Any]:
        receipt = turn.receipt
        decision = receipt.decision
        return {
            "number": turn.number,
            "at_s": self._at(turn.at),
            "session": _name_of(turn.session),
            "instance": turn.instance,
            "prefill_instance": turn.prefill_instance,
            "reason": decision.reason.value,
            "prompt_tokens": decision.prompt_tokens,
            "device_tokens": decision.device_tokens,
            "pool_tokens": decision.pool_tokens,
            "delivered_tokens": receipt.cached_tokens,
            "ttft_ms": _rounded(receipt.ttft_ms),
            "status": receipt.status,
        }

    def _slowest(self) -> Part:
        """Return the turns whose first byte took longest, with their receipts."""
        since = self._driver.clock() - SLOWEST_S
        begun = [turn for turn in self._recent.turns if turn.at >= since]
        timed = [turn for turn in begun if turn.receipt.ttft_ms is not None]
        timed.sort(key=lambda turn: turn.receipt.ttft_ms or 0.0, reverse=True)
        return [self._receipt(turn) for turn in timed[:SLOWEST_SHOWN_MAX]]

    def _receipt(self, turn: Turn) -> dict[str, Any]:
        receipt = turn.receipt
        told = decision_as_json(receipt.decision)
        return {
            **told,
            "candidates": told["candidates"][:CANDIDATES_SHOWN_MAX],
            **self._decision(turn),
            "attempts": receipt.attempts,
            "e2e_ms": _rounded(receipt.e2e_ms),
        }

    def _divergences(self) -> Part:
        latest = list(self._recent.divergences)[-DIVERGENCES_SHOWN_MAX:]
        return [self._divergence(found, at) for at, found in reversed(latest)]

    def _divergence(self, found: Divergence, at: float) -> dict[str, Any]:
        told = found.as_json()
        return {
            "at_s": self._at(at),
            "session": found.session,
            "cause": found.difference.cause.value,
            "could_reuse_tokens": found.could_reuse_tokens,
            "shared_tokens": found.shared_tokens,
            "lost_tokens": found.lost_tokens,
            **{name: told[name] for name in SHOWN_DIFFERENCES if name in told},
        }

    def _reuse(self) -> Part:
        return [
            [self._at(period.began_at), period.device, period.pool, period.recompute]
            for period in self._recent.periods
        ]


def _name_of(session: Session) -> dict[str, Any]:
    """Return by what a session is told apart: its number, and its key if it has one."""
    key = session.key
    if key is not None and len(key) > KEY_CHARS_MAX:
        key = f"{key[: KEY_CHARS_MAX - 9]}\N{HORIZONTAL ELLIPSIS}{key[-8:]}"
    return {"number": session.number, "key": key}


def _rounded(milliseconds: float | None) -> float | None:
    return round(milliseconds, 1) if milliseconds is not None else None
