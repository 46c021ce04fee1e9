"""A model that writes: its logits, step by step, are those of a full forward pass, at every position."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ringspan as rs
from ringspan.decoding import Sampler
from ringspan.models import Decoder, LongNet, LongNetConfig
from tests.models.mixed import MIXED

CONFIG = LongNetConfig.named(
    "nano", layers=3, width=64, heads=4, kv_heads=2, patterns=("16x1,48x4,96x8", "16x1,48x4,96x8 shift 8")
)


def new_model(**changes: Any) -> LongNet:
    return LongNet(LongNetConfig.named("nano", **{**vars(CONFIG), **changes})).double()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(patterns=("16x1,48x4,96x8 blocked", "16x1,48x4,96x8 blocked shift 8")),
        dict(patterns=("16x1,48x4,96x8",), kv_heads=4),
        dict(kv_heads=1, patterns=("10x1,33x3", "10x1,33x3 shift 5")),
        dict(patterns=("full",)),
        dict(patterns=("window 20", "window 7 + 48x4"), sinks=True),
        dict(patterns=("window 20 dilation 2", "full", "16x1"), softcap=2.0),
        vars(MIXED),
    ],
    ids=["shifts and GQA", "blocked", "no shift", "odd", "full", "windows and sinks", "soft cap", "mixed"],
)
def test_logits_equal_a_full_forward_pass_at_every_position(changes: dict[str, Any]) -> None:
    model, tokens = new_model(**changes), torch.randint(256, (2, 230))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("sinks"):
                weight.normal_()
        wanted = model.logits(model(tokens))
    decoder = Decoder(model, batch=2)
    found = [decoder.read([*tokens[:, :37]])]
    found += [decoder.step(tokens[:, p]) for p in range(37, 230)]
    torch.testing.assert_close(torch.stack(found, 1), wanted[:, 36:], rtol=0, atol=1e-10)


def test_reset_begins_anew() -> None:
    decoder, first, second = Decoder(new_model()), torch.randint(256, (40,)), torch.randint(256, (23,))
    wanted = decoder.read([second])
    decoder.reset()
    decoder.read([first])
    decoder.reset()
    torch.testing.assert_close(decoder.read([second]), wanted, rtol=0, atol=0)


def test_prompts_of_different_lengths_and_more_to_read_later() -> None:
    model = new_model()
    texts = [torch.randint(256, (n,)) for n in (90, 51, 70)]
    decoder = Decoder(model, batch=3)
    decoder.read([text[:20] for text in texts])
    decoder.read([texts[0][20:60], texts[1][20:21], texts[2][20:40]])
    found = decoder.read([texts[0][60:], texts[1][21:], texts[2][40:]])
    with torch.no_grad():
        wanted = torch.stack([model.logits(model(text[None])[0, -1]) for text in texts])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    assert decoder.caches[0].lengths == (90, 51, 70)


def test_packed_documents_give_what_each_gives_alone() -> None:
    model, tokens = new_model(), torch.randint(256, (1, 100))
    with torch.no_grad():
        packed = model(tokens, lengths=(30, 0, 70))
        alone = torch.cat([model(tokens[:, :30]), model(tokens[:, 30:])], 1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-12)


def test_the_cache_of_a_model_reaches_its_bound_and_stays_there() -> None:
    decoder = Decoder(new_model())
    decoder.read([torch.zeros(1, dtype=torch.int64)])
    most, sizes = 0, set()
    for p in range(1, 300):
        decoder.step(torch.tensor([p % 256]))
        most = max(most, decoder.rows_held)
        if p > 96:
            sizes.add(decoder.cache_bytes)
    assert most == decoder.bound == 40
    assert len(sizes) == 1


def test_the_bound_is_that_of_the_layer_that_keeps_most() -> None:
    assert Decoder(new_model(patterns=("window 20", "window 7 + 48x4"))).bound == 21
    assert Decoder(new_model(patterns=("window 20", "window 15 + 48x4"))).bound == 28
    assert Decoder(new_model(patterns=("window 20", "full"))).bound is None


def test_a_stream_is_decided_by_its_seed() -> None:
    model = new_model()
    texts = []
    for seed in (1, 1, 2):
        stream = Decoder(model).stream([torch.tensor([65])], Sampler(seed=seed))
        texts.append([int(next(stream)) for _ in range(30)])
    assert texts[0] == texts[1] != texts[2]


def test_misuse_is_named() -> None:
    model = new_model()
    with pytest.raises(ValueError, match=r"prompts of \(3,\) tokens"):
        Decoder(model, batch=2).read([torch.zeros(3, dtype=torch.int64)])
    with pytest.raises(ValueError, match=r"tokens of shape \(2,\): must be \(1,\), one for each text"):
        Decoder(model).step(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"tokens has shape \(1, 1\): must have one dimension"):
        Decoder(model).step(torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"prompts\[0\] has shape \(1, 3\): must have one dimension"):
        Decoder(model).read([torch.zeros(1, 3, dtype=torch.int64)])
    for wrong, kind in (([1, 2], "a list"), (torch.ones(3), "torch.float32"), (torch.ones(3).bool(), "torch.bool")):
        with pytest.raises(TypeError, match=rf"prompts\[0\] is {kind}: must be an int64 tensor"):
            Decoder(model).read([wrong])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="ring is a SimulatedRing: must be a Ring"):
        Decoder(model, ring=rs.SimulatedRing(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1 caches for 3 layers"):
        model(torch.zeros(1, 4, dtype=torch.int64), caches=model.new_caches()[:1])
    with pytest.raises(ValueError, match="lengths add up to 3, but the sequence has 4 rows"):
        model(torch.zeros(1, 4, dtype=torch.int64), lengths=(1, 2))
    with pytest.raises(ValueError, match="sharded=True without a ring"):
        Decoder(model, sharded=True)
    with pytest.raises(ValueError, match="decoding needs a causal model"):
        Decoder(new_model(causal=False))


def test_caches_that_are_not_those_of_the_layers_are_refused() -> None:
    model, tokens = new_model(), torch.zeros(1, 4, dtype=torch.int64)
    caches = model.new_caches()
    with torch.no_grad(), pytest.raises(ValueError, match="1 caches for 3 layers"):
        model(tokens, caches=[caches[0]] * 3)
    with torch.no_grad(), pytest.raises(ValueError, match=r"caches\[0\] has the pattern .* in order"):
        model(tokens, caches=[caches[1], caches[0], caches[2]])


def test_a_call_that_is_interrupted_between_layers_is_not_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(new_model())
    wanted = decoder.read([torch.arange(9)])
    with monkeypatch.context() as patch:
        patch.setattr(decoder.model.layers[1], "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            decoder.step(torch.tensor([9]))
    with pytest.raises(ValueError, match=r"caches\[1\] has seen \(9,\) tokens, caches\[0\] \(10,\)"):
        decoder.step(torch.tensor([9]))
    decoder.reset()
    torch.testing.assert_close(decoder.read([torch.arange(9)]), wanted, rtol=0, atol=0)


def interrupted(*args: Any) -> None:
    raise KeyboardInterrupt
