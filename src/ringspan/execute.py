"""One call of attention, forward and backward: agree on the length, plan, run the schedule, merge.

Most calls take one pass. With an order, rows are permuted during a pass, and a causal call can take one pass per branch
(`ringspan.order.passes`). The engine does not know about orders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ringspan.engine import BackwardRun, ForwardRun
from ringspan.geometry import Documents, Pattern
from ringspan.kernels import Kernel, ScoreOptions
from ringspan.layout import Layout
from ringspan.order import Arrangement, Order, Pass, check_fits, passes, shares_pairs
from ringspan.planning import Hop, RankPlan, TileCosts, plan_rank
from ringspan.planning.heads import check_heads, head_ranks_of, inside_ring, shards_of
from ringspan.ring.agreement import digest, fingerprint
from ringspan.ring.backend import Backend
from ringspan.ring.heads import Shards, join_heads, split_heads
from ringspan.schedule import run_schedule
from ringspan.softmax import merge_, merge_sinks_
from ringspan.validation import without_autocast

TensorsWithRowDim = Sequence[tuple[Tensor | None, int | None]]  # None: no rows, the same on all ranks
StartRun = Callable[..., ForwardRun | BackwardRun]  # takes a rank's plan, its transport and its rows of the tensors


@dataclass(frozen=True)
class Call:
    """The arguments of a call other than tensors, and the ring that it runs on."""

    pattern: Pattern
    order: Order | None
    causal: bool
    scores: ScoreOptions
    kernel: Kernel
    costs: TileCosts | None
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
        layout = self.backend.agree(
            q.shape[1], lambda: self._metadata(q, k, v, sinks, lengths, needs), seq_len, q, lengths
        )
        check_heads(q.shape[2], k.shape[2], head_ranks_of(layout))
        start = partial(ForwardRun, scores=self.scores, kernel=self.kernel)
        ranks: list[list[Any]] = []
        sinks_dim = 1 if sinks is not None and sinks.dim() == 3 else None
        found = self._passes(layout, lengths)  # raises before anything is sent
        with self._sharded(layout, [(q, 1), (k, 1), (v, 1), (sinks, sinks_dim)]) as shards:
            own_sinks = [parts.pop() for _, _, parts in shards]
            for rows in found:
                parts = rows.run(k, shards, (1, 1, 1), start, row_dims=(1, 2))
                for (out, lse), (part, part_lse) in zip(ranks, parts, strict=False):
                    merge_(out.transpose(1, 2), lse, part.transpose(1, 2), part_lse)
                ranks = ranks or parts
            for (out, lse), own in zip(ranks, own_sinks, strict=True):
                if own is not None:
                    merge_sinks_(out, lse, own)
            heads = q.shape[2]
            outs, lses = zip(*ranks, strict=True)
            out = self._unsharded(layout, shards, outs, 1, heads, q.dtype)
            return out, self._unsharded(layout, shards, lses, 2, heads, lses[0].dtype), layout.rows

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
        layout = self.backend.agree(q.shape[1], dict, seq_len, q, lengths)
        if head_ranks_of(layout) > 1:  # the loss of another head rank may depend on the one that is None here
            grad_out = torch.zeros_like(out) if grad_out is None else grad_out
            grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
        tensors, dims = (grad_out, grad_lse, q, k, v, out, lse), (1, 2, 1, 1, 1, 1, 2)
        start = partial(BackwardRun, scores=self.scores, kernel=self.kernel, needs=needs)
        ranks: list[list[Any]] = []
        with self._sharded(layout, list(zip(tensors, dims, strict=True))) as shards:
            for _, _, parts in shards if head_ranks_of(layout) > 1 else ():
                parts[1] = parts[1] if parts[1].any() else None  # the gradient of lse costs one more backward
            for rows in self._passes(layout, lengths):
                shares = rows.run(k, shards, dims, start, row_dims=(1, 1, 1))
                for total, share in zip(ranks, shares, strict=False):
                    for grad, more in zip(total, share, strict=True):
                        if grad is not None:
                            grad.add_(more)
                ranks = ranks or shares
            return [
                self._unsharded(layout, shards, grads, 1, x.shape[2], q.dtype) if need else None
                for grads, x, need in zip(zip(*ranks, strict=True), (q, k, v), needs, strict=True)
            ]

    def _sharded(self, layout: Layout, tensors: TensorsWithRowDim) -> AbstractContextManager[Shards]:
        """For each rank in this process: (rank, transport, tensors), with the rows and heads that the rank computes."""
        return split_heads(layout, self.backend.shard(layout, tensors), [dim for _, dim in tensors])

    def _unsharded(
        self, layout: Layout, shards: Shards, parts: Sequence[Tensor], dim: int, heads: int, dtype: torch.dtype
    ) -> Tensor:
        """The inverse of `_sharded`, for one tensor."""
        for _, _, inputs in shards:
            inputs.clear()  # they are no longer needed
        return self.backend.unshard(layout, join_heads(layout, shards, parts, dim, heads, dtype), dim)

    def _passes(self, layout: Layout, lengths: Tensor | None) -> list[_PassOverRows]:
        """The passes of the call. Raises if the documents or the order do not fit the rows."""
        documents = Documents((layout.rows,) if lengths is None else tuple(lengths.tolist()))
        documents.check_rows(layout.rows)
        found = passes(self.pattern, self.order, self.causal)
        if self.order is not None:
            check_fits(self.order, documents, shards_of(layout), moves=any(one.order is not None for one in found))
        costs = self.costs if shares_pairs(found) else None
        return [_PassOverRows(one, self.backend, layout, documents, costs) for one in found]

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
            "optimize": self.costs.text if self.costs else "none",
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
    costs: TileCosts | None

    def run(
        self, k: Tensor, shards: Shards, dims: Sequence[int], start: StartRun, row_dims: Sequence[int]
    ) -> list[list[Any]]:
        """Run the pass on every rank of this process. Returns the results of each rank, in the order of its inputs.

        ``dims`` are the row dimensions of the inputs, ``row_dims`` those of the results.
        """
        runs, arrangements = [], []
        for rank, transport, parts in shards:
            arranged = self._arrangement(rank, k.device)
            rows = [x if arranged is None else arranged.arrange(x, dim) for x, dim in zip(parts, dims, strict=True)]
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

    def _arrangement(self, rank: int, device: torch.device) -> Arrangement | None:
        shard = rank // head_ranks_of(self.layout)
        return self.one.arrangement(self.documents, shards_of(self.layout), shard, device)

    def _plan(self, rank: int, k: Tensor) -> RankPlan:
        pattern, layout, rank, kv_heads, routing = inside_ring(
            self.one.pattern, self.layout, rank, k.shape[2], self.backend.routing
        )
        if k.shape[0] == 0:  # nothing to compute or send
            return RankPlan(rank, layout.rows_of(rank), kv_heads, (Hop(),), ())
        return plan_rank(pattern, self.documents, layout, rank, kv_heads, self.one.causal, routing, self.costs)
