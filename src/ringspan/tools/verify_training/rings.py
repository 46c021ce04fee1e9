"""Takes the steps of `ringspan verify --training` on each ring, and judges all checks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ringspan.tools.verify.check import ByRing, Check, Failed
from ringspan.tools.verify.run import LocalRanks, Ranks
from ringspan.tools.verify.verify_page import with_reasons
from ringspan.tools.verify_training.adapter import AdapterFactory
from ringspan.tools.verify_training.batches import TrainingSettings, rounded_tokens
from ringspan.tools.verify_training.compare import measure_training
from ringspan.tools.verify_training.findings import RUNS
from ringspan.tools.verify_training.judge import judge_training, roots

_TOKENS = 96  # of most steps
_MIN_SPAN = 8  # rows of a shard of the largest zigzag ring, in each half: some of them are not at a border


@dataclass(frozen=True)
class TrainingReport:
    """All checks, and what each ring measured."""

    settings: TrainingSettings
    checks: list[Check]
    measured: ByRing
    where: str

    @property
    def causes(self) -> list[Check]:
        """The failing checks that do not follow from others."""
        return roots(self.checks)

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        failing = [check for check in self.checks if check.verdict == "FAIL"]
        settings = self.settings
        where = f"on rings of {', '.join(map(str, self.measured))}: {settings.target}, steps of up to "
        where += f"{settings.longest:,} tokens, work and memory at {settings.long_tokens:,}."
        if failing and failing[0].name == RUNS:
            return f"{settings.target} did not run: {failing[0].reason}."
        if failing:
            causes = "; ".join(f'"{check.name}": {check.reason}' for check in self.causes)
            return f"{len(failing)} of {len(self.checks)} checks fail {where} Likely cause: {causes}."
        passing = sum(check.verdict == "pass" for check in self.checks)
        rest = "".join(with_reasons(self.checks, verdict) for verdict in ("not measured", "not supported"))
        return f"{passing} of {len(self.checks)} checks pass {where}{rest}"


def settings_for_training(
    target: str, sizes: Sequence[int], long_tokens: int = 1024, dtype: str = "float32", seed: int = 0
) -> TrainingSettings:
    """Lengths that divide evenly over all rings, because many trainers need that; others are checks of their own."""
    return TrainingSettings(
        target,
        tuple(sizes),
        tokens=rounded_tokens(max(_TOKENS, _MIN_SPAN * 2 * max(sizes)), sizes),
        long_tokens=rounded_tokens(long_tokens, sizes),
        dtype=dtype,
        seed=seed,
    )


def measure_rings(
    settings: TrainingSettings,
    ranks: Ranks,
    factory: AdapterFactory | None = None,
    on_ring: Callable[[int], None] = lambda size: None,
) -> ByRing:
    """What each rank of each ring measured."""
    measured: ByRing = {}
    with tempfile.TemporaryDirectory(prefix="ringspan-") as folder:
        for size in settings.sizes:
            on_ring(size)
            try:
                measured[size] = ranks.run(size, measure_training, settings, factory, folder)
            except (RuntimeError, TimeoutError) as error:  # a rank died or timed out
                measured[size] = [{"failed": Failed(str(error))} for _ in range(size)]
            if any("failed" in values for values in measured[size]):
                break  # larger rings have nothing to be compared with, or fail as well
    return measured


def verify_training(
    adapter: str | AdapterFactory,
    *,
    ranks: Sequence[int] = (1, 2, 4),
    tokens: int = 1024,
    dtype: str = "float32",
    seed: int = 0,
    timeout: float = 600.0,
) -> TrainingReport:
    """Compare training steps on rings of local processes with those of one process.

    Args:
        adapter: a class or function (group, dtype) -> adapter, or its name ``package.module:name``.
        ranks: ring sizes; 1 is always included.
        tokens: sequence length of the steps whose memory and work are measured.
        dtype: of the steps whose rounding is compared over ring sizes.
        seed: of the batches.
    """
    if not ranks or min(ranks) < 1 or max(ranks) < 2:
        raise ValueError(f"ranks={tuple(ranks)}: must contain a ring of at least 2, to compare with one process")
    if tokens < 1:
        raise ValueError(f"tokens={tokens}: must be at least 1")
    if not getattr(getattr(torch, dtype, None), "is_floating_point", False):
        raise ValueError(f"dtype={dtype!r}: must be a floating-point dtype of torch, such as 'bfloat16'")
    processes = LocalRanks(timeout)
    target = adapter if isinstance(adapter, str) else getattr(adapter, "__qualname__", repr(adapter))
    settings = settings_for_training(target, processes.sizes(list(ranks)), tokens, dtype, seed)
    measured = measure_rings(settings, processes, None if isinstance(adapter, str) else adapter)
    return TrainingReport(settings, judge_training(measured, settings), measured, processes.where)
