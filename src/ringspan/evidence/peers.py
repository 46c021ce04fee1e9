"""Other ways to compute plain attention over a group, behind the signature that `ringspan verify --attention` takes.

    function(q, k, v, *, causal, group) -> out

q, k, v and out are this rank's rows, (batch, rows, heads, dim); k and v may have fewer heads. Which rows those are, the
attribute ``layout`` says: ``"contiguous"`` unless it is set. A function that hangs or crashes unless every rank holds
equally many rows sets ``equal_shards = True``; anything else that it does not support, it raises on every rank. A peer
that is not installed raises ImportError when it is called.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class Attention(Protocol):
    """What `--attention` points at."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor: ...


def torch_ring(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """torch's own context-parallel ring (private functions) with the CPU flash operator; rows lie in zigzag order."""
    if k.shape[2] != q.shape[2]:
        raise NotImplementedError(
            "the CPU flash operator reads past the end of k and v if they have fewer heads than q"
        )
    return _TorchRing.apply(q, k, v, causal, group)


torch_ring.layout = "zigzag"  # type: ignore[attr-defined]
torch_ring.equal_shards = True  # type: ignore[attr-defined]


def ring_attention_pytorch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    group: dist.ProcessGroup,
    bucket_size: int = 1024,
    striped: bool = False,
) -> Tensor:
    """ring_flash_attn of ring-attention-pytorch (PyPI); its bucket size is the one that it takes unless told.

    It knows the default group only. On one process its ring would send to itself, which gloo refuses: there it has
    none. ``striped`` balances causal work, if rows are dealt out one by one.
    """
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn  # noqa: PLC0415

    options = dict(bucket_size=min(bucket_size, q.shape[1]), ring_reduce_col=dist.get_world_size(group) > 1)
    out: Tensor = ring_flash_attn(q, k, v, causal=causal, striped_ring_attn=striped, **options)
    return out


ring_attention_pytorch.equal_shards = True  # type: ignore[attr-defined]


def all_gather(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """Gather all keys and values, then attend own queries to them: right, but every rank holds the whole sequence."""
    keys, values = (_GatherWhole.apply(x, group) for x in (k, v))
    rows, first = q.shape[1], q.shape[1] * dist.get_rank(group)
    grouped = k.shape[2] != q.shape[2]
    q, keys, values = (x.transpose(1, 2) for x in (q, keys, values))
    if not causal:
        return scaled_dot_product_attention(q, keys, values, enable_gqa=grouped).transpose(1, 2)
    positions = torch.arange(first, first + rows, device=q.device)
    mask = torch.arange(keys.shape[2], device=q.device) <= positions[:, None]
    return scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=grouped).transpose(1, 2)


all_gather.equal_shards = True  # type: ignore[attr-defined]


class _GatherWhole(torch.autograd.Function):
    """Rows of all ranks, end to end; backward sums the gradients of all ranks and takes this one's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.rows = group, x.shape[1]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.narrow(1, ctx.rows * dist.get_rank(ctx.group), ctx.rows), None


class _TorchRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, group: dist.ProcessGroup) -> Tensor:
        module, aten = _torch_module(causal), torch.ops.aten
        tensors = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        forward = aten._scaled_dot_product_flash_attention_for_cpu
        out, lse, *_ = module._templated_ring_attention(group, 2, forward, *tensors, is_causal=causal)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.causal, ctx.group = causal, group
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        found = _torch_module(ctx.causal)._templated_ring_attention_backward(
            ctx.group,
            2,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
            grad_out=grads[0].transpose(1, 2).contiguous(),
            grad_out_name="grad_out",
            query=q,
            key=k,
            value=v,
            out=out,
            logsumexp=lse,
            is_causal=ctx.causal,
            dropout_p=0.0,
        )
        dq, dk, dv = (x.transpose(1, 2) for x in found[:3])
        return dq, dk, dv, None, None


def _torch_module(causal: bool) -> Any:
    from torch.distributed.tensor.experimental._context_parallel import _attention  # noqa: PLC0415

    _attention._cp_options.enable_load_balance = causal  # rows lie in zigzag order then
    return _attention
