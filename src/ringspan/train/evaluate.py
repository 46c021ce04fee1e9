"""How good a model is on text that it was not trained on, and whether more context helps; a bigram beside it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ringspan.models import LongNet
from ringspan.train.corpus import Corpus
from ringspan.train.figures import BITS


@dataclass(frozen=True)
class Score:
    """Bits per byte over the same bytes of the same windows, each read with ``context`` bytes in all."""

    context: int
    windows: tuple[float, ...]

    @property
    def bits_per_byte(self) -> float:
        return statistics.mean(self.windows)

    def gain_over(self, other: Score) -> tuple[float, float]:
        """Bits per byte that it is better by, and the standard error: window against window, since windows differ."""
        gains = [theirs - ours for ours, theirs in zip(self.windows, other.windows, strict=True)]
        error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0
        return statistics.mean(gains), error


def score_contexts(
    model: LongNet, corpus: Corpus, contexts: list[int], *, windows: int = 64, scored: int = 512, seed: int = 0
) -> Iterator[Score]:
    """The last ``scored`` bytes of each window, with the context before them cut to each length, shortest first.

    All contexts are scored on the same bytes, so that what differs between them is the context alone.
    """
    if scored < 1:
        raise ValueError(f"scored={scored}: must be at least 1")
    if min(contexts) < scored:
        raise ValueError(f"contexts={contexts}: each must be at least {scored}, the number of bytes that are scored")
    if windows < 1:
        raise ValueError(f"windows={windows}: must be at least 1")
    longest = max(contexts)
    device = model.embedding.weight.device
    ends = [corpus.start_of(seed, number, longest) + longest for number in range(windows)]
    for context in sorted(contexts):
        losses = []
        for end in ends:
            text = corpus.read(end - context, end + 1).long().to(device)
            with torch.no_grad():
                hidden = model(text[None, :-1])[0, -scored:]
                losses.append(F.cross_entropy(model.logits(hidden).float(), text[-scored:]).item() * BITS)
        yield Score(context, tuple(losses))


def bigram_bits_per_byte(trained_on: Corpus, scored_on: Corpus, most_bytes: int = 2**24) -> float:
    """What a table of byte pairs achieves: counts of the one text (with one added to each), scored on the other."""
    text = trained_on.read(0, min(len(trained_on), most_bytes)).long()
    counts = torch.bincount(text[:-1] * 256 + text[1:], minlength=2**16).view(256, 256).double() + 1
    log_odds = (counts / counts.sum(1, keepdim=True)).log2()
    unseen = scored_on.read(0, min(len(scored_on), most_bytes)).long()
    return -log_odds[unseen[:-1], unseen[1:]].mean().item()
