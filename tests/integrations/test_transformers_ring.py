"""Transformers models over two ranks: loss and gradients of every weight equal those of one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import ringspan as rs
from ringspan.layout import LayoutName
from ringspan.processes import run_local_ranks
from tests.integrations.models import small_model

pytest.importorskip("transformers", reason="needs pip install 'ringspan[transformers]'")

from ringspan.integrations.transformers import causal_lm_loss, register, shard

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


def all_cases() -> list[float]:
    return [apart(case) for case in CASES]


@pytest.fixture(scope="module")
def found() -> list[list[float]]:
    return run_local_ranks(2, all_cases)


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_one_process(found: list[list[float]], case: Case) -> None:
    for differences in found:
        assert differences[CASES.index(case)] <= case.allowed
