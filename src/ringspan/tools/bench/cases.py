"""Benchmark cases and the implementations they run. A case is one configuration to measure; it knows no timing."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import ringspan as rs
from ringspan.geometry import Dilated, Full, Pattern, parse_pattern
from ringspan.layout import Layout, LayoutName
from ringspan.planning.timing import DeviceRates
from ringspan.runtime.settings import install_command
from ringspan.tools import peers
from ringspan.tools.peers import Attend, blockwise_flex, masked_sdpa

_ANY_LENGTH = Dilated((1,), (1,))  # placeholder for the spanning patterns of all lengths
_ANY_NUMBER = 1_000_000
LOCAL_RATES = DeviceRates(flops=5e10, bandwidth=1e9, latency=1e-4)  # rough: local processes with one CPU thread each


@dataclass(frozen=True)
class BenchCase:
    """One configuration to measure: an implementation at one length, on a number of ranks.

    ``layout`` assigns rows to ranks. ``backward`` includes the backward pass. ``spanning`` means that the pattern is
    `Dilated.spanning` of the length, so other lengths of the same ladder have other patterns.
    """

    implementation: str
    pattern: Pattern
    tokens: int
    ranks: int
    causal: bool
    layout: LayoutName
    dtype: str
    heads: int
    head_dim: int
    backward: bool
    spanning: bool = False

    @property
    def ladder(self) -> BenchCase:
        """The case without its length and everything that may depend on it. Equal for all lengths of one ladder."""
        pattern = _ANY_LENGTH if self.spanning else self.pattern
        return replace(self, tokens=0, layout="contiguous", pattern=pattern)

    @property
    def pattern_name(self) -> str:
        """The pattern as written on the command line."""
        return "spanning" if self.spanning else self.pattern.text

    @property
    def processes(self) -> int:
        """Number of processes that a trial starts. All ranks of a simulated ring share one."""
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
        return f"{self.implementation}, {self.tokens:,} tokens, {where}, {self.pattern.text}"


def case_from_json(found: dict[str, Any]) -> BenchCase:
    """Inverse of `BenchCase.as_json`."""
    return BenchCase(**{**found, "pattern": parse_pattern(found["pattern"])})


def _nothing_missing() -> str:
    return ""


@dataclass(frozen=True)
class Implementation:
    """An implementation of attention that can be benchmarked.

    ``prepare(case)`` runs on every rank and returns the call to time on that rank's rows. ``missing()`` returns what
    must be installed first, or an empty string. ``layout`` is set if the implementation requires one. ``compiled``
    implementations compile for one length, so they are warmed up at the measured length.
    """

    name: str
    title: str
    prepare: Callable[[BenchCase], Attend]
    patterns: tuple[type[Pattern], ...] = (Full,)
    most_ranks: int = _ANY_NUMBER
    backward: bool = True
    compiled: bool = False
    layout: LayoutName | None = None
    missing: Callable[[], str] = _nothing_missing

    def offers(self, pattern: Pattern, ranks: int) -> bool:
        return isinstance(pattern, self.patterns) and ranks <= self.most_ranks


class RingAttention:
    """ringspan on this rank's rows. ``ring`` counts the bytes sent; it is None on one process."""

    def __init__(self, case: BenchCase) -> None:
        self.case, self.ring = case, rs.Ring(layout=case.layout) if case.ranks > 1 else None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        case = self.case
        return rs.attention(q, k, v, pattern=case.pattern, causal=case.causal, ring=self.ring, seq_len=case.tokens)


class SimulatedAttention:
    """All ranks of a ring in this process, on whole tensors. ``ring`` counts the bytes that each virtual rank holds."""

    def __init__(self, case: BenchCase) -> None:
        self.case, self.ring = case, rs.SimulatedRing(case.ranks, case.layout)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rs.attention(q, k, v, pattern=self.case.pattern, causal=self.case.causal, ring=self.ring)


def _sdpa(case: BenchCase) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=case.causal).transpose(1, 2)

    return attend


def _masked_sdpa(case: BenchCase) -> Attend:
    return masked_sdpa(case.pattern, case.tokens, case.heads, causal=case.causal, dtype=case.torch_dtype)


def _flex(case: BenchCase) -> Attend:
    assert isinstance(case.pattern, Dilated)
    return blockwise_flex(case.pattern, case.tokens, case.heads, causal=case.causal)


def _other_ring(attention: peers.GroupAttention, case: BenchCase) -> Attend:
    return partial(attention, causal=case.causal, group=dist.group.WORLD)  # type: ignore[arg-type]


def _missing_module(module: str, remedy: str) -> str:
    return "" if importlib.util.find_spec(module) else f"{module} is not installed: {remedy}"


def _missing_compiler() -> str:
    compilers = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    return "" if any(map(shutil.which, filter(None, compilers))) else "a C++ compiler is required"


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
        missing=_missing_compiler,
    ),
    Implementation(
        "torch_ring",
        "torch's own ring",
        partial(_other_ring, peers.torch_ring),
        layout="zigzag",
        missing=partial(
            _missing_module,
            "torch.distributed.tensor.experimental._context_parallel",
            "use another version of torch",
        ),
    ),
    Implementation(
        "ring_attention_pytorch",
        "ring-attention-pytorch",
        partial(_other_ring, peers.ring_attention_pytorch),
        layout="contiguous",
        missing=partial(_missing_module, "ring_attention_pytorch", install_command("peers")),
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
    head_dim: int = 64,
    backward: bool = True,
) -> list[BenchCase]:
    """One case for every valid combination of pattern, length, number of ranks and implementation.

    ``layout`` applies to ringspan; None picks the faster one for each case (`rs.best_layout` at the rates of local
    processes). ``"spanning"`` is the pattern that spans each length, starting with segments of ``first_segment`` rows.
    Implementations that are not installed get cases too: the report lists them with the reason.
    """
    cases = []
    for n, wanted, size, name in product(tokens, patterns, ranks, names):
        who = IMPLEMENTATIONS[name]
        pattern = rs.Dilated.spanning(n, first_segment) if wanted == "spanning" else wanted
        if who.offers(pattern, size):
            advice = rs.best_layout(pattern, n, size, causal=causal, heads=heads, head_dim=head_dim, rates=LOCAL_RATES)
            rows = who.layout or layout or cast(LayoutName, advice.layout)  # without documents, never balanced
            shape = (causal, rows, dtype, heads, head_dim, backward and who.backward)
            cases.append(BenchCase(name, pattern, n, size, *shape, spanning=wanted == "spanning"))
    return cases
