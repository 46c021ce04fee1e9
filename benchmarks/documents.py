"""Packed documents of mixed lengths: balance and bytes of the zigzag and balanced layouts, and time on two ranks."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import ringspan as rs
from benchmarks.suite import (
    HEAD_DIM,
    HEADS,
    Measuring,
    Page,
    Picture,
    Results,
    Rows,
    Suite,
    Table,
    both_ratios,
    empty_figure,
    mebibytes,
)
from ringspan.layout import LayoutName
from ringspan.runtime.launch import run_local_ranks
from ringspan.tools.bench.trials import RankStopwatch, TurnTimer, with_gradients

TOTAL, QUICK_TOTAL = 2**18, 2**14
RING_SIZES, QUICK_RING_SIZES = (2, 4, 8, 64), (2, 4)
QUICK_STEP_TOTAL, STEP_TOTAL, LONG_STEP_TOTAL = 2**12, 2**14, 2**15
LAYOUTS: tuple[LayoutName, ...] = ("zigzag", "balanced")
STYLES = {"zigzag": ("#E69F00", "//"), "balanced": ("#0072B2", "")}
SPREAD = 1.2  # standard deviation of the logarithm of a length
SHORTEST, LONGEST = 64, 65536


def log_normal(median: int, total: int) -> tuple[int, ...]:
    """Lengths with this median, from 64 to 65,536 rows, the last cut so that they add up to ``total``.

    >>> log_normal(500, 4096)
    (1548, 94, 221, 780, 148, 459, 620, 184, 42)
    """
    chance, lengths = random.Random(0), list[int]()
    while (left := total - sum(lengths)) > 0:
        drawn = round(math.exp(chance.gauss(math.log(median), SPREAD)))
        lengths.append(min(left, max(SHORTEST, min(LONGEST, drawn))))
    return tuple(lengths)


def one_long(total: int) -> tuple[int, ...]:
    """One document of half of the rows among short ones of 16 to 112 rows."""
    chance, lengths = random.Random(0), list[int]()
    while (left := total - total // 2 - sum(lengths)) > 0:
        lengths.append(min(left, chance.randint(16, 112)))
    lengths.insert(chance.randrange(len(lengths)), total // 2)
    return tuple(lengths)


# Lengths for a total; medians are scaled with it, so that a smaller mix has about as many documents.
MIXES: dict[str, Callable[[int], tuple[int, ...]]] = {
    "median 1,500": lambda total: log_normal(1500 * total // TOTAL, total),
    "median 4,000": lambda total: log_normal(4000 * total // TOTAL, total),
    "one of half of the rows": one_long,
}


def balance(run: Measuring) -> list[dict[str, Any]]:
    """From plans: the work, the rows and the bytes of the most loaded rank."""
    total = run.sized(QUICK_TOTAL, TOTAL, TOTAL)
    rows = []
    for name, mix in MIXES.items():
        lengths = mix(total)
        for size in run.sized(QUICK_RING_SIZES, RING_SIZES, RING_SIZES):
            for layout in LAYOUTS:
                options: dict[str, Any] = dict(lengths=lengths, heads=HEADS, head_dim=HEAD_DIM)
                plan = rs.plan(rs.Full(), total, ring_size=size, layout=layout, causal=True, **options)
                ranks = range(size)
                rows.append(
                    dict(
                        **dict(mix=name, total=total, documents=len(lengths), longest=max(lengths)),
                        **dict(ring_size=size, layout=layout, imbalance=plan.imbalance),
                        most_rows=max(map(plan.layout.rows_of, ranks)) * size / total,
                        most_bytes=max(map(plan.bytes_sent, ranks)),
                    )
                )
    return rows


def steps(run: Measuring) -> list[dict[str, Any]]:
    """Times of a forward and a backward pass on two ranks with one thread each, and of one process."""
    total = run.sized(QUICK_STEP_TOTAL, STEP_TOTAL, LONG_STEP_TOTAL)
    rounds = 1 if run.size == "quick" else int(run.options["rounds"])
    rows = []
    for name, mix in MIXES.items():
        lengths = mix(total)
        run.announce(f"{name}, {len(lengths)} documents")
        seconds = run_local_ranks(2, measure_steps, lengths, rounds, timeout_seconds=3600)[0]
        rows.append(dict(mix=name, total=total, documents=len(lengths), longest=max(lengths), seconds=seconds))
    return rows


def measure_steps(lengths: tuple[int, ...], rounds: int) -> dict[str, list[float]]:
    """On each of two ranks: seconds of a step, alone and with each layout, in turns. The slower rank counts."""
    total, packed = sum(lengths), torch.tensor(lengths)
    options: dict[str, Any] = dict(pattern=rs.Full(), causal=True, lengths=packed)

    def step(rows: int, **more: Any) -> Callable[[], object]:
        tensors = [torch.randn(1, rows, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3)]
        return with_gradients(tensors, torch.randn(1, rows, HEADS, HEAD_DIM), options | more)

    calls: dict[str, Callable[[], object]] = {"alone": (lambda: None) if dist.get_rank() else step(total)}
    for layout in LAYOUTS:
        ring = rs.Ring(layout=layout)
        held = ring.layout_of(total, lengths).rows_of(ring.rank)
        calls[layout] = step(held, ring=ring, seq_len=total)
    return TurnTimer(RankStopwatch).in_turns(calls, rounds)


def report(results: Results) -> Page:
    total = results["balance"][0]["total"]
    return Page(
        "Packed documents",
        f"Full causal attention inside each of many documents, {total:,} rows together: how the layouts zigzag and "
        "balanced divide the work.",
        "python -m benchmarks documents",
        f"Machine: {results.machine}",
        [
            balance_picture(results["balance"]),
            balance_table(results["balance"]),
            steps_table(results["steps"]),
        ],
    )


def balance_table(rows: list[dict[str, Any]]) -> Table:
    cells: Rows = [["lengths", "documents", "longest", "ranks"]]
    cells[0] += [f"{what}, {layout}" for what in ("work", "rows", "sent") for layout in LAYOUTS]
    by_case: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_case.setdefault((row["mix"], row["ring_size"]), {})[row["layout"]] = row
    for (name, size), found in by_case.items():
        both = [found[layout] for layout in LAYOUTS]
        cells.append(
            [
                *(name, f"{both[0]['documents']:,}", f"{both[0]['longest']:,}", str(size)),
                *(f"{row['imbalance']:.3f}" for row in both),
                *(f"{row['most_rows']:.3f}" for row in both),
                *(mebibytes(row["most_bytes"]) for row in both),
            ]
        )
    text = (
        "From plans, fixed random lengths: log-normal with this median, 64 to 65,536 rows, or one document of half of "
        "the rows among short ones. *Work* and *rows* are those of the most loaded rank over the mean; 1 is perfect. "
        f"*Sent* are the bytes that the busiest rank sends in a forward pass, {HEADS} heads of {HEAD_DIM}, fp32."
    )
    return Table("Balance", cells, text, terminal_columns=(0, 3, 4, 5, 8, 9))


def steps_table(rows: list[dict[str, Any]]) -> Table:
    cells: Rows = [["lengths", "documents", "longest", "one process", *LAYOUTS]]
    cells[0] += [f"{layout}, over the ideal" for layout in LAYOUTS]
    for row in rows:
        seconds = row["seconds"]
        ideal = [one / 2 for one in seconds["alone"]]
        ratios = (both_ratios(seconds[layout], ideal) for layout in LAYOUTS)
        cells.append(
            [
                *(row["mix"], f"{row['documents']:,}", f"{row['longest']:,}"),
                *(f"{statistics.median(seconds[name]):.2f} s" for name in ("alone", *LAYOUTS)),
                *(f"{median} ({spread})" for median, _, spread in ratios),
            ]
        )
    text = (
        f"A forward and a backward pass over {rows[0]['total']:,} rows on two ranks with one thread each, the same "
        f"mixes with lengths scaled down, {len(rows[0]['seconds']['alone'])} rounds in turns; the slower rank counts. "
        "The ideal is half of the time of one process with one thread: medians of the ratios of single rounds, and "
        "their spread. Two busy cores slow each other down a little, so even perfect balance stays above 1."
    )
    return Table("Time of a step on two ranks", cells, text, terminal_columns=(0, 3, 4, 5, 6, 7))


def balance_picture(rows: list[dict[str, Any]]) -> Picture:
    """Bars: the work of the busiest rank over the mean, by mix and ring size."""
    figure, axes = empty_figure(1, len(MIXES), (11, 3.6))
    for axis, name in zip(axes, MIXES, strict=True):
        sizes = sorted({row["ring_size"] for row in rows})
        for i, layout in enumerate(LAYOUTS):
            work = {r["ring_size"]: r["imbalance"] for r in rows if (r["mix"], r["layout"]) == (name, layout)}
            colour, hatch = STYLES[layout]
            places = [x + (i - 0.5) * 0.36 for x in range(len(sizes))]
            axis.bar(places, [work[k] for k in sizes], 0.34, color=colour, hatch=hatch, edgecolor="white", label=layout)
            for x, size in zip(places, sizes, strict=True):
                axis.text(x, work[size], f"{work[size]:.2f}", ha="center", va="bottom", fontsize=7)
        axis.axhline(1, color="#555555", linewidth=0.8)
        axis.set_xticks(range(len(sizes)), [str(size) for size in sizes])
        axis.set(xlabel="ranks", title=name)
    axes[0].set_ylabel("work of the busiest rank / mean")
    axes[0].legend(frameon=False, loc="upper left")
    return Picture("documents", figure, "Work of the busiest rank over the mean, for documents of mixed lengths.")


SUITE = Suite(
    "docs/documents.md",
    {"balance": balance, "steps": steps},
    report,
    options={"rounds": "3"},
    long_options={"rounds": "9"},
)
