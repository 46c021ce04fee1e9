"""Every test runs with uninitialised memory filled with NaN, so that reading an unwritten buffer cannot pass."""

import os
import re
import signal
from collections.abc import Iterator

import pytest
import torch

from tests.ranks import reject_forgotten

# The workers of pytest-xdist keep the cores busy; more threads would only wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start
    torch.set_num_threads(1)

# A shell starts background jobs with SIGINT ignored, and the commands that tests interrupt would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

STARTS_RANKS = re.compile(r"\brun_local_ranks\(|torch\.distributed\.run\b")
MARKED = re.compile(r"\b(starts_processes|shares_processes|on_ranks)\b")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = [item for item in items if isinstance(item, pytest.Function)]
    for module in {item.module for item in tests if hasattr(item.function, "on_each_rank")}:
        reject_forgotten(module)
    for path in {item.path for item in tests}:
        source = path.read_text()
        if STARTS_RANKS.search(source) and not MARKED.search(source):
            raise pytest.UsageError(f"{path}: starts ranks, so mark it: pytestmark = starts_processes (tests/ranks.py)")


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_process_group_left() -> Iterator[None]:
    """A process group that a test leaves would fail later tests of the same worker, whichever they are."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        pytest.fail("the test left a process group: call destroy_process_group()")
