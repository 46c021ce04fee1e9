"""How good a model is on text that it was not trained on, and whether more context helps; a bigram beside it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ringspan.models import LongNet
from ringspan.train.corpus import Corpus
from ringspan.train.loop import BITS


@dataclass(frozen=True)
class Score:
    """Bits per byte over the same bytes, seen with ``context`` bytes before the last of them."""

    context: int
    bits_per_byte: float
    standard_error: float  # over windows
    windows: int


def score_contexts(
    model: LongNet, corpus: Corpus, contexts: list[int], *, windows: int = 16, scored: int = 512, seed: int = 0
) -> Iterator[Score]:
    """The same last ``scored`` bytes of the same windows, with the context before them cut to each length.

    All contexts are scored on the same bytes, so that what differs between them is the context alone.
    """
    longest = max(contexts)
    if min(contexts) < scored:
        raise ValueError(f"contexts={contexts}: each must be at least the {scored} bytes that are scored")
    ends = [corpus.start_of(seed, i, longest) + longest for i in range(windows)]
    for context in sorted(contexts):
        losses = []
        for end in ends:
            text = corpus.read(end - context, end + 1).long()
            with torch.no_grad():
                hidden = model(text[None, :-1])[:, -scored:]
                loss = torch.nn.functional.cross_entropy(model.logits(hidden)[0].float(), text[-scored:])
            losses.append(loss.item() * BITS)
        error = statistics.stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else 0.0
        yield Score(context, statistics.mean(losses), error, windows)


def bigram_bits_per_byte(trained_on: Corpus, scored_on: Corpus, most_bytes: int = 2**24) -> float:
    """What a table of byte pairs achieves: counts of the one text (with one added to each), scored on the other."""
    text = trained_on.read(0, min(len(trained_on), most_bytes)).long()
    counts = torch.bincount(text[:-1] * 256 + text[1:], minlength=2**16).view(256, 256).double() + 1
    log_odds = (counts / counts.sum(1, keepdim=True)).log2()
    held_out = scored_on.read(0, min(len(scored_on), most_bytes)).long()
    return -log_odds[held_out[:-1], held_out[1:]].mean().item()
