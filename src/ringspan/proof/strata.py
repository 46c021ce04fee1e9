"""What is sampled: places drawn so that every kind of tile, every hop and every kind of border is among them.

A stratum is a set of (row, head) places that have something in common, found from the plan. From each, some are drawn
with equal chances; from a small one, all. One stratum is the whole sequence: its sample bounds the share of wrong rows.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate

from ringspan.geometry import Comb
from ringspan.layout import Span
from ringspan.planning import RingPlan, Tile
from ringspan.streaming import Place

FEWEST = 30  # of each stratum, or all that there are
EVERYWHERE = "anywhere in the sequence"


@dataclass(frozen=True, slots=True)
class Stratum:
    """Places that were drawn from ``population`` places of one kind."""

    name: str
    population: int
    places: tuple[Place, ...]

    @property
    def is_covered(self) -> bool:
        return len(self.places) >= min(FEWEST, self.population)


def draw_strata(plan: RingPlan, *, anywhere: int = 1000, each: int = FEWEST, seed: int = 0) -> list[Stratum]:
    """Draw places from the whole sequence, from each kind of tile, each hop, and the borders of the shards.

    >>> from ringspan.geometry import Dilated, Documents
    >>> from ringspan.layout import Layout
    >>> from ringspan.planning import Sizes
    >>> shape, pattern = Sizes(heads=2, kv_heads=2), Dilated((8, 64), (1, 4))
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
    strata = [Stratum(EVERYWHERE, rows * heads, tuple(Place(*divmod(i, heads)) for i in whole))]
    by_tile, by_hop, borders = _candidates(plan)
    for name, combs in [*sorted(by_tile.items()), *((f"hop {hop}", found) for hop, found in sorted(by_hop.items()))]:
        strata.append(_draw(name, plan, combs, each, chance))
    for name, border_rows in borders.items():
        population = len(border_rows) * heads
        drawn = chance.sample(range(population), min(each, population))
        places = tuple(Place(border_rows[i // heads], i % heads) for i in drawn)
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
    places: dict[Place, None] = {}  # combs of one rank may overlap: a place counts once
    drawn = chance.sample(range(ends[-1]), min(4 * each, ends[-1]))
    for number in drawn:
        which = bisect_right(ends, number)
        rank, comb = combs[which]
        places[_place(plan, rank, comb, number - (ends[which] - comb.size * group), group)] = None
    population = len(places) if len(drawn) == ends[-1] else ends[-1]
    return Stratum(name, population, tuple(places)[:each])


def _place(plan: RingPlan, rank: int, comb: Comb, number: int, group: int) -> Place:
    """One place of a comb of a rank's rows, by its number: heads of a group, then rows, segments and KV heads."""
    number, in_group = divmod(number, group)
    number, row = divmod(number, comb.rows)
    head, segment = divmod(number, comb.segments)
    local = comb.start + head * comb.head_step + segment * comb.stride + row * comb.step
    (span,) = (s for s in plan.layout.spans(rank) if s.local <= local < s.local + s.stop - s.start)
    return Place(local - span.local + span.start, (comb.head + head) * group + in_group)
