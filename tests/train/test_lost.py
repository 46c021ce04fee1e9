"""Which ranks are lost, asked of real sockets. Hosts that do not answer: `tests/train/test_host_faults.py`."""

from __future__ import annotations

import socket

from ringspan.train.lost import Peer


def test_a_rank_is_alive_while_it_listens_and_exited_afterwards() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        peer = Peer(1, socket.gethostname(), *server.getsockname())
        assert [peer.state() for _ in range(3)] == ["alive"] * 3  # nobody accepts
    assert peer.state() == "exited"


def test_a_loopback_address_of_another_host_says_nothing() -> None:
    assert Peer(1, "elsewhere", "127.0.1.1", 1).state() == "unknown"
