"""Metrics: a worker's counters, for Prometheus to ask for."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvlinker.errors import ContractError, UnsupportedOperationError
from kvlinker.lanes import Lane
from kvlinker.linker import Linker
from kvlinker.metrics import FAILING_CALLS, MetricsSnapshot
from kvlinker.store import Store, StoreStats
from kvlinker_sglang.options import MetricsConfig

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["Exporter", "LinkerCollector", "WorkerPlace", "worker_place"]

logger = logging.getLogger(__name__)

_STATS_SECONDS = 2.0
_ERRORS = "_errors"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """Which worker of the server this is."""

    number: int
    """Among the workers of this server, for ports."""
    label: str
    """Value of the label `worker`, such as `pp0-tp3`."""


def worker_place(
    *, replica: int, stage: int, stages: int, rank: int, ranks: int, attention_group: int | None
) -> WorkerPlace:
    """Return a worker's place in its server.

    Args:
        replica: among the server's replicas; 0 where attention alone is replicated, within the ranks.
        stage: of the pipeline.
        stages: of the pipeline.
        rank: among the tensor-parallel ranks of the replica's stage, those of every attention group together.
        ranks: how many those are.
        attention_group: number of the attention group, where there are several.
    """
    group = replica if attention_group is None else attention_group
    return WorkerPlace(
        number=(replica * stages + stage) * ranks + rank, label=f"dp{group}-pp{stage}-tp{rank}"
    )


class _Server(Protocol):
    def shutdown(self) -> None: ...
    def server_close(self) -> None: ...


class LinkerCollector:
    """What Prometheus gets: read anew at every request, so that nothing is counted twice."""

    def __init__(self, linker: Linker, store: Store, labels: Mapping[str, str]) -> None:
        """Collect of a linker and its store, under labels that every value gets."""
        self._linker = linker
        self._store = store
        self._labels = dict(labels)
        # A store that hangs must not keep the other numbers back.
        self._lane = Lane("metrics", task_seconds=_STATS_SECONDS)

    def close(self) -> None:
        """End the thread that asks the store."""
        self._lane.close(0)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric; called by Prometheus' client."""
        counted, depths = self._linker.metrics.snapshot(), self._linker.depths
        yield from self._tokens(counted)
        yield from self._traffic(counted)
        yield from self._events(counted)
        queues = {"lookups": depths.lookups, "loads": depths.loads, "offloads": depths.offloads}
        yield self._gauge("queued", "Open lookups, loads and offloads.", "queue", queues)
        yield self._gauge(
            "quarantined_objects",
            "Objects that could not be read and count as missing.",
            "",
            {"": depths.quarantined},
        )
        stats = self._stats()
        if stats is not None:
            yield from self._of_store(stats)

    def _tokens(self, counted: MetricsSnapshot) -> Iterator[Metric]:
        yield self._counter(
            "tokens_looked_up", "Tokens that were asked for.", "", {"": counted.tokens_looked_up}
        )
        reasons = {reason.value: amount for reason, amount in counted.tokens.items()}
        yield self._counter("tokens", "Tokens, by what became of them.", "reason", reasons)
        yield self._counter(
            "missed_tokens",
            "Missed tokens, by the pool that missed.",
            "pool",
            counted.misses_by_pool,
        )
        yield self._gauge(
            "open_tokens",
            "Tokens whose load is still to come or end.",
            "",
            {"": counted.tokens_open},
        )

    def _traffic(self, counted: MetricsSnapshot) -> Iterator[Metric]:
        pools = counted.pools
        for name, text, values in (
            ("loaded_bytes", "Bytes loaded.", {p: t.load_bytes for p, t in pools.items()}),
            (
                "load_seconds",
                "Time of loads in the store.",
                {p: t.load_seconds for p, t in pools.items()},
            ),
            ("offloaded_bytes", "Bytes stored.", {p: t.offload_bytes for p, t in pools.items()}),
            (
                "offload_seconds",
                "Time of writes in the store.",
                {p: t.offload_seconds for p, t in pools.items()},
            ),
        ):
            yield self._counter(name, text, "pool", values)

    def _events(self, counted: MetricsSnapshot) -> Iterator[Metric]:
        # From the start, so that a rate shows the first failure of a call too.
        errors = dict.fromkeys(FAILING_CALLS, 0) | {
            name.removesuffix(_ERRORS): amount
            for name, amount in counted.events.items()
            if name.endswith(_ERRORS)
        }
        others = {n: amount for n, amount in counted.events.items() if not n.endswith(_ERRORS)}
        yield self._counter("errors", "Failures, by the call that failed.", "call", errors)
        yield self._counter("events", "Everything else that was counted.", "event", others)

    def _stats(self) -> StoreStats | None:
        answers: list[StoreStats] = []
        task = self._lane.submit(lambda: answers.append(self._store.stats()))
        task.wait(_STATS_SECONDS)
        return answers[0] if answers else None

    def _of_store(self, stats: StoreStats) -> Iterator[Metric]:
        yield self._gauge("store_objects", "Objects in the store.", "", {"": stats.objects})
        yield self._gauge(
            "store_used_bytes", "Bytes that count against the capacity.", "", {"": stats.used_bytes}
        )
        if stats.capacity_bytes is not None:
            yield self._gauge(
                "store_capacity_bytes", "Capacity of the store.", "", {"": stats.capacity_bytes}
            )
        yield self._counter("store_events", "What the store counted.", "event", stats.counters)

    def _counter(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        from prometheus_client.core import CounterMetricFamily

        metric = CounterMetricFamily(f"kvlinker_{name}", text, labels=self._names(label))
        for value, amount in values.items():
            metric.add_metric(self._values(label, value), amount)
        return metric

    def _gauge(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        from prometheus_client.core import GaugeMetricFamily

        metric = GaugeMetricFamily(f"kvlinker_{name}", text, labels=self._names(label))
        for value, amount in values.items():
            metric.add_metric(self._values(label, value), amount)
        return metric

    def _names(self, label: str) -> list[str]:
        return [*self._labels, *([label] if label else [])]

    def _values(self, label: str, value: str) -> list[str]:
        return [*self._labels.values(), *([value] if label else [])]


class Exporter:
    """A small HTTP server with one worker's metrics."""

    def __init__(
        self,
        linker: Linker,
        store: Store,
        config: MetricsConfig,
        *,
        model: str,
        place: WorkerPlace,
    ) -> None:
        """Listen at the configured host, on the configured port plus the worker's number.

        Raises:
            UnsupportedOperationError: prometheus-client is not installed.
            ContractError: the port cannot be had.
        """
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as error:
            msg = "metrics need prometheus-client; pip install 'kvlinker-sglang[metrics]'"
            raise UnsupportedOperationError(msg) from error
        self._collector = LinkerCollector(linker, store, {"model": model, "worker": place.label})
        registry = CollectorRegistry()
        registry.register(self._collector)
        port = config.port + place.number
        try:
            self._server: _Server
            self._server, self._thread = start_http_server(port, config.host, registry)
        except OSError as error:
            msg = f"metrics cannot be served at {config.host}:{port}: {error}; choose another metrics.port"
            raise ContractError(msg) from error
        logger.info("kvlinker: metrics at http://%s:%d/metrics", config.host, port)

    def close(self) -> None:
        """Stop to listen. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._collector.close()
