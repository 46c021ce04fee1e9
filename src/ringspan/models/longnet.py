"""Where the rows of a call lie: on which ring, in which documents, after which tokens that caches have seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ringspan as rs
from ringspan.geometry import Documents
from ringspan.models.config import LongNetConfig, load_weights, save_weights
from ringspan.nn.cross_entropy import Gradients
from ringspan.nn.rotary import angles, rotate

AnyRing: TypeAlias = "rs.Ring | rs.SimulatedRing | None"


@dataclass(frozen=True)
class Place:
    """What every layer needs to know of a call.

    ``lengths`` are those of packed documents, and ``caches``, one for each layer, hold what came before.
    """

    seq_len: int
    cosines: Tensor
    sines: Tensor
    ring: AnyRing
    lengths: tuple[int, ...] | None
    caches: Sequence[rs.Cache] | None


def positions_of(
    rows: int,
    device: torch.device,
    ring: AnyRing = None,
    seq_len: int | None = None,
    lengths: tuple[int, ...] | None = None,
    seen: tuple[int, ...] = (0,),
) -> tuple[int, Tensor]:
    """The length of the whole sequence, and the positions of the rows of this call, (rows) or (batch, rows).

    Args:
        rows: how many rows this call, on this rank, holds.
        seen: how many tokens of each sequence came before.

    >>> positions_of(4, torch.device("cpu"), seen=(10, 20))[1].tolist()
    [[10, 11, 12, 13], [20, 21, 22, 23]]
    >>> positions_of(5, torch.device("cpu"), lengths=(3, 2), seen=(10, 0))[1].tolist()
    [10, 11, 12, 0, 1]
    """
    if isinstance(ring, rs.Ring):
        if seq_len is None:
            raise ValueError("seq_len is needed over a ring: the length of the whole sequence, not of this rank's rows")
        places = ring.positions(seq_len, device)
        if len(places) != rows:
            raise ValueError(f"{rows} rows, but this rank holds {len(places)} of seq_len={seq_len}: give its own rows")
    else:
        if seq_len not in (None, rows):
            raise ValueError(f"seq_len={seq_len}, but there are {rows} rows: without a ring they are the same")
        seq_len, places = rows, torch.arange(rows, device=device)
    if lengths is not None:
        Documents(tuple(lengths)).check_rows(seq_len)
        ends = torch.tensor(lengths, device=device).cumsum(0)
        before = torch.tensor(seen if len(seen) == len(lengths) else [0] * len(lengths), device=device)
        begins = ends - torch.tensor(lengths, device=device)
        return seq_len, places + (before - begins)[torch.bucketize(places, ends, right=True)]
    if len(set(seen)) == 1:
        return seq_len, places + seen[0]
    return seq_len, torch.tensor(seen, device=device)[:, None] + places


def keep_attention() -> tuple[Any, Any]:
    """Activation checkpointing that computes everything again but attention: the ring is not walked a third time."""

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = operator is torch.ops.ringspan.attention.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Attention(nn.Module):
    def __init__(self, config: LongNetConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer, self.pattern = config, layer, config.pattern_of(layer)
        kv_width = config.head_dim * config.kv_heads
        self.queries = nn.Linear(config.width, config.width, bias=False)
        self.keys = nn.Linear(config.width, kv_width, bias=False)
        self.values = nn.Linear(config.width, kv_width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, place: Place) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.config.head_dim)) for project in (self.queries, self.keys, self.values)
        )
        q, k = (rotate(y, place.cosines, place.sines) for y in (q, k))
        return self.output(self._attend(q, k, v, place).flatten(-2))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, place: Place) -> Tensor:
        if place.caches is not None:
            cache = place.caches[self.layer]
            if place.ring is None:
                return rs.attention_step(q, k, v, cache, lengths=place.lengths)
            spread: dict[str, Any] = dict(ring=place.ring, seq_len=place.seq_len, lengths=place.lengths)
            return rs.attention_prefill(q, k, v, cache, **spread)
        return rs.attention(
            *(q, k, v),
            pattern=self.pattern,
            causal=self.config.causal,
            lengths=place.lengths,
            ring=place.ring,
            seq_len=None if place.ring is None else place.seq_len,
        )


class GatedMLP(nn.Module):
    def __init__(self, config: LongNetConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.mlp_width, bias=False)
        self.up = nn.Linear(config.width, config.mlp_width, bias=False)
        self.down = nn.Linear(config.mlp_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Attention, then the MLP, each added to what came in."""

    def __init__(self, config: LongNetConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config, layer)
        self.mlp_norm = nn.RMSNorm(config.width, config.norm_eps)
        self.mlp = GatedMLP(config)
        self.recomputes = False

    def forward(self, x: Tensor, place: Place) -> Tensor:
        if self.recomputes and torch.is_grad_enabled():
            return checkpoint(self._compute, x, place, use_reentrant=False, context_fn=keep_attention)
        return self._compute(x, place)

    def _compute(self, x: Tensor, place: Place) -> Tensor:
        x = x + self.attention(self.attention_norm(x), place)
        return x + self.mlp(self.mlp_norm(x))


class LongNet(nn.Module):
    """A transformer for long sequences.

    Called with tokens (batch, rows) it gives hidden states (batch, rows, width); `logits` and `loss` go on from there.
    An encoder may be given embeddings (batch, rows, width) of its own instead. Over a `Ring`, rows are this rank's, and
    ``seq_len`` is the length of the whole sequence.

    >>> model = LongNet(LongNetConfig.named("nano"))
    >>> tokens = torch.randint(256, (1, 1000))
    >>> model(tokens).shape
    torch.Size([1, 1000, 64])
    >>> loss = model.loss(tokens, targets=tokens.roll(-1, dims=1))
    """

    def __init__(self, config: LongNetConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.layers))
        self.norm = nn.RMSNorm(config.width, config.norm_eps)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with deviation 0.02; projections back into the residual stream are smaller, by the depth."""
        into_stream = 0.02 * (2 * self.config.layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.dim() == 1:
                nn.init.ones_(weight)
            else:
                small = name.endswith(("attention.output.weight", "mlp.down.weight"))
                nn.init.normal_(weight, std=into_stream if small else 0.02)

    def forward(
        self,
        tokens: Tensor,
        *,
        ring: AnyRing = None,
        seq_len: int | None = None,
        lengths: tuple[int, ...] | None = None,
        caches: Sequence[rs.Cache] | None = None,
    ) -> Tensor:
        """Normalised hidden states (batch, rows, width) of tokens (batch, rows) or embeddings (batch, rows, width).

        Args:
            lengths: packed documents, as for `rs.attention`; positions restart in each.
            caches: from `new_caches`: the rows go on where the caches stand, and the caches take them in. Over a ring
                the rows are prompts, which begin a text.
        """
        return self._hidden(tokens, ring, seq_len, lengths, caches)

    def _hidden(
        self,
        tokens: Tensor,
        ring: AnyRing,
        seq_len: int | None,
        lengths: tuple[int, ...] | None = None,
        caches: Sequence[rs.Cache] | None = None,
    ) -> Tensor:
        x = tokens if tokens.is_floating_point() else self.embedding(tokens)
        if caches is not None:
            self._check_caches(caches)
        seen = (0,) if caches is None else caches[0].lengths
        whole, positions = positions_of(x.shape[1], x.device, ring, seq_len, lengths, seen)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        cosines, sines = angles(positions, self.config.head_dim, self.config.rotary_base, wide)
        place = Place(whole, cosines, sines, ring, lengths, caches)
        for layer in self.layers:
            x = layer(x, place)
        return self.norm(x)

    def _check_caches(self, caches: Sequence[rs.Cache]) -> None:
        if len(caches) != len(self.layers) or len({id(cache) for cache in caches}) != len(caches):
            different = len({id(cache) for cache in caches})
            raise ValueError(f"{different} caches for {len(self.layers)} layers: each needs its own; see new_caches")
        for i, cache in enumerate(caches):
            if cache.pattern != self.config.pattern_of(i):
                raise ValueError(
                    f"caches[{i}] has the pattern {cache.pattern}, layer {i} {self.config.pattern_of(i)}: give the "
                    "caches of this model's new_caches, in their order"
                )
            if cache.lengths != caches[0].lengths:
                raise ValueError(
                    f"caches[{i}] has seen {cache.lengths} tokens, caches[0] {caches[0].lengths}: a call that was "
                    "interrupted left them apart; reset() all of them and read the text again"
                )

    def new_caches(self, batch: int = 1, ring: rs.Ring | None = None) -> tuple[rs.Cache, ...]:
        """An empty cache for each layer, to decode so many texts side by side; sharded over a ring, if one is given."""
        config, weight = self.config, self.embedding.weight
        if not config.causal:
            raise ValueError("causal=False: an encoder has no next token; decoding needs a causal model")
        return tuple(
            rs.Cache(
                config.pattern_of(layer),
                kv_heads=config.kv_heads,
                head_dim=config.head_dim,
                batch=batch,
                dtype=weight.dtype,
                device=weight.device,
                ring=ring,
            )
            for layer in range(config.layers)
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, (.., vocab_size). For a few rows: over a long sequence use `loss`, which slices."""
        return self.head(hidden)

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        ring: AnyRing = None,
        seq_len: int | None = None,
        group: dist.ProcessGroup | None = None,
        gradients: Gradients = "summed",
    ) -> Tensor:
        """This rank's share of the mean cross-entropy (nats) over the targets; see `rs.nn.ring_cross_entropy`."""
        hidden = self._hidden(tokens, ring, seq_len)  # not self(..): FSDP gathers weights once a call
        weight = self.head.weight
        return rs.nn.ring_cross_entropy(hidden, weight, targets, ring=ring, group=group, gradients=gradients)

    def checkpoint_layers(self, wanted: bool = True) -> None:
        """Whether layers are computed again in backward instead of kept; attention's outputs are kept either way."""
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.recomputes = wanted

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors into a folder."""
        save_weights(Path(folder), self.config.to_json(), self.state_dict())

    @staticmethod
    def from_pretrained(folder: str | Path) -> LongNet:
        """The model that `save_pretrained` wrote."""
        text, weights = load_weights(Path(folder))
        try:
            model = LongNet(LongNetConfig.from_json(text))
            model.load_state_dict(weights)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"{folder}: not a model that fits its config.json ({error})") from error
        return model
