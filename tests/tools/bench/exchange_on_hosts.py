"""Two hosts exchange a large message, then one sends it alone. Rank 0 prints the seconds of both."""

import json
import statistics
import sys
import time

import torch
import torch.distributed as dist

import ringspan as rs

BYTES, ROUNDS = 2**21, 3


def seconds(ring: rs.Ring, both_ways: bool) -> float:
    layout = ring.layout_of(2)
    ((_, transport, _),) = ring.shard(layout, [(torch.empty(1), None)])
    outgoing, incoming = torch.zeros(2, BYTES, dtype=torch.uint8).unbind()
    peer, spent = 1 - ring.rank, []
    for _ in range(ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        sends = [(peer, outgoing)] if both_ways or ring.rank else []
        receives = [(peer, incoming)] if both_ways or not ring.rank else []
        transport.send_receive(sends, receives, "a message").wait()
        spent.append(time.perf_counter() - start)
    return statistics.median(spent)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    ring = rs.Ring(layout="contiguous")
    times = [seconds(ring, both_ways) for both_ways in (True, False)]
    if not ring.rank:
        sys.stdout.write(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()
