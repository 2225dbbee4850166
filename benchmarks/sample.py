"""What one measurement says: the counters of an engine, and the sample that is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """One workload, played once against one router."""

    router: str
    round: int
    workload: str
    requests: int
    """Sent in the measured phase."""
    forwarded: int
    """Of valid bodies that reached an engine meanwhile; must equal `requests`."""
    errors: Mapping[str, int]
    """Answers that were not whole and right, by kind."""
    router_cpu_ms: float
    """CPU time of the router and its children, per request; so for the other `_cpu_ms`."""
    engine_cpu_ms: float
    """What the mock engines really spent."""
    engine_render_cpu_ms: float | None
    """What rendering and tokenising for the router would cost real engines. None: not measured."""
    client_cpu_ms: float
    foreign_cores: float
    """Cores that other programs kept busy meanwhile."""
    requests_per_s: float
    e2e_ms_p50: float
    e2e_ms_p99: float
    first_byte_ms_p50: float
    router_resident_mib: float
    body_bytes_mean: float
    split: tuple[int, ...]
    """Requests that went to each engine."""
    renders: int
    requests_with_ids: int
    cached_token_share: float | None
    """Of all prompt tokens, those the chosen engine already held. None: engines read no prompts."""
    cached_share_mean: float | None
    """The same share of each request, averaged over requests."""

    @property
    def is_clean(self) -> bool:
        return not self.errors and self.forwarded == self.requests

    @property
    def cpu_with_render_ms(self) -> float | None:
        if self.engine_render_cpu_ms is None:
            return None
        return self.router_cpu_ms + self.engine_render_cpu_ms


@dataclass(slots=True)
class EngineStats:
    """Counters since the process began."""

    pid: int
    requests: int = 0
    """Completions of valid bodies."""
    invalid_bodies: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_share_sum: float = 0.0
    """Of each request's share of prompt tokens that were held already."""
    requests_with_ids: int = 0
    """Came with the prompt's token ids."""
    requests_with_wrong_ids: int = 0
    """Of these: the engine would have made other ids of the messages."""
    renders: int = 0
    render_bytes: int = 0
    measured_render_bytes: int = 0
    measured_render_s: float = 0.0
    """CPU time of the renders that were done in full."""
