"""A ring over hosts, run by torchrun in a test bed: exact, and its bytes are those of the interfaces.

The first rank of each host prints one line of JSON: what its interface sent, and what the plan sends between all hosts.
"""

import datetime
import json
import os
import socket
import sys

import torch
import torch.distributed as dist

import ringspan as rs
from benchmarks.hosts import INTERFACE, read_traffic
from ringspan.planning.cost import traffic
from tests.exactness import assert_ring_equals_oracle, inputs

PATTERN = rs.Full()
HEADS, DIM, TOKENS = 4, 64, 4096


def check_exactness(ring: rs.Ring) -> None:
    for pattern in (rs.Full(), rs.Dilated((16, 64), (1, 4)) + rs.Window(5)):
        tensors = inputs(batch=2, n=101, kv_heads=2, group=2, dim=8)
        assert_ring_equals_oracle(ring, tensors, dict(pattern=pattern, causal=True, lengths=None))


def bytes_across(ring: rs.Ring, ranks_per_host: int) -> dict[str, object]:
    q, k, v = (torch.randn(1, TOKENS // ring.size, HEADS, DIM, requires_grad=True) for _ in range(3))
    dist.barrier()
    before = read_traffic()
    rs.attention(q, k, v, pattern=PATTERN, causal=False, ring=ring, seq_len=TOKENS).sum().backward()
    dist.barrier()
    after = read_traffic()
    plan = rs.plan(
        PATTERN, TOKENS, ring_size=ring.size, layout=ring.layout, causal=False, heads=HEADS, kv_heads=HEADS,
        head_dim=DIM, dtype=q.dtype,
    )  # fmt: skip
    passes = [traffic(plan, ranks_per_host, backward=backward) for backward in (False, True)]
    sent = after.sent - before.sent
    return {"host": socket.gethostname(), "sent": sent, "planned": sum(each.across for each in passes)}


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    assert os.environ["GLOO_SOCKET_IFNAME"] == INTERFACE
    torch.manual_seed(0)
    ring = rs.Ring()
    check_exactness(ring)
    found = bytes_across(ring, int(os.environ["LOCAL_WORLD_SIZE"]))
    if os.environ["LOCAL_RANK"] == "0":
        sys.stdout.write(f"{json.dumps(found)}\n")
    dist.destroy_process_group()
