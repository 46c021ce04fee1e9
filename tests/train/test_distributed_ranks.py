"""The ranks of a run form rings, and know who is lost."""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist

from ringspan.train.config import TrainSettings
from ringspan.train.distributed import init_distributed
from ringspan.train.lost import FIND_SECONDS, Peers
from tests.ranks import on_ranks


@on_ranks(4)
def test_consecutive_ranks_form_rings_that_time_out_in_time_to_name_the_lost() -> None:
    context = init_distributed(TrainSettings(ring=2, timeout=77.0))
    rank, group = dist.get_rank(), context.ring.group
    assert dist.get_process_group_ranks(group) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert (context.data_rank, context.data_size) == (rank // 2, 2)
    assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 77 - FIND_SECONDS
    assert len(context.ring.hosts) == 2
    context.peers.close()


@on_ranks(3)
def test_all_ranks_meet_and_one_that_leaves_is_named() -> None:
    peers, host = Peers.meet(torch.device("cpu")), socket.gethostname()
    assert peers.hosts == (host,) * 3
    assert peers.lost() == ""
    dist.barrier()
    if dist.get_rank() > 0:
        peers.close()
    dist.barrier()
    if dist.get_rank() == 0:
        assert peers.lost() == f"ranks 1, 2 on {host} exited"
    dist.barrier()
    peers.close()
