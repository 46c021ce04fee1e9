"""A rank that dies or stalls in mid-hop: the others report it after the timeout, and exit with a non-zero status."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import starts_processes

pytestmark = starts_processes

SCRIPT = """
import datetime, os, signal, sys
import torch, torch.distributed as dist
import ringspan as rs
from ringspan.ring import transport

rank, size, folder, fault = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
dist.barrier()  # processes may start far apart; only the ring is impatient
ring = rs.Ring(dist.new_group(timeout=datetime.timedelta(seconds=5)))
x = torch.randn(1, ring.layout_of(400).rows_of(rank), 2, 16)
for step in range(1000):
    if rank == 1 and step == 3:
        print("fault", flush=True)
        send_receive = transport.GroupTransport.send_receive
        def strike(self, sends, receives, label):  # the second hop of this call is never sent
            if label.endswith("hop 2"):
                os.kill(os.getpid(), getattr(signal, fault))
            return send_receive(self, sends, receives, label)
        transport.GroupTransport.send_receive = strike
    rs.attention(x, x, x, pattern=rs.Full(), ring=ring)
"""


@pytest.mark.parametrize("fault", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.slow)])
def test_the_others_report_it(fault: str, tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), "3", str(tmp_path), fault],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        assert ranks[1].stdout is not None
        assert ranks[1].stdout.readline() == "fault\n"
        for rank in (0, 2):
            _, errors = ranks[rank].communicate()
            assert ranks[rank].returncode not in (0, None)
            last = [line for line in errors.splitlines() if "RingError" in line][-1]
            assert f"rank {rank} of 3 on " in last
            assert ": parcels of hop" in last
            assert "rank 1" in last.split("failed")[0].split("hop")[1], last
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
