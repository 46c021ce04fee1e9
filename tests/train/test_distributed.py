"""The ranks of a start agree on a part of the store that no earlier start has written to."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from ringspan.runtime.settings import RunError
from ringspan.train.distributed import agree_on_start


def starts(store: dist.Store, order: tuple[int, ...]) -> set[str]:
    """The names that the ranks of a start agree on, if they join in this order."""
    with ThreadPoolExecutor() as ranks:
        return {found.result() for found in [ranks.submit(agree_on_start, store, rank, 3, 20.0) for rank in order]}


def test_every_start_has_a_unique_name_in_any_order_of_ranks() -> None:
    store = dist.HashStore()
    found = [starts(store, order) for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1))]
    assert all(len(names) == 1 for names in found)
    assert len(set.union(*found)) == len(found)


def test_missing_ranks_are_named() -> None:
    store = dist.HashStore()
    starts(store, (0, 1, 2))  # leftovers of an earlier start do not count
    with pytest.raises(RunError, match=r"ranks \[1, 2\] did not join"):
        agree_on_start(store, 0, 3, 0.2)
