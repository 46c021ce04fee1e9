"""Fit the price model of tiles, `TileCosts`, to a machine: time tiles of several shapes, then fit by least squares.

Tiles run through the engine, forward and backward, so their times include views, kernel calls and merging.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ringspan.engine import run_backward, run_forward
from ringspan.geometry import Comb, Mask
from ringspan.kernels import Kernel, ScoreOptions, choose
from ringspan.planning import CPU_COSTS, Hop, RankPlan, Tile, TileCosts, costs_for
from ringspan.ring.simulated import SimulatedTransport
from ringspan.ring.transport import Counters
from ringspan.runtime.device import Device, local_device

_PAIRS_PER_RUN = 2**23  # small tiles are repeated up to this many pairs, so that a run takes some milliseconds
_MOST_REPEATS = 64


@dataclass(frozen=True, slots=True)
class TileShape:
    """Query rows and key rows of a tile, ``step`` rows apart, in so many segments."""

    queries: int
    keys: int
    mask: Mask = "full"
    step: int = 1
    segments: int = 1


@dataclass(frozen=True, slots=True)
class TileTime:
    """Seconds of a forward and a backward pass of one tile."""

    shape: TileShape
    heads: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CostFit:
    """Costs, the seconds of one pair with them, and the median relative error of the times that they predict."""

    costs: TileCosts
    seconds_per_pair: float
    error: float


def fit_tile_costs(*, heads: int = 8, head_dim: int = 64, dtype: torch.dtype = torch.float32) -> TileCosts:
    """The costs of tiles on this process's device, for ``optimize=`` of `rs.attention` and `rs.plan`.

    Takes about a minute. All ranks of a ring must use the same costs: fit them once, and store ``costs.text``.
    """
    base = costs_for("auto", local_device().device.type) or CPU_COSTS
    return fit_costs(measure_tiles(tile_shapes(), heads=heads, head_dim=head_dim, dtype=dtype), base).costs


def tile_shapes(longest: int = 2048) -> list[TileShape]:
    """Square tiles, full and causal, of 64 to ``longest`` rows with steps 1 and 2, alone and many at once; oblong ones.

    >>> len(tile_shapes(64)), tile_shapes(128)[-1]
    (8, TileShape(queries=128, keys=64, mask='full', step=1, segments=1))
    """
    sides = [64 * 2**i for i in range(16) if 64 * 2**i <= longest]
    masks: tuple[Mask, ...] = ("full", "causal")
    square = [
        TileShape(rows, rows, mask, step, segments)
        for rows in sides
        for mask in masks
        for step in (1, 2)
        for segments in ((1, max(2, longest // rows)) if rows < longest or longest == 64 else (1,))
    ]
    oblong = [
        TileShape(queries, keys) for short in sides[:-1] for queries, keys in ((short, longest), (longest, short))
    ]
    return square + oblong


def measure_tiles(
    shapes: Sequence[TileShape],
    *,
    heads: int = 8,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    rounds: int = 3,
) -> list[TileTime]:
    """The time of each shape on this process's device: the fastest of ``rounds``."""
    device = local_device()
    times = []
    for shape in shapes:
        seconds = _tile_seconds(shape, heads, head_dim, dtype, rounds, device)
        times.append(TileTime(shape, heads, seconds))
    return times


def _tile_seconds(
    shape: TileShape, heads: int, head_dim: int, dtype: torch.dtype, rounds: int, device: Device
) -> float:
    rows = max(shape.queries, shape.keys) * shape.step * shape.segments
    generator = torch.Generator(device.device).manual_seed(0)
    options = dict(generator=generator, dtype=dtype, device=device.device)
    q, k, v, grad = (torch.randn(1, rows, heads, head_dim, **options) for _ in range(4))  # type: ignore[call-overload]
    stride = rows // shape.segments if shape.segments > 1 else 0
    queries, keys = (
        Comb(0, heads, 0, 0, shape.segments, stride, length, shape.step) for length in (shape.queries, shape.keys)
    )
    tile = Tile(queries, keys, shape.mask)
    repeats = max(1, min(_MOST_REPEATS, _PAIRS_PER_RUN // tile.pairs))
    kernel = choose(device.device, dtype).kernel
    # A run without tiles takes the time of allocating and filling the results, which is no tile's.
    with_tiles, without = (
        _pass_seconds(RankPlan(0, rows, heads, (Hop(tiles=tiles),), ()), (q, k, v, grad), kernel, rounds, device)
        for tiles in ((tile,) * repeats, ())
    )
    return (with_tiles - without) / repeats


def _pass_seconds(
    plan: RankPlan, tensors: tuple[torch.Tensor, ...], kernel: Kernel, rounds: int, device: Device
) -> float:
    *qkv, grad = tensors
    scores = ScoreOptions(grad.shape[-1] ** -0.5)
    transport = SimulatedTransport(0, Counters(), defaultdict(deque))

    def call() -> None:
        out, lse = run_forward(plan, transport, *qkv, scores=scores, kernel=kernel)
        needs = (True, True, True)
        run_backward(
            plan, transport, grad, None, *qkv, out.to(grad.dtype), lse, scores=scores, kernel=kernel, needs=needs
        )

    call()
    return min(device.seconds(call) for _ in range(rounds))  # what disturbs a call only adds to its time


def fit_costs(times: Sequence[TileTime], base: TileCosts = CPU_COSTS) -> CostFit:
    """The row, call and narrow costs with the least squares of relative errors; the others are those of ``base``.

    >>> true = TileCosts(row=50, call=20_000, narrow=1.5)
    >>> times = [TileTime(s, 8, 1e-9 * _price(true, s, 8)) for s in tile_shapes()]
    >>> {name: round(getattr(fit_costs(times).costs, name), 3) for name in ("row", "call", "narrow")}
    {'row': 50.0, 'call': 20000.0, 'narrow': 1.5}
    """
    if too_short := [time.shape for time in times if time.seconds <= 0]:
        raise ValueError(f"{too_short[0]} took no time: the times are too noisy; repeat them on an idle machine")
    only_pairs = replace(base, row=0.0, call=0.0, narrow=1.0)
    rows = []
    for time in times:
        shape, copies = time.shape, time.heads * time.shape.segments
        pairs = only_pairs.price(shape.queries, shape.keys, shape.mask, copies)
        narrow = shape.queries < base.narrow_rows
        known = [pairs * (not narrow), pairs * narrow, float(copies * (shape.queries + shape.keys)), 1.0]
        rows.append([value / time.seconds for value in known])
    for column, name in enumerate(("at least", "fewer than")):
        if not any(row[column] for row in rows):
            raise ValueError(f"no tile with {name} {base.narrow_rows} query rows: time some, or change narrow_rows")
    wanted = torch.ones(len(rows), 1, dtype=torch.float64)
    wide, narrow_pairs, row, call = (
        torch.linalg.lstsq(torch.tensor(rows, dtype=torch.float64), wanted).solution[:, 0].tolist()
    )
    if wide <= 0:
        raise ValueError(f"{wide:.3g} seconds per pair: the times are too noisy; repeat them on an idle machine")
    costs = replace(base, row=max(0.0, row / wide), call=max(0.0, call / wide), narrow=max(0.0, narrow_pairs / wide))
    return CostFit(costs, wide, model_error(times, costs, wide))


def model_error(times: Sequence[TileTime], costs: TileCosts, seconds_per_pair: float) -> float:
    """The median relative error of the times that the costs predict."""
    predicted = (seconds_per_pair * _price(costs, time.shape, time.heads) for time in times)
    return statistics.median(abs(p / time.seconds - 1) for p, time in zip(predicted, times, strict=True))


def judge_costs(times: Sequence[TileTime], costs: TileCosts) -> CostFit:
    """How well given costs describe the times, with the seconds per pair that suit them best."""
    prices = [_price(costs, time.shape, time.heads) / time.seconds for time in times]
    seconds_per_pair = sum(prices) / sum(price**2 for price in prices)  # least squares of relative errors
    return CostFit(costs, seconds_per_pair, model_error(times, costs, seconds_per_pair))


def _price(costs: TileCosts, shape: TileShape, heads: int) -> float:
    return costs.price(shape.queries, shape.keys, shape.mask, heads * shape.segments)
