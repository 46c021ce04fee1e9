"""The lock of a folder, heartbeats, stragglers and the Prometheus endpoint."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ringspan.runtime.settings import RunError
from ringspan.train.config import TrainSettings
from ringspan.train.metrics import RunMetrics, StepMetrics
from ringspan.train.prometheus import serve
from ringspan.train.watchdog import (
    LOCK,
    STALE_SECONDS,
    Heartbeat,
    RunLock,
    Straggler,
    find_slowest_rank,
    find_stragglers,
    heartbeat_time,
    read_heartbeats,
    write_heartbeat,
)
from tests.ranks import starts_processes

pytestmark = starts_processes

HOLDER = """
import sys, time
from pathlib import Path
from ringspan.train.watchdog import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
while True:
    time.sleep(0.2)
    lock.refresh()
"""

HEARTBEAT = Heartbeat(0, "node", 6, 3, "forward", 1.0, "parcels of hop 2", (), 0.0, 0.5, 2**20)


def holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_only_one_run_uses_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringspan.train.watchdog.WAIT_SECONDS", 1.0)
    with holder(tmp_path) as process:
        with pytest.raises(RunError, match=f"process {process.pid} on .*--out"):
            RunLock(tmp_path).acquire()
        process.send_signal(signal.SIGKILL)  # the lock of a killed process is free at once
        process.wait()
    start = time.monotonic()
    RunLock(tmp_path).acquire()
    assert time.monotonic() - start < STALE_SECONDS  # at once, even on a slow machine


def test_a_lock_of_another_machine_holds_while_it_is_refreshed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / LOCK).write_text(json.dumps(dict(token="theirs", pid=1, host="elsewhere", started="then")))
    monkeypatch.setattr("ringspan.train.watchdog.STALE_SECONDS", 1.5)
    start = time.monotonic()
    lock = RunLock(tmp_path)
    lock.acquire()  # it is not refreshed
    assert time.monotonic() - start > 1
    lock.refresh()
    (tmp_path / LOCK).write_text(json.dumps(dict(token="theirs", pid=1, host="elsewhere", started="then")))
    with pytest.raises(RunError, match="process 1 on elsewhere"):
        lock.refresh()


def test_a_released_lock_is_free_and_an_unwritable_folder_raises(tmp_path: Path) -> None:
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    first.acquire()
    first.release()
    second.acquire()
    second.release()
    (tmp_path / "file").touch()
    for place in (tmp_path / "file/run", Path("/sys/ringspan")):
        with pytest.raises(RunError, match="cannot be written"):
            RunLock(place).acquire()


def test_a_worker_whose_launcher_died_early_stops_at_once(tmp_path: Path) -> None:
    """Its parent is then the process that adopts orphans: here a shell, which cannot be torchrun."""
    worker = (
        "import os, pathlib; from ringspan.train.watchdog import Watchdog; "
        "Watchdog(pathlib.Path('.'), 0, os.getppid()).start()"
    )
    command = ["sh", "-c", f'"{sys.executable}" -c "{worker}"; echo "status $?"']
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == "status 3\n"
    assert "rank 0: the launcher is gone" in done.stderr


def test_heartbeats_are_read_with_their_age_and_without_those_of_other_runs(tmp_path: Path) -> None:
    for rank in range(3):
        write_heartbeat(tmp_path, replace(HEARTBEAT, rank=rank, waiting_for=(rank,)))
    now = heartbeat_time(tmp_path, 0)
    os.utime(tmp_path / "heartbeats/rank-00001.json", (now - 20, now - 20))
    os.utime(tmp_path / "heartbeats/rank-00002.json", (now - 500, now - 500))
    (tmp_path / "heartbeats/rank-00003.json").write_text("{")
    found = read_heartbeats(tmp_path, 4, not_before=now - 100)
    assert [heartbeat.rank for heartbeat in found] == [0, 1]
    assert found[1].age_seconds == pytest.approx(20, abs=1)
    assert found[1].waiting_for == (1,)


@pytest.mark.parametrize(
    ("heartbeats", "named"),
    [
        ([HEARTBEAT, replace(HEARTBEAT, rank=1)], {}),
        ([HEARTBEAT, replace(HEARTBEAT, rank=1, age_seconds=12.0)], {1: "no heartbeat for 12 s"}),
        # Rank 0 waits for 1, which waits for 2, which waits for no one.
        (
            [
                replace(HEARTBEAT, waiting_for=(1,), wait_seconds=9.0),
                replace(HEARTBEAT, rank=1, waiting_for=(2,), wait_seconds=8.0),
                replace(HEARTBEAT, rank=2),
            ],
            {2: "rank 1 has waited for it for 8 s"},
        ),
        (
            [HEARTBEAT, replace(HEARTBEAT, rank=1, phase="reading", phase_seconds=7.0)],
            {1: "in this phase for 7 s, while other ranks are ahead"},
        ),
        ([], {}),
    ],
)
def test_stragglers_are_named(heartbeats: list[Heartbeat], named: dict[int, str]) -> None:
    assert {found.rank: found.why for found in find_stragglers(heartbeats)} == named


def test_the_rank_that_waits_least_is_the_slowest() -> None:
    assert find_slowest_rank([1.0, 0.0, 1.0, 1.2], ring_size=4, seconds=4.0) == 1
    assert find_slowest_rank([0.1, 0.0, 0.1, 0.2], ring_size=4, seconds=4.0) is None
    assert find_slowest_rank([0.0, 0.0], ring_size=1, seconds=1.0) is None


def test_prometheus_reads_the_latest_metrics_on_this_machine_only() -> None:
    metrics = RunMetrics(TrainSettings())
    metrics.record_step(StepMetrics(4, 1.5, 0.7, 1e-3, 2.0, 4096, 2**20, 0.1))
    metrics.record_heartbeats([HEARTBEAT, replace(HEARTBEAT, rank=1)], [Straggler(1, "rank 1", "why")])
    before = listening()
    with serve(metrics, "127.0.0.1", 0):
        (address,) = listening() - before
        assert address.ip == "127.0.0.1"
        with urllib.request.urlopen(f"http://127.0.0.1:{address.port}/metrics") as answer:
            text = answer.read().decode()
    assert listening() == before
    values = dict(re.findall(r"^(ringspan_\S+) (\S+)$", text, re.M))
    assert float(values["ringspan_steps_done"]) == 5
    assert float(values["ringspan_tokens_per_second"]) == 2048
    assert float(values['ringspan_rank_memory_bytes{rank="1"}']) == 2**20
    assert [float(values[f'ringspan_rank_is_straggler{{rank="{rank}"}}']) for rank in (0, 1)] == [0, 1]


def test_a_port_in_use_raises() -> None:
    before, metrics = listening(), RunMetrics(TrainSettings())
    with serve(metrics, "127.0.0.1", 0):
        (address,) = listening() - before
        with (
            pytest.raises(RunError, match="cannot be opened"),
            serve(metrics, "127.0.0.1", address.port),
        ):
            pass


def listening() -> set[psutil._common.addr]:
    return {c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}
