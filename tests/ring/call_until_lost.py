"""Calls over a ring until a rank is lost, run by torchrun on hosts: prints the error and the time of the last call."""

import datetime
import itertools
import json
import os
import sys
import time

import torch
import torch.distributed as dist

import ringspan as rs

ROWS = 64


def report(**values: object) -> None:
    sys.stdout.write(f"{json.dumps(values)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    timeout, seq_len = float(sys.argv[1]), int(sys.argv[2]) or None
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
    ring = rs.Ring()
    q, k, v = (torch.randn(1, ROWS // ring.size, 2, 8) for _ in range(3))
    for call in itertools.count(1):
        start = time.monotonic()
        try:
            rs.attention(q, k, v, pattern=rs.Full(), ring=ring, seq_len=seq_len)
            if ring.hosts:  # the calls that follow only exchange parcels
                seq_len = ROWS
        except rs.RingError as error:
            report(said=str(error), seconds=time.monotonic() - start)
            os._exit(0)
        if ring.rank == 0 and call == 20:
            report(calls=call)
