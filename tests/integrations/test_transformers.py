"""Transformers models with ringspan's attention: one process, padded, packed; what cannot be expressed is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ringspan as rs
from tests.integrations.models import small_model

pytest.importorskip("transformers", reason="needs the extra transformers")

from ringspan.integrations.transformers import register
from ringspan.integrations.transformers_masks import MaskDescription

KINDS = ("llama", "qwen3", "mistral")


def model_of(kind: str, attention: str, **changes: Any) -> Any:
    return small_model(kind, attention, **changes).eval()


def logits(model: Any, tokens: Tensor, **more: Any) -> Tensor:
    found: Tensor = model(tokens, use_cache=False, **more).logits
    return found


@pytest.fixture(autouse=True)
def _registered() -> None:
    register(pattern=rs.Full())
    register(pattern=rs.Dilated((16, 64), (1, 4)), name="dilated")


@pytest.mark.parametrize("kind", KINDS)
def test_plain_attention_gives_sdpas_logits(kind: str) -> None:
    tokens = torch.randint(128, (2, 50))
    torch.testing.assert_close(
        logits(model_of(kind, "ringspan"), tokens), logits(model_of(kind, "sdpa"), tokens), rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_give_what_each_document_gives_alone(side: str) -> None:
    model = model_of("llama", "dilated")
    documents = [torch.randint(128, (1, length)) for length in (50, 31)]
    mask = torch.ones(2, 50, dtype=torch.int64)
    rows = slice(0, 31) if side == "right" else slice(19, 50)
    mask[1] = 0
    mask[1, rows] = 1
    tokens = torch.zeros(2, 50, dtype=torch.int64)
    tokens[0], tokens[1, rows] = documents[0][0], documents[1][0]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = logits(model, tokens, attention_mask=mask, position_ids=positions)
    torch.testing.assert_close(found[0], logits(model, documents[0])[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(found[1, rows], logits(model, documents[1])[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("told_by", ["borders", "positions"])
def test_packed_documents_do_not_see_one_another(told_by: str) -> None:
    model = model_of("llama", "dilated")
    documents = [torch.randint(128, (1, length)) for length in (20, 37)]
    packed = torch.cat(documents, 1)
    positions = torch.cat([torch.arange(20), torch.arange(37)])[None]
    borders = dict(cu_seq_lens_q=torch.tensor([0, 20, 57])) if told_by == "borders" else {}
    found = logits(model, packed, position_ids=positions, **borders)
    wanted = torch.cat([logits(model, document) for document in documents], 1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def test_packed_documents_are_told_by_the_mask_where_positions_do_not_reach_attention() -> None:
    model = model_of("llama", "dilated")
    documents = [torch.randint(128, (1, length)) for length in (20, 37)]
    wanted = torch.cat([logits(model, document) for document in documents], 1)
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {**kwargs, "position_ids": None}), with_kwargs=True
        )
    positions = torch.cat([torch.arange(20), torch.arange(37)])[None]
    found = logits(model, torch.cat(documents, 1), position_ids=positions)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def test_positions_that_tell_nothing_clear_are_refused() -> None:
    model = model_of("llama", "dilated")
    gap = torch.cat([torch.arange(20), torch.arange(30, 60)])[None]
    for _ in range(2):  # what was refused once is refused again
        with pytest.raises(ValueError, match="position_ids neither"):
            logits(model, torch.randint(128, (1, 50)), position_ids=gap)
    uneven = torch.stack([torch.arange(50), torch.arange(50) % 25])
    with pytest.raises(ValueError, match="documents start at different positions"):
        logits(model, torch.randint(128, (2, 50)), position_ids=uneven)


def test_no_mask_of_all_pairs_is_built() -> None:
    seen: list[Any] = []
    model = model_of("llama", "dilated")
    model.model.layers[0].register_forward_pre_hook(
        lambda _, __, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    logits(model, torch.randint(128, (1, 50)))
    logits(model, torch.randint(128, (1, 50)), attention_mask=torch.ones(1, 50, dtype=torch.int64))
    assert [(type(mask), mask.padding) for mask in seen] == [(MaskDescription, None)] * 2


def test_padding_and_packing_go_together() -> None:
    model = model_of("llama", "dilated")
    documents = [torch.randint(128, (1, length)) for length in (20, 23)]
    tokens = torch.cat([*documents, torch.zeros(1, 7, dtype=torch.int64)], 1)
    positions = torch.cat([torch.arange(20), torch.arange(23), torch.zeros(7, dtype=torch.int64)])[None]
    found = logits(model, tokens, position_ids=positions, attention_mask=(torch.arange(50) < 43)[None].long())
    wanted = torch.cat([logits(model, document) for document in documents], 1)
    torch.testing.assert_close(found[:, :43], wanted, rtol=0, atol=1e-10)


ISOLATED = {"bert": "MaskedLM", "roberta": "MaskedLM", "opt": "CausalLM", "biogpt": "CausalLM"}


@pytest.mark.parametrize("kind", ISOLATED)
def test_positions_that_begin_anew_isolate_documents_where_eager_attention_does_not(kind: str) -> None:
    import transformers

    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=99)
    sizes |= dict(ffn_dim=96, word_embed_proj_dim=64, max_position_embeddings=128)
    tokens = torch.randint(10, 99, (1, 50))
    positions = torch.cat([torch.arange(20), torch.arange(30)])[None]
    apart = {}
    for attention in ("eager", "ringspan"):
        config = transformers.AutoConfig.for_model(kind, **sizes)
        auto = getattr(transformers, f"AutoModelFor{ISOLATED[kind]}")
        model = auto.from_config(config, attn_implementation=attention).double().eval()
        parts = zip(tokens.split((20, 30), 1), positions.split((20, 30), 1), strict=True)
        alone = torch.cat([model(part, position_ids=places).logits for part, places in parts], 1)
        apart[attention] = (model(tokens, position_ids=positions).logits - alone).abs().max().item()
    assert apart["ringspan"] <= 1e-12
    assert apart["eager"] > 1e-4


def test_positions_that_change_in_place_are_read_again() -> None:
    model = model_of("llama", "dilated")
    tokens, positions = torch.randint(128, (1, 50)), torch.arange(50)[None].clone()
    logits(model, tokens, position_ids=positions)
    positions.copy_(torch.cat([torch.arange(20), torch.arange(30)])[None])
    wanted = torch.cat([logits(model, part) for part in (tokens[:, :20], tokens[:, 20:])], 1)
    torch.testing.assert_close(logits(model, tokens, position_ids=positions), wanted, rtol=0, atol=1e-10)
    with torch.inference_mode():
        logits(model, tokens, position_ids=torch.arange(50)[None])
    torch.testing.assert_close(logits(model, tokens, position_ids=positions), wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (dict(attention_mask=torch.ones(1, 1, 50, 50, dtype=torch.bool)), r"attention_mask of shape \(1, 1, 50, 50\)"),
        (dict(attention_mask=torch.ones(1, 50, 50, dtype=torch.bool)), r"attention_mask of shape \(1, 50, 50\)"),
        (dict(output_attentions=True), "output_attentions=True"),
        (dict(block_indices=torch.arange(3)), "block_indices: an argument of this model's attention"),
        (
            dict(attention_mask=(torch.arange(50) < 43)[None].long(), cu_seq_lens_q=torch.tensor([0, 20, 43])),
            "both attention_mask and cu_seq_lens_q",
        ),
        (dict(cu_seq_lens_k=torch.tensor([0, 20, 50])), "cu_seq_lens_k without an equal"),
        (
            dict(cu_seq_lens_q=torch.tensor([0, 20, 50]), cu_seq_lens_k=torch.tensor([0, 21, 50])),
            "cu_seq_lens_k without an equal",
        ),
    ],
)
def test_arguments_that_cannot_be_expressed_are_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        logits(model_of("llama", "ringspan"), torch.randint(128, (1, 50)), **arguments)


def test_registering_and_sharding_refuse_what_does_not_fit() -> None:
    from ringspan.integrations.transformers import shard

    for wrong in ("full", 5):
        with pytest.raises(TypeError, match="must be a pattern"):
            register(pattern=wrong)  # type: ignore[arg-type]
    tokens, ring = torch.zeros(1, 50, dtype=torch.int64), None
    with pytest.raises(ValueError, match="add up to 49"):
        shard(tokens, ring=ring, lengths=(20, 29))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"labels \(1, 49\): must be \(1, 50\)"):
        shard(tokens, tokens[:, 1:], ring=ring)  # type: ignore[arg-type]


def test_encoder_decoders_are_refused() -> None:
    from transformers import BartConfig, BartModel

    config = BartConfig(vocab_size=128, d_model=32, encoder_layers=1, decoder_layers=1, attn_implementation="ringspan")
    model = BartModel(config).eval()
    with pytest.raises(ValueError, match="an encoder-decoder model"):
        model(torch.randint(4, 100, (1, 20)))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("cohere", "logit_scale=0.0625"),
        ("phi", "a bias of the head"),
        ("recurrent_gemma", "logits_soft_cap=30.0"),
        ("llama4_text", "Llama4ForCausalLM names no base model"),
    ],
)
def test_sliced_loss_refuses_heads_that_are_more_than_a_matrix(kind: str, reason: str) -> None:
    from ringspan.integrations.transformers import causal_lm_loss

    with pytest.raises(ValueError, match=reason):
        causal_lm_loss(small_model(kind, "ringspan"), {}, ring=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(attention_dropout=0.1), "dropout=0.1"),
        (dict(sliding_window=49), "window 48 over 50 tokens"),
    ],
)
def test_what_cannot_be_expressed_is_refused(changes: dict[str, Any], reason: str) -> None:
    model = model_of("mistral", "ringspan", **changes).train()
    with pytest.raises(ValueError, match=reason):
        logits(model, torch.randint(128, (1, 50)))


def test_a_window_over_everything_is_none() -> None:
    tokens = torch.randint(128, (1, 50))
    wide = logits(model_of("mistral", "ringspan", sliding_window=50), tokens)
    torch.testing.assert_close(wide, logits(model_of("mistral", "sdpa"), tokens), rtol=0, atol=1e-10)


def test_decoding_with_a_cache_is_refused() -> None:
    model = model_of("llama", "ringspan")
    with pytest.raises(ValueError, match="another cache"):
        model.generate(torch.randint(128, (1, 10)), max_new_tokens=3, do_sample=False)


def test_sliced_loss_refuses_models_that_predict_several_tokens_per_row() -> None:
    from transformers import ProphetNetConfig, ProphetNetForCausalLM

    from ringspan.integrations.transformers import causal_lm_loss

    layers = dict(
        num_encoder_layers=1, num_decoder_layers=1, num_encoder_attention_heads=2, num_decoder_attention_heads=2
    )
    config = ProphetNetConfig(vocab_size=64, hidden_size=16, encoder_ffn_dim=16, decoder_ffn_dim=16, **layers)
    with pytest.raises(ValueError, match="ngram=2"):
        causal_lm_loss(ProphetNetForCausalLM(config), {}, ring=None)  # type: ignore[arg-type]


def test_masks_that_a_pattern_cannot_express_are_refused() -> None:
    """Whatever a model combines: the parts are known by their code, and an unknown one is named."""
    from transformers import AttentionMaskInterface, masking_utils

    register(name="configured")
    model = model_of("mistral", "configured", sliding_window=9)
    causal = masking_utils.causal_mask_function

    def mask(function: Any, **options: Any) -> Any:
        sizes = dict(batch_size=1, q_length=20, kv_length=20, config=model.config, device="cpu")
        return AttentionMaskInterface()["configured"](mask_function=function, **sizes, **options)

    window = masking_utils.sliding_window_causal_mask_function
    assert mask(window(9), local_size=9).pattern == rs.Window(8)
    prefix = masking_utils.or_masks(causal, masking_utils.blockwise_overlay(torch.zeros(1, 20)))
    inside = masking_utils.and_masks(causal, masking_utils.blockwise_overlay(torch.zeros(1, 20)))
    documents = masking_utils.and_masks(causal, masking_utils.packed_sequence_mask_function(torch.zeros(1, 20)))
    one_sided = masking_utils.and_masks(
        masking_utils.bidirectional_mask_function, masking_utils.sliding_window_overlay(9)
    )
    for function, options, named in (
        (prefix, {}, "or_masks"),
        (inside, {}, "blockwise_overlay"),
        (documents, {}, "packed_sequence_mask_function"),  # without positions in documents
        (window(9), {}, "sliding_window_overlay"),  # without its size
        (window(5), dict(local_size=9), "sliding_window_overlay"),
        (one_sided, dict(local_size=9, allow_is_bidirectional_skip=True), "sliding_window_overlay"),
    ):
        with pytest.raises(ValueError, match=rf"builds its own mask \(.*{named}"):
            mask(function, **options)


def test_what_modules_hold_but_do_not_pass_on_is_refused() -> None:
    register(name="configured")
    tokens = torch.randint(128, (1, 50))
    for name, value in (("sinks", torch.zeros(4)), ("attn_logit_softcapping", 30.0)):
        model = model_of("llama", "configured")
        setattr(model.model.layers[1].self_attn, name, value)
        with pytest.raises(ValueError, match=f"LlamaAttention has {name}"):
            logits(model, tokens)


def test_a_window_of_the_module_that_is_not_that_of_the_mask_is_refused() -> None:
    register(name="configured")
    model, tokens = model_of("llama", "configured"), torch.randint(128, (1, 50))
    with pytest.raises(ValueError, match="sliding_window=9, but its mask is full"):
        logits(model, tokens, sliding_window=9)
    logits(model, tokens, sliding_window=50)
    windowed = model_of("qwen3", "configured", sliding_window=9, use_sliding_window=True, max_window_layers=0)
    for layer in windowed.model.layers:
        layer.self_attn.sliding_window = 10
    with pytest.raises(ValueError, match="sliding_window=10, but its mask is window 8"):
        logits(windowed, tokens)


def test_padding_inside_a_text_is_refused_where_a_window_would_count_it() -> None:
    register(name="configured")
    mask = torch.ones(1, 50, dtype=torch.int64)
    mask[0, 20:23] = 0
    tokens, padded = torch.randint(128, (1, 50)), dict(attention_mask=mask, position_ids=mask.cumsum(1) - 1)
    with pytest.raises(ValueError, match="padding inside a text, and window 8"):
        logits(model_of("mistral", "configured", sliding_window=9), tokens, **padded)
    found, wanted = (logits(model_of("llama", kind), tokens, **padded) for kind in ("configured", "sdpa"))
    torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()], rtol=0, atol=1e-10)


def test_a_list_of_patterns_must_have_one_for_each_layer() -> None:
    register(pattern=[rs.Full()] * 3, name="three")
    with pytest.raises(ValueError, match="layer_idx=0 of 2 layers, and 3 patterns"):
        logits(model_of("llama", "three"), torch.randint(128, (1, 50)))


def test_documents_in_positions_are_refused_under_compile() -> None:
    """A traced graph cannot tell how many there are; before, they saw one another."""
    register(name="configured")
    model = torch.compile(model_of("llama", "configured"), backend="aot_eager")
    tokens, one = torch.randint(128, (1, 50)), torch.arange(50)[None]
    wanted = logits(model_of("llama", "sdpa"), tokens)
    torch.testing.assert_close(logits(model, tokens, position_ids=one), wanted, rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match=r"under torch\.compile: pass the documents' offsets"):
        logits(model, tokens, position_ids=torch.cat([torch.arange(20), torch.arange(30)])[None])
