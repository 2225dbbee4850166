"""The engine's `/metrics` page, as far as a simulated engine has a value for it.

Responsible for names, labels and the Prometheus text format. Pure.
Source: vLLM 0.32.0 `v1/metrics/loggers.py`.
"""

from collections.abc import Mapping

from moongate.simulator.engine import EngineProfile
from moongate.simulator.statistics import EngineStatistics

_GAUGES = {
    "vllm:num_requests_running": "Requests in execution.",
    "vllm:num_requests_waiting": "Requests waiting to be admitted.",
    "vllm:kv_cache_usage_perc": "Held part of the KV blocks, 0 to 1.",
}

_COUNTERS = {
    "vllm:prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Tokens found there.",
    "vllm:external_prefix_cache_queries": "Tokens looked up elsewhere: in a pool, at a prefill engine.",
    "vllm:external_prefix_cache_hits": "Tokens found there.",
    "vllm:prompt_tokens": "Prompt tokens of requests that got their first token.",
    "vllm:prompt_tokens_cached": "Those of them that were not computed.",
    "vllm:generation_tokens": "Sampled tokens.",
    "vllm:num_preemptions": "Preempted requests.",
}


def _values(statistics: EngineStatistics) -> dict[str, float]:
    return {
        "vllm:num_requests_running": statistics.running_requests,
        "vllm:num_requests_waiting": statistics.waiting_requests,
        "vllm:kv_cache_usage_perc": statistics.kv_cache_usage,
        "vllm:prefix_cache_queries": statistics.prefix_queries_tokens,
        "vllm:prefix_cache_hits": statistics.prefix_hits_tokens,
        "vllm:external_prefix_cache_queries": statistics.external_queries_tokens,
        "vllm:external_prefix_cache_hits": statistics.external_hits_tokens,
        "vllm:prompt_tokens": statistics.prompt_tokens,
        "vllm:prompt_tokens_cached": statistics.prompt_tokens - statistics.computed_prompt_tokens,
        "vllm:generation_tokens": statistics.generation_tokens,
        "vllm:num_preemptions": statistics.preemptions,
    }


def render_metrics(
    model: str, profile: EngineProfile, ranks: Mapping[int, EngineStatistics]
) -> str:
    """Return the page; `ranks` are the statistics by global rank."""
    values = {rank: _values(statistics) for rank, statistics in ranks.items()}
    lines: list[str] = []
    for kinds, kind, suffix in ((_GAUGES, "gauge", ""), (_COUNTERS, "counter", "_total")):
        for name, help_text in kinds.items():
            lines += [f"# HELP {name}{suffix} {help_text}", f"# TYPE {name}{suffix} {kind}"]
            lines += [
                f"{name}{suffix}{_labels(engine=str(rank), model_name=model)} "
                f"{float(values[rank][name])}"
                for rank in ranks
            ]
    lines += _by_label(
        "vllm:prompt_tokens_by_source_total",
        "Prompt tokens of requests that got their first token.",
        "source",
        model,
        {rank: _prompt_sources(statistics) for rank, statistics in ranks.items()},
    )
    lines += _by_label(
        "vllm:prompt_tokens_cached_by_source_total",
        "Tokens found in a cache, by where that was.",
        "source",
        model,
        {rank: statistics.cached_tokens_by_source for rank, statistics in ranks.items()},
    )
    lines += _by_label(
        "vllm:request_success_total",
        "Finished requests.",
        "finished_reason",
        model,
        {rank: statistics.finished_requests for rank, statistics in ranks.items()},
    )
    return "\n".join([*lines, *_cache_config(profile, ranks), ""])


def _prompt_sources(statistics: EngineStatistics) -> Mapping[str, int]:
    return {
        "local_compute": statistics.computed_prompt_tokens,
        "local_cache_hit": statistics.local_prompt_tokens,
        "external_kv_transfer": statistics.external_prompt_tokens,
    }


def _by_label(
    name: str, help_text: str, label: str, model: str, values: Mapping[int, Mapping[str, int]]
) -> list[str]:
    """Return a counter that has a label of its own; `values` by rank and label value."""
    return [
        f"# HELP {name} {help_text}",
        f"# TYPE {name} counter",
        *(
            f"{name}{_labels(engine=str(rank), **{label: value}, model_name=model)} {float(count)}"
            for rank, counts in values.items()
            for value, count in counts.items()
        ),
    ]


def _cache_config(profile: EngineProfile, ranks: Mapping[int, EngineStatistics]) -> list[str]:
    name = "vllm:cache_config_info"
    return [
        f"# HELP {name} The shape of the KV cache.",
        f"# TYPE {name} gauge",
        *(
            name
            + _labels(
                block_size=str(profile.block_size_tokens),
                enable_prefix_caching="True",
                engine=str(rank),
                hash_block_size=str(profile.block_size_tokens),
                kv_cache_size_tokens=str(profile.capacity_tokens),
                num_gpu_blocks=str(profile.blocks),
                prefix_caching_hash_algo="sha256",
            )
            + " 1.0"
            for rank in ranks
        ),
    ]


def _labels(**labels: str) -> str:
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items()) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
