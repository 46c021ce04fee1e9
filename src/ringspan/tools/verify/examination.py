"""A rank under examination: it makes its rows, calls the subject, and compares what every call returned.

Wherever a check needs a call, for bytes or time or memory, its results are compared with the definition afterwards,
outside of what is measured: a fault that shows only now and then, or only at length, has nowhere to hide.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.runtime.device import Device
from ringspan.tools.verify.expected import Expected, Oracle, Place, expect, own_rows
from ringspan.tools.verify.settings import Bound, Case, Settings


@dataclass(frozen=True)
class Comparison:
    """One case on one rank: how many calls, how many of them wrong, and the largest errors beside what is allowed."""

    case: str
    causal: bool
    backward: bool
    rows: int  # that were compared, of all ranks
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
class Examination:
    """A rank with its subject, its device, and what it is to run."""

    bound: Bound
    device: Device
    settings: Settings
    oracle: Oracle = expect
    comparisons: dict[tuple[str, bool, bool], Comparison] = field(default_factory=dict)

    @property
    def group(self) -> dist.ProcessGroup:
        return self.bound.ring.group

    def place(self, case: Case) -> Place:
        return Place(self.bound.layout_of(case.tokens), self.bound.ring.rank)

    def own_rows(self, case: Case) -> list[Tensor]:
        """This rank's rows of q, k, v and the gradient of the output, on its device."""
        return [x.to(self.device.device) for x in own_rows(case, self.place(case))]

    def call(self, rows: list[Tensor], case: Case, causal: bool, *, backward: bool) -> list[Tensor]:
        """The output of the subject and, if asked for, dq, dk and dv."""
        q, k, v, grad_out = rows
        leaves = [x.detach().requires_grad_(backward) for x in (q, k, v)]
        out = self.bound.attend(leaves[0], leaves[1], leaves[2], case.pattern, causal, case.tokens)
        if out.shape != q.shape:
            raise ValueError(f"q is {tuple(q.shape)}, but the output is {tuple(out.shape)}: rows came back changed")
        return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)] if backward else [out.detach()]

    def expect(self, case: Case, causal: bool, *, backward: bool) -> Expected:
        return self.oracle(case, causal, self.place(case), backward=backward)

    def compare(self, expected: Expected, found: list[Tensor]) -> None:
        """Compare what a call returned with the definition, and keep count."""
        case, backward = expected.case, len(found) > 1
        key = (str(case), expected.causal, backward)
        new = Comparison(str(case), expected.causal, backward, expected.drawn, case.tokens)
        self.comparisons[key] = self.comparisons.get(key, new).with_call(expected, found)

    def run(self, case: Case, causal: bool) -> None:
        """One call, forward and backward, compared."""
        found = self.call(self.own_rows(case), case, causal, backward=True)
        self.compare(self.expect(case, causal, backward=True), found)

    def barrier(self) -> None:
        dist.barrier(self.group)
