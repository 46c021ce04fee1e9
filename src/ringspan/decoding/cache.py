"""`Cache`: for each branch, the rows that later tokens see, in buffers that are reused.

Stores rows only; `ringspan.decoding.step` computes with them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from ringspan.decoding.retention import UNBOUNDED, Copies, RankShare, Retention, branch_retentions
from ringspan.geometry import Documents, Pattern, as_int, check_pattern
from ringspan.ring import Ring
from ringspan.validation import warn_if_unselected
from ringspan.views import comb_view

_FIRST_SLOTS = 64  # initial size of a buffer


@dataclass
class SequenceGroup:
    """Adjacent sequences of a batch with the same position and the same number of rows in each buffer."""

    first: int
    sequences: int
    position: int  # of the next token
    filled: list[list[int]]  # rows of the current segment on this rank, by branch and KV head; see `Retention`

    @property
    def stop(self) -> int:
        return self.first + self.sequences


class BranchRows:
    """Keys and values of one branch, (2, batch, kv_heads, slots, head_dim). Its retention says what is in each slot."""

    def __init__(self, retention: Retention, batch: int, kv_heads: int, head_dim: int, like: Tensor) -> None:
        self.retention = retention
        self.rows = like.new_empty((2, batch, kv_heads, 0, head_dim))

    def reserve(self, slots: int) -> None:
        """Grow the buffer to at least this many slots per head. It doubles, up to the capacity."""
        present, most = self.rows.shape[3], self.retention.capacity
        if slots <= present:
            return
        wanted = max(slots, 2 * present, _FIRST_SLOTS)
        wanted = wanted if most is None else max(slots, min(wanted, most))
        with torch.inference_mode(False):  # so that the buffer can be written in any mode
            larger = self.rows.new_empty((*self.rows.shape[:3], wanted, self.rows.shape[4]))
            larger[:, :, :, :present] = self.rows
        self.rows = larger

    def clear(self, batch: int) -> None:
        """Free the buffer."""
        with torch.inference_mode(False):
            self.rows = self.rows.new_empty((2, batch, self.rows.shape[2], 0, self.rows.shape[4]))

    def of_group(self, group: SequenceGroup) -> tuple[Tensor, Tensor]:
        """Keys and values of a group as (batch, slots, kv_heads, head_dim)."""
        keys, values = self.rows[:, group.first : group.stop].transpose(2, 3).unbind()
        return keys, values

    def store(self, group: SequenceGroup, k: Tensor, v: Tensor, copies: Copies) -> None:
        """Copy rows of ``k`` and ``v`` (batch, rows, kv_heads, head_dim) to their slots."""
        self.reserve(max((slots.start + slots.rows for _, slots in copies), default=0))
        for rows, slots in copies:
            for source, target in zip((k, v), self.of_group(group), strict=True):
                comb_view(target, slots).copy_(comb_view(source, rows))


class Cache:
    """Keys and values for decoding: the rows that later tokens can still see.

    These are at most ``bound`` rows per sequence and KV head, for text of any length: the sum of ceil(w / r) over the
    branches of `Dilated`, and of left + 1 over windows. Under `Full` and its sums the cache keeps every row and grows
    with the text; its ``bound`` is None.

    Args:
        pattern: the pattern of the layer: `Full()`, `Window(...)`, `Dilated(...)`, or a sum.
        kv_heads, head_dim: of the keys and values.
        batch: number of sequences. They may be at different positions.
        dtype, device: of the keys and values.
        ring: shards the rows over a `Ring`, for caches that do not fit one device. Every rank makes the same calls with
            the same tokens and holds its share of the rows; each step merges the results of all ranks.

    >>> import torch, ringspan as rs
    >>> cache = rs.Cache(rs.Dilated((8, 32), (1, 4)), kv_heads=2, head_dim=16)
    >>> q, k, v = torch.randn(3, 1, 100, 2, 16).unbind()
    >>> outs = [rs.attention_step(q[:, [i]], k[:, [i]], v[:, [i]], cache) for i in range(100)]
    >>> whole = rs.attention(q, k, v, pattern=cache.pattern, causal=True)
    >>> torch.allclose(torch.cat(outs, 1), whole, rtol=0, atol=1e-5)
    True
    >>> cache.bound, cache.rows_held(sequence=0, head=0)
    (16, 5)
    """

    def __init__(
        self,
        pattern: Pattern,
        *,
        kv_heads: int,
        head_dim: int,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        ring: Ring | None = None,
    ) -> None:
        for name, value in (("kv_heads", kv_heads), ("head_dim", head_dim), ("batch", batch)):
            if as_int(name, value) < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        check_pattern(pattern, kv_heads)
        warn_if_unselected(pattern, UNBOUNDED, kv_heads)
        if ring is not None and not isinstance(ring, Ring):
            raise TypeError(f"ring is a {type(ring).__name__}: must be a Ring, or None to hold all rows on this device")
        self.pattern, self.kv_heads, self.head_dim, self.ring = pattern, kv_heads, head_dim, ring
        share = RankShare() if ring is None else RankShare(ring.rank, ring.size)
        with torch.inference_mode(False):
            like = torch.empty(0, dtype=dtype, device=device)
            retentions = branch_retentions(pattern, kv_heads, share)
            self.branches = tuple(BranchRows(retention, batch, kv_heads, head_dim, like) for retention in retentions)
        self.groups: list[SequenceGroup] = []
        self.is_complete = True
        self.reset()

    def reset(self) -> None:
        """Drop all rows and start at position 0. Keeps the buffers for the next text."""
        if not self.is_complete:
            for branch in self.branches:
                branch.clear(self.batch)
        self.groups = [SequenceGroup(0, self.batch, 0, [[0] * self.kv_heads for _ in self.branches])]
        self.is_complete = True

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Context of every change of the rows. After an error inside it, the cache is refused until `reset`.

        Some branches or sequences may hold the new rows, and others not.
        """
        self.check_complete()
        self.is_complete = False
        yield
        self.is_complete = True

    def check_complete(self) -> None:
        """Raise if the last change of the rows failed."""
        if not self.is_complete:
            raise RuntimeError(
                "the cache is incomplete: its last update failed or was interrupted, so it holds only some of the new "
                "rows. Call reset() and read the text again"
            )

    def __copy__(self) -> Cache:
        return copy.deepcopy(self)  # steps write in place, so copies must not share rows

    @property
    def batch(self) -> int:
        return self.branches[0].rows.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.branches[0].rows.dtype

    @property
    def device(self) -> torch.device:
        return self.branches[0].rows.device

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens seen per sequence, which is the position of its next token."""
        return tuple(group.position for group in self.groups for _ in range(group.sequences))

    @property
    def bound(self) -> int | None:
        """The most rows per sequence and KV head, over all ranks. None if the cache keeps every row."""
        bounds = [branch.retention.bound for branch in self.branches]
        return None if None in bounds else sum(bound for bound in bounds if bound is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers on this device."""
        return sum(branch.rows.nbytes for branch in self.branches)

    def rows_held(self, sequence: int, head: int) -> int:
        """Rows held on this rank for one sequence and KV head, over all branches."""
        for name, value, stop in (("sequence", sequence, self.batch), ("head", head, self.kv_heads)):
            if not 0 <= as_int(name, value) < stop:
                raise ValueError(f"{name}={value}: must be in 0 .. {stop - 1}")
        group = next(g for g in self.groups if g.first <= sequence < g.stop)
        pairs = zip(self.branches, group.filled, strict=True)
        return sum(branch.retention.rows_held(group.position, filled)[head] for branch, filled in pairs)

    def __repr__(self) -> str:
        kept = "keeps every row" if self.bound is None else f"at most {self.bound:,} rows per head"
        where = "" if self.ring is None else f", sharded over {self.ring}"
        return (
            f"Cache({self.pattern}: {kept}; {self.batch} sequence(s), {self.kv_heads} KV heads of {self.head_dim}, "
            f"{self.dtype}, {self.nbytes:,} bytes{where})"
        )

    def append(self, group: SequenceGroup, k: Tensor, v: Tensor) -> None:
        """Append the new rows (batch, rows, kv_heads, head_dim) of a group that later tokens see; advance the group."""
        for branch, filled in zip(self.branches, group.filled, strict=True):
            branch.store(group, k, v, branch.retention.add_block(group.position, k.shape[1], filled))
        group.position += k.shape[1]

    def select(self, sequences: Sequence[int] | Tensor) -> None:
        """Keep these sequences, in this order. A sequence may be repeated (beam search) or left out."""
        if not isinstance(sequences, (Sequence, Tensor)) or (isinstance(sequences, Tensor) and sequences.dim() != 1):
            raise TypeError(f"sequences={sequences!r}: must be a sequence of ints or a 1-D tensor")
        chosen = [as_int("sequences", i) for i in (sequences.tolist() if isinstance(sequences, Tensor) else sequences)]
        for i in chosen or [-1]:
            if not 0 <= i < self.batch:
                raise ValueError(f"sequences={chosen}: must be in 0 .. {self.batch - 1}")
        owners = [next(g for g in self.groups if g.first <= i < g.stop) for i in chosen]
        with self.updating(), torch.inference_mode(False):
            index = torch.tensor(chosen, device=self.device)
            for branch in self.branches:
                branch.rows = branch.rows.index_select(1, index)
            self.groups = [SequenceGroup(i, 1, g.position, copy.deepcopy(g.filled)) for i, g in enumerate(owners)]
            self.merge_groups()

    def split_groups(self) -> None:
        """Put every sequence into a group of its own."""
        self.groups = [
            SequenceGroup(i, 1, group.position, copy.deepcopy(group.filled))
            for group in self.groups
            for i in range(group.first, group.stop)
        ]

    def merge_groups(self) -> None:
        """Merge adjacent groups with the same position."""
        same = [list(found) for _, found in groupby(self.groups, key=lambda g: (g.position, g.filled))]
        self.groups = [
            SequenceGroup(found[0].first, sum(g.sequences for g in found), found[0].position, found[0].filled)
            for found in same
        ]


def check_cache(cache: Cache, k: Tensor) -> None:
    """Raise unless the cache fits these keys."""
    if not isinstance(cache, Cache):
        raise TypeError(f"cache is a {type(cache).__name__}: must be a ringspan.Cache")
    for name, found, wanted in (
        ("KV heads", k.shape[2], cache.kv_heads),
        ("head_dim", k.shape[3], cache.head_dim),
        ("dtype", k.dtype, cache.dtype),
        ("device", k.device, cache.device),
    ):
        if found != wanted:
            raise ValueError(f"{name}: {found} in k, {wanted} in the cache: create the cache with the values of k")


def check_sequences(cache: Cache, k: Tensor, lengths: tuple[int, ...] | None, rows: int) -> None:
    """Raise unless ``rows`` rows, packed or not, give new rows for each sequence of the cache."""
    if lengths is None:
        if k.shape[0] != cache.batch:
            raise ValueError(f"k has a batch of {k.shape[0]}, the cache one of {cache.batch}: they must be equal")
        return
    if k.shape[0] != 1 or len(lengths) != cache.batch:
        raise ValueError(
            f"{len(lengths)} lengths and a batch of {k.shape[0]}: packed rows need a batch of 1 and one length for "
            f"each of the {cache.batch} sequences of the cache"
        )
    Documents(lengths).check_rows(rows)
