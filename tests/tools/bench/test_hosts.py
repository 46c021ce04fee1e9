"""The test bed of hosts: separate machines as far as programs can tell, with links of a known rate."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from benchmarks.hosts import Host, HostError, TestBed, parse_rate, why_not
from benchmarks.suite import ROOT
from tests.ranks import starts_processes

pytestmark = [starts_processes, pytest.mark.skipif(bool(why_not()), reason=f"no test bed: {why_not()}")]

RECEIVE = """
import socket, time
server = socket.create_server(("", 5000))
connection, _ = server.accept()
connection.recv_into(bytearray(2**16))
start, total = time.perf_counter(), 0
buffer = bytearray(2**20)
while count := connection.recv_into(buffer):
    total += count
print(total * 8 / (time.perf_counter() - start))
"""
SEND = """
import socket, sys, time
deadline = time.monotonic() + 10
while True:
    try:
        connection = socket.create_connection((sys.argv[1], 5000))
        break
    except ConnectionRefusedError:
        assert time.monotonic() < deadline
        time.sleep(0.01)
left, block = int(sys.argv[2]), bytes(2**20)
while left > 0:
    left -= connection.send(block[:left])
"""
REACH = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), timeout=float(sys.argv[2]))
except ConnectionRefusedError:
    print("reached")
except OSError:
    print("not reached")
"""


@pytest.fixture(scope="module")
def bed() -> Iterator[TestBed]:
    with TestBed(hosts=3, rate="1gbit") as bed:
        yield bed


def python(program: str, *arguments: str) -> list[str]:
    return [sys.executable, "-ISc", program, *arguments]


def reaches(host: Host, other: Host) -> bool:
    return host.run(python(REACH, other.name, "0.5")) == "reached\n"


def network_of(process: psutil.Process) -> str:
    try:
        return os.readlink(f"/proc/{process.pid}/ns/net")
    except OSError:  # it has ended
        return ""


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_each_host_has_its_own_name_address_processes_and_working_directory(bed: TestBed) -> None:
    assert bed.run(["hostname"]) == ["host-a\n", "host-b\n", "host-c\n"]
    for host, addresses in zip(bed.hosts, bed.run(["ip", "-json", "address"]), strict=True):
        found = {link["ifname"]: [a["local"] for a in link["addr_info"]] for link in json.loads(addresses)}
        assert found == {"lo": ["127.0.0.1"], "eth0": [host.address]}
    assert all(int(count) < 6 for count in bed.run(["sh", "-c", "ls -d /proc/[0-9]* | wc -l"]))
    assert bed.hosts[0].run(["pwd"]) == f"{os.getcwd()}\n"
    assert bed.hosts[0].run(["sh", "-c", "echo $WORD"], {"WORD": "given"}) == "given\n"


def test_a_failed_command_is_reported_with_its_host_and_its_errors(bed: TestBed) -> None:
    with pytest.raises(HostError, match=r"host-b: sh -c .* exited with 7:\noh"):
        bed.hosts[1].run(["sh", "-c", "echo oh >&2; exit 7"])
    with pytest.raises(HostError, match=r"host-c: exit status 7\noh"):
        bed.run(["sh", "-c", "echo oh >&2; test $(hostname) != host-c || exit 7"])


@pytest.mark.parametrize("rate", ["100mbit", "1gbit"])
def test_tcp_reaches_the_rate_of_the_link_and_no_more(bed: TestBed, rate: str) -> None:
    sender, receiver = bed.hosts[:2]
    seconds, nominal = 0.4, parse_rate(rate)
    for host in bed.hosts:
        host.set_rate(rate)
    rates = []
    while len(rates) < 3 and max(rates, default=0.0) < 0.95 * nominal:  # another try if the machine was busy
        before = sender.traffic(), receiver.traffic()
        receiving = receiver.start(python(RECEIVE), stdout=subprocess.PIPE)
        sender.run(python(SEND, receiver.name, str(int(nominal / 8 * seconds))))
        rates.append(float(receiving.communicate()[0]))
        sent, received = sender.traffic().sent - before[0].sent, receiver.traffic().received - before[1].received
        assert sent == pytest.approx(nominal / 8 * seconds, rel=0.02)  # headers add less than a percent
        assert received == pytest.approx(sent, rel=0.01)
    assert 0.95 * nominal < max(rates) < 1.02 * nominal


def test_a_cut_link_has_no_carrier_and_a_stalled_one_drops_in_silence(bed: TestBed) -> None:
    first, second, third = bed.hosts

    def has_carrier() -> bool:
        return "LOWER_UP" in json.loads(second.run(["ip", "-json", "link", "show", "eth0"]))[0]["flags"]

    assert reaches(first, second)
    for fault, carrier in ((second.stall, True), (second.cut, False)):
        fault()
        assert has_carrier() == carrier
        assert not reaches(first, second)
        assert not reaches(second, third)
        assert reaches(first, third)
        second.mend()
        assert has_carrier()
        wait_until(lambda: reaches(first, second))


def test_kill_ends_all_processes_of_one_host(bed: TestBed) -> None:
    first, second = bed.hosts[:2]
    other, *killed = [host.start(["sleep", "100"]) for host in (first, second, second)]
    wait_until(lambda: len(second.processes()) == 2)
    second.kill()
    assert [process.wait() for process in killed] == [-signal.SIGKILL] * 2
    assert second.processes() == []
    assert other.poll() is None
    first.kill()
    assert other.wait() == -signal.SIGKILL
    assert second.run(["hostname"]) == "host-b\n"


def test_nothing_remains_after_the_test_bed_is_killed() -> None:
    program = (
        "import sys, time; from benchmarks.hosts import TestBed; bed = TestBed(2); "
        "[host.start(['sleep', '100']) for host in bed.hosts]; time.sleep(0.2); "
        "print(*(host._first.pid for host in bed.hosts), bed.hosts[0]._switch.pid, flush=True); time.sleep(100)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    firsts = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
    namespaces = set(map(network_of, firsts))
    assert len(namespaces - {network_of(psutil.Process())}) == 3
    process.kill()
    process.communicate()

    wait_until(lambda: not namespaces & set(map(network_of, psutil.process_iter())))
    assert not any(first.is_running() for first in firsts)


def test_refusals_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="hosts=0: must be"):
        TestBed(hosts=0)
    with pytest.raises(ValueError, match="rate='fast': must be"):
        TestBed(rate="fast")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(HostError, match="run as root"):
        TestBed()


@pytest.mark.parametrize("ranks_per_host", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_ring_over_hosts_is_exact_and_sends_the_planned_bytes_between_them(ranks_per_host: int) -> None:
    with TestBed(hosts=2, rate="1gbit") as bed:
        outputs = bed.torchrun(ranks_per_host, "-m", "tests.tools.bench.ring_on_hosts").wait()
        found = [json.loads(output) for output in outputs]
    assert [each["host"] for each in found] == ["host-a", "host-b"]
    sent, planned = sum(each["sent"] for each in found), found[0]["planned"]
    assert planned > 2**22
    assert 1 <= sent / planned < 1.02


def test_a_ring_uses_both_directions_of_a_link_at_once() -> None:
    """With gloo that depends on the order in which the messages of a hop are posted."""
    with TestBed(hosts=2, rate="200mbit") as bed:
        output, _ = bed.torchrun(1, "-m", "tests.tools.bench.exchange_on_hosts").wait()
    both_ways, one_way = json.loads(output)
    assert 0.9 < both_ways / one_way < 1.4  # 2 if one direction waited for the other
