"""Inputs, and a loss that depends on everything, for comparisons with the oracle."""

import torch
from torch import Tensor


def inputs(batch: int, n: int, kv_heads: int, group: int, dim: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    heads = (kv_heads * group, kv_heads, kv_heads)
    return [torch.randn(batch, n, h, dim, dtype=torch.float64).to(dtype).requires_grad_() for h in heads]


def loss_weights(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in (out, lse))  # type: ignore[return-value]


def weighted_loss(out: Tensor, lse: Tensor, weights: tuple[Tensor, Tensor]) -> Tensor:
    """Weighs every output and every finite lse, each differently."""
    finite = lse.detach() > -torch.inf
    return (out * weights[0]).sum() + (lse * weights[1])[finite].sum()


def gradients(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(weighted_loss(out, lse, loss_weights(out, lse)), (q, k, v))
