"""Every test runs with uninitialised memory filled with NaN, so that reading an unwritten buffer cannot pass."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# How long one example takes says nothing on a busy machine; pytest-timeout ends what hangs.
settings.register_profile("ringspan", deadline=None)
settings.load_profile("ringspan")


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
