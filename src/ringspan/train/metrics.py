"""Where a run's figures go: a line of JSON for each step, always; TensorBoard as well where it is installed."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from ringspan.train.figures import Step
from ringspan.train.stragglers import Straggler

METRICS = "metrics.jsonl"


class Metrics:
    """Writes ``metrics.jsonl`` into the run's folder, on the one rank that speaks. A resumed run goes on below."""

    file: IO[str] | None = None
    board: Any = None

    def __init__(self, folder: Path, speaks: bool) -> None:
        self._turn = threading.Lock()  # the guard's thread writes as well
        if not speaks:
            return
        folder.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(folder / METRICS)
        self.file = (folder / METRICS).open("a")
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

            self.board = SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: Step, **more: float) -> None:
        """One step, and what else is known of it."""
        if self.file is None:
            return
        figures = {**dataclasses.asdict(step), "bits_per_byte": step.bits_per_byte, **more}
        self._write_line(figures)
        if self.board is not None:
            for name in ("bits_per_byte", "gradient_norm", "rate", *more):
                self.board.add_scalar(name, figures[name], step.number)
            self.board.add_scalar("tokens_per_second", step.tokens_per_second, step.number)

    def write_straggler(self, found: Straggler) -> None:
        """A rank that keeps the others waiting, when that begins."""
        if self.file is not None:
            self._write_line({"straggler": dataclasses.asdict(found), "time": time.time()})

    def _write_line(self, figures: dict[str, Any]) -> None:
        assert self.file is not None
        with self._turn:
            self.file.write(json.dumps(figures) + "\n")
            self.file.flush()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.file is not None:
            self.file.close()
        if self.board is not None:
            self.board.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The steps of a run; where a step was done again after a restart, the last time counts."""
    lines = (folder / METRICS).read_text().splitlines()
    steps = [figures for figures in map(json.loads, lines) if "number" in figures]
    by_step = {figures["number"]: figures for figures in steps}
    return [by_step[number] for number in sorted(by_step)]


def _drop_torn_line(path: Path) -> None:
    """A run that was cut off in the middle of a line goes on below the last whole one."""
    if path.is_file():
        whole = path.read_bytes().rpartition(b"\n")
        if whole[2]:
            with path.open("r+b") as file:
                file.truncate(len(whole[0]) + len(whole[1]))
