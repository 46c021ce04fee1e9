"""Hosts on one machine: network namespaces with links of a chosen rate, in which torchrun runs as in a cluster.

    python -m benchmarks.hosts --hosts 2 --ranks 2 --rate 1gbit -- train.py --steps 10
    python -m benchmarks.hosts --hosts 4 --rate 100mbit -- -m ringspan verify
    python -m benchmarks.hosts --hosts 3 --plain -- ip address

Each host has its own network, host name, processes and /etc/hosts, as a machine has; the file system is shared. All
hosts are on one switch, and know each other as host-a, host-b, ... Nothing outside can be reached from a host.

Needs Linux, root, iproute2 and util-linux. The first process of each host reads a pipe from the test bed: when the test
bed ends, however it dies, so does that process, and the kernel ends all others and removes the network.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple

import psutil

INTERFACE = "eth0"  # of each host
MTU = 9000  # jumbo frames, as in most clusters: at 1500 bytes, headers take 4 % of a link
PORT = 29500  # of the rendezvous, on the first host
_QUEUE_SECONDS = 0.01  # longest time in the queue of a link
_BURST_SECONDS = 0.001  # sent at once: covers the granularity of timers
_SMALLEST_BURST = 2**16  # bytes, a packet as TCP hands it to the interface
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}

# As the first process of a host. Reno is the congestion control that every kernel allows in a namespace. The process
# ignores SIGCHLD, so that the kernel reaps orphans.
_FIRST_PROCESS = """
set -e
echo "$0" > /proc/sys/kernel/hostname
echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6
echo reno > /proc/sys/net/ipv4/tcp_congestion_control
ip link set lo up
names=$(mktemp)
echo "$1" > "$names"
mount --bind "$names" /etc/hosts
rm "$names"
echo ready
trap '' CHLD
exec cat
"""


class HostError(RuntimeError):
    """The test bed cannot be made here, or a command in it failed."""


class Traffic(NamedTuple):
    """Bytes that an interface has sent and received, with Ethernet and TCP headers."""

    sent: int
    received: int


@dataclass
class Host:
    """A host of a test bed. ``number`` counts from 0."""

    number: int
    name: str
    address: str
    _first: _FirstProcess = field(repr=False)
    _switch: _FirstProcess = field(repr=False)

    @property
    def _port(self) -> str:
        return f"port{self.number}"  # of the switch

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        stdout: int | IO[str] | None = None,
        stderr: int | IO[str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command in the current working directory."""
        enter = ["nsenter", f"--target={self._first.pid}", "--net", "--uts", "--pid", "--mount"]
        return subprocess.Popen(
            [*enter, "env", f"--chdir={os.getcwd()}", *command],
            env={**os.environ, **(environment or {})},
            stdout=stdout,
            stderr=stderr,
            text=True,
        )

    def run(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
        """Run a command and return its stdout. Raises HostError if it fails."""
        process = self.start(command, environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        output, errors = process.communicate()
        if process.returncode:
            raise HostError(f"{self.name}: {' '.join(command)} exited with {process.returncode}:\n{errors[-4000:]}")
        return output

    def traffic(self) -> Traffic:
        """What the interface has sent and received since the host was made."""
        return read_traffic(Path(f"/proc/{self._first.pid}/net/dev"))

    def set_rate(self, rate: str) -> None:
        """Limit the link to this rate in each direction, such as ``"1gbit"``."""
        shaping = _shaping(rate)
        self._first.configure("tc", "qdisc", "replace", "dev", INTERFACE, *shaping)
        self._switch.configure("tc", "qdisc", "replace", "dev", self._port, *shaping)

    def cut(self) -> None:
        """Take the link down, as if the cable were pulled: the host sees that it has no carrier."""
        self._switch.configure("ip", "link", "set", self._port, "down")

    def stall(self) -> None:
        """Drop all packets from and to the host. The link stays up, and no connection is closed."""
        self._switch.configure("bridge", "link", "set", "dev", self._port, "state", "disabled")

    def mend(self) -> None:
        """Undo `cut` and `stall`."""
        self._switch.configure("ip", "link", "set", self._port, "up")
        self._switch.configure("bridge", "link", "set", "dev", self._port, "state", "forwarding")

    def kill(self) -> None:
        """Kill all processes of the host at once, with SIGKILL. New ones can be started."""
        kill = "kill -9 -1"  # all but the caller and the first process
        self.start(["sh", "-c", kill], stderr=subprocess.DEVNULL).wait()  # which complains if there are none

    def processes(self) -> list[psutil.Process]:
        """The processes of the host, without the first one."""
        namespace = os.readlink(f"/proc/{self._first.pid}/ns/pid")
        others = [process for process in psutil.process_iter() if process.pid != self._first.pid]
        return [process for process in others if _namespace(process) == namespace]


class TestBed:
    """Hosts on one switch, each with a link of the given rate. Use it as a context manager.

    >>> with TestBed(hosts=2, rate="1gbit") as bed:  # doctest: +SKIP
    ...     print(bed.hosts[1].run(["hostname"]))
    ...     job = bed.torchrun(2, "train.py")
    ...     bed.hosts[1].stall()
    ...     bed.hosts[1].mend()
    ...     outputs = job.wait()
    """

    __test__ = False  # not a class of tests

    def __init__(self, hosts: int = 2, rate: str = "1gbit") -> None:
        if not 1 <= hosts <= len(string.ascii_lowercase):
            raise ValueError(f"hosts={hosts}: must be 1 to {len(string.ascii_lowercase)}")
        parse_rate(rate)
        if missing := why_not():
            raise HostError(missing)
        names = [f"host-{letter}" for letter in string.ascii_lowercase[:hosts]]
        addresses = [f"10.0.0.{i + 1}" for i in range(hosts)]
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for address, name in zip(addresses, names, strict=True))]
        self.hosts: list[Host] = []
        self._jobs: list[Job] = []
        with ExitStack() as stack:
            switch = stack.enter_context(_FirstProcess("switch", "\n".join(lines)))
            switch.configure("ip", "link", "add", "switch", "up", "type", "bridge", "mcast_snooping", "0")
            for i, (name, address) in enumerate(zip(names, addresses, strict=True)):
                first = stack.enter_context(_FirstProcess(name, "\n".join(lines)))
                host = Host(i, name, address, first, switch)
                ends = f"{host._port} mtu {MTU} type veth peer name {INTERFACE} mtu {MTU} netns {first.pid}".split()
                switch.configure("ip", "link", "add", *ends)
                switch.configure("ip", "link", "set", host._port, "up", "master", "switch")
                first.configure("ip", "address", "add", f"{address}/24", "dev", INTERFACE)
                first.configure("ip", "link", "set", INTERFACE, "up")
                host.set_rate(rate)
                self.hosts.append(host)
            self._stack = stack.pop_all()

    def run(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
        """Run a command on every host at the same time and return the stdout of each."""
        return self._start(list(command), dict(environment or {})).wait()

    def torchrun(
        self,
        ranks_per_host: int,
        *program: str,
        restarts: int = 0,
        environment: Mapping[str, str] | None = None,
        is_captured: bool = True,
    ) -> Job:
        """Start ``torchrun program`` on every host, as one job. Ranks are ordered by host.

        Args:
            program: a script and its arguments, or ``"-m", module, ..``.
            restarts: how often torchrun restarts the ranks (``--max-restarts``).
            environment: variables in addition to those of this process, ``GLOO_SOCKET_IFNAME`` and ``OMP_NUM_THREADS``.
            is_captured: whether the job keeps what it prints; otherwise it is printed here.
        """
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={self.hosts[0].name}:{PORT}", "--rdzv-id=run1"]
        sizes = [f"--nnodes={len(self.hosts)}", f"--nproc-per-node={ranks_per_host}", f"--max-restarts={restarts}"]
        command = [sys.executable, "-m", "torch.distributed.run", *sizes, *rendezvous, *program]
        own = {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
        return self._start(command, {**own, **(environment or {})}, is_captured)

    def _start(self, command: list[str], environment: dict[str, str], is_captured: bool = True) -> Job:
        self._jobs.append(Job(self.hosts, command, environment, is_captured))
        return self._jobs[-1]

    def close(self) -> None:
        """End all processes and remove all hosts. May be repeated."""
        self._stack.close()
        for job in self._jobs:
            job.close()

    def __enter__(self) -> TestBed:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Job:
    """A command that runs on every host, once on each."""

    def __init__(self, hosts: list[Host], command: list[str], environment: dict[str, str], is_captured: bool) -> None:
        self.hosts, self.command, self.environment = hosts, command, environment
        self._files: list[tuple[IO[str] | None, IO[str] | None]]
        self._files = [(_nameless_file(), _nameless_file()) if is_captured else (None, None) for _ in hosts]
        self.processes = [self._start(host) for host in hosts]

    def _start(self, host: Host) -> subprocess.Popen[str]:
        stdout, stderr = self._files[host.number]
        return host.start(self.command, self.environment, stdout, stderr)

    def restart(self, host: Host) -> None:
        """Start the command again on a host where it has ended, as a cluster manager does. Output is appended."""
        if self.processes[host.number].poll() is None:
            raise HostError(f"{host.name}: the command still runs: wait for it, or host.kill() first")
        self.processes[host.number] = self._start(host)

    def output(self, host: Host) -> str:
        """What the command has printed to stdout on a host so far."""
        return _read(self._files[host.number][0])

    def errors(self, host: Host) -> str:
        """What the command has printed to stderr on a host so far."""
        return _read(self._files[host.number][1])

    def poll(self) -> list[int | None]:
        """The exit status on each host; None while the command runs, negative if a signal ended it."""
        return [process.poll() for process in self.processes]

    def wait(self, timeout: float = 600.0) -> list[str]:
        """Wait for the end on all hosts and return the stdout of each, if it was captured.

        Raises HostError if the command fails on any host, or if it takes longer than ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while None in (status := self.poll()):
            if time.monotonic() > deadline:
                raise HostError(f"still running after {timeout:g} s: {self._report(status)}")
            time.sleep(0.01)
        if any(status):
            raise HostError(f"failed: {self._report(status)}")
        return [self.output(host) for host in self.hosts if self._files[host.number][0] is not None]

    def close(self) -> None:
        """Wait for all processes, which have ended with their hosts, and forget their output."""
        for process, files in zip(self.processes, self._files, strict=True):
            process.wait()
            for file in files:
                if file is not None:
                    file.close()

    def _report(self, status: list[int | None]) -> str:
        states = [f"{host.name}: {'running' if s is None else f'exit status {s}'}\n{self.errors(host)[-4000:]}"
                  for host, s in zip(self.hosts, status, strict=True) if s != 0]  # fmt: skip
        return "\n".join([" ".join(self.command), *states])


class _FirstProcess:
    """The first process of a host, which holds its namespaces. A pipe keeps it alive."""

    def __init__(self, host_name: str, names: str) -> None:
        new = ["--net", "--uts", "--pid", "--mount-proc", "--fork", "--kill-child"]
        self._process = subprocess.Popen(
            ["unshare", *new, "sh", "-c", _FIRST_PROCESS, host_name, names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the commands
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise HostError(f"{host_name} cannot be made: {self._process.communicate()[1].strip()}")
        (first,) = psutil.Process(self._process.pid).children()
        self.pid = first.pid

    def configure(self, *command: str) -> None:
        """Run a command of iproute2 in the network of this process."""
        entered = ["nsenter", f"--target={self.pid}", "--net", *command]
        done = subprocess.run(entered, capture_output=True, text=True, check=False)
        if done.returncode:
            raise HostError(f"{' '.join(command)}: {done.stderr.strip()}")

    def __enter__(self) -> _FirstProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # closes the pipe


def why_not() -> str:
    """Why no test bed can be made here, and what to do; empty if it can."""
    tools = [tool for tool in ("ip", "tc", "bridge", "unshare", "nsenter") if shutil.which(tool) is None]
    if sys.platform != "linux" or os.geteuid() != 0:
        return "hosts are network namespaces, which need Linux and root: run as root, in a container for example"
    if tools:
        return f"{', '.join(tools)} not found: install iproute2 and util-linux (apt-get install iproute2 util-linux)"
    return ""


def parse_rate(rate: str) -> float:
    """Bits per second of a rate.

    >>> parse_rate("2.5gbit")
    2500000000.0
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if not found or not float(found[1]):
        raise ValueError(f"rate={rate!r}: must be a number and kbit, mbit or gbit, such as 100mbit")
    return float(found[1]) * _UNITS[found[2]]


def limit_own_link(rate: str) -> None:
    """Limit what the host of this process sends, from inside: for programs that change their links."""
    subprocess.run(["tc", "qdisc", "replace", "dev", INTERFACE, *_shaping(rate)], check=True)


def _shaping(rate: str) -> list[str]:
    bits = parse_rate(rate)
    burst = max(int(bits / 8 * _BURST_SECONDS), _SMALLEST_BURST)
    queue = burst + max(int(bits / 8 * _QUEUE_SECONDS), 4 * _SMALLEST_BURST)
    return f"root tbf rate {bits:.0f}bit burst {burst} limit {queue}".split()


def read_traffic(counters: Path = Path("/proc/net/dev")) -> Traffic:
    """What the interface of a host has sent and received; by default that of the host this process runs on."""
    (line,) = re.findall(rf"^ *{INTERFACE}:(.*)$", counters.read_text(), re.MULTILINE)
    received, sent = (int(line.split()[column]) for column in (0, 8))
    return Traffic(sent, received)


def _namespace(process: psutil.Process) -> str:
    try:
        return os.readlink(f"/proc/{process.pid}/ns/pid")
    except OSError:  # it has ended
        return ""


def _nameless_file() -> IO[str]:
    """A file that is gone when this process ends, however it dies."""
    return tempfile.TemporaryFile("w+")


def _read(file: IO[str] | None) -> str:
    if file is None:
        raise HostError("the output was printed, not kept: start the job with is_captured=True")
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode(errors="replace")  # leaves the writers' position alone


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hosts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts (default: 2)")
    parser.add_argument("--ranks", type=int, default=1, help="ranks on each host (default: 1)")
    parser.add_argument("--rate", default="1gbit", help="of each link, in each direction (default: 1gbit)")
    parser.add_argument("--max-restarts", type=int, default=0, help="restarts by torchrun (default: 0)")
    parser.add_argument("--plain", action="store_true", help="run the command itself on every host, without torchrun")
    parser.add_argument("command", nargs="+", help="a script or -m module, with arguments; put -- before it")
    arguments = parser.parse_args()
    try:
        with TestBed(arguments.hosts, arguments.rate) as bed:
            if arguments.plain:
                for host, output in zip(bed.hosts, bed.run(arguments.command), strict=True):
                    print(*(f"{host.name}: {line}" for line in output.splitlines()), sep="\n")
                return
            restarts = arguments.max_restarts
            bed.torchrun(arguments.ranks, *arguments.command, restarts=restarts, is_captured=False).wait(float("inf"))
    except (HostError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
