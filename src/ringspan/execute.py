"""One call of attention, forward and backward: agree on the length, plan, run the schedule, merge.

Most calls take one pass. With an order, rows are permuted during a pass, and a causal call can take one pass per branch
(`ringspan.order.passes`). The engine does not know about orders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from ringspan.engine import BackwardRun, ForwardRun
from ringspan.geometry import Documents, Pattern
from ringspan.kernels import Kernel, ScoreOptions
from ringspan.layout import Layout
from ringspan.order import Order, Pass, check_fits, passes
from ringspan.planning import Hop, RankPlan, plan_rank
from ringspan.ring.agreement import digest, fingerprint
from ringspan.ring.backend import Backend
from ringspan.schedule import run_schedule
from ringspan.softmax import merge_, merge_sinks_
from ringspan.validation import without_autocast

TensorsWithRowDim = Sequence[tuple[Tensor | None, int]]
StartRun = Callable[..., ForwardRun | BackwardRun]  # takes a rank's plan, its transport and its rows of the tensors


@dataclass(frozen=True)
class Call:
    """The arguments of a call other than tensors, and the ring that it runs on."""

    pattern: Pattern
    order: Order | None
    causal: bool
    scores: ScoreOptions
    kernel: Kernel
    backend: Backend

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        lengths: Tensor | None,
        seq_len: int | None,
        needs: Sequence[bool],
    ) -> tuple[Tensor, Tensor, int]:
        """Output, lse, and the length of the whole sequence on which the ranks agreed."""
        layout = self.backend.agree(q.shape[1], lambda: self._metadata(q, k, v, sinks, lengths, needs), seq_len, q)
        start = partial(ForwardRun, scores=self.scores, kernel=self.kernel)
        ranks: list[list[Any]] = []
        for rows in self._passes(layout, lengths):
            parts = rows.run(k, [(q, 1), (k, 1), (v, 1)], start, row_dims=(1, 2))
            for (out, lse), (part, part_lse) in zip(ranks, parts, strict=False):
                merge_(out.transpose(1, 2), lse, part.transpose(1, 2), part_lse)
            ranks = ranks or parts
        if sinks is not None:
            shards = self.backend.shard(layout, [(sinks, 1)]) if sinks.dim() == 3 else [(0, None, [sinks])] * len(ranks)
            for (out, lse), (_, _, (own,)) in zip(ranks, shards, strict=True):
                merge_sinks_(out, lse, own)
        outs, lses = zip(*ranks, strict=True)
        out = self.backend.unshard(layout, [out.to(q.dtype) for out in outs], 1)
        return out, self.backend.unshard(layout, list(lses), 2), layout.rows

    def backward(
        self,
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        lengths: Tensor | None,
        seq_len: int,
        needs: tuple[bool, bool, bool],
    ) -> list[Tensor | None]:
        """Gradients of q, k and v; None for each that is not needed."""
        layout = self.backend.agree(q.shape[1], dict, seq_len, q)
        tensors = [(grad_out, 1), (grad_lse, 2), (q, 1), (k, 1), (v, 1), (out, 1), (lse, 2)]
        start = partial(BackwardRun, scores=self.scores, kernel=self.kernel, needs=needs)
        ranks: list[list[Any]] = []
        for rows in self._passes(layout, lengths):
            shares = rows.run(k, tensors, start, row_dims=(1, 1, 1))
            for total, share in zip(ranks, shares, strict=False):
                for grad, more in zip(total, share, strict=True):
                    if grad is not None:
                        grad.add_(more)
            ranks = ranks or shares
        return [
            self.backend.unshard(layout, [grad.to(q.dtype) for grad in grads], 1) if need else None
            for grads, need in zip(zip(*ranks, strict=True), needs, strict=True)
        ]

    def _passes(self, layout: Layout, lengths: Tensor | None) -> list[_PassOverRows]:
        """The passes of the call. Raises if the documents or the order do not fit the rows."""
        documents = Documents((layout.rows,) if lengths is None else tuple(lengths.tolist()))
        documents.check_rows(layout.rows)
        found = passes(self.pattern, self.order, self.causal)
        if self.order is not None:
            check_fits(self.order, documents, layout, moves=any(one.order is not None for one in found))
        return [_PassOverRows(one, self.backend, layout, documents) for one in found]

    def _metadata(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, lengths: Tensor | None, needs: Sequence[bool]
    ) -> dict[str, Any]:
        """What the ranks must agree on, and a fingerprint of this rank's rows."""
        batch, _, heads, head_dim = q.shape
        return {
            "call": "attention",
            "batch, heads, kv_heads, head_dim": (batch, heads, k.shape[2], head_dim),
            "dtype": str(q.dtype),
            "lengths": None if lengths is None else digest(str(lengths.tolist())),
            "who needs gradients (q, k, v, sinks)": tuple(needs),
            "fingerprint": fingerprint(q, k, v),
            "pattern": digest(self.pattern.text),
            "order": digest(self.order.text if self.order else ""),
            "causal": str(self.causal),
            "scale": str(self.scores.scale),
            "softcap": str(self.scores.softcap),
            "sinks": describe_sinks(sinks),
        }


def describe_sinks(sinks: Tensor | None) -> str:
    """What ranks must agree on: the values of one sink per head, which all ranks share; otherwise only the kind."""
    if sinks is None:
        return "none"
    return digest(str(sinks.tolist()), at_most=100) if sinks.dim() == 1 else "for each row and head"


@dataclass(frozen=True)
class _PassOverRows:
    """One pass of a call, over rows in the layout on which the ranks agreed."""

    one: Pass
    backend: Backend
    layout: Layout
    documents: Documents

    def run(self, k: Tensor, tensors: TensorsWithRowDim, start: StartRun, row_dims: Sequence[int]) -> list[list[Any]]:
        """Run the pass on every rank of this process. Returns the results of each rank, in the order of its inputs.

        Each tensor comes with its row dimension; ``row_dims`` are the row dimensions of the results.
        """
        runs, arrangements = [], []
        for rank, transport, parts in self.backend.shard(self.layout, tensors):
            device = k.device
            arranged = self.one.arrangement(self.documents, self.layout, rank, device)
            rows = [
                x if arranged is None else arranged.arrange(x, dim) for x, (_, dim) in zip(parts, tensors, strict=True)
            ]
            runs.append(start(self._plan(rank, k), transport, *rows))
            arrangements.append(arranged)
        del rows, parts
        with without_autocast(k.device):
            run_schedule(runs)
        found = [list(run.results) for run in runs]
        del runs  # frees the permuted copies before the results are permuted back
        for results, arranged in zip(found, arrangements, strict=True):
            for i, (x, dim) in enumerate(zip(results, row_dims, strict=True)):
                results[i] = x if arranged is None or x is None else arranged.restore(x, dim)
        return found

    def _plan(self, rank: int, k: Tensor) -> RankPlan:
        batch, _, kv_heads, _ = k.shape
        if batch == 0:  # nothing to compute or send
            return RankPlan(rank, self.layout.rows_of(rank), kv_heads, (Hop(),), ())
        one = self.one
        return plan_rank(one.pattern, self.documents, self.layout, rank, kv_heads, one.causal, self.backend.routing)
