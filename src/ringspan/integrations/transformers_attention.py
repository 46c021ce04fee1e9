"""What models get from the mask interface of Transformers in place of a mask: a description that only ringspan reads.

Some models ask for a mask and then compute attention themselves. With None they would run without any mask, in silence;
with this object, everything that they could do with a mask raises.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

import ringspan as rs
from ringspan.integrations.cached_rows import attend, unmark

REFUSAL = (
    "this model works with an attention mask itself, and ringspan builds none: its attention cannot be replaced; use "
    "attn_implementation='eager'"
)


@dataclass(frozen=True, eq=False)
class MaskDescription:
    """A mask that is never built. No tensor, and of no use as one."""

    causal: bool
    kv_length: int  # keys, those in a cache included
    padding: Tensor | None  # (batch, kv_length), bool, True for rows that count; None if all do
    lengths: Tensor | None  # of packed documents, int64; None if there is only one, or under torch.compile
    window: int | None  # farthest distance that the model's own mask lets through; None for any

    def _refuse(self, *_: object) -> NoReturn:
        raise ValueError(REFUSAL)

    # Python would answer these without an error, or with one that says nothing. The others end in __torch_function__.
    __bool__ = __len__ = __iter__ = __getitem__ = __invert__ = __neg__ = __float__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __and__ = __or__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> NoReturn:
        # An AttributeError, so that code which only looks for a method of a tensor (hasattr) may pass this on.
        raise AttributeError(f"attention_mask.{name}: {REFUSAL}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise ValueError(f"{getattr(func, '__name__', func)} of an attention mask: {REFUSAL}")


AnyRing = rs.Ring | rs.SimulatedRing | None
MaskFunction = Callable[..., Any]
# Arguments that models hand down to attention, and that do not change what it computes. Others do, or may: refused.
_HARMLESS = frozenset({
    *("use_cache", "past_key_values", "past_key_value", "cache_position", "position_embeddings", "return_dict"),
    *("output_hidden_states", "output_router_logits", "num_items_in_batch", "logits_to_keep"),
    *("cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "labels", "shift_labels", "deterministic"),
})  # fmt: skip
# Parameters of an attention module's forward method by which keys of another sequence come in.
_OTHER_SEQUENCE = frozenset({
    *("encoder_hidden_states", "key_value_states", "cross_attention_states", "context", "context_hidden_states"),
    *("latents", "key", "keys"),
})  # fmt: skip
# Values of a configuration's layer_types: what the rows of a rank and attention are enough for.
_OWN_ROWS_OR_ATTENTION = frozenset({
    *("full_attention", "sliding_attention", "chunked_attention", "window_attention", "attention", "moe"),
})  # fmt: skip


class RegisteredAttention:
    """What a registered name means."""

    def __init__(self, pattern: rs.Pattern, ring: AnyRing, causal: MaskFunction, both: MaskFunction, combined: Any):
        """That library's mask functions: causal, of both directions, and the code object of a combination of masks."""
        self.pattern, self.ring = pattern, ring
        self.over_a_ring = isinstance(ring, rs.Ring)
        self.causal, self.both, self.combined = causal, both, combined
        self.seen: tuple[Callable[[], Tensor | None], int] = (lambda: None, 0)  # the last positions, and their version
        self.lengths: Tensor | None = None  # that these told

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
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Called by models: (batch, heads, rows, dim) in, (batch, rows, heads, dim) out; no attention weights exist."""
        key, layer = unmark(key)
        mask = _described(attention_mask)
        causal = _causality(module, is_causal, mask)
        _refuse_arguments(dropout, others)
        _refuse_other_sequences(module, causal, query, key)
        if isinstance(self.ring, rs.Ring) and self.ring.size > 1 and seq_len is None:
            raise ValueError(
                f"{query.shape[2]} rows without seq_len over a ring of {self.ring.size} ranks: each rank must get its "
                "own rows, and the length of the whole sequence; batch = shard(input_ids, labels, ring=ring), then "
                "model(**batch)"
            )
        if isinstance(self.ring, rs.Ring) and self.ring.size > 1:
            _refuse_other_layers(module)
        length = max(seq_len or 0, key.shape[2], 0 if mask is None else mask.kv_length)
        for window in (sliding_window, None if mask is None else mask.window):
            if window is not None and length > window:
                raise ValueError(
                    f"a window of {window} tokens over {length}: cannot be combined with a pattern; use the pattern's "
                    "segments instead (sliding_window=None in the configuration)"
                )
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        options: dict[str, Any] = dict(pattern=self.pattern, causal=causal, scale=scaling, ring=self.ring)
        padding = None if mask is None or mask.padding is None else mask.padding.to(q.device)
        if padding is not None and cu_seq_lens_q is not None:
            raise ValueError("both attention_mask and cu_seq_lens_q: packed rows have no padding; leave one out")
        if layer is not None:
            _refuse_beside_cache(causal, self.ring, query, position_ids, padding, cu_seq_lens_q)
            return attend(layer, q, k, v, padding, self.pattern, scaling), None
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
        """No mask is built: causality, packing and padding are arguments of attention."""
        combined = getattr(mask_function, "__code__", None) is self.combined
        if use_vmap or not (combined or mask_function in (self.causal, self.both)):
            raise ValueError("this model draws a mask of its own, which cannot be combined with a pattern")
        # That library combines windows, which have a local_size, and packed documents. Only its bidirectional masks may
        # be skipped as such.
        causal = allow_is_bidirectional_skip is None if combined else mask_function is self.causal
        lengths = None
        unreadable = self.over_a_ring or torch.compiler.is_compiling()  # see _lengths
        if combined and mask_function is not None and attention_mask is None and not unreadable:
            lengths = _lengths_of_mask(mask_function, batch_size, q_length, others.get("device"))
        if attention_mask is not None:
            if self.over_a_ring:  # also if it is all ones: what is refused on one rank must be refused on all
                raise ValueError(
                    "attention_mask over a ring: pack the documents into one row with shard(..., lengths=...)"
                )
            if attention_mask.dim() != 2:
                raise _shape_error(attention_mask)
            attention_mask = None if bool(attention_mask.all()) else attention_mask.bool()
        return MaskDescription(causal, kv_length, attention_mask, lengths, local_size)

    def _lengths(
        self, positions: Tensor | None, borders: Tensor | None, masked: Tensor | None, seq_len: int | None
    ) -> Tensor | None:
        """Lengths of packed documents, worked out once for all layers of a call."""
        given = None if borders is None else borders.diff().to("cpu", torch.int64)
        if torch.compiler.is_compiling():  # a compiler cannot look at positions
            return given
        if isinstance(self.ring, rs.Ring):  # positions of a shard leap by nature: they tell no documents apart
            if positions is not None and self._are_new(positions):
                _refuse_other_positions(positions, borders, self.ring, seq_len)
                self._remember(positions)
            return given
        if given is not None or positions is None:
            return masked if given is None else given
        if self._are_new(positions):
            self.lengths = _lengths_told_by(positions)
            self._remember(positions)
        return self.lengths

    def _are_new(self, positions: Tensor) -> bool:
        """Whether these were not read before: all layers of a call get the same."""
        return positions.is_inference() or self.seen[0]() is not positions or self.seen[1] != positions._version

    def _remember(self, positions: Tensor) -> None:
        unseen = positions.is_inference()  # these may change without a trace
        self.seen = (lambda: None, 0) if unseen else (weakref.ref(positions), positions._version)


def _described(mask: MaskDescription | Tensor | None) -> MaskDescription | None:
    if mask is None or isinstance(mask, MaskDescription):
        return mask
    raise _shape_error(mask)


def _shape_error(mask: Tensor) -> ValueError:
    return ValueError(
        f"attention_mask of shape {tuple(mask.shape)}: cannot be combined with a pattern; give the model one of shape "
        "(batch, rows), which says what is padding"
    )


def _causality(module: nn.Module, argument: bool | None, mask: MaskDescription | None) -> bool:
    """What the module says, if its mask says the same."""
    said = getattr(module, "is_causal", None) if argument is None else argument
    name = type(module).__name__
    if said is None:
        raise ValueError(
            f"{name} does not say whether it is causal: set is_causal on its attention modules, or use "
            "attn_implementation='eager'"
        )
    if mask is None and said:
        raise ValueError(
            f"{name} is causal, but its model takes no mask from the mask interface, and may see the future or "
            "padding: use attn_implementation='eager'"
        )
    if mask is not None and mask.causal != bool(said):
        kinds = ("bidirectional", "causal")
        raise ValueError(
            f"{name} says that it is {kinds[bool(said)]}, but its mask is {kinds[mask.causal]}: set is_causal to "
            f"{mask.causal} on its attention modules, or use attn_implementation='eager'"
        )
    return bool(said)


def _refuse_arguments(dropout: float, others: dict[str, Any]) -> None:
    if dropout:
        raise ValueError(f"dropout={dropout}: attention weights never exist here; set config.attention_dropout = 0")
    if others.pop("output_attentions", None):
        raise ValueError("output_attentions=True: attention weights never exist here; use attn_implementation='eager'")
    for name, value in others.items():
        if name not in _HARMLESS and value is not None and value is not False:
            raise ValueError(f"{name}: an argument of this model's attention that cannot be combined with a pattern")


def _refuse_other_sequences(module: nn.Module, causal: bool, query: Tensor, key: Tensor) -> None:
    """A pattern relates the rows of one sequence: keys of another, even of the same length, have no place in it."""
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        raise ValueError("an encoder-decoder model: attention from one sequence to another has no pattern")
    says = getattr(module, "is_cross_attention", None)
    # Causal attention looks back in its own sequence, and encoders have no other. The rest must say so.
    own = causal or says is False or getattr(module, "is_decoder", None) is False
    if says or not (own or _OTHER_SEQUENCE.isdisjoint(_parameters(type(module)))):
        raise ValueError(
            f"{type(module).__name__}: cross-attention, or it may be; attention from one sequence to another has no "
            "pattern. Leave add_cross_attention off, or use attn_implementation='eager'"
        )
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"{query.shape[2]} queries and {key.shape[2]} keys: a cache is in use that is not ours; give "
            "past_key_values=RingspanCache(), or call the model with use_cache=False"
        )


def _refuse_other_layers(module: nn.Module) -> None:
    """Over a ring only attention reaches the rows of other ranks; a recurrence would begin anew on each."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None) or ()
    others = sorted({str(kind) for kind in kinds} - _OWN_ROWS_OR_ATTENTION)
    if others:
        raise ValueError(
            f"layers of kind {', '.join(others)} over a ring: they look beyond a rank's rows, as attention does, but "
            "cannot reach those of other ranks; use a model whose layers are attention and MLPs, or one device"
        )


def _parameters(module: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(module.forward).parameters)


def _lengths_of_mask(mask_function: MaskFunction, batch: int, rows: int, device: Any) -> Tensor | None:
    """Packed documents end where a row does not see the one before it."""
    queries = torch.arange(1, rows, device=device)
    sees = mask_function(torch.arange(batch, device=device)[:, None], 0, queries, queries - 1)
    return _lengths_between(~sees.expand(batch, rows - 1))


def _lengths_between(leaps: Tensor) -> Tensor | None:
    """Lengths of the documents that end at ``leaps`` (batch, rows - 1); None if there is only one."""
    if not leaps.any():
        return None
    if (leaps != leaps[:1]).any():
        raise ValueError(
            "documents do not begin in the same places of all rows: pack them into one row, and give their borders as "
            "cu_seq_lens_q"
        )
    rows = leaps.shape[1] + 1
    ends = torch.cat([leaps[0].nonzero().flatten() + 1, torch.tensor([rows], device=leaps.device)])
    return ends.diff(prepend=ends.new_zeros(1)).to("cpu", torch.int64)


def _refuse_other_positions(positions: Tensor, borders: Tensor | None, ring: rs.Ring, seq_len: int | None) -> None:
    if seq_len is None or positions.dim() != 2:  # alone; or several positions for each row
        return
    expected = ring.positions(seq_len, device=positions.device)
    if borders is not None:
        expected = expected - borders[torch.bucketize(expected, borders[1:], right=True)]
    if positions.shape[1] == len(expected) and (positions != expected).any():  # other lengths are refused by the ring
        raise ValueError(
            f"position_ids are not those of this rank's rows of {seq_len}: give the model what shard(...) returns, or "
            "position_ids=ring.positions(seq_len)[None]"
        )


def _lengths_told_by(positions: Tensor) -> Tensor | None:
    """Packed documents begin anew at position 0; the same ones in every row of the batch."""
    if positions.dim() != 2:
        raise ValueError(
            f"position_ids of shape {tuple(positions.shape)}: must be (batch, rows) to tell documents apart; "
            "give cu_seq_lens_q (0, n if there is but one)"
        )
    leaps = positions.diff(dim=1) != 1
    if positions[:, 1:][leaps].any():
        raise ValueError(
            "position_ids neither run on nor begin anew at 0: pack documents into one row, and give their borders as "
            "cu_seq_lens_q"
        )
    return _lengths_between(leaps)


def _refuse_beside_cache(
    causal: bool, ring: AnyRing, query: Tensor, positions: Tensor | None, mask: Tensor | None, borders: Tensor | None
) -> None:
    if not causal:
        raise ValueError("a cache beside attention that is not causal: call the model with use_cache=False")
    if ring is not None:
        raise ValueError(
            f"a cache beside {ring}: register the pattern without a ring; rs.attention_prefill reads over one"
        )
    if torch.is_grad_enabled() and query.requires_grad:
        raise ValueError("a cache keeps no gradients: call the model under torch.no_grad(), or with use_cache=False")
    leaps = None if positions is None or positions.shape[-1] == 1 else positions.diff(dim=-1) != 1
    if leaps is not None and mask is not None:  # only between rows that count
        leaps = leaps & mask[:, -query.shape[2] :][:, 1:] & mask[:, -query.shape[2] :][:, :-1]
    if borders is not None or (leaps is not None and bool(leaps.any())):
        raise ValueError("packed rows beside a cache: give each text a row of its own, padded on the left")


def _unpadded(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, positions: Tensor | None, options: dict[str, Any]
) -> Tensor:
    """Attention of a padded batch: rows that count are packed as documents, computed, and put back; padding gets 0."""
    if mask.shape != q.shape[:2]:
        raise ValueError(f"attention_mask of shape {tuple(mask.shape)}: must be {tuple(q.shape[:2])}, (batch, rows)")
    row = torch.arange(len(mask), device=mask.device)[:, None].expand_as(mask)[mask]
    begins = row.diff(prepend=row.new_full((1,), -1)) != 0
    if positions is not None:
        held = positions.expand_as(mask)[mask]
        leaps = (held.diff(prepend=held[:1]) != 1) & ~begins
        if held[leaps].any():
            raise ValueError("position_ids neither run on nor begin anew at 0: documents in a row cannot be told apart")
        begins = begins | leaps
    borders = torch.cat([begins.nonzero().flatten(), begins.new_tensor([len(row)], dtype=torch.int64)])
    lengths = borders.diff().to("cpu", torch.int64)
    packed = rs.attention(*(x[mask][None] for x in (q, k, v)), lengths=lengths, **options)
    out = q.new_zeros(q.shape)
    out[mask] = packed[0]
    return out
