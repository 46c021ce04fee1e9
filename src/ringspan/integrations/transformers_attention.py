"""The attention and mask functions that `register` gives to Transformers. Imports without Transformers.

Models receive a `MaskDescription` in place of a mask. With a `RingspanCache`, the new keys reach attention as
`CachedRows`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import ringspan as rs
from ringspan.integrations.transformers_checks import (
    check_cache_arguments,
    check_positions,
    lengths_if_positions_op,
    lengths_of_mask,
    lengths_of_positions,
    one_unless,
    positions_of_rank,
    refuse_arguments,
    refuse_dependence_on_shards,
    refuse_other_layers,
    refuse_other_offsets,
    refuse_other_sequences,
    refuse_other_window,
    refuse_padding_inside,
    refuse_unstated,
)
from ringspan.integrations.transformers_masks import (
    KnownMasks,
    MaskDescription,
    MaskFunction,
    causality,
    described,
    mask_shape_error,
    own_mask_error,
    pattern_of_mask,
)

if TYPE_CHECKING:
    from ringspan.integrations.transformers_cache import RingspanLayer

AnyRing = rs.Ring | rs.SimulatedRing | None
LayerPatterns = rs.Pattern | tuple[rs.Pattern, ...] | None  # for all layers, for each, or as configured


class RegisteredAttention:
    """The attention and mask functions of one registered name."""

    def __init__(self, pattern: LayerPatterns, ring: AnyRing, masks: Any):
        """``masks`` is the module `transformers.masking_utils`."""
        self.pattern, self.ring = pattern, ring
        self.over_a_ring = isinstance(ring, rs.Ring)
        self.masks = KnownMasks.of(masks)
        self.seen: tuple[Callable[[], Tensor | None], int] = (
            lambda: None,
            0,
        )  # the last position_ids, and their version
        self.lengths: Tensor | None = None  # of the documents in these position_ids
        self.is_reached = False  # set by each call of attention; see causal_lm_loss

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: MaskDescription | Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        seq_len: int | None = None,
        position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        sliding_window: int | None = None,
        s_aux: Tensor | None = None,
        softcap: float | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Called by models with (batch, heads, rows, head_dim); returns (batch, rows, heads, head_dim) and None."""
        self.is_reached = True
        key, layer = unmark(key)
        mask = described(attention_mask)
        causal = causality(module, is_causal, mask)
        refuse_arguments(dropout, others)
        refuse_unstated(module, s_aux, softcap)
        refuse_other_sequences(module, causal, query, key)
        refuse_other_offsets(cu_seq_lens_q, others.get("cu_seq_lens_k"))
        if isinstance(self.ring, rs.Ring) and self.ring.size > 1 and seq_len is None:
            raise ValueError(
                f"{query.shape[2]} rows without seq_len over a ring of {self.ring.size} ranks: each rank needs its own "
                "rows and the length of the whole sequence; call batch = shard(input_ids, labels, ring=ring) and "
                "model(**batch). A model that does not pass keyword arguments on to attention cannot run over a ring"
            )
        if isinstance(self.ring, rs.Ring) and self.ring.size > 1:
            refuse_other_layers(module)
            refuse_dependence_on_shards(module, seq_len or 0, cu_seq_lens_q)
        length = max(seq_len or 0, key.shape[2], 0 if mask is None else mask.kv_length)
        configured = rs.Full() if mask is None else mask.pattern
        refuse_other_window(module, configured, causal, sliding_window, length)
        pattern = self._pattern_of(module, configured, length)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        width = v.shape[-1]
        if width < k.shape[-1]:  # multi-head latent attention
            v = nn.functional.pad(v, (0, k.shape[-1] - width))
        scores: dict[str, Any] = dict(scale=scaling)
        scores |= {name: x for name, x in (("sinks", s_aux), ("softcap", softcap)) if x is not None}
        options = dict(pattern=pattern, causal=causal, ring=self.ring, **scores)
        padding = None if mask is None or mask.padding is None else mask.padding.to(q.device)
        if padding is not None and cu_seq_lens_q is not None:
            raise ValueError(
                "both attention_mask and cu_seq_lens_q: packed rows have no padding; pass only one of them"
            )
        if padding is not None and self.pattern is None and not isinstance(pattern, rs.Full):
            refuse_padding_inside(padding, position_ids, pattern)
        if layer is not None:
            check_cache_arguments(causal, self.ring, query, position_ids, padding, cu_seq_lens_q)
            out = attend_cached(layer, q, k, v, padding, pattern, scores)
        elif padding is not None:
            out = _unpadded(q, k, v, padding, position_ids, options)
        else:
            lengths = self._lengths(
                module, position_ids, cu_seq_lens_q, None if mask is None else mask.lengths, seq_len
            )
            out = rs.attention(q, k, v, lengths=lengths, seq_len=seq_len, **options)
        return out[..., :width], None

    def mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        mask_function: MaskFunction | None = None,
        attention_mask: Tensor | None = None,
        local_size: int | None = None,
        use_vmap: bool = False,
        allow_is_bidirectional_skip: bool | None = None,
        **others: Any,
    ) -> MaskDescription:
        """Describe the mask instead of building it: attention takes causality, packing and padding as arguments."""
        combined = getattr(mask_function, "__code__", None) is self.masks.combined
        if use_vmap or not (combined or mask_function in (self.masks.causal, self.masks.both)):
            raise own_mask_error(*self.masks.leaves(mask_function))
        # Transformers combines masks for windows, which have a local_size, and for packed documents. Only its
        # bidirectional masks have allow_is_bidirectional_skip.
        causal = allow_is_bidirectional_skip is None if combined else mask_function is self.masks.causal
        lengths = None
        unreadable = self.over_a_ring or torch.compiler.is_compiling()  # see _lengths
        if combined and mask_function is not None and attention_mask is None and not unreadable:
            lengths = lengths_of_mask(mask_function, batch_size, q_length, others.get("device"))
        if attention_mask is not None:
            if self.over_a_ring:  # even if all ones: all ranks must raise together
                raise ValueError(
                    "attention_mask over a ring: leave it out, and pack documents into one row with shard(..., "
                    "lengths=...). A model that makes a mask itself (Bart, BioGPT, Marian) cannot run over a ring"
                )
            if attention_mask.dim() != 2:
                raise mask_shape_error(attention_mask)
            attention_mask = None if bool(attention_mask.all()) else attention_mask.bool()
        pattern = pattern_of_mask(local_size if combined else None, causal, others.get("config"))
        if combined and not torch.compiler.is_compiling():  # it cannot trace closures
            self.masks.check(mask_function, causal, pattern, local_size)
        return MaskDescription(causal, kv_length, attention_mask, lengths, pattern)

    def _pattern_of(self, module: nn.Module, configured: rs.Pattern, length: int) -> rs.Pattern:
        """The pattern of one layer: as registered, or as configured. Raises where both would apply."""
        if self.pattern is None:
            return configured
        reach = max(branch.reach for branch in configured.branches(length))
        if reach < length:
            raise ValueError(
                f"{configured.text} over {length} tokens in the model's configuration, and a registered pattern: only "
                "one of them can apply. Call register(ring=...) without a pattern to run the model as configured, or "
                "set sliding_window=None in its configuration"
            )
        if isinstance(self.pattern, rs.Pattern):
            return self.pattern
        index = getattr(module, "layer_idx", None)
        layers = getattr(getattr(module, "config", None), "num_hidden_layers", len(self.pattern))
        if index is None or not 0 <= index < len(self.pattern) or layers != len(self.pattern):
            raise ValueError(
                f"{type(module).__name__} with layer_idx={index} of {layers} layers, and {len(self.pattern)} patterns: "
                "register one pattern for each layer, or a single pattern for all"
            )
        return self.pattern[index]

    def _lengths(
        self,
        module: nn.Module,
        positions: Tensor | None,
        borders: Tensor | None,
        masked: Tensor | None,
        seq_len: int | None,
    ) -> Tensor | None:
        """Lengths of packed documents, computed once for all layers of a call."""
        given = None if borders is None else borders.diff().to("cpu", torch.int64)
        compiling = torch.compiler.is_compiling()  # then the values of positions are unknown
        if isinstance(self.ring, rs.Ring):  # positions of a shard are not contiguous: they do not show documents
            if positions is None or seq_len is None or not (compiling or self._are_new(positions)):
                return given
            expected = positions_of_rank(module, positions, borders, self.ring, seq_len)
            if compiling and expected is not None:
                return lengths_if_positions_op(positions, expected, one_unless(given, seq_len), seq_len, True)
            if expected is not None:
                check_positions(positions, expected, seq_len, True)
            self._remember(positions)
            return given
        if given is not None or positions is None:
            return masked if given is None else given
        if compiling:
            rows = positions.shape[-1]
            expected = positions[..., :1] + torch.arange(rows, device=positions.device)
            return lengths_if_positions_op(positions, expected, one_unless(None, rows), rows, False)
        if self._are_new(positions):
            self.lengths = lengths_of_positions(positions)
            self._remember(positions)
        return self.lengths

    def _are_new(self, positions: Tensor) -> bool:
        """Whether these were not read before. All layers of a call get the same tensor."""
        return positions.is_inference() or self.seen[0]() is not positions or self.seen[1] != positions._version

    def _remember(self, positions: Tensor) -> None:
        unseen = positions.is_inference()  # inference tensors have no version counter
        self.seen = (lambda: None, 0) if unseen else (weakref.ref(positions), positions._version)


def _unpadded(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, positions: Tensor | None, options: dict[str, Any]
) -> Tensor:
    """Attention of a padded batch: packs the rows without padding as documents. The output of padding is 0."""
    if mask.shape != q.shape[:2]:
        raise ValueError(f"attention_mask of shape {tuple(mask.shape)}: must be {tuple(q.shape[:2])}, (batch, rows)")
    row = torch.arange(len(mask), device=mask.device)[:, None].expand_as(mask)[mask]
    begins = row.diff(prepend=row.new_full((1,), -1)) != 0
    if positions is not None:
        held = positions.expand_as(mask)[mask]
        breaks = (held.diff(prepend=held[:1]) != 1) & ~begins
        if held[breaks].any():
            raise ValueError("position_ids neither continue nor restart at 0: must be contiguous within each document")
        begins = begins | breaks
    borders = torch.cat([begins.nonzero().flatten(), begins.new_tensor([len(row)], dtype=torch.int64)])
    lengths = borders.diff().to("cpu", torch.int64)
    packed = rs.attention(*(x[mask][None] for x in (q, k, v)), lengths=lengths, **options)
    out = q.new_zeros(q.shape)
    out[mask] = packed[0]
    return out


class CachedRows(Tensor):
    """New keys from a `RingspanCache`, marked with their cache layer. Only ringspan's attention can use them.

    They are the new rows only, so any other attention would silently ignore the cached ones.
    """

    layer: RingspanLayer
    rows: Tensor  # the keys themselves

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.__name__ == "__get__":  # shape, dtype and the like
            return super().__torch_function__(func, types, args, kwargs)
        raise ValueError(
            f"{func.__name__} of keys that a RingspanCache holds: this cache works with ringspan's attention only. Set "
            "attn_implementation to the name given to register(), or pass use_cache=False; models that cache latents "
            "(DeepSeek) need the latter"
        )


def mark(key: Tensor, layer: RingspanLayer) -> CachedRows:
    """The keys, marked with a layer of the cache."""
    marked = key.as_subclass(CachedRows)
    marked.layer, marked.rows = layer, key
    return marked


def unmark(key: Tensor) -> tuple[Tensor, RingspanLayer | None]:
    """Plain keys, and their layer of a `RingspanCache`, or None."""
    return (key.rows, key.layer) if isinstance(key, CachedRows) else (key, None)


def attend_cached(
    layer: RingspanLayer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    pattern: rs.Pattern,
    scores: dict[str, Any],
) -> Tensor:
    """Attention of new rows (batch, rows, heads, head_dim) over a cache layer, which then holds them.

    ``mask`` (batch, all rows so far) is False for padding, whose output is 0 and which is not cached. ``scores`` are
    scale, soft cap and sinks.
    """
    if not layer.is_waiting:
        raise ValueError(
            "a layer that uses the keys of an earlier one: a RingspanCache would append them twice; call the model "
            "with use_cache=False"
        )
    layer.is_waiting = False
    cache = layer.cache_for(pattern, k)
    with torch.no_grad():
        q, k, v = q.detach(), k.detach(), v.detach()
        counts = None if mask is None else mask[:, -q.shape[1] :]
        if counts is None or bool(counts.all()):
            out = rs.attention_step(q, k, v, cache, **scores)
        else:
            lengths = tuple(counts.sum(1).tolist())
            q_rows, k_rows, v_rows = (x[counts][None] for x in (q, k, v))
            packed = rs.attention_step(q_rows, k_rows, v_rows, cache, lengths=lengths, **scores)
            out = q.new_zeros(q.shape)
            out[counts] = packed[0]
    layer.seen += q.shape[1]
    return out
