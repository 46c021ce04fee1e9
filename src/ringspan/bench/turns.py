"""Calls timed in turns, within one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import ringspan as rs
from ringspan.evidence.machine import Stopwatch, is_disturbed

_ATTEMPTS = 3


class Clock:
    """Times calls in turns, so that a machine that drifts, drifts for all. A disturbed call is timed again.

    ``disturbed`` counts the calls that stayed disturbed; ``most_foreign_cores`` is the most that other programs took.
    """

    def __init__(self) -> None:
        self.most_foreign_cores = 0.0
        self.disturbed = 0

    def in_turns(
        self, calls: Mapping[str, Callable[[], object]], rounds: int, warm: bool = True
    ) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(-1 if warm else 0, rounds):
            for name in sorted(calls, reverse=bool(turn % 2)):  # who comes first finds the caches of others
                if turn < 0:
                    calls[name]()
                else:
                    found[name].append(self._seconds(calls[name]))
        return found

    def _seconds(self, call: Callable[[], object]) -> float:
        watches: list[Stopwatch] = []
        while len(watches) < _ATTEMPTS:
            with Stopwatch() as watch:
                call()
            watches.append(watch)
            if not is_disturbed(watch.foreign_cores, watch.seconds):
                break
        best = min(watches, key=lambda watch: watch.foreign_cores)
        self.most_foreign_cores = max(self.most_foreign_cores, best.foreign_cores)
        self.disturbed += is_disturbed(best.foreign_cores, best.seconds)
        return best.seconds


def without_gradients(tensors: Sequence[Tensor], options: Mapping[str, Any]) -> Callable[[], object]:
    """A call of attention."""

    def call() -> object:
        with torch.no_grad():
            return rs.attention(*tensors, **options)

    return call


def with_gradients(tensors: Sequence[Tensor], grad: Tensor, options: Mapping[str, Any]) -> Callable[[], object]:
    """A call of attention and its gradients."""
    return lambda: torch.autograd.grad(rs.attention(*tensors, **options), tensors, grad)
