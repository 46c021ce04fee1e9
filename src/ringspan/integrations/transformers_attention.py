"""The attention and mask functions that `register` gives to Transformers. Imports without Transformers.

Models receive a `MaskDescription` in place of a mask. Some models request a mask and then compute attention themselves;
None would silently run them without a mask, but any use of this object raises. With a `RingspanCache`, the new keys
reach attention as `CachedRows`.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

import ringspan as rs

if TYPE_CHECKING:
    from ringspan.integrations.transformers_cache import RingspanLayer

AnyRing = rs.Ring | rs.SimulatedRing | None
MaskFunction = Callable[..., Any]
LayerPatterns = rs.Pattern | tuple[rs.Pattern, ...] | None  # for all layers, for each, or as configured
# Arguments that models pass to attention and that do not change its result. All others are refused.
_HARMLESS = frozenset({
    *("use_cache", "past_key_values", "past_key_value", "cache_position", "position_embeddings", "return_dict"),
    *("output_hidden_states", "output_router_logits", "num_items_in_batch", "logits_to_keep"),
    *("cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "labels", "shift_labels", "deterministic"),
})  # fmt: skip
# Parameters of an attention module's forward method that carry keys of another sequence.
_OTHER_SEQUENCE = frozenset({
    *("encoder_hidden_states", "key_value_states", "cross_attention_states", "context", "context_hidden_states"),
    *("latents", "key", "keys"),
})  # fmt: skip
# Values of config.layer_types that need only a rank's own rows, or attention.
_OWN_ROWS_OR_ATTENTION = frozenset({
    *("full_attention", "sliding_attention", "chunked_attention", "window_attention", "attention", "moe"),
})  # fmt: skip
REFUSAL = (
    "this model uses the attention mask itself, and ringspan builds none, so its attention cannot be replaced; use "
    "attn_implementation='eager'"
)


@dataclass(frozen=True, eq=False)
class MaskDescription:
    """Describes a mask that is never built. Not a tensor; any use as one raises."""

    causal: bool
    kv_length: int  # keys, those in a cache included
    padding: Tensor | None  # (batch, kv_length), bool, False for padding; None without padding
    lengths: Tensor | None  # of packed documents, int64; None for one document, or under torch.compile
    pattern: rs.Pattern  # of the model's own mask: full, a sliding window, or chunks

    def _refuse(self, *_: object) -> NoReturn:
        raise ValueError(REFUSAL)

    # Python would accept these or raise an unclear error. All other uses reach __torch_function__.
    __bool__ = __len__ = __iter__ = __getitem__ = __invert__ = __neg__ = __float__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __and__ = __or__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> NoReturn:
        # An AttributeError, so that hasattr() still works.
        raise AttributeError(f"attention_mask.{name}: {REFUSAL}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise ValueError(f"{getattr(func, '__name__', func)} of an attention mask: {REFUSAL}")


class RegisteredAttention:
    """The attention and mask functions of one registered name."""

    def __init__(self, pattern: LayerPatterns, ring: AnyRing, causal: MaskFunction, both: MaskFunction, combined: Any):
        """Takes the mask functions of Transformers: causal, bidirectional, and the code object of a combination."""
        self.pattern, self.ring = pattern, ring
        self.over_a_ring = isinstance(ring, rs.Ring)
        self.causal, self.both, self.combined = causal, both, combined
        self.seen: tuple[Callable[[], Tensor | None], int] = (
            lambda: None,
            0,
        )  # the last position_ids, and their version
        self.lengths: Tensor | None = None  # of the documents in these position_ids

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
        key, layer = unmark(key)
        mask = _described(attention_mask)
        causal = _causality(module, is_causal, mask)
        _refuse_arguments(dropout, others)
        _refuse_other_sequences(module, causal, query, key)
        if isinstance(self.ring, rs.Ring) and self.ring.size > 1 and seq_len is None:
            raise ValueError(
                f"{query.shape[2]} rows without seq_len over a ring of {self.ring.size} ranks: each rank needs its own "
                "rows and the length of the whole sequence; call batch = shard(input_ids, labels, ring=ring) and "
                "model(**batch)"
            )
        if isinstance(self.ring, rs.Ring) and self.ring.size > 1:
            _refuse_other_layers(module)
        length = max(seq_len or 0, key.shape[2], 0 if mask is None else mask.kv_length)
        pattern = self._pattern_of(module, rs.Full() if mask is None else mask.pattern, sliding_window, length)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        scores: dict[str, Any] = dict(scale=scaling)
        scores |= {name: x for name, x in (("sinks", s_aux), ("softcap", softcap)) if x is not None}
        options = dict(pattern=pattern, causal=causal, ring=self.ring, **scores)
        padding = None if mask is None or mask.padding is None else mask.padding.to(q.device)
        if padding is not None and cu_seq_lens_q is not None:
            raise ValueError(
                "both attention_mask and cu_seq_lens_q: packed rows have no padding; pass only one of them"
            )
        if layer is not None:
            _check_cache_arguments(causal, self.ring, query, position_ids, padding, cu_seq_lens_q)
            return attend_cached(layer, q, k, v, padding, pattern, scores), None
        if padding is not None:
            return _unpadded(q, k, v, padding, position_ids, options), None
        lengths = self._lengths(position_ids, cu_seq_lens_q, None if mask is None else mask.lengths, seq_len)
        return rs.attention(q, k, v, lengths=lengths, seq_len=seq_len, **options), None

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
        combined = getattr(mask_function, "__code__", None) is self.combined
        if use_vmap or not (combined or mask_function in (self.causal, self.both)):
            raise ValueError(
                "this model builds its own mask, which a pattern cannot express; use attn_implementation='eager'"
            )
        # Transformers combines masks for windows, which have a local_size, and for packed documents. Only its
        # bidirectional masks have allow_is_bidirectional_skip.
        causal = allow_is_bidirectional_skip is None if combined else mask_function is self.causal
        lengths = None
        unreadable = self.over_a_ring or torch.compiler.is_compiling()  # see _lengths
        if combined and mask_function is not None and attention_mask is None and not unreadable:
            lengths = _lengths_of_mask(mask_function, batch_size, q_length, others.get("device"))
        if attention_mask is not None:
            if self.over_a_ring:  # even if all ones: all ranks must raise together
                raise ValueError(
                    "attention_mask over a ring: pack the documents into one row with shard(..., lengths=...)"
                )
            if attention_mask.dim() != 2:
                raise _mask_shape_error(attention_mask)
            attention_mask = None if bool(attention_mask.all()) else attention_mask.bool()
        pattern = _pattern_of_mask(local_size if combined else None, causal, others.get("config"))
        return MaskDescription(causal, kv_length, attention_mask, lengths, pattern)

    def _pattern_of(
        self, module: nn.Module, configured: rs.Pattern, sliding_window: int | None, length: int
    ) -> rs.Pattern:
        """The pattern of one layer: as registered, or as configured. Raises where both would apply."""
        if isinstance(configured, rs.Full) and sliding_window is not None and length > sliding_window:
            raise ValueError(
                f"{type(module).__name__} has sliding_window={sliding_window}, but its mask is full: implementations "
                "of attention differ in which of them they follow; use attn_implementation='eager'"
            )
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
        if index is None or not 0 <= index < len(self.pattern):
            raise ValueError(
                f"{type(module).__name__} with layer_idx={index}, and {len(self.pattern)} patterns: register one "
                "pattern for each layer, or a single pattern for all"
            )
        return self.pattern[index]

    def _lengths(
        self, positions: Tensor | None, borders: Tensor | None, masked: Tensor | None, seq_len: int | None
    ) -> Tensor | None:
        """Lengths of packed documents, computed once for all layers of a call."""
        given = None if borders is None else borders.diff().to("cpu", torch.int64)
        if torch.compiler.is_compiling():  # the values of positions are unknown
            return given
        if isinstance(self.ring, rs.Ring):  # positions of a shard are not contiguous: they do not show documents
            if positions is not None and self._are_new(positions):
                _refuse_other_positions(positions, borders, self.ring, seq_len)
                self._remember(positions)
            return given
        if given is not None or positions is None:
            return masked if given is None else given
        if self._are_new(positions):
            self.lengths = _lengths_of_positions(positions)
            self._remember(positions)
        return self.lengths

    def _are_new(self, positions: Tensor) -> bool:
        """Whether these were not read before. All layers of a call get the same tensor."""
        return positions.is_inference() or self.seen[0]() is not positions or self.seen[1] != positions._version

    def _remember(self, positions: Tensor) -> None:
        unseen = positions.is_inference()  # inference tensors have no version counter
        self.seen = (lambda: None, 0) if unseen else (weakref.ref(positions), positions._version)


def _pattern_of_mask(local_size: int | None, causal: bool, config: Any) -> rs.Pattern:
    """The pattern of a mask that Transformers limits to ``local_size`` tokens: a sliding window or chunks."""
    if local_size is None:
        return rs.Full()
    settings = {name: getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")}
    kinds = [name for name, size in settings.items() if size == local_size]
    if len(kinds) != 1:
        raise ValueError(
            f"a mask of {local_size} tokens, and {settings} in the configuration: cannot tell whether it is a sliding "
            "window or chunks; use attn_implementation='eager'"
        )
    if kinds == ["attention_chunk_size"]:
        return rs.Dilated((local_size,), (1,))
    # A causal window counts the query's own position, a bidirectional one counts the tokens on each side.
    return rs.Window(local_size - 1) if causal else rs.Window(local_size, local_size)


def _described(mask: MaskDescription | Tensor | None) -> MaskDescription | None:
    if mask is None or isinstance(mask, MaskDescription):
        return mask
    raise _mask_shape_error(mask)


def _mask_shape_error(mask: Tensor) -> ValueError:
    return ValueError(
        f"attention_mask of shape {tuple(mask.shape)}: cannot be combined with a pattern; pass a padding mask of "
        "shape (batch, rows)"
    )


def _causality(module: nn.Module, argument: bool | None, mask: MaskDescription | None) -> bool:
    """Whether the module is causal. Raises if it does not state it, or if its mask differs."""
    said = getattr(module, "is_causal", None) if argument is None else argument
    name = type(module).__name__
    if said is None:
        raise ValueError(
            f"{name} does not state whether it is causal: set is_causal on its attention modules, or use "
            "attn_implementation='eager'"
        )
    if mask is None and said:
        raise ValueError(
            f"{name} is causal, but its model takes no mask from the mask interface, so it may see the future or "
            "padding: use attn_implementation='eager'"
        )
    if mask is not None and mask.causal != bool(said):
        kinds = ("bidirectional", "causal")
        raise ValueError(
            f"{name} is {kinds[bool(said)]}, but its mask is {kinds[mask.causal]}: set is_causal to "
            f"{mask.causal} on its attention modules, or use attn_implementation='eager'"
        )
    return bool(said)


def _refuse_arguments(dropout: float, others: dict[str, Any]) -> None:
    if dropout:
        raise ValueError(
            f"dropout={dropout}: attention weights are never materialised; set config.attention_dropout = 0"
        )
    if others.pop("output_attentions", None):
        raise ValueError(
            "output_attentions=True: attention weights are never materialised; use attn_implementation='eager'"
        )
    for name, value in others.items():
        if name not in _HARMLESS and value is not None and value is not False:
            raise ValueError(
                f"{name}: an argument of this model's attention that cannot be combined with a pattern; use "
                "attn_implementation='eager'"
            )


def _refuse_other_sequences(module: nn.Module, causal: bool, query: Tensor, key: Tensor) -> None:
    """Refuse cross-attention: a pattern relates rows of one sequence, even if another has the same length."""
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            "an encoder-decoder model: patterns do not apply to cross-attention; use attn_implementation='eager'"
        )
    says = getattr(module, "is_cross_attention", None)
    # Causal attention and encoders use their own sequence. All others must state it.
    own = causal or says is False or getattr(module, "is_decoder", None) is False
    if says or not (own or _OTHER_SEQUENCE.isdisjoint(_parameters(type(module)))):
        raise ValueError(
            f"{type(module).__name__}: this is or may be cross-attention, to which patterns do not apply. Set "
            "add_cross_attention=False, or use attn_implementation='eager'"
        )
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"{query.shape[2]} queries and {key.shape[2]} keys: another cache is in use; pass "
            "past_key_values=RingspanCache() or use_cache=False"
        )


def _refuse_other_layers(module: nn.Module) -> None:
    """Refuse recurrent and convolutional layers: over a ring, only attention reaches the rows of other ranks."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None) or ()
    others = sorted({str(kind) for kind in kinds} - _OWN_ROWS_OR_ATTENTION)
    if others:
        raise ValueError(
            f"layers of kind {', '.join(others)} over a ring: they need rows of other ranks, which only attention "
            "can reach; use a model with attention and MLP layers only, or one device"
        )


def _parameters(module: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(module.forward).parameters)


def _lengths_of_mask(mask_function: MaskFunction, batch: int, rows: int, device: Any) -> Tensor | None:
    """Lengths of packed documents: one starts where a row does not see the row before it."""
    queries = torch.arange(1, rows, device=device)
    sees = mask_function(torch.arange(batch, device=device)[:, None], 0, queries, queries - 1)
    return _lengths_between(~sees.expand(batch, rows - 1))


def _lengths_between(breaks: Tensor) -> Tensor | None:
    """Lengths of the documents between ``breaks`` (batch, rows - 1). None for a single document."""
    if not breaks.any():
        return None
    if (breaks != breaks[:1]).any():
        raise ValueError(
            "documents start at different positions in the rows of the batch: pack them into one row and pass their "
            "offsets as cu_seq_lens_q"
        )
    rows = breaks.shape[1] + 1
    ends = torch.cat([breaks[0].nonzero().flatten() + 1, torch.tensor([rows], device=breaks.device)])
    return ends.diff(prepend=ends.new_zeros(1)).to("cpu", torch.int64)


def _refuse_other_positions(positions: Tensor, borders: Tensor | None, ring: rs.Ring, seq_len: int | None) -> None:
    if seq_len is None or positions.dim() != 2:  # one device, or several positions per row
        return
    expected = ring.positions(seq_len, device=positions.device)
    if borders is not None:
        expected = expected - borders[torch.bucketize(expected, borders[1:], right=True)]
    if positions.shape[1] == len(expected) and (positions != expected).any():  # the ring refuses other lengths
        raise ValueError(
            f"position_ids are not those of this rank's rows of {seq_len}: pass what shard(...) returns, or "
            "position_ids=ring.positions(seq_len)[None]"
        )


def _lengths_of_positions(positions: Tensor) -> Tensor | None:
    """Lengths of packed documents, which start at position 0; the same in every row of the batch."""
    if positions.dim() != 2:
        raise ValueError(
            f"position_ids of shape {tuple(positions.shape)}: must be (batch, rows) to find packed documents; "
            "pass cu_seq_lens_q, (0, n) for a single document"
        )
    breaks = positions.diff(dim=1) != 1
    if positions[:, 1:][breaks].any():
        raise ValueError(
            "position_ids neither continue nor restart at 0: pack documents into one row and pass their offsets as "
            "cu_seq_lens_q"
        )
    return _lengths_between(breaks)


def _check_cache_arguments(
    causal: bool, ring: AnyRing, query: Tensor, positions: Tensor | None, mask: Tensor | None, borders: Tensor | None
) -> None:
    if not causal:
        raise ValueError("a cache with bidirectional attention: call the model with use_cache=False")
    if ring is not None:
        raise ValueError(f"a cache with {ring}: register the pattern without a ring, or use rs.attention_prefill")
    if torch.is_grad_enabled() and query.requires_grad:
        raise ValueError(
            "a cache does not keep gradients: call the model under torch.no_grad(), or with use_cache=False"
        )
    breaks = None if positions is None or positions.shape[-1] == 1 else positions.diff(dim=-1) != 1
    if breaks is not None and mask is not None:  # only between rows that are not padding
        breaks = breaks & mask[:, -query.shape[2] :][:, 1:] & mask[:, -query.shape[2] :][:, :-1]
    if borders is not None or (breaks is not None and bool(breaks.any())):
        raise ValueError("packed rows with a cache: put each text into its own row, padded on the left")


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
            "attn_implementation to the name given to register(), or pass use_cache=False"
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
