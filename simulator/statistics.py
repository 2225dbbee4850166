"""What a rank counts, and what it says of it.

Responsible for which token counts where: by vLLM's rules, each request once, when it is first
admitted or when it gives its first token. Pure.

Source: vLLM 0.32.0 `v1/metrics/stats.py`, `cache_hit_source.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

CACHE_SOURCES = ("device", "host", "p2p", "disk", "external_unspecified")
"""Where cached prompt tokens can have come from, as the engine's metric labels say it."""

FINISH_REASONS = ("length", "stop", "abort", "error")


@dataclass(slots=True)
class PrefillOrigin:
    """Where the prompt of one request came from, in tokens, as of its first admission."""

    local_tokens: int
    external_tokens: int
    external_source: str = "external_unspecified"

    @property
    def cached_tokens(self) -> int:
        return self.local_tokens + self.external_tokens


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Gauges now, and counters since the start."""

    running_requests: int
    waiting_requests: int
    """Those included whose KV is on its way."""
    kv_cache_usage: float
    """0.0 to 1.0; blocks held for a decoder count."""
    prefix_queries_tokens: int
    """Tokens of the requests admitted so far, preempted ones counted once."""
    prefix_hits_tokens: int
    """Those of them that were reused on the device."""
    external_queries_tokens: int
    """Tokens that the device lacked; 0 without a connector."""
    external_hits_tokens: int
    """Those of them that were to come from elsewhere."""
    cached_tokens_by_source: Mapping[str, int]
    """`CACHE_SOURCES`; together the hits of both kinds."""
    prompt_tokens: int
    """Prompt tokens of requests that sampled their first token."""
    computed_prompt_tokens: int
    local_prompt_tokens: int
    external_prompt_tokens: int
    """Parts of `prompt_tokens`, which they add up to."""
    generation_tokens: int
    preemptions: int
    finished_requests: Mapping[str, int]
    """By `FINISH_REASONS`."""


@dataclass(slots=True)
class Counters:
    """What `EngineStatistics` reports as counters, in the making."""

    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    external_queries_tokens: int = 0
    external_hits_tokens: int = 0
    cached_tokens_by_source: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(CACHE_SOURCES, 0)
    )
    prompt_tokens: int = 0
    local_prompt_tokens: int = 0
    external_prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    finished_requests: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(FINISH_REASONS, 0)
    )

    def count_admission(self, tokens: int, origin: PrefillOrigin, *, has_connector: bool) -> None:
        """Count a request of `tokens` tokens that is admitted for the first time."""
        self.prefix_queries_tokens += tokens
        self.prefix_hits_tokens += origin.local_tokens
        self.external_hits_tokens += origin.external_tokens
        self.cached_tokens_by_source["device"] += origin.local_tokens
        self.cached_tokens_by_source[origin.external_source] += origin.external_tokens
        if has_connector:
            self.external_queries_tokens += tokens - origin.local_tokens

    def count_first_token(self, prompt_tokens: int, origin: PrefillOrigin) -> None:
        self.prompt_tokens += prompt_tokens
        self.local_prompt_tokens += origin.local_tokens
        self.external_prompt_tokens += origin.external_tokens

    def report(self, running: int, waiting: int, usage: float) -> EngineStatistics:
        cached_prompt_tokens = self.local_prompt_tokens + self.external_prompt_tokens
        return EngineStatistics(
            running_requests=running,
            waiting_requests=waiting,
            kv_cache_usage=usage,
            prefix_queries_tokens=self.prefix_queries_tokens,
            prefix_hits_tokens=self.prefix_hits_tokens,
            external_queries_tokens=self.external_queries_tokens,
            external_hits_tokens=self.external_hits_tokens,
            cached_tokens_by_source=dict(self.cached_tokens_by_source),
            prompt_tokens=self.prompt_tokens,
            computed_prompt_tokens=self.prompt_tokens - cached_prompt_tokens,
            local_prompt_tokens=self.local_prompt_tokens,
            external_prompt_tokens=self.external_prompt_tokens,
            generation_tokens=self.generation_tokens,
            preemptions=self.preemptions,
            finished_requests=dict(self.finished_requests),
        )
