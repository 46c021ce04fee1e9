"""What an acceptance run consists of: its settings, its sizes for each kind of device, and its steps."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import ringspan as rs
from ringspan import kernels
from ringspan.tools.acceptance.steps import Step
from ringspan.tools.bench.cases import BenchCase
from ringspan.tools.bench.share import HEAD_DIM, HEADS, pattern_up_to
from ringspan.train.metrics import read_metrics

Kind = Literal["cpu", "cuda"]
FLOAT64 = "float64"  # of the training whose rings must agree
MACHINE, SHARE, VERIFY = "machine", "share", "verify"


@dataclass(frozen=True)
class Scale:
    """Sizes, in tokens and rounds. ``verify`` are the options of `ringspan verify`."""

    verify: tuple[str, ...]
    share_tokens: int
    share_rounds: int
    dilated_tokens: int
    full_tokens: int
    ring_rounds: int
    train_tokens: int
    train_steps: int
    window: int = 1024


SCALES: dict[Kind, Scale] = {
    "cpu": Scale((), 8192, 3, 16384, 4096, 3, 2048, 30),
    "cuda": Scale(("--tokens", "262144"), 131072, 5, 524288, 65536, 5, 16384, 60),
}
QUICK = Scale(("--pattern", "128x1,512x8", "--tokens", "2048"), 4096, 1, 1024, 512, 1, 256, 8, window=128)


@dataclass(frozen=True)
class AcceptanceSettings:
    """What runs where.

    Args:
        device: what the steps run on.
        fallback: why they run on the CPU although that was not asked for; empty if it was, or on GPUs.
        sizes: of the rings; the largest also trains.
        timed: the sizes of rings whose ranks each have a core or a device of their own.
        dtype: of the share, the rings, and the second training.
    """

    device: Kind
    fallback: str
    sizes: tuple[int, ...]
    timed: tuple[int, ...]
    limit_seconds: float
    quick: bool = False
    dtype: str = "float32"

    @property
    def scale(self) -> Scale:
        return QUICK if self.quick else SCALES[self.device]

    @property
    def largest(self) -> int:
        return max(self.sizes)

    @property
    def backend(self) -> str:
        return "gloo" if self.device == "cpu" else "NCCL"

    @property
    def kernels(self) -> tuple[str, ...]:
        """Those whose contract names this device, or any."""
        all_kernels = map(kernels.get, kernels.names())
        return tuple(each.name for each in all_kernels if each.contract.device in (self.device, "any"))

    @property
    def share_patterns(self) -> tuple[rs.Pattern, ...]:
        return pattern_up_to(self.scale.share_tokens), rs.Window(self.scale.window - 1)

    def cases(self, size: int) -> dict[str, BenchCase]:
        """What a ring of this size runs, forward and backward, causal; by name."""
        scale = self.scale
        dilated = rs.Dilated.spanning(scale.dilated_tokens, min(2048, scale.dilated_tokens // 4))
        shape: Any = (size, True, "zigzag", self.dtype, HEADS, HEAD_DIM, True)
        return {
            "dilated": BenchCase("ringspan", dilated, scale.dilated_tokens, *shape),
            "full": BenchCase("ringspan", rs.Full(), scale.full_tokens, *shape),
        }

    @property
    def ring_steps(self) -> dict[str, BenchCase]:
        """One step for each case and size, since memory is measured in fresh processes."""
        return {ring_step_name(size, name): case for size in self.sizes for name, case in self.cases(size).items()}

    @property
    def trainings(self) -> tuple[TrainingRun, ...]:
        """In fp64 on one rank and on the largest ring, which must agree; there also in the dtype of the device."""
        sizes = dict.fromkeys((1, self.largest))
        dtype = self.dtype if self.dtype in ("float32", "bfloat16") else "float32"  # what `ringspan train` offers
        return (*(TrainingRun(size, FLOAT64) for size in sizes), TrainingRun(self.largest, dtype))


@dataclass(frozen=True)
class TrainingRun:
    size: int
    dtype: str

    @property
    def name(self) -> str:
        return f"train-{self.size}-{self.dtype}"


def kernel_step_name(kernel: str) -> str:
    return f"kernel-{kernel}"


def ring_step_name(size: int, case: str) -> str:
    return f"ring-{size}-{case}"


@dataclass(frozen=True)
class StepPlanner:
    """Makes the steps; their files are in ``folder``."""

    settings: AcceptanceSettings
    folder: Path
    python: str = field(default=sys.executable)

    def machine(self) -> Step:
        return self._task(MACHINE, "the machine, and its self-test (ringspan doctor)", "describe", {})

    def others(self) -> list[Step]:
        """All further steps, in order."""
        settings, scale = self.settings, self.settings.scale
        patterns = [pattern.text for pattern in settings.share_patterns]
        share = dict(patterns=patterns, tokens=scale.share_tokens, rounds=scale.share_rounds, dtype=settings.dtype)
        return [
            *(
                self._task(
                    kernel_step_name(name),
                    f"kernel {name} against fp64",
                    "check_kernel",
                    {"kernel": name, "large": not settings.quick},
                )
                for name in settings.kernels
            ),
            self._task(SHARE, "share of the bare kernel", "measure_share", share),
            self._verify(),
            *(self._ring(name, case) for name, case in settings.ring_steps.items()),
            *map(self._train, settings.trainings),
        ]

    def _task(self, name: str, title: str, task: str, specification: dict[str, Any], ranks: int = 0) -> Step:
        result = self.folder / "results" / f"{name}.json"
        arguments = ("ringspan.tools.acceptance.tasks", task, str(result), json.dumps(specification))
        return self._step(name, title, arguments, result, ranks=ranks)

    def _step(self, name: str, title: str, module: Sequence[str], result: Path, *, ranks: int, **more: Any) -> Step:
        """``ranks`` is the number of processes that torchrun starts; without torchrun 0."""
        launcher = ("torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m") if ranks else ()
        variables = {"PYTHONUNBUFFERED": "1"}
        if self.settings.device == "cpu":
            variables |= {"CUDA_VISIBLE_DEVICES": "", **({"OMP_NUM_THREADS": "1"} if ranks else {})}
        return Step(name, title, (self.python, "-m", *launcher, *module), result, variables=variables, **more)

    def _verify(self) -> Step:
        folder = self.folder / VERIFY
        size = self.settings.largest
        arguments = ("ringspan", "verify", *self.settings.scale.verify, "--json", "--out", str(folder))
        title = f"ringspan verify on rings of up to {size} over {self.settings.backend}"
        # torchrun exits with 1 if the verdict is not PASS
        return self._step(VERIFY, title, arguments, folder / "verify.json", ranks=size, statuses=(0, 1))

    def _ring(self, name: str, case: BenchCase) -> Step:
        scale, limit = self.settings.scale, self.settings.limit_seconds
        specification = dict(case=case.as_json(), rounds=scale.ring_rounds, seconds=limit)
        title = f"time and memory of a ring of {case.ranks}, {case.pattern.text}"
        return self._task(name, title, "measure_ring", specification, ranks=case.ranks)

    def _train(self, run: TrainingRun) -> Step:
        scale, folder = self.settings.scale, self.folder / run.name
        options = dict(
            tokens=scale.train_tokens, steps=scale.train_steps, warmup=2, learning_rate=3e-3, dtype=run.dtype
        )
        options |= dict(save_every=scale.train_steps, keep=1, timeout=self.settings.limit_seconds, out=folder)
        flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        arguments = ("ringspan", "train", "--preset", "quick", *flags)
        title = f"training on a ring of {run.size} in {run.dtype}"
        return self._step(run.name, title, arguments, folder, ranks=run.size, read=_read_training)


def _read_training(folder: Path) -> dict[str, Any]:
    losses = [step["loss"] for step in read_metrics(folder)]
    if not losses:
        raise ValueError(f"{folder}: no steps")
    return {"losses": losses, "folder": str(folder)}


def with_dtype(settings: AcceptanceSettings, machine: Any) -> AcceptanceSettings:
    """The settings with the dtype that the machine's report suggests for the device."""
    dtypes = [each["suggested_dtype"] for each in machine["devices"] if each["name"].startswith(settings.device)]
    return replace(settings, dtype=next(filter(None, dtypes), settings.dtype))
