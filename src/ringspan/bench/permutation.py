"""What it costs to permute the rows of a grid: in processes of their own, which give memory back or keep it.

A permuted tensor is a new one. By default the C library gives large tensors back to the system as they are freed, and
the pages of the next one are made as they are first written, which takes longer than to permute. A process that keeps
its memory (as torch does on GPUs, and allocators made for training do on CPUs) pays for that once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

import ringspan as rs
from ringspan.bench.turns import Clock, with_gradients, without_gradients

KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}  # glibc reads them at the start


def permutation_times(
    grid: Sequence[int], heads: int, dim: int, segment: int, rounds: int, threads: int, *, keeps_memory: bool
) -> dict[str, Any]:
    """Measure in a fresh process: seconds of each round by pass and by what was timed."""
    asked = json.dumps(dict(grid=tuple(grid), heads=heads, dim=dim, segment=segment, rounds=rounds, threads=threads))
    command = [sys.executable, "-m", "ringspan.bench.permutation", asked]
    environment = os.environ | (KEEPS_MEMORY if keeps_memory else {})
    found = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    times: dict[str, Any] = json.loads(found.stdout)
    return times


def measure(grid: Sequence[int], heads: int, dim: int, segment: int, rounds: int, threads: int) -> dict[str, Any]:
    """Attention over rows that lie in order; ordering one tensor and undoing it; and attention with ``order=``."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    clock, order = Clock(), rs.Hilbert(tuple(grid))
    leaves = [torch.randn(1, order.period, heads, dim, requires_grad=True) for _ in range(3)]
    grad, options = torch.randn_like(leaves[0]), dict(pattern=rs.Dilated((segment,), (1,)))
    forward: dict[str, Callable[[], object]] = {
        "in order": without_gradients(leaves, options),
        "once": lambda: order.undo(order.apply(grad)),
        "order=": without_gradients(leaves, options | dict(order=order)),
    }
    both: dict[str, Callable[[], object]] = {
        "in order": with_gradients(leaves, grad, options),
        "once": lambda: torch.autograd.grad(order.undo(order.apply(leaves[0])), leaves[0], grad),
        "order=": with_gradients(leaves, grad, options | dict(order=order)),
    }
    Clock().in_turns(both, 1)  # until memory that is kept is there
    passes = {name: clock.in_turns(calls, rounds) for name, calls in (("forward", forward), ("both", both))}
    return dict(seconds=passes, most_foreign_cores=clock.most_foreign_cores, disturbed=clock.disturbed)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(**json.loads(sys.argv[1]))))
