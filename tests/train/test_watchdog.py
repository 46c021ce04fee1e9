"""One run in a folder, a heartbeat of each rank, and a name for whoever keeps the others waiting."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest

from ringspan.runtime.settings import RunError
from ringspan.train.lock import LOCK, STALE, RunLock
from ringspan.train.metrics import Step
from ringspan.train.prometheus import serve
from ringspan.train.watchdog import Beat, Straggler, last_written, late_rank, read_beats, stragglers, write_beat
from tests.ranks import starts_processes

pytestmark = starts_processes

HOLDER = """
import sys, time
from pathlib import Path
from ringspan.train.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.take()
print("held", flush=True)
while True:
    time.sleep(0.2)
    lock.beat()
"""

BEAT = Beat(0, "node", 6, 3, "forward", 1.0, "parcels of hop 2", (), 0.0, 0.5, 2**20)


def holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_folder_has_one_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringspan.train.lock.PATIENCE", 1.0)
    with holder(tmp_path) as process:
        with pytest.raises(RunError, match=f"written by another run .process {process.pid} on .*give another --out"):
            RunLock(tmp_path).take()
        process.send_signal(signal.SIGKILL)  # dies without a word, and its lock is free at once
        process.wait()
    start = time.monotonic()
    RunLock(tmp_path).take()
    assert time.monotonic() - start < STALE  # at once, however slow the machine is


def test_a_lock_from_another_machine_counts_as_long_as_its_heart_beats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / LOCK).write_text(json.dumps(dict(token="theirs", pid=1, host="elsewhere", started="then")))
    monkeypatch.setattr("ringspan.train.lock.STALE", 1.5)
    start = time.monotonic()
    lock = RunLock(tmp_path)
    lock.take()  # nobody sets its time anew
    assert time.monotonic() - start > 1
    lock.beat()
    (tmp_path / LOCK).write_text(json.dumps(dict(token="theirs", pid=1, host="elsewhere", started="then")))
    with pytest.raises(RunError, match=r"no longer this run's .process 1 on elsewhere"):
        lock.beat()


def test_a_released_lock_is_free_and_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    first.take()
    first.release()
    second.take()
    second.release()
    (tmp_path / "file").touch()
    for place in (tmp_path / "file/run", Path("/sys/ringspan")):
        with pytest.raises(RunError, match=r"cannot be written .*: give another --out"):
            RunLock(place).take()


def test_a_worker_whose_launcher_died_before_it_looked_stops_at_once(tmp_path: Path) -> None:
    """Its parent is then whoever adopts orphans: here a shell, which is no launcher of Python processes."""
    worker = (
        "import os, pathlib; from ringspan.train.watchdog import Guard; "
        "Guard(pathlib.Path('.'), 0, os.getppid()).__enter__()"
    )
    command = ["sh", "-c", f'"{sys.executable}" -c "{worker}"; echo "status $?"']
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == "status 3\n"
    assert "rank 0: the launcher is gone: stopping. The last checkpoint is safe" in done.stderr


def test_beats_come_back_with_their_age_and_those_of_other_runs_do_not(tmp_path: Path) -> None:
    for rank in range(3):
        write_beat(tmp_path, replace(BEAT, rank=rank, waits_for=(rank,)))
    now = last_written(tmp_path, 0)
    os.utime(tmp_path / "heartbeats/rank-00001.json", (now - 20, now - 20))
    os.utime(tmp_path / "heartbeats/rank-00002.json", (now - 500, now - 500))
    (tmp_path / "heartbeats/rank-00003.json").write_text("{")
    found = read_beats(tmp_path, 4, not_before=now - 100)
    assert [beat.rank for beat in found] == [0, 1]
    assert found[1].silent_seconds == pytest.approx(20, abs=1)
    assert found[1].waits_for == (1,)


@pytest.mark.parametrize(
    ("beats", "named"),
    [
        ([BEAT, replace(BEAT, rank=1)], {}),
        ([BEAT, replace(BEAT, rank=1, silent_seconds=12.0)], {1: "no heartbeat for 12 s"}),
        # Rank 0 waits for 1, which waits for 2, which waits for nobody.
        (
            [
                replace(BEAT, waits_for=(1,), waits_seconds=9.0),
                replace(BEAT, rank=1, waits_for=(2,), waits_seconds=8.0),
                replace(BEAT, rank=2),
            ],
            {2: "rank 1 has waited for it for 8 s"},
        ),
        (
            [BEAT, replace(BEAT, rank=1, doing="reading", doing_seconds=7.0)],
            {1: "it has been at that for 7 s, and others are further"},
        ),
        ([], {}),
    ],
)
def test_who_keeps_the_others_waiting_is_named(beats: list[Beat], named: dict[int, str]) -> None:
    assert {found.rank: found.why for found in stragglers(beats)} == named


def test_the_rank_that_waits_least_is_the_one_that_is_waited_for() -> None:
    assert late_rank([1.0, 0.0, 1.0, 1.2], ring_size=4, seconds=4.0) == 1
    assert late_rank([0.1, 0.0, 0.1, 0.2], ring_size=4, seconds=4.0) is None
    assert late_rank([0.0, 0.0], ring_size=1, seconds=1.0) is None


@dataclass
class Known:
    last: Step | None = None
    beats: list[Beat] = field(default_factory=list)
    late: list[Straggler] = field(default_factory=list)


def test_prometheus_reads_what_is_known_on_this_machine_alone() -> None:
    step = Step(4, 1.5, 0.7, 1e-3, 2.0, 4096, 2**20, 0.1, None, None)
    known = Known(step, [BEAT, replace(BEAT, rank=1)], [Straggler(1, "rank 1", "why")])
    before = listening()
    with serve(known, "127.0.0.1", 0):
        (address,) = listening() - before
        assert address.ip == "127.0.0.1"
        with urllib.request.urlopen(f"http://127.0.0.1:{address.port}/metrics") as answer:
            text = answer.read().decode()
    assert listening() == before
    values = dict(re.findall(r"^(ringspan_\S+) (\S+)$", text, re.M))
    assert float(values["ringspan_steps_done"]) == 5
    assert float(values["ringspan_tokens_per_second"]) == 2048
    assert float(values['ringspan_rank_memory_bytes{rank="1"}']) == 2**20
    assert [float(values[f'ringspan_rank_is_late{{rank="{rank}"}}']) for rank in (0, 1)] == [0, 1]


def test_a_port_that_is_taken_is_an_error_with_the_way_out() -> None:
    before = listening()
    with serve(Known(), "127.0.0.1", 0):
        (address,) = listening() - before
        with (
            pytest.raises(RunError, match=r"cannot be opened .*: take another"),
            serve(Known(), "127.0.0.1", address.port),
        ):
            pass


def listening() -> set[psutil._common.addr]:
    return {c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}
