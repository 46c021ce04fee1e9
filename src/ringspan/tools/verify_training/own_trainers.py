"""Ready adapters: ringspan's own LongNet, and a Transformers model with windows, sinks and packing over ringspan.

ringspan verify --training ringspan.tools.verify_training.own_trainers:longnet
ringspan verify --training ringspan.tools.verify_training.own_trainers:transformers
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import ringspan as rs
from ringspan.models import LongNet, LongNetConfig
from ringspan.nn.cross_entropy import IGNORED
from ringspan.runtime.settings import missing_package
from ringspan.tools.verify_training.adapter import Batch, StepResult

VOCAB_SIZE = 64


class RingAdapter:
    """A model over a ring whose weights every rank holds; gradients are summed over ranks.

    ``loss_and_logits`` returns this rank's share of the loss of a batch, and the logits of its rows.
    """

    vocab_size = VOCAB_SIZE

    def __init__(
        self, model: nn.Module, ring: rs.Ring, loss_and_logits: Callable[[Batch], tuple[Tensor, Tensor]]
    ) -> None:
        self.model, self.ring, self.loss_and_logits = model, ring, loss_and_logits

    def step(self, batches: Sequence[Batch], *, max_norm: float | None = None) -> StepResult:
        self.model.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            share, logits = self.loss_and_logits(batch)
            (share / len(batches)).backward()
            loss += share.detach().double() / len(batches)
        parameters = [weight for weight in self.model.parameters() if weight.grad is not None]
        for tensor in (loss, *(weight.grad for weight in parameters)):
            dist.all_reduce(tensor, group=self.ring.group)
        norm = get_total_norm([weight.grad for weight in parameters if weight.grad is not None])
        if max_norm is not None:
            clip_grads_with_norm_(parameters, max_norm, norm)
        return StepResult(
            loss=loss,
            gradients={name: w.grad.clone() for name, w in self.model.named_parameters() if w.grad is not None},
            token_losses=token_losses(logits, self.ring.split_sequence(batch.targets)),
            logits=logits,
            positions=self.ring.positions(batch.n),
            gradient_norm=norm,
        )

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        share, _ = self.loss_and_logits(batch)
        dist.all_reduce(share, group=self.ring.group)
        return float(share)


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of each row, 0 where the target does not count."""
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none", ignore_index=IGNORED)


def longnet(group: dist.ProcessGroup, dtype: torch.dtype) -> RingAdapter:
    """A LongNet of three layers: dilated with a shift, windowed, a sum of both; grouped KV heads, sinks, a soft cap."""
    torch.manual_seed(0)
    config = LongNetConfig.named(
        "nano",
        vocab_size=VOCAB_SIZE,
        layers=3,
        heads=4,
        patterns=("8x1,32x2 shift 4", "window 9", "window 5 + 64x4"),
        sinks=True,
        softcap=20.0,
    )
    model = LongNet(config).to(dtype)
    _spread(model.parameters())
    ring = rs.Ring(group, min_size=1)

    def loss_and_logits(batch: Batch) -> tuple[Tensor, Tensor]:
        tokens, targets = (ring.split_sequence(x) for x in (batch.tokens, batch.targets))
        options: dict[str, Any] = dict(ring=ring, seq_len=batch.n, lengths=batch.lengths)
        share = model.loss(tokens, targets, **options)
        with torch.no_grad():
            return share, model.logits(model(tokens, **options))

    return RingAdapter(model, ring, loss_and_logits)


def transformers(group: dist.ProcessGroup, dtype: torch.dtype) -> RingAdapter:
    """A small gpt-oss with ringspan attention: sliding windows in every other layer, sinks, grouped KV heads."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(missing_package("this adapter", "Transformers 5", "transformers")) from error
    from ringspan.integrations.transformers import causal_lm_loss, register, shard  # noqa: PLC0415

    ring = rs.Ring(group, min_size=1)
    register(ring=ring)
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8)
    sizes |= dict(num_key_value_heads=2, vocab_size=VOCAB_SIZE, sliding_window=12, num_local_experts=2)
    config = AutoConfig.for_model("gpt_oss", **sizes, num_experts_per_tok=1, experts_implementation="eager")  # has fp64
    model = AutoModelForCausalLM.from_config(config, attn_implementation="ringspan").to(dtype)
    _spread(model.parameters())

    def loss_and_logits(batch: Batch) -> tuple[Tensor, Tensor]:
        mine = shard(batch.tokens, batch.labels, ring=ring, lengths=batch.lengths)
        share = causal_lm_loss(model, mine, ring=ring)  # the model's own loss is computed in fp32
        with torch.no_grad():
            return share, model(**mine).logits

    return RingAdapter(model, ring, loss_and_logits)


@torch.no_grad()
def _spread(parameters: Iterable[Tensor]) -> None:
    """Larger weights than a model starts with, so that every row depends clearly on all that it attends to."""
    for weight in parameters:
        weight.add_(0.1 * torch.randn(weight.shape).to(weight))  # the same in every dtype
