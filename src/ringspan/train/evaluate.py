"""Evaluation on held-out text: bits per byte by context length, and with branches of the pattern left out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from ringspan.models import LongNet, LongNetConfig
from ringspan.train.data import Corpus
from ringspan.train.metrics import BITS_PER_NAT


@dataclass(frozen=True)
class Score:
    """Bits per byte of the scored bytes in each window, read with ``context`` bytes in total.

    ``segments`` are the segment lengths of the pattern, which may be reduced.
    """

    context: int
    segments: tuple[int, ...]
    windows: tuple[float, ...]

    @property
    def bits_per_byte(self) -> float:
        return statistics.mean(self.windows)

    def gain_over(self, other: Score) -> tuple[float, float]:
        """The improvement in bits per byte and its standard error, paired by window."""
        gains = [theirs - ours for ours, theirs in zip(self.windows, other.windows, strict=True)]
        error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else math.nan
        return statistics.mean(gains), error


def default_contexts(longest: int, scored: int) -> list[int]:
    """Up to four lengths in about equal ratios, from twice the scored bytes up to ``longest``.

    >>> default_contexts(65536, 512), default_contexts(8192, 512), default_contexts(600, 300)
    ([1024, 4096, 16384, 65536], [1024, 2048, 4096, 8192], [600])
    """
    shortest = min(longest, 2 * scored)
    doublings = math.log2(longest / shortest)
    return sorted({shortest, longest, *(min(longest, shortest * 2 ** round(doublings * i / 3)) for i in (1, 2))})


def count_windows(corpus: Corpus, longest: int, scored: int) -> int:
    """The number of windows that fit: scored bytes do not overlap, and each has room for the longest context."""
    return max(0, (len(corpus) - 1 - longest) // scored + 1)


def check_contexts(corpus: Corpus, contexts: list[int], scored: int) -> None:
    """Raise ValueError unless the text has room for these contexts, and they for the scored bytes."""
    if min(contexts) < scored:
        raise ValueError(f"{min(contexts)}: must be at least {scored}, the number of scored bytes")
    if not count_windows(corpus, max(contexts), scored):
        raise ValueError(
            f"{max(contexts)}: the held-out text has {len(corpus):,} bytes, and a context needs one more than its "
            f"length; give at most {len(corpus) - 1}"
        )


def _ignore(read: int) -> None:
    """The default of ``on_window``."""


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
    """Score the last ``scored`` bytes of each window with the context cut to each length, shortest first.

    All contexts are scored on the same bytes, so only the context differs. ``on_window`` is called after each window
    with the number of bytes read.
    """
    ends = _ends(corpus, contexts, windows, scored, seed)
    for context in sorted(contexts):
        yield _score(model, corpus, ends, context, scored, on_window)


def ablated_configs(config: LongNetConfig) -> list[LongNetConfig]:
    """Only the shortest branch, with a quarter, half and all of its segment length; then one more branch each time.

    Empty for plain attention, which has no branches.
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
    """Score the same weights with each of the `ablated_configs`: which branches does the model use?"""
    ends = _ends(corpus, [context], windows, scored, seed)
    for config in ablated_configs(model.config):
        cut = LongNet(config).to(model.embedding.weight)
        cut.load_state_dict(model.state_dict())
        yield _score(cut, corpus, ends, context, scored, on_window)


def _ends(corpus: Corpus, contexts: list[int], windows: int, scored: int, seed: int) -> list[int]:
    """Random ends of windows with room for the longest context. No byte is scored twice, so windows are independent."""
    if scored < 1:
        raise ValueError(f"scored={scored}: must be at least 1")
    check_contexts(corpus, contexts, scored)
    longest = max(contexts)
    most = count_windows(corpus, longest, scored)
    if not 1 <= windows <= most:
        raise ValueError(
            f"windows={windows}: must be at least 1 and at most {most}: the held-out text of {len(corpus):,} bytes has "
            f"no room for more with {longest} bytes of context and {scored} scored"
        )
    generator = torch.Generator().manual_seed(seed)
    return [longest + scored * window for window in torch.randperm(most, generator=generator)[:windows].tolist()]


def _score(
    model: LongNet, corpus: Corpus, ends: list[int], context: int, scored: int, on_window: Callable[[int], None]
) -> Score:
    losses = []
    for end in ends:
        text = corpus.read(end - context, end + 1).long().to(model.embedding.weight.device)
        with torch.no_grad():
            hidden = model(text[None, :-1])[0, -scored:]
            losses.append(F.cross_entropy(model.logits(hidden).float(), text[-scored:]).item() * BITS_PER_NAT)
        on_window(context)
    return Score(context, model.config.segment_lengths, tuple(losses))


def bigram_bits_per_byte(trained_on: Corpus, scored_on: Corpus, most_bytes: int = 2**24) -> float:
    """Score of a bigram model: byte pairs counted in one text, with add-one smoothing, scored on the other."""
    text = trained_on.read(0, min(len(trained_on), most_bytes)).long()
    counts = torch.bincount(text[:-1] * 256 + text[1:], minlength=2**16).view(256, 256).double() + 1
    log_probabilities = (counts / counts.sum(1, keepdim=True)).log2()
    unseen = scored_on.read(0, min(len(scored_on), most_bytes)).long()
    return -log_probabilities[unseen[:-1], unseen[1:]].mean().item()
