"""Inputs, and a loss that depends on every output, for comparisons with the oracle."""

import torch
from torch import Tensor

import ringspan as rs
from ringspan.oracle import dense_attention


def inputs(batch: int, n: int, kv_heads: int, group: int, dim: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    heads = (kv_heads * group, kv_heads, kv_heads)
    return [torch.randn(batch, n, h, dim, dtype=torch.float64).to(dtype).requires_grad_() for h in heads]


def loss_weights(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in (out, lse))  # type: ignore[return-value]


def weighted_loss(out: Tensor, lse: Tensor, weights: tuple[Tensor, Tensor]) -> Tensor:
    """A loss in which every output and every finite lse has its own weight."""
    finite = lse.detach() > -torch.inf
    return (out * weights[0]).sum() + (lse * weights[1])[finite].sum()


def gradients(out: Tensor, lse: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(weighted_loss(out, lse, loss_weights(out, lse)), tensors)


def random_sinks(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).mul(2).to(dtype).requires_grad_()


def assert_equals_oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kernel: str | None = None,
    ring: rs.SimulatedRing | None = None,
    optimize: rs.Optimize = "auto",
    **options: object,
) -> None:
    """Output, lse and all gradients, also of the sinks, within 1e-12 of the dense definition."""
    tensors = [q, k, v, *(x for x in (options.get("sinks"),) if isinstance(x, Tensor))]
    out, lse = rs.attention(  # type: ignore[call-overload]
        q, k, v, return_lse=True, kernel=kernel, ring=ring, optimize=optimize, **options
    )
    right, right_lse = dense_attention(q, k, v, **options)  # type: ignore[arg-type]
    found = (out, lse, *gradients(out, lse, *tensors))
    wanted = (right, right_lse, *gradients(right, right_lse, *tensors))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
