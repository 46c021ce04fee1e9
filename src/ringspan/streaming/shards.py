"""How many shards: the fewest that keep a run within its budget of memory, and enough of them to overlap.

A shard is a virtual rank of a contiguous ring. While it is walked, the rows of the next are read and the results of the
one before are written, so that three shards' worth is held.
"""

from __future__ import annotations

from collections.abc import Callable

from ringspan.planning import RingPlan

ENOUGH_TO_OVERLAP = 16  # so that the first read and the last write, with nothing beside them, cost little
# What allocators keep of freed buffers (glibc: those below 32 MiB), files while they are copied, threads.
OVERHEAD_BYTES = 48 * 2**20
SMALLEST_FOR_OVERLAP = 2**17  # rows: below that, what each hop costs outweighs what overlapping saves


def fewest_shards(plan_with: Callable[[int], RingPlan], workspace: int, budget_bytes: int, *, backward: bool) -> int:
    """The fewest shards, a power of two, that fit the budget; ``plan_with(shards)`` is the plan of a ring of so many.

    Powers of two, since the segments of most patterns are: then borders between shards cut fewer of them.
    """
    rows = plan_with(1).layout.rows
    shards = 1
    while shards < ENOUGH_TO_OVERLAP and rows // (2 * shards) >= SMALLEST_FOR_OVERLAP:
        shards *= 2
    while (needed := held_bytes(plan_with(shards), workspace, backward=backward)) > budget_bytes:
        if 2 * shards > rows:
            raise ValueError(
                f"budget_bytes={budget_bytes:,}: even {shards:,} shards of a row or two need {needed:,} bytes; "
                "give at least that, or stream fewer heads or sequences at a time"
            )
        shards *= 2
    return shards


def held_bytes(plan: RingPlan, workspace: int, *, backward: bool = False) -> int:
    """What a run holds at its peak: the walk of a shard, the rows of the next one, the results of the one before.

    Results count twice: as they are, and in the pages of the file that they are written to.
    """
    sizes = plan.sizes
    last = plan.layout.ring_size - 1
    ranks = sorted({0, last // 2, last})  # shards differ by a row, and by how many borders cut them
    walked = max(plan.memory(rank, backward=backward).total for rank in ranks)
    query = sizes.batch * sizes.heads * sizes.dim * sizes.number_bytes
    keys_and_values = 2 * sizes.batch * sizes.kv_heads * sizes.dim * sizes.number_bytes
    lse = sizes.batch * sizes.heads * sizes.wide_bytes
    if backward:
        row = (3 * query + keys_and_values + lse) + 2 * (query + keys_and_values)
    else:
        row = (query + keys_and_values) + 2 * (query + lse)
    rows = -(-plan.layout.rows // plan.layout.ring_size)
    return walked + row * (rows if last else 0) + workspace + OVERHEAD_BYTES
