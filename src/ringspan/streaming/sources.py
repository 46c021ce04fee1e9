"""Sources: where rows of q, k and v come from. Tensors, callables, or synthetic rows of any length.

`TensorRows` is a sink as well; other sinks are in `ringspan.streaming.sinks`, files in
`ringspan.streaming.mapped_files`. Buffers for rows and checksums of sampled rows are at the end.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import random
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Protocol

import torch
from torch import Tensor

from ringspan.kernels import accumulation_dtype

INPUTS = ("q", "k", "v")
OUTPUTS = ("out", "lse")  # of forward
GRADIENTS = ("dq", "dk", "dv")
# Tensors are (batch, seq, heads, head_dim), but lse and its gradient are (batch, heads, seq).
_SEQ_LAST = ("lse", "grad_lse")

SAMPLED_ROWS = 1024  # of each input, over all shards
SAMPLED_ROWS_PER_SHARD = 8  # at least
Fingerprint = dict[str, list[int]]  # tensor name -> one checksum per shard

_COPIED_ROWS = 2**12  # at a time, to bound how much of a mapped file is resident

# SyntheticSource: multipliers of splitmix64 (Steele, Lea and Flood, 2014).
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_NUMBERS_PER_WORD = 4  # of 16 bits each
_WORDS_AT_A_TIME = 2**15  # fits in cache, and is too small for torch to use several threads, which others need
_TO_UNIT_VARIANCE = math.sqrt(3) / 2**15  # for integers uniform in -2**15 .. 2**15 - 1

# Buffers of rows.
_MIN_POOLED_BYTES = 2**20  # smaller buffers come from torch's allocator
_CLOSE_FIT = 1.1  # shards differ by a row: reuse a buffer for anything that nearly fills it


def seq_dim(name: str) -> int:
    """The sequence dimension of a tensor."""
    return 2 if name in _SEQ_LAST else 1


@dataclass(frozen=True, slots=True)
class RowShape:
    """The shape of one row of the sequence, over the whole batch, and its dtype."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    batch: int = 1

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads}, kv_heads={self.kv_heads}: the KV heads must divide the query heads")
        if not self.dtype.is_floating_point:
            raise ValueError(f"dtype={self.dtype}: must be a floating-point dtype")

    def heads_of(self, name: str) -> int:
        return self.kv_heads if name in ("k", "v", "dk", "dv") else self.heads

    def results(self, seq_len: int, *, backward: bool = False) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor that a run over ``seq_len`` rows writes.

        >>> RowShape(heads=4, kv_heads=2, head_dim=8, dtype=torch.bfloat16).results(100)["lse"]
        ((1, 4, 100), torch.float32)
        """
        names = GRADIENTS if backward else ("out",)
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            name: ((self.batch, seq_len, self.heads_of(name), self.head_dim), self.dtype) for name in names
        }
        if not backward:
            found["lse"] = ((self.batch, self.heads, seq_len), accumulation_dtype(self.dtype))
        return found


class Source(Protocol):
    """Provides rows. Several threads read at the same time, and some rows are read more than once: each read must
    return the same values.
    """

    @property
    def shape(self) -> RowShape: ...

    def read(self, name: str, rows: range, heads: range) -> Tensor:
        """Rows of some heads of ``"q"``, ``"k"`` or ``"v"``; in backward also of ``"out"``, ``"lse"``, ``"grad_out"``.

        Returns a new tensor in host memory, (batch, rows, heads, head_dim); (batch, heads, rows) for lse.
        """


def read_rows(source: Source, name: str, rows: range, heads: range) -> Tensor:
    """Read from a source and check shape and dtype, since a wrong shape could be broadcast without an error."""
    x, shape = source.read(name, rows, heads), source.shape
    wanted: tuple[int, ...] = (shape.batch, len(rows), len(heads), shape.head_dim)
    dtype = shape.dtype
    if name in _SEQ_LAST:
        wanted, dtype = (shape.batch, len(heads), len(rows)), accumulation_dtype(shape.dtype)
    if tuple(x.shape) != wanted or x.dtype != dtype:
        raise ValueError(
            f"read({name!r}, {rows}, {heads}) returned {x.dtype} of shape {tuple(x.shape)}: "
            f"must be {dtype} of shape {wanted}"
        )
    return x


@dataclass
class TensorRows:
    """Tensors in host memory or mapped from files, by name: a source of those present, and a sink for them.

    As a sink it may leave out results: those are computed and dropped. ``TensorRows({})`` drops all.

    >>> q, k, v = torch.randn(3, 1, 100, 2, 8).unbind()
    >>> TensorRows({"q": q, "k": k, "v": v}).read("k", range(3, 100, 10), range(1, 2)).shape
    torch.Size([1, 10, 1, 8])
    """

    tensors: Mapping[str, Tensor]
    flush: Callable[[], None] = field(default=lambda: None)  # called after a shard is written: makes it durable
    release: Callable[[], None] = field(default=lambda: None)  # called after rows are copied: frees mapped pages
    writable: bool = True
    _written: list[tuple[str, int, int]] = field(default_factory=list, init=False)  # name and rows, of this shard

    def __post_init__(self) -> None:
        for name, x in self.tensors.items():
            if x.device.type != "cpu":
                raise ValueError(f"{name} is on {x.device}: streamed tensors must be in host memory; use x.cpu()")
            if x.dim() != (3 if name in _SEQ_LAST else 4):
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}: must be (batch, seq, heads, head_dim), and lse "
                    "(batch, heads, seq)"
                )

    @property
    def shape(self) -> RowShape:
        missing = [name for name in INPUTS if name not in self.tensors]
        if missing:
            raise ValueError(f"no {', '.join(missing)} among {', '.join(self.tensors)}: a source needs q, k and v")
        q, k, v = (self.tensors[name] for name in INPUTS)
        if k.shape != v.shape or (q.shape[0], q.shape[1], q.shape[3]) != (k.shape[0], k.shape[1], k.shape[3]):
            raise ValueError(
                f"q has shape {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: "
                "batch, seq and head_dim must be equal"
            )
        if not q.dtype == k.dtype == v.dtype:
            raise ValueError(f"q is {q.dtype}, k is {k.dtype}, v is {v.dtype}: all three must have the same dtype")
        return RowShape(q.shape[2], k.shape[2], q.shape[3], q.dtype, q.shape[0])

    def read(self, name: str, rows: range, heads: range) -> Tensor:
        if name not in self.tensors:
            raise ValueError(f"no {name} among {', '.join(self.tensors)}: add it to the source")
        x = self.tensors[name]
        if rows and rows[-1] >= x.shape[seq_dim(name)]:
            raise ValueError(f"row {rows[-1]} of {name}: it has {x.shape[seq_dim(name)]} rows; pass another seq_len")
        dim, along_heads = seq_dim(name), slice(heads.start, heads.stop)
        x = x[:, along_heads] if dim == 2 else x[:, :, along_heads]
        x = x[(slice(None),) * dim + (slice(rows.start, rows.stop, rows.step),)]
        copy = empty_rows(tuple(x.shape), x.dtype)
        for start in range(0, len(rows), _COPIED_ROWS):
            count = min(_COPIED_ROWS, len(rows) - start)
            copy.narrow(dim, start, count).copy_(x.narrow(dim, start, count))
            self.release()
        return copy

    def check_names(self, results: Sequence[str]) -> None:
        """Raise if a run that writes ``results`` would drop all of them, or if a name is none of a run's tensors."""
        unknown = [name for name in self.tensors if name not in (*INPUTS, *OUTPUTS, *GRADIENTS, "grad_out")]
        if unknown or (self.tensors and not set(results) & set(self.tensors)):
            raise ValueError(
                f"the sink has {', '.join(unknown or self.tensors)}, but the run writes {', '.join(results)}: "
                "use these names; results that are left out are dropped"
            )

    def write(self, name: str, start: int, rows: Tensor) -> None:
        if not self.writable:
            raise ValueError(f"{name}: the files are open for reading only; use create_numpy or create_safetensors")
        dim = seq_dim(name)
        if name in self.tensors:
            sink_rows = self.tensors[name].shape[dim]
            if start + rows.shape[dim] > sink_rows:
                raise ValueError(
                    f"{name}: the sink has {sink_rows} rows, but the shard ends with row "
                    f"{start + rows.shape[dim] - 1}; create the tensor as given by RowShape.results"
                )
            held = self.tensors[name].narrow(dim, start, rows.shape[dim])
            if held.shape != rows.shape or held.dtype != rows.dtype:
                raise ValueError(
                    f"{name}: the sink takes {held.dtype} of shape {tuple(held.shape)}, but the shard has {rows.dtype} "
                    f"of shape {tuple(rows.shape)}; create the tensor as given by RowShape.results"
                )
            held.copy_(rows)
        self._written.append((name, start, start + rows.shape[dim]))

    def finish(self) -> dict[str, Any]:
        written, self._written = self._written, []
        sums = [[name, start, stop, self._checksum(name, start, stop)] for name, start, stop in written]
        self.flush()
        return {"checksums": sums}

    def resume(self, records: Sequence[dict[str, Any]]) -> None:
        """Check sampled rows of each finished shard against their checksums."""
        for name, start, stop, known in (item for record in records for item in record["checksums"]):
            if name in self.tensors and self._checksum(name, start, stop) != known:
                raise ValueError(
                    f"the progress file marks rows {start} to {stop - 1} of {name} as finished, but the stored rows "
                    "differ: they were changed or created again. Delete the progress file to start over"
                )

    def _checksum(self, name: str, start: int, stop: int) -> int | None:
        """Of sampled rows; None if the sink does not have this tensor."""
        if name not in self.tensors:
            return None
        sample = sampled_rows(range(start, stop), SAMPLED_ROWS_PER_SHARD)
        return checksum([self.tensors[name].select(seq_dim(name), row) for row in sample])


@dataclass(frozen=True)
class CallableSource:
    """Rows from ``make(name, rows, heads)``, which must return what `Source.read` returns.

    Several threads call it at the same time. Some rows are requested more than once and must be the same each time.
    """

    shape: RowShape
    make: Callable[[str, range, range], Tensor]

    def read(self, name: str, rows: range, heads: range) -> Tensor:
        return self.make(name, rows, heads)


@dataclass(frozen=True)
class SyntheticSource:
    """Unlimited pseudo-random rows for any tensor name, uniform with mean 0 and variance 1.

    A row depends only on the seed, the name and its position.

    >>> rows = SyntheticSource(RowShape(heads=2, kv_heads=2, head_dim=8), seed=1)
    >>> every_fifth = rows.read("k", range(0, 1000, 5), range(2))
    >>> torch.equal(every_fifth, rows.read("k", range(1000), range(2))[:, ::5])
    True
    """

    shape: RowShape
    seed: int = 0

    def read(self, name: str, rows: range, heads: range) -> Tensor:
        shape = self.shape
        made = empty_rows((shape.batch, len(rows), len(heads), shape.head_dim), shape.dtype)
        words_per_head = -(-shape.head_dim // _NUMBERS_PER_WORD)
        words = torch.arange(heads.start * words_per_head, heads.stop * words_per_head)
        steps = _mix(words + 1)  # one constant for each word of a row
        at_a_time = max(1, _WORDS_AT_A_TIME // len(words))
        for batch in range(shape.batch):
            salt = _signed(zlib.crc32(f"{self.seed} {name} {batch}".encode()) << 32)
            for first in range(0, len(rows), at_a_time):
                some = rows[first : first + at_a_time]
                row = _mix(torch.arange(some.start, some.stop, some.step) + salt)
                numbers = _mix_once(row[:, None] + steps).view(torch.int16)
                numbers = numbers.view(len(some), len(heads), words_per_head * _NUMBERS_PER_WORD)[..., : shape.head_dim]
                torch.mul(numbers, _TO_UNIT_VARIANCE, out=made[batch, first : first + len(some)])
        return made


def _mix(x: Tensor) -> Tensor:
    """splitmix64 of each number: neighbours differ in all bits."""
    return _mix_once(x * _signed(_GOLDEN))


def _mix_once(x: Tensor) -> Tensor:
    """Multiply, then fold high bits into low ones; twice, in place."""
    x.mul_(_signed(_FIRST)).bitwise_xor_(_shifted(x, 32))
    return x.mul_(_signed(_SECOND)).bitwise_xor_(_shifted(x, 29))


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Unsigned right shift."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    """The same 64 bits as a signed integer."""
    return x - (1 << 64) if x >> 63 else x


def sampled_rows(span: range, count: int) -> list[int]:
    """The rows of a shard whose checksum is compared: the first, the last, and random ones, the same in every run.

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
    """CRC-32 of the bytes of these rows, which must be in host memory."""
    found = 0
    for row in rows:
        whole = row.contiguous()
        found = zlib.crc32(ctypes.string_at(whole.data_ptr(), whole.nbytes), found)  # works without NumPy
    return found


class _BufferPool:
    """Free page-aligned buffers, kept only while a run reuses them.

    An allocator keeps freed memory per thread. Buffers that one thread fills and another frees would add up to twice
    of what is in use, beyond any budget. New pages also cost time, for each shard again.
    """

    def __init__(self) -> None:
        self._lock, self._free, self._runs = Lock(), list[mmap.mmap](), 0

    def take(self, size: int) -> mmap.mmap:
        with self._lock:
            for i, pages in enumerate(self._free):
                if size <= len(pages) <= _CLOSE_FIT * size:
                    return self._free.pop(i)
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # not supported by this kernel
                pages.madvise(mmap.MADV_HUGEPAGE)
        return pages

    def give_back(self, pages: mmap.mmap) -> None:
        if self._runs:  # no lock: garbage collection may call this inside `take`, and appending is atomic
            self._free.append(pages)

    @contextmanager
    def reusing(self) -> Iterator[None]:
        with self._lock:
            self._runs += 1
        try:
            yield
        finally:
            with self._lock:
                self._runs -= 1
                if not self._runs:
                    self._free = []


_POOL = _BufferPool()


def empty_rows(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor in host memory."""
    count = torch.Size(shape).numel()
    size = count * dtype.itemsize
    if size < _MIN_POOLED_BYTES or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.empty(shape, dtype=dtype)
    pages = _POOL.take(size)
    held = memoryview(pages)  # lives as long as the tensor's storage, and its end returns the pages
    weakref.finalize(held, _POOL.give_back, pages).atexit = False
    return torch.frombuffer(held, dtype=dtype, count=count).view(shape)


def reuse_row_buffers() -> AbstractContextManager[None]:
    """Inside this context, `empty_rows` reuses the buffers of tensors that were freed."""
    return _POOL.reusing()
