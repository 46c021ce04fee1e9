"""Cases: what is measured. An implementation, a pattern, a length, a number of ranks, and the shape of the heads."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ringspan.geometry import Dilated, Pattern, parse_pattern
from ringspan.layout import Layout, LayoutName

_ANY_LENGTH = Dilated((1,), (1,))  # stands for the spanning patterns of all lengths


@dataclass(frozen=True)
class Case:
    """``layout`` says which rows each rank holds; ``backward`` whether the backward pass is measured too.

    ``spanning``: the pattern was chosen for the length (`Dilated.spanning`), and other lengths have another one.
    """

    implementation: str
    pattern: Pattern
    tokens: int
    ranks: int
    causal: bool
    layout: LayoutName
    dtype: str
    heads: int
    dim: int
    backward: bool
    spanning: bool = False

    @property
    def ladder(self) -> Case:
        """The case without its length, and without what may depend on it: equal for all lengths of one ladder."""
        pattern = _ANY_LENGTH if self.spanning else self.pattern
        return replace(self, tokens=0, layout="contiguous", pattern=pattern)

    @property
    def pattern_name(self) -> str:
        """The pattern as the command line takes it."""
        return "spanning" if self.spanning else pattern_label(self.pattern)

    @property
    def processes(self) -> int:
        """How many processes a trial starts: the ranks of a simulated ring share one."""
        return 1 if self.implementation == "simulated" else self.ranks

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def rows_of(self, rank: int) -> int:
        return Layout(self.layout, self.tokens, self.ranks).rows_of(rank)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "pattern": self.pattern.text}

    def __str__(self) -> str:
        where = "one process" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{self.implementation}, {self.tokens:,} tokens, {where}, {pattern_label(self.pattern)}"


def case_from_json(found: dict[str, Any]) -> Case:
    """The case that `Case.as_json` wrote."""
    return Case(**{**found, "pattern": parse_pattern(found["pattern"])})


def pattern_label(pattern: Pattern) -> str:
    """A pattern as the command line takes it.

    >>> pattern_label(Dilated((2048, 8192), (1, 4)))
    '2048x1,8192x4'
    """
    if not isinstance(pattern, Dilated):
        return "full"
    return ",".join(f"{w}x{r}" for w, r in zip(pattern.segment_lengths, pattern.dilation_rates, strict=True))
