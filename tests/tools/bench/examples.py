"""Small cases, and trials with known values, for the tests."""

from __future__ import annotations

from dataclasses import replace

from ringspan.geometry import Dilated, Full
from ringspan.tools.bench.cases import BenchCase
from ringspan.tools.bench.trials import Trial, TrialLimits

ROOMY = TrialLimits(memory_bytes=2**30, seconds=600.0)
SMALL = BenchCase("ringspan", Dilated((64, 256), (1, 4)), 256, 1, True, "contiguous", "float32", 2, 16, True)


def case(implementation: str = "ringspan", tokens: int = 256, ranks: int = 1, *, full: bool = False) -> BenchCase:
    pattern = Full() if full else SMALL.pattern
    return replace(SMALL, implementation=implementation, tokens=tokens, ranks=ranks, pattern=pattern)


def measured(what: BenchCase, number: int = 1, seconds: float = 1.0, peak: int = 2**20, foreign: float = 0.0) -> Trial:
    """A trial whose forward pass takes a quarter of the time."""
    return Trial(
        what,
        number,
        "measured",
        ROOMY,
        forward_seconds=seconds / 4,
        backward_seconds=seconds * 3 / 4,
        peak_bytes=(peak,) * what.ranks,
        foreign_cores=foreign,
        wall_seconds=seconds,
    )
