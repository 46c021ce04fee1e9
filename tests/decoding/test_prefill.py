"""Prefill over a simulated ring fills the cache as steps do. Real ranks are in test_ranks.py."""

from typing import Any

import pytest
import torch

import ringspan as rs
from ringspan.oracle import dense_attention
from tests.exactness import inputs, random_sinks


@pytest.mark.parametrize("lengths", [None, (20, 0, 31)])
def test_prefill_over_a_simulated_ring(lengths: tuple[int, ...] | None) -> None:
    pattern = rs.Dilated((8, 32), (1, 4), shift=3) + rs.Window(9, dilation=2)
    q, k, v = (x.detach() for x in inputs(1, 51, 2, 2, 4))
    scores: dict[str, Any] = dict(softcap=5.0, sinks=random_sinks((1, 51, 4)).detach())
    texts = 1 if lengths is None else len(lengths)
    cache = rs.Cache(pattern, kv_heads=2, head_dim=4, batch=texts, dtype=q.dtype)
    out = rs.attention_prefill(q, k, v, cache, ring=rs.SimulatedRing(3), lengths=lengths, **scores)
    wanted, _ = dense_attention(q, k, v, pattern=pattern, causal=True, lengths=lengths, **scores)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    assert cache.lengths == (lengths or (51,))
    again = rs.Cache(pattern, kv_heads=2, head_dim=4, batch=texts, dtype=q.dtype)
    rs.attention_step(q, k, v, again, lengths=lengths)
    x = torch.randn(3, texts, 1, 4, 4, dtype=q.dtype)
    rows = (x[0], x[1][:, :, :2], x[2][:, :, :2])
    assert torch.equal(rs.attention_step(*rows, cache), rs.attention_step(*rows, again))


def test_prefill_with_transposed_tensors() -> None:
    pattern = rs.Dilated((8, 32), (1, 4))
    q, k, v = (x.detach() for x in inputs(1, 40, 2, 2, 4))
    transposed = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v)]
    cache = rs.Cache(pattern, kv_heads=2, head_dim=4, dtype=q.dtype)
    rs.attention_prefill(*(x[:, :30] for x in transposed), cache, ring=rs.SimulatedRing(2))
    wanted, _ = dense_attention(q, k, v, pattern=pattern, causal=True)
    found = rs.attention_step(*(x[:, 30:] for x in (q, k, v)), cache)
    torch.testing.assert_close(found, wanted[:, 30:], rtol=0, atol=1e-12)


def test_sinks_and_soft_caps_are_checked() -> None:
    x = torch.zeros(1, 8, 2, 4)
    for change, reason in (
        (dict(softcap=-1.0), "softcap=-1.0: must be positive"),
        (dict(sinks=torch.zeros(3)), r"sinks has shape \(3,\)"),
        (dict(sinks=torch.zeros(2, requires_grad=True)), "sinks requires gradients"),
    ):
        cache = rs.Cache(rs.Window(3), kv_heads=2, head_dim=4)
        with pytest.raises(ValueError, match=reason):
            rs.attention_prefill(x, x, x, cache, ring=rs.SimulatedRing(2), **change)  # type: ignore[call-overload]
        assert cache.lengths == (0,)
        rs.attention_step(x, x, x, cache)  # nothing was stored
