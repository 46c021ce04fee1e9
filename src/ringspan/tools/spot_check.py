"""Which keys a query sees, as progressions, straight from the definition (docs/semantics.md). Pure integers.

Shares no code with the planner: no combs, no tiles, no shards. Costs no more than there are branches, at any length.
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

from ringspan.geometry import Comb, Documents, Pattern
from ringspan.kernels import accumulation_dtype
from ringspan.layout import Span
from ringspan.planning import RingPlan, Tile
from ringspan.streaming import QueryPosition, Source


def keys_seen(
    pattern: Pattern, documents: Documents, row: int, *, kv_head: int, kv_heads: int, causal: bool
) -> list[range]:
    """The keys that a row sees in each branch that selects it, as rows of the sequence; one seen twice is listed twice.

    >>> from ringspan.geometry import Dilated
    >>> keys_seen(Dilated((4, 8), (1, 2)), Documents((16,)), 5, kv_head=1, kv_heads=2, causal=True)
    [range(4, 6), range(1, 6, 2)]
    """
    start, stop = next((a, b) for a, b in documents.spans() if a <= row < b)
    found = []
    for branch in pattern.branches(stop - start):
        w, r, shift = branch.segment_length, branch.rate, branch.shift
        offset = pattern.offsets(r, kv_heads)[kv_head]
        x = row - start + shift
        if x % w % r != offset:
            continue
        first = x - x % w + offset
        if first < shift:  # the document begins in the middle of the segment
            first += -(-(shift - first) // r) * r
        last = min(x - x % w + w, stop - start + shift, x + 1 if causal else stop - start + shift)
        found.append(range(start + first - shift, start + last - shift, r))
    return found


FEWEST = 30  # of each stratum, or all that there are
EVERYWHERE = "anywhere in the sequence"


@dataclass(frozen=True, slots=True)
class Stratum:
    """Places that were drawn from ``population`` places of one kind."""

    name: str
    population: int
    places: tuple[QueryPosition, ...]

    @property
    def is_covered(self) -> bool:
        return len(self.places) >= min(FEWEST, self.population)


def draw_strata(plan: RingPlan, *, anywhere: int = 1000, each: int = FEWEST, seed: int = 0) -> list[Stratum]:
    """Draw places from the whole sequence, from each kind of tile, each hop, and the borders of the shards.

    >>> from ringspan.geometry import Dilated, Documents
    >>> from ringspan.layout import Layout
    >>> from ringspan.planning import TensorSizes
    >>> shape, pattern = TensorSizes(heads=2, kv_heads=2), Dilated((8, 64), (1, 4))
    >>> plan = RingPlan(pattern, Documents((64,)), Layout("contiguous", 64, 4), True, "direct", shape)
    >>> for stratum in draw_strata(plan, anywhere=5)[:4]: print(stratum.name, len(stratum.places))
    anywhere in the sequence 5
    tiles of own rows, rate 1, causal 30
    tiles of own rows, rate 4, causal 30
    tiles of parcels, rate 4, full 24
    """
    chance = random.Random(seed)
    heads, rows = plan.sizes.heads, plan.layout.rows
    whole = chance.sample(range(rows * heads), min(anywhere, rows * heads))
    strata = [Stratum(EVERYWHERE, rows * heads, tuple(QueryPosition(*divmod(i, heads)) for i in whole))]
    by_tile, by_hop, borders = _candidates(plan)
    for name, combs in [*sorted(by_tile.items()), *((f"hop {hop}", found) for hop, found in sorted(by_hop.items()))]:
        strata.append(_draw(name, plan, combs, each, chance))
    for name, border_rows in borders.items():
        population = len(border_rows) * heads
        drawn = chance.sample(range(population), min(each, population))
        places = tuple(QueryPosition(border_rows[i // heads], i % heads) for i in drawn)
        strata.append(Stratum(name, population, places))
    return strata


Combs = list[tuple[int, Comb]]  # (rank, query rows of a tile)


def _candidates(plan: RingPlan) -> tuple[dict[str, Combs], dict[int, Combs], dict[str, list[int]]]:
    by_tile: defaultdict[str, dict[tuple[int, Comb], None]] = defaultdict(dict)
    by_hop: defaultdict[int, dict[tuple[int, Comb], None]] = defaultdict(dict)
    spans: list[Span] = []
    for rank in range(plan.layout.ring_size):
        for number, hop in enumerate(plan.rank(rank).hops):
            for tile in hop.tiles:
                # A query comb meets many parcels: its places count once.
                by_tile[_kind(tile)][rank, tile.queries] = None
                by_hop[number][rank, tile.queries] = None
        spans += plan.layout.spans(rank)
    borders = {
        "the first row of a shard": [span.start for span in spans],
        "the last row of a shard": [span.stop - 1 for span in spans],
    }
    return {kind: list(combs) for kind, combs in by_tile.items()}, {i: list(x) for i, x in by_hop.items()}, borders


def _kind(tile: Tile) -> str:
    keys = "own rows" if tile.parcel is None else "parcels"
    return f"tiles of {keys}, rate {tile.queries.step}, {'causal' if tile.causal else 'full'}"


def _draw(name: str, plan: RingPlan, combs: Combs, each: int, chance: random.Random) -> Stratum:
    group = plan.sizes.heads // plan.sizes.kv_heads
    ends = list(accumulate(comb.size * group for _, comb in combs))
    places: dict[QueryPosition, None] = {}  # combs of one rank may overlap: a place counts once
    drawn = chance.sample(range(ends[-1]), min(4 * each, ends[-1]))
    for number in drawn:
        which = bisect_right(ends, number)
        rank, comb = combs[which]
        places[_place(plan, rank, comb, number - (ends[which] - comb.size * group), group)] = None
    population = len(places) if len(drawn) == ends[-1] else ends[-1]
    return Stratum(name, population, tuple(places)[:each])


def _place(plan: RingPlan, rank: int, comb: Comb, number: int, group: int) -> QueryPosition:
    """One place of a comb of a rank's rows, by its number: heads of a group, then rows, segments and KV heads."""
    number, in_group = divmod(number, group)
    number, row = divmod(number, comb.rows)
    head, segment = divmod(number, comb.segments)
    local = comb.start + head * comb.head_step + segment * comb.stride + row * comb.step
    (span,) = (s for s in plan.layout.spans(rank) if s.local <= local < s.local + s.stop - s.start)
    return QueryPosition(local - span.local + span.start, (comb.head + head) * group + in_group)


_ROWS_AT_A_TIME = 2**16
# A sum of n rounded numbers is off by more than this many sqrt(n) roundings with a probability of 2n exp(-32), about
# 1e-11 for a thousand (Higham and Mary, 2019).
_DEVIATIONS = 8.0
_EXP_ULPS = 20.0  # what torch's fused CPU kernel promises of its exponential
_EXP_16_BIT = 2.0**-11  # for 16-bit inputs it takes a faster one, whose results are rounded to fp16 at best


class Results(Protocol):
    """What was computed, where it can be asked for one place at a time."""

    def read(self, name: str, rows: range, heads: range) -> Tensor:
        """``"out"`` or ``"lse"``, as a source gives them."""


@dataclass(frozen=True)
class Exact:
    """The right output (batch, dim) and lse (batch,) in fp64, over how many keys, and how far off each may be."""

    out: Tensor
    lse: Tensor
    keys: int
    allowed_out: Tensor
    allowed_lse: float


def recompute(
    source: Source, place: QueryPosition, pattern: Pattern, documents: Documents, *, causal: bool, scale: float
) -> Exact:
    """Attention at one place, from the definition."""
    shape = source.shape
    kv_head = place.head // (shape.heads // shape.kv_heads)
    q = source.read("q", range(place.row, place.row + 1), range(place.head, place.head + 1))[:, 0, 0].double()
    out = torch.zeros(shape.batch, shape.head_dim, dtype=torch.float64)
    lse = torch.full((shape.batch,), -torch.inf, dtype=torch.float64)
    spread = torch.zeros_like(out)  # the sum of (weight x value) ** 2
    keys, largest_score = 0, 0.0
    seen = keys_seen(pattern, documents, place.row, kv_head=kv_head, kv_heads=shape.kv_heads, causal=causal)
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
    dtype: torch.dtype, dim: int, keys: int, largest_score: float, size: Tensor, spread: Tensor
) -> tuple[Tensor, float]:
    """How far off an output and an lse may be that were rounded as often as the engine rounds."""
    wide = torch.finfo(accumulation_dtype(dtype)).eps / 2
    narrow = torch.finfo(dtype).eps / 2  # weights, the results of tiles and outputs are rounded to the input dtype
    score = (_DEVIATIONS * math.sqrt(dim) + 4) * wide * largest_score
    weight = score + (_EXP_ULPS * wide if narrow == wide else _EXP_16_BIT)
    summing = _DEVIATIONS * math.sqrt(max(keys, 1)) * wide
    of_each_key = _DEVIATIONS * (weight + 2 * narrow + 2 * summing)
    allowed_lse = weight + summing + 4 * wide * (largest_score + math.log(max(keys, 1)))
    return of_each_key * spread + (weight + summing + narrow) * size, allowed_lse


def _cut(rows: range) -> list[range]:
    return [rows[i : i + _ROWS_AT_A_TIME] for i in range(0, len(rows), _ROWS_AT_A_TIME)]


@dataclass(frozen=True, slots=True)
class StratumResult:
    """One stratum: how many places, how many of them wrong, and the largest errors, also over what is allowed."""

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
    """What the samples showed. ``samples`` and ``wrong`` count different places; one may belong to several strata."""

    findings: tuple[StratumResult, ...]
    samples: int
    wrong: int
    most_keys: int

    @property
    def worst_out(self) -> float:
        return max(finding.worst_out for finding in self.findings)

    @property
    def worst_ratio(self) -> float:
        return max(finding.worst_ratio for finding in self.findings)

    @property
    def holds(self) -> bool:
        """Nothing is wrong, and every stratum has its samples."""
        return self.wrong == 0 and all(finding.covered for finding in self.findings)

    @property
    def wrong_share_bound(self) -> float:
        """With 95 % confidence, at most this share of all places is wrong: 3/m for m uniform samples without a fault.

        If a share f of all places were wrong, m samples would all be right with a probability of (1 - f) ** m, which is
        below 5 % from f = 3/m on ("rule of three"). With a fault among them nothing is promised: 1.
        """
        (uniform,) = (finding for finding in self.findings if finding.name == EVERYWHERE)
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
            "strata": [asdict(finding) for finding in self.findings],
        }


def spot_check(
    source: Source,
    results: Results,
    plan: RingPlan,
    strata: Sequence[Stratum],
    *,
    scale: float,
    on_place: Callable[[], None] | None = None,
) -> SpotCheck:
    """Compare what was computed with fp64, at every place of every stratum."""
    found: dict[QueryPosition, tuple[float, float, float]] = {}
    most_keys = 0
    for place in sorted({place for stratum in strata for place in stratum.places}):
        exact = recompute(source, place, plan.pattern, plan.documents, causal=plan.causal, scale=scale)
        found[place] = _errors(results, place, exact)
        most_keys = max(most_keys, exact.keys)
        if on_place is not None:
            on_place()
    findings = []
    for stratum in strata:
        errors = [found[place] for place in stratum.places]
        findings.append(
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
    return SpotCheck(tuple(findings), len(found), wrong, most_keys)


def _errors(results: Results, place: QueryPosition, exact: Exact) -> tuple[float, float, float]:
    """Errors of output and lse, and the larger one over what is allowed; a NaN is as wrong as can be."""
    rows, heads = range(place.row, place.row + 1), range(place.head, place.head + 1)
    out = _off_by(results.read("out", rows, heads)[:, 0, 0].double(), exact.out)
    lse = _off_by(results.read("lse", rows, heads)[:, 0, 0].double(), exact.lse)
    # A row that sees nothing is 0, and its lse -inf: exactly.
    allowed_lse = torch.full_like(lse, exact.allowed_lse if exact.keys else 0.0)
    ratio = max(_largest_ratio(out, exact.allowed_out), _largest_ratio(lse, allowed_lse))
    return float(out.max()), float(lse.max()), ratio


def _off_by(found: Tensor, right: Tensor) -> Tensor:
    difference = torch.where(found == right, 0.0, (found - right).abs())  # -inf equals -inf
    return difference.nan_to_num(nan=math.inf, posinf=math.inf)


def _largest_ratio(error: Tensor, allowed: Tensor) -> float:
    """Where nothing is off, nothing need be allowed; where nothing is allowed, or no number, anything is too much."""
    return float(torch.where(error == 0, 0.0, (error / allowed).nan_to_num(nan=math.inf, posinf=math.inf)).max())
