"""A small trainer with context parallelism of its own, which is right, and can be made wrong in one way at a time.

Nothing of ringspan computes here: keys and values are gathered from all ranks, and attention is dense. On one process
every fault does nothing, as in the reports that they are taken from.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ringspan.testing import Batch, StepResult
from ringspan.tools.verify.check import ByRing, Check
from ringspan.tools.verify.run import LocalRanks
from ringspan.tools.verify_training.batches import TrainingSettings
from ringspan.tools.verify_training.compare import measure_training
from ringspan.tools.verify_training.judge import judge_training
from ringspan.tools.verify_training.rings import settings_for_training

VOCAB, WIDTH, HEADS, IGNORED = 64, 16, 2, -100
Options = dict[str, Any]  # of a Subject


class GatherRows(torch.autograd.Function):
    """All rows of all ranks in the order of ranks; the gradient of a row is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int], rank: int, group: Any, backward: str) -> Tensor:
        ctx.counts, ctx.rank, ctx.group, ctx.backward_kind = counts, rank, group, backward
        padded = F.pad(x, (0, 0, 0, max(counts) - x.shape[1])).contiguous()
        gathered = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(gathered, padded, group=group)
        return torch.cat([part[:, :count] for part, count in zip(gathered, counts, strict=True)], dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.contiguous().clone()
        if ctx.backward_kind == "sum":
            dist.all_reduce(grad, group=ctx.group)
        start = sum(ctx.counts[: ctx.rank])
        return grad[:, start : start + ctx.counts[ctx.rank]], None, None, None, None


@dataclass
class Subject:
    """The trainer on one rank. ``fault`` names what is wrong on rings of two or more."""

    group: Any
    dtype: torch.dtype
    fault: str = ""
    layout: str = "contiguous"
    window: int = 0
    sinks: bool = False
    layers: int = 2
    returns_rows: bool = True
    vocab_size: int = VOCAB
    weights: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.wrong = self.fault if self.size > 1 else ""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).mul(0.3).to(self.dtype).requires_grad_()

        self.weights = {"embedding": normal(VOCAB, WIDTH), "head": normal(VOCAB, WIDTH)}
        for layer in range(self.layers):
            for name in ("q", "k", "v", "out", "mlp"):
                self.weights[f"layers.{layer}.{name}"] = normal(WIDTH, WIDTH)
            if self.sinks:
                self.weights[f"layers.{layer}.sinks"] = normal(HEADS)

    def positions(self, n: int, rank: int) -> Tensor:
        if self.wrong == "odd_tokens_dropped":
            n -= n % self.size
        if self.wrong == "rank_0_computes_all":
            return torch.arange(n if rank == 0 else 0)
        if self.layout == "contiguous":
            return torch.arange(n)[rank * n // self.size : (rank + 1) * n // self.size]
        parts = [
            torch.arange(n)[i * n // (2 * self.size) : (i + 1) * n // (2 * self.size)] for i in range(2 * self.size)
        ]
        return torch.cat([parts[rank], parts[2 * self.size - 1 - rank]])

    def logits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Of this rank's rows, and their positions."""
        by_rank = [self.positions(batch.n, rank) for rank in range(self.size)]
        counts = [len(rows) for rows in by_rank]
        mine, everybody = by_rank[self.rank], torch.cat(by_rank)
        if self.wrong == "whole_sequence_everywhere":
            counts, mine, everybody = [batch.n], torch.arange(batch.n), torch.arange(batch.n)
        documents, places = batch.document_ids, batch.position_ids[0]
        x = self.weights["embedding"][batch.tokens[:, mine]]
        phase = places[mine, None] / torch.arange(1, WIDTH + 1)
        x = x + 0.5 * torch.sin(phase).to(self.dtype)
        allowed = everybody[None] <= mine[:, None] + (self.wrong == "sees_the_next_token")
        if self.wrong == "few_documents_fit":
            documents = documents.clamp(max=7)
        if self.wrong != "documents_leak":
            allowed &= documents[everybody][None] == documents[mine][:, None]
        if self.window and self.wrong != "window_becomes_full":
            allowed &= everybody[None] >= mine[:, None] - self.window
        if self.wrong == "stops_at_borders":
            allowed &= torch.isin(everybody, mine)[None]
        for layer in range(self.layers):
            x = x + self.attention(x, layer, counts, allowed)
            x = x + torch.tanh(x @ self.weights[f"layers.{layer}.mlp"])
        logits = x @ self.weights["head"].T
        if self.wrong == "whole_sequence_everywhere":
            mine = self.positions(batch.n, self.rank)
            logits = logits[:, mine]
        return logits, mine

    def attention(self, x: Tensor, layer: int, counts: list[int], allowed: Tensor) -> Tensor:
        q, k, v = (x @ self.weights[f"layers.{layer}.{name}"] for name in "qkv")
        if len(counts) > 1:
            kind = "own" if self.wrong == "gradients_of_remote_keys_lost" else "sum"
            if self.wrong == "sends_16_bits" and self.dtype != torch.float64:
                k, v = k + (k.bfloat16().to(k.dtype) - k).detach(), v + (v.bfloat16().to(v.dtype) - v).detach()
            k, v = (GatherRows.apply(y, counts, self.rank, self.group, kind) for y in (k, v))  # type: ignore[no-untyped-call]
        q, k, v = (y.view(*y.shape[:2], HEADS, WIDTH // HEADS).transpose(1, 2) for y in (q, k, v))
        scores = (q @ k.transpose(-1, -2)).masked_fill(~allowed, -torch.inf)
        if self.sinks and self.wrong != "sinks_dropped":
            sink = self.weights[f"layers.{layer}.sinks"][:, None, None].expand(*scores.shape[:-1], 1)
            weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        out: Tensor = (weights @ v).transpose(1, 2).flatten(2) @ self.weights[f"layers.{layer}.out"]
        return out

    def reduced(self, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=self.group)
        return x

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of this rank's rows, with how often each counts; logits and positions."""
        logits, mine = self.logits(batch)
        targets = batch.targets[:, mine]
        if self.wrong == "labels_shifted_in_shards":  # the next token of the shard, instead of the sequence
            shifted = F.pad(batch.tokens[:, mine][:, 1:], (0, 1), value=IGNORED)
            targets = torch.where(targets == IGNORED, targets, shifted)
        counted = (targets != IGNORED).to(self.dtype)
        if self.wrong == "border_labels_lost" and len(mine):
            counted[:, -1] = 0.0
        if self.wrong == "border_labels_doubled" and self.rank:
            counted[:, 0] *= 2.0
        losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none", ignore_index=IGNORED)
        return losses, counted, logits, mine

    def share(self, losses: Tensor, counted: Tensor) -> Tensor:
        """This rank's share of the mean loss."""
        count = counted.sum()
        if self.wrong == "mean_of_means":
            return (losses * counted).sum() / count.clamp(min=1) / self.size
        return (losses * counted).sum() / self.reduced(count)

    def step(self, batches: Sequence[Batch], *, max_norm: float | None = None) -> StepResult:
        names, leaves = list(self.weights), list(self.weights.values())
        total, loss = [torch.zeros_like(x) for x in leaves], torch.zeros((), dtype=self.dtype)
        for batch in batches:
            losses, counted, logits, mine = self.losses(batch)
            share = self.share(losses, counted)
            weight = 1 / len(batches)
            if self.wrong == "accumulates_by_rank":  # right for equally many labels on all ranks
                labels = counted.sum() + (len(batches) == 1) * (self.reduced(counted.sum()) / self.size - counted.sum())
                weight = weight * labels.item() / (self.reduced(counted.sum()) / self.size).item()
            found = torch.autograd.grad(share * weight, leaves, allow_unused=True)
            total = [a + (0 if b is None else b) for a, b in zip(total, found, strict=True)]
            loss = loss + share.detach() * weight
        own = total
        if self.wrong != "gradients_not_reduced":
            total = [self.reduced(x) for x in total]
        if self.wrong == "gradients_scaled":
            total = [x * self.size for x in total]
        if self.wrong == "order_of_sums_changes":
            noise = torch.Generator()
            noise.seed()
            total = [x * (1 + 1e-14 * torch.randn(x.shape, generator=noise, dtype=x.dtype)) for x in total]
        norm = _norm(own if self.wrong == "norm_of_own_part" else total)
        if max_norm is not None:
            by = _norm(own) if self.wrong == "clips_by_own_norm" else norm
            total = [x * min(1.0, max_norm / by) for x in total]
        if self.wrong == "holds_everything":
            self.held = [torch.ones(2**25, dtype=torch.uint8) for _ in range(8)] if batches[0].n > 200 else []
        gradients = dict(zip(names, total, strict=True))
        if self.wrong == "sinks_dropped":
            gradients = {name: x for name, x in gradients.items() if not name.endswith("sinks")}
        result = StepResult(self.reduced(loss) * self.loss_factor(), gradients, gradient_norm=norm)
        if not self.returns_rows:
            return result
        if self.wrong == "order_of_split_not_undone":
            counts = [len(self.positions(batch.n, rank)) for rank in range(self.size)]
            mine = torch.arange(len(mine)) + sum(counts[: self.rank])
        if self.wrong == "predictions_of_rank_0" and self.rank:
            mine = torch.full_like(mine, -1)
        rows = losses.detach()
        return replace(result, token_losses=rows, logits=logits.detach(), positions=mine)

    def loss_factor(self) -> float:
        return float(self.size) if self.wrong == "loss_scaled" else 1.0

    def evaluate(self, batch: Batch) -> float:
        losses, counted, _, _ = self.losses(batch)
        if self.wrong == "evaluates_own_rows":
            return float((losses * counted).sum().detach() / counted.sum())
        return float(self.reduced(self.share(losses, counted).detach())) * self.loss_factor()


def _norm(gradients: list[Tensor]) -> float:
    return float(torch.stack([x.square().sum() for x in gradients]).sum().sqrt())


# The faults, each with what it needs to show, and the check that names it.
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "documents_leak": ({}, "documents do not see each other"),
    "window_becomes_full": ({"window": 7}, "a token reaches the same rows"),
    "sees_the_next_token": ({}, "a token reaches the same rows"),
    "stops_at_borders": ({}, "a token reaches the same rows"),
    "sinks_dropped": ({"sinks": True}, "the loss of each token is that of one process"),
    "border_labels_lost": ({}, "every label counts once"),
    "border_labels_doubled": ({}, "every label counts once"),
    "labels_shifted_in_shards": ({}, "every label counts once"),
    "labels_shifted_in_zigzag": ({"layout": "zigzag", "fault": "labels_shifted_in_shards"}, "every label counts once"),
    "mean_of_means": ({}, "every label counts once"),
    "loss_scaled": ({}, "the loss is that of one process"),
    "gradients_scaled": ({}, "the gradients are those of one process"),
    "gradients_of_remote_keys_lost": ({}, "the gradients are those of one process"),
    "gradients_not_reduced": ({}, "all ranks hold the same gradients"),
    "norm_of_own_part": ({}, "the gradient norm is that of one process"),
    "clips_by_own_norm": ({}, "clipped gradients are those of one process"),
    "accumulates_by_rank": ({}, "accumulated gradients are those of one process"),
    "evaluates_own_rows": ({}, "the evaluation loss is that of one process"),
    "odd_tokens_dropped": ({}, "any length is exact"),
    "few_documents_fit": ({}, "any mix of documents is exact"),
    "order_of_split_not_undone": ({"layout": "zigzag"}, "predictions come back whole and in order"),
    "predictions_of_rank_0": ({}, "predictions come back whole and in order"),
    "order_of_sums_changes": ({}, "two runs give the same bits"),
    "sends_16_bits": ({}, "rounding does not grow with the ring"),
    "whole_sequence_everywhere": ({}, "no work is duplicated"),
    "rank_0_computes_all": ({}, "the work is balanced"),
    "holds_everything": ({}, "memory per rank falls with the ring"),
}

honest = partial(Subject)


def options_of(name: str) -> Options:
    return {"fault": name, **FAULTS[name][0]}


def __getattr__(name: str) -> Any:
    """Each fault is a factory of this name."""
    if name in FAULTS:
        return partial(Subject, **options_of(name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def measure_all(group: Any, device: Any, settings: TrainingSettings, subjects: list[Options], folder: str) -> Any:
    """One launch serves all subjects; each has a reference of its own."""
    found = []
    for i, options in enumerate(subjects):
        own = Path(folder, str(i))
        own.mkdir(exist_ok=True)
        found.append(measure_training(group, device, settings, partial(Subject, **options), str(own)))
    return found


def checks_of_all(subjects: list[Options], sizes: tuple[int, ...], seed: int = 0) -> list[list[Check]]:
    """The checks of each subject; one launch of each ring serves all of them."""
    settings = settings_for_training("subject", sizes, long_tokens=256, seed=seed)
    measured: list[ByRing] = [{} for _ in subjects]
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            ranks = LocalRanks(800.0).run(size, measure_all, settings, subjects, folder)
            for i, by_ring in enumerate(measured):
                by_ring[size] = [values[i] for values in ranks]
    return [judge_training(by_ring, settings) for by_ring in measured]


def random_subject(rng: random.Random) -> Options:
    """The options of an honest trainer."""
    return {
        "layout": rng.choice(["contiguous", "zigzag"]),
        "window": rng.choice([0, 0, 3, 10, 40]),
        "sinks": rng.random() < 0.5,
        "layers": rng.randint(1, 3),
        "returns_rows": rng.random() < 0.7,
    }
