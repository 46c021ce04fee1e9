"""`attention_step`: attention of new tokens over a cache, on one device or with the cache sharded over a ring."""

from __future__ import annotations

from typing import Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.decoding.cache import Cache, SequenceGroup, check_cache, check_sequences
from ringspan.engine import forward_tile_, with_dense_rows
from ringspan.execute import Call
from ringspan.geometry import Documents, Pattern
from ringspan.kernels import Kernel, ScoreOptions, accumulation_dtype
from ringspan.planning import costs_for
from ringspan.ring import Counters, Ring, RingError
from ringspan.ring.simulated import ALONE
from ringspan.softmax import merge_, merge_sinks_
from ringspan.validation import (
    Lengths,
    autocast,
    check_operands,
    check_sinks,
    check_tensors,
    document_lengths,
    kernel_for,
    scale_for,
    softcap_for,
    without_autocast,
)

Result = tuple[Tensor, Tensor]  # output (batch, rows, heads, head_dim), lse (batch, heads, rows)


@overload
def attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Cache,
    *,
    lengths: Lengths | None = ...,
    cu_seqlens: Lengths | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[False] = ...,
    kernel: str | None = ...,
) -> Tensor: ...


@overload
def attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Cache,
    *,
    lengths: Lengths | None = ...,
    cu_seqlens: Lengths | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[True],
    kernel: str | None = ...,
) -> Result: ...


def attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Cache,
    *,
    lengths: Lengths | None = None,
    cu_seqlens: Lengths | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    kernel: str | None = None,
) -> Tensor | Result:
    """Causal attention of the next tokens of each sequence. Appends their rows to the cache.

    The result equals that of `attention` over the whole text for these rows.

    Args:
        q: (batch, rows, heads, head_dim): one row for one token, more for a block of tokens, such as a prompt.
        k, v: (batch, rows, kv_heads, head_dim).
        cache: rows of the tokens before. It also determines the positions of the new ones.
        lengths: number of new rows of each sequence, if they differ. q, k and v then have a batch of 1 and hold the
            rows of all sequences one after another. 0 leaves a sequence unchanged.
        cu_seqlens: the same as offsets (0, n1, n1 + n2, ..).
        sinks: as for `attention`: (heads,), or (batch, rows, heads) for the new rows. With a sharded cache, the same on
            all ranks.
        scale, softcap, return_lse, kernel: as for `attention`.

    Returns:
        (batch, rows, heads, head_dim), and the lse (batch, heads, rows) if ``return_lse``. Not differentiable.
    """
    check_tensors(q, k, v)
    q, k, v = autocast(q, k, v)
    check_operands(q, k, v)
    check_cache(cache, k)
    check_sinks(sinks, q)
    packed = document_lengths(lengths, cu_seqlens, k.shape[1])
    check_sequences(cache, k, packed, k.shape[1])
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks)):
        raise ValueError(
            "q, k, v or sinks requires gradients, which decoding does not compute: call it under torch.no_grad()"
        )
    scores = ScoreOptions(scale_for(scale, q), softcap_for(softcap, q))
    chosen = kernel_for(kernel, q, scores.softcap)
    q, k, v = (with_dense_rows(x) for x in (q, k, v))
    with torch.no_grad(), without_autocast(q.device), cache.updating():
        out, lse = _step(q, k, v, cache, packed, scores, chosen)
        if sinks is not None:  # once, after the merge over branches, cached rows and ranks
            merge_sinks_(out, lse, sinks)
    out = out.to(q.dtype)
    return (out, lse) if return_lse else out


def _step(
    q: Tensor, k: Tensor, v: Tensor, cache: Cache, lengths: tuple[int, ...] | None, scores: ScoreOptions, kernel: Kernel
) -> Result:
    if lengths is None:
        cuts = [(slice(group.first, group.stop), slice(None)) for group in cache.groups]
    else:
        cache.split_groups()
        cuts = [(slice(None), slice(first, stop)) for first, stop in Documents(lengths).spans()]
    results = [
        _attend(q[cut], k[cut], v[cut], cache, group, scores, kernel)
        for group, cut in zip(cache.groups, cuts, strict=True)
    ]
    if lengths is not None:
        cache.merge_groups()
    out, lse = _concatenate([seen for seen, _ in results], packed=lengths is not None)
    if cache.ring is not None:  # one exchange for all groups: ranks may group the sequences differently
        _merge_over_ring(out, lse, cache.ring)
        own, own_lse = _concatenate([own for _, own in results], packed=lengths is not None)
        merge_(out.transpose(1, 2), lse, own.transpose(1, 2), own_lse)
    return out, lse


def _concatenate(results: list[Result], packed: bool) -> Result:
    if len(results) == 1:
        return results[0]
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, 1 if packed else 0), torch.cat(lses, 2 if packed else 0)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, cache: Cache, group: SequenceGroup, scores: ScoreOptions, kernel: Kernel
) -> tuple[Result, Result]:
    """Attention of one group over the cached rows on this rank, and over its own new rows. Advances the group.

    Without a ring both are the same complete result.
    """
    if q.shape[1] == 1:
        kept = _one_token(q, k, v, cache, group, scores, kernel)
        return kept, kept if cache.ring is None else _empty_result(q)
    kept = own = _empty_result(q)
    if q.shape[1]:
        own = _attend_block(q, k, v, cache.pattern, group.position, scores, kernel)
        kept = own if cache.ring is None else kept
        _merge_cached_rows_(q, *kept, cache, group, scores, kernel)
        cache.append(group, k, v)
    return kept, own


def _one_token(
    q: Tensor, k: Tensor, v: Tensor, cache: Cache, group: SequenceGroup, scores: ScoreOptions, kernel: Kernel
) -> Result:
    """One token: append its rows where they are kept, then attend over the cached rows, its own included."""
    batch, _, heads, dim = q.shape
    # Query heads that share a KV head are the rows of one tile.
    queries = q.view(batch, cache.kv_heads, heads // cache.kv_heads, dim)
    new_rows = (k[:, 0], v[:, 0])
    out = lse = None
    for branch, filled in zip(cache.branches, group.filled, strict=True):
        token = branch.retention.add_token(group.position, filled)
        if token is None:
            continue
        if token.slot is not None:
            branch.reserve(token.slot + 1)
            for held, x in zip(branch.rows, new_rows, strict=True):
                held[group.first : group.stop, token.heads, token.slot] = x[:, token.heads]
        for slots in token.seen:
            keys, values = branch.rows[:, group.first : group.stop, token.heads, slots].unbind()
            part, part_lse = kernel.forward(queries[:, token.heads], keys, values, "full", scores)
            if out is None and part.shape == queries.shape:
                out, lse = part.to(accumulation_dtype(q.dtype)), part_lse
                continue
            if out is None or lse is None:
                seen = _empty_result(q)
                out, lse = seen[0].view(queries.shape), seen[1].view(queries.shape[:3])
            merge_(out[:, token.heads], lse[:, token.heads], part, part_lse)
    group.position += 1
    if out is None or lse is None:
        return _empty_result(q)
    return out.reshape(q.shape), lse.reshape(batch, heads, 1)


def _attend_block(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, position: int, scores: ScoreOptions, kernel: Kernel
) -> Result:
    """Attention within a block of rows, without the rows before it. Shifts the pattern to the block's position."""
    # Not `attention`, which warns about unselected rows for every new shift; the cache has warned for all rows.
    costs = costs_for("auto", q.device.type)
    call = Call(pattern.moved(position), None, True, scores, kernel, costs, ALONE)
    out, lse, _ = call.forward(q, k, v, None, None, q.shape[1], (False, False, False, False))
    return out.to(lse.dtype), lse


def _merge_cached_rows_(
    q: Tensor, out: Tensor, lse: Tensor, cache: Cache, group: SequenceGroup, scores: ScoreOptions, kernel: Kernel
) -> None:
    """Merge attention of a block over the cached rows that it sees."""
    for branch, filled in zip(cache.branches, group.filled, strict=True):
        keys, values = branch.of_group(group)
        for tile in branch.retention.tiles_over_cache(group.position, q.shape[1], filled):
            forward_tile_(
                tile,
                {"q": q, "out": out, "lse": lse.transpose(1, 2)},
                {"k": keys, "v": values},
                scores=scores,
                kernel=kernel,
                counters=Counters(),
            )


def _empty_result(q: Tensor) -> Result:
    """The result of rows that see nothing: output 0, lse -inf."""
    batch, rows, heads, _ = q.shape
    wide = accumulation_dtype(q.dtype)
    return q.new_zeros(q.shape, dtype=wide), q.new_full((batch, heads, rows), -torch.inf, dtype=wide)


def _merge_over_ring(out: Tensor, lse: Tensor, ring: Ring) -> None:
    """Merge the results of all ranks into ``out`` (batch, rows, heads, head_dim) and ``lse`` (batch, heads, rows).

    One all-gather of a few rows. All ranks merge in rank order, so the result is bitwise the same on all of them.
    """
    mine = torch.cat((out, lse.transpose(1, 2).unsqueeze(-1)), dim=-1)
    every = [torch.empty_like(mine) for _ in range(ring.size)]
    try:
        dist.all_gather(every, mine, group=ring.group)
    except RuntimeError as error:
        raise RingError(
            f"the all-gather of a decoding step failed: {error}. A rank has exited or is stuck; restart all ranks"
        ) from error
    parts = [(part[..., :-1].transpose(1, 2), part[..., -1].transpose(1, 2)) for part in every]
    by_head = out.transpose(1, 2)
    by_head.copy_(parts[0][0])
    lse.copy_(parts[0][1])
    for part, part_lse in parts[1:]:
        merge_(by_head, lse, part, part_lse)
