"""Time per token by sequence length: consecutive shards of each length, in turns, in one warm process.

    python -m benchmarks.warm default    # or quick, long; prints JSON: seconds per token of the median shard of each
                                         # length in each round

A whole run of a million tokens takes two seconds, mostly for page faults of new memory, and one of a billion takes half
an hour, during which the machine drifts. So every length contributes consecutive shards from its middle, lengths take
turns, and rows keep their memory between turns. The first round is not counted. This runs what `ringspan stream` runs,
without the sampled check.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as `ringspan stream` does, before torch is imported

import torch

from ringspan.streaming import ChecksumSink, RowShape, ShardDone, SyntheticSource, stream_attention
from ringspan.streaming.sources import reuse_row_buffers
from ringspan.tools.demonstration import steady_seconds_per_token, whole_sequence_pattern

SHARDS = {2**20: 8, 2**22: 16, 2**24: 16, 2**26: 32, 2**28: 128, 2**30: 512}  # as in `ringspan stream --budget 8G`
LENGTHS = {"quick": (2**20, 2**22), "default": (2**20, 2**24, 2**30), "long": tuple(SHARDS)}
ROUNDS = {"quick": 2, "default": 4, "long": 6}  # the first one warms up
TIMED_TOKENS, FEWEST_SHARDS = 2**23, 5


def main() -> None:
    size = sys.argv[1]
    lengths = LENGTHS[size]
    found: dict[int, list[float]] = {length: [] for length in lengths}
    with reuse_row_buffers():
        for number in range(ROUNDS[size]):
            for length in lengths:
                seconds = _steady(length)
                if number:
                    found[length].append(seconds)
    print(json.dumps(found))


def _steady(length: int) -> float:
    shards = SHARDS[length]
    count = min(shards, max(FEWEST_SHARDS, TIMED_TOKENS * shards // length))
    first = (shards - count) // 2
    done: list[ShardDone] = []
    stream_attention(
        SyntheticSource(RowShape(2, 2, 32, torch.float32)),
        ChecksumSink(),
        length,
        whole_sequence_pattern(length),
        causal=True,
        budget_bytes=8 * 2**30,
        shards=shards,
        only=range(first, first + count),
        on_shard=done.append,
    )
    return steady_seconds_per_token([{"seconds": shard.seconds, "rows": shard.rows} for shard in done])


if __name__ == "__main__":
    main()
