"""Takes the steps of `ringspan verify --training` on each ring, and judges all checks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ringspan.tools.verify.check import ByRing, Check, Failed
from ringspan.tools.verify.run import LocalRanks, Ranks
from ringspan.tools.verify.verify_page import with_reasons
from ringspan.tools.verify_training.adapter import AdapterFactory
from ringspan.tools.verify_training.batches import TrainingSettings, rounded_tokens
from ringspan.tools.verify_training.compare import measure_training
from ringspan.tools.verify_training.judge import judge_training, roots


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
        where = f"on rings of {', '.join(map(str, self.measured))}: {self.settings.target}, up to "
        where += f"{self.settings.long_tokens:,} tokens."
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
        tokens=rounded_tokens(96, sizes),
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
    processes = LocalRanks(timeout)
    target = adapter if isinstance(adapter, str) else getattr(adapter, "__qualname__", repr(adapter))
    settings = settings_for_training(target, processes.sizes(list(ranks)), tokens, dtype, seed)
    measured = measure_rings(settings, processes, None if isinstance(adapter, str) else adapter)
    return TrainingReport(settings, judge_training(measured, settings), measured, processes.where)
