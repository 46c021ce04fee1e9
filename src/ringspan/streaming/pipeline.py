"""Reading, computing and writing at the same time: while an item is computed, the next is read and the last is written.

At most one item is ahead and one behind, so that memory is bounded by three.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

from ringspan.streaming.memory import keep_rows_memory

Rows = TypeVar("Rows")
Results = TypeVar("Results")
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


def without_gradients(do: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The same function for another thread: no graph is recorded there, and inference mode is as it is here.

    Both modes belong to a thread. A new one records, and may not write to the inference tensors of its caller.
    """
    is_inference = torch.is_inference_mode_enabled()

    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with torch.inference_mode(is_inference), torch.no_grad():
            return do(*args, **kwargs)

    return run


def run_pipeline(
    items: Sequence[int],
    read: Callable[[int], Rows],
    compute: Callable[[int, Rows], Results],
    write: Callable[[int, Results], None],
) -> None:
    """Read, compute and write each item, in order. The first error ends everything, and is raised here."""
    read, write = without_gradients(read), without_gradients(write)
    with (
        keep_rows_memory(),
        ThreadPoolExecutor(1, "read ahead") as reader,
        ThreadPoolExecutor(1, "write behind") as writer,
    ):
        ahead = reader.submit(read, items[0]) if items else None
        behind: Future[None] | None = None
        for place, item in enumerate(items):
            assert ahead is not None
            rows = ahead.result()
            ahead = reader.submit(read, items[place + 1]) if place + 1 < len(items) else None
            results = compute(item, rows)
            del rows
            if behind is not None:
                behind.result()
            behind = writer.submit(write, item, results)
            del results
        if behind is not None:
            behind.result()
