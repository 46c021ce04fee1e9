"""Inputs, and a loss that depends on every output, for comparisons with the oracle."""

from functools import partial

import torch
import torch.distributed as dist
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


def assert_ring_equals_oracle(
    ring: rs.Ring,
    tensors: list[Tensor],
    options: dict,  # type: ignore[type-arg]
    seq_len: int | None = None,
    optimize: rs.Optimize = "auto",
) -> None:
    """Output, lse and gradients of this rank's rows within 1e-12 of the definition; bytes equal to the plan's."""
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
    split = partial(ring.split_sequence, lengths=options["lengths"])
    (q, k, v), sinks = tensors, options.get("sinks")
    right, right_lse = dense_attention(q, k, v, **options)
    weights = loss_weights(right, right_lse)
    tensors = tensors if sinks is None else [*tensors, sinks]
    wanted = torch.autograd.grad(weighted_loss(right, right_lse, weights), tensors)
    mine = [(split(x.detach()) if x.dim() > 1 else x.detach()).requires_grad_() for x in tensors]
    ring.reset_counters()
    given = options if sinks is None else {**options, "sinks": mine[3]}
    out, lse = rs.attention(*mine[:3], return_lse=True, ring=ring, seq_len=seq_len, optimize=optimize, **given)
    close(out, split(right))
    close(lse, split(right_lse, dim=2))
    shape = dict(batch=q.shape[0], heads=q.shape[2], kv_heads=k.shape[2], head_dim=q.shape[3], dtype=q.dtype)
    where = dict(ring_size=ring.size, head_ranks=ring.head_ranks, layout=ring.layout, routing=ring.routing)
    what = dict(causal=options["causal"], lengths=options["lengths"], order=options.get("order"), optimize=optimize)
    plan = rs.plan(options["pattern"], q.shape[1], **what, **shape, **where)
    per_row = sinks is not None and sinks.dim() == 3
    if not per_row or ring.head_ranks == 1:  # the plan does not count sinks that head ranks exchange
        assert ring.counters.bytes_sent == plan.bytes_sent(ring.rank)
        assert ring.counters.bytes_received == plan.bytes_received(ring.rank)
    ring.reset_counters()
    local = (split(weights[0]), split(weights[1], dim=2))
    found = list(torch.autograd.grad(weighted_loss(out, lse, local), mine))
    for x, grad in zip(found[:3], wanted[:3], strict=True):
        close(x, split(grad))
    assert ring.counters.bytes_sent == plan.bytes_sent(ring.rank, backward=True)
    assert ring.counters.bytes_received == plan.bytes_received(ring.rank, backward=True)
    assert ring.counters.live_bytes == ring.counters.live_parcel_bytes == 0
    if per_row:
        close(found[3], split(wanted[3]))
    elif sinks is not None:  # as every parameter that all ranks hold
        dist.all_reduce(found[3], group=ring.group)
        close(found[3], wanted[3])
