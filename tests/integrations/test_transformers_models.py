"""Model types of Transformers: ringspan equals eager attention, as configured, or refuses and says why.

A sample; `python -m benchmarks transformers_models --long` has all types, and writes docs/transformers_models.md.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ringspan as rs

transformers = pytest.importorskip("transformers", reason="needs pip install 'ringspan[transformers]'")

from benchmarks.small_models import compare  # noqa: E402
from ringspan.integrations.transformers import register  # noqa: E402
from ringspan.integrations.transformers_masks import MaskDescription  # noqa: E402

ITSELF = "uses the attention mask itself"
EQUAL = (
    *("LlamaForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM", "Gemma3ForCausalLM", "OPTForCausalLM"),
    *("BioGptForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM", "RobertaForMaskedLM", "BartForCausalLM"),
    *("ViTModel", "CLIPModel", "Qwen2VLForConditionalGeneration", "Wav2Vec2Model"),
)
# What their layers have, with windows and chunks of 8 tokens.
LOCAL = {
    "Gemma2ForCausalLM": "full, soft cap, window 7",
    "GptOssForCausalLM": "full, sinks, window 7",
    "Llama4ForCausalLM": "8x1, full",
    "ModernBertForMaskedLM": "full, window 4 right 4",
    "ModernBertDecoderForCausalLM": "full, window 7",
    "EmbeddingGemma2Model": "full, window 8 right 8",
    "Phi3ForCausalLM": "window 7",
    "Starcoder2ForCausalLM": "window 7",
    **dict.fromkeys(("Qwen2ForCausalLM", "Cohere2ForCausalLM", "Olmo3ForCausalLM"), "full, window 7"),
    **dict.fromkeys(("Exaone4ForCausalLM", "SmolLM3ForCausalLM"), "full, window 7"),
    "DeepseekV3ForCausalLM": "full",
}
REFUSED = {
    "BloomForCausalLM": ITSELF,
    "GPTNeoXJapaneseForCausalLM": ITSELF,
    "MvpForCausalLM": ITSELF,
    "TrOCRForCausalLM": ITSELF,
    "LEDForConditionalGeneration": ITSELF,
    "BigBirdPegasusForCausalLM": "bidirectional, but its mask is causal",
    "SplinterModel": "whether it is causal",
    "T5ForConditionalGeneration": "position_bias: an argument",
    "BartForConditionalGeneration": "an encoder-decoder model",
    "WhisperForConditionalGeneration": "an encoder-decoder model",
    "DeepseekV4ForCausalLM": "24 queries and 30 keys",
}
# Classes whose configuration has another name than they have.
KINDS = {
    "Gemma3ForCausalLM": "gemma3_text",
    "Llama4ForCausalLM": "llama4_text",
    "ViTModel": "vit",
    "CLIPModel": "clip",
    "GPT2LMHeadModel": "gpt2",
}


def kind_of(model: str) -> str:
    found: str = getattr(transformers, model).config_class.model_type
    return KINDS.get(model, found)


@pytest.mark.parametrize("model", EQUAL)
def test_equals_eager_attention(model: str) -> None:
    found = compare(kind_of(model), model)
    assert found.verdict == "equal", found


@pytest.mark.parametrize("model", LOCAL)
def test_local_attention_equals_eager_attention(model: str) -> None:
    found = compare(kind_of(model), model)
    assert found.verdict == "equal", found
    assert found.reason.endswith(f": {LOCAL[model]}")


@pytest.mark.parametrize("model", REFUSED)
def test_refuses_what_it_cannot_compute(model: str) -> None:
    found = compare(kind_of(model), model)
    assert found.verdict == "refused", found
    assert REFUSED[model] in found.reason


@pytest.mark.parametrize("pattern", [rs.Full(), rs.Dilated((16, 64), (1, 4))], ids=["full", "dilated"])
@pytest.mark.parametrize("kind", ["bert", "roberta", "gpt2"])
def test_cross_attention_is_refused_also_between_equal_lengths(kind: str, pattern: rs.Pattern) -> None:
    register(pattern=pattern)
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=99)
    config = transformers.AutoConfig.for_model(kind, is_decoder=True, add_cross_attention=True, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="ringspan").eval()
    tokens, states = torch.randint(10, 90, (2, 40)), torch.randn(2, 40, config.hidden_size)
    with pytest.raises(ValueError, match="may be cross-attention"):
        model(tokens, encoder_hidden_states=states, use_cache=False)
    assert model(tokens, use_cache=False).logits.isfinite().all()  # self-attention alone


USES: dict[str, Any] = {
    "added to scores": lambda mask, x: x + mask,
    "first in a sum": lambda mask, x: mask + x,
    "sliced": lambda mask, _: mask[:, :, :, :3],
    "cast": lambda mask, x: mask.to(x.dtype),
    "a boolean": lambda mask, _: mask.bool(),
    "its shape": lambda mask, _: mask.shape,
    "inverted": lambda mask, _: 1.0 - mask,
    "negated": lambda mask, _: ~mask,
    "compared": lambda mask, _: mask == 0,
    "a condition": lambda mask, _: 1 if mask else 0,
    "where": lambda mask, x: torch.where(mask, x, -torch.inf),
    "filled": lambda mask, x: x.masked_fill(mask, -torch.inf),
    "sdpa": lambda mask, x: torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask),
}


@pytest.mark.parametrize("use", USES)
def test_only_ringspan_can_use_the_mask(use: str) -> None:
    mask = MaskDescription(causal=True, kv_length=3, padding=None, lengths=None, pattern=rs.Full())
    with pytest.raises((ValueError, AttributeError), match="uses the attention mask itself"):
        USES[use](mask, torch.zeros(1, 1, 3, 3))
