"""A LongNet encoder with weights, inputs and outputs that torchscale's own code produced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import ringspan as rs
from ringspan.integrations.torchscale import TorchscaleConfig, TorchscaleEncoder

GOLDEN = Path(__file__).parent.parent / "data/torchscale_longnet_encoder.safetensors"


@pytest.fixture(scope="module")
def golden() -> tuple[dict[str, Tensor], dict[str, Any]]:
    with safe_open(GOLDEN, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, {name: json.loads(value) for name, value in file.metadata().items()}


@pytest.fixture(scope="module")
def encoder(golden: tuple[dict[str, Tensor], dict[str, Any]]) -> TorchscaleEncoder:
    return TorchscaleEncoder.load(*golden, prefix="model.")


def test_the_first_layers_attention_is_torchscales(golden: Any, encoder: TorchscaleEncoder) -> None:
    tensors, _ = golden
    found = encoder.layers[0].self_attn(tensors["input"], None, None)  # type: ignore[operator, union-attr]
    torch.testing.assert_close(found, tensors["layer0_self_attn_out"], rtol=0, atol=1e-13)


@pytest.mark.parametrize("ring", [None, rs.SimulatedRing(3)], ids=["alone", "ring"])
def test_the_encoder_gives_what_torchscale_gave(golden: Any, encoder: TorchscaleEncoder, ring: Any) -> None:
    tensors, _ = golden
    # torchscale rounds its activations to fp32, also in an fp64 model: two layers of them, normalised at the end.
    rounding = 2 * 2 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(encoder(tensors["input"], ring=ring), tensors["encoder_out"], rtol=0, atol=rounding)


def test_what_cannot_be_loaded_is_refused(golden: Any) -> None:
    tensors, settings = golden
    with pytest.raises(ValueError, match="deepnorm=True: not supported"):
        TorchscaleConfig.of({**settings, "deepnorm": True})
    with pytest.raises(ValueError, match="settings lack encoder_layers: give torchscale's own"):
        TorchscaleConfig.of({name: value for name, value in settings.items() if name != "encoder_layers"})
    with pytest.raises(ValueError, match="activation_fn='swish': must be one of gelu, relu"):
        TorchscaleConfig.of({**settings, "activation_fn": "swish"})
    with pytest.raises(ValueError, match=r"prefix='slide\.': no weight begins with it"):
        TorchscaleEncoder.load(tensors, settings, prefix="slide.")
    with pytest.raises(RuntimeError, match="Missing key"):
        TorchscaleEncoder.load(tensors, {**settings, "encoder_layers": 3}, prefix="model.")
