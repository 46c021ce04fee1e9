"""Jobs of real ranks for the tests of training. test_ranks.py compares their results over ring sizes."""

from __future__ import annotations

import dataclasses
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ringspan as rs
from ringspan.models import LongNet, LongNetConfig
from ringspan.nn.cross_entropy import Gradients
from ringspan.train.config import TrainSettings
from ringspan.train.data import Corpus
from ringspan.train.trainer import Trainer
from tests.ranks import job_on_ranks

CONFIG = LongNetConfig.named("nano", patterns=("window 15 + 128x4", "16x1,128x4 shift 8"), sinks=True)
STOP = 2  # steps before a run is interrupted

Curve = tuple[list[float], dict[str, bytes]]  # losses, and the weights at the end


def settings_for(folder: Path, **changes: Any) -> TrainSettings:
    base = TrainSettings(model=CONFIG, data=(str(Path(torch.__file__).parent / "nn"),), tokens=256, steps=4, warmup=2)
    return dataclasses.replace(base, **{"out": str(folder), "save_every": 100, "dtype": "float64", **changes})


def packed_settings(folder: Path, out: str, **changes: Any) -> TrainSettings:
    """Settings for short files, each a document: some of one byte, and one longer than a sequence."""
    texts = folder / "texts"
    if dist.get_rank() == 0 and not texts.exists():
        texts.mkdir()
        for i, size in enumerate((30, 1, 90, 7, 400, 1, 1, 55, 120, 13) * 3):
            (texts / f"{i:02}.txt").write_bytes(bytes(97 + (i * j + j * j) % 26 for j in range(size)))
    dist.barrier()
    return settings_for(folder / out, **{"data": (str(texts),), "documents": True, **changes})


@job_on_ranks(1, 2, 3, 4)
def summed(folder: Path) -> Any:
    return loss_and_gradients("summed")


@job_on_ranks(1, 2, 3, 4)
def averaged(folder: Path) -> Any:
    return loss_and_gradients("averaged")


@job_on_ranks(1, 2, 3, 4)
def curve(folder: Path) -> Curve:
    world = dist.get_world_size()
    return train(settings_for(folder / f"curve{world}", weights="replicated" if world == 3 else "sharded"))


@job_on_ranks(1)
def batch(folder: Path) -> Curve:
    return train(settings_for(folder / "batch", batch=2))


@job_on_ranks(1)
def accumulated(folder: Path) -> Curve:
    return train(settings_for(folder / "accumulated", accumulate=2))


@job_on_ranks(4)
def mesh(folder: Path) -> Curve:
    return train(settings_for(folder / "mesh", ring=2))


@job_on_ranks(2, 1)
def resumed_on_one_rank(folder: Path) -> Curve:
    """Two ranks train until ``STOP``; one rank, started later, continues."""
    settings, resume = settings_for(folder / "for-one-rank"), dist.get_world_size() == 1
    return train(settings, resume=True) if resume else train(settings, stop_at=STOP)


@job_on_ranks(2, 3)
def resumed_on_three_ranks(folder: Path) -> Curve:
    """The same on three ranks: the last one has no share of the two sinks of a layer."""
    settings, resume = settings_for(folder / "for-three-ranks"), dist.get_world_size() == 3
    return train(settings, resume=True) if resume else train(settings, stop_at=STOP)


@job_on_ranks(1, 2, 3)
def documents(folder: Path) -> Curve:
    world = dist.get_world_size()
    return train(packed_settings(folder, f"documents{world}", layout="zigzag" if world == 1 else "balanced"))


@job_on_ranks(1)
def documents_in_a_batch(folder: Path) -> Curve:
    return train(packed_settings(folder, "documents_in_a_batch", batch=2))


@job_on_ranks(2)
def documents_in_a_zigzag_batch(folder: Path) -> Curve:
    return train(packed_settings(folder, "documents_in_a_zigzag_batch", batch=2))


@job_on_ranks(4)
def documents_on_a_mesh(folder: Path) -> Curve:
    return train(packed_settings(folder, "documents_on_a_mesh", ring=2, layout="balanced"))


@job_on_ranks(2, 3)
def documents_resumed(folder: Path) -> Curve:
    """Two ranks train until ``STOP``; three ranks, started later, continue."""
    settings, resume = packed_settings(folder, "documents_resumed", layout="balanced"), dist.get_world_size() == 3
    return train(settings, resume=True) if resume else train(settings, stop_at=STOP)


@job_on_ranks(1)
def documents_alone(folder: Path) -> tuple[float, float]:
    """The first loss of a run, and the same from each document alone."""
    settings = packed_settings(folder, "documents_alone", steps=1, save_every=1)
    torch.manual_seed(settings.seed)
    model, total, count = LongNet(CONFIG).double(), torch.zeros((), dtype=torch.float64), 0
    corpus = Corpus.of(settings.data).split(settings.held_out)[0]
    start, text = corpus.start_of(settings.seed, 0, settings.tokens), corpus.read(0, len(corpus)).long()
    for first, stop in pairwise([0, *accumulate(file.bytes for file in corpus.selection.files)]):
        some = text[None, max(first, start) : min(stop, start + settings.tokens + 1)]
        targets = some.shape[1] - 1
        if targets > 0:
            total += targets * model.loss(some[:, :-1], some[:, 1:]).detach()
            count += targets
    return train(settings)[0][0], (total / count).item()


@job_on_ranks(2)
def bfloat16(folder: Path) -> Curve:
    return train(settings_for(folder / "bfloat16", dtype="bfloat16"))


@job_on_ranks(2)
def stopped_and_resumed(folder: Path) -> tuple[Curve, Curve]:
    return train(settings_for(folder / "cut"), stop_at=STOP), train(settings_for(folder / "cut"), resume=True)


@job_on_ranks(2)
def different_text(folder: Path) -> list[str]:
    """The errors on this rank when the ranks find different text, and when one of them finds none."""
    said = []
    for number, content in enumerate((b"other text", b"")):
        mine = folder / f"text-{number}-{dist.get_rank()}"
        mine.write_bytes(b"the same text" if dist.get_rank() == 0 else content)
        try:
            Trainer(settings_for(folder / "never", data=(str(mine),)))
        except ValueError as error:
            said.append(str(error))
    return said


def loss_and_gradients(gradients: Gradients, tokens: int = 203) -> tuple[float, dict[str, list[float]]]:
    """The loss summed over ranks, and the gradients after the all-reduce: summed, or averaged."""
    torch.manual_seed(0)
    model = LongNet(CONFIG).double()
    ring = rs.Ring(min_size=1)
    text = torch.randint(256, (1, tokens + 1), generator=torch.Generator().manual_seed(1))
    targets = text[:, 1:].clone()
    targets[:, : tokens // 3] = -100  # a mask that is uneven over the ranks
    mine, wanted = (ring.split_sequence(x) for x in (text[:, :-1], targets))
    loss = model.loss(mine, wanted, ring=ring, seq_len=tokens, gradients=gradients)
    loss.backward()
    total = loss.detach().clone()
    found = {}
    for value in (total, *(weight.grad for weight in model.parameters())):
        dist.all_reduce(value)
        value.div_(ring.size if gradients == "averaged" else 1)
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        found[name] = weight.grad.flatten().tolist()
    return total.item(), found


def train(settings: TrainSettings, *, resume: bool = False, stop_at: int | None = None) -> Curve:
    losses: list[float] = []
    with Trainer(settings, resume=resume) as trainer:
        assert resume == bool(trainer.next_step)
        trainer.run(lambda step: losses.append(step.loss), until=stop_at)
        weights = {name: weight.full_tensor().numpy().tobytes() for name, weight in trainer.model.state_dict().items()}
    return losses, weights
