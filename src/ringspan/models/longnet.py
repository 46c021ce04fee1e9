"""`LongNet`: a decoder or encoder with a pattern for each layer, on one device or over a ring."""

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
from ringspan.models.config import CONFIG, LongNetConfig, load_weights, save_weights
from ringspan.nn.cross_entropy import Gradients
from ringspan.nn.rotary import angles, rotate
from ringspan.validation import Lengths, packed_lengths

AnyRing: TypeAlias = "rs.Ring | rs.SimulatedRing | None"


@dataclass(frozen=True)
class RowContext:
    """What every layer needs about the rows of a call: ring, packed documents, rotary angles and caches."""

    seq_len: int
    cosines: Tensor
    sines: Tensor
    ring: AnyRing
    lengths: Tensor | None  # of packed documents, int64
    caches: Sequence[rs.Cache] | None  # one per layer


def positions_of(
    rows: int,
    device: torch.device,
    ring: AnyRing = None,
    seq_len: int | None = None,
    lengths: Tensor | None = None,
    seen: tuple[int, ...] = (0,),
) -> tuple[int, Tensor]:
    """Length of the whole sequence, and positions of the rows of this call, (rows) or (batch, rows).

    Args:
        rows: number of rows of this call on this rank.
        lengths: lengths of packed documents, int64.
        seen: number of tokens before these rows, per sequence.

    >>> positions_of(4, torch.device("cpu"), seen=(10, 20))[1].tolist()
    [[10, 11, 12, 13], [20, 21, 22, 23]]
    >>> positions_of(5, torch.device("cpu"), lengths=torch.tensor([3, 2]), seen=(10, 0))[1].tolist()
    [10, 11, 12, 0, 1]
    """
    if isinstance(ring, rs.Ring):
        if seq_len is None:
            raise ValueError("seq_len=None over a ring: pass the length of the whole sequence, not of this rank's rows")
        places = ring.positions(seq_len, device, lengths, rows)
        if len(places) != rows:
            raise ValueError(
                f"{rows} rows, but this rank holds {len(places)} of seq_len={seq_len}: pass "
                "ring.split_sequence(tokens), with the same lengths"
            )
    else:
        if seq_len not in (None, rows):
            raise ValueError(f"seq_len={seq_len}, but there are {rows} rows: must be equal without a ring")
        seq_len, places = rows, torch.arange(rows, device=device)
    if lengths is not None:
        if not torch.compiler.is_compiling():  # compiled, attention checks them when it runs
            Documents(tuple(lengths.tolist())).check_rows(seq_len)
        lengths = lengths.to(device)
        ends = lengths.cumsum(0)
        before = torch.tensor(seen, device=device) if len(seen) == len(lengths) else torch.zeros_like(lengths)
        return seq_len, places + (before - ends + lengths)[torch.bucketize(places, ends, right=True)]
    if len(set(seen)) == 1:
        return seq_len, places + seen[0]
    return seq_len, torch.tensor(seen, device=device)[:, None] + places


def keep_attention() -> tuple[Any, Any]:
    """Activation checkpointing that recompute everything except attention, so the ring does not run again."""

    def policy(state: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = operator is torch.ops.ringspan.attention.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class LongNetAttention(nn.Module):
    """Rotary attention under the pattern of one layer."""

    def __init__(self, config: LongNetConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer, self.pattern = config, layer, config.pattern_of(layer)
        kv_width = config.head_dim * config.kv_heads
        self.queries = nn.Linear(config.width, config.width, bias=False)
        self.keys = nn.Linear(config.width, kv_width, bias=False)
        self.values = nn.Linear(config.width, kv_width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)
        self.sinks = nn.Parameter(torch.zeros(config.heads)) if config.sinks else None

    def forward(self, x: Tensor, context: RowContext) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.config.head_dim)) for project in (self.queries, self.keys, self.values)
        )
        q, k = (rotate(y, context.cosines, context.sines) for y in (q, k))
        return self.output(self._attend(q, k, v, context).flatten(-2))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, context: RowContext) -> Tensor:
        options: dict[str, Any] = dict(softcap=self.config.softcap or None, sinks=self.sinks, lengths=context.lengths)
        if context.ring is not None:
            options |= dict(ring=context.ring, seq_len=context.seq_len)
        if context.caches is None:
            return rs.attention(q, k, v, pattern=self.pattern, causal=self.config.causal, **options)
        attend = rs.attention_step if context.ring is None else rs.attention_prefill
        return attend(q, k, v, context.caches[self.layer], **options)


class GatedMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LongNetConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.mlp_width, bias=False)
        self.up = nn.Linear(config.width, config.mlp_width, bias=False)
        self.down = nn.Linear(config.mlp_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LongNetLayer(nn.Module):
    """Attention and MLP, each with a pre-norm and a residual connection."""

    def __init__(self, config: LongNetConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, config.norm_eps)
        self.attention = LongNetAttention(config, layer)
        self.mlp_norm = nn.RMSNorm(config.width, config.norm_eps)
        self.mlp = GatedMLP(config)
        self.recompute = False

    def forward(self, x: Tensor, context: RowContext) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._compute, x, context, use_reentrant=False, context_fn=keep_attention)
        return self._compute(x, context)

    def _compute(self, x: Tensor, context: RowContext) -> Tensor:
        x = x + self.attention(self.attention_norm(x), context)
        return x + self.mlp(self.mlp_norm(x))


class LongNet(nn.Module):
    """A transformer for long sequences.

    Maps tokens (batch, rows), or embeddings (batch, rows, width), to hidden states (batch, rows, width). `logits` and
    `loss` use these. Over a `Ring`, rows are this rank's, and ``seq_len`` is the length of the whole sequence.

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
        self.layers = nn.ModuleList(LongNetLayer(config, i) for i in range(config.layers))
        self.norm = nn.RMSNorm(config.width, config.norm_eps)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with standard deviation 0.02; smaller by sqrt(2 * layers) for projections into the residual stream.

        Norms start at 1, sinks at 0.
        """
        into_stream = 0.02 * (2 * self.config.layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.dim() == 1:
                nn.init.constant_(weight, 0.0 if name.endswith("attention.sinks") else 1.0)
            else:
                small = name.endswith(("attention.output.weight", "mlp.down.weight"))
                nn.init.normal_(weight, std=into_stream if small else 0.02)

    def forward(
        self,
        tokens: Tensor,
        *,
        ring: AnyRing = None,
        seq_len: int | None = None,
        lengths: Lengths | None = None,
        cu_seqlens: Lengths | None = None,
        caches: Sequence[rs.Cache] | None = None,
    ) -> Tensor:
        """Normalised hidden states (batch, rows, width) of tokens (batch, rows) or embeddings (batch, rows, width).

        Args:
            ring, seq_len: as for `rs.attention`; ``seq_len`` is required over a `Ring`.
            lengths, cu_seqlens: packed documents, as for `rs.attention`; positions restart in each.
            caches: from `new_caches`: the rows continue the cached texts and are appended to the caches. Over a ring
                the rows are prompts, and the caches must be empty.
        """
        whole = seq_len if isinstance(ring, rs.Ring) else tokens.shape[1]
        return self._hidden(tokens, ring, seq_len, packed_lengths(lengths, cu_seqlens, whole), caches)

    def _hidden(
        self,
        tokens: Tensor,
        ring: AnyRing,
        seq_len: int | None,
        lengths: Tensor | None = None,
        caches: Sequence[rs.Cache] | None = None,
    ) -> Tensor:
        x = tokens if tokens.is_floating_point() else self.embedding(tokens)
        if caches is not None:
            self._check_caches(caches)
        seen = (0,) if caches is None else caches[0].lengths
        whole, positions = positions_of(x.shape[1], x.device, ring, seq_len, lengths, seen)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        cosines, sines = angles(positions, self.config.head_dim, self.config.rotary_base, wide)
        context = RowContext(whole, cosines, sines, ring, lengths, caches)
        for layer in self.layers:
            x = layer(x, context)
        return self.norm(x)

    def _check_caches(self, caches: Sequence[rs.Cache]) -> None:
        if len(caches) != len(self.layers) or len({id(cache) for cache in caches}) != len(caches):
            different = len({id(cache) for cache in caches})
            raise ValueError(f"{different} caches for {len(self.layers)} layers: pass one per layer, from new_caches()")
        for i, cache in enumerate(caches):
            if cache.pattern != self.config.pattern_of(i):
                raise ValueError(
                    f"caches[{i}] has the pattern {cache.pattern}, layer {i} {self.config.pattern_of(i)}: pass the "
                    "caches of this model's new_caches(), in order"
                )
            if cache.lengths != caches[0].lengths:
                raise ValueError(
                    f"caches[{i}] has seen {cache.lengths} tokens, caches[0] {caches[0].lengths}: an "
                    "interrupted call advanced only some of them; reset() all and read the text again"
                )

    def new_caches(self, batch: int = 1, ring: rs.Ring | None = None) -> tuple[rs.Cache, ...]:
        """One empty cache per layer, for ``batch`` texts. With a ring, the caches are sharded over it."""
        config, weight = self.config, self.embedding.weight
        if not config.causal:
            raise ValueError("causal=False: decoding needs a causal model")
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
        """Logits of the next token, (.., vocab_size). For a few rows; `loss` handles long sequences in slices."""
        return self.head(hidden)

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        ring: AnyRing = None,
        seq_len: int | None = None,
        lengths: Lengths | None = None,
        cu_seqlens: Lengths | None = None,
        group: dist.ProcessGroup | None = None,
        gradients: Gradients = "summed",
    ) -> Tensor:
        """This rank's share of the mean cross-entropy (nats) over the targets; see `rs.nn.ring_cross_entropy`."""
        whole = seq_len if isinstance(ring, rs.Ring) else tokens.shape[1]
        packed = packed_lengths(lengths, cu_seqlens, whole)
        hidden = self._hidden(tokens, ring, seq_len, packed)  # not self(..): FSDP gathers weights once per call
        weight = self.head.weight
        return rs.nn.ring_cross_entropy(hidden, weight, targets, ring=ring, group=group, gradients=gradients)

    def checkpoint_layers(self, wanted: bool = True) -> None:
        """Whether backward recomputes the layers instead of keeping activations. Attention outputs are always kept."""
        for layer in self.layers:
            assert isinstance(layer, LongNetLayer)
            layer.recompute = wanted

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors into a folder."""
        save_weights(Path(folder), self.config.to_json(), self.state_dict())

    @staticmethod
    def from_pretrained(folder: str | Path) -> LongNet:
        """Load a model from the folder that `save_pretrained` wrote."""
        text, weights = load_weights(Path(folder))
        try:
            config = LongNetConfig.from_json(text)
        except ValueError as error:
            raise ValueError(f"{Path(folder) / CONFIG}: {error}") from error
        try:
            model = LongNet(config)
            model.load_state_dict(weights)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"{folder}: the weights do not fit config.json ({error})") from error
        return model
