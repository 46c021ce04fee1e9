"""Rank tests of decoding: prefill over a ring, gathered and sharded caches, and steps on real gloo processes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ringspan as rs
from ringspan.decoding import Sampler
from ringspan.models import Decoder, LongNet, LongNetConfig
from ringspan.oracle import dense_attention
from tests.exactness import inputs, random_sinks
from tests.ranks import on_ranks


def close(x: Tensor, y: Tensor) -> None:
    torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def _random_pattern() -> rs.Pattern:
    kind = random.random()
    if kind < 0.1:
        return rs.Full()
    if kind < 0.4:
        left, right, dilation = [0, 1, 4, 9, 16, 30, 200], [0, 3], [1, 1, 2, 3, 5]
        return rs.Window(*(random.choice(numbers) for numbers in (left, right, dilation)))
    if kind < 0.6:
        return _random_pattern() + _random_pattern()
    branches = random.randint(1, 3)
    return rs.Dilated(
        tuple(random.randint(1, 40) for _ in range(branches)),
        tuple(random.randint(1, 5) for _ in range(branches)),
        random.choice(["interleaved", "blocked"]),
        random.choice([0, 0, 3, 17]),
    )


@on_ranks(2, 3, 4)
def test_prefill_over_the_ring_then_steps() -> None:
    """Random patterns, layouts and lengths; gathered and sharded caches; single steps and blocks after the prompt."""
    for case in range(40):
        ring = rs.Ring(layout=["contiguous", "zigzag"][case % 2])  # type: ignore[arg-type]
        sharded = case % 4 >= 2
        pattern, kv_heads, group = _random_pattern(), random.randint(1, 4), random.randint(1, 2)
        batch, n, more = random.randint(1, 2), random.choice([1, 2, 7, 31, 50, 77]), 25
        q, k, v = (x.detach() for x in inputs(batch, n + more, kv_heads, group, 4))
        shape = random.choice([None, q.shape[2:3], q.shape[:3]])
        sinks = None if shape is None else random_sinks(tuple(shape)).detach()
        cap: dict[str, Any] = dict(softcap=random.choice([None, None, 0.7, 30.0]))
        wanted, wanted_lse = dense_attention(q, k, v, pattern=pattern, causal=True, sinks=sinks, **cap)
        cache = rs.Cache(
            pattern, batch=batch, kv_heads=kv_heads, head_dim=4, dtype=q.dtype, ring=ring if sharded else None
        )
        mine = [ring.split_sequence(x[:, :n]) for x in (q, k, v)]
        own = ring.split_sequence(sinks[:, :n]) if sinks is not None and sinks.dim() == 3 else sinks
        seq_len = random.choice([n, None])
        out, lse = rs.attention_prefill(*mine, cache, ring=ring, seq_len=seq_len, sinks=own, return_lse=True, **cap)
        close(out, ring.split_sequence(wanted[:, :n]))
        close(lse, ring.split_sequence(wanted_lse[:, :, :n], dim=2))
        _check_shares(cache)
        at = n
        for rows in (1, 1, 1, 7, 1, 1, 13):
            block = [x[:, at : at + rows] for x in (q, k, v)]
            now = sinks[:, at : at + rows] if sinks is not None and sinks.dim() == 3 else sinks
            out, lse = rs.attention_step(*block, cache, return_lse=True, sinks=now, **cap)
            close(out, wanted[:, at : at + rows])
            close(lse, wanted_lse[:, :, at : at + rows])
            at += rows
            _check_shares(cache)


@on_ranks(2, 3, 4)
def test_a_sharded_cache_that_is_filled_by_steps() -> None:
    """Random patterns, in random blocks from the first token on."""
    ring = rs.Ring()
    for _ in range(30):
        pattern, kv_heads, batch = _random_pattern(), random.randint(1, 3), random.randint(1, 2)
        sizes = random.choices([1, 1, 1, 2, 5, 17], k=12)
        q, k, v = (x.detach() for x in inputs(batch, sum(sizes), kv_heads, 2, 4))
        wanted, wanted_lse = dense_attention(q, k, v, pattern=pattern, causal=True)
        cache = rs.Cache(pattern, batch=batch, kv_heads=kv_heads, head_dim=4, dtype=q.dtype, ring=ring)
        at = 0
        for rows in sizes:
            out, lse = rs.attention_step(*(x[:, at : at + rows] for x in (q, k, v)), cache, return_lse=True)
            close(out, wanted[:, at : at + rows])
            close(lse, wanted_lse[:, :, at : at + rows])
            at += rows
            _check_shares(cache)


def _check_shares(cache: rs.Cache) -> None:
    """Sharded, the rows of all ranks are those of a cache that holds them all, and new ones are dealt evenly."""
    heads = range(cache.kv_heads)
    held = torch.tensor([cache.rows_held(0, head) for head in heads])
    if cache.ring is None:
        assert cache.bound is None or held.max() <= cache.bound
        return
    everybody = [torch.empty_like(held) for _ in range(cache.ring.size)]
    dist.all_gather(everybody, held)
    total = torch.stack(everybody).sum(0)
    assert cache.bound is None or total.max() <= cache.bound
    if cache.pattern == rs.Full():
        assert set(total.tolist()) == set(cache.lengths[:1])


@on_ranks(2, 3)
def test_prompts_of_different_lengths() -> None:
    for sharded in (False, True):
        for lengths in ((5, 40, 0, 17), (33,), (1, 1)):
            ring = rs.Ring()
            pattern = rs.Dilated((8, 24, 64), (1, 3, 4), shift=5) + rs.Window(12) + rs.Window(20, dilation=4)
            texts = [[x.detach() for x in inputs(1, length + 9, 3, 2, 4)] for length in lengths]
            wanted = [dense_attention(*text, pattern=pattern, causal=True)[0] for text in texts]
            packed = [torch.cat([t[i][:, :n] for t, n in zip(texts, lengths, strict=True)], 1) for i in range(3)]
            cache = rs.Cache(
                pattern,
                batch=len(lengths),
                kv_heads=3,
                head_dim=4,
                dtype=torch.float64,
                ring=ring if sharded else None,
            )
            mine = [ring.split_sequence(x) for x in packed]
            out = rs.attention_prefill(*mine, cache, ring=ring, lengths=lengths)
            whole = torch.cat([w[:, :n] for w, n in zip(wanted, lengths, strict=True)], 1)
            close(out, ring.split_sequence(whole))
            for step in range(9):
                rows = [torch.cat([t[i][:, [n + step]] for t, n in zip(texts, lengths, strict=True)]) for i in range(3)]
                out = rs.attention_step(*rows, cache)
                close(out, torch.cat([w[:, [n + step]] for w, n in zip(wanted, lengths, strict=True)]))


@on_ranks(2, 3)
def test_a_sharded_cache_is_spread_evenly_after_whole_segments() -> None:
    ring = rs.Ring()
    pattern = rs.Dilated((48, 192), (1, 4)) + rs.Window(63)
    cache = rs.Cache(pattern, kv_heads=1, head_dim=4, ring=ring)
    x = torch.randn(1, 400, 1, 4)
    most = 0
    for p in range(400):
        rs.attention_step(x[:, [p]], x[:, [p]], x[:, [p]], cache)
        most = max(most, cache.rows_held(0, 0))
    # Both branches of segments are full at the end of a long segment, and the window after 64 tokens.
    assert most <= 2 * -(-48 // ring.size) + -(-64 // ring.size)
    assert most >= 2 * (48 // ring.size) + 64 // ring.size


@on_ranks(2, 3)
def test_the_window_of_a_prompt_is_spread_evenly() -> None:
    """Also if one rank held all of it."""
    ring = rs.Ring(layout="contiguous")
    cache = rs.Cache(rs.Window(19), kv_heads=1, head_dim=4, ring=ring)
    x = ring.split_sequence(torch.randn(1, 120, 1, 4))
    rs.attention_prefill(x, x, x, cache, ring=ring)
    assert cache.rows_held(0, 0) in (20 // ring.size, -(-20 // ring.size))
    assert cache.nbytes == 2 * -(-20 // ring.size) * 4 * 4


@on_ranks(2, 3)
def test_transposed_prompts_fill_gathered_and_sharded_caches() -> None:
    pattern = rs.Dilated((8, 32), (1, 4))
    q, k, v = (x.detach() for x in inputs(1, 40, 2, 2, 4))
    wanted, _ = dense_attention(q, k, v, pattern=pattern, causal=True)
    for ring in (rs.Ring(), rs.Ring(layout="contiguous")):
        mine = [ring.split_sequence(x[:, :30]).transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v)]
        for sharded in (False, True):
            cache = rs.Cache(pattern, kv_heads=2, head_dim=4, dtype=q.dtype, ring=ring if sharded else None)
            rs.attention_prefill(*mine, cache, ring=ring)
            close(rs.attention_step(*(x[:, 30:] for x in (q, k, v)), cache), wanted[:, 30:])


@on_ranks(2, 3)
def test_prefill_in_bfloat16() -> None:
    ring = rs.Ring()
    pattern = rs.Dilated((16, 64), (1, 4))
    q, k, v = (x.detach() for x in inputs(1, 60, 2, 2, 16, torch.bfloat16))
    caches = [rs.Cache(pattern, kv_heads=2, head_dim=16, dtype=q.dtype) for _ in range(2)]
    rs.attention_prefill(*(ring.split_sequence(x[:, :50]) for x in (q, k, v)), caches[0], ring=ring)
    rs.attention_step(*(x[:, :50] for x in (q, k, v)), caches[1])
    found, wanted = ([rs.attention_step(q[:, [p]], k[:, [p]], v[:, [p]], c) for p in range(50, 60)] for c in caches)
    torch.testing.assert_close(torch.cat(found), torch.cat(wanted), rtol=2**-7, atol=2**-8)


@on_ranks(2, 3)
def test_a_model_generates_the_same_over_the_ring_as_alone() -> None:
    torch.manual_seed(1)
    config = LongNetConfig.named("nano", patterns=("16x1,64x4", "16x1,64x4 shift 8"), kv_heads=1)
    model = LongNet(config).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)  # so that logits are far apart
    ring = rs.Ring()
    for counts in ((50,), (40, 40), (30, 7)):
        prompts = [torch.randint(256, (n,)) for n in counts]
        texts = []
        for held_by, sharded in ((None, False), (ring, False), (ring, True)):
            decoder = Decoder(model, len(counts), ring=held_by, sharded=sharded)
            stream = decoder.stream(prompts, Sampler(temperature=0))
            texts.append([next(stream).tolist() for _ in range(40)])
        assert texts[0] == texts[1] == texts[2]


@on_ranks(2, 3)
def test_misuse_raises() -> None:
    ring, other = rs.Ring(), rs.Ring(layout="contiguous")
    x = torch.randn(1, 20, 2, 4)
    mine = ring.split_sequence(x)
    options: dict[str, Any] = dict(kv_heads=2, head_dim=4)
    cache = rs.Cache(rs.Full(), **options)
    rs.attention_step(x, x, x, cache)
    with pytest.raises(ValueError, match=r"has seen \(20,\) tokens"):
        rs.attention_prefill(mine, mine, mine, cache, ring=ring)
    with pytest.raises(ValueError, match="cache is sharded over"):
        rs.attention_prefill(mine, mine, mine, rs.Cache(rs.Full(), ring=other, **options), ring=ring)
    sharded = rs.Cache(rs.Full(), ring=ring if ring.rank else None, **options)
    with pytest.raises(rs.RingError, match="ranks disagree on cache: gathered on rank 0; sharded on rank"):
        rs.attention_prefill(mine, mine, mine, sharded, ring=ring)


@on_ranks(2, 3)
def test_different_prompts_raise_before_anything_is_sent() -> None:
    ring, other_rank = rs.Ring(), dist.get_rank() > 0
    mine = ring.split_sequence(torch.randn(1, 40, 2, 4))

    def prefill(pattern: rs.Pattern, *, q: Tensor = mine, batch: int = 1, **options: Any) -> None:
        cache = rs.Cache(pattern, kv_heads=2, head_dim=4, batch=batch)
        rs.attention_prefill(q, mine, mine, cache, ring=ring, **options)

    pattern = rs.Dilated((8, 32), (1, 4))
    with pytest.raises(rs.RingError, match=r"disagree on pattern: .* on rank 0; "):
        prefill(rs.Dilated((8, 32), (1, 2)) if other_rank else pattern)
    with pytest.raises(rs.RingError, match=r"ranks disagree on lengths: \(11, 29\) on rank 0; \(10, 30\) on rank"):
        prefill(pattern, batch=2, lengths=(10, 30) if other_rank else (11, 29))
    with pytest.raises(rs.RingError, match=r"ranks disagree on softcap: 2.0 on rank 0; None on rank"):
        prefill(pattern, softcap=None if other_rank else 2.0)
    with pytest.raises(rs.RingError, match=r"ranks disagree on sinks: none on rank 0; \[0.0, 0.0\] on rank"):
        prefill(pattern, sinks=torch.zeros(2) if other_rank else None)
    with pytest.raises(rs.RingError, match=r"ranks disagree on scale: 2.0 on rank 0; 1.0 on rank"):
        prefill(pattern, scale=1.0 if other_rank else 2.0)
    with pytest.raises(
        rs.RingError, match=r"ranks disagree on batch, heads, kv_heads, head_dim: \[1, 2, 2, 4\] on rank 0"
    ):
        prefill(pattern, q=mine.repeat(1, 1, 2, 1) if other_rank else mine)
    prefill(pattern, batch=400, lengths=(40, *[0] * 399))  # however many prompts there are
