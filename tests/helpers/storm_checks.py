"""What must be so after a storm, however long it was."""

from __future__ import annotations

from collections import Counter

from agent_clients import Outcome
from chaos import Report
from storm_faults import FAULTS


def check_storm(report: Report, *, p99_slack_s: float = 0.0) -> None:
    """`p99_slack_s`: beyond the factor, for runs of too few turns for a 99th percentile."""
    told = str(report)
    assert set(report.faults) == {fault.__name__ for fault in FAULTS}, told
    assert not report.malformed, (report.malformed[:5], told)
    assert len(report.failed) <= report.broken_by_engines, told
    # Each request once: those of the clients, and one more for each in the end.
    sent = Counter(str(turn.status) for turn in [*report.turns, *report.after])
    assert report.counted == sent, told
    assert report.calm_p99_s <= 1.5 * report.clean_p99_s + p99_slack_s, told
    assert set(report.differences.values()) == {0}, told
    assert report.after, told
    assert {turn.outcome for turn in report.after} == {Outcome.ANSWERED}, told
    inexact = [t for t in report.after if t.expected_tokens != t.cached_tokens]
    assert not inexact, (inexact[:5], told)
    assert report.held_before is not None, told
    assert report.held_after is not None, told
    assert not report.held_after.exceeds(report.held_before), told
