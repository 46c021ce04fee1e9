"""Which ranks are lost, asked of real sockets. Hosts that do not answer: `tests/train/test_host_faults.py`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringspan.train.lost import TERMINATED, Peer
from tests.ranks import starts_processes

pytestmark = starts_processes

# Ranks 0 and 1 wait for each other; rank 2 sleeps.
BLOCKED = """
import os, sys, time
import torch
import torch.distributed as dist
from ringspan.train.lost import Peers

rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=3)
peers = Peers.meet(torch.device("cpu"))
with peers.naming_at_termination(lambda: f"rank {rank}"):
    print("ready", flush=True)
    if rank == 2:
        time.sleep(600)
    dist.recv(torch.zeros(1), src=1 - rank)
"""


def test_a_rank_is_alive_while_it_listens_and_exited_afterwards() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        peer = Peer(1, socket.gethostname(), *server.getsockname())
        assert [peer.state() for _ in range(3)] == ["alive"] * 3  # nobody accepts
    assert peer.state() == "exited"


def test_a_loopback_address_of_another_host_says_nothing() -> None:
    assert Peer(1, "elsewhere", "127.0.1.1", 1).state() == "unknown"


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", BLOCKED, str(tmp_path / "store"), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(3)
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    yield started
    for process in started:
        process.kill()
        process.communicate()


def test_a_blocked_rank_names_lost_ranks_when_it_is_stopped(ranks: list[subprocess.Popen[str]]) -> None:
    ranks[2].kill()
    ranks[2].wait()
    ranks[0].terminate()
    errors = ranks[0].communicate(timeout=60)[1]
    assert f"rank 0: rank 2 on {socket.gethostname()} exited (stopped by SIGTERM)\n" in errors
    assert ranks[0].returncode == TERMINATED


def test_a_rank_that_is_stopped_first_says_nothing(ranks: list[subprocess.Popen[str]]) -> None:
    ranks[0].terminate()
    assert "stopped by" not in ranks[0].communicate(timeout=60)[1]
    assert ranks[0].returncode == TERMINATED
