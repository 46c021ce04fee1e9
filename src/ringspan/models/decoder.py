"""A LongNet that writes: it reads prompts, and then goes on token by token with caches of bounded size.

Over a ring the prompts are read by all ranks, each its rows. Then every rank goes on alone with the same tokens, or, if
the caches are sharded, together with the others.
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
    """Texts that a model goes on with, side by side.

    Args:
        model: a causal `LongNet`.
        batch: how many texts.
        ring: reads prompts over a `Ring`; every rank makes the same calls with the same tokens.
        sharded: leaves the caches sharded over the ring, for those that do not fit one device.

    >>> from ringspan.models import LongNetConfig
    >>> decoder = Decoder(LongNet(LongNetConfig.named("nano")))
    >>> logits = decoder.read([torch.tensor([1, 2, 3])])
    >>> logits = decoder.step(logits.argmax(-1))
    >>> logits.shape, decoder.caches[0].lengths
    (torch.Size([1, 256]), (4,))
    """

    def __init__(self, model: LongNet, batch: int = 1, *, ring: rs.Ring | None = None, sharded: bool = False) -> None:
        if ring is not None and not isinstance(ring, rs.Ring):
            raise TypeError(f"ring is a {type(ring).__name__}: must be a Ring, or None to read alone")
        if sharded and ring is None:
            raise ValueError("sharded=True without a ring: give the ring that the caches are sharded over")
        self.model, self.ring = model, ring
        self.caches = model.new_caches(batch, ring if sharded else None)

    @torch.no_grad()
    def read(self, prompts: Sequence[Tensor]) -> Tensor:
        """Take in a prompt of any length for each text, int64; the logits (batch, vocabulary) of what comes next.

        Alone, texts may be given more to read at any time; over a ring, prompts begin them.
        """
        for i, prompt in enumerate(prompts):
            self._check_tokens(f"prompts[{i}]", prompt)
        counts = tuple(len(prompt) for prompt in prompts)
        if len(counts) != self.caches[0].batch or 0 in counts:
            raise ValueError(
                f"prompts of {counts} tokens: give one of at least 1 token for each of {self.caches[0].batch} texts"
            )
        if len(set(counts)) == 1:
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
            mine, n = self.ring.split_sequence(tokens), tokens.shape[1]
            hidden = self.model(mine, ring=self.ring, seq_len=n, lengths=lengths, caches=self.caches)
            last = _rows_of_ring(hidden, ends, n, self.ring)
        return self.model.logits(last)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Take in one token of each text, (batch,); the logits (batch, vocabulary) of the next."""
        self._check_tokens("tokens", tokens)
        if tokens.shape != (self.caches[0].batch,):
            raise ValueError(
                f"tokens of shape {tuple(tokens.shape)}: must be ({self.caches[0].batch},), one for each text"
            )
        return self.model.logits(self.model(tokens[:, None], caches=self.caches)[:, 0])

    def stream(self, prompts: Sequence[Tensor], choose: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
        """Read, then write without end: the next token of each text, (batch,), as ``choose(logits)`` has it."""
        logits = self.read(prompts)
        while True:
            tokens = choose(logits)
            if self.ring is not None:  # ranks on different machines might round differently: one of them decides
                dist.broadcast(tokens, dist.get_global_rank(self.ring.group, 0), group=self.ring.group)
            yield tokens
            logits = self.step(tokens)

    def _check_tokens(self, name: str, tokens: Tensor) -> None:
        if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int32, torch.int64):
            kind = tokens.dtype if isinstance(tokens, Tensor) else f"a {type(tokens).__name__}"
            raise TypeError(f"{name} is {kind}: must be a tensor of int64")
        if tokens.dim() != 1:
            raise ValueError(f"{name} has shape {tuple(tokens.shape)}: must have one dimension")

    def reset(self) -> None:
        """Forget every text, to read others; the memory is kept."""
        for cache in self.caches:
            cache.reset()

    @property
    def cache_bytes(self) -> int:
        """Memory of all layers' caches on this device."""
        return sum(cache.nbytes for cache in self.caches)

    @property
    def rows_held(self) -> int:
        """The most rows that a KV head of a text holds in a layer, here and now."""
        heads = range(self.model.config.kv_heads)
        texts = range(self.caches[0].batch)
        return max(cache.rows_held(text, head) for cache in self.caches for text in texts for head in heads)


def _rows_of_ring(hidden: Tensor, wanted: list[tuple[int, int]], n: int, ring: rs.Ring) -> Tensor:
    """Some (text, row) of hidden states that are spread over a ring, on every rank."""
    found = hidden.new_zeros((len(wanted), hidden.shape[-1]))
    spans = ring.layout_of(n).spans(ring.rank)
    for i, (text, row) in enumerate(wanted):
        for span in spans:
            if span.start <= row < span.stop:
                found[i] = hidden[text, span.local + row - span.start]
    dist.all_reduce(found, group=ring.group)  # one rank has each row; the others add 0
    return found
