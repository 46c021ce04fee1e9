"""Plans that `rs.best_plan` chooses for two processes: predicted and measured times, with rates of the same run."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ringspan as rs
from benchmarks.documents import log_normal, one_long
from benchmarks.suite import HEAD_DIM, HEADS, Measuring, Page, Results, Rows, Suite, Table
from ringspan.planning.timing import BACKWARD_FLOPS, FORWARD_FLOPS
from ringspan.runtime.launch import run_local_ranks
from ringspan.tools.bench.trials import Call, RankStopwatch, TurnTimer, with_gradients
from ringspan.tools.fit_costs import judge_costs, measure_tiles, tile_shapes
from ringspan.tools.plan_report import exchange_messages

DEVICES = 2
ALLOWED = 1.05  # chosen over best measured
FULL, WINDOW = rs.Full(), rs.Window(511)
LONGNET = rs.Dilated((1024, 2048, 4096, 8192), (1, 2, 4, 8))
WIDE = rs.Dilated((2048, 8192, 32768), (1, 4, 16))
SUM = rs.Window(255) + rs.Dilated((4096, 16384), (8, 32))
QUICK_FACTOR = 8  # lengths are divided by this


@dataclass(frozen=True)
class Configuration:
    """One call to plan. ``documents`` gives the lengths of packed documents for a total."""

    name: str
    pattern: rs.Pattern
    n: int
    causal: bool = True
    batch: int = 1
    kv_heads: int = HEADS
    documents: Callable[[int], tuple[int, ...]] | None = None


CONFIGURATIONS = [
    Configuration("full", FULL, 2048),
    Configuration("full, not causal", FULL, 2048, causal=False),
    Configuration("full", FULL, 4096),
    Configuration("full, not causal", FULL, 4096, causal=False),
    Configuration("full", FULL, 6144),
    Configuration("full, 2 KV heads", FULL, 4096, kv_heads=2),
    Configuration("full, batch 2", FULL, 2048, batch=2),
    Configuration("full, batch 3", FULL, 2048, batch=3),
    Configuration("full, batch 4", FULL, 2048, batch=4),
    Configuration("LongNet, doubling", LONGNET, 8192),
    Configuration("LongNet, doubling, not causal", LONGNET, 8192, causal=False),
    Configuration("LongNet, doubling, batch 2", LONGNET, 4096, batch=2),
    Configuration("LongNet, 2 KV heads", WIDE, 8192, kv_heads=2),
    Configuration("LongNet", WIDE, 16384),
    Configuration("LongNet, not causal", WIDE, 8192, causal=False),
    Configuration("LongNet, batch 3", WIDE, 4096, batch=3),
    Configuration("window 511", WINDOW, 2048),
    Configuration("window 511", WINDOW, 8192),
    Configuration("window 511", WINDOW, 16384),
    Configuration("window 511 each way", rs.Window(511, 511), 8192, causal=False),
    Configuration("window + dilated", SUM, 8192),
    Configuration("window + dilated", SUM, 16384),
    Configuration("window + dilated, not causal", SUM, 8192, causal=False),
    Configuration("documents, median 1/16", FULL, 8192, documents=lambda n: log_normal(n // 16, n)),
    Configuration("documents, median 1/128", FULL, 16384, documents=lambda n: log_normal(n // 128, n)),
    Configuration("documents, one of half of the rows", FULL, 8192, documents=one_long),
    Configuration("documents, LongNet", LONGNET, 16384, documents=lambda n: log_normal(n // 16, n)),
    Configuration("documents, batch 3", FULL, 2048, batch=3, documents=lambda n: log_normal(n // 16, n)),
]
COLUMNS = ("one process", "two processes", "contiguous", "zigzag", "balanced", "head ranks")


def choices(run: Measuring) -> dict[str, Any]:
    """Rates of both processes at once, then every choice of every configuration, timed in turns."""
    factor = run.sized(QUICK_FACTOR, 1, 1)
    rounds = 1 if run.size == "quick" else int(run.options["rounds"])
    step = int(run.options["every"]) * run.sized(4, 1, 1)
    numbers = range(0, len(CONFIGURATIONS), step)
    return run_local_ranks(DEVICES, measure_choices, [*numbers], factor, rounds, timeout_seconds=7200)[0]


def measure_choices(numbers: list[int], factor: int, rounds: int) -> dict[str, Any]:
    rates = measure_rates(longest=2048 // factor)
    rows = []
    for number in numbers:
        one = replace(CONFIGURATIONS[number], n=CONFIGURATIONS[number].n // factor)
        lengths = one.documents(one.n) if one.documents else None
        found = rs.best_plan(
            one.pattern,
            one.n,
            devices=DEVICES,
            lengths=lengths,
            causal=one.causal,
            batch=one.batch,
            heads=HEADS,
            kv_heads=one.kv_heads,
            head_dim=HEAD_DIM,
            rates=rates,
        )
        calls = {column(choice): step(one, lengths, choice) for choice in found.ranked}
        seconds = TurnTimer(RankStopwatch).in_turns(calls, rounds)
        candidates = {column(choice): choice.time.total for choice in found.ranked}
        rows.append(
            dict(
                name=one.name,
                n=one.n,
                chosen=column(found.best),
                predicted=candidates,
                seconds=seconds,
                spent={column(choice): asdict(choice.time) for choice in found.ranked},
            )
        )
    return dict(rates=asdict(rates), rows=rows, rounds=rounds)


def measure_rates(longest: int) -> rs.DeviceRates:
    """What a process computes and sends while the other one does the same; the slower one counts."""
    link = exchange_messages()
    dist.barrier()
    tiles = judge_costs(measure_tiles(tile_shapes(longest), heads=HEADS, head_dim=HEAD_DIM), rs.TileCosts())
    flops = (FORWARD_FLOPS + BACKWARD_FLOPS) * HEAD_DIM / tiles.seconds_per_pair
    found = torch.tensor([flops, link.bandwidth, -link.latency, -link.copying], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    flops, bandwidth, latency, copying = found.tolist()
    return rs.DeviceRates(flops, bandwidth, -latency, copying=-copying)


def column(choice: rs.PlanChoice) -> str:
    """The column of the table in which a choice is."""
    if choice.ring_size == 1:
        return "one process" if choice.rings == 1 else "two processes"
    return "head ranks" if choice.head_ranks > 1 else str(choice.layout).split(" ")[0]


def step(one: Configuration, lengths: tuple[int, ...] | None, choice: rs.PlanChoice) -> Call:
    """A forward and a backward pass of this rank's part of a choice."""
    rank, rows, batch, ring = dist.get_rank(), one.n, one.batch, None
    options: dict[str, Any] = dict(pattern=one.pattern, causal=one.causal)
    if choice.ring_size > 1:
        ring = rs.Ring(layout=choice.layout)
        if choice.head_ranks > 1:
            mesh = init_device_mesh("cpu", (1, DEVICES), mesh_dim_names=("ring", "heads"))
            ring = rs.Ring(mesh, layout=choice.layout)
        options |= dict(ring=ring, seq_len=one.n)
        rows = ring.layout_of(one.n, lengths).rows_of(rank)
    elif choice.documents:
        every = (lengths or ()) * one.batch
        lengths = tuple(every[number] for number in choice.documents[rank])
        rows, batch = sum(lengths), 1
    else:
        batch = one.batch // choice.rings + (rank < one.batch % choice.rings)
        if rank >= choice.rings:
            return lambda: None
    if lengths is not None:
        options["lengths"] = torch.tensor(lengths)
    shapes = [(batch, rows, heads, HEAD_DIM) for heads in (HEADS, one.kv_heads, one.kv_heads)]
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    return with_gradients(tensors, torch.randn(shapes[0]), options)


def ratio(row: dict[str, Any]) -> float:
    """The measured time of the chosen plan over that of the fastest one."""
    medians = {name: statistics.median(seconds) for name, seconds in row["seconds"].items()}
    return medians[row["chosen"]] / min(medians.values())


def errors(rows: list[dict[str, Any]]) -> list[float]:
    """Predicted over measured, minus 1, of all candidates."""
    return [
        row["predicted"][name] / statistics.median(seconds) - 1
        for row in rows
        for name, seconds in row["seconds"].items()
    ]


def report(results: Results) -> Page:
    found = results["choices"]
    rows = found["rows"]
    good, off = sum(ratio(row) <= ALLOWED for row in rows), sorted(map(abs, errors(rows)))
    sentence = (
        f"What `rs.best_plan` chooses for two processes, and what its candidates take: in {good} of {len(rows)} "
        f"configurations the chosen plan takes at most 5 % longer than the fastest measured one, at worst "
        f"{max(map(ratio, rows)) - 1:.0%}. Predicted times differ from measured ones by {statistics.median(off):.0%} "
        f"(median), at most {off[-1]:.0%}."
    )
    return Page(
        "Plans, predicted and measured",
        sentence,
        "python -m benchmarks plans",
        f"Machine: {results.machine}",
        [choices_table(found)],
    )


def choices_table(found: dict[str, Any]) -> Table:
    cells: Rows = [["configuration", "rows", "chosen", *COLUMNS, "chosen over best", "spread"]]
    for row in found["rows"]:
        spreads = [(max(times) - min(times)) / statistics.median(times) for times in row["seconds"].values()]
        cells.append(
            [
                *(row["name"], f"{row['n']:,}", row["chosen"]),
                *(_cell(row, name) for name in COLUMNS),
                f"{ratio(row):.3f}",
                f"{max(spreads):.0%}",
            ]
        )
    rates = found["rates"]
    text = (
        f"Predicted / measured milliseconds of a forward and a backward pass, {HEADS} heads of {HEAD_DIM}, causal "
        f"if not stated otherwise: one process, two processes that divide batch or documents, and rings of two. One "
        f"thread per process, timed in turns, {found['rounds']} rounds, medians; the slower one counts. *Spread* is "
        "the largest range of a candidate's rounds over its median; smaller differences between candidates are noise. "
        f"Rates of this run: {rates['flops'] / 1e9:.1f} GFLOP/s (tiles, both processes at once), "
        f"{rates['bandwidth'] / 1e9:.2f} GB/s and {rates['latency'] * 1e6:.0f} µs (gloo), and "
        f"{rates['copying'] * 1e9:.2f} s of compute or packing for each GB sent or received."
    )
    return Table("Candidates", cells, text, terminal_columns=(0, 1, 2, 9))


def _cell(row: dict[str, Any], name: str) -> str:
    if name not in row["seconds"]:
        return "-"
    return f"{1e3 * row['predicted'][name]:.0f} / {1e3 * statistics.median(row['seconds'][name]):.0f}"


def broken(results: Results) -> str:
    late = [
        f"{row['name']}, {row['n']:,} rows: {ratio(row):.3f}"
        for row in results["choices"]["rows"]
        if ratio(row) > ALLOWED
    ]
    return f"chosen more than 5 % slower than the best: {'; '.join(late)}" if late else ""


SUITE = Suite(
    "docs/plans.md",
    {"choices": choices},
    report,
    broken=broken,
    options={"rounds": "3", "every": "1"},
    long_options={"rounds": "9"},
)
