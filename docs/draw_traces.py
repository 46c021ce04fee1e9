"""Traces of a causal call on two local processes, for two layouts."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from matplotlib.figure import Figure

import ringspan as rs
from ringspan.draw import draw_trace
from ringspan.runtime.launch import run_local_ranks

ROWS = 1024  # of each rank


def draw_layout(layout: rs.LayoutName) -> Figure:
    """The second of two calls, forward and backward, on two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        run_local_ranks(2, _trace, layout, path)
        return draw_trace(path)


def _trace(layout: rs.LayoutName, path: Path) -> None:
    ring = rs.Ring(layout=layout)
    torch.manual_seed(ring.rank)
    tensors = [torch.randn(1, ROWS, 4, 64, requires_grad=True) for _ in range(3)]

    def step() -> None:
        out = rs.attention(*tensors, pattern=rs.Full(), causal=True, ring=ring)
        torch.autograd.grad(out.sum(), tensors)

    step()
    with ring.trace(path):
        step()
