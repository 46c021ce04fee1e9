"""Cases: what is measured. An implementation, a pattern, a length, a number of ranks, and the shape of the heads."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import ringspan as rs
from ringspan.geometry import Dilated, Full, Pattern, parse_pattern
from ringspan.layout import Layout, LayoutName
from ringspan.planning.breakeven import Rates
from ringspan.runtime.extras import install_command
from ringspan.tools import peers
from ringspan.tools.peers import Attend, blockwise_flex, masked_sdpa

_ANY_LENGTH = Dilated((1,), (1,))  # stands for the spanning patterns of all lengths


@dataclass(frozen=True)
class Case:
    """``layout`` says which rows each rank holds; ``backward`` whether the backward pass is measured too.

    ``spanning``: the pattern was chosen for the length (`Dilated.spanning`), and other lengths have another one.
    """

    implementation: str
    pattern: Pattern
    tokens: int
    ranks: int
    causal: bool
    layout: LayoutName
    dtype: str
    heads: int
    dim: int
    backward: bool
    spanning: bool = False

    @property
    def ladder(self) -> Case:
        """The case without its length, and without what may depend on it: equal for all lengths of one ladder."""
        pattern = _ANY_LENGTH if self.spanning else self.pattern
        return replace(self, tokens=0, layout="contiguous", pattern=pattern)

    @property
    def pattern_name(self) -> str:
        """The pattern as the command line takes it."""
        return "spanning" if self.spanning else pattern_label(self.pattern)

    @property
    def processes(self) -> int:
        """How many processes a trial starts: the ranks of a simulated ring share one."""
        return 1 if self.implementation == "simulated" else self.ranks

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def rows_of(self, rank: int) -> int:
        return Layout(self.layout, self.tokens, self.ranks).rows_of(rank)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "pattern": self.pattern.text}

    def __str__(self) -> str:
        where = "one process" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{self.implementation}, {self.tokens:,} tokens, {where}, {pattern_label(self.pattern)}"


def case_from_json(found: dict[str, Any]) -> Case:
    """The case that `Case.as_json` wrote."""
    return Case(**{**found, "pattern": parse_pattern(found["pattern"])})


def pattern_label(pattern: Pattern) -> str:
    """A pattern as the command line takes it.

    >>> pattern_label(Dilated((2048, 8192), (1, 4)))
    '2048x1,8192x4'
    """
    if not isinstance(pattern, Dilated):
        return "full"
    return ",".join(f"{w}x{r}" for w, r in zip(pattern.segment_lengths, pattern.dilation_rates, strict=True))


_ANY = 1_000_000
LOCAL_RATES = Rates(flops=5e10, bandwidth=1e9, latency=1e-4)  # processes on one CPU thread each, roughly


def _everything_is_there() -> str:
    return ""


@dataclass(frozen=True)
class Implementation:
    """``prepare(case)`` runs on every rank and returns the call to be timed, on that rank's rows.

    ``missing()`` says what has to be installed first, or nothing. ``layout`` is the one that it needs, if it needs one.
    ``compiled``: it is warmed up at the length that is measured, since it compiles for that length alone.
    """

    name: str
    title: str
    prepare: Callable[[Case], Attend]
    patterns: tuple[type[Pattern], ...] = (Full,)
    most_ranks: int = _ANY
    backward: bool = True
    compiled: bool = False
    layout: LayoutName | None = None
    missing: Callable[[], str] = _everything_is_there

    def offers(self, pattern: Pattern, ranks: int) -> bool:
        return isinstance(pattern, self.patterns) and ranks <= self.most_ranks


class RingAttention:
    """ringspan on this rank's rows; ``ring`` counts what it sends, and is None on one process."""

    def __init__(self, case: Case) -> None:
        self.case, self.ring = case, rs.Ring(layout=case.layout) if case.ranks > 1 else None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        case = self.case
        return rs.attention(q, k, v, pattern=case.pattern, causal=case.causal, ring=self.ring, seq_len=case.tokens)


class SimulatedAttention:
    """All ranks of a ring in this process, on whole tensors; ``ring`` counts what each virtual rank holds."""

    def __init__(self, case: Case) -> None:
        self.case, self.ring = case, rs.SimulatedRing(case.ranks, case.layout)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rs.attention(q, k, v, pattern=self.case.pattern, causal=self.case.causal, ring=self.ring)


def _sdpa(case: Case) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=case.causal).transpose(1, 2)

    return attend


def _masked_sdpa(case: Case) -> Attend:
    return masked_sdpa(case.pattern, case.tokens, case.heads, causal=case.causal, dtype=case.torch_dtype)


def _flex(case: Case) -> Attend:
    assert isinstance(case.pattern, Dilated)
    return blockwise_flex(case.pattern, case.tokens, case.heads, causal=case.causal)


def _other_ring(attention: peers.Attention, case: Case) -> Attend:
    return partial(attention, causal=case.causal, group=dist.group.WORLD)  # type: ignore[arg-type]


def _needs(module: str, remedy: str) -> str:
    return "" if importlib.util.find_spec(module) else f"{module} is not installed: {remedy}"


def _needs_compiler() -> str:
    compilers = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    return "" if any(map(shutil.which, filter(None, compilers))) else "needs a C++ compiler to compile with"


OURS = (
    Implementation("ringspan", "ringspan", RingAttention, patterns=(Full, Dilated)),
    Implementation("simulated", "ringspan, simulated ring", SimulatedAttention, patterns=(Full, Dilated)),
)
PEERS = (
    Implementation("sdpa", "torch SDPA", _sdpa, most_ranks=1),
    Implementation("sdpa_mask", "torch SDPA with a mask", _masked_sdpa, patterns=(Dilated,), most_ranks=1),
    Implementation(
        "flex",
        "torch FlexAttention",
        _flex,
        patterns=(Dilated,),
        most_ranks=1,
        backward=False,
        compiled=True,
        missing=_needs_compiler,
    ),
    Implementation(
        "torch_ring",
        "torch's own ring",
        partial(_other_ring, peers.torch_ring),
        layout="zigzag",
        missing=partial(
            _needs, "torch.distributed.tensor.experimental._context_parallel", "this version of torch is without it"
        ),
    ),
    Implementation(
        "ring_attention_pytorch",
        "ring-attention-pytorch",
        partial(_other_ring, peers.ring_attention_pytorch),
        layout="contiguous",
        missing=partial(_needs, "ring_attention_pytorch", install_command("peers")),
    ),
    Implementation("all_gather", "all-gather", partial(_other_ring, peers.all_gather), layout="contiguous"),
)
IMPLEMENTATIONS = {one.name: one for one in OURS + PEERS}
PEER_NAMES = tuple(one.name for one in PEERS)


def make_cases(
    names: Sequence[str],
    patterns: Sequence[Pattern | Literal["spanning"]],
    tokens: Sequence[int],
    ranks: Sequence[int],
    *,
    first_segment: int = 2048,
    causal: bool = True,
    layout: LayoutName | None = None,
    dtype: str = "float32",
    heads: int = 8,
    dim: int = 64,
    backward: bool = True,
) -> list[Case]:
    """A case for every pattern, length, number of ranks and implementation that go together.

    ``layout`` is ringspan's; None takes the faster one for each case (`rs.best_layout`, at the rates of local
    processes). ``"spanning"`` is the pattern that spans each length, with segments from ``first_segment`` rows on. An
    implementation that is not installed has its cases all the same: they become rows that say so.
    """
    cases = []
    for n, wanted, size, name in product(tokens, patterns, ranks, names):
        who = IMPLEMENTATIONS[name]
        pattern = rs.Dilated.spanning(n, first_segment) if wanted == "spanning" else wanted
        if who.offers(pattern, size):
            advice = rs.best_layout(pattern, n, size, causal=causal, heads=heads, dim=dim, rates=LOCAL_RATES)
            rows = who.layout or layout or advice.layout
            shape = (causal, rows, dtype, heads, dim, backward and who.backward)
            cases.append(Case(name, pattern, n, size, *shape, spanning=wanted == "spanning"))
    return cases
