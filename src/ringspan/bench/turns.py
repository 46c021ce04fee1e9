"""Calls timed in turns, within one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import ringspan as rs
from ringspan.evidence.machine import Stopwatch


class Clock:
    """Times calls in turns, so that a machine that drifts, drifts for all; and sees whether others were busy."""

    def __init__(self) -> None:
        self.most_foreign_cores = 0.0

    def in_turns(
        self, calls: Mapping[str, Callable[[], object]], rounds: int, warm: bool = True
    ) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(-1 if warm else 0, rounds):
            for name in sorted(calls, reverse=bool(turn % 2)):  # who comes first finds the caches of others
                with Stopwatch() as watch:
                    calls[name]()
                if turn >= 0:
                    found[name].append(watch.seconds)
                    self.most_foreign_cores = max(self.most_foreign_cores, watch.foreign_cores)
        return found


def without_gradients(tensors: Sequence[Tensor], options: Mapping[str, Any]) -> Callable[[], object]:
    """A call of attention."""

    def call() -> object:
        with torch.no_grad():
            return rs.attention(*tensors, **options)

    return call


def with_gradients(tensors: Sequence[Tensor], grad: Tensor, options: Mapping[str, Any]) -> Callable[[], object]:
    """A call of attention and its gradients."""
    return lambda: torch.autograd.grad(rs.attention(*tensors, **options), tensors, grad)
