"""Packed documents as lengths or as offsets (cu_seqlens): the same results everywhere, compiled once."""

from typing import Any

import pytest
import torch
from torch import Tensor

import ringspan as rs
from ringspan.oracle import dense_attention
from ringspan.streaming import TensorRows
from ringspan.validation import document_lengths, lengths_of_offsets_op, packed_lengths

PATTERN = rs.Dilated((16, 40), (1, 3), shift=2)
LENGTHS, OFFSETS = (30, 0, 40), (0, 30, 30, 70)
FORMS = [OFFSETS, list(OFFSETS), torch.tensor(OFFSETS), torch.tensor(OFFSETS, dtype=torch.int32)]


def qkv(requires_grad: bool = False) -> list[Tensor]:
    return [torch.randn(1, 70, 2, 8, dtype=torch.float64, requires_grad=requires_grad) for _ in range(3)]


@pytest.mark.parametrize("offsets", FORMS, ids=["tuple", "list", "int64", "int32"])
@pytest.mark.parametrize("ring", [None, rs.SimulatedRing(3)])
def test_attention_equals_the_oracle(offsets: Any, ring: rs.SimulatedRing | None) -> None:
    tensors = qkv(requires_grad=True)
    out = rs.attention(*tensors, pattern=PATTERN, causal=True, cu_seqlens=offsets, ring=ring)
    wanted, _ = dense_attention(*tensors, pattern=PATTERN, causal=True, lengths=LENGTHS)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    grads = torch.autograd.grad(out.square().sum(), tensors)
    for found, expected in zip(grads, torch.autograd.grad(wanted.square().sum(), tensors), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_decoding_takes_offsets() -> None:
    q, k, v = qkv()
    results = []
    for documents in (dict(lengths=LENGTHS), dict(cu_seqlens=OFFSETS), dict(cu_seqlens=torch.tensor(OFFSETS))):
        cache, filled = (rs.Cache(PATTERN, kv_heads=2, head_dim=8, batch=3, dtype=q.dtype) for _ in range(2))
        out = rs.attention_step(q, k, v, cache, **documents)  # type: ignore[call-overload]
        again = rs.attention_prefill(q, k, v, filled, ring=rs.SimulatedRing(2), **documents)  # type: ignore[call-overload]
        torch.testing.assert_close(again, out, rtol=0, atol=1e-12)
        assert cache.lengths == filled.lengths == LENGTHS
        results.append(out)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_plans_take_offsets() -> None:
    options: dict[str, Any] = dict(ring_size=3, causal=True)
    by_offsets = rs.plan(PATTERN, 70, cu_seqlens=torch.tensor(OFFSETS), **options)
    assert by_offsets == rs.plan(PATTERN, 70, lengths=LENGTHS, **options)
    with pytest.raises(ValueError, match="cu_seqlens ends with 70"):
        rs.plan(PATTERN, 71, cu_seqlens=OFFSETS)


def test_streaming_takes_offsets() -> None:
    q, k, v = qkv()
    out = torch.empty_like(q)
    rs.stream_attention(
        TensorRows({"q": q, "k": k, "v": v}), TensorRows({"out": out}), 70, PATTERN, shards=3, cu_seqlens=OFFSETS
    )
    wanted = rs.attention(q, k, v, pattern=PATTERN, lengths=LENGTHS)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)


def test_other_offsets_do_not_recompile() -> None:
    graphs = 0

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return graph

    def call(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        return rs.attention(q, k, v, pattern=PATTERN, causal=True, cu_seqlens=cu_seqlens)

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    q, k, v = qkv()
    for middle in (30, 31, 5, 70):
        offsets = torch.tensor((0, middle, 70), dtype=torch.int32)
        wanted = rs.attention(q, k, v, pattern=PATTERN, causal=True, lengths=(middle, 70 - middle))
        assert torch.equal(compiled(q, k, v, offsets), wanted)
    assert graphs == 1
    with pytest.raises(ValueError, match="offsets must not decrease"):
        compiled(q, k, v, torch.tensor((0, 71, 70), dtype=torch.int32))


def test_the_conversion() -> None:
    torch.library.opcheck(lengths_of_offsets_op, (torch.tensor(OFFSETS, dtype=torch.int32), 70))
    assert document_lengths(None, None, 70) is None
    assert packed_lengths(None, None, 70) is None
    assert document_lengths(None, OFFSETS, None) == document_lengths(LENGTHS, None, None) == LENGTHS
    assert document_lengths(torch.tensor(LENGTHS), None, 70) == LENGTHS
