"""What a user writes to have a trainer verified: an adapter that takes one training step on a given batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.nn.cross_entropy import IGNORED

DEFAULT_VOCABULARY = 64


class UnsupportedError(Exception):
    """Raised by an adapter, on every rank, for a step that its trainer does not offer: the check is then skipped."""


@dataclass(frozen=True)
class Batch:
    """Whole sequences, the same on every rank; the adapter splits them over the ranks.

    Args:
        tokens: (batch, n).
        targets: (batch, n), the token that each row predicts; -100 where none counts, always so in the last row of a
            document.
        lengths: of the packed documents, which are the same in all sequences of the batch. They add up to n.
    """

    tokens: Tensor
    targets: Tensor
    lengths: tuple[int, ...]

    @property
    def n(self) -> int:
        return self.tokens.shape[1]

    @property
    def is_packed(self) -> bool:
        return len(self.lengths) > 1

    @cached_property
    def labels(self) -> Tensor:
        """(batch, n), as Hugging Face models want them: the label of a token is in the row of that token.

        >>> Batch(torch.tensor([[5, 6, 7]]), torch.tensor([[6, 7, -100]]), (3,)).labels
        tensor([[-100,    6,    7]])
        """
        return torch.nn.functional.pad(self.targets[:, :-1], (1, 0), value=IGNORED)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """The offsets at which documents begin, and n.

        >>> Batch(torch.zeros(1, 5), torch.zeros(1, 5), (2, 3)).cu_seqlens
        tensor([0, 2, 5])
        """
        return torch.tensor((0, *self.lengths)).cumsum(0)

    @cached_property
    def document_ids(self) -> Tensor:
        """(n,), the document of each row.

        >>> Batch(torch.zeros(1, 5), torch.zeros(1, 5), (2, 3)).document_ids
        tensor([0, 0, 1, 1, 1])
        """
        return torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths))

    @cached_property
    def position_ids(self) -> Tensor:
        """(batch, n), which restart in each document.

        >>> Batch(torch.zeros(1, 5), torch.zeros(1, 5), (2, 3)).position_ids
        tensor([[0, 1, 0, 1, 2]])
        """
        ids = torch.arange(self.n) - self.cu_seqlens[self.document_ids]
        return ids.expand(self.tokens.shape)


@dataclass(frozen=True)
class StepResult:
    """What a step returned on this rank.

    Args:
        loss: as the trainer would log it: the same number on every rank.
        gradients: of every parameter by name, as the optimizer would see them: reduced over ranks and accumulated. A
            DTensor counts as the whole tensor.
        token_losses: (batch, rows), the loss of each of this rank's rows, before any mean; optional. Zero where the
            target does not count.
        logits: (batch, rows, vocabulary), of this rank's rows; optional.
        positions: (rows,), the position in the sequence of each of these rows, -1 for padding. Needed with
            ``token_losses`` and ``logits``.
        gradient_norm: as the trainer would log it; optional.
    """

    loss: float | Tensor
    gradients: Mapping[str, Tensor]
    token_losses: Tensor | None = None
    logits: Tensor | None = None
    positions: Tensor | None = None
    gradient_norm: float | Tensor | None = None


class TrainingAdapter(Protocol):
    """A trainer under test, on one rank.

    ``vocab_size`` is the number of tokens that batches are drawn from (64 if there is no such attribute).
    """

    def step(self, batches: Sequence[Batch], *, max_norm: float | None = None) -> StepResult:
        """Forward and backward, from the initial weights, which stay as they are.

        Several batches are accumulated. With ``max_norm``, the gradients are clipped to that norm.
        """


# Builds a model with the same weights on every rank of the group, in this dtype.
AdapterFactory = Callable[[dist.ProcessGroup, torch.dtype], TrainingAdapter]
