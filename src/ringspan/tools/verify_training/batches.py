"""The batches of all steps: one document, packed documents, few targets, odd lengths, one token changed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ringspan.nn.cross_entropy import IGNORED
from ringspan.tools.verify_training.adapter import Batch


@dataclass(frozen=True)
class TrainingSettings:
    """What is run: ring sizes, the length of most steps and of the long ones, and the user's dtype."""

    target: str
    sizes: tuple[int, ...] = (1, 2, 4)
    tokens: int = 96
    long_tokens: int = 1024
    dtype: str = "float32"  # of the steps whose rounding is compared over ring sizes
    batch: int = 2
    seed: int = 0

    @property
    def spans(self) -> int:
        """How many equal parts a zigzag ring of the largest size divides a sequence into."""
        return 2 * max(self.sizes)

    @property
    def longest(self) -> int:
        """The longest step that is compared with one process."""
        return max(sum(lengths) for lengths in odd_lengths(self))

    @property
    def documents(self) -> tuple[int, ...]:
        """Of the packed steps: short and long ones, which begin and end inside shards.

        >>> TrainingSettings("", tokens=96).documents
        (5, 31, 1, 27, 32)
        """
        n = self.tokens
        first = (5, n // 3 - 1, 1, n // 3 - 5)
        return (*first, n - sum(first))


def rounded_tokens(wanted: int, sizes: Sequence[int]) -> int:
    """The next length that divides evenly over every ring and every zigzag ring.

    >>> rounded_tokens(90, [1, 2, 4]), rounded_tokens(90, [3])
    (96, 90)
    """
    parts = 2 * math.lcm(*sizes)
    return -(-wanted // parts) * parts


def make_batch(lengths: Sequence[int], vocab_size: int, *, batch: int = 2, seed: int = 0) -> Batch:
    """Random tokens in packed documents; each row predicts the next token of its document."""
    n = sum(lengths)
    tokens = torch.randint(vocab_size, (batch, n), generator=torch.Generator().manual_seed(1000 * seed + n))
    targets = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORED)
    targets[:, torch.tensor(lengths).cumsum(0) - 1] = IGNORED
    return Batch(tokens, targets, tuple(lengths))


def with_targets_in(batch: Batch, rows: Tensor | Sequence[int]) -> Batch:
    """Only these rows have a target."""
    kept = torch.full_like(batch.targets, IGNORED)
    kept[:, rows] = batch.targets[:, rows]
    return replace(batch, targets=kept)


def with_equal_labels(batch: Batch, settings: TrainingSettings) -> Batch:
    """As many targets in every shard of every ring: none in the last row of each.

    So this step is right even if labels at borders are lost, or the loss is a mean of the means of ranks.
    """
    span = batch.n // settings.spans
    return with_targets_in(batch, [row for row in range(batch.n) if (row + 1) % span])


def with_token_changed(batch: Batch, position: int, vocab_size: int) -> Batch:
    """Another token at one position, in all sequences. The targets stay."""
    tokens = batch.tokens.clone()
    tokens[:, position] = (tokens[:, position] + 1 + vocab_size // 3) % vocab_size
    return replace(batch, tokens=tokens)


def lengths_text(lengths: Sequence[int]) -> str:
    """The documents of a step, for reports.

    >>> lengths_text([61]), lengths_text([1, 2, 3]), lengths_text([3] * 20)
    ('61 tokens', '1 + 2 + 3 tokens', '20 documents of 3 tokens')
    """
    if len(lengths) > 3 and len(set(lengths)) == 1:
        return f"{len(lengths)} documents of {lengths[0]} tokens"
    return f"{' + '.join(map(str, lengths))} token{'s' if sum(lengths) > 1 else ''}"


def label_batches(base: Batch, settings: TrainingSettings) -> Iterator[tuple[str, Batch]]:
    """Targets in few rows, unevenly over ranks, and pairs of rows: one at a border of shards, one in between."""
    n = base.n
    span = n // settings.spans
    yield "only in the first shard", with_targets_in(base, range(2, span - 2))
    yield "only in the last shard", with_targets_in(base, range(n - span + 2, n - 2))
    yield "few in the middle, many at the end", with_targets_in(base, [n // 2 - 3, *range(n - span + 2, n - 2)])
    for row in border_rows(n, settings.spans):
        yield f"row {row}", with_targets_in(base, [row, anchor_row(n)])


def border_rows(n: int, spans: int) -> list[int]:
    """The first and last rows of all possible shards, without the last row of the sequence, which has no target.

    >>> border_rows(16, 4)
    [0, 3, 4, 7, 8, 11, 12, 14]
    """
    starts = [i * n // spans for i in range(spans)]
    return sorted({row for start in starts for row in (start - 1, start) if 0 <= row < n - 1} | {n - 2})


def anchor_row(n: int) -> int:
    """A row inside a shard of any ring of few ranks."""
    return n // 3 + 3


def odd_lengths(settings: TrainingSettings) -> list[tuple[int, ...]]:
    """Lengths that do not divide, shorter sequences than ranks, and documents of every kind."""
    n, largest = settings.tokens, max(settings.sizes)
    return [
        (n - 33,),
        (n + 1,),
        (largest + 1,),
        (max(2, largest - 1),),
        (2,),
        (n - 40, 1, 2, 30),
        (3,) * (n // 3),
        (1, n - 3, 1, 1),
    ]


def accumulated_batches(settings: TrainingSettings, vocab: int) -> list[Batch]:
    """Three batches with very different numbers of targets."""
    many, some, few = (make_batch([settings.tokens], vocab, seed=settings.seed + i) for i in (1, 2, 3))
    return [many, with_targets_in(some, range(20)), with_targets_in(few, [5, settings.tokens // 2])]


def changed_positions(batch: Batch, settings: TrainingSettings) -> list[int]:
    """The first and last tokens of documents, tokens at borders of shards, and tokens in between."""
    n = batch.n
    ends = batch.cu_seqlens.tolist()
    chosen = {0, n // 5, n // 2 - 1, n // 2, n - 2}
    for end in ends[1:-1]:
        chosen |= {end - 1, end}
    return sorted(position for position in chosen if 0 <= position < n)
