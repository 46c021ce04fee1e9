"""Metrics of a run: what each step reports, and where it goes (JSON lines, TensorBoard, Prometheus)."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ringspan.planning.api import plan
from ringspan.runtime.files import Journal, read_journal
from ringspan.runtime.settings import RunError, missing_package
from ringspan.schedule import communication_seconds
from ringspan.train.config import TrainSettings
from ringspan.train.distributed import DistributedContext
from ringspan.train.watchdog import Heartbeat, Straggler

METRICS = "metrics.jsonl"
BITS_PER_NAT = 1 / math.log(2)
_SHORTEST_COMMUNICATION = 0.01  # fraction of a step; below it, ranks wait for each other rather than for data


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step: the mean loss over all ranks, and the largest time and memory of any rank."""

    number: int  # of the step, from 0
    loss: float  # nats per byte
    gradient_norm: float
    learning_rate: float
    seconds: float
    tokens: int
    peak_bytes: int  # since the start of the process
    waiting_seconds: float
    hidden_share: float | None = None  # of the communication time; None if not measured, or too short to tell
    slowest_rank: int | None = None  # the rank that the rest of its ring waited for; None if they hardly waited

    @property
    def bits_per_byte(self) -> float:
        return self.loss * BITS_PER_NAT

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """The metrics by name, with bits per byte; what was not measured is absent."""
        values = {**dataclasses.asdict(self), "bits_per_byte": self.bits_per_byte}
        return {name: value for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        hidden = "" if self.hidden_share is None else f", {self.hidden_share:.0%} of communication hidden"
        slowest = "" if self.slowest_rank is None else f", waiting for rank {self.slowest_rank}"
        return (
            f"{self.bits_per_byte:.3f} bits/byte, {self.tokens_per_second:,.0f} tokens/s, "
            f"{self.peak_bytes / 2**20:,.0f} MiB per rank{hidden}{slowest}"
        )


class RunMetrics:
    """Records the metrics of a run. Only the main rank creates one.

    `open` starts the writers that the settings ask for: ``metrics.jsonl`` always, TensorBoard if it is installed, and
    Prometheus if ``metrics_port`` is set. A resumed run appends to ``metrics.jsonl``. The latest values stay readable.
    """

    def __init__(self, settings: TrainSettings) -> None:
        self.settings = settings
        self.latest: StepMetrics | None = None
        self.heartbeats: list[Heartbeat] = []
        self.stragglers: list[Straggler] = []
        self._journal: Journal | None = None
        self._tensorboard: Any = None
        self._resources = ExitStack()

    def open(self) -> None:
        """Start the writers. Raises RunError if Prometheus cannot be served."""
        folder = Path(self.settings.out)
        self._journal = Journal(folder / METRICS, durable=False)
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - optional

            self._tensorboard = SummaryWriter(str(folder / "tensorboard"))
            self._resources.callback(self._tensorboard.close)
        if self.settings.metrics_port:
            try:
                from ringspan.train.prometheus import serve  # noqa: PLC0415 - optional
            except ModuleNotFoundError as error:
                raise RunError(missing_package("--metrics-port", error.name, "train")) from None
            self._resources.enter_context(serve(self, self.settings.metrics_address, self.settings.metrics_port))

    def close(self) -> None:
        self._resources.close()
        self._journal = self._tensorboard = None

    def record_step(self, step: StepMetrics) -> None:
        self.latest = step
        values = step.to_dict()
        if self._journal is not None:
            self._journal.append(values)
        if self._tensorboard is not None:
            for name in ("bits_per_byte", "gradient_norm", "learning_rate"):
                self._tensorboard.add_scalar(name, values[name], step.number)
            self._tensorboard.add_scalar("tokens_per_second", step.tokens_per_second, step.number)

    def record_heartbeats(self, heartbeats: list[Heartbeat], stragglers: list[Straggler]) -> None:
        """Called from the watchdog's thread. A straggler is written once, when it becomes one."""
        known = {found.rank for found in self.stragglers}
        self.heartbeats, self.stragglers = heartbeats, stragglers
        for found in stragglers:
            if found.rank not in known and self._journal is not None:
                self._journal.append({"straggler": dataclasses.asdict(found), "time": time.time()})


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The metrics of each step of a run. If a step was repeated after a restart, the last repetition counts."""
    steps = [values for values in read_journal(folder / METRICS) if "number" in values]
    by_number = {values["number"]: values for values in steps}
    return [by_number[number] for number in sorted(by_number)]


def measure_communication(context: DistributedContext, settings: TrainSettings) -> float:
    """Seconds that the transfers of one step take without compute, forward and backward. A collective.

    Times a forward pass of each layer's pattern that only communicates. The time of backward is scaled by its bytes.
    """
    model, ring = settings.model, context.ring
    dtype = getattr(torch, settings.dtype)
    shape = (settings.batch, ring.layout_of(settings.tokens).rows_of(ring.rank), model.kv_heads, model.head_dim)
    k, v = (torch.zeros(shape, dtype=dtype, device=context.device.device) for _ in range(2))
    total = 0.0
    for pattern, layers in model.layers_by_pattern.items():
        ring_plan = plan(
            pattern,
            settings.tokens,
            ring_size=ring.size,
            layout=ring.layout,
            causal=True,
            batch=settings.batch,
            heads=model.heads,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            dtype=dtype,
        )
        forward, backward = (sum(ring_plan.bytes_sent(r, backward=b) for r in range(ring.size)) for b in (False, True))
        seconds = communication_seconds(ring, pattern, settings.tokens, k, v, causal=True)
        total += len(layers) * seconds * (1 + backward / forward) if forward else 0.0
    return settings.accumulate * total


def hidden_share(communication: float, waited: float, step_seconds: float) -> float | None:
    """Fraction of the communication time that a step did not wait for; None if communication takes under 1 % of it.

    A rank waits for data and for slower ranks. If transfers take next to no time, the waiting is for slower ranks.

    >>> hidden_share(communication=2.0, waited=0.5, step_seconds=10.0)
    0.75
    """
    if communication <= _SHORTEST_COMMUNICATION * step_seconds:
        return None
    return max(0.0, 1 - waited / communication)
