"""Checksums of sampled rows: whether the inputs of a run, and its results, are still the same when it resumes.

Reading everything again would take as long as the run spends on reading. A sample notices other files, other weights or
another seed at once; docs/streaming.md says what it can miss.
"""

from __future__ import annotations

import ctypes
import random
import zlib
from collections.abc import Sequence

from torch import Tensor

ROWS_IN_ALL = 1024
ROWS_OF_A_SHARD = 8  # at least

Fingerprint = dict[str, list[int]]  # of each tensor, one checksum for each shard


def sampled_rows(span: range, count: int) -> list[int]:
    """The rows of a shard that are compared: its first, its last, and random ones, the same for every run.

    >>> sampled_rows(range(10, 13), 8)
    [10, 11, 12]
    >>> rows = sampled_rows(range(1000, 2000), 8)
    >>> len(rows), rows[0], rows[-1]
    (8, 1000, 1999)
    """
    if len(span) <= count:
        return list(span)
    between = random.Random(f"{span.start} {span.stop}").sample(span[1:-1], count - 2)
    return [span[0], *sorted(between), span[-1]]


def checksum(rows: Sequence[Tensor]) -> int:
    """Of the bytes of these rows, in host memory."""
    found = 0
    for row in rows:
        whole = row.contiguous()
        found = zlib.crc32(ctypes.string_at(whole.data_ptr(), whole.nbytes), found)  # torch needs no NumPy
    return found
