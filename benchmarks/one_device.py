"""One device: ringspan compared with the bare kernel and with what torch offers, in time and memory.

All implementations compute the same function (`ringspan.tools.peers`); a checksum of the output shows it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil
import torch
from torch import Tensor

import ringspan as rs
from benchmarks.small_calls import overhead, parts_table, small_calls_table
from benchmarks.suite import (
    HEAD_DIM,
    HEADS,
    PASSES,
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
    yes,
)
from ringspan.planning import Optimize
from ringspan.runtime.device import Cpu
from ringspan.tools.bench.share import (
    REQUIRED_SHARE_NOT_NESTED,
    REQUIRED_WINDOW_SHARE,
    BareKernel,
    attention_calls,
    pattern_up_to,
    qkv,
    share_calls,
)
from ringspan.tools.bench.trials import TrialError, TrialLimits, TurnTimer, run_limited
from ringspan.tools.peers import blockwise_flex, masked_sdpa

LENGTHS, QUICK_LENGTHS = (32768, 65536, 131072), (4096, 8192)
PEER_LENGTHS, QUICK_PEER_LENGTHS = (8192, 32768), (2048,)
# Single rounds vary by 10 %: the median of three can miss a bound of 2.1, that of nine does not.
QUICK_GROWTH_ROUNDS, GROWTH_ROUNDS, LONG_GROWTH_ROUNDS = 2, 3, 9
LONGEST_ROUNDS = 2  # of the share at the longest length by default: a round takes half a minute
LONG_SHORT_ROUNDS = 3  # with --long, rounds of the shortest length for each of the longest: short calls vary more
PEER_ROUNDS = 3
PEER_SECONDS = 900.0
MEMORY_TRIES, LONG_MEMORY_TRIES = (
    3,
    5,
)  # fresh processes: pages that the system reclaims before a call make its growth seem larger
MEMORY_SHARE = 0.85  # of free memory, for one implementation
# A pattern whose branches do not nest, so that pairs which two of them see are computed twice.
NOT_NESTED = rs.Dilated((2048, 5000, 12000), (1, 2, 4))
ONLY_PAIRS = rs.TileCosts(row=0, call=0, diagonal=0, narrow=1)  # the plan with the fewest pairs
# Of branches that nest, by causality and pass.
REQUIRED_SHARE = {(False, "forward"): 1.12, (False, "both"): 1.15, (True, "forward"): 1.03, (True, "both"): 1.05}
REQUIRED_GROWTH = 2.1
REQUIRED_MEMORY_MIB = 32
STYLES = {"ringspan": ("#0072B2", ""), "SDPA with a mask": ("#E69F00", "//"), "FlexAttention": ("#999999", "..")}


@dataclass(frozen=True)
class Measured:
    """One implementation in a fresh process. ``failure`` says why nothing was measured."""

    seconds: float = 0.0
    peak_bytes: int = 0
    checksum: float = 0.0
    failure: str = ""


def causal_cases(run: Measuring, is_longest: bool) -> tuple[bool, ...]:
    """The longest length is measured in both cases only with --long."""
    return (True,) if is_longest and run.size == "default" else (False, True)


def kernel_share(run: Measuring) -> list[dict[str, Any]]:
    """Times of ringspan, with its default plan and with the plain one, and of the bare kernel, in turns."""
    lengths = run.sized(QUICK_LENGTHS, LENGTHS, LENGTHS)
    rounds = 2 if run.size == "quick" else int(run.options["rounds"])
    short_rounds, longest_rounds = run.sized((1, 1), (1, LONGEST_ROUNDS), (LONG_SHORT_ROUNDS, rounds))
    cases = [
        (True, pattern_up_to(), n, causal)
        for n in (lengths[0], lengths[-1])
        for causal in causal_cases(run, n == lengths[-1])
    ]
    cases += [(False, NOT_NESTED, lengths[0], causal) for causal in run.sized((True,), (True,), (False, True))]
    rows = []
    for nested, pattern, n, causal in cases:
        run.announce(f"{pattern.text}, {n:,} tokens, {'causal' if causal else 'not causal'}")
        counts = count_pairs(pattern, n, causal)
        calls = share_calls(pattern, n, causal)
        short = n == lengths[0]
        # By default, the longest length is measured in the fewest calls that show its share.
        for mode in PASSES if short or run.size != "default" else ("both",):
            timer = TurnTimer()
            times = timer.in_turns(calls[mode], rounds * short_rounds if short else longest_rounds, warm=short)
            row = dict(nested=nested, n=n, causal=causal, mode=mode, **times, pairs=counts)
            rows.append(row | dict(foreign_cores=timer.most_foreign_cores))
    return rows


def count_pairs(pattern: rs.Pattern, n: int, causal: bool) -> dict[str, int]:
    """The (query, key) pairs that the branches see, each for itself; the distinct ones; and those that are computed."""
    choices: tuple[Optimize, ...] = ("auto", ONLY_PAIRS)
    plans = (rs.plan(pattern, n, causal=causal, heads=HEADS, head_dim=HEAD_DIM, optimize=one) for one in choices)
    chosen, fewest = (plan.rank(0) for plan in plans)
    return dict(seen=chosen.pairs_seen, distinct=fewest.pairs, computed=chosen.pairs)


def windows(run: Measuring) -> list[dict[str, Any]]:
    """Times of a causal window, of the bare kernel on its tiles, and on dense squares with as many pairs, in turns."""
    n, window = run.sized((4096, 256), (32768, 1024), (32768, 1024))
    rounds = 2 if run.size == "quick" else int(run.options["rounds"])
    pattern = rs.Window(window - 1)
    ours, bare = attention_calls(n, True, pattern), BareKernel.of(pattern, n, causal=True)
    squares = BareKernel([(n // window, HEADS, window, window, "full")])
    rows = []
    for mode in PASSES:
        run.announce(PASSES[mode])
        timer = TurnTimer()
        calls = {"ours": ours[mode], "bare": getattr(bare, mode), "squares": getattr(squares, mode)}
        times = timer.in_turns(calls, rounds)
        rows.append(dict(n=n, window=window, mode=mode, **times, foreign_cores=timer.most_foreign_cores))
    return rows


def growth(run: Measuring) -> list[dict[str, Any]]:
    """Times of ringspan at lengths that double, in turns."""
    lengths = run.sized(QUICK_LENGTHS, LENGTHS[:2], LENGTHS)
    rounds = run.sized(QUICK_GROWTH_ROUNDS, GROWTH_ROUNDS, LONG_GROWTH_ROUNDS)
    rows = []
    for causal in causal_cases(run, is_longest=True):
        calls = {n: attention_calls(n, causal, pattern_up_to()) for n in lengths}
        for mode in PASSES:
            run.announce(f"{PASSES[mode]}, {'causal' if causal else 'not causal'}")
            timer = TurnTimer()
            times = timer.in_turns({str(n): calls[n][mode] for n in lengths}, rounds)
            seconds = {**times, "foreign_cores": timer.most_foreign_cores}
            rows.append(dict(causal=causal, mode=mode, seconds=seconds))
    return rows


def peers(run: Measuring) -> list[dict[str, Any]]:
    """Each implementation in a fresh process: time, peak memory, and a checksum of the output."""
    tasks = {"ringspan": ringspan_task, "SDPA with a mask": sdpa_task, "FlexAttention": flex_task}
    lengths = run.sized(QUICK_PEER_LENGTHS, PEER_LENGTHS, PEER_LENGTHS)
    rows = []
    for n in lengths:
        for causal in causal_cases(run, n == lengths[-1]):
            for name, task in tasks.items():
                run.announce(f"{name}, {n:,} tokens")
                measured = in_fresh_process(task, n, causal, PEER_ROUNDS if n == lengths[0] else 1)
                rows.append(dict(n=n, causal=causal, name=name, **asdict(measured)))
    return rows


def memory(run: Measuring) -> list[dict[str, Any]]:
    """Peak growth of the forward pass beyond its results."""
    n = run.sized(QUICK_LENGTHS, LENGTHS, LENGTHS)[-1]
    results, count = n * HEADS * (HEAD_DIM + 1) * 4, run.sized(1, MEMORY_TRIES, LONG_MEMORY_TRIES)
    rows = []
    for causal in (False, True):
        tries = [in_fresh_process(memory_task, n, causal) for _ in range(count)]
        beyond = min(each.peak_bytes for each in tries) - results
        rows.append(dict(n=n, causal=causal, beyond_results_bytes=beyond, failure=tries[0].failure, tries=count))
    return rows


def in_fresh_process(task: Callable[..., Measured], *arguments: Any) -> Measured:
    """Run a task in a fresh process with a memory limit. Running out of memory or time is a result."""
    limits = TrialLimits(int(psutil.virtual_memory().available * MEMORY_SHARE), PEER_SECONDS)
    try:
        (measured,) = run_limited(1, limits, task, *arguments, threads=torch.get_num_threads())
    except TrialError as error:
        if error.outcome == "crashed":
            raise
        fits = error.outcome != "out of memory"
        return Measured(failure=error.reason if fits else f"does not fit in {limits.memory_bytes / 2**30:.0f} GiB")
    return measured


def ringspan_task(n: int, causal: bool, rounds: int) -> Measured:
    q, k, v = qkv(n)
    return _measure(lambda: rs.attention(q, k, v, pattern=pattern_up_to(), causal=causal), rounds)


def sdpa_task(n: int, causal: bool, rounds: int) -> Measured:
    """Scaled dot-product attention with the pattern as an additive mask (heads, n, n), which counts as its memory."""
    q, k, v = qkv(n)
    attend, mask_bytes = Cpu().peak_growth(lambda: masked_sdpa(pattern_up_to(), n, HEADS, causal=causal))
    measured = _measure(lambda: attend(q, k, v), rounds)
    return replace(measured, peak_bytes=measured.peak_bytes + mask_bytes)


def flex_task(n: int, causal: bool, rounds: int) -> Measured:
    """Compiled FlexAttention with a block mask. Forward only: the CPU backend has no backward pass."""
    q, k, v = qkv(n)
    with torch.no_grad():
        attend, mask_bytes = Cpu().peak_growth(lambda: blockwise_flex(pattern_up_to(), n, HEADS, causal=causal))
        measured = _measure(lambda: attend(q, k, v), rounds)
    return replace(measured, peak_bytes=max(measured.peak_bytes, mask_bytes))


def memory_task(n: int, causal: bool) -> Measured:
    """One forward pass, warmed up at a short length so that the allocator retains nothing of the measured size."""
    rs.attention(*qkv(1024), pattern=pattern_up_to(), causal=causal)
    q, k, v = qkv(n)
    _, growth = Cpu().peak_growth(lambda: rs.attention(q, k, v, pattern=pattern_up_to(), causal=causal))
    return Measured(peak_bytes=growth)


def _measure(call: Callable[[], Tensor], rounds: int) -> Measured:
    checksum = call().double().square().mean().sqrt().item()  # the first call also warms up and compiles
    _, peak = Cpu().peak_growth(call)
    (times,) = TurnTimer().in_turns({"call": call}, rounds, warm=False).values()
    return Measured(statistics.median(times), peak, checksum)


def report(results: Results) -> Page:
    sentence = (
        f"{HEADS} heads of {HEAD_DIM}, fp32, batch 1; segments 2048, 4096 .. 32768 with rates 1, 2 .. 16. All bounds "
        "in the columns *required* are targets of the project."
    )
    small = results.get("overhead")  # results measured before this part existed lack it
    return Page(
        "Benchmarks: one device",
        sentence,
        "python -m benchmarks one_device",
        f"Machine: {results.machine}",
        [
            peer_picture(results["peers"], results.machines["peers"]),
            share_table(results["kernel_share"]),
            *pairs_tables(results["kernel_share"]),
            window_table(results["windows"]),
            growth_table(results["growth"]),
            peer_table(results["peers"]),
            memory_table(results["memory"]),
            *(table(small) for table in (small_calls_table, parts_table) if small),
        ],
    )


def share_table(rows: list[dict[str, Any]]) -> Table:
    """Rows measured before plans shared pairs between branches have no ``plain``, ``nested`` and ``pairs``."""
    cells: Rows = [
        [
            *("branches", "n", "causal", "pass", "rounds", "ringspan", "plain plan", "bare kernel"),
            *("share", "ratio of medians", "spread", "plain plan's share", "required of it"),
        ]
    ]
    for row in rows:
        nested = row.get("nested", True)
        plain = row.get("plain", row["ours"])
        seconds = [f"{statistics.median(times):.2f} s" for times in (row["ours"], plain, row["bare"])]
        start = ["nested" if nested else "not nested", str(row["n"]), yes(row["causal"]), PASSES[row["mode"]]]
        required = REQUIRED_SHARE[row["causal"], row["mode"]] if nested else REQUIRED_SHARE_NOT_NESTED
        shares = [*both_ratios(row["bare"], row["ours"]), both_ratios(row["bare"], plain)[0], f"{required:.2f}"]
        cells.append([*start, str(len(row["ours"])), *seconds, *shares])
    text = (
        "Throughput relative to the flash kernel on contiguous tiles that hold every pair of the definition, each as "
        "often as branches see it, without segments, merging or the summation of gradients. A share above 1 is "
        "possible where branches nest, because their common pairs are computed once. The plain plan "
        '(`optimize="none"`) computes the same tiles as the bare kernel. *Not nested*: segments 2048, 5000, 12000 '
        "with rates 1, 2, 4; required of both plans. All are timed in turns. The share is the median of the ratios of "
        "single rounds; then the ratio of the medians, and the lowest and the highest ratio."
    )
    return Table("Share of the bare kernel", cells, text)


def pairs_tables(rows: list[dict[str, Any]]) -> list[Table]:
    """One table, or none for rows that were measured before pairs were counted."""
    cells: Rows = [["branches", "n", "causal", "seen", "distinct", "computed", "computed / seen"]]
    for row in rows:
        if row["mode"] == "both" and "pairs" in row:
            pairs = row["pairs"]
            distinct = f"{pairs['distinct']:,}" if row["nested"] else ""
            start = ["nested" if row["nested"] else "not nested", str(row["n"]), yes(row["causal"])]
            counts = [f"{pairs['seen']:,}", distinct, f"{pairs['computed']:,}"]
            cells.append([*start, *counts, f"{pairs['computed'] / pairs['seen']:.3f}"])
    text = (
        "(Query, key) pairs over all heads: as the branches see them, each by itself; the distinct ones; and those "
        "that the default plan computes. Computing fewer pairs takes more tiles, so the plan with the lowest price has "
        "some pairs twice. Branches that do not nest are computed one by one."
    )
    return [Table("Pairs", cells, text)] if len(cells) > 1 else []


def window_table(rows: list[dict[str, Any]]) -> Table:
    cells: Rows = [["pass", "ringspan", "same tiles", "share", "spread", "squares", "share"]]
    for row in rows:
        ours, bare, squares = (f"{statistics.median(row[side]):.2f} s" for side in ("ours", "bare", "squares"))
        share, spread = both_ratios(row["bare"], row["ours"])[::2]
        of_squares = both_ratios(row["squares"], row["ours"])[0]
        cells.append([PASSES[row["mode"]], ours, bare, share, spread, squares, of_squares])
    text = (
        f"`rs.Window({rows[0]['window'] - 1})`, causal, {rows[0]['n']:,} tokens, compared with the flash kernel on "
        "contiguous tiles of the same shapes (a triangle and a reversed triangle for each block of the window), and on "
        f"dense squares with as many pairs. Shares are medians of the ratios of {len(rows[0]['ours'])} rounds; "
        f"required of the same tiles: {REQUIRED_WINDOW_SHARE}. The CPU kernel skips the masked half of a triangle "
        "in steps of 256 rows and 512 keys, so a triangle of 1,024 rows costs 1.5 times its "
        "pairs: no plan of this kernel can reach the speed of dense squares. Smaller triangles waste fewer pairs, but "
        "their kernel calls are slower by as much."
    )
    return Table("Windows", cells, text)


def growth_table(rows: list[dict[str, Any]]) -> Table:
    cells: Rows = [
        ["n", "2n", "causal", "pass", "rounds", "median of ratios", "ratio of medians", "spread", "required"]
    ]
    for row in rows:
        seconds = {int(n): times for n, times in row["seconds"].items() if n != "foreign_cores"}
        for n, short in seconds.items():
            if 2 * n in seconds:
                start = [str(n), str(2 * n), yes(row["causal"]), PASSES[row["mode"]], str(len(short))]
                cells.append([*start, *both_ratios(seconds[2 * n], short), f"{REQUIRED_GROWTH}"])
    text = f"Time at 2n divided by time at n, timed in turns (required: at most {REQUIRED_GROWTH})."
    return Table("Growth with length", cells, text)


def peer_table(rows: list[dict[str, Any]]) -> Table:
    ours = {(r["n"], r["causal"]): r for r in rows if r["name"] == "ringspan"}
    cells: Rows = [
        ["n", "causal", "implementation", "time", "ringspan is faster by", "peak memory", "ringspan is smaller by"]
    ]
    for row in rows:
        base = ours[row["n"], row["causal"]]
        start = [str(row["n"]), yes(row["causal"]), row["name"]]
        if row["failure"]:
            cells.append([*start, row["failure"], "", "", ""])
            continue
        faster, smaller = ("" if row is base else f"{row[key] / base[key]:.1f} x" for key in ("seconds", "peak_bytes"))
        cells.append([*start, f"{row['seconds']:.2f} s", faster, f"{row['peak_bytes'] / 2**20:.0f} MiB", smaller])
    text = (
        "The same function by `scaled_dot_product_attention` with the pattern as a mask, and by compiled FlexAttention "
        "with a block mask. Forward, each in a fresh process. Memory is the peak beyond the inputs, masks included."
    )
    return Table("Compared with torch", cells, text)


def memory_table(rows: list[dict[str, Any]]) -> Table:
    cells: Rows = [["n", "causal", "beyond inputs, output and lse"]]
    cells += [[str(r["n"]), yes(r["causal"]), r["failure"] or mebibytes(r["beyond_results_bytes"], 1)] for r in rows]
    text = (
        f"Peak memory beyond inputs, output and lse (required: less than {REQUIRED_MEMORY_MIB} MiB): the smallest "
        f"growth of the resident size in {rows[0].get('tries', LONG_MEMORY_TRIES)} fresh processes."
    )
    return Table("Memory of the forward pass", cells, text)


def peer_picture(rows: list[dict[str, Any]], machine: str) -> Picture:
    """Bars: time and peak memory of each implementation at each length, causal and not."""
    cases = sorted({(r["n"], r["causal"]) for r in rows})
    figure, axes = empty_figure(1, 2, (11, 4.2))
    for axis, key, scale, label in (
        (axes[0], "seconds", 1.0, "time (s, log scale)"),
        (axes[1], "peak_bytes", 2**20, "peak memory (MiB, log scale)"),
    ):
        for i, name in enumerate(STYLES):
            of_name = {(r["n"], r["causal"]): r for r in rows if r["name"] == name}
            for x, case in enumerate(cases):
                _bar(axis, x + (i - 1) * 0.28, of_name[case], key, scale, name, label=x == 0)
        axis.set_yscale("log")
        axis.margins(y=0.15)
        axis.set_xticks(range(len(cases)), [f"{n:,}\n{'causal' if causal else 'not causal'}" for n, causal in cases])
        axis.set(xlabel="tokens", ylabel=label)
    axes[0].legend(frameon=False, loc="upper left")
    figure.suptitle("Dilated attention, forward: lower is better", fontsize=12)
    figure.supxlabel(f"{HEADS} heads of {HEAD_DIM}, fp32; {machine}", fontsize=8, color="#555555")
    return Picture("one_device", figure, "Time and peak memory of the forward pass compared with torch.")


def _bar(axis: Any, x: float, row: dict[str, Any], key: str, scale: float, name: str, label: bool) -> None:
    if row["failure"]:
        bottom = axis.get_xaxis_transform()
        axis.text(x, 0.02, "does not fit", rotation=90, ha="center", va="bottom", fontsize=8, transform=bottom)
        return
    value, (colour, hatch) = row[key] / scale, STYLES[name]
    axis.bar(x, value, 0.26, color=colour, hatch=hatch, edgecolor="white", label=name if label else None)
    axis.text(x, value, f"{value:.2g}" if value < 10 else f"{value:.0f}", ha="center", va="bottom", fontsize=8)


SUITE = Suite(
    "docs/benchmarks.md",
    {
        "kernel_share": kernel_share,
        "windows": windows,
        "growth": growth,
        "peers": peers,
        "memory": memory,
        "overhead": overhead,
    },
    report,
    options={"rounds": "3"},
    long_options={"rounds": "5"},
)
