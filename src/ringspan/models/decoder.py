"""`Decoder`: generates text with a LongNet, token by token, with caches of bounded size.

Over a ring, each rank reads its rows of the prompts. Then every rank decodes the same tokens on its own or, with
sharded caches, together with the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

import ringspan as rs
from ringspan.models.longnet import LongNet


class Decoder:
    """Generates a batch of texts with a model.

    Args:
        model: a causal `LongNet`.
        batch: number of texts.
        ring: splits prompts over a `Ring`. Every rank makes the same calls with the same tokens.
        sharded: shards the caches over the ring, for caches that do not fit one device.

    >>> from ringspan.models import LongNetConfig
    >>> decoder = Decoder(LongNet(LongNetConfig.named("nano")))
    >>> logits = decoder.read([torch.tensor([1, 2, 3])])
    >>> logits = decoder.step(logits.argmax(-1))
    >>> logits.shape, decoder.caches[0].lengths
    (torch.Size([1, 256]), (4,))
    """

    def __init__(self, model: LongNet, batch: int = 1, *, ring: rs.Ring | None = None, sharded: bool = False) -> None:
        if ring is not None and not isinstance(ring, rs.Ring):
            raise TypeError(f"ring is a {type(ring).__name__}: must be a Ring, or None for one device")
        if sharded and ring is None:
            raise ValueError("sharded=True without a ring: pass ring=")
        self.model, self.ring = model, ring
        self.caches = model.new_caches(batch, ring if sharded else None)

    @torch.no_grad()
    def read(self, prompts: Sequence[Tensor]) -> Tensor:
        """Read a prompt of any length for each text, 1-D int64. Returns logits (batch, vocabulary) of the next token.

        On one device, texts can read more at any time. Over a ring, prompts can only start a text.
        """
        for i, prompt in enumerate(prompts):
            self._check_tokens(f"prompts[{i}]", prompt)
        counts = tuple(len(prompt) for prompt in prompts)
        if len(counts) != self.caches[0].batch or 0 in counts:
            raise ValueError(
                f"prompts of {counts} tokens: pass one with at least 1 token for each of {self.caches[0].batch} texts"
            )
        is_balanced = self.ring is not None and self.ring.layout not in ("contiguous", "zigzag")  # needs lengths
        if len(set(counts)) == 1 and not is_balanced:
            tokens, lengths = torch.stack([*prompts]), None
            ends = [(text, counts[0] - 1) for text in range(len(counts))]
        else:
            tokens, lengths = torch.cat([*prompts])[None], counts
            ends = [(0, stop - 1) for stop in accumulate(counts)]
        tokens = tokens.to(self.model.embedding.weight.device)
        if self.ring is None:
            hidden = self.model(tokens, lengths=lengths, caches=self.caches)
            last = torch.stack([hidden[text, row] for text, row in ends])
        else:
            mine, n = self.ring.split_sequence(tokens, lengths=lengths), tokens.shape[1]
            hidden = self.model(mine, ring=self.ring, seq_len=n, lengths=lengths, caches=self.caches)
            last = _rows_of_ring(hidden, ends, n, lengths, self.ring)
        return self.model.logits(last)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Append one token to each text, (batch,). Returns logits (batch, vocabulary) of the next token."""
        self._check_tokens("tokens", tokens)
        if tokens.shape != (self.caches[0].batch,):
            raise ValueError(
                f"tokens of shape {tuple(tokens.shape)}: must be ({self.caches[0].batch},), one for each text"
            )
        return self.model.logits(self.model(tokens[:, None], caches=self.caches)[:, 0])

    def stream(self, prompts: Sequence[Tensor], choose: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
        """Read the prompts, then yield tokens (batch,) without end, each chosen by ``choose(logits)``."""
        logits = self.read(prompts)
        while True:
            tokens = choose(logits)
            if self.ring is not None:  # logits may round differently on other machines: rank 0 decides
                dist.broadcast(tokens, dist.get_global_rank(self.ring.group, 0), group=self.ring.group)
            yield tokens
            logits = self.step(tokens)

    def _check_tokens(self, name: str, tokens: Tensor) -> None:
        if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int32, torch.int64):
            kind = tokens.dtype if isinstance(tokens, Tensor) else f"a {type(tokens).__name__}"
            raise TypeError(f"{name} is {kind}: must be an int64 tensor")
        if tokens.dim() != 1:
            raise ValueError(f"{name} has shape {tuple(tokens.shape)}: must have one dimension")

    def reset(self) -> None:
        """Drop all texts. Keeps the memory of the caches."""
        for cache in self.caches:
            cache.reset()

    @property
    def cache_bytes(self) -> int:
        """Bytes of the caches of all layers on this device."""
        return sum(cache.nbytes for cache in self.caches)

    @property
    def rows_held(self) -> int:
        """The largest number of rows that any KV head of any text and layer holds now, on this rank."""
        heads = range(self.model.config.kv_heads)
        texts = range(self.caches[0].batch)
        return max(cache.rows_held(text, head) for cache in self.caches for text in texts for head in heads)

    @property
    def bound(self) -> int | None:
        """The most rows that any KV head of any text and layer can hold, over all ranks. None if it is unbounded."""
        bounds = [cache.bound for cache in self.caches]
        return None if None in bounds else max(bound for bound in bounds if bound is not None)


def _rows_of_ring(
    hidden: Tensor, wanted: list[tuple[int, int]], n: int, lengths: tuple[int, ...] | None, ring: rs.Ring
) -> Tensor:
    """Hidden states of some (text, row) pairs, gathered on every rank of the ring."""
    found = hidden.new_zeros((len(wanted), hidden.shape[-1]))
    layout = ring.layout_of(n, lengths)
    for i, (text, row) in enumerate(wanted):
        local = layout.local_row(ring.rank, row)
        if local is not None:
            found[i] = hidden[text, local]
    dist.all_reduce(found, group=ring.group)  # one rank holds each row; the others add 0
    return found
