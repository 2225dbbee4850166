"""No dashboard, alert or recording rule names a metric or a label that the gateway doesn't have."""

from __future__ import annotations

from pathlib import Path

import pytest
from all_metrics import scrape_everything
from observability_files import TARGET_LABELS, Expression, expressions, recorded
from redis_process import needs_redis
from scrape import Scrape

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

LABELS = {"up": {"instance", "job"}}
"""Of what Prometheus itself has."""


def known_labels(shown: Scrape) -> dict[str, set[str]]:
    """Return the labels of each metric, and of what is recorded from them."""
    known = {name: shown.labels(name) | TARGET_LABELS for name in shown.series}
    known |= {name: labels | TARGET_LABELS for name, labels in LABELS.items()}
    for name, expression in recorded().items():
        known[name] = expression.grouping_labels - {"le"}
    return known


@needs_redis
async def test_every_metric_and_label_that_files_name_is_there(tmp_path: Path) -> None:
    known = known_labels(await scrape_everything(tmp_path))
    wrong = [problem for expression in expressions() for problem in problems_of(expression, known)]
    assert wrong == []


def problems_of(expression: Expression, known: dict[str, set[str]]) -> list[str]:
    """Return what an expression names that isn't there."""
    problems: list[str] = []
    has: set[str] = set()
    for selector in expression.selectors:
        if selector.metric not in known:
            problems.append(f"{expression.where}: no metric {selector.metric}")
            continue
        has |= known[selector.metric]
        problems += [
            f"{expression.where}: {selector.metric} has no label {label}"
            for label in selector.labels - known[selector.metric]
        ]
    missing = expression.grouping_labels - has if not problems else set()
    return problems + [f"{expression.where}: no label {label}" for label in missing]


async def test_what_is_not_there_would_be_found() -> None:
    known = {"m_total": {"a"}}
    assert problems_of(Expression("w", "rate(n_total[5m])"), known) == ["w: no metric n_total"]
    assert problems_of(Expression("w", 'm_total{b="x"}'), known) == ["w: m_total has no label b"]
    assert problems_of(Expression("w", "sum by (b) (m_total)"), known) == ["w: no label b"]
    assert problems_of(Expression("w", "m_total", "{{b}}"), known) == ["w: no label b"]
    assert problems_of(Expression("w", 'sum by (a) (m_total{a="x"})', "{{a}}"), known) == []
