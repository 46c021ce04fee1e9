"""Long rings made small enough to draw pair by pair: how segments lie on the ranks is what matters, and is kept."""

from __future__ import annotations

from dataclasses import replace

from ringspan.draw.titles import pattern_pairs
from ringspan.geometry import Dilated, Documents, Pattern
from ringspan.layout import Layout
from ringspan.planning import RingPlan

MOST_ROWS, MOST_RANKS = 64, 8
_FEW_RANKS = 4  # stand for a large ring whose segments are shorter than a shard: then there is room to see them
_FEWEST_SELECTED = 8  # rows of a segment: with fewer, a dilated segment looks like dust


def scaled_down(plan: RingPlan) -> tuple[RingPlan, str]:
    """A small plan that looks like the given one, and a line that says what was made small (empty if nothing was).

    Segments keep their length in shards, so that what is local stays local and what travels still travels. Rates are
    lowered where too few rows of a segment would be left. A few ranks stand for a large ring.

    >>> import ringspan as rs
    >>> small, note = scaled_down(rs.plan(rs.Dilated((2048, 32768), (1, 16)), 32768, ring_size=4))
    >>> small.pattern.segment_lengths, small.pattern.dilation_rates, small.layout.rows
    ((4, 64), (1, 8), 64)
    >>> note
    'Not the plan itself but a small one like it: 64 tokens for 32,768, 4 x 1, 64 x 8 for 2048 x 1, 32768 x 16'
    """
    rows, size = plan.layout.rows, plan.layout.ring_size
    if rows <= MOST_ROWS and size <= MOST_RANKS:
        return plan, ""
    ranks = _stand_ins(plan)
    kept = min(rows, MOST_ROWS // (2 * ranks) * 2 * ranks)  # so that all ranks get equal shards under both layouts
    pattern = _scaled_pattern(plan.pattern, kept * size, rows * ranks, kept)
    sizes = replace(plan.sizes, batch=1, heads=plan.sizes.kv_heads)
    small = replace(
        plan, pattern=pattern, documents=Documents((kept,)), layout=Layout(plan.layout.name, kept, ranks), sizes=sizes
    )
    ring = f" over {ranks} ranks for {size:,}" if ranks < size else ""
    likeness = f"{kept} tokens for {rows:,}{ring}{_instead(plan, small)}"
    return small, f"Not the plan itself but a small one like it: {likeness}"


def _instead(plan: RingPlan, small: RingPlan) -> str:
    """The small pattern beside the one that it stands for."""
    if plan.pattern == small.pattern:
        return ""
    drawn, wanted = (pattern_pairs(each.pattern) for each in (small, plan))
    return f", {drawn} for {wanted}"


def _stand_ins(plan: RingPlan) -> int:
    size = plan.layout.ring_size
    if size <= MOST_RANKS:
        return size
    longest = max(branch.segment_length for branch in plan.pattern.branches(plan.layout.rows))
    return MOST_RANKS if longest * size > plan.layout.rows else _FEW_RANKS


def _scaled_pattern(pattern: Pattern, part: int, whole: int, rows: int) -> Pattern:
    """The pattern with its segments times part / whole."""
    if not isinstance(pattern, Dilated):
        return pattern
    lengths = tuple(min(max(1, round(w * part / whole)), rows) for w in pattern.segment_lengths)
    rates = tuple(
        min(rate, max(1, length // _FEWEST_SELECTED))
        for length, rate in zip(lengths, pattern.dilation_rates, strict=True)
    )
    return replace(pattern, segment_lengths=lengths, dilation_rates=rates, shift=round(pattern.shift * part / whole))
