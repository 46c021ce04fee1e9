"""Decoding with the rows of a cache sharded over a ring: each rank attends its rows, and the results become one."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.ring import Ring, RingError
from ringspan.softmax import merge_


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
