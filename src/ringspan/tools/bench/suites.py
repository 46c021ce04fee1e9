"""Suites: fixed sets of cases. `results` has those behind docs/results.md, the tables that the project shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from ringspan.geometry import Full, Pattern
from ringspan.tools.bench.cases import Case, make_cases
from ringspan.tools.bench.ladder import Settings
from ringspan.tools.bench.trials import Limits

SUITES = ("results",)
RINGS = ("torch_ring", "ring_attention_pytorch", "all_gather")


@dataclass(frozen=True)
class Part:
    """One table of a suite: its cases, and how they are run."""

    name: str
    cases: Sequence[Case]
    settings: Settings


@dataclass(frozen=True)
class Scale:
    """The sizes of the `results` suite. Lengths grow in steps, since each step is checked before the next is tried."""

    first_segment: int  # of the pattern, which spans each length
    two_tokens: Sequence[int]
    memory_tokens: Sequence[int]
    simulated_rings: Sequence[int]
    real_rings: Sequence[int]
    longest_tokens: Sequence[int]
    rank_budget_bytes: int
    one_length: int
    long_length: int
    long_dtypes: Sequence[str]
    rounds: int
    attempts: int


FULL_SCALE = Scale(
    first_segment=2048,
    two_tokens=(4096, 8192, 16384),
    memory_tokens=(16384,),
    simulated_rings=(1, 2, 4, 8, 16, 32),
    real_rings=(1, 2, 4, 8),
    longest_tokens=(4096, 8192, 16384, 32768, 65536, 131072),
    rank_budget_bytes=2**30,
    one_length=8192,
    long_length=524288,
    long_dtypes=("float32",),
    rounds=3,
    attempts=3,
)
QUICK_SCALE = Scale(
    first_segment=64,
    two_tokens=(256, 512),
    memory_tokens=(256, 512),
    simulated_rings=(1, 2, 4),
    real_rings=(1, 2),
    longest_tokens=(256, 512, 65536),
    rank_budget_bytes=2**28,
    one_length=512,
    long_length=4096,
    long_dtypes=("float32",),
    rounds=1,
    attempts=1,
)
TRIAL_SECONDS = 40.0  # of the short cases
_LONG_TRIAL_SECONDS = 1200.0  # of the long length
REPEAT_UP_TO_SECONDS = 12.0  # longer trials average over the machine's moods by themselves


def results_parts(scale: Scale, memory_bytes: int) -> list[Part]:
    """The parts of the `results` suite. They share trials: what one has measured, the others need not run again."""
    make = partial(make_cases, first_segment=scale.first_segment)
    patterns: tuple[Pattern | Literal["spanning"], ...] = ("spanning", Full())
    settings = Settings(
        Limits(memory_bytes, TRIAL_SECONDS), scale.rounds, attempts=scale.attempts, long_seconds=REPEAT_UP_TO_SECONDS
    )
    once = replace(settings, rounds=1)
    small = [ranks for ranks in scale.real_rings if ranks > 1]
    two = make(("ringspan", "sdpa", *RINGS[:2]), patterns, scale.two_tokens, (1,)) + make(
        ("ringspan", *RINGS), patterns, scale.two_tokens, (2,)
    )
    memory = (
        make(("simulated",), patterns, scale.memory_tokens, scale.simulated_rings)
        + make(("ringspan",), patterns, scale.memory_tokens, scale.real_rings)
        + make(RINGS, patterns, scale.memory_tokens, small)
    )
    at_one_length = make(
        ("ringspan", "sdpa", "sdpa_mask", "flex", *RINGS[:2]), patterns, (scale.one_length,), (1,)
    ) + make(("ringspan", *RINGS), patterns, (scale.one_length,), (2,))
    longest_names = {1: ("ringspan", "sdpa", "sdpa_mask", "flex"), 2: ("ringspan", *RINGS)}
    longest = [
        Part(
            f"longest on {ranks}",
            make(names, patterns, scale.longest_tokens, (ranks,)),
            replace(once, limits=Limits(ranks * scale.rank_budget_bytes, TRIAL_SECONDS)),
        )
        for ranks, names in longest_names.items()
    ]
    long = [
        case
        for dtype in scale.long_dtypes
        for case in make(("ringspan",), ("spanning",), (scale.long_length,), (1, 2), dtype=dtype)
    ]
    return [
        Part("one against two", two, settings),
        Part("one length", at_one_length, settings),
        Part("memory", memory, once),
        *longest,
        Part("long", long, replace(once, limits=Limits(memory_bytes, _LONG_TRIAL_SECONDS))),
    ]
