import pytest
import torch

from ringspan import kernels
from ringspan.kernels import ScoreOptions, cpu, cuda, reference


def tile(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


@pytest.mark.parametrize("kernel", [cpu.FLASH, reference.KERNEL], ids=lambda k: k.name)
def test_what_the_operator_would_get_wrong_in_silence_is_refused(kernel: kernels.Kernel) -> None:
    good = tile(1, 2, 8, 4)
    for q, k, v, mask, words in [
        (good[:, :, :0], good, good, "full", "empty"),
        (good, good[:, :, :0], good[:, :, :0], "full", "empty"),
        (good, good[:, :1], good[:, :1], "full", "tiles must match"),
        (good, good, good[:, :, :4], "full", "tiles must match"),
        (good, good[:, :, :4], good[:, :, :4], "causal", "causal tile is square"),
        (tile(1, 2, 4, 8).mT, good, good, "full", "the last must be 1"),
        (good.int(), good.int(), good.int(), "full", "dtype=torch.int32"),
    ]:
        with pytest.raises(ValueError, match=words):
            kernel.forward(q, k, v, mask, ScoreOptions(1.0))
        with pytest.raises(ValueError, match=words):
            kernel.backward(q, q, k, v, q, q[..., 0], mask, ScoreOptions(1.0), (True, True, True))


def test_contracts_name_value_and_rule() -> None:
    refusal = cuda.FLASH.contract.refusal
    assert refusal("cuda", torch.bfloat16, 64) is None
    assert refusal("cpu", torch.bfloat16, 64) == "device=cpu: this kernel runs on cuda"
    assert "dtype=torch.float32: this kernel takes torch.bfloat16, torch.float16" in str(
        refusal("cuda", torch.float32, 64)
    )
    assert "head_dim=60: must be a multiple of 8" in str(refusal("cuda", torch.float16, 60))
    assert "head_dim=264: at most 256" in str(refusal("cuda", torch.float16, 264))


@pytest.mark.parametrize(
    ("dtype", "capability", "name"),
    [
        (torch.float32, (6, 1), "cuda_efficient"),
        (torch.float16, (6, 1), "cuda_efficient"),
        (torch.float16, (7, 5), "cuda_efficient"),
        (torch.bfloat16, (7, 5), "reference"),
        (torch.float32, (9, 0), "cuda_efficient"),
        (torch.float16, (8, 0), "cuda_flash"),
        (torch.bfloat16, (9, 0), "cuda_flash"),
        (torch.float64, (9, 0), "reference"),
    ],
)
def test_choice_on_cuda(dtype: torch.dtype, capability: tuple[int, int], name: str) -> None:
    choice = kernels.choose("cuda", dtype, capability)
    assert choice.kernel.name == name
    assert choice.reason
    assert dtype in choice.kernel.contract.dtypes
    assert capability >= (choice.kernel.contract.min_capability or (0, 0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_choice_elsewhere(dtype: torch.dtype) -> None:
    assert kernels.choose("cpu", dtype).kernel.name == "cpu_flash"
    assert kernels.choose("mps", dtype).kernel.name == "reference"


@pytest.mark.parametrize(
    ("device", "capability", "dtype"),
    [
        ("cpu", None, torch.float32),
        ("cuda", (6, 1), torch.float32),
        ("cuda", (7, 0), torch.float16),
        ("cuda", (8, 0), torch.bfloat16),
        ("cuda", (12, 0), torch.bfloat16),
    ],
)
def test_suggested_dtype(device: str, capability: tuple[int, int] | None, dtype: torch.dtype) -> None:
    suggested, reason = kernels.suggest_dtype(device, capability)
    assert suggested == dtype
    assert reason


def test_listing() -> None:
    listed = kernels.available()
    assert [status.kernel.name for status in listed] == list(kernels.names())
    assert all(status.reason for status in listed)
    assert {status.kernel.name for status in listed if status.usable} >= {"reference", "cpu_flash"}


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="kernel='fast': must be one of 'reference', 'cpu_flash'"):
        kernels.get("fast")
