"""What is run: the cases of every check, with the pattern that was named, or its rates in shorter segments."""

from __future__ import annotations

import importlib
import math
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from ringspan.api import attention
from ringspan.geometry import Dilated, Full, Pattern
from ringspan.layout import Layout, LayoutName, check_layout_name
from ringspan.planning.api import plan
from ringspan.ring import Ring
from ringspan.tools.peers import Attention


@dataclass(frozen=True)
class Subject:
    """What is verified, as something that can be handed to another process.

    ``target`` is ``package.module:function``, or empty for ringspan. Functions of others compute plain attention.
    """

    target: str = ""
    pattern: Pattern = field(default_factory=Full)
    layout: LayoutName = "zigzag"
    equal_shards: bool = False  # whether it needs as many rows on each rank

    @property
    def is_ringspan(self) -> bool:
        return not self.target

    @property
    def name(self) -> str:
        return self.target or f"ringspan, {self.pattern.text.partition(' interleaved')[0]}"

    @staticmethod
    def load(target: str) -> Subject:
        """Another function; its attributes ``layout`` and ``equal_shards`` say which rows a rank holds."""
        function = _find(target)
        layout: Any = getattr(function, "layout", "contiguous")
        check_layout_name(layout)
        return Subject(target, Full(), layout, bool(getattr(function, "equal_shards", False)))

    def on(self, group: dist.ProcessGroup) -> Bound:
        """The subject as a rank of a group calls it."""
        ring = Ring(group, layout=self.layout, min_size=1)
        return Bound(self, ring, None if self.is_ringspan else _find(self.target))


@dataclass(frozen=True)
class Bound:
    """A subject on a rank. For functions of others, ``ring`` says who holds what, and does nothing else."""

    subject: Subject
    ring: Ring
    function: Attention | None

    def layout_of(self, tokens: int) -> Layout:
        return self.ring.layout_of(tokens)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, causal: bool, tokens: int) -> Tensor:
        """This rank's rows of the output."""
        if self.function is not None:
            return self.function(q, k, v, causal=causal, group=self.ring.group)
        return attention(q, k, v, pattern=pattern, causal=causal, ring=self.ring, seq_len=tokens)


def _find(target: str) -> Attention:
    module_name, colon, function_name = target.partition(":")
    if not colon:
        raise ValueError(f"{target!r}: say package.module:function")
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` has it: a user's own module lies where the command is started
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"{target!r}: {error}; start in the folder that holds it, or install it") from error
    except AttributeError as error:
        raise ValueError(f"{target!r}: {error}") from error
    if not callable(function):
        raise ValueError(f"{target!r}: a {type(function).__name__}, but must be a function")
    return cast(Attention, function)


_ROWS_OF_A_SHORT_SEGMENT = 4  # at least as many rows of a shortened segment are selected in each head
_LONGEST_UNLESS_ASKED = 65536
_PLAIN_TOKENS = 8192
_SMALL_PARCELS_BYTES = 32 * 2**20
_FIRST_RING_OF_LARGE_PARCELS = 4


@dataclass(frozen=True)
class Case:
    """One set of tensors and the pattern that is run on them."""

    pattern: Pattern
    tokens: int
    batch: int
    heads: int
    kv_heads: int
    dim: int
    dtype: str

    def __str__(self) -> str:
        """As reports name it.

        >>> str(Case(Dilated((64, 256), (1, 4)), 1001, 2, 6, 2, 16, "float64"))
        '64x1 256x4, 1,001 tokens, batch 2, 6 heads on 2 KV heads x 16, float64'
        """
        batch = f", batch {self.batch}" if self.batch > 1 else ""
        grouped = f" on {self.kv_heads} KV head{'s' if self.kv_heads > 1 else ''}" if self.grouped else ""
        heads = f"{self.heads} head{'s' if self.heads > 1 else ''}{grouped} x {self.dim}"
        return f"{short_text(self.pattern)}, {self.tokens:,} tokens{batch}, {heads}, {self.dtype}"

    @property
    def grouped(self) -> bool:
        return self.heads != self.kv_heads


@dataclass(frozen=True)
class Settings:
    """The cases of each question."""

    memory: Case
    warm_up: Case  # before memory is measured
    exact: tuple[Case, ...]
    reach: Case
    counted: Case  # bytes and FLOPs
    speed: Case
    uneven: tuple[Case, ...]
    grouped: tuple[Case, ...]
    memory_rings: tuple[int, ...]  # ring sizes that memory is measured on
    memory_causal: bool
    trials: int = 3  # of speed; 0 where ranks share a core

    @property
    def all_cases(self) -> tuple[Case, ...]:
        return (
            self.memory,
            self.warm_up,
            *self.exact,
            self.reach,
            self.counted,
            self.speed,
            *self.uneven,
            *self.grouped,
        )


def settings_for(subject: Subject, sizes: list[int], tokens: int, dtype: str) -> Settings:
    """Cases for a subject on rings of these sizes; ``tokens`` is the length of the long runs.

    Every length can be split evenly over each ring, since many rings need that; lengths for exactness leave an odd
    number of rows in a shard of the largest contiguous ring. Uneven shards and grouped KV heads are cases of their own.
    """
    pattern = subject.pattern
    spans = 2 if subject.layout == "zigzag" else 1
    parts = math.lcm(*sizes) * spans
    most_rate = 1 if isinstance(pattern, Full) else max(pattern.dilation_rates)

    def long(heads: int, dim: int, divided_by: int = 1) -> Case:
        return Case(pattern, -(-tokens // divided_by // parts) * parts, 1, heads, heads, dim, "float32")

    def odd(target: int) -> int:
        return parts * (max(target, 6 * most_rate) // parts | 1)

    def short(batch: int, target: int, heads: int, dim: int, kv_heads: int = 0) -> Case:
        n = odd(target)
        return Case(shortened(pattern, 3 * n // 4), n, batch, heads, kv_heads or heads, dim, dtype)

    exact = [
        short(1, 300, 1, 16),
        short(3, 300, 3, 16),
        short(1, 700, 2, 32),
        short(2, 200, 5, 64),
        short(1, 200, 8, 16),
    ]
    if most_rate > 1:  # heads start at every offset, and again at the first
        exact.append(short(1, 700, min(most_rate, 64) + 1, 8))
    exact.append(Case(pattern, parts * ((tokens // parts + 1) | 1), 1, 1, 1, 32, dtype))
    if isinstance(pattern, Full):
        memory, counted = long(256, 128, divided_by=16), long(4, 64, divided_by=8)
    else:
        memory, counted = long(4, 64), long(2, 16)
    large = _has_large_parcels(subject, memory)
    memory_rings = _memory_rings(sizes, large)
    parts_of_memory = math.lcm(*memory_rings) * spans
    memory = replace(memory, tokens=-(-memory.tokens // parts_of_memory) * parts_of_memory)
    even = short(2, 300, 3, 16)
    return Settings(
        memory=memory,
        warm_up=replace(memory, tokens=16 * parts_of_memory, heads=1, kv_heads=1),
        exact=tuple(exact),
        reach=short(1, 700, 4, 16),
        counted=counted,
        speed=long(2, 64),
        uneven=(replace(even, tokens=even.tokens + 1),),
        grouped=(short(2, 300, 6, 16, kv_heads=2), short(1, 200, 4, 16, kv_heads=1)),
        memory_rings=memory_rings,
        memory_causal=not large,  # so that ranks with large parcels all have as many
    )


def default_tokens(pattern: Pattern) -> int:
    """The longest segment, so that it has its full length; plain attention is quadratic, and takes less."""
    if isinstance(pattern, Full):
        return _PLAIN_TOKENS
    return min(max(pattern.segment_lengths), _LONGEST_UNLESS_ASKED)


def _has_large_parcels(subject: Subject, case: Case) -> bool:
    parcels = [
        plan(case.pattern, case.tokens, ring_size=size, layout=subject.layout, heads=case.heads, dim=case.dim)
        .memory(0, backward=True)
        .parcels
        for size in (2, 4)
    ]
    return max(parcels) > _SMALL_PARCELS_BYTES


def _memory_rings(sizes: list[int], large_parcels: bool) -> tuple[int, ...]:
    """On which ring sizes the memory of a ring can be told apart from that of an all-gather.

    Where parcels are small, on any. Where they are as large as the rows, a ring of two holds its own rows and those of
    the other rank, which is the whole sequence: only larger rings can show that a rank holds less.
    """
    if not large_parcels:
        return tuple(sizes)
    first = _FIRST_RING_OF_LARGE_PARCELS
    return tuple(sorted({first, 2 * first, *(size for size in sizes if size >= first)}))


def shortened(pattern: Pattern, tokens: int) -> Pattern:
    """The pattern with its own rates in shorter segments: the longest has ``tokens`` rows, if rates leave room.

    >>> shortened(Dilated((2048, 16384, 65536), (1, 8, 32)), 750).text
    'dilated 23x1 187x8 750x32 interleaved shift 0 heads 0 of 0'
    """
    if isinstance(pattern, Full):
        return pattern
    longest = max(pattern.segment_lengths)
    pairs = zip(pattern.segment_lengths, pattern.dilation_rates, strict=True)
    lengths = (min(w, max(w * tokens // longest, _ROWS_OF_A_SHORT_SEGMENT * r)) for w, r in pairs)
    return Dilated(tuple(lengths), pattern.dilation_rates, pattern.head_offsets, pattern.shift)


def short_text(pattern: Pattern) -> str:
    """Without what is the same in all patterns that a command line can name.

    >>> short_text(Dilated((64, 256), (1, 4)))
    '64x1 256x4'
    """
    return pattern.text.removeprefix("dilated ").partition(" interleaved")[0]
