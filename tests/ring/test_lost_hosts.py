"""A ring over hosts, one of which vanishes: ranks of the other one name the lost rank and its host in time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from benchmarks.hosts import Host, TestBed, why_not
from tests.ranks import starts_processes
from tests.ring.call_until_lost import ROWS

pytestmark = [starts_processes, pytest.mark.skipif(bool(why_not()), reason=f"no test bed: {why_not()}")]

TIMEOUT = 4


def what_host_a_says(fault: Callable[[Host], None], seq_len: int) -> dict[str, object]:
    with TestBed(hosts=2) as bed:
        job = bed.torchrun(1, "-m", "tests.ring.call_until_lost", str(TIMEOUT), str(seq_len))
        while not job.output(bed.hosts[0]):
            assert job.poll() == [None, None], job.errors(bed.hosts[0])
            time.sleep(0.02)
        fault(bed.hosts[1])
        while len(lines := job.output(bed.hosts[0]).splitlines()) < 2:
            assert job.poll()[0] is None, job.errors(bed.hosts[0])
            time.sleep(0.02)
        found: dict[str, object] = json.loads(lines[1])
        return found


@pytest.mark.parametrize(
    ("fault", "shortest", "longest"),
    [
        pytest.param(Host.kill, 0, TIMEOUT, id="killed"),
        pytest.param(Host.stall, TIMEOUT - 1, TIMEOUT + 1, id="stalled", marks=pytest.mark.slow),
        pytest.param(Host.cut, TIMEOUT - 1, TIMEOUT + 1, id="cut", marks=pytest.mark.slow),
    ],
)
def test_the_lost_rank_is_named_with_its_host_within_the_timeout(
    fault: Callable[[Host], None], shortest: float, longest: float
) -> None:
    found = what_host_a_says(fault, seq_len=0)
    assert str(found["said"]).startswith("rank 0 of 2 on host-a: parcels of hop 1: ")
    assert "rank 1 on host-b failed" in str(found["said"])
    assert shortest <= float(str(found["seconds"])) <= longest


@pytest.mark.slow
def test_a_ring_whose_ranks_never_met_names_the_rank_alone() -> None:
    found = what_host_a_says(Host.kill, seq_len=ROWS)
    assert "rank 1 failed" in str(found["said"])
    assert "host" not in str(found["said"])
