"""Where a run's figures go: a line of JSON for each step, always; TensorBoard as well where it is installed."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from ringspan.train.figures import Step


class Metrics:
    """Writes ``metrics.jsonl`` into the run's folder, on the one rank that speaks. A resumed run goes on below."""

    file: IO[str] | None = None
    board: Any = None

    def __init__(self, folder: Path, speaks: bool) -> None:
        if not speaks:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / "metrics.jsonl").open("a")
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

            self.board = SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: Step, **more: float) -> None:
        """One step, and what else is known of it."""
        if self.file is None:
            return
        figures = {**dataclasses.asdict(step), "bits_per_byte": step.bits_per_byte, **more}
        self.file.write(json.dumps(figures) + "\n")
        self.file.flush()
        if self.board is not None:
            for name in ("bits_per_byte", "gradient_norm", "rate", *more):
                self.board.add_scalar(name, figures[name], step.number)
            self.board.add_scalar("tokens_per_second", step.tokens_per_second, step.number)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.file is not None:
            self.file.close()
        if self.board is not None:
            self.board.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The steps of a run; where a step was done again after a restart, the last time counts."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    by_step = {figures["number"]: figures for figures in map(json.loads, lines)}
    return [by_step[number] for number in sorted(by_step)]
