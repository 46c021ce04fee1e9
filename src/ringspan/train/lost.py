"""Which ranks are lost, after a collective has failed: its error seldom says so.

Each rank listens on a port of its own and never accepts a connection, so no data is read or sent: the kernel answers.
It completes a connection while the process lives, and refuses it after the process has ended. Nothing answers if the
host or its link is down.

torchrun stops the ranks of a host as soon as one of them has exited, or it has lost a rendezvous that was on the lost
host. A rank that is blocked in a transfer at that moment cannot run Python code, except in another thread: that thread
names the lost ranks, and ends the process.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address

import torch
import torch.distributed as dist

from ringspan.runtime.collectives import all_gather_json

FIND_SECONDS = 4.0  # in which `Peers.lost` finds the lost ranks: two rounds of questions at most
TERMINATED = 128 + signal.SIGTERM  # exit status
_SETTLE_SECONDS = 1.0  # the first rank of a host is lost a moment before the last
_ANSWER_SECONDS = FIND_SECONDS / 2  # one lost packet is sent again after one second
_THREADS = 64
_WAITING = 128  # connections, completed by the kernel and never accepted


@dataclass(frozen=True)
class Peer:
    """A rank, its host, and where it listens."""

    rank: int
    host: str
    address: str
    port: int

    def state(self) -> str:
        """``"alive"``, ``"exited"``, ``"does not answer"``, or ``"unknown"`` if it cannot be reached from here."""
        if ip_address(self.address).is_loopback and self.host != socket.gethostname():
            return "unknown"
        try:
            socket.create_connection((self.address, self.port), timeout=_ANSWER_SECONDS).close()
        except ConnectionRefusedError:
            return "exited"
        except OSError:  # no answer, or no way to the host
            return "does not answer"
        return "alive"


@dataclass(frozen=True)
class Peers:
    """All ranks of a run, in order of rank. The socket keeps the port of this one open; a single rank has none."""

    by_rank: tuple[Peer, ...]
    listening: socket.socket | None

    @staticmethod
    def meet(device: torch.device) -> Peers:
        """Listen, and learn where all ranks listen. A collective."""
        if dist.get_world_size() == 1:
            return Peers((Peer(0, socket.gethostname(), "", 0),), None)
        listening = _listen()
        own = [socket.gethostname(), *listening.getsockname()[:2]]
        found = all_gather_json(own, device=device)
        return Peers(tuple(Peer(rank, *each) for rank, each in enumerate(found)), listening)

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(peer.host for peer in self.by_rank)

    def lost(self) -> str:
        """The ranks that have exited or do not answer, by host; empty if there are none."""
        start = time.monotonic()
        with _termination_ignored():
            states = self._ask()
            time.sleep(max(start + _SETTLE_SECONDS - time.monotonic(), 0))
            return describe({**states, **self._ask([peer for peer in states if states[peer] == "alive"])})

    @contextmanager
    def naming_at_termination(self, where: Callable[[], str]) -> Iterator[None]:
        """Inside, SIGTERM ends this process as usual, but names the lost ranks first, even if it is blocked.

        ``where`` returns the beginning of the message. A handler of the program is left alone.
        """
        is_main = threading.current_thread() is threading.main_thread()  # only there can handlers be set
        if self.listening is None or not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            yield
            return
        ours, interpreters = socket.socketpair()
        interpreters.setblocking(False)
        before = signal.set_wakeup_fd(interpreters.fileno())  # written to at once, also if Python code cannot run
        signal.signal(signal.SIGTERM, lambda *_: None)
        thread = threading.Thread(target=self._end_at_termination, args=(ours, where), daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(before)
            interpreters.close()
            thread.join()
            ours.close()

    def _end_at_termination(self, signals: socket.socket, where: Callable[[], str]) -> None:
        while numbers := signals.recv(1):
            if numbers[0] == signal.SIGTERM:
                if describe(self._ask()):  # otherwise the whole run is being stopped, and all others are about to exit
                    sys.stderr.write(f"{where()}: {self.lost()} (stopped by SIGTERM)\n")
                    sys.stderr.flush()
                os._exit(TERMINATED)

    def _ask(self, others: Iterable[Peer] | None = None) -> dict[Peer, str]:
        """The states of other ranks, by default all."""
        peers = [peer for peer in self.by_rank if peer.rank != dist.get_rank()] if others is None else list(others)
        with ThreadPoolExecutor(_THREADS) as threads:
            return dict(zip(peers, threads.map(Peer.state, peers), strict=True))

    def close(self) -> None:
        """Close the port: from now on, this rank counts as exited."""
        if self.listening is not None:
            self.listening.close()


def describe(states: dict[Peer, str]) -> str:
    """A text that names the lost ranks.

    >>> ranks = [Peer(0, "host-a", "", 0), Peer(2, "host-b", "", 0), Peer(3, "host-b", "", 0)]
    >>> describe(dict(zip(ranks, ["exited", "does not answer", "does not answer"])))
    'rank 0 on host-a exited; ranks 2, 3 on host-b do not answer'
    """
    found: dict[tuple[str, str], list[int]] = {}
    for peer, state in states.items():
        if state in ("exited", "does not answer"):
            found.setdefault((peer.host, state), []).append(peer.rank)
    parts = []
    for (host, state), ranks in found.items():
        verb = state if len(ranks) == 1 else state.replace("does", "do")
        parts.append(f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} on {host} {verb}")
    return "; ".join(parts)


@contextmanager
def _termination_ignored() -> Iterator[None]:
    """Inside, SIGTERM is ignored: torchrun, which has lost ranks too, stops this one before it can say which."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _listen() -> socket.socket:
    """A listening socket on the address from which this process reaches the rendezvous."""
    family, address = _own_address(os.environ.get("MASTER_ADDR", "localhost"))
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.bind((address, 0))
    listening.listen(_WAITING)
    return listening


def _own_address(master: str) -> tuple[socket.AddressFamily, str]:
    family, kind, protocol, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as datagrams:
        datagrams.connect(address)  # sends nothing
        return family, datagrams.getsockname()[0]
