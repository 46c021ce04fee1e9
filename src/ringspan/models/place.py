"""Where the rows of a call lie: on which ring, in which documents, after which tokens that caches have seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

import ringspan as rs
from ringspan.geometry import Documents

AnyRing: TypeAlias = "rs.Ring | rs.SimulatedRing | None"


@dataclass(frozen=True)
class Place:
    """What every layer needs to know of a call.

    ``lengths`` are those of packed documents, and ``caches``, one for each layer, hold what came before.
    """

    seq_len: int
    cosines: Tensor
    sines: Tensor
    ring: AnyRing
    lengths: tuple[int, ...] | None
    caches: Sequence[rs.Cache] | None


def positions_of(
    rows: int,
    device: torch.device,
    ring: AnyRing = None,
    seq_len: int | None = None,
    lengths: tuple[int, ...] | None = None,
    seen: tuple[int, ...] = (0,),
) -> tuple[int, Tensor]:
    """The length of the whole sequence, and the positions of the rows of this call, (rows) or (batch, rows).

    Args:
        rows: how many rows this call, on this rank, holds.
        seen: how many tokens of each sequence came before.

    >>> positions_of(4, torch.device("cpu"), seen=(10, 20))[1].tolist()
    [[10, 11, 12, 13], [20, 21, 22, 23]]
    >>> positions_of(5, torch.device("cpu"), lengths=(3, 2), seen=(10, 0))[1].tolist()
    [10, 11, 12, 0, 1]
    """
    if isinstance(ring, rs.Ring):
        if seq_len is None:
            raise ValueError("seq_len is needed over a ring: the length of the whole sequence, not of this rank's rows")
        places = ring.positions(seq_len, device)
        if len(places) != rows:
            raise ValueError(f"{rows} rows, but this rank holds {len(places)} of seq_len={seq_len}: give its own rows")
    else:
        if seq_len not in (None, rows):
            raise ValueError(f"seq_len={seq_len}, but there are {rows} rows: without a ring they are the same")
        seq_len, places = rows, torch.arange(rows, device=device)
    if lengths is not None:
        Documents(tuple(lengths)).check_rows(seq_len)
        ends = torch.tensor(lengths, device=device).cumsum(0)
        before = torch.tensor(seen if len(seen) == len(lengths) else [0] * len(lengths), device=device)
        begins = ends - torch.tensor(lengths, device=device)
        return seq_len, places + (before - begins)[torch.bucketize(places, ends, right=True)]
    if len(set(seen)) == 1:
        return seq_len, places + seen[0]
    return seq_len, torch.tensor(seen, device=device)[:, None] + places
