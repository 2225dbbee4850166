"""What a moongate gateway counts itself, read from its metrics page. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from moongate.loadtest.settings import ROUTE


@dataclass(frozen=True, slots=True)
class GatewayTotals:
    """What a moongate gateway has counted since its start, chat completions only where it tells."""

    requests: int = 0
    requests_by_code: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    prompt_tokens_by_source: Mapping[str, int] = field(default_factory=dict)
    """Predicted: what routing expected to come from where."""
    cached_tokens: int = 0
    """Delivered: as engines reported."""
    retries: int = 0

    def since(self, earlier: GatewayTotals) -> GatewayTotals:
        return GatewayTotals(
            requests=self.requests - earlier.requests,
            requests_by_code=_minus(self.requests_by_code, earlier.requests_by_code),
            prompt_tokens=self.prompt_tokens - earlier.prompt_tokens,
            prompt_tokens_by_source=_minus(
                self.prompt_tokens_by_source, earlier.prompt_tokens_by_source
            ),
            cached_tokens=self.cached_tokens - earlier.cached_tokens,
            retries=self.retries - earlier.retries,
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def _minus(later: Mapping[str, int], earlier: Mapping[str, int]) -> dict[str, int]:
    return {name: count - earlier.get(name, 0) for name, count in later.items()}


def read_totals(text: str) -> GatewayTotals:
    """Return a moongate gateway's totals from its metrics page."""
    by_code: dict[str, int] = {}
    by_source: dict[str, int] = {}
    cached = retries = 0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            value = int(sample.value) if sample.name.endswith("_total") else 0
            match sample.name:
                case "moongate_requests_total" if sample.labels["route"] == ROUTE:
                    code = sample.labels["code"]
                    by_code[code] = by_code.get(code, 0) + value
                case "moongate_prompt_tokens_total":
                    by_source[sample.labels["source"]] = value
                case "moongate_delivered_cached_tokens_total":
                    cached = value
                case "moongate_retries_total":
                    retries += value
    return GatewayTotals(
        requests=sum(by_code.values()),
        requests_by_code=by_code,
        prompt_tokens=sum(by_source.values()),
        prompt_tokens_by_source=by_source,
        cached_tokens=cached,
        retries=retries,
    )
