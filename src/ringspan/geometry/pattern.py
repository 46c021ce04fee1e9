"""Attention patterns: `Full`, `Dilated`, `Window` and their sums, which keys a query sees under each, and their texts.

This is the definition in docs/semantics.md, in integers. The rest of the library is tested against it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm
from typing import Literal, cast, get_args

from ringspan.geometry.documents import as_int

HeadOffsets = Literal["interleaved", "blocked"]
_MOST_INTERVALS, _MOST_ROWS_CHECKED = 256, 4096  # limits of `unselected_row`


@dataclass(frozen=True, slots=True)
class SegmentBranch:
    """Segments of equal length with a dilation rate. ``offsets`` holds the first selected row of each KV head."""

    segment_length: int
    rate: int
    shift: int = 0
    offsets: tuple[int, ...] = (0,)

    @property
    def reach(self) -> int:
        """The most rows from the first to the last key that a query sees."""
        return self.segment_length

    def sees(self, p: int, t: int, head: int = 0) -> bool:
        """Whether query ``p`` sees key ``t`` in a KV head, ignoring causality."""
        p, t = p + self.shift, t + self.shift
        return p // self.segment_length == t // self.segment_length and all(
            x % self.segment_length % self.rate == self.offsets[head] for x in (p, t)
        )


@dataclass(frozen=True, slots=True)
class WindowBranch:
    """A sliding window, equal for all KV heads: from ``left`` rows back to ``right`` rows ahead, every ``rate``-th."""

    left: int
    right: int
    rate: int = 1

    @property
    def reach(self) -> int:
        """The most rows from the first to the last key that a query sees."""
        return self.left + self.right + 1

    def sees(self, p: int, t: int, head: int = 0) -> bool:
        """Whether query ``p`` sees key ``t``, ignoring causality."""
        return -self.right <= p - t <= self.left and (p - t) % self.rate == 0

    def up_to_own_row(self) -> WindowBranch:
        """The window under causality."""
        return WindowBranch(self.left, 0, self.rate if self.left else 1)


Branch = SegmentBranch | WindowBranch


class Pattern(ABC):
    """What sees what: `Full`, `Dilated`, `Window`, or a sum of them, ``a + b``."""

    @property
    @abstractmethod
    def text(self) -> str:
        """The pattern on one line, as reports and messages show it and `parse_pattern` reads it."""

    @abstractmethod
    def branches(self, rows: int, kv_heads: int = 1) -> tuple[Branch, ...]:
        """The branches as they apply to a document of ``rows`` rows and to the KV heads that the tensors hold."""

    @property
    def parts(self) -> tuple[Pattern, ...]:
        """The terms of a sum; otherwise the pattern itself."""
        return (self,)

    def for_heads(self, first: int, total: int) -> Pattern:
        """The pattern for tensors that hold only some KV heads (tensor parallelism): ``first`` on, of ``total``."""
        _check_first_of_total(first, total)
        return self

    def check_heads(self, kv_heads: int) -> None:  # noqa: B027  # most patterns accept any number
        """Raise if tensors with this many KV heads contradict `for_heads`."""

    def moved(self, rows: int) -> Pattern:
        """The pattern for a sequence that starts at row ``rows`` of the original one."""
        return self

    def sees(self, p: int, t: int, *, head: int = 0, kv_heads: int = 1, causal: bool = False) -> int:
        """m(p, t): the number of branches in which query ``p`` sees key ``t``, for KV head ``head`` of ``kv_heads``."""
        if causal and t > p:
            return 0
        return sum(branch.sees(p, t, head) for branch in self.branches(max(p, t) + 1, kv_heads))

    def __add__(self, other: object) -> PatternSum:
        if not isinstance(other, Pattern):
            return NotImplemented
        return PatternSum((*self.parts, *other.parts))


@dataclass(frozen=True)
class PatternSum(Pattern):
    """The branches of several patterns together. Made by ``a + b``; a key seen through two branches counts twice.

    >>> pattern = Window(3) + Dilated((16,), (4,))
    >>> [t for t in range(16) if pattern.sees(8, t, causal=True)]
    [0, 4, 5, 6, 7, 8]
    >>> pattern.sees(8, 8)
    2
    """

    terms: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "terms", tuple(self.terms))
        simple = all(isinstance(term, Pattern) and not isinstance(term, PatternSum) for term in self.terms)
        if len(self.terms) < 2 or not simple:
            raise ValueError(f"terms={self.terms}: a sum has two or more patterns, none of them a sum; write a + b")

    @property
    def text(self) -> str:
        """The texts of the terms.

        >>> (Window(511) + Dilated((4096, 65536), (4, 64))).text
        'window 511 + 4096x4,65536x64'
        """
        return " + ".join(term.text for term in self.terms)

    @property
    def parts(self) -> tuple[Pattern, ...]:
        return self.terms

    def branches(self, rows: int, kv_heads: int = 1) -> tuple[Branch, ...]:
        return tuple(branch for term in self.terms for branch in term.branches(rows, kv_heads))

    def for_heads(self, first: int, total: int) -> PatternSum:
        return PatternSum(tuple(term.for_heads(first, total) for term in self.terms))

    def check_heads(self, kv_heads: int) -> None:
        for term in self.terms:
            term.check_heads(kv_heads)

    def moved(self, rows: int) -> PatternSum:
        return PatternSum(tuple(term.moved(rows) for term in self.terms))


@dataclass(frozen=True)
class Full(Pattern):
    """Full attention: every query sees every key or, if causal, every key up to its own position.

    >>> Full().sees(0, 5)
    1
    >>> Full().sees(0, 5, causal=True)
    0
    """

    @property
    def text(self) -> str:
        return "full"

    def branches(self, rows: int, kv_heads: int = 1) -> tuple[Branch, ...]:
        return (SegmentBranch(max(rows, 1), 1, offsets=(0,) * kv_heads),)


@dataclass(frozen=True)
class Window(Pattern):
    """A sliding window: query p sees the keys from p - ``left`` to p + ``right``, every ``dilation``-th from p on.

    With causality, ``right`` has no effect. ``sliding_window=W`` of a causal Transformers model is ``Window(W - 1)``:
    its W keys include the query's own position. flash-attn's ``window_size=(left, right)`` is ``Window(left, right)``.

    >>> [t for t in range(10) if Window(3).sees(5, t)]
    [2, 3, 4, 5]
    >>> [t for t in range(10) if Window(4, right=2, dilation=2).sees(5, t)]
    [1, 3, 5, 7]
    """

    left: int
    right: int = 0
    dilation: int = 1

    def __post_init__(self) -> None:
        for name, least in (("left", 0), ("right", 0), ("dilation", 1)):
            value = as_int(name, getattr(self, name))
            if value < least:
                unit = "dilation" if name == "dilation" else "number of rows"
                raise ValueError(f"{name}={value}: the {unit} must be at least {least}")
            object.__setattr__(self, name, value)

    @property
    def text(self) -> str:
        """The window on one line.

        >>> Window(511).text, Window(64, 64, 4).text
        ('window 511', 'window 64 right 64 dilation 4')
        """
        right = f" right {self.right}" if self.right else ""
        dilation = f" dilation {self.dilation}" if self.dilation > 1 else ""
        return f"window {self.left}{right}{dilation}"

    def branches(self, rows: int, kv_heads: int = 1) -> tuple[Branch, ...]:
        # Whole steps only, and not farther than the document.
        left, right = (min(side, max(rows - 1, 0)) // self.dilation * self.dilation for side in (self.left, self.right))
        return (WindowBranch(left, right, self.dilation if left or right else 1),)


@dataclass(frozen=True)
class Dilated(Pattern):
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

    def branches(self, rows: int, kv_heads: int = 1) -> tuple[Branch, ...]:
        pairs = zip(self.segment_lengths, self.dilation_rates, strict=True)
        return tuple(SegmentBranch(w, r, self.shift % w, self.offsets(r, kv_heads)) for w, r in pairs)

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

    def moved(self, rows: int) -> Dilated:
        return replace(self, shift=self.shift + rows)


_PAIR = r"[^\s,x]+ *x *[^\s,x]+"
_WINDOW = re.compile(r"window (?P<left>\S+)( right (?P<right>\S+))?( dilation (?P<dilation>\S+))?")
_WINDOW_DEFAULTS = {"left": "0", "right": "0", "dilation": "1"}
_DILATED = re.compile(
    rf"(?P<pairs>{_PAIR}([, ]+{_PAIR})*)( (?P<offsets>interleaved|blocked))?"
    r"( shift (?P<shift>\d+))?( heads (?P<first>\d+) of (?P<total>\d+))?"
)


def _whole_number(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{text!r} must be a whole number")
    return int(text)


@lru_cache(maxsize=256)
def parse_pattern(text: str, read_count: Callable[[str], int] = _whole_number) -> Pattern:
    """The pattern that a text describes: terms joined by ``+``, each as `Full.text`, `Dilated.text` or `Window.text`.

    ``read_count`` reads a length or a rate; the command line also accepts 32k.

    >>> parse_pattern("2048x1, 8192x4")
    ... # doctest: +NORMALIZE_WHITESPACE
    Dilated(segment_lengths=(2048, 8192), dilation_rates=(1, 4), head_offsets='interleaved', shift=0,
            first_head=0, total_heads=0)
    >>> parse_pattern("window 511 + full").terms
    (Window(left=511, right=0, dilation=1), Full())
    """
    try:
        first, *others = (_parse_term(" ".join(term.split()), read_count) for term in text.lower().split("+"))
    except ValueError as error:
        raise ValueError(f"pattern {text!r}: {error}") from error
    return PatternSum((first, *others)) if others else first


def _parse_term(term: str, read_count: Callable[[str], int]) -> Pattern:
    if term == "full":
        return Full()
    if found := _WINDOW.fullmatch(term):
        return Window(*(read_count(found[name] or default) for name, default in _WINDOW_DEFAULTS.items()))
    found = _DILATED.fullmatch(term)
    if found is None:
        raise ValueError(
            f"{term or 'nothing'!r} must be full, 'window N', optionally followed by 'right N' and 'dilation N', or "
            "SEGMENTxRATE pairs such as 2048x1,8192x4, optionally followed by 'blocked', 'shift N' and 'heads N of N', "
            "in this order; join patterns with +"
        )
    pairs = [pair.split("x") for pair in re.findall(_PAIR, found["pairs"])]
    lengths, rates = (tuple(read_count(pair[i].strip()) for pair in pairs) for i in (0, 1))
    offsets = cast(HeadOffsets, found["offsets"] or "interleaved")
    return Dilated(lengths, rates, offsets, *(int(found[name] or 0) for name in ("shift", "first", "total")))


def check_pattern(pattern: object, kv_heads: int) -> None:
    """Raise unless ``pattern`` is a pattern for tensors with this many KV heads."""
    if not isinstance(pattern, Pattern):
        raise TypeError(
            f"pattern={pattern!r}: must be Full(), Window(left), Dilated(segment_lengths, dilation_rates), or a sum"
        )
    pattern.check_heads(kv_heads)


def unselected_row(pattern: Pattern, rows: int, kv_heads: int) -> tuple[int, int] | None:
    """The first (row, head) that no branch selects, or None. Checks the first 256 intervals between segment borders.

    A pattern with a rate of 1 selects every row. Between two borders, the selection repeats after
    the least common multiple of all rates.

    >>> unselected_row(Dilated((4999, 100_000), (2, 2), shift=4999), 20_000, kv_heads=1)
    (5000, 0)
    """
    branches = [b for b in pattern.branches(rows, kv_heads) if isinstance(b, SegmentBranch) and b.rate > 1]
    if len(branches) < len(pattern.branches(rows, kv_heads)):
        return None  # windows and branches of rate 1 select every row
    period = min(lcm(*(branch.rate for branch in branches)), _MOST_ROWS_CHECKED)
    start = 0
    for _ in range(_MOST_INTERVALS):
        stop = min(start + b.segment_length - (start + b.shift) % b.segment_length for b in branches)
        for row in range(start, min(stop, start + period, rows)):
            for head in range(kv_heads):
                if not any(b.sees(row, row, head) for b in branches):
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
