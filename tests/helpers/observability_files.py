"""What `docker/observability` has: its expressions, and the metrics and labels that they name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "docker" / "observability"
RULES = FOLDER / "rules"
DASHBOARDS = sorted((FOLDER / "grafana" / "dashboards").glob("*.json"))

TARGET_LABELS = frozenset({"gateway", "job"})
"""Of every series that Prometheus scrapes as `prometheus.yml` says."""

_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"(?<![\w:])([a-zA-Z_:][\w:]*)(?!\w*\s*\()\s*(\{[^}]*\})?")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
_TEXT = re.compile(r'"[^"]*"')
_WORDS = frozenset({"and", "or", "unless", "bool", "offset"})


@dataclass(frozen=True, slots=True)
class Selector:
    """A metric in an expression, and the labels by which its series are chosen."""

    metric: str
    labels: frozenset[str]


@dataclass(frozen=True, slots=True)
class Expression:
    """One expression, and where it stands."""

    where: str
    text: str
    legend: str = ""

    @property
    def selectors(self) -> list[Selector]:
        without_groupings = _GROUPING.sub(" ", self.text)
        masked = re.sub(r"\[[^\]]*\]", " ", without_groupings)
        return [
            Selector(name, frozenset(_MATCHER.findall(matchers)))
            for name, matchers in _SELECTOR.findall(masked)
            if name not in _WORDS
        ]

    @property
    def grouping_labels(self) -> set[str]:
        """Return the labels that it groups by, and that its legend names."""
        lists = _GROUPING.findall(_TEXT.sub('""', self.text))
        grouped = {label.strip() for names in lists for label in names.split(",") if label.strip()}
        return grouped | set(re.findall(r"\{\{\s*(\w+)\s*\}\}", self.legend))


def rules() -> list[dict[str, Any]]:
    """Return all rules of all files."""
    files = [yaml.safe_load(file.read_text()) for file in sorted(RULES.glob("*.yml"))]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def recorded() -> dict[str, Expression]:
    """Return the recording rules by the name of what they record."""
    return {r["record"]: Expression(r["record"], r["expr"]) for r in rules() if "record" in r}


def panels(dashboard: Path) -> Iterator[dict[str, Any]]:
    """Yield a dashboard's panels, without the rows."""
    return (p for p in json.loads(dashboard.read_text())["panels"] if p["type"] != "row")


def expressions() -> list[Expression]:
    """Return every expression of rules and dashboards."""
    found = [Expression(str(r.get("alert", r.get("record"))), r["expr"]) for r in rules()]
    for dashboard in DASHBOARDS:
        for panel in panels(dashboard):
            found += [
                Expression(f"{dashboard.stem}: {panel['title']}", t["expr"], t["legendFormat"])
                for t in panel["targets"]
            ]
    return found
