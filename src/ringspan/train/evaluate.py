"""Evaluation on held-out text: bits per byte by context length, and with patterns that reach less far."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import torch
from torch.nn import functional as F

from ringspan.geometry import Dilated, Pattern, Window
from ringspan.models import LongNet, LongNetConfig
from ringspan.train.data import Corpus
from ringspan.train.metrics import BITS_PER_NAT


@dataclass(frozen=True)
class Score:
    """Bits per byte of the scored bytes in each window, read with ``context`` bytes in total.

    ``reach`` is that of the model's patterns, which may be cut.
    """

    context: int
    reach: int
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


def cut_pattern(pattern: Pattern, reach: int, context: int) -> Pattern:
    """The branches of a causal pattern that reach at most this far; if there are none, its shortest branch, cut.

    >>> cut_pattern(Window(31) + Dilated((256, 1024), (4, 16)), 256, context=4096).text
    'window 31 + 256x4'
    >>> cut_pattern(Dilated((256, 1024), (1, 4), shift=128), 64, context=4096).text
    '64x1 shift 32'
    """
    kept: list[Pattern] = []
    for part in pattern.parts:
        near = [i for i, length in enumerate(_reaches(part, context)) if length <= reach]
        if near and isinstance(part, Dilated):
            lengths, rates = (tuple(values[i] for i in near) for values in (part.segment_lengths, part.dilation_rates))
            kept.append(replace(part, segment_lengths=lengths, dilation_rates=rates))
        elif near:
            kept.append(part)
    return reduce(add, kept or [_shortest_branch(pattern, reach, context)])


def _shortest_branch(pattern: Pattern, reach: int, context: int) -> Pattern:
    """The shortest branch of a pattern, cut to this reach."""
    part = min(pattern.parts, key=lambda part: min(_reaches(part, context)))
    if isinstance(part, Dilated):
        length, rate = min(zip(part.segment_lengths, part.dilation_rates, strict=True))
        shift = part.shift * reach // length  # a shift by half a segment stays one
        return replace(part, segment_lengths=(reach,), dilation_rates=(rate,), shift=shift)
    return replace(part, left=reach - 1) if isinstance(part, Window) else Window(reach - 1)


def _reaches(part: Pattern, context: int) -> tuple[int, ...]:
    """How many tokens each branch of a term spans, if causal."""
    if isinstance(part, Dilated):
        return part.segment_lengths
    return (part.left + 1 if isinstance(part, Window) else context,)


def _all_reaches(config: LongNetConfig, context: int) -> list[int]:
    """The reaches of all branches of all layers, shortest first."""
    parts = [part for pattern in config.layers_by_pattern for part in pattern.parts]
    return sorted({reach for part in parts for reach in _reaches(part, context)})


def ablated_configs(config: LongNetConfig, context: int) -> list[LongNetConfig]:
    """All layers cut to a quarter, half and all of the shortest branch, then to each longer one (`cut_pattern`)."""
    reaches = _all_reaches(config, context)
    reaches = sorted({*reaches, *(max(1, reaches[0] // k) for k in (4, 2))})
    patterns = [config.pattern_of(i) for i in range(len(config.patterns))]
    return [
        replace(config, patterns=tuple(cut_pattern(pattern, reach, context).text for pattern in patterns))
        for reach in reaches
    ]


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
    """Score the same weights with each of the `ablated_configs`: how far does the model look?"""
    ends = _ends(corpus, [context], windows, scored, seed)
    for config in ablated_configs(model.config, context):
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
    return Score(context, _all_reaches(model.config, context)[-1], tuple(losses))


def bigram_bits_per_byte(trained_on: Corpus, scored_on: Corpus, most_bytes: int = 2**24) -> float:
    """Score of a bigram model: byte pairs counted in one text, with add-one smoothing, scored on the other."""
    text = trained_on.read(0, min(len(trained_on), most_bytes)).long()
    counts = torch.bincount(text[:-1] * 256 + text[1:], minlength=2**16).view(256, 256).double() + 1
    log_probabilities = (counts / counts.sum(1, keepdim=True)).log2()
    unseen = scored_on.read(0, min(len(scored_on), most_bytes)).long()
    return -log_probabilities[unseen[:-1], unseen[1:]].mean().item()
