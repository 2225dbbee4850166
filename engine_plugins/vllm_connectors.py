"""Connectors that run inside vLLM, where its own lack something; `connectors="moongate"` takes them.

vLLM loads them by `kv_connector_module_path`, in the scheduler's process and in each worker. Stock
connectors serve as well, but for what the classes say. This module imports vLLM, and nothing
of the gateway may import it.

What needs no subclass: whole digests in KV events (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0). What no
subclass can give: evictions of the pool. Its master decides on them, and tells nobody: the published
builds of Mooncake have the flags of an event publisher but not the publisher.

Source: vLLM 0.32.0 `v1/mooncake/store/connector.py`, `v1/multi_connector.py`.
"""

from __future__ import annotations

import contextlib
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as multi
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as handoff
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import connector as store
from vllm.logger import init_logger

logger = init_logger(f"vllm.{__name__}")  # below vLLM's, whose handlers write it

REPORT_KEY = "moongate"
"""Where in an answer's `kv_transfer_params` the report stands."""


class MoongateStoreConnector(store.MooncakeStoreConnector):  # type: ignore[misc]
    """A pool member whose answers say how much of the prompt came from where.

    Why: `usage` counts all cached tokens together, so nobody outside learns what the pool gave. The
    report is `kv_transfer_params: {"moongate": {"device_tokens": N, "pool_tokens": M}}`. vLLM puts
    such parameters into whole answers only; a stream has none. Blocks that could not be fetched after
    all, and were computed again, still count as the pool's.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # Of unfinished requests: what the device had when it was last looked for, and the report
        # once the request got its blocks.
        self._device_tokens: dict[str, int] = {}
        self._reports: dict[str, dict[str, int]] = {}

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._device_tokens[request.request_id] = num_computed_tokens
        answer: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return answer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        device_tokens = self._device_tokens.pop(request.request_id, None)
        # The first time only: a request that was preempted finds its own blocks again.
        if device_tokens is not None and request.request_id not in self._reports:
            self._reports[request.request_id] = {
                "device_tokens": device_tokens,
                "pool_tokens": num_external_tokens,
            }

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        is_freed_later, params = super().request_finished_all_groups(request, block_ids)
        self._device_tokens.pop(request.request_id, None)
        report = self._reports.pop(request.request_id, None)
        if report is None:  # it ended before it got any blocks
            return is_freed_later, params
        return is_freed_later, {**(params or {}), REPORT_KEY: report}


class MoongateHandoffConnector(handoff.MooncakeConnector):  # type: ignore[misc]
    """A hand-off whose engine outlives requests that are meant for the other side.

    Why: the stock one asserts that a prefill engine is asked for no decode leg and a decode engine
    for no prefill leg, so that a single such request, by mistake or by malice, ends the engine. Here
    it is computed as if it said nothing of the other side.
    """

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params
        role = self._kv_transfer_config.kv_role
        if params and role in _OTHER_SIDES and params.get(_OTHER_SIDES[role]):
            logger.warning("%s: %s asked of a %s", request.request_id, _OTHER_SIDES[role], role)
            params[_OTHER_SIDES[role]] = False
        super().on_new_request(request)


_OTHER_SIDES = {"kv_producer": "do_remote_prefill", "kv_consumer": "do_remote_decode"}


class MultiConnector(multi.MultiConnector):  # type: ignore[misc]
    """Several connectors, of which one may publish events and some may have no metrics.

    Why: with the stock one, an engine that hands over *and* is a pool member ends with its first
    hand-off. MooncakeConnector reports statistics but has no Prometheus metrics for them, which the
    stock one asserts (vllm#43828). It also drops its connectors' events, so that such an engine
    never publishes what it put into the pool. This class has the stock one's name because vLLM looks
    for `MultiConnector` by name when it checks a configuration.
    """

    def get_kv_connector_kv_cache_events(self) -> Any:
        """Return the events of the one connector that has any to tell; the pool's, in our launches.

        Their scheduler sides each take what is theirs by its type, so nothing else is needed there.
        """
        for connector in self.sub_connectors:
            events = connector.get_kv_connector_kv_cache_events()
            if events is not None:
                return events
        return None

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> Any:
        stock = super().build_prom_metrics(*arguments)
        return _MetricsOfSome(*arguments, stock._prom_metrics)  # noqa: SLF001 - its own class


class _MetricsOfSome(multi.MultiKVConnectorPromMetrics):  # type: ignore[misc]
    """Metrics of those connectors that have some; the others' statistics are only logged."""

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        known = {
            name: statistics
            for name, statistics in transfer_stats_data.items()
            if name in self._prom_metrics
        }
        super().observe(known, engine_idx)


# MultiConnector looks up the classes of its connectors' statistics by name.
for _name in (MoongateHandoffConnector.__name__, MoongateStoreConnector.__name__):
    with contextlib.suppress(ValueError):  # there already
        KVConnectorFactory.register_connector(_name, __name__, _name)
