"""Transformers models over two ranks: loss and gradients of every weight equal those of one process."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import ringspan as rs
from ringspan.layout import LayoutName
from ringspan.runtime.launch import run_local_ranks
from tests.integrations.models import small_model

pytest.importorskip("transformers", reason="needs the extra transformers")

from ringspan.integrations.transformers import causal_lm_loss, register, shard
from tests.ranks import starts_processes

PATTERN = rs.Dilated((16, 64), (1, 4))
TOKENS = 101


@dataclass(frozen=True)
class Case:
    model: str
    layout: LayoutName = "contiguous"
    recompute: bool = False
    lengths: tuple[int, ...] | None = None
    own_loss: bool = False  # the model's, from logits of all rows, which it rounds to fp32

    @property
    def allowed(self) -> float:
        return 1e-6 if self.own_loss else 1e-12


CASES = (
    Case("llama"),
    Case("llama", "zigzag", recompute=True),
    Case("llama", "zigzag", lengths=(40, 1, 60)),
    Case("llama", own_loss=True),
    Case("qwen3", "zigzag"),
    Case("qwen3", recompute=True, lengths=(70, 31)),
    Case("mistral"),
    Case("mistral", "zigzag", recompute=True),
)


def apart(case: Case) -> float:
    """The largest difference of loss and gradients between the ring and this rank alone."""
    ring = rs.Ring(layout=case.layout)
    text = torch.randint(128, (1 if case.lengths else 2, TOKENS), generator=torch.Generator().manual_seed(1))
    register(pattern=PATTERN, ring=ring)
    model = small_model(case.model, "ringspan").train()
    if case.recompute:
        model.gradient_checkpointing_enable()
    batch = shard(text, labels=text, ring=ring, lengths=case.lengths)
    if case.lengths:
        by_offsets = shard(text, labels=text, ring=ring, cu_seqlens=(0, *accumulate(case.lengths)))
        assert all(torch.equal(torch.as_tensor(by_offsets[name]), torch.as_tensor(x)) for name, x in batch.items())
    loss = model(**batch).loss if case.own_loss else causal_lm_loss(model, batch, ring=ring)
    loss.backward()

    register(pattern=PATTERN, name="alone")
    alone = small_model(case.model, "alone").train()
    wanted = _loss_alone(alone, text, case.lengths)
    wanted.backward()

    total = loss.detach().double()
    dist.all_reduce(total)
    found = (total - wanted).abs().item()
    for mine, whole in zip(model.parameters(), alone.parameters(), strict=True):
        dist.all_reduce(mine.grad)
        found = max(found, (mine.grad - whole.grad).abs().max().item())
    return found


def _loss_alone(model: Any, text: torch.Tensor, lengths: tuple[int, ...] | None) -> torch.Tensor:
    """The mean over all targets, document after document."""
    documents = [part for part in text.split(lengths or [TOKENS], dim=1) if part.shape[1] > 1]
    total = torch.zeros((), dtype=torch.float64)
    for part in documents:
        logits = model(part, use_cache=False).logits[:, :-1]
        total = total + F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
    return total / sum(part[:, 1:].numel() for part in documents)


def refusal(**changes: Any) -> str:
    """What a model says to a batch that is not what `shard` supplies; None leaves an argument out."""
    ring = rs.Ring(layout="zigzag")
    register(pattern=PATTERN, ring=ring)
    model, text = small_model("llama", "ringspan"), torch.zeros(1, TOKENS, dtype=torch.int64)
    batch = {**shard(text, ring=ring), **changes}
    try:
        model(**{name: value for name, value in batch.items() if value is not None})
    except (ValueError, rs.RingError) as error:
        return str(error)
    return "no error"


WHOLE = torch.zeros(1, TOKENS, dtype=torch.int64)
NOT_SHARDED: dict[str, tuple[dict[str, Any], str]] = {
    "whole input": (
        dict(input_ids=WHOLE, position_ids=None, seq_len=None),
        f"{TOKENS} rows without seq_len",
    ),
    "whole input and its length": (dict(input_ids=WHOLE, position_ids=None), f"holds {TOKENS} rows, but has"),
    "no positions": (dict(position_ids=None), "position_ids are not those of this rank's rows"),
}


LONG = dict(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[2.0] * 8, original_max_position_embeddings=64)
CHUNKED = dict(num_local_experts=2, intermediate_size_mlp=128, moe_layers=[], layer_types=["full_attention"] * 2)
# Models that compute something from the rows or positions of a rank alone.
UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "lfm2": (dict(layer_types=["conv", "full_attention"]), "layers of kind conv over a ring"),
    "bamba": (
        dict(attn_layer_indices=[1], mamba_n_heads=8, mamba_d_state=16, mamba_d_head=16, mamba_n_groups=1),
        "layers of kind linear_attention over a ring",
    ),
    "phi3": (
        dict(rope_parameters=LONG, original_max_position_embeddings=64, pad_token_id=0),
        "own positions exceed 64",
    ),
    "llama4_text": (
        dict(no_rope_layers=[0, 0], floor_scale=50, **CHUNKED),
        "attn_temperature_tuning with floor_scale=50",
    ),
    "roberta": (dict(is_decoder=True, attention_probs_dropout_prob=0.0), "which begin with"),
    "stablelm": ({}, "A model that does not pass keyword arguments on to attention"),
    "biogpt": ({}, "A model that makes a mask itself"),
}
# Those that the sliced loss refuses: otherwise each rank would see its own rows only.
UNREACHED = {"llama": "sdpa", "openai-gpt": "ringspan"}


def refusal_of(kind: str, changes: dict[str, Any]) -> str:
    """What a model says that needs more than a rank's rows."""
    ring = rs.Ring()
    register(pattern=PATTERN, ring=ring)
    model, text = small_model(kind, "ringspan", **changes), torch.zeros(1, TOKENS, dtype=torch.int64)
    try:
        model(**shard(text, ring=ring))
    except ValueError as error:
        return str(error)
    return "no error"


def refusal_of_loss(kind: str, attention: str) -> str:
    ring = rs.Ring()
    register(pattern=PATTERN, ring=ring)
    batch = shard(torch.zeros(1, TOKENS, dtype=torch.int64), torch.zeros(1, TOKENS, dtype=torch.int64), ring=ring)
    try:
        causal_lm_loss(small_model(kind, attention), batch, ring=ring)
    except ValueError as error:
        return str(error)
    return "no error"


def all_cases() -> tuple[list[float], list[str]]:
    refusals = [refusal(**changes) for changes, _ in NOT_SHARDED.values()]
    refusals += [refusal_of(kind, changes) for kind, (changes, _) in UNFIT.items()]
    refusals += [refusal_of_loss(kind, attention) for kind, attention in UNREACHED.items()]
    return [apart(case) for case in CASES], refusals


@pytest.fixture(scope="module")
def found() -> list[tuple[list[float], list[str]]]:
    return run_local_ranks(2, all_cases)


@starts_processes
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_one_process(found: list[tuple[list[float], list[str]]], case: Case) -> None:
    for differences, _ in found:
        assert differences[CASES.index(case)] <= case.allowed


@starts_processes
@pytest.mark.parametrize("batch", NOT_SHARDED)
def test_batches_that_are_not_sharded_are_refused(found: list[tuple[list[float], list[str]]], batch: str) -> None:
    for _, refusals in found:
        assert NOT_SHARDED[batch][1] in refusals[list(NOT_SHARDED).index(batch)]


@starts_processes
@pytest.mark.parametrize("kind", UNFIT)
def test_models_that_need_more_than_their_rows_are_refused(
    found: list[tuple[list[float], list[str]]], kind: str
) -> None:
    for _, refusals in found:
        assert UNFIT[kind][1] in refusals[len(NOT_SHARDED) + list(UNFIT).index(kind)]


@starts_processes
def test_models_that_never_call_ringspan_are_refused_by_the_sliced_loss(
    found: list[tuple[list[float], list[str]]],
) -> None:
    for _, refusals in found:
        for text in refusals[-len(UNREACHED) :]:
            assert "never called ringspan's attention" in text
