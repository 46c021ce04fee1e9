"""Alternatives to ringspan, for benchmarks and for `ringspan verify`: torch on one process, and other rings.

`masked_sdpa` and `blockwise_flex` compute the same function as ringspan: the score of a key that is seen through m
branches gets log(m) added. Each prepares its mask or blocks and returns ``attend(q, k, v)`` on (batch, seq, heads,
head_dim). `torch_ring`, `ring_attention_pytorch` and `all_gather` compute plain attention on the ranks of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ringspan.geometry import Dilated, Pattern, SegmentBranch

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
_MASK_ROWS = 512  # rows of a mask that are computed at a time


def masked_sdpa(pattern: Pattern, n: int, heads: int, *, causal: bool, dtype: torch.dtype = torch.float32) -> Attend:
    """`scaled_dot_product_attention` with the pattern as an additive mask (1, heads, n, n), which is created here."""
    mask = log_counts(pattern, n, heads, causal=causal, dtype=dtype)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    return attend


def log_counts(pattern: Pattern, n: int, heads: int, *, causal: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    """log m(p, t) of each head, computed in blocks of rows, so that only the mask itself has n x n numbers per head."""
    mask = torch.empty(1, heads, n, n, dtype=dtype)
    for head in range(heads):
        for start in range(0, n, _MASK_ROWS):
            stop = min(n, start + _MASK_ROWS)
            count = torch.zeros(stop - start, n, dtype=torch.promote_types(dtype, torch.float32))
            for branch in pattern.branches(n, heads):
                assert isinstance(branch, SegmentBranch)
                x = torch.arange(n) + branch.shift
                segment = x // branch.segment_length
                chosen = x % branch.segment_length % branch.rate == branch.offsets[head]
                count += (segment[start:stop, None] == segment) & chosen[start:stop, None] & chosen
            if causal:
                count *= torch.arange(n) <= torch.arange(start, stop)[:, None]
            mask[0, head, start:stop] = count.log()
    return mask


def blockwise_flex(pattern: Dilated, n: int, heads: int, *, causal: bool) -> Attend:
    """Compiled FlexAttention with a block mask, which is created here. The first call compiles. Forward only on CPUs.

    If lengths and rates are powers of two, segments and offsets are bit operations: divisions are several times slower.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention, noop_mask  # noqa: PLC0415

    count = branch_counter(pattern, heads, causal=causal)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, p: Tensor, t: Tensor) -> Tensor:
        return score + torch.log(count(h, p, t).to(score.dtype))

    def mask_mod(b: Tensor, h: Tensor, p: Tensor, t: Tensor) -> Tensor:
        return count(h, p, t) > 0

    with torch.no_grad():
        blocks = create_block_mask(mask_mod, 1, heads, n, n, device="cpu", _compile=True)
    blocks.mask_mod = noop_mask  # score_mod already masks: the pattern need not be computed twice
    compiled = torch.compile(flex_attention)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = compiled(q, k, v, score_mod=score_mod, block_mask=blocks)
        return out.transpose(1, 2)

    return attend


def branch_counter(pattern: Dilated, heads: int, *, causal: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """m(p, t) of head h, in operations that FlexAttention can trace."""
    pairs = list(zip(pattern.segment_lengths, pattern.dilation_rates, strict=True))
    powers = all(x & (x - 1) == 0 for pair in pairs for x in pair) and all(r <= w for w, r in pairs)
    bits = powers and pattern.head_offsets == "interleaved" and pattern.shift == 0
    first, total_heads = pattern.first_head, pattern.total_heads or heads

    def by_bits(w: int, r: int, h: Tensor, p: Tensor, t: Tensor) -> Tensor:
        """p and t are in the same segment, and both have the head's offset."""
        return (((p ^ t) & -w) | ((p ^ h) & (r - 1)) | ((t ^ h) & (r - 1))) == 0

    def by_division(w: int, r: int, h: Tensor, p: Tensor, t: Tensor) -> Tensor:
        offset = h % r if pattern.head_offsets == "interleaved" else h // -(-total_heads // r)
        return (p // w == t // w) & (p % w % r == offset) & (t % w % r == offset)

    def count(h: Tensor, p: Tensor, t: Tensor) -> Tensor:
        total: Any = 0
        for w, r in pairs:
            x, y = (p, t) if bits else (p + pattern.shift, t + pattern.shift)
            total = total + (by_bits if bits else by_division)(w, r, h + first, x, y).int()
        return total * (t <= p).int() if causal else total

    return count


class GroupAttention(Protocol):
    """Attention on the ranks of a group: the signature that `ringspan verify --attention` expects.

    A function that supports packed documents also has a parameter ``lengths``, a tuple of ints with a default.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor: ...


def torch_ring(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """torch's own context-parallel ring (private functions) with the CPU flash operator. Rows are in zigzag order."""
    if k.shape[2] != q.shape[2]:
        raise NotImplementedError(
            f"{k.shape[2]} KV heads for {q.shape[2]} heads: the CPU flash operator needs as many KV heads as heads"
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
    """ring_flash_attn of ring-attention-pytorch (PyPI), with its default bucket size.

    It supports the default group only. On one process its ring is disabled, since gloo cannot send to itself.
    ``striped`` balances causal work if rows are assigned to ranks one by one.
    """
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn  # noqa: PLC0415

    options = dict(bucket_size=min(bucket_size, q.shape[1]), ring_reduce_col=dist.get_world_size(group) > 1)
    out: Tensor = ring_flash_attn(q, k, v, causal=causal, striped_ring_attn=striped, **options)
    return out


ring_attention_pytorch.equal_shards = True  # type: ignore[attr-defined]


def all_gather(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """Gather all keys and values, then attend to them: correct, but every rank holds the whole sequence."""
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
    """All-gather of rows along the sequence. Backward sums the gradients of all ranks and returns this rank's rows."""

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

    _attention._cp_options.enable_load_balance = causal  # rows are in zigzag order then
    return _attention
