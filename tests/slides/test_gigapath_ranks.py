"""`SlideEncoder` over real rings: the official numbers, and the losses and gradients of one device."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ringspan as rs
from ringspan.integrations.gigapath import SlideEncoder
from tests.ranks import on_ranks
from tests.slides.slide_data import ROUNDING, golden, golden_encoder, slides, small_encoder, weighted

KEY = rs.nn.DropoutKey(11, 5)
LENGTHS = (30, 1, 55, 17)


@on_ranks(2, 3)
@torch.no_grad()
def test_outputs_are_those_of_the_official_code() -> None:
    ring = rs.Ring(layout="contiguous")
    encoder = golden_encoder()
    x, coords = encoder.shard(golden()["tiles"].double(), golden()["coords"], ring)
    assert x.shape[1] < 3001
    for i, found in enumerate(encoder(x, coords, all_layer_embed=True, ring=ring, seq_len=3001)):
        torch.testing.assert_close(found, golden()[f"cls_after_{i}"], rtol=0, atol=ROUNDING)
    torch.testing.assert_close(encoder(x, coords, ring=ring)[0], golden()["cls"], rtol=0, atol=ROUNDING)
    (found,) = golden_encoder(global_pool=True)(x, coords, ring=ring)
    torch.testing.assert_close(found, golden()["pooled"], rtol=0, atol=ROUNDING)
    sequence, rows = encoder._sequence(x, coords, ring, None, None, None, None, None)
    layer: Any = encoder.encoder.layers[0]
    options = encoder.encoder._rows(sequence, *rows.options.values(), None, None).attention
    attended = layer.self_attn(layer.self_attn_layer_norm(sequence), options)
    wanted = ring.split_sequence(golden()["layer0_attn_out"])
    torch.testing.assert_close(attended, wanted, rtol=0, atol=1e-12)


def _results(encoder: SlideEncoder, ranks: int, *inputs: Tensor, **options: Any) -> list[Tensor]:
    """Outcomes, loss and gradients of a training step. The loss is the same on all ranks, so each computes a share."""
    encoder.zero_grad()
    outcomes = encoder(*inputs, all_layer_embed=True, dropout_key=KEY, **options)
    loss = weighted(outcomes)
    (loss / ranks).backward()
    gradients = [weight.grad.clone() for weight in encoder.parameters() if weight.grad is not None]
    if ranks > 1:
        for gradient in gradients:
            dist.all_reduce(gradient)
    return [*outcomes, loss, *gradients]


def _compare(layout: Any, pool: bool, recompute: bool, lengths: tuple[int, ...] | None) -> None:
    ring = rs.Ring(layout=layout, min_size=1)
    encoder = small_encoder(global_pool=pool).train()
    inputs = slides(*LENGTHS) if lengths else slides(60)
    wanted = _results(encoder, 1, *inputs, lengths=lengths)
    encoder.checkpoint_layers(recompute)
    mine = encoder.shard(*inputs, ring, lengths=lengths)
    found = _results(encoder, ring.size, *mine, ring=ring, lengths=lengths)
    assert len(found) == len(wanted) > 20
    for have, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(have.detach(), want.detach(), rtol=0, atol=1e-12)


@on_ranks(1, 2, 4)
def test_training_steps_equal_those_of_one_device() -> None:
    """With dropout and stochastic depth."""
    _compare("zigzag", pool=False, recompute=False, lengths=None)
    _compare("contiguous", pool=True, recompute=True, lengths=None)
    _compare("contiguous", pool=False, recompute=True, lengths=LENGTHS)
    _compare("zigzag", pool=True, recompute=False, lengths=LENGTHS)
    _compare("balanced", pool=True, recompute=True, lengths=LENGTHS)


@on_ranks(2, 4)
def test_ranks_may_hold_no_tiles_and_batches_are_split_by_rows() -> None:
    ring = rs.Ring(layout="contiguous")
    encoder = small_encoder(dropout=0, drop_path_rate=0).eval()
    x, coords = slides(1)
    torch.testing.assert_close(
        encoder(*encoder.shard(x, coords, ring), ring=ring)[0], encoder(x, coords)[0], rtol=0, atol=1e-12
    )
    x, coords = (y.unflatten(1, (3, 40)).squeeze(0) for y in slides(40, 40, 40))
    mine = encoder.shard(x, coords, ring)
    torch.testing.assert_close(encoder(*mine, ring=ring)[0], encoder(x, coords)[0], rtol=0, atol=1e-12)
    assert sum(_everywhere(mine[0].shape[1])) == 40


def _everywhere(value: int) -> list[int]:
    by_rank = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(by_rank, torch.tensor([value]))
    return [int(x) for x in by_rank]


@on_ranks(2, 4)
def test_ranks_can_read_their_own_tiles() -> None:
    for layout in ("contiguous", "zigzag", "balanced"):
        ring = rs.Ring(layout=layout)  # type: ignore[arg-type]
        encoder = small_encoder().eval()
        x, coords = slides(*LENGTHS)
        mine = SlideEncoder.tile_rows(sum(LENGTHS), ring, lengths=LENGTHS)
        (found,) = encoder(x[:, mine], coords[:, mine], ring=ring, lengths=LENGTHS, seq_len=sum(LENGTHS))
        torch.testing.assert_close(found, encoder(x, coords, lengths=LENGTHS)[0], rtol=0, atol=1e-12)


@on_ranks(2, 4)
def test_errors_on_one_rank_are_raised_on_all() -> None:
    ring = rs.Ring()
    encoder = small_encoder().eval()
    inputs = slides(60)
    x, coords = encoder.shard(*inputs, ring)
    bad = coords.double()
    if ring.rank == 1:
        bad[0, 2, 1] = torch.nan
    with pytest.raises(ValueError, match=r"^rank 1: coords\[0, 2\] is not finite"):
        encoder(x, bad, ring=ring)
    cut = 5 if ring.rank == 0 else 0
    with pytest.raises(rs.RingError, match=r"rank \d passes \d+ tiles, but has \d+ of 55"):
        encoder(x[:, cut:], coords[:, cut:], ring=ring)
    with pytest.raises(rs.RingError, match="dropout_key of ranks 0"):
        encoder(x, coords, ring=ring, dropout_key=rs.nn.DropoutKey(0, ring.rank))
    with pytest.raises(ValueError, match="lengths add up to 50, but there are 60 tiles"):
        encoder(x, coords, ring=ring, lengths=(30, 20))
    with pytest.raises(rs.RingError, match=f"rank {ring.rank} passes"):
        encoder(x[:, 1:], coords[:, 1:], ring=ring, seq_len=60)
    with pytest.raises(ValueError, match="pass what pack_slides returns"):
        encoder(x, coords, ring=ring, key_padding_mask=torch.zeros(x.shape[:2], dtype=torch.bool))
    balanced = rs.Ring(layout="balanced")
    for seq_len in (None, 60):
        with pytest.raises(rs.RingError, match="balances packed slides: pass lengths="):
            encoder(x, coords, ring=balanced, seq_len=seq_len)
    twice = torch.cat([inputs[1], inputs[1]], 1)
    with pytest.raises(ValueError, match="same tile twice"):  # also of tiles that other ranks hold
        encoder.shard(torch.cat([inputs[0], inputs[0]], 1), twice, ring)


@on_ranks(2, 3, 4)
def test_attention_weights_are_those_of_one_device() -> None:
    encoder, layouts = small_encoder().eval(), ("contiguous", "zigzag")
    for layout, lengths in (*product(layouts, (None, LENGTHS)), ("balanced", LENGTHS)):
        ring, inputs = rs.Ring(layout=layout), slides(*LENGTHS) if lengths else slides(60)
        wanted = encoder.attention_weights(*inputs, lengths=lengths)
        mine = encoder.tile_rows(inputs[0].shape[1], ring, lengths=lengths)
        found = encoder.attention_weights(*encoder.shard(*inputs, ring, lengths=lengths), ring=ring, lengths=lengths)
        torch.testing.assert_close(found, wanted[..., mine], rtol=0, atol=1e-12)
