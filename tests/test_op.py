"""The registered operator: opcheck, torch.compile, selective checkpointing, double backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ringspan as rs
from ringspan._op import attention_op
from tests.counting import CountingMode

PATTERN = rs.Dilated((16, 40), (1, 3), shift=2)


def qkv(n: int = 70, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(2, n, h, 8, dtype=dtype, requires_grad=True) for h in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("lengths", [None, (30, 40)])
@pytest.mark.parametrize("needed", [(True, True, True), (False, True, False)])
def test_opcheck(lengths: tuple[int, ...] | None, needed: tuple[bool, ...], dtype: torch.dtype) -> None:
    q, k, v = (x.detach().requires_grad_(need) for x, need in zip(qkv(dtype=dtype), needed, strict=True))
    packed = None if lengths is None else torch.tensor(lengths)
    # No tolerance is given: the checks compare compiled and eager runs of the same operator.
    values = (PATTERN.text, "", True, 0.3, 0.0, "cpu_flash", rs.TileCosts().text, "", None)
    torch.library.opcheck(attention_op, (q, k, v, None, packed, *values, [*needed, False]))
    for sinks in (torch.randn(4, dtype=dtype), torch.randn(2, 70, 4, dtype=dtype)):
        torch.library.opcheck(attention_op, (q, k, v, sinks.requires_grad_(), packed, *values, [*needed, True]))


@pytest.mark.parametrize("return_lse", [False, True])
def test_compiles_whole_forward_and_backward(return_lse: bool) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = rs.attention(q * 2, k, v, pattern=PATTERN, causal=True, return_lse=return_lse)  # type: ignore[call-overload]
        return (result[0] + result[1].mean()).sin() if return_lse else result.sin()

    tensors = qkv()
    eager = layer(*tensors)
    wanted = torch.autograd.grad(eager.sum(), tensors)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    out = compiled(*tensors)
    torch.testing.assert_close(out, eager, rtol=0, atol=1e-12)
    for x, y in zip(torch.autograd.grad(out.sum(), tensors), wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def forward_mode(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with forward_ad.dual_level():
        function(forward_ad.make_dual(x, torch.ones_like(x)))


# torch itself compiles its forward-mode formulas with torch.jit.script, which it deprecates.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("operand", [0, 1, 2, 3], ids=["q", "k", "v", "sinks"])
@pytest.mark.parametrize(
    "differentiate",
    [
        forward_mode,
        lambda f, x: torch.func.jvp(f, (x,), (x,)),
        lambda f, x: torch.func.jacfwd(f)(x),
        torch.func.linearize,
    ],
    ids=["forward_ad", "jvp", "jacfwd", "linearize"],
)
def test_forward_mode_is_refused(differentiate: Any, operand: int) -> None:
    tensors = [x.detach() for x in qkv()]
    tensors.append(torch.zeros(tensors[0].shape[2], dtype=tensors[0].dtype))

    def layer(x: Tensor) -> Tensor:
        q, k, v, sinks = (*tensors[:operand], x, *tensors[operand + 1 :])
        return rs.attention(q, k, v, pattern=PATTERN, sinks=sinks)

    with pytest.raises(NotImplementedError, match="reverse-mode gradients only"):
        differentiate(layer, tensors[operand])


def test_new_document_lengths_do_not_recompile() -> None:
    compiled_graphs = 0

    def counting_backend(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        nonlocal compiled_graphs
        compiled_graphs += 1
        return graph.forward

    def layer(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        return rs.attention(q, k, v, pattern=PATTERN, causal=True, lengths=lengths)

    tensors = qkv()
    compiled = torch.compile(layer, fullgraph=True, backend=counting_backend)
    for lengths in ([30, 40], [10, 60], [1, 69], [0, 70]):
        found = compiled(*tensors, torch.tensor(lengths))
        torch.testing.assert_close(found, layer(*tensors, torch.tensor(lengths)), rtol=0, atol=0)
    assert compiled_graphs == 1


def test_bad_lengths_are_named_when_they_arrive_in_a_tensor() -> None:
    with pytest.raises(ValueError, match="add up to 69, but the sequence has 70 rows"):
        rs.attention(*qkv(), pattern=PATTERN, lengths=torch.tensor([30, 39]))


@pytest.mark.parametrize(("keep", "forwards"), [(True, 1), (False, 2)])
def test_selective_checkpointing_keeps_the_result(keep: bool, forwards: int) -> None:
    kept = [torch.ops.ringspan.attention.default] if keep else []

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rs.attention(q * 2, k, v, pattern=PATTERN, causal=True).sin()

    tensors = qkv()
    wanted = torch.autograd.grad(layer(*tensors).sum(), tensors)
    with CountingMode() as mode:
        out = checkpoint(
            layer, *tensors, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(kept)
        )
        found = torch.autograd.grad(out.sum(), tensors)
    assert mode.calls == {"ringspan::attention": forwards, "ringspan::attention_backward": 1}
    for x, y in zip(found, wanted, strict=True):
        assert torch.equal(x, y)


def test_double_backward_is_refused() -> None:
    q, k, v = qkv()
    out = rs.attention(q, k, v, pattern=PATTERN)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        dq.sum().backward()


def test_no_graph_without_gradients() -> None:
    q, k, v = qkv()
    with torch.no_grad():
        assert not rs.attention(q, k, v, pattern=PATTERN).requires_grad
    assert not rs.attention(q.detach(), k.detach(), v.detach(), pattern=PATTERN).requires_grad


def test_gradient_through_lse_alone() -> None:
    q, k, v = qkv()
    _, lse = rs.attention(q, k, v, pattern=rs.Full(), return_lse=True)
    scores = torch.einsum("bphd,bthd->bhpt", q, k.repeat_interleave(2, 2)) * 8**-0.5
    for x, y in zip(
        torch.autograd.grad(lse.square().sum(), (q, k)),
        torch.autograd.grad(scores.logsumexp(-1).square().sum(), (q, k)),
        strict=True,
    ):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-11)
