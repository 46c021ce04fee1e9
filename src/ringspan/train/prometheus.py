"""Serves the metrics of a run to Prometheus over HTTP. Needs the extra ``train``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ringspan.runtime.settings import RunError

if TYPE_CHECKING:
    from ringspan.train.metrics import RunMetrics


@contextmanager
def serve(metrics: RunMetrics, address: str, port: int) -> Iterator[None]:
    """Serve http://address:port/metrics while the block runs."""
    registry = CollectorRegistry()
    registry.register(RunCollector(metrics))
    try:
        server, thread = start_http_server(port, address, registry)
    except (OSError, OverflowError) as error:
        raise RunError(f"--metrics-port {port} on {address}: cannot be opened ({error}): choose another") from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class RunCollector(Collector):
    """Converts the latest metrics of a run when Prometheus asks for them."""

    def __init__(self, metrics: RunMetrics) -> None:
        self.metrics = metrics

    def collect(self) -> Iterable[Metric]:
        step, heartbeats = self.metrics.latest, self.metrics.heartbeats
        stragglers = {found.rank for found in self.metrics.stragglers}
        if step is not None:
            yield _gauge("steps_done", "Completed steps.", step.number + 1)
            yield _gauge("loss_nats", "Mean loss of the last step, in nats per byte.", step.loss)
            yield _gauge("gradient_norm", "Gradient norm of the last step.", step.gradient_norm)
            yield _gauge("learning_rate", "Learning rate of the last step.", step.learning_rate)
            yield _gauge("step_seconds", "Duration of the last step.", step.seconds)
            yield _gauge("tokens_per_second", "Throughput of the last step.", step.tokens_per_second)
            if step.hidden_share is not None:
                yield _gauge("hidden_share", "Fraction of communication hidden in the last step.", step.hidden_share)
        yield _by_rank("step", "Current step of the rank.", {h.rank: h.step for h in heartbeats})
        yield _by_rank(
            "waiting_seconds",
            "Time that the rank has waited in this step.",
            {h.rank: h.waited_seconds for h in heartbeats},
        )
        yield _by_rank("memory_bytes", "Peak memory of the rank.", {h.rank: h.memory_bytes for h in heartbeats})
        yield _by_rank("silent_seconds", "Time since the last heartbeat.", {h.rank: h.age_seconds for h in heartbeats})
        yield _by_rank(
            "is_straggler",
            "1 if other ranks wait for the rank.",
            {h.rank: int(h.rank in stragglers) for h in heartbeats},
        )


def _gauge(name: str, description: str, value: float) -> Metric:
    return GaugeMetricFamily(f"ringspan_{name}", description, value=value)


def _by_rank(name: str, description: str, values: dict[int, float] | dict[int, int]) -> Metric:
    family = GaugeMetricFamily(f"ringspan_rank_{name}", description, labels=["rank"])
    for rank, value in values.items():
        family.add_metric([str(rank)], value)
    return family
