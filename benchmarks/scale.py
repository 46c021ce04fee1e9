"""Growth of time and memory with length and ring size, rehearsals against reality, and limits of real hardware.

Every length and every ring is measured by the command that a user would run, `ringspan stream` or `ringspan rehearse`,
in a process of its own; short lengths are measured once more in one warm process (`benchmarks.warm`).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import ringspan as rs
from benchmarks.hardware_limits import communication, hardware_limits, nodes
from benchmarks.scale_report import report
from benchmarks.suite import Measuring, Suite, run_python
from ringspan.planning.timing import ASSUMED_RATES
from ringspan.runtime.device import Cpu
from ringspan.runtime.launch import run_local_ranks
from ringspan.tools.demonstration import steady_seconds_per_token, whole_sequence_pattern
from ringspan.tools.rehearse import Network, rehearse_ring

BUDGET = "8G"
ROWS_PER_RANK = 2**16
# Powers of two from the first one on. Lengths take turns, so that a drift of the machine affects all of them.
QUICK_LENGTHS, LENGTHS, LONG_LENGTHS = range(13, 16), range(13, 24, 2), range(13, 29)
REPEATED_BELOW, LONG_REPEATED_BELOW, REPEATS = 2**22, 2**26, 3
# Tokens and head dimension: below and above 32 MiB per tensor, where glibc stops retaining freed memory.
REALITY_SIZES = ((2**15, 64), (2**17, 128))
REALITY_HEADS, REALITY_REPEATS = 4, 3


def billion(run: Measuring) -> dict[str, Any]:
    """The longest run and its log: of the folder in the option ``run``, or measured now (about half an hour)."""
    folder = Path(run.options["run"] or run.folder)
    if not run.options["run"]:
        _command("stream", "--tokens", run.sized("64k", "1G", "1G"), "--budget", BUDGET, "--out", str(folder))
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    found = json.loads((folder / "result.json").read_text())
    return {"run": {**found, "steady_seconds_per_token": steady_seconds_per_token(log)}, "log": log}


def growth(run: Measuring) -> None:
    """Streamed lengths. An item is a length and the number of the repetition."""

    def measure(name: str) -> dict[str, Any]:
        folder = run.folder / name.replace(" ", "-")
        return _command("stream", "--tokens", name.split(maxsplit=1)[0], "--budget", BUDGET, "--out", str(folder))

    repeated_below = run.sized(LONG_REPEATED_BELOW, REPEATED_BELOW, LONG_REPEATED_BELOW)
    run.each(_lengths(run.sized(QUICK_LENGTHS, LENGTHS, LONG_LENGTHS), repeated_below), measure)


def _lengths(exponents: range, repeated_below: int) -> tuple[str, ...]:
    turns = {2**i: REPEATS if 2**i < repeated_below else 1 for i in exponents}
    return tuple(f"{length} {turn}" for turn in range(REPEATS) for length in turns if turn < turns[length])


def warm(run: Measuring) -> dict[str, Any]:
    """Short lengths in turns, in one process that already has its memory: seconds per token by length."""
    found: dict[str, Any] = json.loads(run_python("-m", "benchmarks.warm", run.size))
    return found


def rings(run: Measuring) -> None:
    """Rings with the same number of rows on every rank: the work of a rank should not depend on the ring size."""

    def measure(name: str) -> dict[str, Any]:
        tokens = int(name) * ROWS_PER_RANK
        sizes = ("--tokens", str(tokens), "--ranks", name, "--heads", "2", "--head-dim", "32")
        pattern = whole_sequence_pattern(tokens).text
        return _command("rehearse", *sizes, "--pattern", pattern, "--layout", "contiguous", "--backward")

    sizes = ("1", "10", "100", "1000", "10000")
    run.each(run.sized(sizes[:3], sizes[:4], sizes), measure)


def reality(run: Measuring) -> None:
    run.each(run.sized(("2",), ("2", "4"), ("2", "4", "8")), lambda name: measure_reality(int(name)))


def planned(
    measure: Callable[[int], dict[str, Any]], names: tuple[str, ...], quick: tuple[str, ...]
) -> Callable[[Measuring], None]:
    """A part that only plans rings of these sizes."""
    return lambda run: run.each(run.sized(quick, names, names), lambda name: measure(int(name)))


def _command(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run_python("-m", "ringspan", *arguments, "--json", threads=None))
    return found


def pattern_of(tokens: int) -> rs.Dilated:
    """Segments of 256, and the whole sequence at a rate of 32."""
    return rs.Dilated((256, tokens), (1, 32))


def measure_reality(ranks: int) -> dict[str, Any]:
    """Bytes sent and memory growth of the first and the last rank, forward and backward: real and rehearsed."""
    return {"ranks": ranks, "lines": [line for size in REALITY_SIZES for line in _lines(ranks, *size)]}


def _lines(ranks: int, tokens: int, head_dim: int) -> Iterator[dict[str, Any]]:
    """Medians over the repetitions: the C library sometimes retains a freed buffer."""
    repeated = [list(_measured(ranks, tokens, head_dim)) for _ in range(REALITY_REPEATS)]
    for same_rank in zip(*repeated, strict=True):
        growths = {name: statistics.median(x[name] for x in same_rank) for name in ("real_growth", "rehearsed_growth")}
        yield same_rank[0] | growths


def _measured(ranks: int, tokens: int, head_dim: int) -> Iterator[dict[str, Any]]:
    real = run_local_ranks(ranks, _real_rank, tokens, head_dim)
    plan = rs.plan(
        pattern_of(tokens),
        tokens,
        ring_size=ranks,
        layout="zigzag",
        causal=True,
        heads=REALITY_HEADS,
        head_dim=head_dim,
    )
    chosen = {"first": 0, "last": ranks - 1}
    rehearsed = rehearse_ring(
        plan, chosen, Network(ASSUMED_RATES), torch.float32, backward=True, threads=1, timeout_seconds=600
    )
    for rank in rehearsed.ranks.values():
        assert rank.backward is not None
        yield {
            "tokens": tokens,
            "head_dim": head_dim,
            "rank": rank.rank,
            "real_bytes": real[rank.rank][0],
            "rehearsed_bytes": rank.forward.bytes_sent + rank.backward.bytes_sent,
            "real_growth": real[rank.rank][1],
            "rehearsed_growth": rank.peak_growth,
        }


def _real_rank(tokens: int, head_dim: int) -> tuple[int, int]:
    ring = rs.Ring(layout="zigzag")
    rows = ring.layout_of(tokens).rows_of(ring.rank)
    torch.manual_seed(ring.rank)  # every process starts with the same seed

    def step() -> None:
        q, k, v = (torch.randn(1, rows, REALITY_HEADS, head_dim).requires_grad_() for _ in range(3))
        out = rs.attention(q, k, v, pattern=pattern_of(tokens), causal=True, ring=ring)
        out.backward(torch.ones_like(out))

    rs.attention(*torch.ones(3, 1, 4, 1, head_dim), pattern=rs.Full())  # one-time setup is not counted
    growth = Cpu().peak_growth(step)[1]
    return ring.counters.bytes_sent, growth


SUITE = Suite(
    "docs/scale.md",
    {
        "billion": billion,
        "growth": growth,
        "warm": warm,
        "rings": rings,
        "reality": reality,
        "communication": planned(communication, ("8", "64", "1024"), ("8", "64")),
        # Every rank is planned, six times over: 1,024 of them take too long.
        "nodes": planned(nodes, ("8", "16", "64"), ("8",)),
        "walls": planned(hardware_limits, ("8", "64", "1024"), ("8", "64")),
    },
    report,
    options={"run": ""},
    long_parts=("billion",),
)
