"""Decoding with the rows of a cache sharded over a ring: each rank attends its rows, and the results become one."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.api import attention
from ringspan.decoding.cache import Cache, Lockstep, check_cache, check_sequences
from ringspan.engine import forward_tile_, with_dense_rows
from ringspan.geometry import Documents, Full, Lane, Pattern, group_heads
from ringspan.kernels import Kernel, accumulation_dtype
from ringspan.planning import Tile
from ringspan.ring import Counters, Ring, RingError
from ringspan.softmax import merge_
from ringspan.validation import autocast, check_operands, check_tensors, kernel_for, scale_for, without_autocast


def merge_over_ring(out: Tensor, lse: Tensor, ring: Ring) -> None:
    """Merge what every rank found in its rows into ``out`` (batch, rows, heads, dim) and ``lse`` (batch, heads, rows).

    One exchange of a few rows. All ranks merge in the order of ranks, so that all have the same result, bit for bit.
    """
    mine = torch.cat((out, lse.transpose(1, 2).unsqueeze(-1)), dim=-1)
    every = [torch.empty_like(mine) for _ in range(ring.size)]
    try:
        dist.all_gather(every, mine, group=ring.group)
    except RuntimeError as error:
        raise RingError(f"merging a step of decoding over the ring failed; a rank is gone or stuck: {error}") from error
    parts = [(part[..., :-1].transpose(1, 2), part[..., -1].transpose(1, 2)) for part in every]
    by_head = out.transpose(1, 2)
    by_head.copy_(parts[0][0])
    lse.copy_(parts[0][1])
    for part, part_lse in parts[1:]:
        merge_(by_head, lse, part, part_lse)


Result = tuple[Tensor, Tensor]  # output (batch, rows, heads, dim), lse (batch, heads, rows)


@overload
def attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Cache,
    *,
    lengths: tuple[int, ...] | None = ...,
    scale: float | None = ...,
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
    lengths: tuple[int, ...] | None = ...,
    scale: float | None = ...,
    return_lse: Literal[True],
    kernel: str | None = ...,
) -> Result: ...


def attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Cache,
    *,
    lengths: tuple[int, ...] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    kernel: str | None = None,
) -> Tensor | Result:
    """Causal attention of the next tokens of each sequence; the cache takes in their rows.

    What comes out is what `attention` over the whole text gives for these rows.

    Args:
        q: (batch, rows, heads, dim): one row for one token, more for a block of tokens, such as a prompt.
        k, v: (batch, rows, kv_heads, dim).
        cache: what is kept of the rows before; positions follow from it.
        lengths: new rows of each sequence, where they differ (prompts): q, k and v then have a batch of 1 and hold them
            end to end. 0 leaves a sequence as it is.
        scale, return_lse, kernel: as for `attention`.

    Returns:
        (batch, rows, heads, dim), and the lse (batch, heads, rows) if asked for. There are no gradients.
    """
    check_tensors(q, k, v)
    q, k, v = autocast(q, k, v)
    check_operands(q, k, v)
    check_cache(cache, k)
    check_sequences(cache, k, lengths, k.shape[1])
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ValueError("q, k or v requires gradients, and decoding has none: call it under torch.no_grad()")
    chosen, factor = kernel_for(kernel, q), scale_for(scale, q)
    q, k, v = (with_dense_rows(x) for x in (q, k, v))
    with torch.no_grad(), without_autocast(q.device), cache.changing():
        out, lse = _step(q, k, v, cache, lengths, factor, chosen)
    return (out, lse) if return_lse else out


def _step(
    q: Tensor, k: Tensor, v: Tensor, cache: Cache, lengths: tuple[int, ...] | None, scale: float, kernel: Kernel
) -> Result:
    if lengths is None:
        cuts = [(slice(group.first, group.stop), slice(None)) for group in cache.groups]
    else:
        cache.part()
        cuts = [(slice(None), slice(first, stop)) for first, stop in Documents(tuple(lengths)).spans()]
    found = [
        _attend(q[cut], k[cut], v[cut], cache, group, scale, kernel)
        for group, cut in zip(cache.groups, cuts, strict=True)
    ]
    if lengths is not None:
        cache.join()
    out, lse = _joined([kept for kept, _ in found], packed=lengths is not None)
    if cache.ring is not None:  # once for all groups: ranks may group the sequences differently
        merge_over_ring(out, lse, cache.ring)
        own, own_lse = _joined([among for _, among in found], packed=lengths is not None)
        merge_(out.transpose(1, 2), lse, own.transpose(1, 2), own_lse)
    return out.to(q.dtype), lse


def _joined(results: list[Result], packed: bool) -> Result:
    if len(results) == 1:
        return results[0]
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, 1 if packed else 0), torch.cat(lses, 2 if packed else 0)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, cache: Cache, group: Lockstep, scale: float, kernel: Kernel
) -> tuple[Result, Result]:
    """One group of sequences: what its rows see of those that are kept here, and what they see among themselves.

    Without a ring the two are one: everything. The group moves on.
    """
    if q.shape[1] == 1:
        kept = _one_token(q, k, v, cache, group, scale, kernel)
        return kept, kept if cache.ring is None else _nothing_seen(q)
    kept = own = _nothing_seen(q)
    if q.shape[1]:
        own = _among_themselves(q, k, v, cache.pattern, group.position, scale, kernel)
        kept = own if cache.ring is None else kept
        _look_back_(q, *kept, cache, group, scale, kernel)
        cache.take_in(group, k, v)
    return kept, own


def _one_token(q: Tensor, k: Tensor, v: Tensor, cache: Cache, group: Lockstep, scale: float, kernel: Kernel) -> Result:
    """The token is kept first, where it is to be kept; then it asks what is there, itself among it."""
    batch, _, heads, dim = q.shape
    # The queries that share a KV head are the rows of one tile.
    asked = q.view(batch, cache.kv_heads, heads // cache.kv_heads, dim)
    new_rows = (k[:, 0], v[:, 0])
    out = lse = None
    for branch, filled in zip(cache.branches, group.filled, strict=True):
        phase = branch.kept.phase(group.position)
        if phase == 0:
            filled[:] = [0] * cache.kv_heads  # a segment begins: nobody will see the last one again
        selecting = branch.kept.heads_at(phase)
        if selecting is None:
            continue
        rows = filled[selecting.start]
        if cache.share.takes(branch.kept.slot(phase)):
            branch.make_room(rows + 1)
            for held, x in zip(branch.rows, new_rows, strict=True):
                held[group.first : group.stop, selecting, rows] = x[:, selecting]
            rows += 1
            for head in range(selecting.start, selecting.stop, selecting.step):
                filled[head] = rows
        if rows == 0:
            continue
        keys, values = branch.rows[:, group.first : group.stop, selecting, :rows].unbind()
        part, part_lse = kernel.forward(asked[:, selecting], keys, values, False, scale)
        if out is None and part.shape == asked.shape:
            out, lse = part.to(accumulation_dtype(q.dtype)), part_lse
            continue
        if out is None or lse is None:
            seen = _nothing_seen(q)
            out, lse = seen[0].view(asked.shape), seen[1].view(asked.shape[:3])
        merge_(out[:, selecting], lse[:, selecting], part, part_lse)
    group.position += 1
    if out is None or lse is None:
        return _nothing_seen(q)
    return out.reshape(q.shape), lse.reshape(batch, heads, 1)


def _among_themselves(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, position: int, scale: float, kernel: Kernel
) -> Result:
    """A block of rows, as if nothing came before it: the pattern is moved to where the block begins."""
    moved = pattern if isinstance(pattern, Full) else replace(pattern, shift=pattern.shift + position)
    out, lse = attention(
        *(q, k, v),
        pattern=moved,
        causal=True,
        scale=scale,
        kernel=kernel.name,
        return_lse=True,
        seq_len=q.shape[1],  # few rows are meant
    )
    return out.to(lse.dtype), lse


def _look_back_(
    q: Tensor, out: Tensor, lse: Tensor, cache: Cache, group: Lockstep, scale: float, kernel: Kernel
) -> None:
    """Merge what a block sees of the rows that are kept: in each branch, the begun segment's rows are one more tile."""
    for branch, filled in zip(cache.branches, group.filled, strict=True):
        asking = branch.kept.asking(group.position, q.shape[1])
        if asking is None:
            continue
        keys, values = branch.of(group)
        for queries, held in group_heads(asking, [Lane(0, n, 1) for n in filled]):
            forward_tile_(
                Tile(queries, held, causal=False),
                {"q": q, "out": out, "lse": lse.transpose(1, 2)},
                {"k": keys, "v": values},
                scale=scale,
                kernel=kernel,
                counters=Counters(),
            )


def _nothing_seen(q: Tensor) -> Result:
    """What rows that have seen nothing have: an output of 0, and an lse of -inf."""
    batch, rows, heads, _ = q.shape
    wide = accumulation_dtype(q.dtype)
    return q.new_zeros(q.shape, dtype=wide), q.new_full((batch, heads, rows), -torch.inf, dtype=wide)
