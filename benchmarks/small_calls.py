"""The time of calls that are so small that the kernel takes little of it; a part of the suite one_device."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import ringspan as rs
from benchmarks.suite import PASSES, Measuring, Rows, Table
from ringspan._op import attention_op
from ringspan.engine import run_forward
from ringspan.geometry import Documents
from ringspan.layout import Layout
from ringspan.planning import CPU_COSTS, plan_rank
from ringspan.ring.simulated import SimulatedTransport
from ringspan.ring.transport import Counters
from ringspan.runtime.launch import run_local_ranks
from ringspan.tools.bench.share import BareKernel
from ringspan.tools.bench.trials import RankStopwatch, TurnTimer

SMALL_ROWS = 256
SMALL_SHAPES = ((8, 64), (1, 8))  # heads and head_dim of small calls
SMALL_PATTERNS: dict[str, rs.Pattern] = {"Full": rs.Full(), "LongNet": rs.Dilated((64, 128, 256), (1, 2, 4))}


def overhead(run: Measuring) -> list[dict[str, Any]]:
    """Times of small calls with one thread: on one process, with a breakdown, and over a ring of two."""
    repeats, rounds = run.sized((5, 2), (50, 9), (100, 25))
    rows = []
    for heads, head_dim in SMALL_SHAPES:
        run.announce(f"{heads} heads of {head_dim}")
        found = [
            run_local_ranks(size, task, heads, head_dim, repeats, rounds)[0]
            for size, task in ((1, time_small_calls), (2, time_small_ring_calls))
        ]
        parts = run_local_ranks(1, time_parts, heads, head_dim, repeats, rounds)[0]
        rows.append(dict(n=SMALL_ROWS, heads=heads, head_dim=head_dim, calls=found[0] | found[1], parts=parts))
    return rows


def time_small_calls(heads: int, head_dim: int, repeats: int, rounds: int) -> dict[str, Any]:
    """Seconds of a causal call on one process, by implementation and pass."""
    tensors = [torch.randn(1, SMALL_ROWS, heads, head_dim, requires_grad=True) for _ in range(3)]
    attends: dict[str, Callable[..., Tensor]] = {
        "SDPA": lambda q, k, v: scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        ).transpose(1, 2)
    }
    attends |= {name: partial(rs.attention, pattern=one, causal=True) for name, one in SMALL_PATTERNS.items()}
    return _time_small(attends, tensors, repeats, rounds, TurnTimer())


def time_small_ring_calls(heads: int, head_dim: int, repeats: int, rounds: int) -> dict[str, Any]:
    """Seconds of a causal call over a ring of two, with the length given and not."""
    ring = rs.Ring(layout="zigzag")
    torch.manual_seed(ring.rank)  # ranks with equal rows are refused
    rows = ring.layout_of(SMALL_ROWS).rows_of(ring.rank)
    tensors = [torch.randn(1, rows, heads, head_dim, requires_grad=True) for _ in range(3)]
    attends = {
        f"{name}, ring of two{', seq_len given' if seq_len else ''}": partial(
            rs.attention, pattern=one, causal=True, ring=ring, seq_len=seq_len
        )
        for name, one in SMALL_PATTERNS.items()
        for seq_len in (None, SMALL_ROWS)
    }
    return _time_small(attends, tensors, repeats, rounds, TurnTimer(RankStopwatch))


def _time_small(
    attends: Mapping[str, Callable[..., Tensor]], tensors: list[Tensor], repeats: int, rounds: int, timer: TurnTimer
) -> dict[str, Any]:
    def forward(attend: Callable[..., Tensor]) -> object:
        with torch.no_grad():
            return attend(*tensors)

    def both(attend: Callable[..., Tensor]) -> object:
        out = attend(*tensors)
        return torch.autograd.grad(out, tensors, out.detach())

    found: dict[str, dict[str, float]] = {name: {} for name in attends}
    for mode, run_pass in (("forward", forward), ("both", both)):
        times = _seconds_each(
            {name: partial(run_pass, attend) for name, attend in attends.items()}, repeats, rounds, timer
        )
        for name, seconds in times.items():
            found[name][mode] = seconds
    return found


def _seconds_each(
    calls: Mapping[str, Callable[[], object]], repeats: int, rounds: int, timer: TurnTimer
) -> dict[str, float]:
    """Seconds of a short call: the median of rounds in turns, each of many calls."""

    def repeated(call: Callable[[], object]) -> object:
        for _ in range(repeats):
            call()
        return None

    times = timer.in_turns({name: partial(repeated, call) for name, call in calls.items()}, rounds)
    return {name: statistics.median(seconds) / repeats for name, seconds in times.items()}


def _nothing(q: Tensor, *others: object) -> tuple[Tensor, ...]:
    return tuple(q.new_empty(0) for _ in range(3))


# An operator with the arguments of ringspan's that computes nothing: the cost of its dispatch.
_SCHEMA = str(attention_op._opoverload._schema)
nothing = torch.library.custom_op(
    "ringspan_benchmarks::nothing", _nothing, mutates_args=(), schema=_SCHEMA[_SCHEMA.index("(") :]
)
nothing.register_autograd(lambda ctx, *grads: (None,) * len(attention_op._opoverload._schema.arguments))


def time_parts(heads: int, head_dim: int, repeats: int, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of a forward call and of its parts, each timed by itself, for each pattern."""
    found = {}
    q, k, v = (torch.randn(1, SMALL_ROWS, heads, head_dim) for _ in range(3))
    for name, pattern in SMALL_PATTERNS.items():
        documents, layout = Documents((SMALL_ROWS,)), Layout("contiguous", SMALL_ROWS, 1)
        make_plan = partial(plan_rank, pattern, documents, layout, 0, heads, True, "relay", CPU_COSTS)
        plan = make_plan()
        transport = SimulatedTransport(0, Counters(), defaultdict(deque))
        engine: dict[str, Any] = dict(
            scores=rs.kernels.ScoreOptions(head_dim**-0.5), kernel=rs.kernels.get("cpu_flash")
        )
        options = (pattern.text, "", True, 0.125, 0.0, "cpu_flash", CPU_COSTS.text, "", None, [False] * 4)
        calls: dict[str, Callable[[], object]] = {
            "call": partial(rs.attention, q, k, v, pattern=pattern, causal=True),
            "kernel": BareKernel.of_tiles(plan.tiles, head_dim).forward,
            "engine": partial(run_forward, plan, transport, q, k, v, **engine),
            "planning": make_plan,
            "dispatch": partial(nothing, q, k, v, None, None, *options),
        }
        found[name] = _seconds_each(calls, repeats, rounds, TurnTimer()) | {"tiles": len(plan.tiles)}
    return found


def small_calls_table(rows: list[dict[str, Any]]) -> Table:
    cells: Rows = [["heads", "call", *PASSES.values(), "forward, over SDPA"]]
    for row in rows:
        base = row["calls"]["SDPA"]["forward"]
        for name, seconds in row["calls"].items():
            times = [f"{seconds[mode] * 1e6:,.0f} µs" for mode in PASSES]
            over = "" if name == "SDPA" else f"{seconds['forward'] / base:.1f} x"
            cells.append([f"{row['heads']} of {row['head_dim']}", name, *times, over])
    text = (
        f"One causal call with {rows[0]['n']} tokens, fp32, one thread per process, in turns; LongNet: segments 64, "
        "128, 256 with rates 1, 2, 4. The ranks of a ring hold half of the tokens each. Without `seq_len`, they also "
        "check that they agree."
    )
    return Table("Small calls", cells, text)


def parts_table(rows: list[dict[str, Any]]) -> Table:
    cells: Rows = [["heads", "pattern", "tiles", "call", "kernel", "engine", "planning", "dispatch", "the rest"]]
    for row in rows:
        for name, parts in row["parts"].items():
            rest = parts["call"] - parts["engine"] - parts["planning"] - parts["dispatch"]
            shown = (parts["call"], parts["kernel"], parts["engine"] - parts["kernel"], parts["planning"])
            times = [f"{seconds * 1e6:,.0f} µs" for seconds in (*shown, parts["dispatch"], rest)]
            cells.append([f"{row['heads']} of {row['head_dim']}", name, str(parts["tiles"]), *times])
    text = (
        "Where the time of a forward call goes, each part timed by itself: the kernel on contiguous tiles; the engine "
        "(views, merging) without the kernel; finding the cached plan; an operator with the same arguments that does "
        "nothing; and the rest, which checks arguments and sets up the call."
    )
    return Table("Small calls, part by part", cells, text)
