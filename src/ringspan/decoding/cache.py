"""The cache of decoding: for each branch, the rows of the segment that is being written, in memory that is used again.

Knows tensors and integers, but no kernel and no softmax: `ringspan.decoding.step` computes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from ringspan.decoding.retention import KeptRows, Share, kept_rows
from ringspan.geometry import Documents, Lane, Pattern, as_int, group_heads
from ringspan.ring import Ring
from ringspan.validation import check_pattern
from ringspan.views import comb_view

_FIRST_ROWS = 64  # buffers begin with room for this many, and double up to the bound


@dataclass
class Lockstep:
    """Neighbouring sequences of a batch that stand at the same place: what is true of one is true of all."""

    first: int
    sequences: int
    position: int  # of the next token
    filled: list[list[int]]  # rows held here, by branch and KV head

    @property
    def stop(self) -> int:
        return self.first + self.sequences


class BranchRows:
    """Keys and values of one branch, (2, batch, kv_heads, room, head_dim). The first ``filled`` rows of a head are valid."""

    def __init__(self, kept: KeptRows, batch: int, head_dim: int, like: Tensor) -> None:
        self.kept = kept
        self.rows = like.new_empty((2, batch, len(kept.offsets), 0, head_dim))

    def make_room(self, rows: int) -> None:
        """Room for so many rows of each head; it is doubled, up to the bound."""
        room = self.rows.shape[3]
        if rows <= room:
            return
        wanted = max(rows, 2 * room, _FIRST_ROWS)
        wanted = wanted if self.kept.bound is None else max(rows, min(wanted, self.kept.bound))
        with torch.inference_mode(False):  # so that it can be written in any mode
            larger = self.rows.new_empty((*self.rows.shape[:3], wanted, self.rows.shape[4]))
            larger[:, :, :, :room] = self.rows
        self.rows = larger

    def clear(self, batch: int) -> None:
        """Give the memory back."""
        with torch.inference_mode(False):
            self.rows = self.rows.new_empty((2, batch, self.rows.shape[2], 0, self.rows.shape[4]))

    def of(self, group: Lockstep) -> tuple[Tensor, Tensor]:
        """Keys and values of some sequences as (batch, room, kv_heads, head_dim)."""
        keys, values = self.rows[:, group.first : group.stop].transpose(2, 3).unbind()
        return keys, values

    def append(self, group: Lockstep, filled: list[int], k: Tensor, v: Tensor, lanes: list[Lane]) -> None:
        """Take in rows of ``k`` and ``v`` (batch, rows, kv_heads, head_dim): for each head those of its lane."""
        slots = [Lane(held, lane.rows, 1) for held, lane in zip(filled, lanes, strict=True)]
        self.make_room(max(slot.start + slot.rows for slot in slots))
        for theirs, ours in group_heads(lanes, slots):
            for source, target in zip((k, v), self.of(group), strict=True):
                comb_view(target, ours).copy_(comb_view(source, theirs))
        filled[:] = [slot.start + slot.rows for slot in slots]


class Cache:
    """What decoding keeps of the past: exactly the rows that a later token can still see.

    Under `Dilated` that is at most ``bound`` rows for each sequence and KV head, the sum over branches of ceil(w / r),
    however long the text. Under `Full` it is every row: such a cache grows with the text, and its ``bound`` is None.

    Args:
        pattern: `Dilated(...)` or `Full()`, of the layer that the cache belongs to.
        kv_heads, head_dim: of the keys and values that it will hold.
        batch: how many sequences; they may stand at different positions.
        dtype, device: of the keys and values.
        ring: leaves the rows sharded over a `Ring`: every rank calls with the same tokens, holds its share of the rows,
            and the results of all are merged. For caches that do not fit one device.

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
        if ring is not None and not isinstance(ring, Ring):
            raise TypeError(f"ring is a {type(ring).__name__}: must be a Ring, or None to hold all rows here")
        self.pattern, self.kv_heads, self.head_dim, self.ring = pattern, kv_heads, head_dim, ring
        self.share = Share() if ring is None else Share(ring.rank, ring.size)
        with torch.inference_mode(False):
            like = torch.empty(0, dtype=dtype, device=device)
            self.branches = tuple(BranchRows(kept, batch, head_dim, like) for kept in kept_rows(pattern, kv_heads))
        self.groups: list[Lockstep] = []
        self.is_whole = True
        self.reset()

    def reset(self) -> None:
        """Forget everything; the memory is kept for the next text."""
        if not self.is_whole:
            for branch in self.branches:
                branch.clear(self.batch)
        self.groups = [Lockstep(0, self.batch, 0, [[0] * self.kv_heads for _ in self.branches])]
        self.is_whole = True

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Around everything that changes the rows: what ends in an error leaves a cache that is refused from then on.

        Some branches, or some sequences, may have taken in the new rows, and others not.
        """
        self.check_whole()
        self.is_whole = False
        yield
        self.is_whole = True

    def check_whole(self) -> None:
        """Raise if a change of the rows ended in an error."""
        if not self.is_whole:
            raise RuntimeError(
                "the cache is incomplete: its last change ended in an error or was interrupted, so that only some of "
                "the new rows are in it; reset() it and read the text again"
            )

    def __copy__(self) -> Cache:
        return copy.deepcopy(self)  # two caches never share rows: each step writes in place

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
        """How many tokens of each sequence have been seen: the position of its next one."""
        return tuple(group.position for group in self.groups for _ in range(group.sequences))

    @property
    def bound(self) -> int | None:
        """The most rows that a KV head of a sequence ever needs, over all ranks; None under `Full`, which keeps all."""
        bounds = [branch.kept.bound for branch in self.branches]
        return None if None in bounds else sum(bound for bound in bounds if bound is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the rows take on this device."""
        return sum(branch.rows.nbytes for branch in self.branches)

    def rows_held(self, sequence: int, head: int) -> int:
        """How many rows of a KV head of a sequence are held here, over all branches."""
        for name, value, stop in (("sequence", sequence, self.batch), ("head", head, self.kv_heads)):
            if not 0 <= as_int(name, value) < stop:
                raise ValueError(f"{name}={value}: must lie in 0 .. {stop - 1}")
        group = next(g for g in self.groups if g.first <= sequence < g.stop)
        return sum(filled[head] for filled in group.filled)

    def __repr__(self) -> str:
        kept = "keeps every row" if self.bound is None else f"at most {self.bound:,} rows a head"
        where = "" if self.ring is None else f", sharded over {self.ring}"
        return (
            f"Cache({self.pattern}: {kept}; {self.batch} sequence(s), {self.kv_heads} KV heads of {self.head_dim}, "
            f"{self.dtype}, {self.nbytes:,} bytes{where})"
        )

    def take_in(self, group: Lockstep, k: Tensor, v: Tensor) -> None:
        """Keep what later tokens see of new rows (batch, rows, kv_heads, head_dim) of a group, and move it on."""
        for branch, filled in zip(self.branches, group.filled, strict=True):
            goes_on, lanes = branch.kept.to_keep(group.position, k.shape[1], self.share)
            if not goes_on:
                filled[:] = [0] * self.kv_heads  # a segment began in between: nobody will see the last one again
            branch.append(group, filled, k, v, lanes)
        group.position += k.shape[1]

    def select(self, sequences: Sequence[int] | Tensor) -> None:
        """Go on with these sequences, in this order; one may come several times (beam search) or not at all."""
        if not isinstance(sequences, (Sequence, Tensor)) or (isinstance(sequences, Tensor) and sequences.dim() != 1):
            raise TypeError(f"sequences={sequences!r}: must be ints, in a sequence or a tensor with one dimension")
        chosen = [as_int("sequences", i) for i in (sequences.tolist() if isinstance(sequences, Tensor) else sequences)]
        for i in chosen or [-1]:
            if not 0 <= i < self.batch:
                raise ValueError(f"sequences={chosen}: must lie in 0 .. {self.batch - 1}")
        owners = [next(g for g in self.groups if g.first <= i < g.stop) for i in chosen]
        with self.changing(), torch.inference_mode(False):
            index = torch.tensor(chosen, device=self.device)
            for branch in self.branches:
                branch.rows = branch.rows.index_select(1, index)
            self.groups = [Lockstep(i, 1, g.position, copy.deepcopy(g.filled)) for i, g in enumerate(owners)]
            self.join()

    def part(self) -> None:
        """Let every sequence go its own way."""
        self.groups = [
            Lockstep(i, 1, group.position, copy.deepcopy(group.filled))
            for group in self.groups
            for i in range(group.first, group.stop)
        ]

    def join(self) -> None:
        """Let neighbours that stand at the same place go together again."""
        alike = [list(found) for _, found in groupby(self.groups, key=lambda g: (g.position, g.filled))]
        self.groups = [
            Lockstep(found[0].first, sum(g.sequences for g in found), found[0].position, found[0].filled)
            for found in alike
        ]


def check_cache(cache: Cache, k: Tensor) -> None:
    """Raise unless the cache is one for keys like these."""
    if not isinstance(cache, Cache):
        raise TypeError(f"cache is a {type(cache).__name__}: must be a ringspan.Cache")
    for name, found, wanted in (
        ("KV heads", k.shape[2], cache.kv_heads),
        ("numbers in a head", k.shape[3], cache.head_dim),
        ("dtype", k.dtype, cache.dtype),
        ("device", k.device, cache.device),
    ):
        if found != wanted:
            raise ValueError(f"{name}: {found} in k, {wanted} in the cache: make the cache for what it will hold")


def check_sequences(cache: Cache, k: Tensor, lengths: tuple[int, ...] | None, rows: int) -> None:
    """Raise unless ``rows`` rows, packed or not, are new rows of each of the cache's sequences."""
    if lengths is None:
        if k.shape[0] != cache.batch:
            raise ValueError(f"k has a batch of {k.shape[0]}, the cache one of {cache.batch}: they must be equal")
        return
    if not isinstance(lengths, Sequence):
        raise TypeError(f"lengths={lengths!r}: must be a sequence of ints, one for each of the cache's sequences")
    if k.shape[0] != 1 or len(lengths) != cache.batch:
        raise ValueError(
            f"{len(lengths)} lengths and a batch of {k.shape[0]}: packed rows have a batch of 1, and one length for "
            f"each of the cache's {cache.batch} sequences"
        )
    Documents(tuple(lengths)).check_rows(rows)
