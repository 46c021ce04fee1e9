"""What all checks share: the `Check` that they report, the harness of one rank, and the results a call must return.

The harness compares the results of every call with the definition, also of calls that measure bytes, time or memory
(after the measurement). So faults that occur rarely, or only in long sequences, are found as well.

Every rank can generate the inputs of all ranks, so nothing is communicated. For a short sequence all rows of the
output, dq, dk and dv are computed, in fp64. For a long one some rows are sampled, and the gradient of the output is
zero in all others. Then dq of the sampled rows, and dk and dv of every row, cost one pass over the keys for each
sampled row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.layout import Layout
from ringspan.oracle import dense_attention
from ringspan.runtime.device import Device
from ringspan.tools.verify.workload import BoundImplementation, VerifyCase, VerifySettings

INPUTS = ("q", "k", "v", "grad_out")
_MAX_PAIRS = 2 * 2**20  # (batch, head, row, key) tuples to compute
_MIN_ROWS = 32
_ALLOWED_FP64 = 1e-12
_TIMES_DENSE = 10  # other dtypes: this many times the error of dense attention, or its rounding


class Oracle(Protocol):
    """`expect`, or a cached version of it."""

    def __call__(self, case: VerifyCase, causal: bool, layout: Layout, rank: int, *, backward: bool) -> Expected: ...


@dataclass(frozen=True)
class Expected:
    """The correct results of one rank for one case: the output in its sampled rows and, if requested, all gradients."""

    case: VerifyCase
    causal: bool
    sampled: int  # rows, over all ranks
    local: Tensor  # the sampled rows of this rank, as local indices
    results: tuple[Tensor, ...]  # out, or out, dq, dk, dv
    allowed: tuple[float, ...]

    def errors(self, found: list[Tensor]) -> list[float]:
        """The largest error of each result; infinite if it contains NaN."""
        taken = [found[0][:, self.local.to(found[0].device)], *found[1:]]
        return [_largest(have.detach().cpu().double() - want) for have, want in zip(taken, self.results, strict=True)]


def own_rows(case: VerifyCase, layout: Layout, rank: int) -> list[Tensor]:
    """The rank's rows of q, k, v and the gradient of the output; the rank generates no other rows."""
    rows = [
        torch.empty(case.batch, layout.rows_of(rank), _heads(case, name), case.head_dim, dtype=_dtype(case))
        for name in INPUTS
    ]
    for name, x in zip(INPUTS, rows, strict=True):
        for head in range(x.shape[2]):
            x[:, :, head] = _generate(case, layout, name, head, rank)
    rows[-1][:, ~torch.isin(positions(layout, rank), sampled_rows(case, layout))] = 0.0
    return rows


def positions(layout: Layout, rank: int) -> Tensor:
    """The positions in the sequence of the rank's rows, in local order."""
    spans = [torch.arange(span.start, span.stop) for span in layout.spans(rank)]
    return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)


def sampled_rows(case: VerifyCase, layout: Layout) -> Tensor:
    """The rows to compare: all, or the first and last row of each shard and a stratified sample of the others."""
    n = case.tokens
    count = max(_MIN_ROWS, _MAX_PAIRS // (case.batch * case.heads * n))
    if count >= n:
        return torch.arange(n)
    starts = [span.start for rank in range(layout.ring_size) for span in layout.spans(rank)]
    borders = sorted({0, n - 1, *starts, *(start - 1 for start in starts if start)})[:count]
    edges = torch.linspace(0, n, count - len(borders) + 1)
    random = torch.rand(len(edges) - 1, generator=torch.Generator().manual_seed(n))
    between = (edges[:-1] + random * edges.diff()).long().clamp(max=n - 1)
    return torch.cat([torch.tensor(borders), between]).unique()


def expect(case: VerifyCase, causal: bool, layout: Layout, rank: int, *, backward: bool) -> Expected:
    """The correct results, and the allowed error of each.

    In fp64 that is 1e-12. In other dtypes it is ten times the error of dense attention in that dtype, but at least ten
    rounding steps of a correct algorithm: partial outputs can be as large as the largest value before they are merged,
    and a backward pass that recomputes the weights from the lse carries the rounding of the lse in all of them.
    """
    sampled, own = sampled_rows(case, layout), positions(layout, rank)
    mine = torch.isin(sampled, own)
    local = torch.searchsorted(own, sampled[mine])
    groups = case.heads // case.kv_heads
    exact, rounded = list[list[Tensor]](), list[list[Tensor]]()
    largest_value, largest_lse = 0.0, 1.0
    for c in range(case.kv_heads):
        k, v = (_whole(case, layout, name, [c]) for name in ("k", "v"))
        q, grad = (
            _whole(case, layout, name, range(c * groups, (c + 1) * groups))[:, sampled] for name in ("q", "grad_out")
        )
        largest_value = max(largest_value, _largest(v))
        for results, dtype in ((exact, torch.float64), (rounded, _dtype(case))):
            if results is rounded and dtype == torch.float64:
                continue
            leaves = [x.to(dtype).requires_grad_(backward) for x in (q, k, v)]
            pattern = case.pattern.for_heads(c, case.kv_heads)
            out, lse = dense_attention(
                *leaves, pattern=pattern, causal=causal, lengths=case.lengths or None, rows=sampled
            )
            found = [out.detach()[:, mine]]
            largest_lse = max(largest_lse, _largest(lse.detach().nan_to_num(neginf=0.0)))  # -inf: the row sees no key
            if backward:
                dq, dk, dv = torch.autograd.grad(out, leaves, grad.to(dtype))
                own_dq = dq.new_zeros(case.batch, len(own), groups, case.head_dim)
                own_dq[:, local] = dq[:, mine]
                found += [own_dq, dk[:, own], dv[:, own]]
            results.append(found)
    right = [torch.cat(heads, dim=2) for heads in zip(*exact, strict=True)]
    if not rounded:
        return Expected(case, causal, len(sampled), local, tuple(right), (_ALLOWED_FP64,) * len(right))
    dense = [torch.cat(heads, dim=2) for heads in zip(*rounded, strict=True)]
    sizes = [largest_value, *(largest_lse * _largest(gradient) for gradient in right[1:])]
    eps = torch.finfo(_dtype(case)).eps
    allowed = [
        _TIMES_DENSE * max(_largest(low.double() - want), eps * size)
        for low, want, size in zip(dense, right, sizes, strict=True)
    ]
    return Expected(case, causal, len(sampled), local, tuple(right), tuple(allowed))


def _whole(case: VerifyCase, layout: Layout, name: str, heads: range | list[int]) -> Tensor:
    """All rows of some heads, in sequence order, in fp64."""
    whole = torch.empty(case.batch, case.tokens, len(heads), case.head_dim, dtype=torch.float64)
    for rank in range(layout.ring_size):
        rows = positions(layout, rank)
        for i, head in enumerate(heads):
            whole[:, rows, i] = _generate(case, layout, name, head, rank).double()
    return whole


def _generate(case: VerifyCase, layout: Layout, name: str, head: int, rank: int) -> Tensor:
    """One head of one rank's rows, (batch, rows, head_dim). Every rank generates the same numbers."""
    seed = (INPUTS.index(name) * 1024 + head) * 65536 + rank
    generator = torch.Generator().manual_seed(seed)
    shape = (case.batch, layout.rows_of(rank), case.head_dim)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(_dtype(case))


def _heads(case: VerifyCase, name: str) -> int:
    return case.kv_heads if name in ("k", "v") else case.heads


def _dtype(case: VerifyCase) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, case.dtype)
    return dtype


def _largest(difference: Tensor) -> float:
    largest = difference.abs().max().item() if difference.numel() else 0.0
    return math.inf if math.isnan(largest) else largest


Verdict = Literal["pass", "FAIL", "not measured", "not supported"]
Measured = dict[str, Any]  # name of a measurement -> its value on one rank
ByRing = dict[int, list[Measured]]  # ring size -> what each of its ranks measured


@dataclass(frozen=True)
class Check:
    """One line of the report.

    ``result`` is what was measured, ``reason`` explains the verdict, ``case`` is what it was measured on. Verification
    is incomplete while an essential check was not measured. The other checks are about speed, which cannot be measured
    on a busy machine.
    """

    name: str
    verdict: Verdict
    result: str
    reason: str
    case: str
    essential: bool = True


@dataclass(frozen=True)
class Failed:
    """A measurement that failed, and why."""

    reason: str


@dataclass(frozen=True)
class Unsupported:
    """Why the implementation does not run a case that it need not support, such as the error that it raised."""

    reason: str


@dataclass(frozen=True)
class Comparison:
    """One case on one rank: the number of calls and of wrong results, the largest errors and the allowed ones."""

    case: str
    causal: bool
    backward: bool
    rows: int  # compared, over all ranks
    tokens: int
    calls: int = 0
    wrong_outputs: int = 0
    wrong_gradients: int = 0
    output_error: float = 0.0
    output_allowed: float = 0.0
    gradient_error: float = 0.0
    gradient_allowed: float = 0.0

    def with_call(self, expected: Expected, found: list[Tensor]) -> Comparison:
        (output, *gradients), allowed = expected.errors(found), expected.allowed
        ratios = [error / limit for error, limit in zip(gradients, allowed[1:], strict=True)]
        worst = max(range(len(gradients)), key=lambda i: ratios[i], default=None)
        changed = replace(
            self,
            calls=self.calls + 1,
            wrong_outputs=self.wrong_outputs + (output > allowed[0]),
            wrong_gradients=self.wrong_gradients + any(ratio > 1 for ratio in ratios),
            output_error=max(self.output_error, output),
            output_allowed=allowed[0],
        )
        if worst is None or gradients[worst] * self.gradient_allowed < self.gradient_error * allowed[1 + worst]:
            return changed
        return replace(changed, gradient_error=gradients[worst], gradient_allowed=allowed[1 + worst])


@dataclass
class Harness:
    """Calls the implementation on one rank and compares what it returns."""

    bound: BoundImplementation
    device: Device
    settings: VerifySettings
    oracle: Oracle = expect
    comparisons: dict[tuple[str, bool, bool], Comparison] = field(default_factory=dict)

    @property
    def group(self) -> dist.ProcessGroup:
        return self.bound.ring.group

    @property
    def rank(self) -> int:
        return self.bound.ring.rank

    def layout(self, case: VerifyCase) -> Layout:
        return self.bound.ring.layout_of(case.tokens)

    def own_rows(self, case: VerifyCase) -> list[Tensor]:
        """This rank's rows of q, k, v and the gradient of the output, on its device."""
        return [x.to(self.device.device) for x in own_rows(case, self.layout(case), self.rank)]

    def call(self, rows: list[Tensor], case: VerifyCase, causal: bool, *, backward: bool) -> list[Tensor]:
        """The output of the implementation and, with ``backward``, dq, dk and dv."""
        q, k, v, grad_out = rows
        leaves = [x.detach().requires_grad_(backward) for x in (q, k, v)]
        out = self.bound.attend(leaves[0], leaves[1], leaves[2], case, causal)
        if out.shape != q.shape:
            raise ValueError(f"the output has shape {tuple(out.shape)}: must be that of q, {tuple(q.shape)}")
        return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)] if backward else [out.detach()]

    def expect(self, case: VerifyCase, causal: bool, *, backward: bool) -> Expected:
        return self.oracle(case, causal, self.layout(case), self.rank, backward=backward)

    def compare(self, expected: Expected, found: list[Tensor]) -> None:
        """Compare the results of a call with the expected ones and record the errors."""
        case, backward = expected.case, len(found) > 1
        key = (str(case), expected.causal, backward)
        new = Comparison(str(case), expected.causal, backward, expected.sampled, case.tokens)
        self.comparisons[key] = self.comparisons.get(key, new).with_call(expected, found)

    def run(self, case: VerifyCase, causal: bool) -> None:
        """One call, forward and backward, compared."""
        found = self.call(self.own_rows(case), case, causal, backward=True)
        self.compare(self.expect(case, causal, backward=True), found)

    def barrier(self) -> None:
        dist.barrier(self.group)


def values_of(measured: ByRing, measurement: str) -> dict[int, list[Any]]:
    """Ring size -> the value on each rank; without rings on which it was not measured."""
    return {size: [each[measurement] for each in ranks] for size, ranks in measured.items() if measurement in ranks[0]}


def judge_if_measured(measured: ByRing, measurement: str, name: str, case: str, judge: Callable[[], Check]) -> Check:
    """The check that ``judge`` returns; a failed one if the measurement failed on some rank."""
    for size, ranks in values_of(measured, measurement).items():
        for rank, value in enumerate(ranks):
            if isinstance(value, Failed):
                skipped = value.reason.startswith("skipped")
                reason = value.reason if skipped else f"rank {rank} of {size} raised {value.reason}"
                return Check(name, "FAIL", "not measured", reason, case)
    return judge()
