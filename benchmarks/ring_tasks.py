"""What each rank does in the ring's benchmarks: speed beside other rings, memory, and bytes on the wire."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

import ringspan as rs
from benchmarks.peers import DIM, HEADS, pattern_up_to
from ringspan.runtime.device import Cpu
from ringspan.tools import peers
from ringspan.tools.measure import busy_seconds

MODES = ("forward", "both")
DISTURBED_CORES = 0.10
MOST_REPEATS = 3


@dataclass(frozen=True)
class Case:
    """One question of speed: a pattern at a length, causal or not. Peers know plain attention only."""

    name: str
    pattern: rs.Pattern
    n: int
    causal: bool

    @property
    def has_peers(self) -> bool:
        return isinstance(self.pattern, rs.Full)


def speed_cases(quick: bool) -> list[Case]:
    n, full = (2048, 1024) if quick else (32768, 8192)
    return [Case("dilated", pattern_up_to(), n, causal) for causal in (False, True)] + [
        Case("full", rs.Full(), full, causal) for causal in (False, True)
    ]


def measure_speed(case: Case, trials: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each way, by mode: interleaved trials on two ranks, the slower rank counting."""
    ring = rs.Ring(layout="zigzag" if case.causal else "contiguous")
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, case.n, HEADS, DIM, generator=generator, requires_grad=True) for _ in range(3)]
    mine = [ring.split_sequence(x.detach()).clone().requires_grad_() for x in whole]

    def attend(tensors: list[Tensor], on: rs.Ring | None) -> Callable[[], Tensor]:
        return lambda: rs.attention(*tensors, pattern=case.pattern, causal=case.causal, ring=on)

    calls: dict[str, tuple[Callable[[str], None], bool]] = {
        "alone": (_run(attend(whole, None), whole), False),
        "two alone": (_run(attend(whole, None), whole), True),
        "ring": (_run(attend(mine, ring), mine), True),
    }
    if case.has_peers:
        others: dict[str, Callable[..., Tensor]] = {"torch": peers.torch_ring}
        if importlib.util.find_spec("ring_attention_pytorch"):
            # Under causality striped, which balances its work; 512 is its fastest bucket on the CPU we know.
            for name, bucket_size in {"ring-attention-pytorch": 1024, "the same, tuned": 512}.items():
                others[name] = partial(peers.ring_attention_pytorch, bucket_size=bucket_size, striped=case.causal)
        for name, other in others.items():
            attend_other = partial(other, *mine, causal=case.causal, group=dist.group.WORLD)
            calls[name] = (_run(attend_other, mine), True)
    found: dict[str, dict[str, list[float]]] = {mode: {name: [] for name in calls} for mode in MODES}
    for mode in MODES:
        for trial in range(trials + 1):
            for name, (call, everybody) in calls.items():
                seconds = _undisturbed(partial(call, mode), everybody, tries=MOST_REPEATS if trial else 1)
                if trial:  # the first round warms up
                    found[mode][name].append(seconds)
    return found


def _run(attend: Callable[[], Tensor], tensors: list[Tensor]) -> Callable[[str], None]:
    def call(mode: str) -> None:
        if mode == "forward":
            with torch.no_grad():
                attend()
        else:
            out = attend()
            torch.autograd.grad(out, tensors, out.detach())

    return call


def _undisturbed(call: Callable[[], None], everybody: bool, tries: int) -> float:
    """Seconds of the slower rank; tried again while other processes were busy."""
    seconds = 0.0
    for _ in range(tries):
        dist.barrier()
        busy, own = busy_seconds(), _own_seconds()
        start = time.perf_counter()
        if everybody or dist.get_rank() == 0:
            call()
        elapsed = time.perf_counter() - start if everybody or dist.get_rank() == 0 else 0.0
        dist.barrier()
        span = time.perf_counter() - start
        mine = torch.tensor([elapsed, _own_seconds() - own], dtype=torch.float64)
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        seconds = max(x[0].item() for x in every)
        foreign = torch.tensor([(busy_seconds() - busy - sum(x[1].item() for x in every)) / span])
        dist.broadcast(foreign, 0)
        if foreign.item() <= DISTURBED_CORES:
            break
    return seconds


def _own_seconds() -> float:
    times = psutil.Process().cpu_times()
    return float(times.user + times.system)


def measure_memory(pattern: rs.Pattern, n: int) -> tuple[int, int]:
    """Peak growth of this rank, and how much of it were parcels: its own rows, forward and backward, causal."""
    ring = rs.Ring(min_size=1)
    _forward_and_backward(ring, pattern, 64 * ring.size)  # threads, libraries and connections are there before

    def run() -> None:
        _forward_and_backward(ring, pattern, n)

    ring.reset_counters()
    growth = Cpu().peak_growth(run)[1]
    return growth, ring.counters.peak_parcel_bytes


def _forward_and_backward(ring: rs.Ring, pattern: rs.Pattern, n: int) -> None:
    rows = ring.layout_of(n).rows_of(ring.rank)
    tensors = [torch.randn(1, rows, HEADS, DIM, requires_grad=True) for _ in range(3)]
    out = rs.attention(*tensors, pattern=pattern, causal=True, ring=ring, seq_len=n)
    torch.autograd.grad(out, tensors, torch.ones_like(out))


def measure_bytes(pattern: rs.Pattern, n: int) -> list[dict[str, Any]]:
    """For each layout: bytes sent by all ranks as planned, as counted, and as the loopback interface counts them."""
    rows = []
    for layout in ("contiguous", "zigzag"):
        for causal in (False, True):
            ring = rs.Ring(layout=layout)
            held = ring.layout_of(n).rows_of(ring.rank)
            tensors = [torch.randn(1, held, HEADS, DIM, requires_grad=True) for _ in range(3)]
            plan = rs.plan(
                pattern, n, ring_size=ring.size, layout=ring.layout, causal=causal, heads=HEADS, head_dim=DIM
            )
            row: dict[str, Any] = dict(layout=layout, causal=causal)
            for what in ("forward", "backward"):
                ring.reset_counters()
                dist.barrier()
                before = _loopback_bytes()
                if what == "forward":
                    out = rs.attention(*tensors, pattern=pattern, causal=causal, ring=ring, seq_len=n)
                else:
                    torch.autograd.grad(out, tensors, torch.ones_like(out))
                dist.barrier()
                wire = _loopback_bytes() - before
                counted = torch.tensor(ring.counters.bytes_sent)
                dist.all_reduce(counted)
                planned = sum(plan.bytes_sent(rank, backward=what == "backward") for rank in range(ring.size))
                row[what] = dict(planned=planned, counted=int(counted), wire=wire)
            rows.append(row)
    return rows


def _loopback_bytes() -> int:
    """Bytes that the loopback interface has sent so far, of all processes."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[8])
    raise RuntimeError("no loopback interface in /proc/net/dev")
