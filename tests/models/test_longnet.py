"""The model alone: what it computes, what it keeps, and how it is saved."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ringspan as rs
from ringspan.models import LongNet, LongNetConfig
from ringspan.oracle import dense_attention
from tests.counting import CountingMode
from tests.models.mixed import MIXED, mixed_model

NANO = LongNetConfig.named("nano", patterns=("16x1,64x4", "16x1,64x4 shift 8"))


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
    model = LongNet(LongNetConfig.named("nano", causal=False, patterns=("full",))).double()
    x = torch.randn(1, 30, 64, dtype=torch.float64)
    before = model(x)
    x[:, -1] += 1
    assert (model(x)[:, 0] != before[:, 0]).any()


def test_config_counts_parameters() -> None:
    for name in ("nano", "tiny"):
        for tied in (False, True):
            config = LongNetConfig.named(name, tie_embeddings=tied, kv_heads=1, sinks=tied)
            assert config.parameters == sum(p.numel() for p in LongNet(config).parameters())


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("config", [NANO, MIXED], ids=["dilated", "mixed"])
def test_a_simulated_ring_changes_nothing(config: LongNetConfig, size: int) -> None:
    model, tokens = LongNet(config).double() if config is NANO else mixed_model(), text()
    alone = model.loss(tokens, tokens.roll(-1, 1))
    ring = model.loss(tokens, tokens.roll(-1, 1), ring=rs.SimulatedRing(size))
    assert ring.item() == pytest.approx(alone.item(), abs=1e-12)
    wanted = torch.autograd.grad(alone, list(model.parameters()))
    for a, b in zip(torch.autograd.grad(ring, list(model.parameters())), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_mixed_patterns_equal_the_oracle(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = mixed_model(), text(75)
    for layer in model.layers:
        layer.attention.config = dataclasses.replace(MIXED, causal=causal)
    calls: list[rs.Pattern] = []

    def dense(q: Tensor, k: Tensor, v: Tensor, *, lengths: None, **options: Any) -> Tensor:
        calls.append(options["pattern"])
        return dense_attention(q, k, v, **options)[0]

    found = model.loss(tokens, tokens.roll(-1, 1))
    with monkeypatch.context() as patch:
        patch.setattr(rs, "attention", dense)
        wanted = model.loss(tokens, tokens.roll(-1, 1))
    terms = rs.Window(6) + rs.Dilated((16, 40), (4, 8))
    assert calls == [rs.Window(9), terms, rs.Full(), rs.Dilated((10, 33), (1, 3), "blocked", 5), rs.Window(9)]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    expected = torch.autograd.grad(wanted, list(model.parameters()))
    for a, b in zip(torch.autograd.grad(found, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_wrong_seq_len_is_refused() -> None:
    model, tokens = LongNet(LongNetConfig.named("nano")), torch.zeros(1, 50, dtype=torch.int64)
    for call in (model, lambda x, **options: model.loss(x, x, **options)):
        with pytest.raises(ValueError, match="seq_len=100, but there are 50 rows"):
            call(tokens, seq_len=100)
    assert model(tokens, seq_len=50).shape == (1, 50, 64)


def test_checkpointed_layers_give_the_same_gradients_and_attend_once() -> None:
    model, tokens = mixed_model(), text()
    model.loss(tokens, tokens).backward()
    kept = {name: grad.clone() for name, grad in gradients(model).items()}
    model.zero_grad()
    model.checkpoint_layers()
    with CountingMode() as mode:
        model.loss(tokens, tokens).backward()
    assert mode.calls == {"ringspan::attention": MIXED.layers, "ringspan::attention_backward": MIXED.layers}
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, kept[name], rtol=0, atol=1e-12)


def test_nan_weights_give_a_nan_loss() -> None:
    model = LongNet(NANO)
    torch.nn.init.constant_(model.get_parameter("layers.0.attention.queries.weight"), torch.nan)
    for rows in (1, 2, 5, 100):
        tokens = text(rows)
        assert model.loss(tokens, tokens).isnan()


def test_patterns_repeat_over_the_layers() -> None:
    config = LongNetConfig(layers=7, patterns=("window 511", "window 511", "4096x1", "full"))
    assert config.layers_by_pattern == {
        rs.Window(511): [0, 1, 4, 5],
        rs.Dilated((4096,), (1,)): [2, 6],
        rs.Full(): [3],
    }


def test_patterns_are_kept_as_their_own_text() -> None:
    config = LongNetConfig(patterns=("Window 511  + 4096x4, 65536x64",))
    assert config.patterns == ("window 511 + 4096x4,65536x64",)
    assert config == LongNetConfig(patterns=((rs.Window(511) + rs.Dilated((4096, 65536), (4, 64))).text,))


def test_sinks_start_at_0_and_norms_at_1() -> None:
    model = LongNet(MIXED)
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            assert weight.unique().tolist() == [0.0 if name.endswith("sinks") else 1.0], name
    assert sum(name.endswith("attention.sinks") for name in model.state_dict()) == MIXED.layers
    assert not any("sinks" in name for name in LongNet(NANO).state_dict())


@pytest.mark.parametrize("tied", [False, True])
def test_save_and_load(tmp_path: Path, tied: bool) -> None:
    model, tokens = LongNet(dataclasses.replace(MIXED, tie_embeddings=tied)), text()
    model.save_pretrained(tmp_path)
    again = LongNet.from_pretrained(tmp_path)
    assert again.config == model.config
    assert torch.equal(again(tokens), model(tokens))
    if tied:
        assert again.head.weight is again.embedding.weight


def test_a_config_with_settings_of_another_version_is_refused(tmp_path: Path) -> None:
    model = LongNet(NANO)
    model.save_pretrained(tmp_path)
    values = json.loads(NANO.to_json())
    del values["patterns"]
    old = {**values, "segment_lengths": [16, 64], "dilation_rates": [1, 4], "alternate_shift": True}
    (tmp_path / "config.json").write_text(json.dumps(old))
    with pytest.raises(ValueError, match=r"config\.json: unknown settings .*segment_lengths: .* known .* patterns"):
        LongNet.from_pretrained(tmp_path)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"a saved model is a folder with config\.json and model\.safetensors"):
        LongNet.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(heads=3), "heads=3: must divide width=64"),
        (dict(kv_heads=3, heads=4), "kv_heads=3: must divide heads=4"),
        (dict(layers=0), "layers=0: must be at least 1"),
        (dict(patterns=()), r"patterns=\(\): give at least one"),
        (dict(patterns="full"), "patterns='full': must be a list of strings"),
        (dict(patterns=(rs.Full(),)), r"patterns=\(Full\(\),\): must be a list of strings"),
        (dict(patterns=("full", "1024")), "pattern '1024': '1024' must be full"),
        (dict(patterns=("64x0",)), r"dilation_rates\[0\]=0"),
        (dict(patterns=("64x2 heads 1 of 2",)), "leaves room for 1 KV heads"),
        (dict(softcap=-1.0), "softcap=-1.0: must not be negative"),
        (dict(sinks=1), "sinks=1: must be true or false"),
        (dict(width=6, heads=2, kv_heads=2), "must be even"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], reason: str) -> None:
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


@pytest.fixture
def _compiler() -> Iterator[None]:
    """A compiler without memory: sizes that differ between two models would be dynamic in the next one."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("config", [NANO, MIXED], ids=["dilated", "mixed"])
def test_other_offsets_do_not_recompile(config: LongNetConfig) -> None:
    model, tokens, graphs = LongNet(config), torch.randint(256, (1, 90)), []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for middle in (50, 20, 1):
        offsets = torch.tensor([0, middle, 90])
        found = compiled(tokens, cu_seqlens=offsets)
        torch.testing.assert_close(found, model(tokens, cu_seqlens=offsets), rtol=0, atol=1e-5)
    assert len(graphs) == 1
