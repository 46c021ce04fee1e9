"""What a step did, and how long its parcels would take with nothing else to do."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ringspan.geometry import Pattern
from ringspan.planning.api import plan
from ringspan.runtime.files import Journal, read_journal
from ringspan.schedule import communication_seconds
from ringspan.train.config import TrainSettings
from ringspan.train.distributed import Crew
from ringspan.train.watchdog import Straggler

BITS = 1 / math.log(2)  # of a nat
TELLING = 0.01  # of a step: travel below it is too short to ask how much of it is hidden


@dataclass(frozen=True)
class Step:
    """What one step did: the mean loss over all ranks, and what the rank that spent most has spent."""

    number: int
    loss: float  # nats per byte
    gradient_norm: float
    rate: float
    seconds: float
    tokens: int
    peak_bytes: int  # since the run began
    waiting_seconds: float
    hidden_share: float | None  # of the time that its parcels take; None where that is too short to tell
    late_rank: int | None = None  # that the others of its ring waited for; None where they hardly waited

    @property
    def bits_per_byte(self) -> float:
        return self.loss * BITS

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def __str__(self) -> str:
        hidden = "" if self.hidden_share is None else f", {self.hidden_share:.0%} of communication hidden"
        late = "" if self.late_rank is None else f", waiting for rank {self.late_rank}"
        return (
            f"{self.bits_per_byte:.3f} bits/byte, {self.tokens_per_second:,.0f} tokens/s, "
            f"{self.peak_bytes / 2**20:,.0f} MiB a rank{hidden}{late}"
        )


def travel_of_a_step(crew: Crew, settings: TrainSettings) -> float:
    """Seconds that all parcels of a step take, forward and backward, with nothing else to do.

    Measured for a forward walk of each layer's pattern; backward moves more bytes, in proportion.
    """
    model, ring = settings.model, crew.ring
    dtype = getattr(torch, settings.dtype)
    shape = (settings.batch, ring.layout_of(settings.tokens).rows_of(ring.rank), model.kv_heads, model.head_dim)
    k, v = (torch.zeros(shape, dtype=dtype, device=crew.device.device) for _ in range(2))
    known: dict[Pattern, float] = {}
    patterns = [model.pattern_of(layer) for layer in range(model.layers)]
    for pattern in dict.fromkeys(patterns):
        priced = plan(
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
        forward, backward = (sum(priced.bytes_sent(r, backward=b) for r in range(ring.size)) for b in (False, True))
        seconds = communication_seconds(ring, pattern, settings.tokens, k, v, causal=True)
        known[pattern] = seconds * (1 + backward / forward) if forward else 0.0
    return settings.accumulate * sum(known[pattern] for pattern in patterns)


def hidden_share(travel: float, waited: float, step_seconds: float) -> float | None:
    """How much of the travel a step did not wait for.

    A rank waits for parcels and for slower ranks: where parcels take next to nothing, waiting says nothing of them.

    >>> hidden_share(travel=2.0, waited=0.5, step_seconds=10.0)
    0.75
    """
    return max(0.0, 1 - waited / travel) if travel > TELLING * step_seconds else None


METRICS = "metrics.jsonl"


class Metrics:
    """Writes ``metrics.jsonl`` into the run's folder, on the one rank that speaks. A resumed run goes on below."""

    journal: Journal | None = None
    board: Any = None

    def __init__(self, folder: Path, speaks: bool) -> None:
        if not speaks:
            return
        self.journal = Journal(folder / METRICS, durable=False)
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

            self.board = SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: Step, **more: float) -> None:
        """One step, and what else is known of it."""
        if self.journal is None:
            return
        figures = {**dataclasses.asdict(step), "bits_per_byte": step.bits_per_byte, **more}
        self.journal.append(figures)
        if self.board is not None:
            for name in ("bits_per_byte", "gradient_norm", "rate", *more):
                self.board.add_scalar(name, figures[name], step.number)
            self.board.add_scalar("tokens_per_second", step.tokens_per_second, step.number)

    def write_straggler(self, found: Straggler) -> None:
        """A rank that keeps the others waiting, when that begins."""
        if self.journal is not None:
            self.journal.append({"straggler": dataclasses.asdict(found), "time": time.time()})

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.board is not None:
            self.board.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The steps of a run; where a step was done again after a restart, the last time counts."""
    steps = [figures for figures in read_journal(folder / METRICS) if "number" in figures]
    by_step = {figures["number"]: figures for figures in steps}
    return [by_step[number] for number in sorted(by_step)]
