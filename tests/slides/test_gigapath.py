"""`SlideEncoder` on one device: the official numbers, batches, coordinates and files of weights."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import ringspan as rs
from ringspan.integrations.gigapath import SIZES, SlideEncoder, pack_slides, segment_lengths_of
from ringspan.integrations.tile_grid import position_embedding
from ringspan.oracle import dense_attention
from tests.slides.slide_data import GOLDEN_SIZE, ROUNDING, golden, golden_encoder, slides, small_encoder, weighted

KEY = rs.nn.DropoutKey(11, 5)


@pytest.mark.parametrize("ring", [None, rs.SimulatedRing(3)], ids=["alone", "ring"])
@torch.no_grad()
def test_outputs_are_those_of_the_official_code(ring: Any) -> None:
    x, coords = golden()["tiles"].double(), golden()["coords"]
    encoder = golden_encoder()
    for i, found in enumerate(encoder(x, coords, all_layer_embed=True, ring=ring)):
        torch.testing.assert_close(found, golden()[f"cls_after_{i}"], rtol=0, atol=ROUNDING)
    assert i == 2
    (found,) = encoder(x, coords, ring=ring)
    torch.testing.assert_close(found, golden()["cls"], rtol=0, atol=ROUNDING)
    (found,) = golden_encoder(global_pool=True)(x, coords, ring=ring)
    torch.testing.assert_close(found, golden()["pooled"], rtol=0, atol=ROUNDING)


@torch.no_grad()
def test_attention_of_the_first_layer_is_that_of_the_official_code() -> None:
    """Its inputs are exact, and attention is computed in fp64; the definition without padded keys differs by 0.28."""
    x, coords = golden()["tiles"].double(), golden()["coords"]
    differences = {}
    for padding in ("torchscale", "none"):
        encoder = golden_encoder(padding=padding)
        sequence, rows = encoder._sequence(x, coords, None, None, None, None, None, None)
        layer: Any = encoder.encoder.layers[0]
        normed = layer.self_attn_layer_norm(sequence)
        torch.testing.assert_close(normed[:, :64], golden()["layer0_attn_in_first64"], rtol=0, atol=1e-12)
        options = encoder.encoder._rows(sequence, *rows.options.values(), None, None).attention
        differences[padding] = (layer.self_attn(normed, options) - golden()["layer0_attn_out"]).abs().max().item()
    assert differences["torchscale"] < 1e-12
    assert differences["none"] == pytest.approx(0.2842, abs=1e-4)


@torch.no_grad()
def test_the_definition_differs_as_the_docs_say() -> None:
    x, coords = golden()["tiles"].double(), golden()["coords"]
    for pool, name, wanted in ((False, "cls", 5.2e-5), (True, "pooled", 1.6e-3)):
        (found,) = golden_encoder(padding="none", global_pool=pool)(x, coords)
        assert (found - golden()[name]).abs().max().item() == pytest.approx(wanted, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "cls", "pooled"), [(2, 1.2e-3, 0.039), (12, 5.1e-3, 0.062)])
@torch.no_grad()
def test_deeper_encoders_differ_by_more_as_the_docs_say(depth: int, cls: float, pooled: float) -> None:
    found = []
    for padding in ("torchscale", "none"):
        torch.manual_seed(0)
        encoder = SlideEncoder(**GOLDEN_SIZE | dict(depth=depth, padding=padding)).eval()
        for encoder.global_pool in (False, True):
            found += encoder(golden()["tiles"], golden()["coords"])
    assert (found[0] - found[2]).abs().max().item() == pytest.approx(cls, rel=0.05)
    assert (found[1] - found[3]).abs().max().item() == pytest.approx(pooled, rel=0.05)


def test_the_position_embedding_is_the_official_table() -> None:
    """Computed as the official code does, with numpy: fp64, rounded to fp32, cell x * side + y."""
    side, dim = 60, 768
    rates = 1.0 / 10000 ** (np.arange(dim // 4, dtype=float) / (dim / 4.0))
    first, second = (grid.reshape(-1) for grid in np.meshgrid(*[np.arange(side, dtype=np.float32)] * 2))
    halves = [np.einsum("m,d->md", axis, rates) for axis in (first, second)]
    table = np.concatenate([part for angles in halves for part in (np.sin(angles), np.cos(angles))], 1)
    cells = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    assert torch.equal(position_embedding(cells, dim), torch.from_numpy(table).float())


def test_segment_lengths_are_the_official_ones() -> None:
    for size in (256, 4096, 16384, 100_000, 250_000, 262_144, 1_000_000):
        most = (size // 256) ** 2
        wanted = np.power(2, np.linspace(np.log2(1024), int(np.log2(most)), 5)).astype(int)
        assert segment_lengths_of(size, 256) == tuple(wanted.tolist())
    with pytest.raises(ValueError, match="tile_size=512, max_wsi_size=256: a slide has at least one tile"):
        segment_lengths_of(256, 512)


@pytest.mark.parametrize("name", SIZES)
def test_published_sizes(name: str) -> None:
    with torch.device("meta"):
        encoder = SlideEncoder.named(name, in_chans=1536)
    config, width = encoder.encoder.config, {"768d": 768, "024d": 1024, "536d": 1536}[name[-4:]]
    assert (config.width, config.layers, config.heads, config.mlp_width) == (width, int(name[18:20]), 16, 4 * width)
    assert config.pattern == rs.Dilated((1024, 5792, 32768, 185363, 1048576), (1, 2, 4, 8, 16), "blocked")
    assert (config.dropout, config.drop_path_rate, config.padding) == (0.25, 0.1, "torchscale")
    assert isinstance(encoder.norm, nn.LayerNorm)
    assert encoder.norm.eps == 1e-6
    assert config.norm_eps == 1e-5
    if width == 768:  # the numbers that the official notebook prints for the published weights
        assert sum(weight.numel() for weight in encoder.parameters()) == 86_330_880
        assert sum(weight.numel() for weight in encoder.encoder.parameters()) == 85_148_160
    with pytest.raises(ValueError, match="size 'huge': must be one of gigapath_slide_enc12l768d"):
        SlideEncoder.named("huge")


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("padding", ["torchscale", "none"])
@pytest.mark.parametrize("ring", [None, rs.SimulatedRing(3)], ids=["alone", "ring"])
def test_packed_slides_equal_single_slides(pool: bool, padding: str, ring: Any) -> None:
    encoder = small_encoder(global_pool=pool, padding=padding).eval()
    lengths = (30, 1, 55, 17)
    x, coords = slides(*lengths)
    alone = [
        encoder(*part, all_layer_embed=True) for part in zip(x.split(lengths, 1), coords.split(lengths, 1), strict=True)
    ]
    for documents in (dict(lengths=lengths), dict(cu_seqlens=(0, 30, 31, 86, 103))):
        together = encoder(x, coords, all_layer_embed=True, ring=ring, **documents)
        assert [found.shape for found in together] == [(4, 24)] * 4
        for i, found in enumerate(together):
            torch.testing.assert_close(found, torch.cat([each[i] for each in alone]), rtol=0, atol=1e-12)
    (last,) = encoder(x, coords, lengths=lengths)
    first = encoder(x[:, :30], coords[:, :30])[0]
    torch.testing.assert_close(last[:1], first, rtol=0, atol=1e-12)


def padded_batch(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    x, coords = slides(*lengths)
    longest = max(lengths)
    mask = torch.arange(longest) >= torch.tensor(lengths)[:, None]
    padded, padded_coords = torch.full((len(lengths), longest, 6), 9.0).double(), torch.zeros(len(lengths), longest, 2)
    padded[~mask], padded_coords[~mask] = x[0], coords[0].float()
    return padded, padded_coords, mask


@pytest.mark.parametrize("train", [False, True])
def test_padded_batches_equal_packed_slides(train: bool) -> None:
    encoder, lengths = small_encoder().train(train), (30, 1, 55, 17)
    x, coords = slides(*lengths)
    *padded, mask = padded_batch(lengths)
    found = encoder(*padded, key_padding_mask=mask, dropout_key=KEY)
    assert torch.equal(found[0], encoder(x, coords, lengths=lengths, dropout_key=KEY)[0])


def test_a_batch_of_equal_slides_equals_packed_slides_also_in_training() -> None:
    encoder = small_encoder().train()
    x, coords = slides(40, 40, 40)
    (batch,) = encoder(x.view(3, 40, 6), coords.view(3, 40, 2), dropout_key=KEY)
    (packed,) = encoder(x, coords, lengths=(40, 40, 40), dropout_key=KEY)
    torch.testing.assert_close(batch, packed, rtol=0, atol=1e-12)
    assert not torch.equal(batch, encoder.eval()(x.view(3, 40, 6), coords.view(3, 40, 2))[0])


def test_recomputed_layers_give_the_same_gradients() -> None:
    encoder = small_encoder().train()
    x, coords = slides(30, 25)
    found = []
    for recompute in (False, True):
        encoder.checkpoint_layers(recompute)
        encoder.zero_grad()
        loss = weighted(encoder(x, coords, True, lengths=(30, 25), dropout_key=KEY))
        loss.backward()
        found.append([loss, *(weight.grad for weight in encoder.parameters() if weight.grad is not None)])
    for have, want in zip(*found, strict=True):
        torch.testing.assert_close(have, want, rtol=0, atol=1e-12)


def test_training_without_a_key_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dropout=0\.3, drop_path_rate=0\.4, activation_dropout=0\.2: .*dropout_key="):
        small_encoder().train()(*slides(20))


def test_queries_and_keys_give_the_attention_of_the_cls_rows() -> None:
    encoder, lengths = small_encoder().eval(), (30, 25)
    q, k, options = encoder.queries_and_keys(*slides(*lengths), layer=2, lengths=lengths)
    assert q.shape == k.shape == (1, 57, 6, 4)
    rows = [0, 31]
    wanted = rs.attention(q, k, k, **options)[:, rows]
    weights = rs.attention_weights(q[:, rows], k, rows=rows, **options | {"sinks": options["sinks"][:, rows]})
    torch.testing.assert_close(torch.einsum("bhpt,bthd->bphd", weights, k), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("padding", ["torchscale", "none"])
@pytest.mark.parametrize("layer", [0, None])
@torch.no_grad()
def test_attention_weights_of_the_cls_rows(layer: int | None, padding: Any) -> None:
    """Equal to those of single slides, and to the dense definition with the options of the layer's attention."""
    encoder, lengths = small_encoder(padding=padding).eval(), (30, 25)
    x, coords = slides(*lengths)
    found = encoder.attention_weights(x, coords, layer, lengths=lengths)
    assert found.shape == (2, 6, 55)
    starts = (0, 30)
    for i, (start, tiles) in enumerate(zip(starts, lengths, strict=True)):
        single = x[:, start : start + tiles], coords[:, start : start + tiles]
        alone = encoder.attention_weights(*single, layer)
        torch.testing.assert_close(found[i, :, start : start + tiles], alone[0], rtol=0, atol=1e-12)
        assert found[i].count_nonzero() == alone.count_nonzero()
        q, k, options = encoder.queries_and_keys(*single, layer=2 if layer is None else layer)
        n = tiles + 1
        values = torch.eye(n, dtype=torch.float64)[None, :, None].expand(1, n, 6, n)
        wanted, _ = dense_attention(q, k, values, pattern=options["pattern"], sinks=options["sinks"])
        torch.testing.assert_close(alone[0], wanted[0, 0, :, 1:], rtol=0, atol=1e-12)


def test_half_precision_and_autocast() -> None:
    encoder = small_encoder().eval().float()
    x, coords = slides(60)
    wanted = encoder(x.float(), coords)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = encoder(x.float(), coords)[0]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.1)
    assert encoder.bfloat16()(x.bfloat16(), coords)[0].dtype == torch.bfloat16


def one_slide() -> tuple[Tensor, Tensor]:
    x, coords = slides(10)
    return x, coords.double()


@pytest.mark.parametrize("offset", [0, 255, 1581])
def test_slides_may_be_cropped_anywhere(offset: int) -> None:
    x, coords = one_slide()
    encoder = small_encoder().eval()
    moved = coords - 37 + offset
    assert torch.equal(encoder(x, moved)[0], encoder(x, moved // 256 * 256)[0])


def test_another_slide_ngrids_changes_nothing() -> None:
    x, coords = one_slide()
    assert torch.equal(small_encoder(slide_ngrids=20).eval()(x, coords)[0], small_encoder().eval()(x, coords)[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, c: (x[0], c), r"x has shape \(10, 6\): must be \(slides, tiles, 6\).*x\[None\]"),
        (lambda x, c: (x[..., :5], c), r"x has shape \(1, 10, 5\): must be \(slides, tiles, 6\)"),
        (lambda x, c: (x, c[:, :9]), r"coords has shape \(1, 9, 2\): must be \(1, 10, 2\), \(x, y\)"),
        (lambda x, c: (x, c.transpose(1, 2)), r"coords has shape \(1, 2, 10\).*pass coords.transpose\(1, 2\)"),
        (lambda x, c: (x, c.half()), "coords is torch.float16, which may round coordinates"),
        (lambda x, c: (x, c.index_fill(1, torch.tensor([3]), torch.nan)), r"coords\[0, 3\] is not finite"),
        (lambda x, c: (x.index_fill(1, torch.tensor([4]), -torch.inf), c), r"x\[0, 4\] is not finite"),
        (lambda x, c: (x, c - 20 * 256), r"coords\[0, 0\]=\[-.*outside the grid.*subtract the slide's origin"),
        (lambda x, c: (x, c + 990 * 256), "outside the grid of 1000 x 1000 tiles of 256.*larger slide_ngrids"),
        (
            lambda x, c: (x, c // 256),
            "in one cell of 256 x 256: tile_size must not exceed the distance.*numbers of rows",
        ),
        (lambda x, c: (x, c / c.max()), "in one cell.*fractions of the slide.*allow_shared_cells=True"),
        (lambda x, c: (x, c[:, [0, 1, 2, 3, 4, 5, 6, 7, 8, 2]]), r"coords\[0, 2\].*coords\[0, 9\].*same tile twice"),
    ],
)
def test_inputs_that_are_not_tiles_of_a_slide_are_refused(change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_encoder().eval()(*change(*one_slide()))


def test_overlapping_tiles_can_be_allowed_and_other_slides_may_use_the_same_cells() -> None:
    x, coords = one_slide()
    encoder = small_encoder(allow_shared_cells=True).eval()
    assert encoder(x, coords // 4)[0].isfinite().all()
    twice = torch.cat([x, x], 1), torch.cat([coords, coords], 1)
    small_encoder().eval()(*twice, lengths=(10, 10))
    small_encoder().eval()(x.expand(2, 10, 6), coords.expand(2, 10, 2))
    with pytest.raises(ValueError, match="same tile twice"):
        small_encoder().eval()(*twice)
    with pytest.raises(ValueError, match="same tile twice"):
        small_encoder().eval()(*twice, lengths=(9, 11))


def test_wrong_lengths_and_masks_are_refused() -> None:
    encoder, (x, coords) = small_encoder().eval(), slides(30, 10)
    *padded, mask = padded_batch((30, 10))
    with pytest.raises(ValueError, match="lengths add up to 39, but there are 40 tiles"):
        encoder(x, coords, lengths=(30, 9))
    with pytest.raises(ValueError, match=r"lengths\[1\]=0: a slide has at least 1 tile"):
        encoder(x, coords, lengths=(40, 0))
    with pytest.raises(ValueError, match=r"with lengths or cu_seqlens, must be \(1, tiles, 6\)"):
        encoder(*padded, lengths=(30, 30))
    with pytest.raises(ValueError, match="seq_len=41, but there are 40 tiles"):
        encoder(x, coords, seq_len=41)
    with pytest.raises(ValueError, match=r"key_padding_mask\[1\]: .* pass ~pad_mask"):
        encoder(*padded, key_padding_mask=~mask & (torch.arange(30) > 5))
    with pytest.raises(ValueError, match=r"key_padding_mask\[0\]: .* pass ~pad_mask"):
        encoder(*padded, key_padding_mask=~mask)
    with pytest.raises(ValueError, match=r"key_padding_mask is torch.float32"):
        encoder(*padded, key_padding_mask=mask.float())
    with pytest.raises(ValueError, match="key_padding_mask with a Ring, lengths"):
        encoder(*padded, key_padding_mask=mask, lengths=(30, 10))
    assert pack_slides(*padded, mask)[2] == (30, 10)


def weights_of(encoder: SlideEncoder) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in encoder.state_dict().items()}


SIZE: dict[str, Any] = dict(in_chans=6, embed_dim=32, depth=1)


def test_weights_load_from_every_layout(tmp_path: Path) -> None:
    encoder = SlideEncoder(**SIZE).eval()
    weights = weights_of(encoder)
    table = position_embedding(torch.cartesian_prod(torch.arange(5), torch.arange(5)), 32)
    stored = {"pos_embed": torch.cat([torch.zeros(1, 32), table])[None], "mask_token": torch.zeros(1, 1, 8)}
    stored |= {"decoder_embed.weight": torch.ones(4, 4, dtype=torch.float64), **weights}
    save_file(weights, tmp_path / "a.safetensors")
    torch.save({"model": stored}, tmp_path / "b.pth")
    torch.save(weights, tmp_path / "c.pth")
    x, coords = torch.randn(1, 10, 6), slides(10)[1]
    wanted = encoder(x, coords)[0]
    for source in (tmp_path / "a.safetensors", str(tmp_path / "b.pth"), tmp_path / "c.pth", weights, {"model": stored}):
        loaded = SlideEncoder.load(source, None, **SIZE)
        assert not loaded.training
        assert torch.equal(loaded(x, coords)[0], wanted)
    prefixed = {f"slide.{name}": x for name, x in stored.items()} | {"classifier.weight": torch.ones(2, 2)}
    assert torch.equal(SlideEncoder.load(prefixed, None, prefix="slide.", **SIZE)(x, coords)[0], wanted)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    weights = weights_of(SlideEncoder(**SIZE))
    with pytest.raises(RuntimeError, match=r'Missing key.*"cls_token"'):
        SlideEncoder.load({name: x for name, x in weights.items() if name != "cls_token"}, None, **SIZE)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"head.weight"'):
        SlideEncoder.load(weights | {"head.weight": torch.ones(1)}, None, **SIZE)
    with pytest.raises(RuntimeError, match="size mismatch"):
        SlideEncoder.load(weights, None, **SIZE | dict(in_chans=7))
    with pytest.raises(ValueError, match=r"pos_embed of shape \(1, 26, 32\) is not a table of sines"):
        SlideEncoder.load(weights | {"pos_embed": torch.randn(1, 26, 32)}, None, **SIZE)
    with pytest.raises(ValueError, match="embed_dim=30: must be a multiple of 4"):
        SlideEncoder(embed_dim=30)
    torch.save({"model": weights, "args": Namespace(lr=1)}, tmp_path / "a.pth")
    with pytest.raises(ValueError, match=r"a\.pth: holds more than tensors.*add_safe_globals"):
        SlideEncoder.load(tmp_path / "a.pth", None, **SIZE)
    for torn in ("b.safetensors", "b.pth"):
        (tmp_path / torn).write_bytes((tmp_path / "a.pth").read_bytes()[:999])
        with pytest.raises(ValueError, match=f"{torn}: cannot be read"):
            SlideEncoder.load(tmp_path / torn, None, **SIZE)
    torch.save([1], tmp_path / "list.pth")
    with pytest.raises(ValueError, match=r"list\.pth: holds a list: must be a state dict"):
        SlideEncoder.load(tmp_path / "list.pth", None, **SIZE)
    with pytest.raises(ValueError, match="'state_dict' is a dict, not a tensor: pass the state dict"):
        SlideEncoder.load({"state_dict": weights}, None, **SIZE)
    with pytest.raises(ValueError, match=r"prefix='slide\.': no weight name starts with it"):
        SlideEncoder.load(weights, None, prefix="slide.", **SIZE)
    with pytest.raises(FileNotFoundError):
        SlideEncoder.load(tmp_path / "c.pth", None, **SIZE)
