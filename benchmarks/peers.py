"""What torch itself offers for a dilated pattern, each as a task for a process of its own.

Both compute the same function as ringspan: a key that is seen through m branches gets log(m) added
to its score. The checksum shows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import ringspan as rs
from benchmarks.memory import Measured, median_time
from ringspan.measure import peak_growth

HEADS, DIM = 8, 64


def pattern_up_to(longest: int = 32768) -> rs.Dilated:
    """Segments 2048, 4096 .. with rates 1, 2 ..: LongNet's geometric series."""
    lengths = [2048 * 2**i for i in range(16) if 2048 * 2**i <= longest]
    return rs.Dilated(tuple(lengths), tuple(2**i for i in range(len(lengths))))


def qkv(n: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, n, HEADS, DIM, generator=generator) for _ in range(3)]


def ringspan_task(n: int, causal: bool, trials: int) -> Measured:
    q, k, v = qkv(n)
    return _measure(lambda: rs.attention(q, k, v, pattern=pattern_up_to(), causal=causal), trials)


def memory_task(n: int, causal: bool) -> Measured:
    """Peak growth of one forward pass, warmed up at a short length, so that no allocator has kept what it needs."""
    small = qkv(1024)
    rs.attention(*small, pattern=pattern_up_to(), causal=causal)
    q, k, v = qkv(n)
    _, growth = peak_growth(lambda: rs.attention(q, k, v, pattern=pattern_up_to(), causal=causal))
    return Measured(peak_bytes=growth)


def sdpa_task(n: int, causal: bool, trials: int) -> Measured:
    """Scaled dot-product attention with the pattern as an additive mask (heads, n, n)."""
    q, k, v = (x.transpose(1, 2) for x in qkv(n))

    def run() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    mask, mask_bytes = peak_growth(lambda: _log_counts(n, causal))
    found = _measure(run, trials)
    # The mask is part of what this way needs; the attention itself runs on top of it.
    return Measured(found.seconds, found.peak_bytes + max(mask_bytes, mask.nbytes), found.checksum)


def flex_task(n: int, causal: bool, trials: int) -> Measured:
    """FlexAttention, compiled, with a block mask; forward only, as the CPU backend offers.

    Given every chance: lengths and rates are powers of two, so segments and offsets are bit operations (with
    divisions it is several times slower).
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention, noop_mask  # noqa: PLC0415

    branches = [(b.segment_length, b.rate) for b in pattern_up_to().branches(n)]

    def count(h: Tensor, p: Tensor, t: Tensor) -> Tensor:
        """A branch sees p and t if they differ in no bit of the segment's number and both have the head's offset."""
        total: Any = 0
        for w, r in branches:
            total = total + ((((p ^ t) & -w) | ((p ^ h) & (r - 1)) | ((t ^ h) & (r - 1))) == 0).int()
        return total * (t <= p).int() if causal else total

    def score_mod(score: Tensor, b: Tensor, h: Tensor, p: Tensor, t: Tensor) -> Tensor:
        return score + torch.log(count(h, p, t).to(score.dtype))

    def mask_mod(b: Tensor, h: Tensor, p: Tensor, t: Tensor) -> Tensor:
        return count(h, p, t) > 0

    q, k, v = (x.transpose(1, 2) for x in qkv(n))
    compiled = torch.compile(flex_attention)
    with torch.no_grad():
        mask, mask_bytes = peak_growth(lambda: create_block_mask(mask_mod, 1, HEADS, n, n, device="cpu", _compile=True))
        mask.mask_mod = noop_mask  # the scores hide what the pattern hides: no need to work it out twice
        found = _measure(
            lambda: compiled(q, k, v, score_mod=score_mod, block_mask=mask).transpose(1, 2),
            trials,
        )
    return Measured(found.seconds, max(found.peak_bytes, mask_bytes), found.checksum)


def _log_counts(n: int, causal: bool) -> Tensor:
    """log m(p, t), row block by row block, so that only the mask itself has n x n elements for each head."""
    mask = torch.empty(1, HEADS, n, n)
    t = torch.arange(n)
    for h in range(HEADS):
        for start in range(0, n, 512):
            p = torch.arange(start, min(n, start + 512))[:, None]
            count = torch.zeros(len(p), n)
            for branch in pattern_up_to().branches(n):
                w, r = branch.segment_length, branch.rate
                count += (p // w == t // w) & (p % w % r == h % r) & (t % w % r == h % r)
            if causal:
                count *= t <= p
            mask[0, h, start : start + len(p)] = count.log()
    return mask


def _measure(call: Callable[[], Tensor], trials: int) -> Measured:
    result = call()  # warm up, compile
    checksum = result.double().square().mean().sqrt().item()
    del result
    start = time.perf_counter()
    _, growth = peak_growth(call)
    seconds = time.perf_counter() - start
    return Measured(median_time(call, trials) if trials > 1 else seconds, growth, checksum)
