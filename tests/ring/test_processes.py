"""Real gloo processes: one launch for each ring size runs all of `tasks`; each task is a test here."""

from functools import lru_cache

import pytest

import ringspan as rs
from ringspan.runtime.launch import run_local_ranks
from tests.rank_tasks import run_tasks
from tests.ring import tasks


@lru_cache
def failures(size: int) -> list[dict[str, str]]:
    return run_local_ranks(size, run_tasks, tasks.__name__, tasks.BY_SIZE[size])


@pytest.mark.parametrize(("size", "task"), [(size, task) for size, names in tasks.BY_SIZE.items() for task in names])
def test_on_every_rank(size: int, task: str) -> None:
    failed = {rank: found[task] for rank, found in enumerate(failures(size)) if found[task]}
    assert not failed, "\n".join(f"rank {rank}:\n{text}" for rank, text in failed.items())


def test_without_a_process_group() -> None:
    with pytest.raises(rs.RingError, match="no process group is initialised: start with torchrun"):
        rs.Ring()
    with pytest.raises(ValueError, match="layout='round'"):
        rs.Ring(layout="round")  # type: ignore[arg-type]
