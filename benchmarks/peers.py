"""ringspan on one device, beside what torch itself offers for a dilated pattern: each a task for a process of its own.

All compute the same function (`ringspan.tools.peers` says how); the checksum shows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

import ringspan as rs
from benchmarks.memory import Measured, median_time
from ringspan.runtime.device import Cpu
from ringspan.tools.peers import blockwise_flex, masked_sdpa

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
    _, growth = Cpu().peak_growth(lambda: rs.attention(q, k, v, pattern=pattern_up_to(), causal=causal))
    return Measured(peak_bytes=growth)


def sdpa_task(n: int, causal: bool, trials: int) -> Measured:
    """Scaled dot-product attention with the pattern as an additive mask (heads, n, n)."""
    q, k, v = qkv(n)
    attend, mask_bytes = Cpu().peak_growth(lambda: masked_sdpa(pattern_up_to(), n, HEADS, causal=causal))
    found = _measure(lambda: attend(q, k, v), trials)
    # The mask is part of what this way needs; the attention itself runs on top of it.
    return Measured(found.seconds, found.peak_bytes + mask_bytes, found.checksum)


def flex_task(n: int, causal: bool, trials: int) -> Measured:
    """FlexAttention, compiled, with a block mask; forward only, as the CPU backend offers."""
    q, k, v = qkv(n)
    with torch.no_grad():
        attend, mask_bytes = Cpu().peak_growth(lambda: blockwise_flex(pattern_up_to(), n, HEADS, causal=causal))
        found = _measure(lambda: attend(q, k, v), trials)
    return Measured(found.seconds, max(found.peak_bytes, mask_bytes), found.checksum)


def _measure(call: Callable[[], Tensor], trials: int) -> Measured:
    result = call()  # warm up, compile
    checksum = result.double().square().mean().sqrt().item()
    del result
    start = time.perf_counter()
    _, growth = Cpu().peak_growth(call)
    seconds = time.perf_counter() - start
    return Measured(median_time(call, trials) if trials > 1 else seconds, growth, checksum)
