"""Memory for many rows, straight from the system: used again while a run goes on, and given back when it is over.

An allocator keeps what is freed, for each thread by itself: buffers that one thread fills and another lets go of would
add up to twice of what is held, and a budget would mean little. And new pages cost time, which a run that takes new
ones for each shard would pay over and over.
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


# Tensors are (batch, seq, heads, dim), but lse and its gradient are (batch, heads, seq).
_SEQ_LAST = ("lse", "grad_lse")
INPUTS = ("q", "k", "v")
_ROWS_AT_A_TIME = 2**12


def seq_dim(name: str) -> int:
    """Which dimension of a tensor is the sequence."""
    return 2 if name in _SEQ_LAST else 1


@dataclass(frozen=True, slots=True)
class RowShape:
    """What a row of the sequence holds: sequences side by side, heads of queries and of keys, numbers in a head."""

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
            raise ValueError(f"dtype={self.dtype}: attention needs floating-point numbers")

    def heads_of(self, name: str) -> int:
        return self.kv_heads if name in ("k", "v", "dk", "dv") else self.heads

    def results(self, seq_len: int, *, backward: bool = False) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor that a run over ``seq_len`` rows writes.

        >>> RowShape(heads=4, kv_heads=2, head_dim=8, dtype=torch.bfloat16).results(100)["lse"]
        ((1, 4, 100), torch.float32)
        """
        names = ("dq", "dk", "dv") if backward else ("out",)
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            name: ((self.batch, seq_len, self.heads_of(name), self.head_dim), self.dtype) for name in names
        }
        if not backward:
            found["lse"] = ((self.batch, self.heads, seq_len), accumulation_dtype(self.dtype))
        return found


def read_rows(source: Source, name: str, rows: range, heads: range) -> Tensor:
    """What a source gives, which must be what was asked for: other shapes could be broadcast without an error."""
    x, shape = source.read(name, rows, heads), source.shape
    wanted: tuple[int, ...] = (shape.batch, len(rows), len(heads), shape.head_dim)
    dtype = shape.dtype
    if name in _SEQ_LAST:
        wanted, dtype = (shape.batch, len(heads), len(rows)), accumulation_dtype(shape.dtype)
    if tuple(x.shape) != wanted or x.dtype != dtype:
        raise ValueError(
            f"read({name!r}, {rows}, {heads}) gave {x.dtype} of shape {tuple(x.shape)}: "
            f"must be {dtype} of shape {wanted}"
        )
    return x


class Source(Protocol):
    """Where rows come from. Read by several threads at a time, and the same rows more than once: always the same."""

    @property
    def shape(self) -> RowShape: ...

    def read(self, name: str, rows: range, heads: range) -> Tensor:
        """These rows of these heads of q, k or v; for backward also of ``"out"``, ``"lse"`` and ``"grad_out"``.

        A new tensor in host memory, (batch, rows, heads, dim); lse is (batch, heads, rows).
        """


class Sink(Protocol):
    """Where results go: called by one thread, shard by shard, each shard once it is whole."""

    def write(self, name: str, start: int, rows: Tensor) -> None:
        """Rows from ``start`` on of ``"out"`` and ``"lse"``, or of ``"dq"``, ``"dk"`` and ``"dv"``, in host memory."""

    def finish(self) -> dict[str, Any]:
        """Everything written so far is a whole shard: make it last.

        What is returned, plain values, is kept in the progress file beside the shard.
        """

    def resume(self, notes: Sequence[dict[str, Any]]) -> None:
        """Go on from an interrupted run: what `finish` returned for each finished shard, in order of finishing."""


@dataclass
class HeldRows:
    """Tensors in host memory or mapped from files, by name: a source of those that are there, and a sink for them.

    >>> q, k, v = torch.randn(3, 1, 100, 2, 8).unbind()
    >>> HeldRows({"q": q, "k": k, "v": v}).read("k", range(3, 100, 10), range(1, 2)).shape
    torch.Size([1, 10, 1, 8])
    """

    tensors: Mapping[str, Tensor]
    keep: Callable[[], None] = field(default=lambda: None)  # called when a shard is written: so that it lasts
    forget: Callable[[], None] = field(default=lambda: None)  # called when rows are copied: so that memory is bounded
    writable: bool = True
    _written: dict[str, tuple[int, int]] = field(default_factory=dict, init=False)  # rows of this shard, by name

    def __post_init__(self) -> None:
        for name, x in self.tensors.items():
            if x.device.type != "cpu":
                raise ValueError(f"{name} is on {x.device}: rows that are streamed lie in host memory; say x.cpu()")
            if x.dim() != (3 if name in _SEQ_LAST else 4):
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}: must be (batch, seq, heads, dim), and lse (batch, heads, seq)"
                )

    @property
    def shape(self) -> RowShape:
        missing = [name for name in INPUTS if name not in self.tensors]
        if missing:
            raise ValueError(f"no {', '.join(missing)} among {', '.join(self.tensors)}: a source has q, k and v")
        q, k, v = (self.tensors[name] for name in INPUTS)
        if k.shape != v.shape or (q.shape[0], q.shape[1], q.shape[3]) != (k.shape[0], k.shape[1], k.shape[3]):
            raise ValueError(
                f"q has shape {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: "
                "batch, seq and dim must be equal"
            )
        if not q.dtype == k.dtype == v.dtype:
            raise ValueError(f"q is {q.dtype}, k is {k.dtype}, v is {v.dtype}: all three need one dtype")
        return RowShape(q.shape[2], k.shape[2], q.shape[3], q.dtype, q.shape[0])

    def read(self, name: str, rows: range, heads: range) -> Tensor:
        if name not in self.tensors:
            raise ValueError(f"no {name} among {', '.join(self.tensors)}: give it too")
        x = self.tensors[name]
        if rows and rows[-1] >= x.shape[seq_dim(name)]:
            raise ValueError(f"row {rows[-1]} of {name}: it has {x.shape[seq_dim(name)]} rows; state another seq_len")
        dim, along_heads = seq_dim(name), slice(heads.start, heads.stop)
        x = x[:, along_heads] if dim == 2 else x[:, :, along_heads]
        x = x[(slice(None),) * dim + (slice(rows.start, rows.stop, rows.step),)]
        copy = rows_memory(tuple(x.shape), x.dtype)
        for start in range(0, len(rows), _ROWS_AT_A_TIME):  # so that little of a mapped file is in memory at a time
            count = min(_ROWS_AT_A_TIME, len(rows) - start)
            copy.narrow(dim, start, count).copy_(x.narrow(dim, start, count))
            self.forget()
        return copy

    def write(self, name: str, start: int, rows: Tensor) -> None:
        if not self.writable:
            raise ValueError(f"{name}: these files were opened for reading; use create_numpy or create_safetensors")
        dim = seq_dim(name)
        if name in self.tensors:
            there = self.tensors[name].shape[dim]
            if start + rows.shape[dim] > there:
                raise ValueError(
                    f"{name}: the sink has {there} rows, but the shard ends with row {start + rows.shape[dim] - 1}; "
                    "give a tensor as RowShape.results describes it"
                )
            held = self.tensors[name].narrow(dim, start, rows.shape[dim])
            if held.shape != rows.shape or held.dtype != rows.dtype:
                raise ValueError(
                    f"{name}: the sink takes {held.dtype} of shape {tuple(held.shape)}, but the shard has {rows.dtype} "
                    f"of shape {tuple(rows.shape)}; give a tensor as RowShape.results describes it"
                )
            held.copy_(rows)
        self._written[name] = (start, start + rows.shape[dim])

    def finish(self) -> dict[str, Any]:
        written, self._written = self._written, {}
        sums = {name: [start, stop, self._checksum(name, start, stop)] for name, (start, stop) in written.items()}
        self.keep()
        return {"checksums": sums}

    def resume(self, notes: Sequence[dict[str, Any]]) -> None:
        """What is finished must be in the tensors: a few rows of each shard are looked at."""
        for name, (start, stop, known) in (item for note in notes for item in note["checksums"].items()):
            if name in self.tensors and self._checksum(name, start, stop) != known:
                raise ValueError(
                    f"the progress file marks rows {start} to {stop - 1} of {name} as finished, but the stored rows "
                    "differ: they were changed or created again. Delete the progress file to start over"
                )

    def _checksum(self, name: str, start: int, stop: int) -> int | None:
        """Of the first row, the last, and some between; None if the rows of this name are not held."""
        if name not in self.tensors:
            return None
        sample = sampled_rows(range(start, stop), ROWS_OF_A_SHARD)
        return checksum([self.tensors[name].select(seq_dim(name), row) for row in sample])


@dataclass(frozen=True)
class MadeRows:
    """A source that makes rows on demand: ``make(name, rows, heads)`` returns what `Source.read` must.

    It is called from several threads at a time, and asked for some rows more than once: the same must come again.
    """

    shape: RowShape
    make: Callable[[str, range, range], Tensor]

    def read(self, name: str, rows: range, heads: range) -> Tensor:
        return self.make(name, rows, heads)


@dataclass(frozen=True)
class ConsumedRows:
    """A sink that hands each shard on, as it is finished: ``consume(name, start, rows)``.

    What it did with a shard must last when it returns: a run that goes on hands on what comes after. If the run was
    killed just then, that shard comes once more, with the same ``start`` and the same rows.
    """

    consume: Callable[[str, int, Tensor], None]

    def write(self, name: str, start: int, rows: Tensor) -> None:
        self.consume(name, start, rows)

    def finish(self) -> dict[str, Any]:
        return {}

    def resume(self, notes: Sequence[dict[str, Any]]) -> None:
        """Nothing is kept."""


# Multipliers of splitmix64 (Steele, Lea and Flood, 2014).
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_NUMBERS_PER_WORD = 4  # of 16 bits
_WORDS_AT_A_TIME = 2**15  # stays in cache, and is too little for torch to spread over threads that others need
_TO_UNIT_VARIANCE = math.sqrt(3) / 2**15  # of whole numbers that are uniform in -2**15 .. 2**15 - 1


@dataclass(frozen=True)
class CountedRows:
    """A source without end: uniform numbers of mean 0 and variance 1, for ``"q"``, ``"k"``, ``"v"`` and any other name.

    >>> rows = CountedRows(RowShape(heads=2, kv_heads=2, dim=8), seed=1)
    >>> every_fifth = rows.read("k", range(0, 1000, 5), range(2))
    >>> torch.equal(every_fifth, rows.read("k", range(1000), range(2))[:, ::5])
    True
    """

    shape: RowShape
    seed: int = 0

    def read(self, name: str, rows: range, heads: range) -> Tensor:
        shape = self.shape
        made = rows_memory((shape.batch, len(rows), len(heads), shape.head_dim), shape.dtype)
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
    """splitmix64 of each number: neighbours become unlike in every bit."""
    return _mix_once(x * _signed(_GOLDEN))


def _mix_once(x: Tensor) -> Tensor:
    """Multiply, and fold high bits into low ones, twice; in place."""
    x.mul_(_signed(_FIRST)).bitwise_xor_(_shifted(x, 32))
    return x.mul_(_signed(_SECOND)).bitwise_xor_(_shifted(x, 29))


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shifted right as if there were no sign."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    """The same 64 bits, read as a signed number."""
    return x - (1 << 64) if x >> 63 else x
