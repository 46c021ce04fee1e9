"""The ring on this machine: speed beside its ceiling and beside other rings, memory by ring size, bytes on the wire.

    python -m benchmarks.ring                   # everything, about half an hour; also part of `make bench`
    python -m benchmarks.ring --quick           # small lengths, a minute: does it run?
    python -m benchmarks.ring --only speed      # one part; the others keep their last results

Writes benchmarks/results/ring.json, docs/figures/ring_*.png and docs/ring_results.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

import ringspan as rs
from benchmarks import ring_tasks
from benchmarks.peers import DIM, HEADS
from benchmarks.ring_report import write_report
from ringspan.oracle import dense_attention
from ringspan.runtime.launch import run_local_ranks
from ringspan.tools.measure import describe_machine, one_line

ROOT = Path(__file__).parent.parent
PARTS = ("speed", "memory", "bytes", "error")
PATTERN = rs.Dilated((2048, 8192, 32768), (1, 4, 16))


def speed(quick: bool, trials: int, progress: Progress) -> list[dict[str, Any]]:
    cases = ring_tasks.speed_cases(quick)
    task = progress.add_task("speed: two ranks against one", total=len(cases))
    rows = []
    for case in cases:
        found = run_local_ranks(2, ring_tasks.measure_speed, case, trials, timeout_seconds=3600)[0]
        for mode, times in found.items():
            rows.append(dict(name=case.name, n=case.n, causal=case.causal, mode=mode, seconds=times))
        progress.advance(task)
    return rows


def memory(quick: bool, progress: Progress) -> list[dict[str, Any]]:
    cases = {"dilated": (PATTERN, 8192 if quick else 131072), "full": (rs.Full(), 2048 if quick else 16384)}
    sizes = (1, 2, 4, 8)
    task = progress.add_task("memory by ring size", total=len(cases) * len(sizes))
    rows = []
    for name, (pattern, n) in cases.items():
        for size in sizes:
            found = run_local_ranks(size, ring_tasks.measure_memory, pattern, n, timeout_seconds=1800)
            peaks, parcels = zip(*found, strict=True)
            rows.append(dict(name=name, n=n, ring_size=size, peak_bytes=peaks, parcel_bytes=parcels))
            progress.advance(task)
    return rows


def wire(quick: bool, progress: Progress) -> dict[str, Any]:
    task = progress.add_task("bytes on the wire", total=1)
    n = 4096 if quick else 32768
    rows = run_local_ranks(4, ring_tasks.measure_bytes, PATTERN, n, timeout_seconds=600)[0]
    progress.advance(task)
    row_bytes = 2 * HEADS * DIM * 4
    plain = n * 3 * row_bytes  # every shard visits the three other ranks, undilated
    return dict(n=n, ranks=4, rows=rows, plain_ring=plain, all_gather=plain)


def error(progress: Progress) -> list[dict[str, Any]]:
    """Relative error of output and gradients over simulated rings of 1 to 8, in fp32 and bf16."""
    task = progress.add_task("error by ring size", total=16)
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
            progress.advance(task)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small lengths, one trial; nothing is written")
    parser.add_argument("--only", choices=PARTS, help="run one part; the others keep their last results")
    parser.add_argument("--trials", type=int, default=7, help="rounds of the interleaved timings (default: 7)")
    arguments = parser.parse_args()
    stored = ROOT / "benchmarks/results/ring.json"
    results: dict[str, Any] = json.loads(stored.read_text()) if arguments.only and stored.exists() else {}
    results["machine"] = describe_machine()
    console = Console()
    parts = [arguments.only] if arguments.only else PARTS
    with Progress(console=console) as progress:
        if "speed" in parts:
            results["speed"] = speed(arguments.quick, 1 if arguments.quick else arguments.trials, progress)
        if "memory" in parts:
            results["memory"] = memory(arguments.quick, progress)
        if "bytes" in parts:
            results["bytes"] = wire(arguments.quick, progress)
        if "error" in parts:
            results["error"] = error(progress)
    if arguments.quick:
        console.print_json(json.dumps(results))
        return
    stored.parent.mkdir(exist_ok=True)
    stored.write_text(json.dumps(results, indent=1) + "\n")
    write_report(results, one_line(results["machine"]), ROOT, console)


if __name__ == "__main__":
    main()
