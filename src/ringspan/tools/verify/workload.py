"""What `ringspan verify` runs: the implementation under test, and the inputs of every check."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ringspan.api import attention
from ringspan.geometry import Dilated, Full, Pattern, PatternSum, SegmentBranch, Window, parse_pattern
from ringspan.layout import LayoutName, check_layout_name
from ringspan.planning.api import plan
from ringspan.ring import Ring
from ringspan.tools.peers import GroupAttention

_MIN_ROWS_PER_SEGMENT = 4  # selected rows of a shortened segment, in each head
_MAX_DEFAULT_TOKENS = 65536
_FULL_DEFAULT_TOKENS = 8192
_MAX_WINDOW_PAIRS = 2**28  # (query, key) pairs of a head: windows are verified at fewer tokens if they are long
_SMALL_PARCELS_BYTES = 32 * 2**20
_MIN_RING_FOR_LARGE_PARCELS = 4


@dataclass(frozen=True)
class AttentionUnderTest:
    """The attention under test; can be sent to another process.

    ``target`` is ``package.module:function``, or empty for ringspan. Other functions compute one fixed ``pattern``.
    """

    target: str = ""
    pattern: Pattern = field(default_factory=Full)
    layout: LayoutName = "zigzag"
    equal_shards: bool = False  # whether all ranks must hold the same number of rows

    @property
    def is_ringspan(self) -> bool:
        return not self.target

    @property
    def name(self) -> str:
        if self.target and self.pattern == Full():
            return self.target
        return f"{self.target or 'ringspan'}, {self.pattern.text}"

    @staticmethod
    def load(target: str) -> AttentionUnderTest:
        """Another function. Its attributes ``layout`` and ``equal_shards`` say which rows each rank holds, and
        ``pattern``, or its text, what it computes.
        """
        function = import_function(target)
        layout: Any = getattr(function, "layout", "contiguous")
        check_layout_name(layout)
        pattern: Any = getattr(function, "pattern", Full())
        pattern = parse_pattern(pattern) if isinstance(pattern, str) else pattern
        if not isinstance(pattern, Pattern):
            raise ValueError(f"{target}: pattern={pattern!r} must be a pattern or its text, such as 'window 1023'")
        return AttentionUnderTest(target, pattern, layout, bool(getattr(function, "equal_shards", False)))

    def bind(self, group: dist.ProcessGroup) -> BoundImplementation:
        """The implementation as this rank of the group calls it."""
        ring = Ring(group, layout=self.layout, min_size=1)
        return BoundImplementation(self, ring, None if self.is_ringspan else import_function(self.target))


@dataclass(frozen=True)
class BoundImplementation:
    """An implementation on one rank. For other functions, ``ring`` only says which rank holds which rows."""

    implementation: AttentionUnderTest
    ring: Ring
    function: GroupAttention | None

    @property
    def takes_lengths(self) -> bool:
        return self.function is None or "lengths" in inspect.signature(self.function).parameters

    def attend(self, q: Tensor, k: Tensor, v: Tensor, case: VerifyCase, causal: bool) -> Tensor:
        """This rank's rows of the output. ``lengths`` is passed for packed documents only."""
        packed: dict[str, Any] = {"lengths": case.lengths} if case.lengths else {}
        if self.function is not None:
            return self.function(q, k, v, causal=causal, group=self.ring.group, **packed)
        return attention(q, k, v, pattern=case.pattern, causal=causal, ring=self.ring, seq_len=case.tokens, **packed)


def import_function(target: str) -> Any:
    """The function or class ``package.module:name``; modules in the current folder can be imported too."""
    module_name, colon, function_name = target.partition(":")
    if not colon:
        raise ValueError(f"{target!r}: must be package.module:name")
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` does, so that modules in the current folder can be imported
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"{target!r}: {error}; run from the folder that contains it, or install it") from error
    except AttributeError as error:
        raise ValueError(f"{target!r}: {error}") from error
    if not callable(function):
        raise ValueError(f"{target!r}: a {type(function).__name__}, but must be a function")
    return function


@dataclass(frozen=True)
class VerifyCase:
    """A set of tensors and the pattern that runs on them."""

    pattern: Pattern
    tokens: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    lengths: tuple[int, ...] = ()  # of packed documents

    def __str__(self) -> str:
        """The name of the case in reports.

        >>> str(VerifyCase(Dilated((64, 256), (1, 4)), 1001, 2, 6, 2, 16, "float64"))
        '64x1,256x4, 1,001 tokens, batch 2, 6 heads on 2 KV heads x 16, float64'
        >>> str(VerifyCase(Full(), 101, 1, 1, 1, 16, "float32", lengths=(1, 60, 40)))
        'full, 101 tokens in 3 documents, 1 head x 16, float32'
        """
        documents = f" in {len(self.lengths)} documents" if self.lengths else ""
        batch = f", batch {self.batch}" if self.batch > 1 else ""
        grouped = f" on {self.kv_heads} KV head{'s' if self.kv_heads > 1 else ''}" if self.grouped else ""
        heads = f"{self.heads} head{'s' if self.heads > 1 else ''}{grouped} x {self.head_dim}"
        return f"{self.pattern.text}, {self.tokens:,} tokens{documents}{batch}, {heads}, {self.dtype}"

    @property
    def grouped(self) -> bool:
        return self.heads != self.kv_heads


@dataclass(frozen=True)
class VerifySettings:
    """The cases of each measurement."""

    memory: VerifyCase
    warm_up: VerifyCase  # runs before memory is measured
    exact: tuple[VerifyCase, ...]
    visibility: VerifyCase
    counted: VerifyCase  # bytes and FLOPs
    speed: VerifyCase
    uneven: tuple[VerifyCase, ...]
    grouped: tuple[VerifyCase, ...]
    packed: tuple[VerifyCase, ...]
    memory_rings: tuple[int, ...]  # ring sizes on which memory is measured
    memory_causal: bool
    trials: int = 3  # of speed; 0 if ranks share a core

    @property
    def all_cases(self) -> tuple[VerifyCase, ...]:
        single = (self.memory, self.warm_up, self.visibility, self.counted, self.speed)
        return (*single, *self.exact, *self.optional)

    @property
    def optional(self) -> tuple[VerifyCase, ...]:
        """The cases that an implementation need not support."""
        return (*self.uneven, *self.grouped, *self.packed)


def settings_for(implementation: AttentionUnderTest, sizes: list[int], tokens: int, dtype: str) -> VerifySettings:
    """The cases for an implementation on rings of these sizes; ``tokens`` is the length of the long runs.

    Each length divides evenly over every ring, because many implementations need that. The lengths for exactness leave
    an odd number of rows in a shard of the largest contiguous ring. Uneven shards, grouped KV heads and packed
    documents are separate cases.
    """
    pattern = implementation.pattern
    spans = 2 if implementation.layout == "zigzag" else 1
    parts = math.lcm(*sizes) * spans
    branches = pattern.branches(tokens)
    max_rate = max(branch.rate for branch in branches)
    offsets = max((branch.rate for branch in branches if isinstance(branch, SegmentBranch)), default=1)

    def long(heads: int, head_dim: int, divided_by: int = 1) -> VerifyCase:
        return VerifyCase(pattern, -(-tokens // divided_by // parts) * parts, 1, heads, heads, head_dim, "float32")

    def odd(target: int) -> int:
        return parts * (max(target, 6 * max_rate) // parts | 1)

    def short(batch: int, target: int, heads: int, head_dim: int, kv_heads: int = 0) -> VerifyCase:
        n = odd(target)
        short_pattern = shortened(pattern, 3 * n // 4) if implementation.is_ringspan else pattern
        return VerifyCase(short_pattern, n, batch, heads, kv_heads or heads, head_dim, dtype)

    exact = [
        short(1, 300, 1, 16),
        short(3, 300, 3, 16),
        short(1, 700, 2, 32),
        short(2, 200, 5, 64),
        short(1, 200, 8, 16),
    ]
    if offsets > 1:  # enough heads to use every offset, and the first one twice
        exact.append(short(1, 700, min(offsets, 64) + 1, 8))
    exact.append(VerifyCase(pattern, parts * ((tokens // parts + 1) | 1), 1, 1, 1, 32, dtype))
    if any(isinstance(part, Full) or (isinstance(part, Window) and 4 * reach(part) > tokens) for part in pattern.parts):
        memory, counted = long(256, 128, divided_by=16), long(4, 64, divided_by=8)
    else:
        memory, counted = long(4, 64), long(2, 16)
    large = _has_large_parcels(implementation, memory)
    memory_rings = _memory_rings(sizes, large)
    memory_parts = math.lcm(*memory_rings) * spans
    memory = replace(memory, tokens=-(-memory.tokens // memory_parts) * memory_parts)
    even = short(2, 300, 3, 16)
    inside, aligned = (replace(even, lengths=lengths) for lengths in _packed_lengths(even.tokens, parts))
    wide = dtype if dtype == "float64" else "float32"  # where tokens change: 16 bits would round small weights away
    return VerifySettings(
        memory=memory,
        warm_up=replace(memory, tokens=16 * memory_parts, heads=1, kv_heads=1),
        exact=tuple(exact),
        visibility=replace(short(1, 700, 4, 16), dtype=wide),
        counted=counted,
        speed=long(2, 64),
        uneven=(replace(even, tokens=even.tokens + 1),),
        grouped=(short(2, 300, 6, 16, kv_heads=2), short(1, 200, 4, 16, kv_heads=1)),
        packed=tuple(dict.fromkeys((replace(inside, dtype=wide), inside, aligned))),
        memory_rings=memory_rings,
        memory_causal=not large,  # large parcels: not causal, so that every rank holds the same number of them
    )


def _packed_lengths(tokens: int, parts: int) -> tuple[tuple[int, ...], ...]:
    """Two ways to pack documents into a sequence of ``parts`` equal parts, one or two of which are a rank's shard.

    First, one document spans half of the sequence, and all begin and end inside parts; three have one token. Second, a
    document begins at each border of a part, after a document of one token.

    >>> _packed_lengths(300, 4)
    ((1, 45, 23, 1, 160, 69, 1), (74, 1, 74, 1, 74, 1, 74, 1))
    """
    n, part = tokens, tokens // parts
    second, third, tenth = (i * n // 13 for i in (2, 3, 10))  # no border, unless the number of parts divides by 13
    inside = {0, 1, second, third, third + 1, tenth, n - 1, n}
    borders = {0, *(cut for border in range(part, n + 1, part) for cut in (border - 1, border))}
    return tuple(tuple(stop - start for start, stop in pairwise(sorted(cuts))) for cuts in (inside, borders))


def default_tokens(pattern: Pattern) -> int:
    """The longest segment, so that it runs at full length, or 64k for windows; shorter for full attention, which is
    quadratic, and for long windows.

    >>> default_tokens(Window(1023)), default_tokens(Window(16383)), default_tokens(Window(511) + Full())
    (65536, 16384, 8192)
    """
    wanted, affordable = 1, _MAX_DEFAULT_TOKENS
    for part in pattern.parts:
        if isinstance(part, Full):
            affordable = _FULL_DEFAULT_TOKENS
        elif isinstance(part, Window):
            keys = (part.left + part.right) // part.dilation + 1
            affordable = min(affordable, max(_FULL_DEFAULT_TOKENS, _MAX_WINDOW_PAIRS // keys))
        wanted = max(wanted, reach(part) if isinstance(part, Dilated) else affordable)
    return min(wanted, affordable)


def reach(pattern: Pattern) -> int:
    """The length of the longest segment or window at any sequence length; 0 for full attention.

    >>> reach(Window(511) + Dilated((64, 256), (1, 4)))
    512
    """
    lengths = [0]
    for part in pattern.parts:
        if isinstance(part, Dilated):
            lengths += part.segment_lengths
        elif isinstance(part, Window):
            lengths.append(part.left + part.right + 1)
    return max(lengths)


def _has_large_parcels(implementation: AttentionUnderTest, case: VerifyCase) -> bool:
    parcels = [
        plan(
            case.pattern,
            case.tokens,
            ring_size=size,
            layout=implementation.layout,
            heads=case.heads,
            head_dim=case.head_dim,
        )
        .memory(0, backward=True)
        .parcels
        for size in (2, 4)
    ]
    return max(parcels) > _SMALL_PARCELS_BYTES


def _memory_rings(sizes: list[int], large_parcels: bool) -> tuple[int, ...]:
    """The ring sizes on which the memory of a ring differs from that of an all-gather.

    With small parcels, that is every size. If parcels are as large as the shards, a rank of two holds its own rows and
    those of its peer, which is the whole sequence: only larger rings can show that a rank holds less.
    """
    if not large_parcels:
        return tuple(sizes)
    first = _MIN_RING_FOR_LARGE_PARCELS
    return tuple(sorted({first, 2 * first, *(size for size in sizes if size >= first)}))


def shortened(pattern: Pattern, tokens: int) -> Pattern:
    """The pattern with the same rates in shorter segments and windows, if their rates allow.

    The longest segment has ``tokens`` rows. A window has a third of that, so that it has both edges in most rows.

    >>> shortened(Dilated((2048, 16384, 65536), (1, 8, 32)), 750).text
    '23x1,187x8,750x32'
    >>> shortened(Window(1000, right=500) + Full(), 750).text
    'window 166 right 83 + full'
    """
    if isinstance(pattern, PatternSum):
        return PatternSum(tuple(shortened(term, tokens) for term in pattern.terms))
    if isinstance(pattern, Window):
        least = _MIN_ROWS_PER_SEGMENT * pattern.dilation
        left, right = (
            min(side, max(side * tokens // (3 * reach(pattern)), least)) for side in (pattern.left, pattern.right)
        )
        return Window(left, right, pattern.dilation)
    if not isinstance(pattern, Dilated):
        return pattern
    longest = max(pattern.segment_lengths)
    pairs = zip(pattern.segment_lengths, pattern.dilation_rates, strict=True)
    lengths = (min(w, max(w * tokens // longest, _MIN_ROWS_PER_SEGMENT * r)) for w, r in pairs)
    return Dilated(tuple(lengths), pattern.dilation_rates, pattern.head_offsets, pattern.shift)
