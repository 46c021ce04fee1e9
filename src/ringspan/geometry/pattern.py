"""Attention patterns: `Full` and `Dilated`, which keys a query sees under each (``sees``), and their text form.

This is the definition in docs/semantics.md, in integers. The rest of the library is tested against it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm
from typing import Literal, cast, get_args

from ringspan.geometry.documents import as_int

HeadOffsets = Literal["interleaved", "blocked"]
_MOST_INTERVALS, _MOST_ROWS_CHECKED = 256, 4096  # limits of `unselected_row`


@dataclass(frozen=True, slots=True)
class Branch:
    """One (segment length, dilation rate) pair of a pattern, with the shift of its segment borders."""

    segment_length: int
    rate: int
    shift: int = 0

    def sees(self, p: int, t: int, offset: int) -> bool:
        """Whether query ``p`` sees key ``t`` in a head with this offset, ignoring causality."""
        p, t = p + self.shift, t + self.shift
        return p // self.segment_length == t // self.segment_length and all(
            x % self.segment_length % self.rate == offset for x in (p, t)
        )


@dataclass(frozen=True)
class Full:
    """Full attention: every query sees every key or, if causal, every key up to its own position.

    >>> Full().sees(0, 5)
    1
    >>> Full().sees(0, 5, causal=True)
    0
    """

    @property
    def text(self) -> str:
        """The pattern on one line, as reports and messages show it and `parse_pattern` reads it."""
        return "full"

    def branches(self, rows: int) -> tuple[Branch, ...]:
        """The branches as they apply to a document of ``rows`` rows."""
        return (Branch(max(rows, 1), 1),)

    def offsets(self, rate: int, kv_heads: int) -> tuple[int, ...]:
        return (0,) * kv_heads

    def for_heads(self, first: int, total: int) -> Full:
        """The pattern itself: all heads see the same keys."""
        _check_first_of_total(first, total)
        return self

    def check_heads(self, kv_heads: int) -> None:
        """Accepts any number of heads."""

    def sees(self, p: int, t: int, *, head: int = 0, kv_heads: int = 1, causal: bool = False) -> int:
        """m(p, t): 1 if query ``p`` sees key ``t``, else 0."""
        return int(not causal or t <= p)


@dataclass(frozen=True)
class Dilated:
    """LongNet's dilated attention: one branch per (segment length, dilation rate) pair.

    Args:
        segment_lengths: rows per segment, one for each branch.
        dilation_rates: one for each branch; rate r selects every r-th row of a segment.
        head_offsets: the first selected row for KV head c: ``"interleaved"`` (the LongNet paper) is c mod r,
            ``"blocked"`` (torchscale) is c // ceil(kv_heads / r).
        shift: moves the borders between segments, so that they can differ between layers.
        first_head, total_heads: set by `for_heads`; ``total_heads=0`` means all heads are in the tensors.

    >>> pattern = Dilated((4, 8), (1, 2))
    >>> [t for t in range(16) if pattern.sees(5, t, head=1, kv_heads=2)]
    [1, 3, 4, 5, 6, 7]
    >>> pattern.sees(5, 7, head=1, kv_heads=2)
    2
    """

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    head_offsets: HeadOffsets = "interleaved"
    shift: int = 0
    first_head: int = 0
    total_heads: int = 0

    def __post_init__(self) -> None:
        rules = {"segment_lengths": "a segment has at least 1 row", "dilation_rates": "a rate must be at least 1"}
        for name, rule in rules.items():
            values = _int_tuple(name, getattr(self, name))
            for i, value in enumerate(values):
                if value < 1:
                    raise ValueError(f"{name}[{i}]={value}: {rule}")
            object.__setattr__(self, name, values)
        if not self.segment_lengths:
            raise ValueError("segment_lengths=(): a pattern has at least one branch; for full attention use Full()")
        if len(self.segment_lengths) != len(self.dilation_rates):
            raise ValueError(
                f"{len(self.segment_lengths)} segment_lengths but {len(self.dilation_rates)} dilation_rates: "
                "give one rate per segment length"
            )
        if self.head_offsets not in get_args(HeadOffsets):
            choices = " or ".join(map(repr, get_args(HeadOffsets)))
            raise ValueError(f"head_offsets={self.head_offsets!r}: must be {choices}")
        for name in ("shift", "first_head", "total_heads"):
            object.__setattr__(self, name, as_int(name, getattr(self, name)))
        if self.shift < 0:
            raise ValueError(
                f"shift={self.shift}: must be at least 0; to move borders the other way, add a segment length"
            )
        if self.total_heads or self.first_head:
            _check_first_of_total(self.first_head, self.total_heads)

    @staticmethod
    def spanning(seq_len: int, first: int = 2048, growth: int = 4) -> Dilated:
        """A pattern for ``seq_len`` rows: segments of ``first`` rows, then ``growth`` times as long, up to all rows.

        Rates grow with the segments, so every segment has about ``first`` selected rows. The last segment is at least
        twice as long as the one before.

        >>> Dilated.spanning(100_000)
        ... # doctest: +NORMALIZE_WHITESPACE
        Dilated(segment_lengths=(2048, 8192, 32768, 100000), dilation_rates=(1, 4, 16, 48),
                head_offsets='interleaved', shift=0, first_head=0, total_heads=0)
        """
        lengths = [min(first, seq_len)]
        while 2 * growth * lengths[-1] <= seq_len:
            lengths.append(growth * lengths[-1])
        if lengths[-1] < seq_len:
            lengths.append(seq_len)
        return Dilated(tuple(lengths), tuple(max(1, length // first) for length in lengths))

    @property
    def text(self) -> str:
        """The pattern on one line, as reports and messages show it and `parse_pattern` reads it.

        SEGMENTxRATE for each branch, then the options that differ from the defaults.

        >>> Dilated((2048, 4096), (1, 2)).text
        '2048x1,4096x2'
        >>> Dilated((2048, 4096), (1, 2), "blocked", shift=16).for_heads(2, 8).text
        '2048x1,4096x2 blocked shift 16 heads 2 of 8'
        """
        pairs = ",".join(f"{w}x{r}" for w, r in zip(self.segment_lengths, self.dilation_rates, strict=True))
        offsets = "" if self.head_offsets == "interleaved" else f" {self.head_offsets}"
        shift = f" shift {self.shift}" if self.shift else ""
        heads = f" heads {self.first_head} of {self.total_heads}" if self.total_heads else ""
        return f"{pairs}{offsets}{shift}{heads}"

    def branches(self, rows: int) -> tuple[Branch, ...]:
        """The branches as they apply to a document of ``rows`` rows."""
        pairs = zip(self.segment_lengths, self.dilation_rates, strict=True)
        return tuple(Branch(w, r, self.shift % w) for w, r in pairs)

    def offsets(self, rate: int, kv_heads: int) -> tuple[int, ...]:
        """The offset of each KV head that the tensors hold, in a branch with this rate."""
        self.check_heads(kv_heads)
        heads = range(self.first_head, self.first_head + kv_heads)
        if self.head_offsets == "interleaved":
            return tuple(c % rate for c in heads)
        block = -(-(self.total_heads or kv_heads) // rate)
        return tuple(c // block for c in heads)

    def for_heads(self, first: int, total: int) -> Dilated:
        """The same pattern for tensors that hold only some heads (tensor parallelism): from ``first`` on, of ``total``.

        >>> Dilated((8,), (4,)).for_heads(2, 4).offsets(4, kv_heads=2)
        (2, 3)
        """
        _check_first_of_total(first, total)
        return replace(self, first_head=first, total_heads=total)

    def check_heads(self, kv_heads: int) -> None:
        """Raise if tensors with this many KV heads contradict `for_heads`."""
        if self.total_heads and self.first_head + kv_heads > self.total_heads:
            raise ValueError(
                f"for_heads(first={self.first_head}, total={self.total_heads}) leaves room for "
                f"{self.total_heads - self.first_head} KV heads, but k and v have {kv_heads}: "
                "first and total count KV heads over all devices"
            )

    def sees(self, p: int, t: int, *, head: int = 0, kv_heads: int = 1, causal: bool = False) -> int:
        """m(p, t): the number of branches in which query ``p`` sees key ``t``, for KV head ``head`` of ``kv_heads``."""
        if causal and t > p:
            return 0
        return sum(branch.sees(p, t, self.offsets(branch.rate, kv_heads)[head]) for branch in self.branches(1))


Pattern = Full | Dilated


_PAIR = r"[^\s,x]+ *x *[^\s,x]+"
_DILATED = re.compile(
    rf"(?P<pairs>{_PAIR}([, ]+{_PAIR})*)( (?P<offsets>interleaved|blocked))?"
    r"( shift (?P<shift>\d+))?( heads (?P<first>\d+) of (?P<total>\d+))?"
)


@lru_cache(maxsize=256)
def parse_pattern(text: str, read_count: Callable[[str], int] = int) -> Pattern:
    """The pattern that a text describes: ``full``, or SEGMENTxRATE pairs and the suffixes of `Dilated.text`.

    ``read_count`` reads a length or a rate; the command line also accepts 32k.

    >>> parse_pattern("2048x1, 8192x4")
    ... # doctest: +NORMALIZE_WHITESPACE
    Dilated(segment_lengths=(2048, 8192), dilation_rates=(1, 4), head_offsets='interleaved', shift=0,
            first_head=0, total_heads=0)
    """
    words = text.strip().lower()
    if words == "full":
        return Full()
    found = _DILATED.fullmatch(words)
    if found is None:
        raise ValueError(
            f"pattern {text!r}: must be full, or SEGMENTxRATE pairs such as 2048x1,8192x4, optionally followed by "
            "'blocked', 'shift N' and 'heads N of N', in this order"
        )
    pairs = [pair.split("x") for pair in re.findall(_PAIR, found["pairs"])]
    try:
        lengths, rates = (tuple(read_count(pair[i].strip()) for pair in pairs) for i in (0, 1))
    except ValueError as error:
        raise ValueError(f"pattern {text!r}: {error}") from error
    offsets = cast(HeadOffsets, found["offsets"] or "interleaved")
    return Dilated(lengths, rates, offsets, *(int(found[name] or 0) for name in ("shift", "first", "total")))


def unselected_row(pattern: Pattern, rows: int, kv_heads: int) -> tuple[int, int] | None:
    """The first (row, head) that no branch selects, or None. Checks the first 256 intervals between segment borders.

    A pattern with a rate of 1 selects every row. Between two borders, the selection repeats after
    the least common multiple of all rates.

    >>> unselected_row(Dilated((4999, 100_000), (2, 2), shift=4999), 20_000, kv_heads=1)
    (5000, 0)
    """
    branches = pattern.branches(rows)
    if any(branch.rate == 1 for branch in branches):
        return None
    period = min(lcm(*(branch.rate for branch in branches)), _MOST_ROWS_CHECKED)
    offsets = [pattern.offsets(branch.rate, kv_heads) for branch in branches]
    start = 0
    for _ in range(_MOST_INTERVALS):
        stop = min(start + b.segment_length - (start + b.shift) % b.segment_length for b in branches)
        for row in range(start, min(stop, start + period, rows)):
            for head in range(kv_heads):
                if not any(b.sees(row, row, offset[head]) for b, offset in zip(branches, offsets, strict=True)):
                    return row, head
        start = stop
    return None


def unselected_warning(pattern: Pattern, rows: int, kv_heads: int) -> str:
    """A warning about rows that no branch selects; empty if there are none.

    >>> unselected_warning(Dilated((8,), (1,)), 16, kv_heads=1)
    ''
    """
    found = unselected_row(pattern, rows, kv_heads)
    if found is None:
        return ""
    return (
        f"pattern {pattern.text}: no branch selects row {found[0]} of KV head {found[1]}. Such rows see nothing, and "
        "their output is 0. To avoid this, add a branch with dilation rate 1."
    )


def _int_tuple(name: str, values: object) -> tuple[int, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{name}={values!r}: must be a sequence of ints, one per branch")
    return tuple(as_int(f"{name}[{i}]", value) for i, value in enumerate(values))


def _check_first_of_total(first: int, total: int) -> None:
    first, total = as_int("first", first), as_int("total", total)
    if not 0 <= first < total:
        raise ValueError(f"first={first}, total={total}: first must be in 0 .. total - 1")
