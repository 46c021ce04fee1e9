"""The dense oracle: attention as the definition states it (docs/semantics.md), for tests on short sequences.

It shares no code with the engine: no combs, no tiles, no merging. It stores every (query, key) pair. Differentiable any
number of times.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ringspan.geometry import Dilated, Full, Pattern, Window
from ringspan.order import Order
from ringspan.order.base import rows_and_places


def multiplicity(
    pattern: Pattern,
    n: int,
    kv_heads: int,
    *,
    causal: bool = False,
    lengths: Sequence[int] | None = None,
    order: Order | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """m(p, t) for each KV head, the number of branches in which query p sees key t: (kv_heads, n, n), int64.

    With an order, the pattern applies along the curve and causality along the sequence. With ``rows``, only these
    queries are computed: (kv_heads, len(rows), n).

    >>> from ringspan import Dilated
    >>> multiplicity(Dilated((4, 8), (1, 2)), 16, 2)[1, 5].tolist()
    [0, 1, 0, 1, 1, 2, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0]
    """
    sizes = torch.tensor([n] if lengths is None else list(lengths))
    document = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    position = torch.arange(n) - (sizes.cumsum(0) - sizes)[document]
    places = [rows_and_places(order, size)[1] for size in sizes.tolist() if size] if order else []
    place = torch.cat(places) if places else position  # along the curve, within each document
    rows = torch.arange(n) if rows is None else rows
    allowed = document[rows, None] == document[None, :]
    if causal:
        allowed &= position[None, :] <= position[rows, None]
    count = torch.zeros(kv_heads, len(rows), n, dtype=torch.int64)
    for part in pattern.parts:
        if isinstance(part, Full):
            count += allowed
        elif isinstance(part, Window):
            back = place[rows, None] - place[None, :]
            count += allowed & (back <= part.left) & (-back <= part.right) & (back % part.dilation == 0)
        elif isinstance(part, Dilated):
            for head in range(kv_heads):
                count[head] += allowed * _branches_seen(part, place, rows, head, kv_heads)
    return count


def _branches_seen(pattern: Dilated, place: Tensor, rows: Tensor, head: int, kv_heads: int) -> Tensor:
    """The number of branches in which each of the query rows sees each key, for one KV head."""
    count = torch.zeros(len(rows), len(place), dtype=torch.int64)
    total_heads = pattern.total_heads or kv_heads
    for w, r in zip(pattern.segment_lengths, pattern.dilation_rates, strict=True):
        x, c = place + pattern.shift, pattern.first_head + head
        offset = c % r if pattern.head_offsets == "interleaved" else c // -(-total_heads // r)
        selected = x % w % r == offset
        count += ((x // w)[rows, None] == (x // w)[None, :]) & selected[rows, None] & selected[None, :]
    return count


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    lengths: Sequence[int] | None = None,
    order: Order | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output (batch, seq, heads, dim) and lse (batch, heads, seq), computed in the dtype of the inputs.

    With ``rows``, q, sinks and the results hold only these rows of the sequence: O(len(rows) * n) instead of O(n ** 2).
    """
    heads, dim = q.shape[2:]
    n, kv_heads = k.shape[1:3]
    count = multiplicity(pattern, n, kv_heads, causal=causal, lengths=lengths, order=order, rows=rows)
    count = count.repeat_interleave(heads // kv_heads, dim=0).to(q)
    k, v = (x.repeat_interleave(heads // kv_heads, dim=2) for x in (k, v))
    scores = torch.einsum("bphd,bthd->bhpt", q, k) * (dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + count.log()
    if sinks is not None:  # one more key, whose value is 0
        logits = sinks.to(q).expand(*q.shape[:3]).transpose(1, 2).unsqueeze(-1)
        scores = torch.cat((scores, logits), -1)
        v = torch.cat((v, torch.zeros_like(v[:, :1])), 1)
    blind = (scores == -torch.inf).all(-1)  # rows that see nothing
    scores = scores.masked_fill(blind[..., None], 0.0)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().masked_fill(blind[..., None], 0.0)
    return torch.einsum("bhpt,bthd->bphd", weights, v), lse.masked_fill(blind, -torch.inf)
