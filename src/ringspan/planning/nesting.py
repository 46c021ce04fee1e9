"""Which branches of a pattern nest, and which of the pairs that they share are worth computing only once.

Splitting nested branches into disjoint tiles computes fewer pairs, but in more and smaller tiles. `TileCosts` prices
both, and `find_chains` takes the cheaper plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cache, lru_cache
from typing import Literal

from ringspan.geometry import Branch, Mask, Pattern, SegmentBranch, WindowBranch
from ringspan.planning.chain import Chain, Region, Sharing, triangle

# A branch whose segments are far longer than those of another shares few of its pairs with it.
_LARGEST_RATIO = 16
# The tiles of two levels grow with the square of the ratio of their rates, and each has fewer rows.
_LARGEST_RATE_RATIO = 3


@dataclass(frozen=True, slots=True)
class TileCosts:
    """What a tile costs besides its pairs, in pairs: the price model that decides which tiles a plan has.

    Args:
        row: for each query row and each key row of a tile: reading it, and merging its result.
        call: for each tile: launching its kernels.
        diagonal: kernels compute triangles in blocks of this many keys, so those on the diagonal are computed whole.
        narrow, narrow_rows: the factor on pairs of tiles with fewer query rows than this, for which kernels use smaller
            blocks.

    The default was fitted on CPUs by ``python -m benchmarks tiles``.

    >>> parse_costs(TileCosts(row=100).text)
    TileCosts(row=100.0, call=40000.0, diagonal=256, narrow=1.12, narrow_rows=768)
    """

    row: float = 24.0
    call: float = 40_000.0
    diagonal: int = 256
    narrow: float = 1.12
    narrow_rows: int = 768

    def __post_init__(self) -> None:
        for name in ("row", "call", "diagonal", "narrow", "narrow_rows"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 0 and finite")

    @property
    def text(self) -> str:
        """The costs on one line, as `parse_costs` reads them."""
        return " ".join(str(value) for value in astuple(self))

    def price(self, query_rows: int, key_rows: int, mask: Mask, copies: float) -> float:
        """The cost of one tile with so many independent copies: segments, heads and batch."""
        pairs = float(query_rows * key_rows)
        if mask != "full":
            pairs = query_rows * (query_rows + 1 + min(query_rows, self.diagonal)) / 2
        if query_rows < self.narrow_rows:
            pairs *= self.narrow
        return copies * (pairs + self.row * (query_rows + key_rows)) + self.call


CPU_COSTS = TileCosts()
# From data sheets, not measured: merging a row takes the time of its bytes in memory, and a tile launches four kernels.
GPU_COSTS = TileCosts(row=450.0, call=2e7, diagonal=128, narrow=1.0)
Optimize = Literal["auto", "none"] | TileCosts
Group = Chain | tuple[int, WindowBranch]  # branches that are planned together


def costs_for(optimize: object, device_type: str) -> TileCosts | None:
    """The costs by which a plan is chosen; None for a plan that computes every branch by itself."""
    if isinstance(optimize, TileCosts):
        return optimize
    if optimize not in ("auto", "none"):
        raise ValueError(f"optimize={optimize!r}: must be 'auto', 'none' or TileCosts(row, call, diagonal)")
    return None if optimize == "none" else CPU_COSTS if device_type == "cpu" else GPU_COSTS


@lru_cache(maxsize=64)
def parse_costs(text: str) -> TileCosts:
    """The costs that a text describes."""
    row, call, diagonal, narrow, narrow_rows = text.split()
    return TileCosts(float(row), float(call), int(diagonal), float(narrow), int(narrow_rows))


def group_branches(
    pattern: Pattern, rows: int, kv_heads: int, rows_per_rank: int, causal: bool, costs: TileCosts | None
) -> tuple[Group, ...]:
    """The branches of a pattern as they are planned together, for a document of ``rows`` rows."""
    branches = tuple(
        _window_or_segment(branch, rows, kv_heads, causal) if isinstance(branch, WindowBranch) else branch
        for branch in pattern.branches(rows, kv_heads)
    )
    return find_chains(branches, rows, rows_per_rank, causal, costs)


def _window_or_segment(window: WindowBranch, rows: int, kv_heads: int, causal: bool) -> Branch:
    """The window under causality, or one segment if it covers the document: that is one tile instead of a few."""
    window = window.up_to_own_row() if causal else window
    covers = window.rate == 1 and window.left >= rows - 1 and (causal or window.right >= rows - 1)
    return SegmentBranch(rows, 1, offsets=(0,) * kv_heads) if covers else window


@lru_cache(maxsize=1024)
def find_chains(
    branches: tuple[Branch, ...], rows: int, rows_per_rank: int, causal: bool, costs: TileCosts | None
) -> tuple[Group, ...]:
    """The branches of a document, grouped into chains; a window, with its number, stays alone.

    Every branch is in one chain for each KV head. Without ``costs``, every chain has one branch.

    >>> from ringspan.geometry import Dilated
    >>> branches = Dilated((2048, 4096, 5000), (1, 2, 4)).branches(2**15)
    >>> [chain.numbers for chain in find_chains(branches, 2**15, 2**15, False, CPU_COSTS)]
    [(0, 1), (2,)]
    """
    heads_of: dict[tuple[int, ...], list[int]] = {}
    kv_heads = next((len(branch.offsets) for branch in branches if isinstance(branch, SegmentBranch)), 0)
    for head in range(kv_heads):
        for numbers in _nested(branches, head, rows, costs is not None):
            heads_of.setdefault(numbers, []).append(head)
    found: list[tuple[int, Group]] = []
    for numbers, heads in heads_of.items():
        levels = tuple(branch for i in numbers if isinstance(branch := branches[i], SegmentBranch))
        sharing = (Sharing(0),) * len(levels)
        if costs is not None and len(levels) > 1:
            size = 1 << (min(rows, rows_per_rank) - 1).bit_length()  # so that documents of similar length share plans
            shape = tuple((min(level.segment_length, size), level.rate) for level in levels)
            sharing = _choose_sharing(shape, size, len(heads), causal, costs)
        if sharing == _alone(len(levels)):
            found += [
                (i, Chain((i,), (level,), tuple(heads), (Sharing(0),)))
                for i, level in zip(numbers, levels, strict=True)
            ]
        else:
            found.append((min(numbers), Chain(numbers, levels, tuple(heads), sharing)))
    found += [(i, (i, branch)) for i, branch in enumerate(branches) if isinstance(branch, WindowBranch)]
    return tuple(group for _, group in sorted(found, key=lambda each: each[0]))


def _alone(levels: int) -> tuple[Sharing, ...]:
    """Levels that share nothing. The finest has no region before it."""
    return (Sharing(0), *(Sharing(level + 1) for level in range(1, levels)))


def _nested(branches: Sequence[Branch], head: int, rows: int, join: bool) -> list[tuple[int, ...]]:
    """The segment branches of a KV head in chains: each joins the first chain that it nests with."""
    segments = {i: branch for i, branch in enumerate(branches) if isinstance(branch, SegmentBranch)}
    chains: list[list[int]] = []
    for i in sorted(segments, key=lambda i: (min(segments[i].segment_length, rows), segments[i].rate)):
        joined = join and next((c for c in chains if _nests([segments[j] for j in c], segments[i], head, rows)), None)
        if joined:
            joined.append(i)
        else:
            chains.append([i])
    return [tuple(chain) for chain in chains]


def _nests(chain: list[SegmentBranch], branch: SegmentBranch, head: int, rows: int) -> bool:
    """Whether a branch is a further level of a chain, for a KV head and a document of so many rows."""
    last, covering = chain[-1], _covers(branch, rows)
    aligned = covering or (
        branch.segment_length % last.segment_length == 0 and branch.shift % last.segment_length == last.shift
    )
    between = branch.offsets[head] - branch.shift - last.offsets[head] + last.shift
    selects_fewer = branch.rate % last.rate == 0 and between % last.rate == 0
    selects_fewer = selects_fewer and branch.rate <= _LARGEST_RATE_RATIO * last.rate
    # Then the selected rows are the same in all segments of the finest level: one comb.
    regular = _covers(chain[0], rows) or chain[0].segment_length % branch.rate == 0
    length = rows if covering else branch.segment_length
    return aligned and selects_fewer and regular and length <= _LARGEST_RATIO * last.segment_length


def _covers(branch: SegmentBranch, rows: int) -> bool:
    """Whether one segment holds the whole document."""
    return branch.shift + rows <= branch.segment_length


@lru_cache(maxsize=1024)
def _choose_sharing(
    shape: tuple[tuple[int, int], ...], rows: int, heads: int, causal: bool, costs: TileCosts
) -> tuple[Sharing, ...]:
    """The sharing with the lowest price for a rank of ``rows`` rows; ``shape`` has segment length and rate of levels.

    Changes one level at a time as long as the price falls, starting from no sharing and from all sharing.
    """
    levels = tuple(SegmentBranch(length, rate) for length, rate in shape)

    @cache
    def region_price(region: Region) -> float:
        return _region_price(levels, region, heads, causal, costs)

    def price(sharing: tuple[Sharing, ...]) -> float:
        return sum(map(region_price, Chain((), levels, (0,), sharing).own_regions(0, rows, causal)))

    results = []
    for start in (_alone(len(levels)), (Sharing(0),) * len(levels)):
        best, least, previous = start, price(start), math.inf
        while least < previous:
            previous = least
            for level in range(len(levels) - 1, 0, -1):
                for since in range(level + 2):
                    for linked in (False, True) if 0 < since == best[level - 1].since else (False,):
                        changed = (*best[:level], Sharing(since, linked), *best[level + 1 :])
                        if changed != best and (cost := price(changed)) < least:
                            best, least = changed, cost
        results.append((least, best))
    return min(results, key=lambda result: result[0])[1]


def _region_price(
    levels: tuple[SegmentBranch, ...], region: Region, heads: int, causal: bool, costs: TileCosts
) -> float:
    chain = Chain((), levels, (0,), ())
    total = 0.0
    for product in chain.products(region, causal):
        queries, keys = chain.lanes(product.queries, *region.queries), chain.lanes(product.keys, *region.keys)
        if product.mask != "full":
            queries, keys = triangle(queries, keys)
        (query,), (key,) = queries, keys
        if query.rows and key.rows:
            total += costs.price(query.rows, key.rows, product.mask, region.segments * heads)
    return total
