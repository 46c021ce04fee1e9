"""Rings of local processes: speed-up against its ceiling and other rings, memory by ring size, bytes sent, error."""

from __future__ import annotations

import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ringspan as rs
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
from ringspan.layout import LayoutName
from ringspan.oracle import dense_attention
from ringspan.ring.recorder import Recorder
from ringspan.runtime.device import Cpu
from ringspan.runtime.launch import run_local_ranks
from ringspan.tools import peers
from ringspan.tools.bench.share import pattern_up_to
from ringspan.tools.bench.trials import RankStopwatch, TurnTimer
from ringspan.tools.measure import tcp_bytes_sent

PATTERN = rs.Dilated((2048, 8192, 32768), (1, 4, 16))
WINDOW = rs.Window(1023)
LAYOUTS: tuple[LayoutName, ...] = ("contiguous", "zigzag")
RING_SIZES = (1, 2, 4, 8)
WIRE_RANKS = 4
SPEED_TEXT = """\
One thread per rank, calls timed in turns, the slower rank counts. The ceiling is 2 t1 / t2, where t1 is the time of one
process that computes the whole sequence alone, and t2 that of two processes that each compute the whole sequence at the
same time without communication: caches and memory bandwidth keep it below 2. Times are medians. Each ratio is given as
the median of the ratios of single rounds, in which a drift of the machine cancels, and as the ratio of the medians. The
spread is that of single rounds. Rounds: {rounds}. Required: at least 0.95 of the ceiling, and 1.8 x."""
PEER_TEXT = """\
Plain attention on the same two ranks, in the same rounds: time relative to ringspan's (median of ratios, ratio of
medians). ring-attention-pytorch is called with its default bucket size (1024), and with the fastest one on this machine
(512, "tuned"). Required: at least 0.97 x for torch's ring, at least 2.5 x for ring-attention-pytorch, and 5 x if
causal."""
MEMORY_TEXT = """\
Fresh processes, 8 heads of 64, fp32, causal, forward and backward. Each rank creates only its own rows. The peak growth
of a rank is fitted as a + b / k over the ring sizes k. Required: a at most 64 MiB, b within 10 % of the growth at
k = 1. A ring of one has no parcels, so the fit excludes them where they are large (`Full`); they also fall as 1 / k."""


@dataclass(frozen=True)
class SpeedCase:
    """A pattern at a length, causal or not. Other rings support plain attention only."""

    name: str
    pattern: rs.Pattern
    n: int
    causal: bool


def speed(run: Measuring) -> list[dict[str, Any]]:
    n, full = run.sized((2048, 1024), (32768, 8192), (32768, 8192))
    dilated = run.sized((False, True), (True,), (False, True))
    cases = [SpeedCase("dilated", pattern_up_to(), n, causal) for causal in dilated]
    cases += [SpeedCase("full", rs.Full(), full, causal) for causal in (False, True)]
    cases.append(SpeedCase("window", WINDOW, n, causal=True))
    rounds = 1 if run.size == "quick" else int(run.options["rounds"])
    rows = []
    for case in cases:
        run.announce(f"{case.name}, {case.n:,} tokens, {'causal' if case.causal else 'not causal'}")
        found = run_local_ranks(2, measure_speed, case, rounds, timeout_seconds=3600)[0]
        rows += [
            dict(name=case.name, n=case.n, causal=case.causal, mode=mode, seconds=times)
            for mode, times in found.items()
        ]
    return rows


def measure_speed(case: SpeedCase, rounds: int) -> dict[str, dict[str, list[float]]]:
    """On each of two ranks: seconds of every way to compute the case, by pass."""
    ring = rs.Ring(layout="zigzag" if case.causal and case.pattern != WINDOW else "contiguous")
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, case.n, HEADS, HEAD_DIM, generator=generator, requires_grad=True) for _ in range(3)]
    mine = [ring.split_sequence(x.detach()).clone().requires_grad_() for x in whole]
    attend = partial(rs.attention, pattern=case.pattern, causal=case.causal)
    ways: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
        "alone": (attend, whole),
        "two alone": (attend, whole),
        "ring": (partial(attend, ring=ring), mine),
    }
    if isinstance(case.pattern, rs.Full):
        options: dict[str, Any] = dict(causal=case.causal, group=dist.group.WORLD)
        ways["torch"] = (partial(peers.torch_ring, **options), mine)
        if importlib.util.find_spec("ring_attention_pytorch"):
            # Striped if causal, which balances its work.
            other = partial(peers.ring_attention_pytorch, striped=case.causal, **options)
            ways["ring-attention-pytorch"] = (partial(other, bucket_size=1024), mine)
            ways["the same, tuned"] = (partial(other, bucket_size=512), mine)
    found = {}
    for mode in PASSES:
        calls = {name: _call(mode, *way) for name, way in ways.items()}
        if dist.get_rank():
            calls["alone"] = lambda: None
        found[mode] = TurnTimer(RankStopwatch).in_turns(calls, rounds)
    return found


def _call(mode: str, attend: Callable[..., Tensor], tensors: list[Tensor]) -> Callable[[], object]:
    def forward() -> object:
        with torch.no_grad():
            return attend(*tensors)

    def both() -> object:
        out = attend(*tensors)
        return torch.autograd.grad(out, tensors, out.detach())

    return forward if mode == "forward" else both


def memory(run: Measuring) -> list[dict[str, Any]]:
    dilated, full = run.sized((8192, 2048), (131072, 16384), (131072, 16384))
    cases = {"dilated": (PATTERN, dilated), "full": (rs.Full(), full)}
    rows = []
    for name, (pattern, n) in cases.items():
        for size in RING_SIZES:
            run.announce(f"{name}, {size} ranks")
            found = run_local_ranks(size, measure_memory, pattern, n, timeout_seconds=1800)
            peaks, parcels = zip(*found, strict=True)
            rows.append(dict(name=name, n=n, ring_size=size, peak_bytes=peaks, parcel_bytes=parcels))
    return rows


def measure_memory(pattern: rs.Pattern, n: int) -> tuple[int, int]:
    """Peak growth of this rank and the peak of its parcels: its own rows, forward and backward, causal."""
    ring = rs.Ring(min_size=1)
    _forward_and_backward(ring, pattern, 64 * ring.size)  # loads libraries, starts threads and connections
    ring.reset_counters()
    _, growth = Cpu().peak_growth(lambda: _forward_and_backward(ring, pattern, n))
    return growth, ring.counters.peak_parcel_bytes


def _forward_and_backward(ring: rs.Ring, pattern: rs.Pattern, n: int) -> None:
    rows = ring.layout_of(n).rows_of(ring.rank)
    tensors = [torch.randn(1, rows, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3)]
    out = rs.attention(*tensors, pattern=pattern, causal=True, ring=ring, seq_len=n)
    torch.autograd.grad(out, tensors, torch.ones_like(out))


def sent_bytes(run: Measuring) -> dict[str, Any]:
    n = run.sized(4096, 32768, 32768)
    rows = run_local_ranks(WIRE_RANKS, measure_bytes, n, timeout_seconds=600)[0]
    plain = n * (WIRE_RANKS - 1) * 2 * HEADS * HEAD_DIM * 4  # every shard visits all other ranks, undilated
    return dict(n=n, ranks=WIRE_RANKS, rows=rows, plain_ring=plain, all_gather=plain)


def measure_bytes(n: int) -> list[dict[str, Any]]:
    """For each pattern and layout: bytes sent by all ranks as planned, as counted, and by their TCP sockets."""
    rows = []
    for name, pattern in (("dilated", PATTERN), ("window", WINDOW)):
        for layout, causal in product(LAYOUTS, (False, True)):
            ring = rs.Ring(layout=layout)
            held = ring.layout_of(n).rows_of(ring.rank)
            tensors = [torch.randn(1, held, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3)]
            plan = rs.plan(
                pattern, n, ring_size=ring.size, layout=ring.layout, causal=causal, heads=HEADS, head_dim=HEAD_DIM
            )
            row: dict[str, Any] = dict(name=name, layout=layout, causal=causal)
            for direction in ("forward", "backward"):
                ring.reset_counters()
                dist.barrier()
                before = tcp_bytes_sent()
                if direction == "forward":
                    out = rs.attention(*tensors, pattern=pattern, causal=causal, ring=ring, seq_len=n)
                else:
                    torch.autograd.grad(out, tensors, torch.ones_like(out))
                dist.barrier()
                sent = torch.tensor([ring.counters.bytes_sent, tcp_bytes_sent() - before])
                dist.all_reduce(sent)
                counted, wire = sent.tolist()
                planned = sum(plan.bytes_sent(rank, backward=direction == "backward") for rank in range(ring.size))
                row[direction] = dict(planned=planned, counted=counted, wire=wire)
            rows.append(row)
    return rows


def trace(run: Measuring) -> list[dict[str, Any]]:
    """A ring of two that is traced and one that is not, in turns."""
    lengths, rounds = run.sized((1024,), (1024, 4096), (1024, 32768)), run.sized(2, 15, 50)
    rows = []
    for n in lengths:
        run.announce(f"{n:,} tokens")
        rows += run_local_ranks(2, measure_trace, n, rounds, str(run.folder / "trace.json"), timeout_seconds=1800)[0]
    return rows


def measure_trace(n: int, rounds: int, path: str) -> list[dict[str, Any]]:
    """Seconds of a call without and with a trace, by pass, and the spans of rank 0 in each traced call."""
    rings = {"off": rs.Ring(), "on": rs.Ring()}
    rows = rings["off"].layout_of(n).rows_of(dist.get_rank())
    tensors = [torch.randn(1, rows, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3)]
    repeats = max(1, 4096 // n)
    found = []
    for mode in PASSES:
        attend = {
            name: partial(rs.attention, pattern=pattern_up_to(), causal=True, ring=ring, seq_len=n)
            for name, ring in rings.items()
        }
        calls = {name: _repeated(_call(mode, each, tensors), repeats) for name, each in attend.items()}
        with rings["on"].trace(path):
            times = TurnTimer(RankStopwatch).in_turns(calls, rounds)
        dist.barrier()
        events = json.loads(Path(path).read_text())["traceEvents"]
        spans = sum(event["ph"] == "X" and event["pid"] == 0 for event in events) / (rounds + 1) / repeats
        found.append(dict(n=n, mode=mode, repeats=repeats, seconds=times, spans=spans, span_seconds=_span_seconds()))
    return found


def _span_seconds(count: int = 10_000) -> float:
    """The time to record the span of a tile."""
    (tile, *_) = rs.plan(rs.Full(), 8).rank(0).tiles
    recorder = Recorder()
    start = time.perf_counter()
    for _ in recorder.timed([tile] * count, 0):
        pass
    return (time.perf_counter() - start) / count


def _repeated(call: Callable[[], object], repeats: int) -> Callable[[], object]:
    def calls() -> object:
        for _ in range(repeats):
            call()
        return None

    return calls


def error(run: Measuring) -> list[dict[str, Any]]:
    """Relative error of output and gradients on simulated rings of 1 to 8 ranks, in fp32 and bf16."""
    rows = []
    pattern = rs.Dilated((64, 1024), (1, 4))
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(1, 1024, 4, 64, generator=generator).to(dtype) for _ in range(3)]
        exact = [x.double().requires_grad_() for x in inputs]
        out, _ = dense_attention(*exact, pattern=pattern, causal=True)
        right = [out, *torch.autograd.grad(out.square().sum(), exact)]
        for size in range(1, 9):
            low = [x.clone().requires_grad_() for x in inputs]
            out = rs.attention(*low, pattern=pattern, causal=True, ring=rs.SimulatedRing(size))
            found = [out, *torch.autograd.grad(out.float().square().sum(), low)]
            errors = [((x.double() - y).norm() / y.norm()).item() for x, y in zip(found, right, strict=True)]
            rows.append(dict(dtype=str(dtype), ring_size=size, output=errors[0], gradients=max(errors[1:])))
    return rows


def report(results: Results) -> Page:
    fits = {name: fit([r for r in results["memory"] if r["name"] == name]) for name in ("dilated", "full")}
    sentence = (
        "Speed, memory, traffic and error of rings of local processes (gloo), compared with their ceilings, with the "
        "plan, and with other rings."
    )
    return Page(
        "The ring, measured",
        sentence,
        "python -m benchmarks ring",
        f"Machine: {results.machine}",
        [
            memory_and_error_picture(results, fits),
            speed_table(results["speed"]),
            peer_table(results["speed"]),
            memory_table(results["memory"], fits["dilated"]),
            bytes_table(results["bytes"]),
            error_table(results["error"]),
            trace_table(results["trace"]),
        ],
    )


def speed_table(rows: list[dict[str, Any]]) -> Table:
    cells: Rows = [["case", "pass", "alone", "ring of 2", "speed-up", "ceiling", "of the ceiling", "spread"]]
    for row in rows:
        alone, two, ring = (row["seconds"][name] for name in ("alone", "two alone", "ring"))
        twice_ring = [2 * seconds for seconds in ring]
        cells.append(
            [
                f"{row['name']}, {row['n']:,}{', causal' if row['causal'] else ''}",
                PASSES[row["mode"]],
                f"{statistics.median(alone):.2f} s",
                f"{statistics.median(ring):.2f} s",
                f"{_two_ratios(alone, ring)} x",
                f"{_two_ratios([2 * seconds for seconds in alone], two)} x",
                _two_ratios(two, twice_ring),
                both_ratios(two, twice_ring)[2],
            ]
        )
    return Table("Speed: two ranks against one", cells, SPEED_TEXT.format(rounds=len(rows[0]["seconds"]["ring"])))


def _two_ratios(over: list[float], under: list[float]) -> str:
    return ", ".join(both_ratios(over, under, digits=2)[:2])


def peer_table(rows: list[dict[str, Any]]) -> Table:
    names = {"torch": "torch's ring", "ring-attention-pytorch": "ring-attention-pytorch", "the same, tuned": "tuned"}
    cells: Rows = [["n", "causal", "pass", "ringspan", *names.values()]]
    for row in rows:
        times = row["seconds"]
        if "torch" in times:
            others = [
                f"{statistics.median(times[name]):.2f} s: {_two_ratios(times[name], times['ring'])} x"
                if name in times
                else "not installed"
                for name in names
            ]
            ours = f"{statistics.median(times['ring']):.2f} s"
            cells.append([str(row["n"]), yes(row["causal"]), PASSES[row["mode"]], ours, *others])
    return Table("Other rings", cells, PEER_TEXT)


def fit(rows: list[dict[str, Any]], without_parcels: bool = False) -> tuple[float, float, float]:
    """Least-squares fit a + b / k of the largest peak of each ring size k. Returns a, b, and the growth at k = 1."""
    xs = [1 / row["ring_size"] for row in rows]
    ys = []
    for row in rows:
        parcels = row["parcel_bytes"] if without_parcels else [0] * row["ring_size"]
        ys.append(float(max(peak - held for peak, held in zip(row["peak_bytes"], parcels, strict=True))))
    slope, intercept = statistics.linear_regression(xs, ys)
    return intercept, slope, ys[xs.index(1.0)]


def _fit_text(name: str, a: float, b: float, one: float) -> str:
    return f"{name}: a = {mebibytes(a)}, b = {mebibytes(b)} ({b / one:.2f} of the growth at k = 1)"


def memory_table(rows: list[dict[str, Any]], dilated: tuple[float, float, float]) -> Table:
    cells: Rows = [
        ["pattern", "n", "ranks", "largest peak", "smallest peak", "of the largest, parcels", "parcels x ranks"]
    ]
    for row in rows:
        largest = max(range(row["ring_size"]), key=lambda rank: row["peak_bytes"][rank])
        parcels = row["parcel_bytes"][largest]
        sizes = (max(row["peak_bytes"]), min(row["peak_bytes"]), parcels, parcels * row["ring_size"])
        cells.append([row["name"], str(row["n"]), str(row["ring_size"]), *map(mebibytes, sizes)])
    full = [row for row in rows if row["name"] == "full"]
    own = fit(full, without_parcels=True)
    # At this length the workspace is 10 % of the growth at k = 1, so b is also compared with the plan's rows.
    plan = rs.plan(rs.Full(), full[0]["n"], causal=True, heads=HEADS, head_dim=HEAD_DIM)
    planned = plan.memory(0, backward=True).rows
    against_plan = f"{own[1] / planned:.2f} of the {mebibytes(planned)} that the plan gives for all rows"
    text = (
        f"{MEMORY_TEXT}\n\n- {_fit_text('dilated', *dilated)}\n"
        f"- {_fit_text('full, without parcels', *own)}; {against_plan}"
    )
    return Table("Memory by ring size", cells, text)


def bytes_table(found: dict[str, Any]) -> Table:
    cells: Rows = [["case", "pass", "planned", "counted by the ranks", "TCP sockets", "of a plain ring"]]
    for row in found["rows"]:
        for direction, times in (("forward", 1), ("backward", 2)):
            sizes = row[direction]
            over = f" ({sizes['wire'] / sizes['counted'] - 1:+.1%})" if sizes["counted"] else ""
            counts = [f"{sizes['planned']:,}", f"{sizes['counted']:,}", f"{sizes['wire']:,}{over}"]
            share = f"{sizes['planned'] / (times * found['plain_ring']):.1%}"
            case = f"{row['name']}, {row['layout']}{', causal' if row['causal'] else ''}"
            cells.append([case, direction, *counts, share])
    for name, key in (("plain ring of K and V", "plain_ring"), ("all-gather of K and V", "all_gather")):
        cells.append([name, "forward", f"{found[key]:,}", "", "", "100.0%"])
    halo = (found["ranks"] - 1) * WINDOW.left * 2 * HEADS * HEAD_DIM * 4
    text = (
        f"Dilated: segments (2048, 8192, 32768), rates (1, 4, 16). Window: `rs.Window({WINDOW.left})`. "
        f"n = {found['n']}, {found['ranks']} ranks, {HEADS} heads of {HEAD_DIM}, fp32: bytes sent by all ranks "
        f"together. The halo of the window is {WINDOW.left:,} rows of K and V at each of {found['ranks'] - 1} borders "
        f"of contiguous shards: {halo:,} bytes. The TCP sockets also count the headers of "
        "messages and two barriers."
    )
    return Table("Bytes sent", cells, text)


def error_table(rows: list[dict[str, Any]]) -> Table:
    cells: Rows = [["dtype", "ranks", "output", "gradients"]]
    cells += [
        [r["dtype"].removeprefix("torch."), str(r["ring_size"]), f"{r['output']:.2e}", f"{r['gradients']:.2e}"]
        for r in rows
    ]
    text = "Relative error (2-norm) against the dense fp64 oracle, 1,024 tokens, simulated rings."
    return Table("Error by ring size", cells, text)


def trace_table(rows: list[dict[str, Any]]) -> Table:
    cells: Rows = [
        [
            "n",
            "pass",
            "without a trace",
            "spans of a rank",
            "a span takes",
            "all spans",
            "traced, over not traced",
            "",
            "spread",
        ]
    ]
    for row in rows:
        off, on = row["seconds"]["off"], row["seconds"]["on"]
        milliseconds = f"{statistics.median(off) / row['repeats'] * 1e3:.1f} ms"
        share = row["spans"] * row["span_seconds"] * row["repeats"] / statistics.median(off)
        recorded = [f"{row['spans']:.0f}", f"{row['span_seconds'] * 1e9:.0f} ns", f"{share:.2%}"]
        cells.append([f"{row['n']:,}", PASSES[row["mode"]], milliseconds, *recorded, *both_ratios(on, off)])
    text = (
        "A call on a ring of two while it is traced, over the same call while it is not, in turns: the median of the "
        "ratios of single rounds, the ratio of the medians, and the spread. All spans: their number times the time to "
        f"record one, as a share of the call. Rounds: {len(rows[0]['seconds']['on'])}, each of as many calls as make "
        "4,096 tokens."
    )
    return Table("Cost of a trace", cells, text)


def memory_and_error_picture(results: Results, fits: dict[str, tuple[float, float, float]]) -> Picture:
    """Left: peak memory of a rank by ring size, with the fit. Right: error by ring size."""
    figure, (left, right) = empty_figure(1, 2, (11, 4.2))
    curve = [1 + i * 0.1 for i in range(71)]
    for name, colour, marker in (("dilated", "#0072B2", "o"), ("full", "#E69F00", "s")):
        rows = [r for r in results["memory"] if r["name"] == name]
        sizes, peaks = [r["ring_size"] for r in rows], [max(r["peak_bytes"]) / 2**20 for r in rows]
        left.plot(sizes, peaks, marker, color=colour, label=f"{name}, n = {rows[0]['n']:,}")
        a, b, _ = (x / 2**20 for x in fits[name])
        left.plot(curve, [a + b / k for k in curve], color=colour, linewidth=1, label=f"{a:.0f} + {b:,.0f} / k MiB")
    left.set(xlabel="ranks k", ylabel="peak memory of a rank (MiB, log scale)", title="Memory falls as 1/k")
    left.set_yscale("log")
    left.set_xticks(RING_SIZES)
    left.legend(frameon=False)
    for dtype, colour in (("torch.float32", "#0072B2"), ("torch.bfloat16", "#E69F00")):
        rows = [r for r in results["error"] if r["dtype"] == dtype]
        sizes = [r["ring_size"] for r in rows]
        for key, style in (("output", "-o"), ("gradients", "--s")):
            label = f"{dtype.removeprefix('torch.')}, {key}"
            right.plot(sizes, [r[key] for r in rows], style, color=colour, markersize=4, label=label)
    right.set(xlabel="ranks k", ylabel="relative error (log scale)", title="The error does not grow with the ring")
    right.set_yscale("log")
    right.legend(frameon=False, fontsize=8)
    text = f"8 heads of 64, fp32, causal, forward and backward; {results.machines['memory']}"
    figure.supxlabel(text, fontsize=8, color="#555555")
    return Picture("ring_memory", figure, "Peak memory of a rank (left) and relative error (right) by ring size.")


SUITE = Suite(
    "docs/ring_results.md",
    {"speed": speed, "memory": memory, "bytes": sent_bytes, "error": error, "trace": trace},
    report,
    options={"rounds": "3"},
    long_options={"rounds": "7"},
)
