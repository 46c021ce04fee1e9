"""Models as their configuration says: windows, sinks, soft caps and chunks equal Transformers' eager attention.

One process, and rings of 2 and 4 ranks: logits and the gradient of every weight, packed and not. Decoding as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import log
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import ringspan as rs
from ringspan.runtime.launch import run_local_ranks
from tests.integrations.models import small_model
from tests.ranks import starts_processes

pytest.importorskip("transformers", reason="needs the extra transformers")

from ringspan.integrations.transformers import RingspanCache, register, shard

TOKENS, PACKED = 97, (40, 1, 56)
WINDOWS = (9, 60)  # shorter and longer than a shard of four
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen3": dict(use_sliding_window=True, layer_types=["sliding_attention", "full_attention"]),
    "gemma2": dict(layer_types=["sliding_attention", "full_attention"], attn_logit_softcapping=3.0),
    "gemma3_text": dict(layer_types=["sliding_attention", "full_attention"]),
    "gpt_oss": dict(layer_types=["sliding_attention", "full_attention"], num_local_experts=2, num_experts_per_tok=1)
    | dict(experts_implementation="eager"),
    "llama4_text": dict(layer_types=["chunked_attention", "full_attention"], num_local_experts=2, moe_layers=[])
    | dict(intermediate_size_mlp=128),
    "deepseek_v3": dict(qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, kv_lora_rank=16, q_lora_rank=16)
    | dict(first_k_dense_replace=2, num_key_value_heads=4, head_dim=8),
}
WITHOUT_WINDOW = ("llama", "deepseek_v3")
CASES = [
    (kind, window, packed)
    for kind in MODELS
    for window in (WINDOWS[:1] if kind in WITHOUT_WINDOW else WINDOWS)
    for packed in (False, True)
]


def model_of(kind: str, attention: str, window: int | None) -> Any:
    reach = "attention_chunk_size" if kind == "llama4_text" else "sliding_window"
    model = small_model(kind, attention, **{reach: window}, **MODELS[kind])
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):  # their default is too small to matter
            parameter.data.normal_(generator=torch.Generator().manual_seed(3)).mul_(2)
        if "q_proj.weight" in name or "k_proj.weight" in name:  # scores that a soft cap changes
            parameter.data.mul_(10)
    return model.train()


def documents(packed: bool) -> tuple[int, ...]:
    return PACKED if packed else (TOKENS,)


def text() -> Tensor:
    return torch.randint(128, (1, TOKENS), generator=torch.Generator().manual_seed(1))


@contextmanager
def all_in_fp64() -> Iterator[None]:
    """Eager attention rounds its weights to fp32, and Gemma its norms. This keeps fp64, to compare exactly."""
    softmax, to_fp32 = F.softmax, Tensor.float

    def exact(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None, **others: Any) -> Tensor:
        return softmax(x, dim=dim, dtype=None if x.dtype == torch.float64 else dtype, **others)

    def unchanged(x: Tensor, *args: Any, **others: Any) -> Tensor:
        return x if x.dtype == torch.float64 else to_fp32(x, *args, **others)

    with mock.patch.object(F, "softmax", exact), mock.patch.object(Tensor, "float", unchanged):
        yield


def eager(kind: str, window: int, packed: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients of Transformers' own eager attention, document after document, in one process."""
    model = model_of(kind, "eager", window)
    logits = torch.cat([model(part, use_cache=False).logits for part in text().split(documents(packed), dim=1)], 1)
    logits.backward(weights_of(logits))
    return logits.detach(), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def weights_of(logits: Tensor) -> Tensor:
    return torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=logits.dtype)


def errors_of_this_rank() -> dict[tuple[str, int, bool], float]:
    """The largest difference between the ring and eager attention, in logits and gradients, for each case."""
    with all_in_fp64():
        return dict(_errors())


def _errors() -> Iterator[tuple[tuple[str, int, bool], float]]:
    for number, case in enumerate(CASES):
        yield case, error_over(rs.Ring(layout=("contiguous", "zigzag")[number % 2]), *case)


def error_over(ring: rs.Ring, kind: str, window: int, packed: bool) -> float:
    """The largest difference of logits and gradients between this ring and eager attention."""
    logits, gradients = eager(kind, window, packed)
    register(ring=ring)
    model = model_of(kind, "ringspan", window)
    batch = shard(text(), ring=ring, lengths=PACKED if packed else None)
    mine = model(**batch).logits
    mine.backward(ring.split_sequence(weights_of(logits)))
    error = (mine - ring.split_sequence(logits)).abs().max()
    for name, parameter in model.named_parameters():
        if name in gradients:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(grad)
            error = torch.maximum(error, (grad - gradients[name]).abs().max())
    return error.item()


@pytest.fixture
def _in_fp64() -> Iterator[None]:
    with all_in_fp64():
        yield


@starts_processes
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_equals_eager_attention(ranks: int) -> None:
    for found in run_local_ranks(ranks, errors_of_this_rank):
        assert {case: error for case, error in found.items() if not error <= 1e-10} == {}


@pytest.mark.usefixtures("_in_fp64")
@pytest.mark.parametrize(("kind", "window", "packed"), CASES)
def test_one_process_equals_eager_attention(kind: str, window: int, packed: bool) -> None:
    register()
    logits, gradients = eager(kind, window, packed)
    model = model_of(kind, "ringspan", window)
    positions = torch.cat([torch.arange(length) for length in documents(packed)])[None]
    found = model(text(), position_ids=positions, use_cache=False).logits
    found.backward(weights_of(logits))
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-10)
    for name, parameter in model.named_parameters():
        if name in gradients:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=0, atol=1e-10)


@pytest.mark.usefixtures("_in_fp64")
@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "deepseek_v3"])  # it caches latents
def test_decoding_with_a_bounded_cache_equals_eager_attention(kind: str) -> None:
    """`generate()` of two texts, one padded on the left, four windows long: logits of each step, and the tokens."""
    register()
    window, tokens = 9, torch.randint(3, 128, (2, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[1, :7] = 0
    options = dict(max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0, attention_mask=mask)
    options |= dict(return_dict_in_generate=True, output_logits=True)
    cache = RingspanCache()
    wanted = model_of(kind, "eager", window).eval().generate(tokens, use_cache=False, **options)
    found = model_of(kind, "ringspan", window).eval().generate(tokens, past_key_values=cache, **options)
    assert torch.equal(found.sequences, wanted.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(wanted.logits), rtol=0, atol=1e-10)
    held = [max(layer.cache.rows_held(i, 0) for i in range(2)) for layer in cache.layers]
    assert min(held) <= (39 if kind in WITHOUT_WINDOW else window)


@pytest.mark.usefixtures("_in_fp64")
def test_padding_equals_eager_attention() -> None:
    register()
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[1, 70:] = 0
    tokens = text().expand(2, -1)
    for kind in ("gemma2", "gpt_oss"):
        found, wanted = (
            model_of(kind, attention, 9)(tokens, attention_mask=mask, use_cache=False).logits
            for attention in ("ringspan", "eager")
        )
        torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()], rtol=0, atol=1e-10)


@pytest.mark.usefixtures("_in_fp64")
def test_one_pattern_for_each_layer() -> None:
    """Registered patterns equal the windows of the configuration; their number must be that of the layers."""
    register(pattern=[rs.Window(8), rs.Full()], name="by layer")
    full = dict(use_sliding_window=False, layer_types=["full_attention", "full_attention"])
    found = small_model("qwen3", "by layer", **full)(text(), use_cache=False).logits
    wanted = small_model("qwen3", "eager", sliding_window=9, **MODELS["qwen3"])(text(), use_cache=False).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    register(pattern=[rs.Full()], name="by layer")
    with pytest.raises(ValueError, match="of 2 layers, and 1 patterns"):
        model_of("llama", "by layer", None)(text(), use_cache=False)


MUTANTS = {
    "window ignored": ("mistral", dict(pattern=rs.Full())),
    "sinks dropped": ("gpt_oss", dict(sinks=None)),
    "soft cap dropped": ("gemma2", dict(softcap=None)),
    "documents leak": ("llama", dict(lengths=None)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_silent_failures_would_be_caught(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each failure that other libraries had, planted here, changes the logits by far more than the tolerance."""
    kind, changes = MUTANTS[mutant]
    register()
    logits, _ = eager(kind, 9, packed=True)
    positions = torch.cat([torch.arange(length) for length in PACKED])[None]
    honest = rs.attention
    monkeypatch.setattr(rs, "attention", lambda *args, **options: honest(*args, **{**options, **changes}))
    found = model_of(kind, "ringspan", 9)(text(), position_ids=positions, use_cache=False).logits
    assert (found - logits).abs().max() > 1e-4


def test_perplexity_of_a_window_differs_from_that_of_full_attention() -> None:
    """The models above tell windows apart: a test with a window that changes nothing could not fail."""
    register()
    short, full = (model_of("mistral", "ringspan", w)(text(), use_cache=False).logits for w in (9, None))
    assert F.mse_loss(short, full) > 1e-6


# Each as changes of the arguments of `rs.attention`, made from the arguments.
RING_MUTANTS: dict[str, tuple[str, Any]] = {
    "window cut at the border of shards": ("mistral", lambda _: dict(ring=None, seq_len=None)),
    "one row too few from the rank before": ("mistral", lambda _: dict(pattern=rs.Window(7))),
    "chunks counted on each rank": ("llama4_text", lambda _: dict(ring=None, seq_len=None)),
    "a sink counted on each rank": ("gpt_oss", lambda options: dict(sinks=options["sinks"] + log(2))),
}


def errors_of_mutants() -> dict[str, float]:
    honest, found = rs.attention, {}
    with all_in_fp64():
        for name, (kind, changes) in RING_MUTANTS.items():

            def mutant(*args: Any, changes: Any = changes, **options: Any) -> Tensor:
                return honest(*args, **{**options, **changes(options)})

            with mock.patch.object(rs, "attention", mutant):
                found[name] = error_over(rs.Ring(layout="contiguous"), kind, 9, False)
    return found


@starts_processes
def test_silent_failures_of_a_ring_would_be_caught() -> None:
    """On at least one rank; the first of a contiguous layout has no rank before it."""
    found = run_local_ranks(2, errors_of_mutants)
    missed = [name for name in RING_MUTANTS if not max(errors[name] for errors in found) > 1e-4]
    assert missed == []
