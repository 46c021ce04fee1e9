"""What all checks share: the harness that calls the implementation on one rank, and the `Check` that they report.

The harness compares the results of every call with the definition, also of calls that measure bytes, time or memory
(after the measurement). So faults that occur rarely, or only in long sequences, are found as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.layout import Layout
from ringspan.runtime.device import Device
from ringspan.tools.verify.expected import Expected, Oracle, expect, own_rows
from ringspan.tools.verify.workload import BoundImplementation, VerifyCase, VerifySettings

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
    """The error that the implementation raised for a case that it need not support."""

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
        out = self.bound.attend(leaves[0], leaves[1], leaves[2], case.pattern, causal, case.tokens)
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
