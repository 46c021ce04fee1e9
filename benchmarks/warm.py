"""Time per token of short lengths in a process that has its memory already, so that beginnings do not weigh on them.

    python -m benchmarks.warm    # prints JSON: for each length, seconds per token of the median shard in each round

A run of a million tokens takes two seconds, and its first shards pay for every page of memory that they are the first
to touch. Here lengths take turns in one process, whose rows keep their memory from run to run; the first round is not
counted. What runs is what `ringspan stream` runs, without the proof.
"""

from __future__ import annotations

import json
import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as `ringspan stream` does, before torch is there

import torch

from ringspan.proof.demonstration import steady_seconds_per_token, whole_sequence_pattern
from ringspan.streaming import CountedRows, DigestedRows, RowShape, ShardDone, stream_attention
from ringspan.streaming.memory import keep_rows_memory

LENGTHS = tuple(2**i for i in range(20, 26))
ROUNDS = 4  # the first of them warms up
BUDGET_BYTES = 7 * 2**30  # what `ringspan stream --budget 8G` leaves for rows, about


def main() -> None:
    found: dict[int, list[float]] = {length: [] for length in LENGTHS}
    with keep_rows_memory():
        for number in range(ROUNDS):
            for length in LENGTHS:
                seconds = _steady(length)
                if number:
                    found[length].append(seconds)
    print(json.dumps(found))


def _steady(length: int) -> float:
    shards: list[ShardDone] = []
    rows = CountedRows(RowShape(2, 2, 32, torch.float32))
    stream_attention(
        rows,
        DigestedRows(),
        length,
        whole_sequence_pattern(length),
        causal=True,
        budget_bytes=BUDGET_BYTES,
        on_shard=shards.append,
    )
    return steady_seconds_per_token([{"seconds": shard.seconds, "rows": shard.rows} for shard in shards])


if __name__ == "__main__":
    main()
