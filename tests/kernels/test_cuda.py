"""The CUDA wrappers with fake tensors: shapes, dtypes and schemas, since no GPU is needed for those.

Fakes accept more than the real kernels do, so the contracts are tested for what they refuse.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ringspan.engine import run_backward, run_forward
from ringspan.geometry import Dilated, Documents, Mask, Window
from ringspan.kernels import Kernel, ScoreOptions, cuda
from ringspan.layout import Layout
from ringspan.planning import plan_rank
from ringspan.ring.simulated import ALONE

SCORES = ScoreOptions(0.125)
KERNELS = [cuda.FLASH, cuda.EFFICIENT, cuda.CUDNN]
CASES = [(kernel, dtype) for kernel in KERNELS for dtype in kernel.contract.dtypes]


def ident(case: object) -> str:
    return case.name if isinstance(case, Kernel) else str(case)


@pytest.mark.parametrize(("kernel", "dtype"), CASES, ids=ident)
@pytest.mark.parametrize("rows", [32, 37])
@pytest.mark.parametrize("mask", ["full", "causal", "anticausal"])
def test_forward_and_backward(kernel: Kernel, dtype: torch.dtype, rows: int, mask: Mask) -> None:
    with FakeTensorMode():
        whole = torch.empty(2, 100, 3, 64, dtype=dtype, device="cuda")
        comb = whole.as_strided((2, 3, rows, 64), (100 * 192, 64 + 192, 2 * 192, 1))
        q, k, v = comb, comb, comb
        out, lse = kernel.forward(q, k, v, mask, SCORES)
        assert out.shape == q.shape
        assert out.dtype == dtype
        assert (lse.shape, lse.dtype) == ((2, 3, rows), torch.float32)
        # The engine's lse is a strided view of (batch, heads, seq).
        lse = torch.empty(2, 3, 4 * rows, device="cuda").as_strided((2, 3, rows), (12 * rows, 4 * rows, 4))
        grads = kernel.backward(out, q, k, v, out, lse, mask, SCORES, (True, True, True))
        for grad, x in zip(grads, (q, k, v), strict=True):
            assert grad is not None
            assert (grad.shape, grad.dtype, grad.device.type) == (x.shape, dtype, "cuda")


@pytest.mark.parametrize(("kernel", "dtype"), CASES, ids=ident)
def test_rectangles(kernel: Kernel, dtype: torch.dtype) -> None:
    with FakeTensorMode():
        q = torch.empty(1, 2, 16, 64, dtype=dtype, device="cuda")
        k = torch.empty(1, 2, 48, 64, dtype=dtype, device="cuda")
        out, lse = kernel.forward(q, k, k, "full", SCORES)
        dq, dk, dv = kernel.backward(out, q, k, k, out, lse, "full", SCORES, (True, True, True))
        assert [x.shape for x in (dq, dk, dv) if x is not None] == [q.shape, k.shape, k.shape]


@pytest.mark.parametrize(
    ("kernel", "make", "words"),
    [
        (cuda.FLASH, lambda: torch.empty(1, 2, 8, 64, device="cuda"), "dtype=torch.float32"),
        (cuda.FLASH, lambda: torch.empty(1, 2, 8, 60, dtype=torch.bfloat16, device="cuda"), "head_dim=60"),
        (cuda.FLASH, lambda: torch.empty(1, 2, 64, 8, dtype=torch.bfloat16, device="cuda").mT, "last must be 1"),
        (cuda.EFFICIENT, lambda: torch.empty(1, 2, 8, 6, device="cuda"), "head_dim=6: must be a multiple of 4"),
        (cuda.EFFICIENT, lambda: torch.empty(1, 2, 8, 65, device="cuda").narrow(3, 0, 64), "multiple of 16 bytes"),
        (cuda.CUDNN, lambda: torch.empty(1, 2, 8, 256, dtype=torch.float16, device="cuda"), "at most 128"),
        (
            cuda.CUDNN,
            lambda: torch.empty(1, 1, 8, 64, dtype=torch.float16, device="cuda").expand(1, 2, 8, 64),
            "expanded",
        ),
    ],
)
def test_contracts_refuse_what_fakes_accept(kernel: Kernel, make, words: str) -> None:  # type: ignore[no-untyped-def]
    with FakeTensorMode():
        x = make()
        with pytest.raises(ValueError, match=words):
            kernel.forward(x, x, x, "full", SCORES)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("_scaled_dot_product_flash_attention", "query key value dropout_p is_causal return_debug_mask scale"),
        (
            "_scaled_dot_product_flash_attention_backward",
            "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal "
            "philox_seed philox_offset scale",
        ),
        (
            "_scaled_dot_product_efficient_attention",
            "query key value attn_bias compute_log_sumexp dropout_p is_causal scale",
        ),
        (
            "_scaled_dot_product_efficient_attention_backward",
            "grad_out_ query key value attn_bias out logsumexp philox_seed philox_offset dropout_p grad_input_mask "
            "is_causal scale",
        ),
        (
            "_scaled_dot_product_cudnn_attention",
            "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask scale",
        ),
        (
            "_scaled_dot_product_cudnn_attention_backward",
            "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q cum_seq_k max_q "
            "max_k dropout_p is_causal scale",
        ),
        ("_scaled_dot_product_flash_attention_for_cpu", "query key value dropout_p is_causal attn_mask scale"),
        (
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            "grad_out query key value out logsumexp dropout_p is_causal attn_mask scale",
        ),
    ],
)
def test_private_operators_are_still_what_we_think(name: str, arguments: str) -> None:
    schema = getattr(torch.ops.aten, name).default._schema
    assert " ".join(argument.name for argument in schema.arguments) == arguments


@pytest.mark.parametrize(("kernel", "dtype"), CASES, ids=ident)
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_the_engine_calls_it_within_its_contract(kernel: Kernel, dtype: torch.dtype, kv_heads: int) -> None:
    """The whole call over fake CUDA tensors: GQA, dilation, windows, odd lengths, lse gradients."""
    pattern, layout = Dilated((64, 200), (1, 3), shift=5) + Window(40), Layout("contiguous", 377, 1)
    plan = plan_rank(pattern, Documents((300, 77)), layout, 0, kv_heads, True)
    ((_, transport, _),) = ALONE.shard(layout, [])
    with FakeTensorMode():
        q = torch.empty(2, 377, 4, 64, dtype=dtype, device="cuda")
        k = torch.empty(2, 377, kv_heads, 64, dtype=dtype, device="cuda")
        out, lse = run_forward(plan, transport, q, k, k, scores=SCORES, kernel=kernel)
        assert (out.shape, out.dtype, lse.shape) == (q.shape, lse.dtype, (2, 4, 377))
        out = out.to(dtype)
        dq, dk, dv = run_backward(
            plan, transport, out, lse, q, k, k, out, lse, scores=SCORES, kernel=kernel, needs=(True, True, True)
        )
        assert [(x.shape, x.dtype) for x in (dq, dk, dv) if x is not None] == [(x.shape, lse.dtype) for x in (q, k, k)]
