"""Training over two hosts, one of which stalls: it restarts, and ends like an undisturbed run, bit for bit.

One case of `benchmarks.host_faults`, which has all faults at random moments.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.host_faults import in_time, one
from benchmarks.hosts import why_not
from tests.ranks import starts_processes

pytestmark = [starts_processes, pytest.mark.skipif(bool(why_not()), reason=f"no test bed: {why_not()}")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["killed", "stalled"])
def test_a_lost_host_is_named_and_changes_nothing(kind: str, tmp_path: Path) -> None:
    found = one(tmp_path, kind, random.Random(0))
    assert found["same_losses"]
    assert found["same_weights"]
    assert in_time(found), found
    assert found["restarts"] >= 1
