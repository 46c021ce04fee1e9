"""A short demonstration: `make run`, or `python -m ringspan.demo`.

Computes dilated attention at a length whose dense score matrix would not fit in memory, and checks the same
code against the dense oracle at a length where that exists.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

import ringspan as rs
from ringspan.oracle import dense_attention

HEADS, DIM = 4, 64


def main() -> None:
    torch.manual_seed(0)
    choice = rs.kernels.choose("cpu", torch.float32)
    print(f"ringspan {rs.__version__}, torch {torch.__version__}, kernel {choice.kernel.name} ({choice.reason})\n")
    holds = check(n=1000)
    run_long(n=131072)
    if not holds:
        raise SystemExit("\nThe result differs from the definition by more than 1e-12.")


def check(n: int) -> bool:
    """Print the error against the dense oracle in fp64; returns whether all are within 1e-12."""
    pattern = rs.Dilated((64, 256, 1024), (1, 2, 4))
    print(f"Exact? {n} tokens in fp64, causal, {pattern.text.split(' interleaved')[0]}, against a dense oracle:")
    tensors = [torch.randn(1, n, HEADS, DIM, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    found = with_gradients(*rs.attention(*tensors, pattern=pattern, causal=True, return_lse=True), tensors)
    wanted = with_gradients(*dense_attention(*tensors, pattern=pattern, causal=True), tensors)
    errors = {name: (found[name] - wanted[name]).abs().max().item() for name in found}
    for name, error in errors.items():
        print(f"  largest error of {name:<6} {error:.1e}   (allowed: 1e-12)")
    return max(errors.values()) <= 1e-12


def with_gradients(out: Tensor, lse: Tensor, tensors: list[Tensor]) -> dict[str, Tensor]:
    """Output, lse, and the gradients of a loss that depends on both."""
    grads = torch.autograd.grad(out.square().sum() + lse.sin().sum(), tensors)
    return dict(zip(("output", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))


def run_long(n: int) -> None:
    pattern = rs.Dilated((2048, 8192, 32768), (1, 4, 16))
    tensors = [torch.randn(1, n, HEADS, DIM, requires_grad=True) for _ in range(3)]
    print(f"\nLong? {n:,} tokens in fp32, causal, {HEADS} heads of {DIM}, {pattern.text.split(' interleaved')[0]}:")
    start = time.perf_counter()
    out = rs.attention(*tensors, pattern=pattern, causal=True)
    middle = time.perf_counter()
    out.sum().backward()
    end = time.perf_counter()
    dense_gib = HEADS * n * n * 4 / 2**30
    print(f"  forward  {middle - start:5.1f} s  ({n / (middle - start):,.0f} tokens/s)")
    print(f"  backward {end - middle:5.1f} s")
    print(f"  a dense score matrix would take {dense_gib:,.0f} GiB; none was made")


if __name__ == "__main__":
    main()
