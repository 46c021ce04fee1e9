"""The report of `ringspan bench hilbert`: tables and a picture, from the findings of the study alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import ringspan as rs
from ringspan.draw import draw_orders
from ringspan.tools.bench.hilbert import Findings
from ringspan.tools.bench.report import factor, keep_together, mark, seconds_with_spread
from ringspan.tools.pages import Page, Picture, Rows, Table

_DRAWN_GRID, _DRAWN_SEGMENT, _DRAWN_RANKS = (32, 32), 64, 8


def make_hilbert_page(found: Findings, command: str, machine: str) -> Page:
    load = f"other programs kept at most {found.most_foreign_cores:.2f} cores busy"
    if found.disturbed:
        load += f" and disturbed {found.disturbed} calls: all times are marked †"
    page = Page(
        "Orders, measured",
        _sentence(found),
        command,
        f"{machine}; {load}",
        [
            _picture(),
            _equal_cost_table(found),
            _equal_share_table(found),
            _ring_table(found),
            _permutation_table(found),
            _folded_table(found),
        ],
    )
    return keep_together(page)


def _sentence(found: Findings) -> str:
    scale = found.scale
    gain = _median(found.shortest_seconds["row-major"]) / _median(found.shortest_seconds["Hilbert"])
    unit = "seconds"
    if found.disturbed:  # disturbed times do not support a headline
        gain, unit = found.shortest["row-major"] / found.shortest["Hilbert"], "pairs"
    return (
        f"On a grid of {scale.grid[0]} x {scale.grid[1]}, attention in which {scale.share:.0%} of all neighbours "
        f"within {scale.radius:g} cells see each other is {gain:.1f} times cheaper along a Hilbert curve than in "
        f"row-major order, measured in {unit}."
    )


def _picture() -> Picture:
    orders = [order(_DRAWN_GRID) for order in (rs.RowMajor, rs.Snake, rs.Morton, rs.Hilbert)]
    caption = (
        f"Four orders of {_DRAWN_GRID[0]} x {_DRAWN_GRID[1]} cells. Top: the curve, starting at its dot. Middle: one "
        f"segment of {_DRAWN_SEGMENT} cells, which see each other. Bottom: the regions of {_DRAWN_RANKS} ranks."
    )
    return Picture("hilbert_orders", draw_orders(orders, _DRAWN_SEGMENT, _DRAWN_RANKS), caption)


def _equal_cost_table(found: Findings) -> Table:
    segments = list(found.scale.equal_segments)
    rows: Rows = [["order", *(f"segments of {w:,}" for w in segments)]]
    rows += [[name, *(f"{shares[w]:.3f}" for w in segments)] for name, shares in found.shares.items()]
    ties = [w for w in segments if abs(found.shares["Morton"][w] - found.shares["Hilbert"][w]) < 5e-4]
    tie = f" Morton ties with Hilbert at {_listed(ties)}, where both have the same blocks." if ties else ""
    text = (
        f"The share of all pairs of cells at most {found.scale.radius:g} apart (Euclidean) on {_grid(found)} that are "
        f"in the same segment, so that they see each other. One branch, rate 1: each column has equal cost.{tie}"
    )
    return Table("Neighbours that see each other, at equal cost", rows, text)


def _equal_share_table(found: Findings) -> Table:
    scale = found.scale
    base, base_seconds = found.shortest["row-major"], found.shortest_seconds["row-major"]
    rows: Rows = [["order", "segment", "pairs, relative to row-major", "time", "faster than row-major"]]
    for name, length in found.shortest.items():
        times = found.shortest_seconds[name]
        gains = found.spread([a / b for a, b in zip(base_seconds, times, strict=True)])
        rows.append(
            [name, f"{length:,}", f"1 / {base / length:.1f}", seconds_with_spread(found.spread(times)), factor(gains)]
        )
    gap = found.shortest["Morton"] / found.shortest["Hilbert"]
    morton = (
        " Morton ties with Hilbert here."
        if abs(gap - 1) < 0.02
        else f" Morton needs segments {gap:.2f} times as long as Hilbert's."
    )
    text = (
        f"The shortest segment (in sixteenths of a doubling) with which a share of {scale.share} of the pairs within "
        f"{scale.radius:g} cells see each other, and the time of `rs.attention(..., order=...)` with it: forward, "
        f"float32, {scale.grid_heads} heads of {scale.grid_head_dim}, {_grid(found)}, including the permutation "
        f"(row-major needs none); medians of {scale.grid_rounds} rounds.{morton}"
    )
    return Table(f"The cost of a share of {scale.share}", rows, text)


def _ring_table(found: Findings) -> Table:
    sizes = found.scale.ring_sizes
    rows: Rows = [["order", *(f"{k} ranks" for k in sizes)]]
    for name, by_size in found.received.items():
        rows.append([name, *(f"{sum(by_size[k]):,} (a rank: {max(by_size[k]):,})" for k in sizes)])
    text = (
        f"Rows that must be sent so that every pair within {found.scale.radius:g} cells meets on some rank, for all "
        f"ranks together and for the rank that needs most; {_grid(found)}, ordered once, then split into equal shards."
    )
    return Table("What a neighbourhood costs in a ring", rows, text)


def _permutation_table(found: Findings) -> Table:
    rows: Rows = [
        [
            *("memory", "pass", "attention, ordered rows"),
            *("order once", "its share", "`order=` in the call", "its share"),
        ]
    ]
    for row in found.permutation:
        plain, once, ordered = (row["seconds"][name] for name in ("in order", "once", "order="))
        once_share = statistics.median(b / a for a, b in zip(plain, once, strict=True))
        share = statistics.median((b - a) / a for a, b in zip(plain, ordered, strict=True))
        times = [seconds_with_spread(found.spread(times)) for times in (plain, once, ordered)]
        memory = "kept" if row["keeps_memory"] else "returned"
        mode = "forward" if row["mode"] == "forward" else "forward and backward"
        rows.append([memory, mode, *times[:2], f"{once_share:.1%}", times[2], f"{share:.1%}"])
    scale = found.scale
    text = (
        f"Attention over {_grid(found)}, {scale.grid_heads} heads of {scale.grid_head_dim}, segments of "
        f"{found.shortest['Hilbert']:,}. Order once: `apply` before the model and `undo` after it, relative to the "
        "attention of one layer. `order=` in the call: q, k, v and the output (in backward also their gradients) are "
        "permuted in every layer. A permuted tensor is a new one. The C library returns large freed tensors to the "
        "system, so every new one pays for page faults. In a process that keeps its memory "
        "(`MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=1099511627776` for glibc; jemalloc, tcmalloc and torch on GPUs do "
        "so by default) this is paid once. Computing the curve takes "
        f"{seconds_with_spread(found.spread(found.curve_seconds))}, once."
    )
    return Table("What the permutation costs", rows, text)


def _folded_table(found: Findings) -> Table:
    rows: Rows = [["tokens", "causal", "pass", "without", "with", "without / with", "verdict"]]
    for row in found.folded:
        for mode, name in (("forward", "forward"), ("both", "forward and backward")):
            plain, ordered = (row["seconds"][f"{mode} {which}"] for which in ("without", "with"))
            gains = found.spread([a / b for a, b in zip(plain, ordered, strict=True)])
            times = [seconds_with_spread(found.spread(times)) for times in (plain, ordered)]
            causal = "yes" if row["causal"] else "no"
            rows.append([f"{row['n']:,}", causal, name, *times, factor(gains), verdict(plain, ordered) + mark(gains)])
    scale = found.scale
    pairs = zip(scale.pattern.segment_lengths, scale.pattern.dilation_rates, strict=True)
    text = (
        f"Sequences without a grid: {', '.join(f'{w} x {r}' for w, r in pairs)}, {scale.heads} heads of "
        f"{scale.head_dim}, float32, with and without `order=rs.Hilbert.folded({scale.fold})`; timed in turns, median "
        f"of {scale.rounds} rounds (lowest - highest)."
    )
    return Table("With and without a folded order", rows, text)


def verdict(without: Sequence[float], with_order: Sequence[float]) -> str:
    """What the times support, and no more.

    >>> verdict([1.0, 1.1], [1.05, 1.2]), verdict([2.0, 2.1], [1.0, 1.1]), verdict([1.0, 1.1], [2.0, 2.1])
    ('no difference beyond the noise', 'faster', 'no speed-up: slower')
    """
    if max(with_order) < min(without):
        return "faster"
    return "no speed-up: slower" if min(with_order) > max(without) else "no difference beyond the noise"


def _grid(found: Findings) -> str:
    return f"{found.scale.grid[0]} x {found.scale.grid[1]} cells"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(f"{number:,}" for number in numbers)


def _median(times: Sequence[float]) -> float:
    return statistics.median(times)
