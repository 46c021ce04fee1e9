"""How a training run is shown while it goes on: a bar, a line for each step, and whoever keeps the others waiting."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ringspan.train.metrics import Metrics

if TYPE_CHECKING:
    from ringspan.train.figures import Step
    from ringspan.train.heartbeats import Beat
    from ringspan.train.loop import Trainer
    from ringspan.train.stragglers import Straggler


class Display:
    """Steps and heartbeats, to the terminal and to ``metrics.jsonl``; keeps the last of each for whoever asks."""

    def __init__(self, trainer: Trainer, console: Console) -> None:
        self.console = console
        self.last: Step | None = None
        self.beats: list[Beat] = []
        self.late: list[Straggler] = []
        self._metrics = Metrics(Path(trainer.settings.out), trainer.crew.is_speaker)
        columns = (TextColumn("step {task.completed:.0f}/{task.total:.0f}"), BarColumn(20), TimeRemainingColumn())
        self._bar = Progress(*columns, TextColumn("{task.fields[figures]}", markup=False), console=console)
        self._task = self._bar.add_task("", total=trainer.settings.steps, completed=trainer.next_step, figures="")

    def __enter__(self) -> Display:
        self._metrics.__enter__()
        self._bar.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.__exit__(kind, error, at)
        self._metrics.__exit__(kind, error, at)

    def show_step(self, step: Step) -> None:
        self.last = step
        self._metrics.write(step)
        self._bar.update(self._task, completed=step.number + 1, figures=str(step))
        if not self.console.is_terminal:
            self.console.print(f"step {step.number + 1}: {step}", highlight=False, soft_wrap=True)

    def show_beats(self, beats: list[Beat], late: list[Straggler]) -> None:
        """Called by the guard's thread at every beat; a straggler is written down when it begins to be one."""
        known = {found.rank for found in self.late}
        self.beats, self.late = beats, late
        for found in late:
            self._bar.update(self._task, figures=f"waiting for {found}")
            if found.rank not in known:
                self._metrics.write_straggler(found)
                self.console.print(f"waiting for {found}", style="yellow", highlight=False, soft_wrap=True)
