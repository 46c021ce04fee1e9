"""Does a token cost more in a longer sequence? Stretches of all lengths in turns, in one process that is warm.

    python -m benchmarks.warm    # prints JSON: for each length, seconds per token of the median shard in each round

A whole run of a million tokens takes two seconds, most of them for memory that it is the first to touch, and one of a
billion takes half an hour, in which the machine is now faster and now slower. So here every length gives a stretch of
shards from its middle, lengths take turns, and rows keep their memory from turn to turn; the first round is not
counted. What runs is what `ringspan stream` runs, without the proof.
"""

from __future__ import annotations

import json
import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as `ringspan stream` does, before torch is there

import torch

from ringspan.streaming import CountedRows, DigestedRows, RowShape, ShardDone, stream_attention
from ringspan.streaming.sources import keep_rows_memory
from ringspan.tools.demonstration import steady_seconds_per_token, whole_sequence_pattern

SHARDS = {2**20: 8, 2**22: 16, 2**24: 16, 2**26: 32, 2**28: 128, 2**30: 512}  # those of `ringspan stream --budget 8G`
ROUNDS = 6  # the first of them warms up
STRETCH_TOKENS, FEWEST_SHARDS = 2**23, 5


def main() -> None:
    found: dict[int, list[float]] = {length: [] for length in SHARDS}
    with keep_rows_memory():
        for number in range(ROUNDS):
            for length in SHARDS:
                seconds = _steady(length)
                if number:
                    found[length].append(seconds)
    print(json.dumps(found))


def _steady(length: int) -> float:
    shards = SHARDS[length]
    count = min(shards, max(FEWEST_SHARDS, STRETCH_TOKENS * shards // length))
    first = (shards - count) // 2
    walked: list[ShardDone] = []
    stream_attention(
        CountedRows(RowShape(2, 2, 32, torch.float32)),
        DigestedRows(),
        length,
        whole_sequence_pattern(length),
        causal=True,
        budget_bytes=8 * 2**30,
        shards=shards,
        only=range(first, first + count),
        on_shard=walked.append,
    )
    return steady_seconds_per_token([{"seconds": shard.seconds, "rows": shard.rows} for shard in walked])


if __name__ == "__main__":
    main()
