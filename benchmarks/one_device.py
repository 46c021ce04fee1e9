"""One device: ringspan beside the bare kernel and beside what torch offers, in time and in memory.

    make bench                                          # everything, about half an hour
    python -m benchmarks.one_device --quick             # small lengths, a minute: does it run?
    python -m benchmarks.one_device --only kernel-share # one part

Writes benchmarks/results/one_device.json, docs/figures/one_device.png and docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

import ringspan as rs
from benchmarks import peers
from benchmarks.machine import Stopwatch, describe_machine, one_line
from benchmarks.memory import in_fresh_process
from benchmarks.one_device_report import write_report

ROOT = Path(__file__).parent.parent
PARTS = ("kernel-share", "peers", "memory")
DISTURBED_CORES = 0.10  # a trial during which others kept more than this busy is repeated
MOST_REPEATS = 3


class BareKernel:
    """The flash kernel on contiguous tiles of the same shapes: what remains if everything else were free."""

    name = "bare"

    def __init__(self, n: int, pattern: rs.Dilated, causal: bool) -> None:
        self.kernel, self.causal = rs.kernels.get("cpu_flash"), causal
        self.tiles = []
        for branch in pattern.branches(n):
            width = min(n, branch.segment_length)
            shape = (n // width, peers.HEADS, width // branch.rate, peers.DIM)
            self.tiles.append([torch.randn(shape) for _ in range(3)])

    def forward(self) -> list[tuple[Tensor, Tensor]]:
        return [self.kernel.forward(q, k, v, self.causal, peers.DIM**-0.5) for q, k, v in self.tiles]

    def both(self) -> None:
        for (q, k, v), (out, lse) in zip(self.tiles, self.forward(), strict=True):
            self.kernel.backward(out, q, k, v, out, lse, self.causal, peers.DIM**-0.5, (True, True, True))


class Ringspan:
    """`rs.attention`, as a user calls it."""

    name = "ours"

    def __init__(self, n: int, pattern: rs.Dilated, causal: bool) -> None:
        self.tensors = [x.requires_grad_() for x in peers.qkv(n)]
        self.grad = torch.randn(1, n, peers.HEADS, peers.DIM)
        self.options: dict[str, Any] = dict(pattern=pattern, causal=causal)

    def forward(self) -> None:
        with torch.no_grad():
            rs.attention(*self.tensors, **self.options)

    def both(self) -> None:
        torch.autograd.grad(rs.attention(*self.tensors, **self.options), self.tensors, self.grad)


def kernel_share(lengths: list[int], trials: int, progress: Progress) -> list[dict[str, Any]]:
    """Times of both, trial by trial in turn; the share is bare time over ours."""
    rows = []

    def trials_of(n: int) -> dict[str, int]:
        """More of what is short; lengths in between are there for the growth only."""
        if n in lengths[1:-1]:
            return {"forward": 2, "both": 1}
        usual = trials if n == lengths[0] else max(2, trials - 2)
        return {"forward": 2 * usual, "both": usual}

    task = progress.add_task("share of the bare kernel", total=2 * sum(sum(trials_of(n).values()) for n in lengths))
    for n in lengths:
        for causal in (False, True):
            sides = {side.name: side(n, peers.pattern_up_to(), causal) for side in (Ringspan, BareKernel)}
            for mode, rounds in trials_of(n).items():
                calls = {name: getattr(side, mode) for name, side in sides.items()}
                rows.append(
                    dict(n=n, causal=causal, mode=mode, **interleaved(calls, rounds, progress, task, n == lengths[0]))
                )
            del sides, calls
    return rows


def interleaved(
    calls: dict[str, Callable[[], Any]], trials: int, progress: Progress, task: Any, warm_up: bool
) -> dict[str, list[float]]:
    """Seconds of each call, in turn: a round to warm up if asked for, then ``trials`` rounds."""
    times: dict[str, list[float]] = {name: [] for name in (*calls, "foreign_cores")}
    for trial in range(0 if warm_up else 1, trials + 1):
        round_times: dict[str, float] = {}
        foreign = 0.0
        for _ in range(MOST_REPEATS):
            round_times, foreign = {}, 0.0
            for name, call in calls.items():
                with Stopwatch() as watch:
                    call()
                round_times[name], foreign = watch.seconds, max(foreign, watch.foreign_cores)
            if trial == 0 or foreign <= DISTURBED_CORES:
                break
        if trial:
            for name, seconds in round_times.items():
                times[name].append(seconds)
            times["foreign_cores"].append(foreign)
            progress.advance(task)
    return times


def against_peers(lengths: list[int], trials: int, progress: Progress) -> list[dict[str, Any]]:
    """Each implementation in a process of its own: time, peak memory, and a checksum of what it computed."""
    tasks = {"ringspan": peers.ringspan_task, "SDPA with a mask": peers.sdpa_task, "FlexAttention": peers.flex_task}
    rows = []
    bar = progress.add_task("beside torch's own", total=len(lengths) * 2 * len(tasks))
    for n in lengths:
        for causal in (False, True):
            for name, task in tasks.items():
                found = in_fresh_process(task, n, causal, trials if n == lengths[0] else 1)
                rows.append(dict(n=n, causal=causal, name=name, **vars(found)))
                progress.advance(bar)
    return rows


def forward_memory(n: int, progress: Progress) -> list[dict[str, Any]]:
    """Peak growth of the forward pass beyond its results."""
    bar = progress.add_task("memory of the forward", total=2)
    results = n * peers.HEADS * (peers.DIM + 1) * 4
    rows = []
    for causal in (False, True):
        found = in_fresh_process(peers.memory_task, n, causal)
        rows.append(dict(n=n, causal=causal, beyond_results_bytes=found.peak_bytes - results, failure=found.failure))
        progress.advance(bar)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small lengths and two trials; nothing is written")
    parser.add_argument("--only", choices=PARTS, help="run one part; the others keep their last results")
    parser.add_argument(
        "--trials",
        type=int,
        default=5,
        help="rounds of the interleaved timings (default: 5; two fewer at long lengths)",
    )
    arguments = parser.parse_args()
    lengths, peer_lengths, trials = [32768, 65536, 131072], [8192, 32768], arguments.trials
    if arguments.quick:
        lengths, peer_lengths, trials = [4096, 8192], [2048], 2

    stored = ROOT / "benchmarks/results/one_device.json"
    results: dict[str, Any] = json.loads(stored.read_text()) if arguments.only and stored.exists() else {}
    results["machine"] = describe_machine()
    console = Console()
    with Progress(console=console) as progress:
        if arguments.only in (None, "kernel-share"):
            results["kernel_share"] = kernel_share(lengths, trials, progress)
        if arguments.only in (None, "peers"):
            results["peers"] = against_peers(peer_lengths, 3, progress)
        if arguments.only in (None, "memory"):
            results["memory"] = forward_memory(lengths[-1], progress)
    if arguments.quick:
        console.print_json(json.dumps(results))
        return
    stored.parent.mkdir(exist_ok=True)
    stored.write_text(json.dumps(results, indent=1) + "\n")
    write_report(results, one_line(results["machine"]), ROOT, console)


if __name__ == "__main__":
    main()
