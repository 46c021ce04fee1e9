"""`attention_weights`: the weights with which chosen queries see every key, from their log-sum-exp.

For looking at a model, not for training it. A query costs O(n) time and memory. Which keys it sees follows from the
pattern's ranges (`ringspan.geometry.keys_seen`); no plan, tiles or kernels are used. Over a ring, each rank computes
the weights of its own keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.api import check_options
from ringspan.execute import describe_sinks
from ringspan.geometry import Documents, Pattern, as_int, as_positions, check_pattern, keys_seen
from ringspan.kernels import ScoreOptions, accumulation_dtype
from ringspan.layout import Layout
from ringspan.order import Order, Pass, check_fits, passes
from ringspan.order.base import rows_and_places
from ringspan.ring import Ring, RingError, SimulatedRing
from ringspan.ring.agreement import digest, fingerprint
from ringspan.ring.simulated import ALONE
from ringspan.validation import (
    Lengths,
    autocast,
    check_operands,
    check_sinks,
    check_tensors,
    document_lengths,
    scale_for,
    softcap_for,
    without_autocast,
)

_BYTES_AT_A_TIME = 2**24  # of keys that are converted to the accumulation dtype and transposed


@torch.no_grad()
def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    rows: Iterable[int] | Tensor,
    pattern: Pattern,
    causal: bool = False,
    lse: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    lengths: Lengths | None = None,
    cu_seqlens: Lengths | None = None,
    order: Order | None = None,
    ring: Ring | SimulatedRing | None = None,
    seq_len: int | None = None,
) -> Tensor:
    """The weights with which the queries at a few positions see every key. O(n) for each query; has no gradient.

    Args:
        q: (batch, len(rows), heads, head_dim): the queries of these rows only, such as ``q[:, rows]``. Over a `Ring`,
            the same on all ranks: ``ring.rows_at(q, rows)``.
        k: (batch, seq, kv_heads, head_dim): all keys; over a `Ring`, those of this rank.
        rows: the positions of the queries in the whole sequence, in any order: ints, or an integer tensor.
        lse: (batch, heads, len(rows)): the lse of these rows from ``attention(..., return_lse=True)`` with the same
            options; over a `Ring`, ``ring.rows_at(lse, rows, dim=2)``. It includes the sinks, so leave out ``sinks``.
            By default it is computed; over a `Ring`, this takes one small all-gather.
        sinks: (heads,), or (batch, len(rows), heads) for these rows.
        pattern, causal, scale, softcap, lengths, cu_seqlens, order, ring, seq_len: as for `attention`.

    Returns:
        (batch, heads, len(rows), seq) in the accumulation dtype (fp64 for fp64, else fp32): m(p, t) exp(s(p, t) -
        lse(p)), where m is the number of branches in which query p sees key t. The weights of a row add up to 1 less
        the share of its sink; a row that sees nothing has zeros. Over a `Ring`, the columns of this rank's keys:
        ``ring.gather_sequence(weights, dim=3)`` returns all.

    >>> import torch, ringspan as rs
    >>> q, k, v = torch.randn(3, 1, 1000, 4, 16, dtype=torch.float64).unbind()
    >>> pattern, rows = rs.Dilated((64, 256), (1, 4)), [0, 17]
    >>> weights = rs.attention_weights(q[:, rows], k, rows=rows, pattern=pattern)
    >>> weights.shape
    torch.Size([1, 4, 2, 1000])
    >>> out = rs.attention(q, k, v, pattern=pattern)[:, rows]
    >>> torch.allclose(torch.einsum("bhpt,bthd->bphd", weights, v), out, rtol=0, atol=1e-12)
    True
    """
    check_tensors(q, k, k)
    q, k = autocast(q, k)
    check_operands(q, k, k, some_rows=True)
    check_pattern(pattern, k.shape[2])
    options = ScoreOptions(scale_for(scale, q), softcap_for(softcap, q))
    check_sinks(sinks, q)
    check_options(causal, order, ring)
    chosen = as_positions("rows", rows)
    if q.shape[1] != len(chosen):
        raise ValueError(f"q has {q.shape[1]} rows, but rows= names {len(chosen)}: pass their queries only, q[:, rows]")
    _check_lse(lse, sinks, q)
    seq_len = None if seq_len is None else as_int("seq_len", seq_len)
    if ring is None and seq_len is not None and seq_len != k.shape[1]:
        raise ValueError(f"seq_len={seq_len}, but k has {k.shape[1]} rows: must be equal without a ring")
    packed = document_lengths(lengths, cu_seqlens, seq_len if isinstance(ring, Ring) else k.shape[1])
    backend = ALONE if ring is None else ring
    layout = backend.agree(
        k.shape[1],
        lambda: {
            **_describe_tensors(q, k, lse, sinks),
            "positions of the queries": digest(str(chosen), at_most=60),
            "pattern": digest(pattern.text, at_most=100),
            "lengths": digest(str(packed), at_most=60),
            "order": digest(order.text if order else "", at_most=60),
            "causal, scale, softcap": str((causal, options.scale, options.softcap)),
        },
        seq_len,
        k,
        packed,
    )
    layout.check_positions("rows", chosen)
    documents = Documents((layout.rows,) if packed is None else packed)
    documents.check_rows(layout.rows)
    moves = any(one.order is not None for one in passes(pattern, order, causal))
    if order is not None:
        check_fits(order, documents, layout, moves=moves)
    queries = _Queries(chosen, pattern, order if moves else None, causal, documents, layout)
    with without_autocast(k.device):
        ranks = [
            _relative_weights(_scores(q, keys, options), queries.multiplicity(rank, keys), lse)
            for rank, _, (keys,) in backend.shard(layout, [(k, 1)])
        ]
    if lse is None:
        peak, total = _over_all_keys([(base, weights.sum(-1)) for weights, base in ranks], ring, sinks)
        for weights, base in ranks:
            share = (base - peak).exp_().div_(total).masked_fill_(peak == -torch.inf, 0.0)
            weights.mul_(share.unsqueeze(-1))
    return backend.unshard(layout, [weights for weights, _ in ranks], 3)


@dataclass(frozen=True)
class _Queries:
    """The positions of the queries, and what decides which keys they see. An order that moves no rows is None."""

    rows: tuple[int, ...]
    pattern: Pattern
    order: Order | None
    causal: bool
    documents: Documents
    layout: Layout

    def multiplicity(self, rank: int, k: Tensor) -> Tensor:
        """m(p, t) of the rank's keys ``k``: (KV heads, rows, keys), in the accumulation dtype."""
        _, keys, kv_heads, _ = k.shape
        count = k.new_zeros((kv_heads, len(self.rows), keys), dtype=accumulation_dtype(k.dtype))
        spans = self.layout.spans(rank)
        # With an order, the pattern applies to places along the curve, and causality to positions in the sequence.
        causal = self.causal and self.order is None
        for i, row in enumerate(self.rows):
            place = self._place(row)
            for head in range(kv_heads):
                heads = dict(kv_head=head, kv_heads=kv_heads)
                for seen in keys_seen(self.pattern, self.documents, place, causal=causal, **heads):
                    for span in spans:
                        if own := _between(seen, span.start, span.stop):
                            shift = span.local - span.start
                            count[head, i, own.start + shift : own.stop + shift : own.step] += 1
        if self.order is None:
            return count
        arrangement = Pass(self.pattern, self.order, False).arrangement(self.documents, self.layout, rank, k.device)
        assert arrangement is not None
        count = arrangement.restore(count, 2)
        if self.causal:
            for i, row in enumerate(self.rows):
                for span in spans:
                    first = min(max(row + 1, span.start), span.stop)
                    count[:, i, first - span.start + span.local : span.stop - span.start + span.local] = 0
        return count

    def _place(self, row: int) -> int:
        """The place of a row along the curve, or the row itself. Each document is ordered separately."""
        if self.order is None:
            return row
        start, stop = next((a, b) for a, b in self.documents.spans() if a <= row < b)
        first = row - (row - start) % self.order.period
        _, places = rows_and_places(self.order, min(self.order.period, stop - first))
        return first + int(places[row - first])


def _between(rows: range, start: int, stop: int) -> range:
    """Those of the rows that are in ``start .. stop - 1``.

    >>> _between(range(1, 20, 3), 4, 11)
    range(4, 13, 3)
    """
    first, last = (max(0, -(-(border - rows.start) // rows.step)) for border in (start, stop))
    return rows[first:last]


def _scores(q: Tensor, k: Tensor, options: ScoreOptions) -> Tensor:
    """(batch, KV heads, heads per KV head, rows, keys), in the accumulation dtype."""
    (batch, rows, heads, dim), (keys, kv_heads) = q.shape, k.shape[1:3]
    wide = accumulation_dtype(q.dtype)
    queries = (q.to(wide) * options.scale).unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    scores = queries.new_empty((batch, kv_heads, queries.shape[2], keys))
    step = max(1, _BYTES_AT_A_TIME // max(1, batch * kv_heads * dim * wide.itemsize))
    for some, part in zip(scores.split(step, dim=3), k.split(step, dim=1), strict=True):
        some.copy_(queries @ part.to(wide).permute(0, 2, 3, 1))
    if options.softcap:
        scores.div_(options.softcap).tanh_().mul_(options.softcap)
    return scores.unflatten(2, (heads // kv_heads, rows))


def _relative_weights(scores: Tensor, count: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """m exp(s - base) of one rank's keys, (batch, heads, rows, keys), and the base, (batch, heads, rows).

    The base is the lse or, if it is None, the largest score, so that nothing overflows. Overwrites the scores.
    """
    weights = scores.masked_fill_(count.unsqueeze(1) == 0, -torch.inf)
    if lse is not None:
        base = lse.to(weights.dtype).unflatten(1, weights.shape[1:3])
    elif weights.shape[-1]:
        base = weights.amax(-1)
    else:
        base = weights.new_full(weights.shape[:-1], -torch.inf)
    seen_nothing = base == -torch.inf
    weights.sub_(base.masked_fill(seen_nothing, 0.0).unsqueeze(-1)).exp_().mul_(count.unsqueeze(1))
    return weights.flatten(1, 2), base.flatten(1, 2)


def _over_all_keys(
    parts: list[tuple[Tensor, Tensor]], ring: Ring | SimulatedRing | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The largest base, and the sum of all weights relative to it, from (base, sum of weights) of the ranks here.

    A pair, not its lse = base + log(sum): where scores are large, that rounds the sum away.
    """
    found = torch.stack([torch.stack(part) for part in parts])
    if isinstance(ring, Ring):
        every = [torch.empty_like(found) for _ in range(ring.size)]
        try:
            dist.all_gather(every, found, group=ring.group)
        except RuntimeError as error:
            raise RingError(f"the all-gather of the lse failed: a rank is gone or stuck: {error}") from error
        found = torch.cat(every)
    if sinks is not None:  # a key without a value
        wide = sinks.to(found.dtype)
        logits = (wide[:, None] if sinks.dim() == 1 else wide.transpose(1, 2)).expand(found.shape[2:])
        found = torch.cat((found, torch.stack((logits, torch.ones_like(logits)))[None]))
    bases, sums = found.unbind(1)
    peak = bases.amax(0)
    return peak, (bases.sub(peak).exp_() * sums).sum(0)


def _check_lse(lse: Any, sinks: Tensor | None, q: Tensor) -> None:
    if lse is None:
        return
    if not isinstance(lse, Tensor):
        raise TypeError(f"lse is a {type(lse).__name__}: must be a torch.Tensor")
    batch, rows, heads, _ = q.shape
    if lse.shape != (batch, heads, rows):
        raise ValueError(
            f"lse has shape {tuple(lse.shape)}, but q has {rows} rows and {heads} heads: must be (batch, heads, "
            "len(rows)), the lse of these rows only, lse[:, :, rows]"
        )
    if lse.device != q.device:
        raise ValueError(f"lse is on {lse.device}, but q is on {q.device}: move both to one device")
    if sinks is not None:
        raise ValueError("both lse and sinks are given: the lse of attention includes the sinks; leave sinks out")


def _describe_tensors(q: Tensor, k: Tensor, lse: Tensor | None, sinks: Tensor | None) -> dict[str, Any]:
    """What the ranks must agree on: shapes, and the values that are the same on all ranks. And a fingerprint of k."""
    batch, _, heads, head_dim = q.shape
    return {
        "call": "attention_weights",
        "batch, heads, kv_heads, head_dim": (batch, heads, k.shape[2], head_dim),
        "dtype": str(q.dtype),
        "q (see ring.rows_at)": _sums(q, 1),
        "lse (see ring.rows_at)": "none" if lse is None else _sums(lse, 2),
        "sinks": describe_sinks(sinks),
        "fingerprint": fingerprint(k),
    }


def _sums(x: Tensor, dim: int) -> str:
    """The sum of each row, by which ranks detect that they pass different rows."""
    return digest(str(x.transpose(0, dim).flatten(1).sum(1, dtype=torch.float64).tolist()), at_most=60)
