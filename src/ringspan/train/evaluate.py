"""How good a model is on text that it was not trained on; whether more context helps, and which branches are used."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from ringspan.models import LongNet
from ringspan.train.corpus import Corpus
from ringspan.train.figures import BITS


@dataclass(frozen=True)
class Score:
    """Bits per byte over the same bytes of the same windows, each read with ``context`` bytes in all.

    ``segments`` are those of the pattern, which may have been cut as well.
    """

    context: int
    segments: tuple[int, ...]
    windows: tuple[float, ...]

    @property
    def bits_per_byte(self) -> float:
        return statistics.mean(self.windows)

    def gain_over(self, other: Score) -> tuple[float, float]:
        """Bits per byte that it is better by, and the standard error: window against window, since windows differ."""
        gains = [theirs - ours for ours, theirs in zip(self.windows, other.windows, strict=True)]
        error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else math.nan
        return statistics.mean(gains), error


def score_contexts(
    model: LongNet, corpus: Corpus, contexts: list[int], *, windows: int = 64, scored: int = 512, seed: int = 0
) -> Iterator[Score]:
    """The last ``scored`` bytes of each window, with the context before them cut to each length, shortest first.

    All contexts are scored on the same bytes, so that what differs between them is the context alone.
    """
    ends = _ends(corpus, contexts, windows, scored, seed)
    for context in sorted(contexts):
        yield _score(model, corpus, ends, context, scored)


def score_branches(
    model: LongNet, corpus: Corpus, context: int, *, windows: int = 64, scored: int = 512, seed: int = 0
) -> Iterator[Score]:
    """The same weights with their pattern cut: which branches does the model use, and how far does it look?

    First with the shortest segments cut to a quarter and to a half; then whole, and one branch more each time.
    """
    if not model.config.segment_lengths:
        raise ValueError("segment_lengths=(): plain attention has no branches to leave out")
    branches = sorted(zip(model.config.segment_lengths, model.config.dilation_rates, strict=True))
    lengths, rates = zip(*branches, strict=True)
    cuts: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((max(1, lengths[0] // k),), rates[:1]) for k in (4, 2)]
    cuts += [(lengths[:count], rates[:count]) for count in range(1, len(lengths) + 1)]
    ends = _ends(corpus, [context], windows, scored, seed)
    for segment_lengths, dilation_rates in cuts:
        config = replace(model.config, segment_lengths=segment_lengths, dilation_rates=dilation_rates)
        cut = LongNet(config).to(model.embedding.weight)
        cut.load_state_dict(model.state_dict())
        yield _score(cut, corpus, ends, context, scored)


def _ends(corpus: Corpus, contexts: list[int], windows: int, scored: int, seed: int) -> list[int]:
    """Where windows end that leave room for the longest context."""
    if scored < 1:
        raise ValueError(f"scored={scored}: must be at least 1")
    if min(contexts) < scored:
        raise ValueError(f"contexts={contexts}: each must be at least {scored}, the number of bytes that are scored")
    if windows < 1:
        raise ValueError(f"windows={windows}: must be at least 1")
    longest = max(contexts)
    return [corpus.start_of(seed, number, longest) + longest for number in range(windows)]


def _score(model: LongNet, corpus: Corpus, ends: list[int], context: int, scored: int) -> Score:
    losses = []
    for end in ends:
        text = corpus.read(end - context, end + 1).long().to(model.embedding.weight.device)
        with torch.no_grad():
            hidden = model(text[None, :-1])[0, -scored:]
            losses.append(F.cross_entropy(model.logits(hidden).float(), text[-scored:]).item() * BITS)
    return Score(context, model.config.segment_lengths, tuple(losses))


def bigram_bits_per_byte(trained_on: Corpus, scored_on: Corpus, most_bytes: int = 2**24) -> float:
    """What a table of byte pairs achieves: counts of the one text (with one added to each), scored on the other."""
    text = trained_on.read(0, min(len(trained_on), most_bytes)).long()
    counts = torch.bincount(text[:-1] * 256 + text[1:], minlength=2**16).view(256, 256).double() + 1
    log_odds = (counts / counts.sum(1, keepdim=True)).log2()
    unseen = scored_on.read(0, min(len(scored_on), most_bytes)).long()
    return -log_odds[unseen[:-1], unseen[1:]].mean().item()
