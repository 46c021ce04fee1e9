"""`TorchscaleEncoder`: LongNet encoders with torchscale's weights, such as slide encoders in computational pathology.

Modules have torchscale's names, so its state dicts load unchanged. torchscale itself is not needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ringspan as rs
from ringspan.integrations.torchscale_config import ACTIVATIONS, DROPOUTS, Padding, TorchscaleConfig
from ringspan.models.longnet import AnyRing, keep_attention, positions_of
from ringspan.nn.dropout import DropoutKey, drop_path, row_dropout
from ringspan.validation import Lengths, packed_lengths

__all__ = ["TorchscaleConfig", "TorchscaleEncoder"]

Encoder = TypeVar("Encoder", bound=nn.Module)


def padded_keys(pattern: rs.Dilated, heads: int, positions: Tensor, lengths: Tensor) -> Tensor:
    """The number of padded keys that torchscale lets each row attend to, (rows, heads), int64.

    A branch counts where it selects the row itself. torchscale cuts a segment to the sequence, then pads the sequence
    to whole segments, and each segment to a multiple of the rate.

    Args:
        positions: (rows,), int64: positions in their sequences.
        lengths: (rows,), int64: the length of the sequence of each row.

    >>> padded_keys(rs.Dilated((4, 8), (1, 2), "blocked"), 2, torch.arange(6), torch.full((6,), 6)).tolist()
    [[0, 0], [0, 0], [0, 0], [0, 0], [2, 2], [2, 2]]
    >>> padded_keys(rs.Dilated((5,), (2,), "blocked"), 2, torch.arange(5), torch.full((5,), 5)).tolist()
    [[0, 0], [0, 1], [0, 0], [0, 1], [0, 0]]
    """
    total = torch.zeros(len(positions), heads, dtype=torch.int64, device=positions.device)
    for segment_length, rate in zip(pattern.segment_lengths, pattern.dilation_rates, strict=True):
        offsets = torch.tensor(pattern.offsets(rate, heads), device=positions.device)
        segment = lengths.clamp(max=segment_length)
        place = positions % segment
        held = torch.minimum(segment, lengths - positions + place)  # rows of the sequence in this segment
        keys = (segment + rate - 1) // rate  # that a head selects in a padded segment
        padded = keys[:, None] - (held[:, None] - offsets + rate - 1) // rate
        total += padded * (place[:, None] % rate == offsets)
    return total


def row_places(
    batch: int, rows: int, device: torch.device, ring: AnyRing, seq_len: int | None, lengths: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Where the rows of a call are in their sequences. A sequence is an entry of the batch, or a packed document.

    Returns the position of each row in its sequence, (rows,), the length of that sequence, (rows,), and its number,
    (batch, rows), all int64.
    """
    whole, positions = positions_of(rows, device, ring, seq_len, lengths)
    entries = torch.arange(batch, device=device)[:, None]
    if lengths is None:
        return positions, torch.full_like(positions, whole), entries.expand(batch, rows)
    if isinstance(ring, rs.Ring):
        places = ring.positions(whole, device, lengths, rows)
    else:
        places = torch.arange(rows, device=device)
    lengths = lengths.to(device)
    documents = torch.bucketize(places, lengths.cumsum(0), right=True)
    return positions, lengths[documents], entries * len(lengths) + documents


@dataclass(frozen=True)
class _Rows:
    """What every layer needs about the rows of a call."""

    attention: dict[str, Any]  # options of rs.attention
    key: DropoutKey | None = None  # None: nothing is dropped
    positions: Tensor | None = None
    samples: Tensor | None = None

    def dropout(self, x: Tensor, rate: float, *place: int) -> Tensor:
        if self.key is None or self.positions is None:
            return x
        return row_dropout(x, rate, key=self.key.at(*place), positions=self.positions, samples=self.samples)

    def drop_path(self, x: Tensor, rate: float, *place: int) -> Tensor:
        return x if self.key is None else drop_path(x, rate, key=self.key.at(*place), samples=self.samples)


MLP_ROWS = 4096  # rows that an MLP computes at a time without gradients
# Where numbers are dropped: the first part of a key's place. The second is the layer.
_EMBEDDING, _ATTENTION, _ACTIVATION, _MLP, _ATTENTION_PATH, _MLP_PATH = range(6)


class TorchscaleEncoder(nn.Module):
    """A LongNet encoder with torchscale's weights and names: embeddings in, embeddings out, (batch, rows, width).

    The input is torchscale's ``token_embeddings``; the encoder scales and normalises them if the settings say so.

    In training mode, dropout and stochastic depth need a ``dropout_key``. Masks depend on the key and on each row's
    place in its sequence, not on the ring.
    """

    def __init__(self, config: TorchscaleConfig) -> None:
        super().__init__()
        self.config = config
        self.layernorm_embedding = nn.LayerNorm(config.width, config.norm_eps) if config.norm_embedding else None
        self.layers = nn.ModuleList(_EncoderLayer(config, i) for i in range(config.layers))
        self.layer_norm = nn.LayerNorm(config.width, config.norm_eps) if config.norm_output else None

    @staticmethod
    def load(
        weights: Mapping[str, Tensor], settings: Mapping[str, Any], prefix: str = "", padding: Padding = "none"
    ) -> TorchscaleEncoder:
        """Create an encoder in evaluation mode from a torchscale state dict and its settings.

        Only names that start with ``prefix`` are used.
        """
        encoder = TorchscaleEncoder(TorchscaleConfig.of(settings, padding))
        return load_weights_of_one_dtype(encoder, without_prefix(weights, prefix))

    def forward(
        self,
        x: Tensor,
        *,
        ring: AnyRing = None,
        seq_len: int | None = None,
        lengths: Lengths | None = None,
        cu_seqlens: Lengths | None = None,
        dropout_key: DropoutKey | None = None,
        readout: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor | list[Tensor]:
        """Encode embeddings (batch, rows, width).

        Args:
            ring, seq_len: as for `rs.attention`. Over a `Ring`, rows are this rank's, and ``seq_len`` is the length of
                the whole sequence; dropout and ``padding="torchscale"`` need it.
            lengths, cu_seqlens: packed documents, as for `rs.attention`.
            dropout_key: needed in training mode if a rate is not 0; ignored in evaluation mode.
            readout: applied to the embeddings and to the output of each layer, before the last norm. Its results are
                returned instead, as a list.
        """
        rows = self._rows(x, ring, seq_len, lengths, cu_seqlens, dropout_key)
        if readout is not None:
            return [readout(state) for state in self._states(x, rows)]
        for state in self._states(x, rows):
            x = state
        return x if self.layer_norm is None else self.layer_norm(x)

    def queries_and_keys(
        self,
        x: Tensor,
        layer: int,
        *,
        ring: AnyRing = None,
        seq_len: int | None = None,
        lengths: Lengths | None = None,
        cu_seqlens: Lengths | None = None,
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Queries and keys (batch, rows, heads, head_dim) of a layer, and the options of its attention.

        Options are those of `rs.attention`, such as the pattern and sinks of (batch, rows, heads). Over a `Ring`, rows
        are this rank's. Arguments are those of `forward`. Runs the layers before ``layer``, which counts from 0.
        """
        if not 0 <= layer < len(self.layers):
            raise ValueError(f"layer={layer}: must be in 0 .. {len(self.layers) - 1}")
        rows = self._rows(x, ring, seq_len, lengths, cu_seqlens, None)
        states = self._states(x, rows)
        for _ in range(layer + 1):
            x = next(states)
        chosen = self.layers[layer]
        assert isinstance(chosen, _EncoderLayer)
        q, k, _ = chosen.self_attn.project(chosen.self_attn_layer_norm(x) if chosen.norm_first else x)
        return q, k, {"pattern": self.config.pattern, **rows.attention}

    def checkpoint_layers(self, wanted: bool = True) -> None:
        """Whether backward recomputes the layers instead of keeping activations. Attention outputs are always kept."""
        for layer in self.layers:
            assert isinstance(layer, _EncoderLayer)
            layer.recompute = wanted

    def _rows(
        self,
        x: Tensor,
        ring: AnyRing,
        seq_len: int | None,
        lengths: Lengths | None,
        cu_seqlens: Lengths | None,
        key: DropoutKey | None,
    ) -> _Rows:
        packed = packed_lengths(lengths, cu_seqlens, seq_len if isinstance(ring, rs.Ring) else x.shape[1])
        attention = dict(ring=ring, seq_len=seq_len, lengths=packed, sinks=None)
        key = self._checked_key(key)
        if key is None and self.config.padding == "none":
            return _Rows(attention)
        positions, of_rows, samples = row_places(len(x), x.shape[1], x.device, ring, seq_len, packed)
        if self.config.padding == "torchscale":
            padded = padded_keys(self.config.pattern, self.config.heads, positions, of_rows)
            sinks = padded.to(torch.float64 if x.dtype == torch.float64 else torch.float32).log_()  # -inf for none
            attention["sinks"] = sinks.expand(len(x), -1, -1)
        return _Rows(attention, key, positions, samples)

    def _checked_key(self, key: DropoutKey | None) -> DropoutKey | None:
        """The key if something is dropped, otherwise None."""
        rates = {name: getattr(self.config, name) for name in DROPOUTS if getattr(self.config, name)}
        if not self.training or not rates:
            return None
        if key is not None and "attention_dropout" not in rates:
            return key
        named = ", ".join(f"{name}={rate:g}" for name, rate in rates.items())
        if "attention_dropout" in rates:
            raise ValueError(
                f"{named}: dropout on attention weights is not supported; call eval(), or set attention_dropout to 0"
            )
        raise ValueError(
            f"{named}: training with dropout needs dropout_key=rs.nn.DropoutKey(seed, step), with another step in each "
            "call; to train without dropout, call eval() or set the rates to 0"
        )

    def _states(self, x: Tensor, rows: _Rows) -> Iterator[Tensor]:
        """The embeddings, and the output of each layer."""
        if self.config.scale_embedding:
            x = x * math.sqrt(self.config.width)
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        x = rows.dropout(x, self.config.dropout, _EMBEDDING)
        yield x
        for layer in self.layers:
            x = layer(x, rows)
            yield x


def without_prefix(weights: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The entries whose names start with ``prefix``, by the rest of their names. Raises if there are none."""
    chosen = {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}
    if not chosen:
        raise ValueError(
            f"prefix={prefix!r}: no weight name starts with it; names look like {next(iter(weights), None)!r}"
        )
    return chosen


def load_weights_of_one_dtype(encoder: Encoder, weights: Mapping[str, Tensor]) -> Encoder:
    """Load a state dict into the encoder, which takes its dtype. Returns it in evaluation mode."""
    dtypes = {x.dtype for x in weights.values()}
    if len(dtypes) > 1:
        raise ValueError(f"weights are {', '.join(sorted(map(str, dtypes)))}: convert them to one dtype")
    for dtype in dtypes:
        encoder = encoder.to(dtype)
    encoder.load_state_dict(weights)
    return encoder.eval()


class _EncoderLayer(nn.Module):
    def __init__(self, config: TorchscaleConfig, layer: int) -> None:
        super().__init__()
        self.norm_first, self.layer, self.dropout = config.norm_first, layer, config.dropout
        self.drop_path_rate = config.drop_path_rate * layer / max(config.layers - 1, 1)
        self.self_attn = _EncoderAttention(config)
        self.self_attn_layer_norm = nn.LayerNorm(config.width, config.norm_eps)
        self.ffn = _EncoderMLP(config, layer)
        self.final_layer_norm = nn.LayerNorm(config.width, config.norm_eps)
        self.recompute = False

    def forward(self, x: Tensor, rows: _Rows) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._compute, x, rows, use_reentrant=False, context_fn=keep_attention)
        return self._compute(x, rows)

    def _compute(self, x: Tensor, rows: _Rows) -> Tensor:
        if self.norm_first:
            x = x + self._attended(self.self_attn_layer_norm(x), rows)
            return x + self._transformed(self.final_layer_norm(x), rows)
        x = self.self_attn_layer_norm(x + self._attended(x, rows))
        return self.final_layer_norm(x + self._transformed(x, rows))

    def _attended(self, x: Tensor, rows: _Rows) -> Tensor:
        x = rows.dropout(self.self_attn(x, rows.attention), self.dropout, _ATTENTION, self.layer)
        return rows.drop_path(x, self.drop_path_rate, _ATTENTION_PATH, self.layer)

    def _transformed(self, x: Tensor, rows: _Rows) -> Tensor:
        return rows.drop_path(self.ffn(x, rows), self.drop_path_rate, _MLP_PATH, self.layer)


class _EncoderAttention(nn.Module):
    def __init__(self, config: TorchscaleConfig) -> None:
        super().__init__()
        self.heads, self.pattern = config.heads, config.pattern
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(config.width, config.width) for _ in range(4))
        self.inner_attn_ln = nn.LayerNorm(config.width, config.norm_eps) if config.sub_norms else nn.Identity()

    def forward(self, x: Tensor, options: dict[str, Any]) -> Tensor:
        out = rs.attention(*self.project(x), pattern=self.pattern, **options)
        return self.out_proj(self.inner_attn_ln(out.flatten(-2)))

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, (batch, rows, heads, head_dim)."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        return tuple(project(x).unflatten(-1, (self.heads, -1)) for project in projections)


class _EncoderMLP(nn.Module):
    def __init__(self, config: TorchscaleConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.dropout, self.activation_dropout = layer, config.dropout, config.activation_dropout
        self.activation = ACTIVATIONS[config.activation]
        self.fc1, self.fc2 = nn.Linear(config.width, config.mlp_width), nn.Linear(config.mlp_width, config.width)
        self.ffn_layernorm = nn.LayerNorm(config.mlp_width, config.norm_eps) if config.sub_norms else nn.Identity()

    def forward(self, x: Tensor, rows: _Rows) -> Tensor:
        if torch.is_grad_enabled() or rows.key is not None:
            return self._compute(x, rows)
        # Without gradients nothing is kept, and hidden rows would be the largest tensors of the encoder.
        return torch.cat([self._compute(part, rows) for part in x.split(MLP_ROWS, dim=1)], dim=1)

    def _compute(self, x: Tensor, rows: _Rows) -> Tensor:
        hidden = self.fc1(x)
        hidden = self.activation(hidden.float() if hidden.dtype.itemsize < 4 else hidden).type_as(hidden)
        hidden = rows.dropout(hidden, self.activation_dropout, _ACTIVATION, self.layer)
        return rows.dropout(self.fc2(self.ffn_layernorm(hidden)), self.dropout, _MLP, self.layer)
