"""Every test runs with uninitialised memory filled with NaN, so that reading an unwritten buffer cannot pass."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# How long one example takes says nothing on a busy machine; pytest-timeout ends what hangs.
settings.register_profile("ringspan", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ringspan")

# A shell starts background jobs with SIGINT ignored, and the commands that tests interrupt would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# These start processes, and some watch the loopback interface: with pytest-xdist one worker runs them all, one by one.
START_PROCESSES = (
    "tools/bench/test_trials.py",
    "cli/test_failures.py",
    "cli/test_generate.py",
    "cli/test_interrupts.py",
    "cli/test_rehearse.py",
    "cli/test_train.py",
    "cli/test_verify.py",
    "decoding/test_ranks.py",
    "ring/test_faults.py",
    "ring/test_processes.py",
    "tools/test_rehearse.py",
    "streaming/test_killed.py",
    "train/test_checkpoint.py",
    "train/test_faults.py",
    "train/test_estimate.py",
    "train/test_watchdog.py",
    "train/test_ranks.py",
    "train/test_safety.py",
    "tools/verify",
)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if any(item.path.is_relative_to(here / place) for place in START_PROCESSES):
            item.add_marker(pytest.mark.xdist_group("processes"))


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
