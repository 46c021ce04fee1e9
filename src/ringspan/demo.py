"""A demonstration: `make run`, or `python -m ringspan.demo --ranks 2`.

Local processes compute one long sequence over a ring; one process computes it alone. Each rank makes only its own rows,
and reports what it held, sent, needed and got wrong.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import torch
from torch import Tensor

import ringspan as rs
from ringspan.measure import peak_growth
from ringspan.oracle import dense_attention
from ringspan.processes import run_local_ranks

HEADS, DIM = 4, 64
SHORT = rs.Dilated((64, 256, 1024), (1, 2, 4))
LONG = rs.Dilated((2048, 16384, 131072), (1, 8, 64))
ALLOWED = 1e-12


@dataclass(frozen=True)
class Report:
    """What one rank measured: its error at the short length, and all else at the long one."""

    error: float
    rows: int
    planned_bytes: int
    sent_bytes: int
    waiting_seconds: float
    peak_bytes: int
    forward_seconds: float
    backward_seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes of the ring (default: 2)")
    parser.add_argument("--tokens", type=int, default=131072, help="length of the long sequence (default: 131072)")
    arguments = parser.parse_args()
    print(f"ringspan {rs.__version__}, torch {torch.__version__}, gloo, one thread a rank")
    print(f"{arguments.tokens:,} tokens, {HEADS} heads of {DIM}, fp32, causal, segments x rates: {_pairs(LONG)}")
    print("error: largest of output, lse, dq, dk and dv against a dense oracle, 1,000 tokens in fp64\n")
    _print_row("", "rows", "sent", "as planned", "waited", "peak memory", "error", "forward", "backward")
    alone = _run(1, arguments.tokens)
    ring = _run(arguments.ranks, arguments.tokens)
    seconds = [max(r.forward_seconds + r.backward_seconds for r in reports) for reports in (alone, ring)]
    ratio = seconds[0] / seconds[1]
    print(f"\nOne process {seconds[0]:.1f} s, a ring of {arguments.ranks} {seconds[1]:.1f} s: {ratio:.2f} x")
    if max(report.error for report in alone + ring) > ALLOWED:
        raise SystemExit(f"A result differs from the definition by more than {ALLOWED}.")
    if any(report.sent_bytes != report.planned_bytes for report in ring):
        raise SystemExit("A rank sent other bytes than planned.")
    print(f"Every rank is within {ALLOWED} of the oracle and sent exactly the bytes that were planned.")


def _run(size: int, tokens: int) -> list[Report]:
    reports: list[Report] = run_local_ranks(size, measure_rank, tokens)
    for rank, report in enumerate(reports):
        _print_row(
            "one process" if size == 1 else f"rank {rank} of {size}",
            f"{report.rows:,}",
            f"{report.sent_bytes / 2**20:.1f} MiB",
            "yes" if report.sent_bytes == report.planned_bytes else f"NO: {report.planned_bytes:,}",
            f"{report.waiting_seconds:.2f} s",
            f"{report.peak_bytes / 2**20:,.0f} MiB",
            f"{report.error:.0e}",
            f"{report.forward_seconds:.1f} s",
            f"{report.backward_seconds:.1f} s",
        )
    return reports


def measure_rank(tokens: int) -> Report:
    """What each rank does: check itself at a short length, then run its rows of the long one."""
    ring = rs.Ring(min_size=1)
    rows = ring.layout_of(tokens).rows_of(ring.rank)
    generator = torch.Generator().manual_seed(ring.rank)
    tensors = [torch.randn(1, rows, HEADS, DIM, generator=generator, requires_grad=True) for _ in range(3)]
    ring.reset_counters()
    times: list[float] = []

    def run() -> None:
        start = time.perf_counter()
        out = rs.attention(*tensors, pattern=LONG, causal=True, ring=ring, seq_len=tokens)
        times.append(time.perf_counter() - start)
        torch.autograd.grad(out, tensors, torch.ones_like(out))
        times.append(time.perf_counter() - start - times[0])

    _, peak = peak_growth(run)
    plan = rs.plan(LONG, tokens, ring_size=ring.size, layout=ring.layout, causal=True, heads=HEADS, dim=DIM)
    planned = plan.bytes_sent(ring.rank) + plan.bytes_sent(ring.rank, backward=True)
    sent, waited = ring.counters.bytes_sent, ring.counters.waiting_seconds
    error = _error_against_oracle(ring, 1000)
    return Report(error, rows, planned, sent, waited, peak, *times)


def _error_against_oracle(ring: rs.Ring, n: int) -> float:
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, n, HEADS, DIM, dtype=torch.float64, generator=generator) for _ in range(3)]
    mine = [ring.split_sequence(x).clone().requires_grad_() for x in whole]
    whole = [x.requires_grad_() for x in whole]
    found = _with_gradients(*rs.attention(*mine, pattern=SHORT, causal=True, ring=ring, return_lse=True), mine)
    wanted = _with_gradients(*dense_attention(*whole, pattern=SHORT, causal=True), whole)
    dims = (1, 2, 1, 1, 1)  # where the rows are: output, lse, dq, dk, dv
    return max(
        (x - ring.split_sequence(y, dim=d)).abs().max().item() for x, y, d in zip(found, wanted, dims, strict=True)
    )


def _with_gradients(out: Tensor, lse: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Output, lse, and the gradients of a loss that depends on both."""
    return out, lse, *torch.autograd.grad(out.square().sum() + lse.sin().sum(), tensors)


def _pairs(pattern: rs.Dilated) -> str:
    return ", ".join(f"{w} x {r}" for w, r in zip(pattern.segment_lengths, pattern.dilation_rates, strict=True))


def _print_row(*cells: str) -> None:
    widths = (12, 8, 10, 11, 7, 12, 7, 8, 9)
    print("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)), flush=True)


if __name__ == "__main__":
    main()
