"""The study of grid orders: how many neighbours see each other, how many rows a ring sends, and what ordering costs.

Run as a module, it measures the permutation in a process of its own (`permutation_times`).
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

import ringspan as rs
from ringspan.order import GridOrder
from ringspan.order.orders import ranks_of_cells
from ringspan.tools.bench.summaries import Spread, spread
from ringspan.tools.bench.trials import TurnTimer, with_gradients, without_gradients

_STEPS_PER_DOUBLING = 16  # of the segment lengths tried
KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}  # glibc reads these at start-up
ORDERS: Mapping[str, type[GridOrder]] = {
    "row-major": rs.RowMajor,
    "snake": rs.Snake,
    "Morton": rs.Morton,
    "Hilbert": rs.Hilbert,
}
Announce = Callable[[str], None]


def share_of_neighbours_seen(order: GridOrder, segment_length: int, radius: float) -> float:
    """The share of all pairs of cells at most ``radius`` apart that are in one segment, so that they see each other.

    >>> from ringspan import RowMajor
    >>> share_of_neighbours_seen(RowMajor((4, 4)), 4, radius=1)
    0.5
    """
    segments = (order.inverse // segment_length).view(order.shape)
    met = pairs = 0
    for here, there in _pairs(segments, radius):
        met += int((here == there).sum())
        pairs += here.numel()
    return met / pairs


def shortest_segment(order: GridOrder, share: float, radius: float) -> int:
    """The shortest segment, in small steps, with which at least ``share`` of all neighbours see each other."""
    for step in itertools.count(_STEPS_PER_DOUBLING):
        length = min(order.period, round(2 ** (step / _STEPS_PER_DOUBLING)))
        if share_of_neighbours_seen(order, length, radius) >= share:
            return length
    raise AssertionError("one segment of all cells holds every pair")


def rows_received(order: GridOrder, ring_size: int, radius: float) -> list[int]:
    """For each rank, the rows of other ranks that it needs so that all pairs at most ``radius`` apart can meet.

    The cells are ordered once and then split into contiguous shards.

    >>> from ringspan import RowMajor
    >>> rows_received(RowMajor((4, 4)), 2, radius=1)
    [4, 4]
    """
    cells = torch.arange(order.period).view(order.shape)
    needed = torch.zeros(ring_size, order.period, dtype=torch.bool)
    ranks = ranks_of_cells(order, ring_size)
    for (here, there), (mine, other) in zip(_pairs(ranks, radius), _pairs(cells, radius), strict=True):
        apart = here != there
        needed[here[apart], other[apart]] = True
        needed[there[apart], mine[apart]] = True
    return needed.sum(1).tolist()


def _pairs(grid: Tensor, radius: float) -> Iterator[tuple[Tensor, Tensor]]:
    """All pairs of cells at most ``radius`` apart, each once, as two windows of the grid for each offset."""
    reach = range(-math.floor(radius), math.floor(radius) + 1)
    for difference in itertools.product(reach, repeat=grid.dim()):
        if difference > (0,) * grid.dim() and sum(d * d for d in difference) <= radius * radius:
            here, there = grid, grid
            for axis, d in enumerate(difference):
                side = grid.shape[axis] - abs(d)
                if side <= 0:
                    break
                here, there = here.narrow(axis, max(0, -d), side), there.narrow(axis, max(0, d), side)
            else:
                yield here, there


def permutation_times(
    grid: Sequence[int], heads: int, head_dim: int, segment: int, rounds: int, threads: int, *, keeps_memory: bool
) -> dict[str, Any]:
    """Run `measure` in a fresh process that keeps or returns freed memory: seconds of each round, by pass and call."""
    arguments = json.dumps(
        dict(grid=tuple(grid), heads=heads, head_dim=head_dim, segment=segment, rounds=rounds, threads=threads)
    )
    command = [sys.executable, "-m", "ringspan.tools.bench.hilbert", arguments]
    environment = os.environ | (KEEPS_MEMORY if keeps_memory else {})
    found = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    times: dict[str, Any] = json.loads(found.stdout)
    return times


def measure(grid: Sequence[int], heads: int, head_dim: int, segment: int, rounds: int, threads: int) -> dict[str, Any]:
    """Time attention over ordered rows, ordering one tensor and undoing it, and attention with ``order=``."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    clock, order = TurnTimer(), rs.Hilbert(tuple(grid))
    leaves = [torch.randn(1, order.period, heads, head_dim, requires_grad=True) for _ in range(3)]
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
    TurnTimer().in_turns(both, 1)  # allocates the memory that is kept
    passes = {name: clock.in_turns(calls, rounds) for name, calls in (("forward", forward), ("both", both))}
    return dict(seconds=passes, most_foreign_cores=clock.most_foreign_cores, disturbed=clock.disturbed)


@dataclass(frozen=True)
class StudyScale:
    """The sizes of the study."""

    grid: tuple[int, int] = (1024, 1024)
    radius: float = 8
    share: float = 0.80
    equal_segments: tuple[int, ...] = (256, 1024, 4096, 16384)
    grid_heads: int = 4
    grid_head_dim: int = 32
    ring_sizes: tuple[int, ...] = (4, 16, 64)
    lengths: tuple[int, ...] = (8192, 32768)
    pattern: rs.Dilated = field(default_factory=lambda: rs.Dilated((2048, 4096, 8192), (1, 2, 4)))
    fold: int = 2048
    heads: int = 8
    head_dim: int = 64
    rounds: int = 5
    grid_rounds: int = 3


QUICK = StudyScale(
    grid=(32, 32),
    radius=2,
    equal_segments=(16, 64),
    ring_sizes=(4,),
    lengths=(256,),
    pattern=rs.Dilated((64, 128), (1, 2)),
    fold=64,
    heads=2,
    head_dim=16,
    rounds=2,
    grid_rounds=2,
)


@dataclass(frozen=True)
class Findings:
    """The results of the study. Times are seconds of each round, by call."""

    scale: StudyScale
    folded: list[dict[str, Any]]
    shares: dict[str, dict[int, float]]
    shortest: dict[str, int]
    shortest_seconds: dict[str, list[float]]
    received: dict[str, dict[int, list[int]]]
    permutation: list[dict[str, Any]]
    curve_seconds: list[float]
    most_foreign_cores: float
    disturbed: int  # calls that other programs disturbed in spite of repeats

    def spread(self, numbers: Sequence[float]) -> Spread:
        """Times or ratios, marked if other programs disturbed a call of the study."""
        return spread(numbers, disturbed=self.disturbed > 0)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def findings_from_json(values: dict[str, Any]) -> Findings:
    """Inverse of `Findings.as_json` after a round trip through JSON, which turns integer keys into text."""

    def with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
        return {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}

    sizes = with_tuples(values["scale"])
    pattern = rs.Dilated(**with_tuples(sizes.pop("pattern")))
    nested = {
        name: {order: {int(key): x for key, x in row.items()} for order, row in values[name].items()}
        for name in ("shares", "received")
    }
    return Findings(**{**values, **nested, "scale": StudyScale(**sizes, pattern=pattern)})


def study(scale: StudyScale, announce: Announce) -> Findings:
    """Measure everything."""
    clock = TurnTimer()
    torch.manual_seed(0)
    orders = {name: order(scale.grid) for name, order in ORDERS.items()}
    announce("folded orders: with and without")
    folded = list(_folded(scale, clock))
    announce("share of neighbours that see each other")
    shares = {
        name: {w: share_of_neighbours_seen(order, w, scale.radius) for w in scale.equal_segments}
        for name, order in orders.items()
    }
    announce(f"shortest segment with a share of {scale.share}")
    shortest = {name: shortest_segment(order, scale.share, scale.radius) for name, order in orders.items()}
    announce("rows sent in a ring")
    received = {
        name: {k: rows_received(order, k, scale.radius) for k in scale.ring_sizes} for name, order in orders.items()
    }
    announce("time to compute a curve")
    curve = clock.in_turns({"curve": lambda: rs.Hilbert(scale.grid).visit()}, scale.rounds)["curve"]
    announce("time of attention at that share")
    tensors = _grid_tensors(scale)
    seconds = clock.in_turns(
        {name: _attend(tensors, shortest[name], orders[name]) for name in orders}, scale.grid_rounds, warm=False
    )
    announce("time of the permutation")
    del tensors
    permutation = list(_permutation(scale, shortest["Hilbert"], clock))
    load = (clock.most_foreign_cores, clock.disturbed)
    return Findings(scale, folded, shares, shortest, seconds, received, permutation, curve, *load)


def _folded(scale: StudyScale, clock: TurnTimer) -> Iterator[dict[str, Any]]:
    """The same pattern with and without a folded order, forward and backward."""
    for n in scale.lengths:
        for causal in (False, True):
            tensors = [torch.randn(1, n, scale.heads, scale.head_dim, requires_grad=True) for _ in range(3)]
            grad = torch.randn(1, n, scale.heads, scale.head_dim)
            calls: dict[str, Callable[[], object]] = {}
            for name, order in (("without", None), ("with", rs.Hilbert.folded(scale.fold))):
                options: dict[str, Any] = dict(pattern=scale.pattern, causal=causal, order=order)
                calls[f"forward {name}"] = without_gradients(tensors, options)
                calls[f"both {name}"] = with_gradients(tensors, grad, options)
            yield dict(n=n, causal=causal, seconds=clock.in_turns(calls, scale.rounds))


def _permutation(scale: StudyScale, segment: int, clock: TurnTimer) -> Iterator[dict[str, Any]]:
    """In a process that returns freed memory to the system, and in one that keeps it."""
    for keeps_memory in (False, True):
        found = permutation_times(
            scale.grid,
            scale.grid_heads,
            scale.grid_head_dim,
            segment,
            scale.grid_rounds,
            torch.get_num_threads(),
            keeps_memory=keeps_memory,
        )
        clock.most_foreign_cores = max(clock.most_foreign_cores, found["most_foreign_cores"])
        clock.disturbed += found["disturbed"]
        for mode, seconds in found["seconds"].items():
            yield dict(keeps_memory=keeps_memory, mode=mode, seconds=seconds)


def _grid_tensors(scale: StudyScale) -> list[Tensor]:
    rows = scale.grid[0] * scale.grid[1]
    return [torch.randn(1, rows, scale.grid_heads, scale.grid_head_dim) for _ in range(3)]


def _attend(tensors: list[Tensor], segment: int, order: GridOrder) -> Callable[[], object]:
    """Attention with one branch. Row-major order needs no permutation."""
    wanted = None if isinstance(order, rs.RowMajor) else order
    return without_gradients(tensors, dict(pattern=rs.Dilated((segment,), (1,)), order=wanted))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(**json.loads(sys.argv[1]))))
