"""Slides for tests: the golden one, made by the official code of Prov-GigaPath, and small ones with random tiles."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import ringspan as rs
from ringspan.integrations.gigapath import SlideEncoder
from ringspan.integrations.torchscale import TorchscaleEncoder

GOLDEN = Path(__file__).parent.parent / "data/gigapath_slide_encoder.safetensors"
GOLDEN_SIZE: dict[str, Any] = dict(
    in_chans=48,
    embed_dim=128,
    depth=2,
    slide_ngrids=64,
    max_wsi_size=16384,
    norm_layer=partial(nn.LayerNorm, eps=1e-6),
)
ROUNDING = 2e-6  # the official code computes norms and activations in fp32, also in an fp64 model


@cache
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN)


def golden_encoder(**arguments: Any) -> SlideEncoder:
    weights = {name: x for name, x in golden().items() if name.startswith("model.")}
    return SlideEncoder.load(weights, None, prefix="model.", **GOLDEN_SIZE, **arguments).double()


def small_encoder(**arguments: Any) -> SlideEncoder:
    """With segments shorter than the slides of `slides`, and every weight random. The same in every process."""
    torch.manual_seed(1)
    size: dict[str, Any] = dict(in_chans=6, embed_dim=24, depth=3, num_heads=6, mlp_ratio=2)
    encoder = SlideEncoder(**size | dict(dropout=0.3, drop_path_rate=0.4) | arguments)
    pattern = rs.Dilated((16, 23, 40), (1, 2, 4), head_offsets="blocked")
    encoder.encoder = TorchscaleEncoder(replace(encoder.encoder.config, pattern=pattern, activation_dropout=0.2))
    for weight in encoder.parameters():
        nn.init.normal_(weight, std=0.3)
    return encoder.double()


def slides(*tiles: int) -> tuple[Tensor, Tensor]:
    """Packed slides with so many tiles, at random cells of the grid. The same in every process."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, sum(tiles), 6, generator=generator, dtype=torch.float64)
    cells = [torch.randperm(400, generator=generator)[:count] for count in tiles]
    coords = torch.cat([torch.stack([cell // 20, cell % 20], 1) for cell in cells])[None]
    return x, coords * 256 + 37


def weighted(outcomes: list[Tensor]) -> Tensor:
    """A loss in which every number of every outcome has its own weight."""
    generator = torch.Generator().manual_seed(3)
    return sum(
        ((x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in outcomes), torch.zeros(())
    )
