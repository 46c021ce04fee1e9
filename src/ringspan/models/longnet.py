"""LongNet: a transformer whose layers attend by dilation, alone or over a ring.

Pre-norm, rotary positions, a gated MLP, RMS norms. Over a ring every rank runs the model on its own rows; nothing but
attention looks beyond them, so that the ring is all there is to know.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ringspan as rs
from ringspan.models.config import LongNetConfig
from ringspan.models.saving import load_weights, save_weights
from ringspan.nn.cross_entropy import Gradients
from ringspan.nn.rotary import angles, rotate


@dataclass(frozen=True)
class Place:
    """Where the rows of a call lie in the sequence: what every layer needs to know of it."""

    seq_len: int
    cosines: Tensor
    sines: Tensor
    ring: rs.Ring | rs.SimulatedRing | None


def keep_attention() -> tuple[Any, Any]:
    """Activation checkpointing that computes everything again but attention: the ring is not walked a third time."""

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = operator is torch.ops.ringspan.attention.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Attention(nn.Module):
    def __init__(self, config: LongNetConfig, layer: int) -> None:
        super().__init__()
        self.config, self.pattern = config, config.pattern_of(layer)
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
        seen = rs.attention(
            *(q, k, v),
            pattern=self.pattern,
            causal=self.config.causal,
            ring=place.ring,
            seq_len=None if place.ring is None else place.seq_len,
        )
        return self.output(seen.flatten(-2))


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
        self, tokens: Tensor, *, ring: rs.Ring | rs.SimulatedRing | None = None, seq_len: int | None = None
    ) -> Tensor:
        """Normalised hidden states (batch, rows, width) of tokens (batch, rows) or embeddings (batch, rows, width)."""
        return self._hidden(tokens, ring, seq_len)

    def _hidden(self, tokens: Tensor, ring: rs.Ring | rs.SimulatedRing | None, seq_len: int | None) -> Tensor:
        x = tokens if tokens.is_floating_point() else self.embedding(tokens)
        place = self._place(x, ring, seq_len)
        for layer in self.layers:
            x = layer(x, place)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, (.., vocab_size). For a few rows: over a long sequence use `loss`, which slices."""
        return self.head(hidden)

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        ring: rs.Ring | rs.SimulatedRing | None = None,
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

    def _place(self, x: Tensor, ring: rs.Ring | rs.SimulatedRing | None, seq_len: int | None) -> Place:
        rows = x.shape[1]
        if isinstance(ring, rs.Ring):
            if seq_len is None:
                raise ValueError(
                    "seq_len is needed over a ring: the length of the whole sequence, not of this rank's rows"
                )
            positions = ring.positions(seq_len, x.device)
            if len(positions) != rows:
                raise ValueError(
                    f"{rows} rows, but this rank holds {len(positions)} of seq_len={seq_len}: give its own rows"
                )
        else:
            seq_len, positions = rows, torch.arange(rows, device=x.device)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        cosines, sines = angles(positions, self.config.head_dim, self.config.rotary_base, wide)
        return Place(seq_len, cosines, sines, ring)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors into a folder."""
        save_weights(Path(folder), self.config.to_json(), self.state_dict())

    @staticmethod
    def from_pretrained(folder: str | Path) -> LongNet:
        """The model that `save_pretrained` wrote."""
        text, weights = load_weights(Path(folder))
        model = LongNet(LongNetConfig.from_json(text))
        model.load_state_dict(weights)
        return model
