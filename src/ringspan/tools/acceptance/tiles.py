"""One kernel against the definition in fp64: tiles of all masks and shapes, and whole calls of attention with it.

The definition is computed on the CPU by autograd, without any code of the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import ringspan as rs
from ringspan.api import attention
from ringspan.geometry import Mask
from ringspan.kernels import Kernel, ScoreOptions, accumulation_dtype
from ringspan.oracle import dense_attention
from ringspan.tools.precision import ClosestResult, closest_to_limit, results_of

MASKS: tuple[Mask, ...] = ("full", "causal", "anticausal")
SHAPES = [(1, 1, 1, 1, 1), (2, 3, 37, 37, 8), (1, 2, 64, 64, 64), (3, 1, 5, 130, 3), (2, 2, 130, 7, 16)]
SHAPES += [(2, 1, 257, 257, 8), (1, 2, 1024, 1024, 4), (1, 1, 1025, 1025, 4)]  # the CPU kernel cuts triangles in strips
LARGE_SHAPES = [(1, 2, 1000, 1000, 64), (1, 1, 640, 320, 128)]  # several blocks of every kernel
NAMES = ("out", "lse", "dq", "dk", "dv")
_EVERY = (True, True, True)
_SCORES = ScoreOptions(0.3)
_ROWS, _HEADS, _DIM = 197, 4, 64  # of whole calls
_CPU = torch.device("cpu")

Tile = list[Tensor]  # q, k, v and the gradient of the output


@dataclass(frozen=True)
class KernelComparison(ClosestResult):
    """One tile or call."""

    kernel: str
    dtype: str
    case: str

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


def operands(shape: Sequence[int], dtype: torch.dtype, device: torch.device = _CPU) -> Tile:
    x, y, rows, keys, dim = shape
    return [torch.randn(x, y, n, dim, dtype=torch.float64).to(device, dtype) for n in (rows, keys, keys, rows)]


def square(shape: Sequence[int], mask: Mask) -> tuple[int, ...]:
    """The shape with as many keys as queries if the mask needs that."""
    x, y, rows, keys, dim = shape
    return (x, y, rows, keys if mask == "full" else rows, dim)


def by_autograd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    mask: Mask,
    scale: float,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """Output, lse, dq, dk and dv of a tile, computed in ``dtype`` on the CPU."""
    q, k, v = (x.detach().cpu().to(dtype).requires_grad_() for x in (q, k, v))
    scores = q @ k.mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask == "causal":
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    if mask == "anticausal":
        scores = scores.masked_fill(torch.ones_like(scores).tril(-1).bool(), -torch.inf)
    out = scores.softmax(-1) @ v
    return [out, scores.logsumexp(-1), *torch.autograd.grad(out, (q, k, v), grad.cpu().to(dtype))]


def by_kernel(kernel: Kernel, tile: Tile, mask: Mask, scores: ScoreOptions) -> list[Tensor]:
    """The same by a kernel."""
    q, k, v, grad = tile
    out, lse = kernel.forward(q, k, v, mask, scores)
    shares = kernel.backward(grad, q, k, v, out, lse, mask, scores, _EVERY)
    return [out, lse, *(share for share in shares if share is not None)]


def in_two_parts(kernel: Kernel, tile: Tile, mask: Mask, scores: ScoreOptions) -> list[Tensor]:
    """A full tile whose keys come in two parts, as in a ring: each gets the output and lse of the whole in backward."""
    q, k, v, grad = tile
    out, lse = kernel.forward(q, k, v, mask, scores)
    cut = k.shape[2] // 3
    parts = [
        kernel.backward(grad, q, k[:, :, a:b], v[:, :, a:b], out, lse, mask, scores, _EVERY)
        for a, b in ((0, cut), (cut, k.shape[2]))
    ]
    (dq, dk, dv), (more_dq, more_dk, more_dv) = parts
    assert dq is not None and dk is not None and dv is not None  # noqa: PT018
    assert more_dq is not None and more_dk is not None and more_dv is not None  # noqa: PT018
    wide = accumulation_dtype(q.dtype)
    return [out, lse, dq.to(wide) + more_dq.to(wide), torch.cat((dk, more_dk), 2), torch.cat((dv, more_dv), 2)]


def compare_kernel(kernel: Kernel, device: torch.device, *, large: bool = True) -> Iterator[KernelComparison]:
    """Every case of the kernel, in every dtype; without ``large``, small tiles only.

    Ends after an error of the device, which no later call survives.
    """
    for dtype in kernel.contract.dtypes:
        shapes = (*SHAPES, *(LARGE_SHAPES if large else ()))
        for name, compare in (*_tile_cases(kernel, dtype, device, shapes), *_call_cases(kernel, dtype, device)):
            torch.manual_seed(0)
            start = KernelComparison(kernel.name, str(dtype).removeprefix("torch."), name)
            try:
                result, error, allowed = compare()
            except Exception as raised:  # a kernel or a driver may raise anything
                text = str(raised).strip()
                yield replace(start, failure=f"{type(raised).__name__}: {text.splitlines()[0] if text else ''}")
                if "CUDA error" in text:
                    return
            else:
                yield replace(start, result=result, error=error, allowed=allowed)


Compare = Callable[[], tuple[str, float, float]]


def _tile_cases(
    kernel: Kernel, dtype: torch.dtype, device: torch.device, shapes: Sequence[Sequence[int]]
) -> Iterator[tuple[str, Compare]]:
    contract = kernel.contract
    multiple = contract.head_dim_multiple[dtype]

    def tile(shape: Sequence[int]) -> Callable[[], Tile]:
        return lambda: operands(shape, dtype, device)

    def fitting(shape: Sequence[int]) -> tuple[int, ...]:
        *rest, dim = shape
        return (*rest, min(-(-dim // multiple) * multiple, contract.max_head_dim or dim + multiple))

    def case(name: str, make: Callable[[], Tile], mask: Mask, **options: Any) -> tuple[str, Compare]:
        return f"{mask} tile, {name}", partial(_compare_tile, kernel, dtype, make, mask, **options)

    for mask in MASKS:
        for shape in map(fitting, shapes):
            fits = square(shape, mask)
            yield case(_shape_text(fits), tile(fits), mask)
        yield case("strided views", lambda: _views(dtype, device), mask)
        yield case("a negative scale", tile(fitting((2, 3, 64, 64, 8))), mask, scores=ScoreOptions(-0.5))
        if contract.zero_strides:
            yield case("keys shared by 4 heads", lambda: _shared_keys(dtype, device), mask)
        if contract.softcap:
            yield case("a soft cap", tile(fitting((2, 3, 37, 37, 8))), mask, scores=ScoreOptions(0.9, softcap=0.5))
    yield case("keys in two parts", tile((2, 2, 96, 96, 64)), "full", run=in_two_parts)


def _shape_text(shape: Sequence[int]) -> str:
    x, y, rows, keys, dim = shape
    return f"{x} x {y} x {rows} queries, {keys} keys, {dim} wide"


def _views(dtype: torch.dtype, device: torch.device) -> Tile:
    """Every second row of tensors that hold q, k and v of all heads side by side, as the engine passes them."""
    wide = torch.randn(2, 160, 4, 3, 64).to(device, dtype)  # (batch, rows, heads, q or k or v, dim)
    q, k, v = (wide[:, ::2, :, i].transpose(1, 2) for i in range(3))
    return [q, k, v, torch.randn(80, 64).to(device, dtype).expand(2, 4, 80, 64).contiguous()]


def _shared_keys(dtype: torch.dtype, device: torch.device) -> Tile:
    q, k, v, grad = operands((3, 4, 48, 48, 64), dtype, device)
    return [q, k[:, :1].expand_as(q), v[:, :1].expand_as(q), grad]


def _compare_tile(
    kernel: Kernel,
    dtype: torch.dtype,
    make: Callable[[], Tile],
    mask: Mask,
    scores: ScoreOptions = _SCORES,
    run: Callable[[Kernel, Tile, Mask, ScoreOptions], list[Tensor]] = by_kernel,
) -> tuple[str, float, float]:
    tile = make()
    found = run(kernel, tile, mask, scores)
    q, k, v, grad = tile
    options = (mask, scores.scale, scores.softcap)
    right, dense = (by_autograd(q, k, v, grad, *options, each) for each in (torch.float64, dtype))
    named = (dict(zip(NAMES, (x.cpu().double() for x in results), strict=True)) for results in (found, dense, right))
    first, second, third = named
    return closest_to_limit(first, second, third, dtype)


# Whole calls with this kernel: masks, merging, grouped heads, sinks and documents around its tiles.
_CALLS: dict[str, dict[str, Any]] = {
    "attention: window + dilated, causal, 2 KV heads, sinks, 2 documents": dict(
        pattern=rs.Window(40) + rs.Dilated((64, 200), (1, 3), shift=5), causal=True, lengths=(150, 47)
    ),
    "attention: full, not causal, 1 KV head, sinks": dict(pattern=rs.Full()),
}
_KV_HEADS = (2, 1)


def _call_cases(kernel: Kernel, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Compare]]:
    for (name, options), kv_heads in zip(_CALLS.items(), _KV_HEADS, strict=True):
        yield name, partial(_compare_call, kernel, dtype, device, kv_heads, options)


def _compare_call(
    kernel: Kernel, dtype: torch.dtype, device: torch.device, kv_heads: int, options: dict[str, Any]
) -> tuple[str, float, float]:
    q, weights = torch.randn(2, 1, _ROWS, _HEADS, _DIM, dtype=torch.float64).to(dtype).unbind()
    k, v = torch.randn(2, 1, _ROWS, kv_heads, _DIM, dtype=torch.float64).to(dtype).unbind()
    sinks = torch.randn(_HEADS, dtype=torch.float64).to(dtype)
    here = [x.to(device) for x in (q, k, v)]
    found = results_of(
        attention,
        here,
        weights.to(device),
        dtype,
        sinks=sinks.to(device),
        kernel=kernel.name,
        return_lse=True,
        **options,
    )
    right, dense = (
        results_of(dense_attention, (q, k, v), weights, each, sinks=sinks, **options) for each in (torch.float64, dtype)
    )
    return closest_to_limit(found, dense, right, dtype)
