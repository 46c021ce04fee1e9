"""Memory for many rows, straight from the system: used again while a run goes on, and given back when it is over.

An allocator keeps what is freed, for each thread by itself: buffers that one thread fills and another lets go of would
add up to twice of what is held, and a budget would mean little. And new pages cost time, which a run that takes new
ones for each shard would pay over and over.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from threading import Lock

import torch
from torch import Tensor

_WORTH_IT = 2**20  # bytes; less than that is taken and kept by the allocator without harm
_CLOSE_FIT = 1.1  # shards differ by a row: a buffer serves everything that nearly fills it


class _Pool:
    """Pages that nobody holds now, kept while a run needs them again."""

    def __init__(self) -> None:
        self._lock, self._free, self._runs = Lock(), list[mmap.mmap](), 0

    def take(self, size: int) -> mmap.mmap:
        with self._lock:
            for i, pages in enumerate(self._free):
                if size <= len(pages) <= _CLOSE_FIT * size:
                    return self._free.pop(i)
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a system without them
                pages.madvise(mmap.MADV_HUGEPAGE)
        return pages

    def give_back(self, pages: mmap.mmap) -> None:
        if self._runs:  # no lock: this may be called in the middle of `take`, and a list grows in one step
            self._free.append(pages)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        with self._lock:
            self._runs += 1
        try:
            yield
        finally:
            with self._lock:
                self._runs -= 1
                if not self._runs:
                    self._free = []


_POOL = _Pool()


def rows_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A new tensor in host memory whose contents do not matter."""
    count = torch.Size(shape).numel()
    size = count * dtype.itemsize
    if size < _WORTH_IT or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.empty(shape, dtype=dtype)
    pages = _POOL.take(size)
    held = memoryview(pages)  # lives as long as the tensor's storage, and tells when that is gone
    weakref.finalize(held, _POOL.give_back, pages).atexit = False
    return torch.frombuffer(held, dtype=dtype, count=count).view(shape)


def keep_rows_memory() -> AbstractContextManager[None]:
    """While this lasts, memory of rows that are let go of serves the next ones."""
    return _POOL.keeping()
