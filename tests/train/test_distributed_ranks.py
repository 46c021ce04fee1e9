"""The ranks of a run form rings, and know who is lost."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ringspan.runtime.collectives import all_gather_json
from ringspan.runtime.settings import RunError
from ringspan.train.config import TrainSettings
from ringspan.train.distributed import init_distributed
from ringspan.train.lost import FIND_SECONDS, Peers
from ringspan.train.watchdog import check_folder_is_shared
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


@on_ranks(2)
def test_a_folder_that_hosts_do_not_share_is_refused_on_all_ranks() -> None:
    with tempfile.TemporaryDirectory() as mine:
        shared = Path(all_gather_json(mine)[0])
        check_folder_is_shared(shared, torch.device("cpu"), seconds=10.0)
        if dist.get_rank() == 0:
            assert not list(shared.iterdir())
        with pytest.raises(RunError, match=rf"rank 1: {mine if dist.get_rank() else ''}.* is not that of rank 0"):
            check_folder_is_shared(Path(mine), torch.device("cpu"), seconds=0.1)
        dist.barrier()
