"""How good a model is on text that it was not trained on; whether more context helps, and which branches are used."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from ringspan.models import LongNet, LongNetConfig
from ringspan.train.data import Corpus
from ringspan.train.metrics import BITS


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


def default_contexts(longest: int, scored: int) -> list[int]:
    """Up to four lengths in equal ratios, from twice the bytes that are scored to the longest; powers of two between.

    >>> default_contexts(65536, 512), default_contexts(8192, 512), default_contexts(600, 300)
    ([1024, 4096, 16384, 65536], [1024, 2048, 4096, 8192], [600])
    """
    shortest = min(longest, 2 * scored)
    doublings = math.log2(longest / shortest)
    return sorted({shortest, longest, *(min(longest, shortest * 2 ** round(doublings * i / 3)) for i in (1, 2))})


def places(corpus: Corpus, longest: int, scored: int) -> int:
    """How many windows there are whose scored bytes do not overlap, with room for the longest context before each."""
    return max(0, (len(corpus) - 1 - longest) // scored + 1)


def check_contexts(corpus: Corpus, contexts: list[int], scored: int) -> None:
    """Raise ValueError unless the text has room for these contexts, and they for the bytes that are scored."""
    if min(contexts) < scored:
        raise ValueError(f"{min(contexts)}: must be at least {scored}, the number of bytes that are scored")
    if not places(corpus, max(contexts), scored):
        raise ValueError(
            f"{max(contexts)}: the held-out text has {len(corpus):,} bytes, and a context needs one more than it has; "
            f"give at most {len(corpus) - 1}"
        )


def _ignore(read: int) -> None:
    """Nobody wants to know."""


def score_contexts(
    model: LongNet,
    corpus: Corpus,
    contexts: list[int],
    *,
    windows: int = 64,
    scored: int = 512,
    seed: int = 0,
    on_window: Callable[[int], None] = _ignore,
) -> Iterator[Score]:
    """The last ``scored`` bytes of each window, with the context before them cut to each length, shortest first.

    All contexts are scored on the same bytes, so that what differs between them is the context alone. ``on_window`` is
    called after each window, with the bytes that were read.
    """
    ends = _ends(corpus, contexts, windows, scored, seed)
    for context in sorted(contexts):
        yield _score(model, corpus, ends, context, scored, on_window)


def cut_patterns(config: LongNetConfig) -> list[LongNetConfig]:
    """The model with its shortest segments cut to a quarter and to a half; then whole, and one branch more each time.

    None for plain attention, which has no branches.
    """
    if not config.segment_lengths:
        return []
    branches = sorted(zip(config.segment_lengths, config.dilation_rates, strict=True))
    lengths, rates = zip(*branches, strict=True)
    cuts: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((max(1, lengths[0] // k),), rates[:1]) for k in (4, 2)]
    cuts += [(lengths[:count], rates[:count]) for count in range(1, len(lengths) + 1)]
    return [replace(config, segment_lengths=length, dilation_rates=rate) for length, rate in cuts]


def score_branches(
    model: LongNet,
    corpus: Corpus,
    context: int,
    *,
    windows: int = 64,
    scored: int = 512,
    seed: int = 0,
    on_window: Callable[[int], None] = _ignore,
) -> Iterator[Score]:
    """The same weights with each of the `cut_patterns`: which branches does the model use, how far does it look?"""
    ends = _ends(corpus, [context], windows, scored, seed)
    for config in cut_patterns(model.config):
        cut = LongNet(config).to(model.embedding.weight)
        cut.load_state_dict(model.state_dict())
        yield _score(cut, corpus, ends, context, scored, on_window)


def _ends(corpus: Corpus, contexts: list[int], windows: int, scored: int, seed: int) -> list[int]:
    """Where windows end that leave room for the longest context. No byte is scored twice: windows are independent."""
    if scored < 1:
        raise ValueError(f"scored={scored}: must be at least 1")
    check_contexts(corpus, contexts, scored)
    longest = max(contexts)
    most = places(corpus, longest, scored)
    if not 1 <= windows <= most:
        raise ValueError(
            f"windows={windows}: must be at least 1 and at most {most}: the held-out text of {len(corpus):,} bytes has "
            f"no room for more with {longest} bytes of context and {scored} scored"
        )
    generator = torch.Generator().manual_seed(seed)
    return [longest + scored * place for place in torch.randperm(most, generator=generator)[:windows].tolist()]


def _score(
    model: LongNet, corpus: Corpus, ends: list[int], context: int, scored: int, on_window: Callable[[int], None]
) -> Score:
    losses = []
    for end in ends:
        text = corpus.read(end - context, end + 1).long().to(model.embedding.weight.device)
        with torch.no_grad():
            hidden = model(text[None, :-1])[0, -scored:]
            losses.append(F.cross_entropy(model.logits(hidden).float(), text[-scored:]).item() * BITS)
        on_window(context)
    return Score(context, model.config.segment_lengths, tuple(losses))


def bigram_bits_per_byte(trained_on: Corpus, scored_on: Corpus, most_bytes: int = 2**24) -> float:
    """What a table of byte pairs achieves: counts of the one text (with one added to each), scored on the other."""
    text = trained_on.read(0, min(len(trained_on), most_bytes)).long()
    counts = torch.bincount(text[:-1] * 256 + text[1:], minlength=2**16).view(256, 256).double() + 1
    log_odds = (counts / counts.sum(1, keepdim=True)).log2()
    unseen = scored_on.read(0, min(len(scored_on), most_bytes)).long()
    return -log_odds[unseen[:-1], unseen[1:]].mean().item()
