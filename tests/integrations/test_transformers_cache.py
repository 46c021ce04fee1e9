"""`generate()` of Transformers models with ringspan's attention and cache: the tokens of computing everything anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ringspan as rs

transformers = pytest.importorskip("transformers", reason="needs the extra transformers")

from ringspan.integrations.transformers import RingspanCache, register  # noqa: E402

SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
PATTERN = rs.Dilated((16, 64), (1, 4), shift=3)


def model_of(kind: str, attention: str = "dilated") -> Any:
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": 128, "head_dim": 16, "sliding_window": None, "initializer_range": 0.2}
    config = transformers.AutoConfig.for_model(kind, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).double().eval()


def written(model: Any, tokens: Tensor, cache: RingspanCache | None, **more: Any) -> Tensor:
    options = dict(use_cache=False) if cache is None else dict(past_key_values=cache)
    ends = dict(min_new_tokens=60, pad_token_id=0)  # no end of text before that
    found: Tensor = model.generate(tokens, max_new_tokens=60, do_sample=False, **ends, **options, **more)
    return found


@pytest.fixture(autouse=True)
def _registered() -> None:
    register(pattern=rs.Full())
    register(pattern=PATTERN, name="dilated")


@pytest.mark.parametrize("attention", ["ringspan", "dilated"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_tokens_are_those_without_a_cache(kind: str, attention: str) -> None:
    model, tokens = model_of(kind, attention), torch.randint(128, (2, 40))
    cache = RingspanCache()
    assert torch.equal(written(model, tokens, cache), written(model, tokens, None))
    assert cache.get_seq_length() == 99
    rows = [layer.cache.rows_held(1, 0) for layer in cache.layers]
    assert rows == [99, 99] if attention == "ringspan" else max(rows) <= 32


def test_prompts_of_different_lengths_are_padded_on_the_left() -> None:
    model = model_of("llama")
    texts = [torch.randint(1, 128, (1, n)) for n in (50, 31)]
    tokens = torch.zeros(2, 50, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for i, text in enumerate(texts):
        tokens[i, -text.shape[1] :], mask[i, -text.shape[1] :] = text[0], 1
    cache = RingspanCache()
    found = written(model, tokens, cache, attention_mask=mask)
    for i, text in enumerate(texts):
        assert torch.equal(found[i, 50:], written(model, text, RingspanCache())[0, text.shape[1] :])
    assert cache.layers[0].cache.lengths == (109, 90)


def test_beams_take_their_rows_with_them() -> None:
    model, tokens = model_of("llama"), torch.randint(128, (2, 20))
    found = written(model, tokens, RingspanCache(), num_beams=3)
    assert torch.equal(found, written(model, tokens, None, num_beams=3))


def test_logits_equal_a_full_forward_pass_at_every_position() -> None:
    model, tokens = model_of("llama"), torch.randint(128, (2, 150))
    cache = RingspanCache()
    with torch.no_grad():
        wanted = model(tokens, use_cache=False).logits
        found = [model(tokens[:, :50], past_key_values=cache).logits]
        found += [model(tokens[:, [p]], past_key_values=cache).logits for p in range(50, 150)]
    torch.testing.assert_close(torch.cat(found, 1), wanted, rtol=0, atol=1e-10)


def test_what_a_bounded_cache_cannot_do_is_refused() -> None:
    model, tokens = model_of("llama"), torch.randint(128, (1, 20))
    cache = RingspanCache()
    with pytest.raises(ValueError, match="does not keep gradients"):
        model(tokens, past_key_values=RingspanCache())
    with torch.no_grad():
        model(tokens, past_key_values=cache)
    with pytest.raises(ValueError, match="tokens to remove"):
        cache.crop(-3)
    register(pattern=rs.Dilated((8,), (1,)), name="dilated")
    with torch.no_grad(), pytest.raises(ValueError, match="the cache was filled under"):
        model(tokens[:, :1], past_key_values=cache)


def test_a_call_that_fails_or_is_interrupted_does_not_count() -> None:
    model, tokens, cache = model_of("llama"), torch.randint(128, (1, 20)), RingspanCache()
    with pytest.raises(ValueError, match="does not keep gradients"):
        model(tokens, past_key_values=cache)
    assert cache.get_seq_length() == 0
    with torch.no_grad():
        wanted = model(tokens, use_cache=False).logits
        torch.testing.assert_close(model(tokens, past_key_values=cache).logits, wanted, rtol=0, atol=1e-10)
    hook = model.model.layers[1].register_forward_pre_hook(_interrupted)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        model(tokens[:, :1], past_key_values=cache)
    hook.remove()
    with torch.no_grad(), pytest.raises(ValueError, match="layer 0 has 22 tokens, layer 1 would have 21"):
        model(tokens[:, :1], past_key_values=cache)


def _interrupted(*args: Any) -> None:
    raise KeyboardInterrupt


def test_attention_that_is_not_ours_is_refused() -> None:
    """It would attend the new rows only."""
    model, tokens = model_of("llama", "sdpa"), torch.randint(128, (1, 20))
    with pytest.raises(ValueError, match="ringspan's attention only"):
        written(model, tokens, RingspanCache())
    keys, _ = RingspanCache().update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    assert keys.shape == (1, 2, 3, 4)
    with pytest.raises(ValueError, match="mul of keys that a RingspanCache holds"):
        _ = keys * 2


def test_a_text_goes_on_with_more_to_read() -> None:
    model, tokens, cache = model_of("llama"), torch.randint(1, 128, (2, 21)), RingspanCache()
    longer = torch.cat([written(model, tokens, cache), torch.randint(1, 128, (2, 33))], 1)
    assert torch.equal(written(model, longer, cache), written(model, longer, None))


def test_packed_rows_rings_and_foreign_caches_are_refused() -> None:
    model, tokens = model_of("llama"), torch.randint(128, (1, 20))
    packed = [dict(position_ids=torch.arange(20)[None] % 12), dict(cu_seq_lens_q=torch.tensor([0, 12, 20]))]
    for more in packed:
        with torch.no_grad(), pytest.raises(ValueError, match="packed rows with a cache"):
            model(tokens, past_key_values=RingspanCache(), **more)
    with pytest.raises(ValueError, match=r"another cache is in use; pass past_key_values=RingspanCache\(\)"):
        model.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0)
    register(pattern=PATTERN, name="dilated", ring=rs.SimulatedRing(2))
    with pytest.raises(ValueError, match="a cache with SimulatedRing"):
        written(model, tokens, RingspanCache())


def test_layers_that_share_keys_are_refused() -> None:
    """The cache would take the shared rows in twice."""
    layers = dict(num_hidden_layers=4, num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2)
    narrow = dict(vocab_size_per_layer_input=128, hidden_size_per_layer_input=16, laurel_rank=8, altup_num_inputs=2)
    sizes = {**SIZES, **layers, **narrow, "vocab_size": 128, "head_dim": 16, "activation_sparsity_pattern": None}
    config = transformers.AutoConfig.for_model("gemma3n_text", **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="ringspan").eval()
    tokens = torch.randint(128, (1, 20))
    with torch.no_grad(), pytest.raises(ValueError, match="a layer that uses the keys of an earlier one"):
        model(tokens, past_key_values=RingspanCache())
    assert model(tokens, use_cache=False).logits.isfinite().all()
