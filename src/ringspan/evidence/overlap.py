"""How long parcels travel when there is nothing else to do: what a ring would wait if it hid nothing."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from ringspan.geometry import Documents, Pattern
from ringspan.planning import Hop, plan_rank
from ringspan.ring import Ring
from ringspan.travel import Walk, travel


def travel_seconds(ring: Ring, pattern: Pattern, seq_len: int, k: Tensor, v: Tensor, *, causal: bool) -> float:
    """Seconds that this rank waits in a forward walk of the real plan, with real parcels, that computes nothing.

    ``k`` and ``v`` are the rank's rows. All ranks call this together; counters start anew.
    """
    layout = ring.layout_of(seq_len)
    plan = plan_rank(pattern, Documents((seq_len,)), layout, ring.rank, k.shape[2], causal, ring.passing)

    def compute_nothing(number: int, hop: Hop, here: dict[Any, Tensor]) -> Walk:
        yield from ()

    ((_, mail, (keys, values)),) = ring.deal(layout, [(k, 1), (v, 1)])
    dist.barrier(ring.group)
    ring.reset_counters()
    ring.run([travel(plan, mail, keys, values, compute_nothing)])
    return ring.counters.waiting_seconds
