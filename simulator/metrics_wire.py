"""The engine's `/metrics` page, as far as a simulated engine has a value for it.

Responsible for names, labels and the Prometheus text format. Pure.
Source: vLLM 0.32.0 `v1/metrics/loggers.py`.
"""

from collections.abc import Mapping

from moongate.simulator.engine import EngineProfile, EngineStatistics

_GAUGES = {
    "vllm:num_requests_running": "Requests in execution.",
    "vllm:num_requests_waiting": "Requests waiting to be admitted.",
    "vllm:kv_cache_usage_perc": "Held part of the KV blocks, 0 to 1.",
}

_COUNTERS = {
    "vllm:prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Tokens found there.",
    "vllm:prompt_tokens": "Prompt tokens of requests that got their first token.",
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
        "vllm:prompt_tokens": statistics.prompt_tokens,
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
    return "\n".join([*lines, *_finished(model, ranks), *_cache_config(profile, ranks), ""])


def _finished(model: str, ranks: Mapping[int, EngineStatistics]) -> list[str]:
    name = "vllm:request_success_total"
    return [
        f"# HELP {name} Finished requests.",
        f"# TYPE {name} counter",
        *(
            f"{name}{_labels(engine=str(rank), finished_reason=reason, model_name=model)} "
            f"{float(count)}"
            for rank, statistics in ranks.items()
            for reason, count in statistics.finished_requests.items()
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
