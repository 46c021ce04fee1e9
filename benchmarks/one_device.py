"""One device: ringspan beside the bare kernel and beside what torch offers, in time and in memory.

    make bench                                          # everything, about half an hour
    python -m benchmarks.one_device --quick             # small lengths, a minute: does it run?
    python -m benchmarks.one_device --only kernel-share # one part

Writes benchmarks/results/one_device.json, docs/figures/one_device.png and docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

import ringspan as rs
from benchmarks import peers
from benchmarks.memory import in_fresh_process
from benchmarks.one_device_report import write_report
from ringspan.tools.measure import Stopwatch, describe_machine, one_line

ROOT = Path(__file__).parent.parent
PARTS = ("kernel-share", "growth", "peers", "memory")
GROWTH_TRIALS = 9  # single rounds scatter by a tenth: medians of a few are not enough for a bar of 2.1
DISTURBED_CORES = 0.10  # a trial during which others kept more than this busy is repeated
MOST_REPEATS = 3
SHORT_TURNS = 3  # turns of the shortest length in a round: short calls scatter more


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
    """Times of ours and of the bare kernel, which take turns, so that a machine that drifts, drifts for both."""
    rows = []
    task = progress.add_task("share of the bare kernel", total=2 * 2 * trials)
    for causal in (False, True):
        sides = {n: [side(n, peers.pattern_up_to(), causal) for side in (Ringspan, BareKernel)] for n in lengths}
        for mode in ("forward", "both"):
            times: dict[int, dict[str, list[float]]] = {
                n: {"ours": [], "bare": [], "foreign_cores": []} for n in lengths
            }
            warm_up(getattr(side, mode) for side in sides[lengths[0]])
            for trial in range(trials):
                for n in lengths:
                    for turn in range(SHORT_TURNS if n == lengths[0] else 1):
                        # Who comes first finds the caches of others: they take that in turn, too.
                        order = sides[n][:: -1 if (trial + turn) % 2 else 1]
                        for name, value in one_turn({side.name: getattr(side, mode) for side in order}).items():
                            times[n][name].append(value)
                progress.advance(task)
            rows += [dict(n=n, causal=causal, mode=mode, **found) for n, found in times.items()]
    return rows


def growth(lengths: list[int], trials: int, progress: Progress) -> list[dict[str, Any]]:
    """Times of ours at lengths that double, one after the other in every round, up and down in turn."""
    rows = []
    task = progress.add_task("growth with length", total=2 * 2 * trials)
    for causal in (False, True):
        sides = {n: Ringspan(n, peers.pattern_up_to(), causal) for n in lengths}
        for mode in ("forward", "both"):
            times: dict[str, list[float]] = {name: [] for name in (*map(str, lengths), "foreign_cores")}
            warm_up([getattr(sides[lengths[0]], mode)])
            for trial in range(trials):
                order = lengths[:: -1 if trial % 2 else 1]
                for name, value in one_turn({str(n): getattr(sides[n], mode) for n in order}).items():
                    times[name].append(value)
                progress.advance(task)
            rows.append(dict(causal=causal, mode=mode, seconds=times))
    return rows


def warm_up(calls: Iterable[Callable[[], Any]]) -> None:
    for call in calls:
        call()


def one_turn(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Seconds of each call, one after the other; all of them again if something else was busy meanwhile."""
    found: dict[str, float] = {}
    for _ in range(MOST_REPEATS):
        found = {"foreign_cores": 0.0}
        for name, call in calls.items():
            with Stopwatch() as watch:
                call()
            found[name] = watch.seconds
            found["foreign_cores"] = max(found["foreign_cores"], watch.foreign_cores)
        if found["foreign_cores"] <= DISTURBED_CORES:
            break
    return found


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
    parser.add_argument("--trials", type=int, default=5, help="rounds of the interleaved timings (default: 5)")
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
            results["kernel_share"] = kernel_share([lengths[0], lengths[-1]], trials, progress)
        if arguments.only in (None, "growth"):
            results["growth"] = growth(lengths, min(trials, 2) if arguments.quick else GROWTH_TRIALS, progress)
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
