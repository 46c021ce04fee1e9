"""Each kernel that runs here against the reference, and the reference against autograd."""

import pytest
import torch

from ringspan import kernels
from ringspan.geometry import Mask
from ringspan.kernels import Kernel, ScoreOptions
from ringspan.tools.acceptance.tiles import MASKS, SHAPES, by_autograd, by_kernel, operands, square

RUNNABLE = [
    status.kernel for status in kernels.available() if status.usable and status.kernel.contract.device != "cuda"
]


@pytest.mark.parametrize("kernel", RUNNABLE, ids=lambda k: k.name)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_exact_in_fp64(kernel: Kernel, shape: tuple[int, ...], mask: Mask) -> None:
    tile = operands(square(shape, mask), torch.float64)
    results = by_kernel(kernel, tile, mask, ScoreOptions(0.3))
    for found, wanted in zip(results, by_autograd(*tile, mask, 0.3), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", RUNNABLE, ids=lambda k: k.name)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scale", [-0.5, -0.0, 0.0, 1e-50, -1e-320])
def test_scales_that_are_not_positive(kernel: Kernel, scale: float, mask: Mask) -> None:
    """PyTorch's CPU operator multiplies the -inf of its causal mask by the scale."""
    q, k, v, grad = operands((2, 3, 64, 64, 8), torch.float64)
    wanted = by_autograd(q, k, v, grad, mask, scale)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        tolerance = 1e-12 if dtype == torch.float64 else 16 * torch.finfo(dtype).eps
        low = [x.to(dtype) for x in (q, k, v, grad)]
        for found, right in zip(by_kernel(kernel, low, mask, ScoreOptions(scale)), wanted, strict=True):
            torch.testing.assert_close(found.double(), right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kernel", RUNNABLE, ids=lambda k: k.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keys", [1, 2, 4, 7, 8, 9, 15, 16, 33, 65, 513])
def test_nan_is_visible_in_every_row_that_sees_it(kernel: Kernel, dtype: torch.dtype, keys: int) -> None:
    """PyTorch's CPU operator takes a row of NaN scores for a masked row where keys do not fill a vector register."""
    for mask in MASKS:
        for i, name in enumerate("qkv"):
            for place in {0, keys // 2, keys - 1}:
                tensors = operands((2, 2, keys, keys, 8), dtype)[:3]
                tensors[i][1, 1, place, 3] = torch.nan
                out, lse = kernel.forward(*tensors, mask, ScoreOptions(0.3))
                rows = torch.arange(keys)
                sees = (
                    rows == place
                    if name == "q"
                    else rows >= place
                    if mask == "causal"
                    else rows <= place
                    if mask == "anticausal"
                    else rows >= 0
                )
                assert out[1, 1][sees].isnan().any(-1).all(), (mask, name, place)
                assert name == "v" or torch.equal(lse[1, 1].isnan(), sees), (mask, name, place)
                assert out[0].isfinite().all()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_soft_caps_are_exact_in_the_reference_kernel(mask: Mask, softcap: float) -> None:
    kernel, scores = kernels.get("reference"), ScoreOptions(0.9, softcap)
    tile = operands((2, 3, 37, 37, 8), torch.float64)
    for found, wanted in zip(
        by_kernel(kernel, tile, mask, scores), by_autograd(*tile, mask, 0.9, softcap), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", RUNNABLE, ids=lambda k: k.name)
def test_shares_of_split_keys_add_up(kernel: Kernel) -> None:
    """With the global out and lse, the backward of each part is that part's exact share."""
    q, k, v, grad = operands((2, 2, 20, 50, 8), torch.float64)
    out, lse, dq, dk, dv = by_autograd(q, k, v, grad, "full", 0.3)
    parts = [
        kernel.backward(grad, q, k[:, :, a:b], v[:, :, a:b], out, lse, "full", ScoreOptions(0.3), (True, True, True))
        for a, b in ((0, 13), (13, 50))
    ]
    torch.testing.assert_close(sum(part[0] for part in parts), dq, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat([part[1] for part in parts], 2), dk, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat([part[2] for part in parts], 2), dv, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_strided_views_give_the_same_bits_on_the_cpu(dtype: torch.dtype) -> None:
    kernel = kernels.get("cpu_flash")
    wide = torch.randn(1, 200, 4, 3, 16).to(dtype)  # (batch, rows, heads, q or k or v, dim)
    comb = [wide.as_strided((2, 4, 40, 16), (100 * 192, 48 + 192, 2 * 192, 1), 16 * i) for i in range(3)]
    dense = [x.contiguous() for x in comb]
    for mask in MASKS:
        out, lse = kernel.forward(*comb, mask, ScoreOptions(0.25))
        out2, lse2 = kernel.forward(*dense, mask, ScoreOptions(0.25))
        assert lse.dtype == kernels.accumulation_dtype(dtype)
        assert torch.equal(out, out2)
        assert torch.equal(lse, lse2)
        # Expanded gradients and lse that is not dense are what autograd and the engine really pass.
        grad = torch.ones(16, dtype=dtype).expand(2, 4, 40, 16)
        spread = torch.stack([lse, lse], -1)[..., 0]
        shares = kernel.backward(grad, *comb, out, spread, mask, ScoreOptions(0.25), (True, True, True))
        shares2 = kernel.backward(grad.contiguous(), *dense, out, lse, mask, ScoreOptions(0.25), (True, True, True))
        for share, share2 in zip(shares, shares2, strict=True):
            assert share is not None
            assert share2 is not None
            assert torch.equal(share, share2)


@pytest.mark.parametrize("kernel", RUNNABLE, ids=lambda k: k.name)
def test_keys_expanded_over_a_group_of_queries(kernel: Kernel) -> None:
    q, k, v, grad = operands((3, 4, 30, 30, 8), torch.float64)
    k, v = (x[:, :1].expand(-1, 4, -1, -1) for x in (k, v))
    wanted = by_autograd(q, k, v, grad, "causal", 0.3)
    for found, right in zip(by_kernel(kernel, [q, k, v, grad], "causal", ScoreOptions(0.3)), wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-12)


def test_reference_leaves_out_what_nobody_needs() -> None:
    kernel = kernels.get("reference")
    q, k, v, grad = operands((1, 1, 4, 4, 2), torch.float64)
    out, lse = kernel.forward(q, k, v, "full", ScoreOptions(1.0))
    for needs in ((True, False, False), (False, True, False), (False, False, True)):
        shares = kernel.backward(grad, q, k, v, out, lse, "full", ScoreOptions(1.0), needs)
        assert tuple(share is not None for share in shares) == needs
