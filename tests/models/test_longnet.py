"""The model alone: what it computes, what it keeps, and how it is saved."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ringspan as rs
from ringspan.models import LongNet, LongNetConfig
from tests.counting import CountingMode

NANO = LongNetConfig.named("nano", segment_lengths=(16, 64), dilation_rates=(1, 4))


def text(rows: int = 100, batch: int = 2) -> Tensor:
    return torch.randint(256, (batch, rows))


def gradients(model: LongNet) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def test_a_decoder_does_not_see_the_future() -> None:
    model, tokens = LongNet(NANO).double(), text()
    before = model(tokens)
    tokens[:, 50] += 1
    after = model(tokens % 256)
    assert torch.equal(before[:, :50], after[:, :50])
    assert not torch.equal(before[:, 50:], after[:, 50:])


def test_an_encoder_sees_both_ways_and_takes_embeddings() -> None:
    model = LongNet(LongNetConfig.named("nano", causal=False, segment_lengths=(), dilation_rates=())).double()
    x = torch.randn(1, 30, 64, dtype=torch.float64)
    before = model(x)
    x[:, -1] += 1
    assert (model(x)[:, 0] != before[:, 0]).any()


def test_config_counts_parameters() -> None:
    for name in ("nano", "tiny"):
        for tied in (False, True):
            config = LongNetConfig.named(name, tie_embeddings=tied, kv_heads=1)
            assert config.parameters == sum(p.numel() for p in LongNet(config).parameters())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_simulated_ring_changes_nothing(size: int) -> None:
    model, tokens = LongNet(NANO).double(), text()
    alone = model.loss(tokens, tokens.roll(-1, 1))
    ring = model.loss(tokens, tokens.roll(-1, 1), ring=rs.SimulatedRing(size))
    assert ring.item() == pytest.approx(alone.item(), abs=1e-12)


def test_a_wrong_seq_len_is_refused() -> None:
    model, tokens = LongNet(LongNetConfig.named("nano")), torch.zeros(1, 50, dtype=torch.int64)
    for call in (model, lambda x, **options: model.loss(x, x, **options)):
        with pytest.raises(ValueError, match="seq_len=100, but there are 50 rows"):
            call(tokens, seq_len=100)
    assert model(tokens, seq_len=50).shape == (1, 50, 64)


def test_checkpointed_layers_give_the_same_gradients_and_attend_once() -> None:
    model, tokens = LongNet(NANO).double(), text()
    model.loss(tokens, tokens).backward()
    kept = {name: grad.clone() for name, grad in gradients(model).items()}
    model.zero_grad()
    model.checkpoint_layers()
    with CountingMode() as mode:
        model.loss(tokens, tokens).backward()
    assert mode.calls == {"ringspan::attention": NANO.layers, "ringspan::attention_backward": NANO.layers}
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, kept[name], rtol=0, atol=1e-12)


def test_nan_weights_give_a_nan_loss() -> None:
    model = LongNet(NANO)
    torch.nn.init.constant_(model.get_parameter("layers.0.attention.queries.weight"), torch.nan)
    for rows in (1, 2, 5, 100):
        tokens = text(rows)
        assert model.loss(tokens, tokens).isnan()


def test_every_second_layer_is_shifted() -> None:
    patterns = [NANO.pattern_of(layer) for layer in range(3)]
    assert [pattern.shift for pattern in patterns] == [0, 8, 0]  # type: ignore[union-attr]


@pytest.mark.parametrize("tied", [False, True])
def test_save_and_load(tmp_path, tied: bool) -> None:  # type: ignore[no-untyped-def]
    model, tokens = LongNet(LongNetConfig.named("nano", tie_embeddings=tied)), text()
    model.save_pretrained(tmp_path)
    again = LongNet.from_pretrained(tmp_path)
    assert again.config == model.config
    assert torch.equal(again(tokens), model(tokens))
    if tied:
        assert again.head.weight is again.embedding.weight


def test_a_folder_without_a_model_is_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(FileNotFoundError, match=r"a saved model is a folder with config\.json and model\.safetensors"):
        LongNet.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(heads=3), "heads=3: must divide width=64"),
        (dict(kv_heads=3, heads=4), "kv_heads=3: must divide heads=4"),
        (dict(layers=0), "layers=0: must be at least 1"),
        (dict(dilation_rates=(1,)), "dilation_rates"),
        (dict(width=6, heads=2, kv_heads=2), "must be even"),
    ],
)
def test_bad_sizes_are_refused(changes: dict[str, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        LongNetConfig.named("nano", **changes)


def test_unknown_names_and_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="size 'huge': must be one of nano, tiny"):
        LongNetConfig.named("huge")
    with pytest.raises(ValueError, match="unknown settings deepness"):
        LongNetConfig.from_json('{"deepness": 3}')


@pytest.mark.parametrize("ring", [None, rs.SimulatedRing(3)])
def test_packed_documents_equal_documents_on_their_own(ring: rs.SimulatedRing | None) -> None:
    model, tokens = LongNet(NANO).double(), torch.randint(256, (1, 90))
    wanted = torch.cat([model(tokens[:, :50]), model(tokens[:, 50:])], 1)
    for documents in (dict(lengths=(50, 40)), dict(cu_seqlens=torch.tensor([0, 50, 90], dtype=torch.int32))):
        found = model(tokens, ring=ring, **documents)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    targets = tokens.roll(-1, 1)
    packed = model.loss(tokens, targets, ring=ring, cu_seqlens=(0, 50, 90))
    shares = model.loss(tokens[:, :50], targets[:, :50]) * 50 + model.loss(tokens[:, 50:], targets[:, 50:]) * 40
    torch.testing.assert_close(packed, shares / 90, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="cu_seqlens ends with 80"):
        model(tokens, ring=ring, cu_seqlens=(0, 80))


def test_other_offsets_do_not_recompile() -> None:
    model, tokens, graphs = LongNet(NANO), torch.randint(256, (1, 90)), []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for middle in (50, 20, 1):
        offsets = torch.tensor([0, middle, 90])
        found = compiled(tokens, cu_seqlens=offsets)
        torch.testing.assert_close(found, model(tokens, cu_seqlens=offsets), rtol=0, atol=1e-5)
    assert len(graphs) == 1
