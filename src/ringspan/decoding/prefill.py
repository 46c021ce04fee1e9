"""`attention_prefill`: a prompt that is spread over a ring, and what a cache takes of it for the tokens that follow.

Who holds which of the rows that matter follows from the layout, in integers, on every rank alike: the rows are gathered
from the ranks that hold them, and from no others, or left where they are if the cache is sharded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.api import attention
from ringspan.decoding.cache import Cache, Lockstep, check_cache, check_sequences
from ringspan.decoding.step import Result
from ringspan.engine import with_dense_rows
from ringspan.geometry import Documents, Lane, group_heads
from ringspan.layout import Layout
from ringspan.ring import Ring, RingError, SimulatedRing
from ringspan.ring.agreement import digest, fingerprint
from ringspan.schedule import parcel_rows
from ringspan.validation import autocast, check_operands, check_tensors
from ringspan.views import comb_view


@overload
def attention_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Cache,
    *,
    ring: Ring | SimulatedRing,
    seq_len: int | None = ...,
    lengths: tuple[int, ...] | None = ...,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
    kernel: str | None = ...,
) -> Tensor: ...


@overload
def attention_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Cache,
    *,
    ring: Ring | SimulatedRing,
    seq_len: int | None = ...,
    lengths: tuple[int, ...] | None = ...,
    scale: float | None = ...,
    return_lse: Literal[True],
    kernel: str | None = ...,
) -> Result: ...


def attention_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Cache,
    *,
    ring: Ring | SimulatedRing,
    seq_len: int | None = None,
    lengths: tuple[int, ...] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    kernel: str | None = None,
) -> Tensor | Result:
    """Causal attention over prompts that are spread over a ring; an empty cache takes in what later tokens see.

    Afterwards the cache of every rank holds all of these rows and `attention_step` goes on without the ring; or, if the
    cache was made with ``ring=``, every rank keeps those of its own rows, and steps merge over the ring.

    Args:
        q, k, v, ring, seq_len, lengths, scale, return_lse, kernel: as for `attention`; rows are this rank's. With
            ``lengths``, document i begins sequence i of the cache, and the batch is 1.
    """
    check_tensors(q, k, v)
    q, k, v = autocast(q, k, v)
    check_operands(q, k, v)
    if not isinstance(ring, (Ring, SimulatedRing)):
        raise TypeError(
            f"ring is a {type(ring).__name__}: must be a Ring or a SimulatedRing; alone, use attention_step"
        )
    check_cache(cache, k)
    if cache.ring not in (None, ring):
        raise ValueError(f"the cache is sharded over {cache.ring}, the prompt over {ring}: they must be one ring")
    gradients = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    layout = ring.agree(k.shape[1], lambda: _note(q, k, v, cache, lengths, scale, gradients), seq_len, k)
    if gradients:
        raise ValueError("q, k or v requires gradients, and a cache keeps none: call it under torch.no_grad()")
    cache.check_whole()
    if any(cache.lengths):
        raise ValueError(
            f"the cache has seen {cache.lengths} tokens: a prompt over a ring begins a text; reset() the cache, or "
            "give every rank the whole block and call attention_step"
        )
    check_sequences(cache, k, lengths, layout.rows)
    q, k, v = (with_dense_rows(x) for x in (q, k, v))
    options: dict[str, Any] = dict(pattern=cache.pattern, causal=True, scale=scale, kernel=kernel, lengths=lengths)
    with torch.no_grad():
        out, lse = attention(q, k, v, ring=ring, seq_len=layout.rows, return_lse=True, **options)
        with cache.changing():
            _take_in(cache, k, v, layout, ring, lengths)
    return (out, lse) if return_lse else out


def _note(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Cache,
    lengths: tuple[int, ...] | None,
    scale: float | None,
    gradients: bool,
) -> dict[str, Any]:
    """What ranks must agree on: `attention` is then told the length, and compares nothing itself."""
    batch, _, heads, dim = q.shape
    return {
        "call": "attention_prefill",
        "batch, heads, kv_heads, dim": (batch, heads, k.shape[2], dim),
        "dtype": str(k.dtype),
        "lengths": digest(str(lengths), at_most=100),
        "pattern": digest(cache.pattern.text, at_most=100),
        "scale": digest(str(scale), at_most=100),
        "cache": ("gathered" if cache.ring is None else "sharded") + ("" if cache.is_whole else ", incomplete"),
        "tokens that the cache has seen": digest(str(cache.lengths), at_most=100),
        "whether gradients are needed": gradients,
        "fingerprint": fingerprint(k, v),
    }


@dataclass(frozen=True)
class _Holding:
    """Rows that one rank holds of one branch, for one group of sequences."""

    rank: int
    group: Lockstep
    branch: int
    lanes: list[Lane]

    @property
    def rows(self) -> int:
        return sum(lane.rows for lane in self.lanes)

    def packed(self) -> list[Lane]:
        """Where the rows of each head lie when they are packed head after head."""
        lanes, start = [], 0
        for lane in self.lanes:
            lanes.append(Lane(start, lane.rows, 1))
            start += lane.rows
        return lanes


def _take_in(
    cache: Cache, k: Tensor, v: Tensor, layout: Layout, ring: Ring | SimulatedRing, lengths: tuple[int, ...] | None
) -> None:
    if lengths is not None:
        cache.part()
    spans = list(Documents((layout.rows,) if lengths is None else tuple(lengths)).spans())
    if isinstance(ring, SimulatedRing):
        for group, (first, stop) in zip(cache.groups, spans, strict=True):
            if stop > first:
                cache.take_in(group, k[:, first:stop], v[:, first:stop])
    else:
        holdings = list(_holdings(cache, spans, layout))
        if cache.ring is None:
            _gather(cache, k, v, holdings, ring)
        else:
            for holding in (holding for holding in holdings if holding.rank == ring.rank):
                _append(cache, holding, k, v, holding.lanes)
        for group, (first, stop) in zip(cache.groups, spans, strict=True):
            group.position = stop - first
    cache.join()


def _holdings(cache: Cache, spans: list[tuple[int, int]], layout: Layout) -> Iterator[_Holding]:
    for group, (first, stop) in zip(cache.groups, spans, strict=True):
        if stop == first:
            continue
        for number, branch in enumerate(cache.branches):
            for rank, lanes in branch.kept.to_keep_by_rank(first, stop - first, layout):
                yield _Holding(rank, group, number, lanes)


def _append(cache: Cache, holding: _Holding, k: Tensor, v: Tensor, lanes: list[Lane]) -> None:
    cache.branches[holding.branch].append(holding.group, holding.group.filled[holding.branch], k, v, lanes)


def _gather(cache: Cache, k: Tensor, v: Tensor, holdings: list[_Holding], ring: Ring) -> None:
    """Each rank in turn sends everybody the rows that it alone has: all ranks know which these are."""
    batch, _, kv_heads, dim = k.shape
    for rank in range(ring.size):
        theirs = [holding for holding in holdings if holding.rank == rank and holding.rows]
        if not theirs:
            continue
        sizes = [2 * batch * holding.rows * dim for holding in theirs]
        memory = k.new_empty(sum(sizes))
        chunks = [
            chunk.view(2, batch, holding.rows, dim) for chunk, holding in zip(memory.split(sizes), theirs, strict=True)
        ]
        if rank == ring.rank:
            for chunk, holding in zip(chunks, theirs, strict=True):
                _pack(chunk, holding, k, v)
        try:  # as bytes: not every backend knows every dtype
            dist.broadcast(memory.view(torch.uint8), dist.get_global_rank(ring.group, rank), group=ring.group)
        except RuntimeError as error:
            raise RingError(f"gathering the cache's rows from rank {rank} failed; a rank is gone: {error}") from error
        for chunk, holding in zip(chunks, theirs, strict=True):
            _append(cache, holding, *parcel_rows(chunk, kv_heads), holding.packed())


def _pack(chunk: Tensor, holding: _Holding, k: Tensor, v: Tensor) -> None:
    for mine, there in group_heads(holding.lanes, holding.packed()):
        for x, rows in zip((k, v), parcel_rows(chunk, k.shape[2]), strict=True):
            comb_view(rows, there).copy_(comb_view(x, mine))
