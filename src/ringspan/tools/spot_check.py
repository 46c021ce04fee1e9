"""Spot check: sampled positions of a result, recomputed in fp64 from the definition and compared.

Recomputing takes from the pattern its branches and offsets, and shares no combs, tiles, shards or kernels with the
planner and the engine. The plan only decides where to look; the uniform sample of the whole sequence does not depend on
it. docs/streaming.md derives how large an error may be, and states what a sample can detect.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from ringspan.geometry import Comb, Documents, Pattern, keys_seen
from ringspan.kernels import accumulation_dtype
from ringspan.layout import Span
from ringspan.planning import RingPlan, Tile
from ringspan.streaming import QueryPosition, Source

MIN_SAMPLES = 30  # of each stratum, or its whole population
EVERYWHERE = "anywhere in the sequence"
_ROWS_AT_A_TIME = 2**16
# A sum of n rounded numbers is off by more than this many sqrt(n) roundings with a probability of 2n exp(-32), about
# 1e-11 for a thousand (Higham and Mary, 2019).
_DEVIATIONS = 8.0
_EXP_ULPS = 20.0  # the error bound of the exponential in torch's fused CPU kernel
_EXP_16_BIT = 2.0**-11  # for 16-bit inputs it uses a faster one, rounded to fp16 at best

Combs = list[tuple[int, Comb]]  # (rank, query rows of a tile)


class Results(Protocol):
    """Computed results that can be read one position at a time."""

    def read(self, name: str, rows: range, heads: range) -> Tensor:
        """``"out"`` or ``"lse"``, shaped as a source returns them."""


@dataclass(frozen=True, slots=True)
class Stratum:
    """Positions sampled from ``population`` positions of one kind."""

    name: str
    population: int
    positions: tuple[QueryPosition, ...]

    @property
    def is_covered(self) -> bool:
        return len(self.positions) >= min(MIN_SAMPLES, self.population)


@dataclass(frozen=True, slots=True)
class StratumResult:
    """How many positions of a stratum are wrong, the largest errors, and the largest error / allowed error."""

    name: str
    population: int
    samples: int
    covered: bool
    wrong: int
    worst_out: float
    worst_lse: float
    worst_ratio: float


@dataclass(frozen=True, slots=True)
class SpotCheck:
    """The outcome. ``samples`` and ``wrong`` count distinct positions; one may belong to several strata."""

    strata: tuple[StratumResult, ...]
    samples: int
    wrong: int
    most_keys: int

    @property
    def worst_out(self) -> float:
        return max(stratum.worst_out for stratum in self.strata)

    @property
    def worst_ratio(self) -> float:
        return max(stratum.worst_ratio for stratum in self.strata)

    @property
    def holds(self) -> bool:
        """No sampled position is wrong, and every stratum has enough samples."""
        return self.wrong == 0 and all(stratum.covered for stratum in self.strata)

    @property
    def wrong_share_bound(self) -> float:
        """With 95 % confidence, at most this share of all positions is wrong: 3/m for m uniform samples, all right.

        If a share f of all positions were wrong, m samples would all be right with a probability of (1 - f) ** m, which
        is below 5 % for f >= 3/m ("rule of three"). If a sample is wrong, nothing is claimed: 1.
        """
        (uniform,) = (stratum for stratum in self.strata if stratum.name == EVERYWHERE)
        return 1.0 if self.wrong else min(1.0, 3 / uniform.samples)

    def as_json(self) -> dict[str, Any]:
        return {
            "holds": self.holds,
            "samples": self.samples,
            "wrong": self.wrong,
            "worst_out": self.worst_out,
            "worst_ratio": self.worst_ratio,
            "wrong_share_bound": self.wrong_share_bound,
            "most_keys": self.most_keys,
            "strata": [asdict(stratum) for stratum in self.strata],
        }


def spot_check(
    source: Source,
    results: Results,
    plan: RingPlan,
    strata: Sequence[Stratum],
    *,
    scale: float,
    on_position: Callable[[], None] | None = None,
) -> SpotCheck:
    """Recompute every position of every stratum in fp64, and compare. ``on_position`` is called after each."""
    found: dict[QueryPosition, tuple[float, float, float]] = {}
    most_keys = 0
    for position in sorted({position for stratum in strata for position in stratum.positions}):
        exact = recompute(source, position, plan.pattern, plan.documents, causal=plan.causal, scale=scale)
        found[position] = _errors(results, position, exact)
        most_keys = max(most_keys, exact.keys)
        if on_position is not None:
            on_position()
    outcomes = []
    for stratum in strata:
        errors = [found[position] for position in stratum.positions]
        outcomes.append(
            StratumResult(
                stratum.name,
                stratum.population,
                len(errors),
                stratum.is_covered,
                sum(ratio > 1 for _, _, ratio in errors),
                *(max((error[i] for error in errors), default=0.0) for i in range(3)),
            )
        )
    wrong = sum(ratio > 1 for _, _, ratio in found.values())
    return SpotCheck(tuple(outcomes), len(found), wrong, most_keys)


def draw_strata(plan: RingPlan, *, anywhere: int = 1000, each: int = MIN_SAMPLES, seed: int = 0) -> list[Stratum]:
    """Sample positions from the whole sequence, each kind of tile, each hop, and the boundaries of shards.

    >>> from ringspan.geometry import Dilated, Documents
    >>> from ringspan.layout import Layout
    >>> from ringspan.planning import TensorSizes
    >>> shape, pattern = TensorSizes(heads=2, kv_heads=2), Dilated((8, 64), (1, 4))
    >>> plan = RingPlan(pattern, Documents((64,)), Layout("contiguous", 64, 4), True, "direct", shape)
    >>> for stratum in draw_strata(plan, anywhere=5)[:4]: print(stratum.name, len(stratum.positions))
    anywhere in the sequence 5
    tiles of own rows, rate 1, causal 30
    tiles of own rows, rate 4, causal 30
    tiles of parcels, rate 4, full 24
    """
    chance = random.Random(seed)
    heads, rows = plan.sizes.heads, plan.layout.rows
    whole = chance.sample(range(rows * heads), min(anywhere, rows * heads))
    strata = [Stratum(EVERYWHERE, rows * heads, tuple(QueryPosition(*divmod(i, heads)) for i in whole))]
    by_tile, by_hop, boundaries = _candidates(plan)
    for name, combs in [*sorted(by_tile.items()), *((f"hop {hop}", found) for hop, found in sorted(by_hop.items()))]:
        strata.append(_draw(name, plan, combs, each, chance))
    for name, boundary_rows in boundaries.items():
        population = len(boundary_rows) * heads
        drawn = chance.sample(range(population), min(each, population))
        positions = tuple(QueryPosition(boundary_rows[i // heads], i % heads) for i in drawn)
        strata.append(Stratum(name, population, positions))
    return strata


def _candidates(plan: RingPlan) -> tuple[dict[str, Combs], dict[int, Combs], dict[str, list[int]]]:
    by_tile: defaultdict[str, dict[tuple[int, Comb], None]] = defaultdict(dict)
    by_hop: defaultdict[int, dict[tuple[int, Comb], None]] = defaultdict(dict)
    spans: list[Span] = []
    for rank in range(plan.layout.ring_size):
        for number, hop in enumerate(plan.rank(rank).hops):
            for tile in hop.tiles:
                # A query comb meets many parcels, but its positions count once.
                by_tile[_tile_kind(tile)][rank, tile.queries] = None
                by_hop[number][rank, tile.queries] = None
        spans += plan.layout.spans(rank)
    boundaries = {
        "the first row of a shard": [span.start for span in spans],
        "the last row of a shard": [span.stop - 1 for span in spans],
    }
    return {kind: list(combs) for kind, combs in by_tile.items()}, {i: list(x) for i, x in by_hop.items()}, boundaries


def _tile_kind(tile: Tile) -> str:
    keys = "own rows" if tile.parcel is None else "parcels"
    return f"tiles of {keys}, rate {tile.queries.step}, {tile.mask}"


def _draw(name: str, plan: RingPlan, combs: Combs, each: int, chance: random.Random) -> Stratum:
    group = plan.sizes.heads // plan.sizes.kv_heads
    ends = list(accumulate(comb.size * group for _, comb in combs))
    positions: dict[QueryPosition, None] = {}  # combs of one rank may overlap, but a position counts once
    drawn = chance.sample(range(ends[-1]), min(4 * each, ends[-1]))
    for number in drawn:
        which = bisect_right(ends, number)
        rank, comb = combs[which]
        positions[_position(plan, rank, comb, number - (ends[which] - comb.size * group), group)] = None
    population = len(positions) if len(drawn) == ends[-1] else ends[-1]
    return Stratum(name, population, tuple(positions)[:each])


def _position(plan: RingPlan, rank: int, comb: Comb, number: int, group: int) -> QueryPosition:
    """The position with this number in a comb, counting heads of a group first, then rows, segments and KV heads."""
    number, in_group = divmod(number, group)
    number, row = divmod(number, comb.rows)
    head, segment = divmod(number, comb.segments)
    local = comb.start + head * comb.head_step + segment * comb.stride + row * comb.step
    (span,) = (s for s in plan.layout.spans(rank) if s.local <= local < s.local + s.stop - s.start)
    return QueryPosition(local - span.local + span.start, comb.head_range[head] * group + in_group)


@dataclass(frozen=True)
class Exact:
    """Output (batch, head_dim) and lse (batch,) in fp64, the number of keys, and the allowed error of each."""

    out: Tensor
    lse: Tensor
    keys: int
    allowed_out: Tensor
    allowed_lse: float


def recompute(
    source: Source, position: QueryPosition, pattern: Pattern, documents: Documents, *, causal: bool, scale: float
) -> Exact:
    """Attention at one position, from the definition."""
    shape = source.shape
    kv_head = position.head // (shape.heads // shape.kv_heads)
    row, head = range(position.row, position.row + 1), range(position.head, position.head + 1)
    q = source.read("q", row, head)[:, 0, 0].double()
    out = torch.zeros(shape.batch, shape.head_dim, dtype=torch.float64)
    lse = torch.full((shape.batch,), -torch.inf, dtype=torch.float64)
    spread = torch.zeros_like(out)  # the sum of (weight x value) ** 2
    keys, largest_score = 0, 0.0
    seen = keys_seen(pattern, documents, position.row, kv_head=kv_head, kv_heads=shape.kv_heads, causal=causal)
    for rows in (some for branch in seen for some in _cut(branch)):
        k, v = (source.read(name, rows, range(kv_head, kv_head + 1))[:, :, 0].double() for name in ("k", "v"))
        scores = scale * torch.einsum("bd,bkd->bk", q, k)
        total = torch.logaddexp(lse, scores.logsumexp(-1))
        weights = (scores - total[:, None]).exp()
        before = (lse - total).exp()[:, None]
        out = out * before + torch.einsum("bk,bkd->bd", weights, v)
        spread = spread * before**2 + torch.einsum("bk,bkd->bd", weights**2, v**2)
        lse, keys = total, keys + len(rows)
        magnitudes = abs(scale) * torch.einsum("bd,bkd->bk", q.abs(), k.abs())
        largest_score = max(largest_score, float(magnitudes.max()))
    allowed_out, allowed_lse = _allowed(shape.dtype, shape.head_dim, keys, largest_score, out.abs(), spread.sqrt())
    return Exact(out, lse, keys, allowed_out, allowed_lse)


def _allowed(
    dtype: torch.dtype, head_dim: int, keys: int, largest_score: float, size: Tensor, spread: Tensor
) -> tuple[Tensor, float]:
    """The largest error of an output and an lse that the roundings of the engine explain."""
    wide = torch.finfo(accumulation_dtype(dtype)).eps / 2
    narrow = torch.finfo(dtype).eps / 2  # weights, the results of tiles and outputs are rounded to the input dtype
    score = (_DEVIATIONS * math.sqrt(head_dim) + 4) * wide * largest_score
    weight = score + (_EXP_ULPS * wide if narrow == wide else _EXP_16_BIT)
    summing = _DEVIATIONS * math.sqrt(max(keys, 1)) * wide
    of_each_key = _DEVIATIONS * (weight + 2 * narrow + 2 * summing)
    allowed_lse = weight + summing + 4 * wide * (largest_score + math.log(max(keys, 1)))
    return of_each_key * spread + (weight + summing + narrow) * size, allowed_lse


def _cut(rows: range) -> list[range]:
    return [rows[i : i + _ROWS_AT_A_TIME] for i in range(0, len(rows), _ROWS_AT_A_TIME)]


def _errors(results: Results, position: QueryPosition, exact: Exact) -> tuple[float, float, float]:
    """The errors of output and lse, and the larger ratio of error to allowed error; NaN counts as infinite."""
    rows, heads = range(position.row, position.row + 1), range(position.head, position.head + 1)
    out = _error(results.read("out", rows, heads)[:, 0, 0].double(), exact.out)
    lse = _error(results.read("lse", rows, heads)[:, 0, 0].double(), exact.lse)
    # A row without keys has output 0 and lse -inf, exactly.
    allowed_lse = torch.full_like(lse, exact.allowed_lse if exact.keys else 0.0)
    ratio = max(_largest_ratio(out, exact.allowed_out), _largest_ratio(lse, allowed_lse))
    return float(out.max()), float(lse.max()), ratio


def _error(found: Tensor, exact: Tensor) -> Tensor:
    difference = torch.where(found == exact, 0.0, (found - exact).abs())  # -inf equals -inf
    return difference.nan_to_num(nan=math.inf, posinf=math.inf)


def _largest_ratio(error: Tensor, allowed: Tensor) -> float:
    """The largest error / allowed; 0 where there is no error, infinite where nothing is allowed or either is NaN."""
    return float(torch.where(error == 0, 0.0, (error / allowed).nan_to_num(nan=math.inf, posinf=math.inf)).max())
