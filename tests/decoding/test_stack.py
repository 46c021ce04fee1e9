"""A stack of layers like Gemma 3: five windows, then one layer of full attention, decoded token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ringspan as rs

HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4, 2, 4, 50
WIDTH = HEADS * HEAD_DIM


class Layer(nn.Module):
    """Attention with soft caps and sinks of its own, and a residual. No norm: it could hide a wrong scale."""

    def __init__(self, pattern: rs.Pattern, softcap: float | None) -> None:
        super().__init__()
        self.pattern, self.softcap = pattern, softcap
        self.project = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def forward(self, x: Tensor, cache: rs.Cache | None) -> Tensor:
        heads = self.project(x).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=2)
        if cache is None:
            out = rs.attention(q, k, v, pattern=self.pattern, causal=True, sinks=self.sinks, softcap=self.softcap)
        else:
            out = rs.attention_step(q, k, v, cache, sinks=self.sinks, softcap=self.softcap)
        return x + self.output(out.flatten(2))


class Stack(nn.Module):
    def __init__(self, patterns: list[rs.Pattern], softcap: float | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(pattern, softcap) for pattern in patterns)

    def forward(self, tokens: Tensor, caches: list[rs.Cache] | None = None) -> Tensor:
        x = self.embedding(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, caches[i] if caches else None)
        return x @ self.embedding.weight.mT


def decode_and_compare(windows: list[rs.Pattern], tokens: int, prompt: int, softcap: float | None = None) -> None:
    """Logits at every position equal a full forward pass; each cache reaches its bound and stays there."""
    patterns = [*windows, rs.Full()]
    model = Stack(patterns, softcap).double()
    text = torch.randint(VOCABULARY, (1, tokens))
    caches = [rs.Cache(p, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float64) for p in patterns]
    with torch.no_grad():
        wanted = model(text)
        found = [model(text[:, :prompt], caches)]
        for p in range(prompt, tokens):
            found.append(model(text[:, p : p + 1], caches))
            for cache in caches[:-1]:
                assert cache.rows_held(0, 0) == min(p + 1, cache.bound)  # type: ignore[type-var]
    torch.testing.assert_close(torch.cat(found, 1), wanted, rtol=0, atol=1e-10)
    for cache in caches[:-1]:
        assert cache.bound is not None
        assert cache.nbytes == 2 * KV_HEADS * cache.bound * HEAD_DIM * 8
    assert caches[-1].rows_held(0, 0) == tokens


def sizes(*left: int) -> list[rs.Pattern]:
    return [rs.Window(rows) for rows in left]


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("prompt", [1, 77])
def test_logits_equal_a_full_forward_pass(prompt: int, softcap: float | None) -> None:
    decode_and_compare([*sizes(0, 15, 16, 63), rs.Window(37, dilation=4)], 400, prompt, softcap)


@pytest.mark.slow
def test_ten_thousand_tokens() -> None:
    decode_and_compare([*sizes(511, 1023, 1023, 100), rs.Window(2047, dilation=3)], 10_000, 3_000)
