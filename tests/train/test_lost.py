"""Which ranks are lost, asked of real sockets. Hosts that do not answer: `tests/train/test_host_faults.py`."""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist

from ringspan.train.lost import Peer, Peers
from tests.ranks import on_ranks


def test_a_rank_is_alive_while_it_listens_and_exited_afterwards() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        peer = Peer(1, socket.gethostname(), *server.getsockname())
        assert [peer.state() for _ in range(3)] == ["alive"] * 3  # nobody accepts
    assert peer.state() == "exited"


def test_a_loopback_address_of_another_host_says_nothing() -> None:
    assert Peer(1, "elsewhere", "127.0.1.1", 1).state() == "unknown"


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
