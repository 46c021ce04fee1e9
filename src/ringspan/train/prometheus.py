"""The figures of a run for Prometheus, over HTTP, where asked for. Needs the extra ``train``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ringspan.runtime.settings import RunError
from ringspan.train.watchdog import Beat, Straggler

if TYPE_CHECKING:
    from ringspan.train.metrics import Step


class Source(Protocol):
    """What is known of a run: its last step, the last beat of each rank, and who keeps others waiting."""

    last: Step | None
    beats: list[Beat]
    late: list[Straggler]


class RunCollector(Collector):
    """A run's figures as Prometheus wants them, made when it asks."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def collect(self) -> Iterable[Metric]:
        step, beats = self.source.last, self.source.beats
        late = {found.rank for found in self.source.late}
        if step is not None:
            yield _gauge("steps_done", "Steps that are done.", step.number + 1)
            yield _gauge("loss_nats", "Mean loss of the last step, in nats per byte.", step.loss)
            yield _gauge("gradient_norm", "Norm of the gradients of the last step.", step.gradient_norm)
            yield _gauge("learning_rate", "Learning rate of the last step.", step.rate)
            yield _gauge("step_seconds", "Duration of the last step.", step.seconds)
            yield _gauge("tokens_per_second", "Speed of the last step.", step.tokens_per_second)
        yield _by_rank("step", "Step that the rank is in.", {b.rank: b.step for b in beats})
        yield _by_rank(
            "waiting_seconds", "Time that the rank waited in this step.", {b.rank: b.waiting_seconds for b in beats}
        )
        yield _by_rank("memory_bytes", "Peak of the rank's memory.", {b.rank: b.memory_bytes for b in beats})
        yield _by_rank("silent_seconds", "Time since its last heartbeat.", {b.rank: b.silent_seconds for b in beats})
        yield _by_rank("is_late", "1 if others wait for the rank.", {b.rank: int(b.rank in late) for b in beats})


@contextmanager
def serve(source: Source, address: str, port: int) -> Iterator[None]:
    """Answer Prometheus at http://address:port/metrics for as long as the block lasts."""
    registry = CollectorRegistry()
    registry.register(RunCollector(source))
    try:
        server, thread = start_http_server(port, address, registry)
    except (OSError, OverflowError) as error:
        raise RunError(f"--metrics-port {port} on {address}: cannot be opened ({error}): take another") from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(f"ringspan_{name}", meaning, value=value)


def _by_rank(name: str, meaning: str, values: dict[int, float] | dict[int, int]) -> Metric:
    family = GaugeMetricFamily(f"ringspan_rank_{name}", meaning, labels=["rank"])
    for rank, value in values.items():
        family.add_metric([str(rank)], value)
    return family
