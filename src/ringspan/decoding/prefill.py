"""`attention_prefill`: attention over a prompt that is split over a ring, which also fills a cache.

Every rank derives from the layout which rank holds which rows of the cache. Those ranks broadcast their rows. With a
sharded cache, the rows of segments stay on their rank; those of windows go to the rank that their position determines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.api import attention
from ringspan.decoding.cache import Cache, SequenceGroup, check_cache, check_sequences
from ringspan.decoding.retention import PromptRows
from ringspan.decoding.step import Result
from ringspan.engine import with_dense_rows
from ringspan.execute import describe_sinks
from ringspan.geometry import Documents, Lane, group_heads
from ringspan.layout import Layout
from ringspan.planning import parcel_lanes
from ringspan.ring import Ring, RingError, SimulatedRing
from ringspan.ring.agreement import digest, fingerprint
from ringspan.schedule import parcel_rows
from ringspan.validation import Lengths, autocast, check_operands, check_sinks, check_tensors, document_lengths
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
    lengths: Lengths | None = ...,
    cu_seqlens: Lengths | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
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
    lengths: Lengths | None = ...,
    cu_seqlens: Lengths | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
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
    lengths: Lengths | None = None,
    cu_seqlens: Lengths | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    kernel: str | None = None,
) -> Tensor | Result:
    """Causal attention over prompts that are split over a ring. Fills an empty cache with the rows later tokens see.

    Afterwards the cache of every rank holds all of these rows, and `attention_step` continues without the ring. If the
    cache was created with ``ring=``, every rank keeps some of them, and steps merge over the ring: rows of segments
    stay where they are, and those of windows are distributed round-robin.

    Args:
        q, k, v, ring, seq_len, lengths, cu_seqlens, scale, softcap, sinks, return_lse, kernel: as for `attention`;
            tensors hold this rank's rows. With ``lengths`` or ``cu_seqlens``, document i starts sequence i of the
            cache, and the batch is 1.
    """
    check_tensors(q, k, v)
    q, k, v = autocast(q, k, v)
    check_operands(q, k, v)
    if not isinstance(ring, (Ring, SimulatedRing)):
        raise TypeError(
            f"ring is a {type(ring).__name__}: must be a Ring or a SimulatedRing; on one device, use attention_step"
        )
    check_cache(cache, k)
    if cache.ring not in (None, ring):
        raise ValueError(f"the cache is sharded over {cache.ring}, the prompt over {ring}: must be the same ring")
    check_sinks(sinks, q)
    packed = document_lengths(lengths, cu_seqlens, seq_len)
    settings: dict[str, Any] = dict(scale=scale, softcap=softcap, sinks=sinks)
    gradients = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    layout = ring.agree(
        k.shape[1], lambda: _metadata(q, k, v, cache, packed, gradients, **settings), seq_len, k, packed
    )
    if gradients:
        raise ValueError(
            "q, k, v or sinks requires gradients, which a cache does not keep: call it under torch.no_grad()"
        )
    cache.check_complete()
    if any(cache.lengths):
        raise ValueError(
            f"the cache has seen {cache.lengths} tokens: a prompt over a ring needs an empty cache. Call reset(), or "
            "give every rank the whole block and call attention_step"
        )
    check_sequences(cache, k, packed, layout.rows)
    q, k, v = (with_dense_rows(x) for x in (q, k, v))
    options: dict[str, Any] = dict(pattern=cache.pattern, causal=True, kernel=kernel, lengths=packed, **settings)
    with torch.no_grad():
        out, lse = attention(q, k, v, ring=ring, seq_len=layout.rows, return_lse=True, **options)
        with cache.updating():
            _fill(cache, k, v, layout, ring, packed)
    return (out, lse) if return_lse else out


def _metadata(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Cache,
    lengths: tuple[int, ...] | None,
    gradients: bool,
    *,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> dict[str, Any]:
    """What ranks must agree on. `attention` then gets seq_len and skips its own check."""
    batch, _, heads, head_dim = q.shape
    return {
        "call": "attention_prefill",
        "batch, heads, kv_heads, head_dim": (batch, heads, k.shape[2], head_dim),
        "dtype": str(k.dtype),
        "lengths": digest(str(lengths), at_most=100),
        "pattern": digest(cache.pattern.text, at_most=100),
        "scale": digest(str(scale), at_most=100),
        "softcap": digest(str(softcap), at_most=100),
        "sinks": describe_sinks(sinks),
        "cache": ("gathered" if cache.ring is None else "sharded") + ("" if cache.is_complete else ", incomplete"),
        "tokens seen by the cache": digest(str(cache.lengths), at_most=100),
        "whether gradients are needed": gradients,
        "fingerprint": fingerprint(k, v),
    }


@dataclass(frozen=True)
class _PromptPart:
    """Rows of a prompt that go to one branch and one group of sequences of the cache.

    ``moves`` tells whether other ranks keep them, too or instead.
    """

    group: SequenceGroup
    branch: int
    prompt: PromptRows
    moves: bool

    @property
    def rows(self) -> int:
        return sum(lane.rows for lane in self.prompt.lanes)

    def store(self, cache: Cache, k: Tensor, v: Tensor, lanes: list[Lane]) -> None:
        """Store the rows in the cache, from the given lanes of ``k`` and ``v``."""
        branch, filled = cache.branches[self.branch], self.group.filled[self.branch]
        branch.store(self.group, k, v, branch.retention.add_prompt_rows(self.prompt.position, lanes, filled))


def _fill(
    cache: Cache, k: Tensor, v: Tensor, layout: Layout, ring: Ring | SimulatedRing, lengths: tuple[int, ...] | None
) -> None:
    if lengths is not None:
        cache.split_groups()
    spans = list(Documents((layout.rows,) if lengths is None else lengths).spans())
    if isinstance(ring, SimulatedRing):
        for group, (first, stop) in zip(cache.groups, spans, strict=True):
            if stop > first:
                cache.append(group, k[:, first:stop], v[:, first:stop])
    else:
        parts = list(_prompt_parts(cache, spans, layout))
        _broadcast(cache, k, v, [part for part in parts if part.moves], ring)
        for part in parts:
            if not part.moves and part.prompt.rank == ring.rank:
                part.store(cache, k, v, part.prompt.lanes)
        for group, (first, stop) in zip(cache.groups, spans, strict=True):
            group.position = stop - first
    cache.merge_groups()


def _prompt_parts(cache: Cache, spans: list[tuple[int, int]], layout: Layout) -> Iterator[_PromptPart]:
    for group, (first, stop) in zip(cache.groups, spans, strict=True):
        if stop == first:
            continue
        for number, branch in enumerate(cache.branches):
            moves = cache.ring is None or branch.retention.moves_prompts
            for prompt in branch.retention.prompt_rows(first, stop - first, layout):
                yield _PromptPart(group, number, prompt, moves)


def _broadcast(cache: Cache, k: Tensor, v: Tensor, parts: list[_PromptPart], ring: Ring) -> None:
    """Each rank in turn broadcasts its rows; all ranks know which these are, and store what they keep."""
    batch, _, kv_heads, head_dim = k.shape
    for rank in range(ring.size):
        theirs = [part for part in parts if part.prompt.rank == rank and part.rows]
        if not theirs:
            continue
        sizes = [2 * batch * part.rows * head_dim for part in theirs]
        memory = k.new_empty(sum(sizes))
        chunks = [
            chunk.view(2, batch, part.rows, head_dim) for chunk, part in zip(memory.split(sizes), theirs, strict=True)
        ]
        if rank == ring.rank:
            for chunk, part in zip(chunks, theirs, strict=True):
                _pack(chunk, part, k, v)
        try:  # as bytes: not every backend supports every dtype
            dist.broadcast(memory.view(torch.uint8), dist.get_global_rank(ring.group, rank), group=ring.group)
        except RuntimeError as error:
            raise RingError(
                f"the broadcast of cached rows from rank {rank} failed: {error}. A rank has exited or is stuck; "
                "restart all ranks"
            ) from error
        for chunk, part in zip(chunks, theirs, strict=True):
            part.store(cache, *parcel_rows(chunk, kv_heads), parcel_lanes(part.prompt.lanes))


def _pack(chunk: Tensor, part: _PromptPart, k: Tensor, v: Tensor) -> None:
    for mine, there in group_heads(part.prompt.lanes, parcel_lanes(part.prompt.lanes)):
        for x, rows in zip((k, v), parcel_rows(chunk, k.shape[2]), strict=True):
            comb_view(rows, there).copy_(comb_view(x, mine))
