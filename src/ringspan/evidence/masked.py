"""What torch itself offers for a dilated pattern on one process: SDPA with the pattern as a mask, and FlexAttention.

Both compute the same function as ringspan: a key that is seen through m branches gets log(m) added to its score. Each
function here prepares a call (the mask, the blocks) and returns it: ``attend(q, k, v)`` on (batch, seq, heads, dim).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ringspan.geometry import Dilated, Pattern

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
_MASK_ROWS = 512  # rows of a mask that are worked out at a time


def masked_sdpa(pattern: Pattern, n: int, heads: int, *, causal: bool, dtype: torch.dtype = torch.float32) -> Attend:
    """`scaled_dot_product_attention` with the pattern as an additive mask (1, heads, n, n), which is made here."""
    mask = log_counts(pattern, n, heads, causal=causal, dtype=dtype)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    return attend


def log_counts(pattern: Pattern, n: int, heads: int, *, causal: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    """log m(p, t) for each head: block of rows by block, so that only the mask itself has n x n numbers for a head."""
    mask = torch.empty(1, heads, n, n, dtype=dtype)
    for head in range(heads):
        for start in range(0, n, _MASK_ROWS):
            stop = min(n, start + _MASK_ROWS)
            count = torch.zeros(stop - start, n, dtype=torch.promote_types(dtype, torch.float32))
            for branch in pattern.branches(n):
                x = torch.arange(n) + branch.shift
                segment = x // branch.segment_length
                chosen = x % branch.segment_length % branch.rate == pattern.offsets(branch.rate, heads)[head]
                count += (segment[start:stop, None] == segment) & chosen[start:stop, None] & chosen
            if causal:
                count *= torch.arange(n) <= torch.arange(start, stop)[:, None]
            mask[0, head, start:stop] = count.log()
    return mask


def blockwise_flex(pattern: Dilated, n: int, heads: int, *, causal: bool) -> Attend:
    """Compiled FlexAttention with a block mask, which is made here; the first call compiles. Forward only on CPUs.

    Given every chance: where lengths and rates are powers of two, segments and offsets are bit operations (with
    divisions it is several times slower).
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention, noop_mask  # noqa: PLC0415

    count = branch_counter(pattern, heads, causal=causal)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, p: Tensor, t: Tensor) -> Tensor:
        return score + torch.log(count(h, p, t).to(score.dtype))

    def mask_mod(b: Tensor, h: Tensor, p: Tensor, t: Tensor) -> Tensor:
        return count(h, p, t) > 0

    with torch.no_grad():
        blocks = create_block_mask(mask_mod, 1, heads, n, n, device="cpu", _compile=True)
    blocks.mask_mod = noop_mask  # the scores hide what the pattern hides: no need to work it out twice
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
        """p and t differ in no bit of the segment's number, and both have the head's offset."""
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
