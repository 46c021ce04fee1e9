"""What the page shows, as its link states it, and the plan and the lines of Python that follow from it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast, get_args

import ringspan as rs
from ringspan.balance import Balanced
from ringspan.geometry import Pattern, PatternSum, parse_pattern
from ringspan.geometry.curves import CurveName, cells_in_order, grid_shape
from ringspan.layout import AnyLayout, check_layout_name
from ringspan.planning import ByNode, RingPlan, Routing
from ringspan.runtime.counts import parse_count, parse_documents

ORDERS = {"row_major": "RowMajor", "snake": "Snake", "morton": "Morton", "hilbert": "Hilbert"}


@dataclass(frozen=True)
class ExplorerSettings:
    """The inputs of the page, as text where a person types text. Properties raise the library's own errors."""

    pattern: str = "8x1,32x4"
    tokens: str = "64"
    lengths: str = ""
    causal: bool = True
    ranks: str = "4"
    layout: str = "zigzag"
    routing: str = "relay"
    ranks_per_node: str = "2"
    head_ranks: str = "1"
    optimize: str = "auto"
    heads: str = "4"
    kv_heads: str = "4"
    head_dim: str = "64"
    dtype: str = "bfloat16"
    order: str = ""
    grid: str = "8x8"

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> ExplorerSettings:
        """The settings with these values; all others are defaults.

        >>> ExplorerSettings.of({"pattern": "full", "causal": False}).ring.causal
        False
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                raise ValueError(f"{name}={fields[name]!r}: must be one of the settings {', '.join(known)}")
        return cls(**fields)

    @property
    def rows(self) -> int:
        """The length of the sequence: the cells of the grid, the sum of the documents, or the tokens."""
        if self.order:
            return math.prod(self.shape)
        return sum(self.documents) if self.documents else _count("tokens", self.tokens)

    @property
    def documents(self) -> tuple[int, ...]:
        """The lengths of packed documents; empty for a single sequence."""
        if not self.lengths.strip() or self.order:
            return ()
        try:
            return parse_documents(self.lengths)
        except ValueError as error:
            raise ValueError(f"lengths: {error}") from error

    @property
    def shape(self) -> tuple[int, ...]:
        """The sides of the grid."""
        if self.order not in get_args(CurveName):
            raise ValueError(f"order={self.order!r}: must be one of {', '.join(ORDERS)}")
        return grid_shape([_count("grid", side) for side in self.grid.lower().split("x")])

    @property
    def cells(self) -> list[int]:
        """The row-major index of the cell at each place of the sequence."""
        return _cells(self.order, self.shape)

    @property
    def seen(self) -> Pattern:
        return parse_pattern(self.pattern, _count_or_zero)

    @property
    def ring(self) -> RingPlan:
        """`rs.plan` with these settings."""
        return _plan(self)

    def plan_options(self) -> dict[str, Any]:
        """The keyword arguments of `rs.plan`."""
        check_layout_name(self.layout)
        if self.routing not in ("relay", "direct", "by-node"):
            raise ValueError(f"routing={self.routing!r}: must be relay, direct or by-node")
        seen, packed = self.seen, self.documents
        layout: AnyLayout = Balanced(seen, self.causal) if self.layout == "balanced" else self.layout  # type: ignore[assignment]
        routing: Routing = self.routing  # type: ignore[assignment]
        if self.routing == "by-node":
            routing = ByNode(_count("ranks_per_node", self.ranks_per_node))
        options: dict[str, Any] = dict(ring_size=_count("ranks", self.ranks), layout=layout, causal=self.causal)
        options |= dict(routing=routing, heads=_count("heads", self.heads), kv_heads=_count("kv_heads", self.kv_heads))
        options |= dict(head_dim=_count("head_dim", self.head_dim), dtype=self.dtype)
        head_ranks = _count("head_ranks", self.head_ranks)
        given = dict(lengths=packed, head_ranks=head_ranks, optimize=self.optimize)
        unless: dict[str, Any] = dict(lengths=(), head_ranks=1, optimize="auto")
        return options | {name: value for name, value in given.items() if value != unless[name]}

    @property
    def python(self) -> str:
        """The lines that make this pattern and plan, and the numbers of the page."""
        options = self.plan_options()
        order, length = [], str(self.rows)
        if self.order:
            order = [f"order = rs.{ORDERS[self.order]}({self.shape})  # apply it to the data, before the split"]
            length = "order.period"
        given = {name: _python_value(value) for name, value in options.items()}
        if options["layout"] == Balanced(self.seen, self.causal):
            given["layout"] = f"rs.Balanced(pattern, causal={self.causal})"
        lines = [
            "import ringspan as rs",
            "",
            *order,
            f"pattern = {_python_pattern(self.seen)}",
            "plan = rs.plan(",
            f"    pattern, {length},",
            *(f"    {line}," for line in _wrapped([f"{name}={value}" for name, value in given.items()])),
            ")",
            "print(plan)",
            "work = {rank: plan.work(rank) for rank in plan.sample}  # (query, key) pairs",
            "sent = {rank: plan.bytes_sent(rank) for rank in plan.sample}  # bytes, forward",
            "memory = {rank: plan.memory(rank).total for rank in plan.sample}  # bytes, forward",
        ]
        return "\n".join(lines) + "\n"


@lru_cache(maxsize=16)
def _plan(settings: ExplorerSettings) -> RingPlan:
    return rs.plan(settings.seen, settings.rows, **settings.plan_options())


@lru_cache(maxsize=8)
def _cells(curve: str, shape: tuple[int, ...]) -> list[int]:
    return cells_in_order(cast(CurveName, curve), shape)


def _count(name: str, text: str) -> int:
    """A whole number; errors name the setting."""
    try:
        return parse_count(str(text).strip())
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _count_or_zero(text: str) -> int:
    return parse_count(text, least=0)


def _python_pattern(pattern: Pattern) -> str:
    """The expression that makes a pattern, without the arguments that have their defaults.

    >>> _python_pattern(parse_pattern("window 511 + 4096x4,65536x64 shift 8"))
    'rs.Window(511) + rs.Dilated((4096, 65536), (4, 64), shift=8)'
    """
    if isinstance(pattern, PatternSum):
        return " + ".join(map(_python_pattern, pattern.terms))
    arguments = []
    for field in dataclasses.fields(pattern):  # type: ignore[arg-type]
        value = getattr(pattern, field.name)
        if field.default is dataclasses.MISSING:
            arguments.append(repr(value))
        elif value != field.default:
            arguments.append(f"{field.name}={value!r}")
    return f"rs.{type(pattern).__name__}({', '.join(arguments)})"


def _python_value(value: object) -> str:
    return f"rs.ByNode({value.ranks_per_node})" if isinstance(value, ByNode) else repr(value)


def _wrapped(parts: list[str], width: int = 100) -> Iterator[str]:
    """The parts, joined by commas, in lines."""
    line = parts[0]
    for part in parts[1:]:
        if len(line) + len(part) + 2 > width:
            yield line
            line = part
        else:
            line += f", {part}"
    yield line
