"""Hugging Face Transformers: ringspan as an attention implementation of any model that uses the attention interface.

    register(pattern=rs.Dilated((2048, 8192), (1, 4)), ring=ring)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="ringspan")
    batch = shard(input_ids, labels, ring=ring)
    loss = causal_lm_loss(model, batch, ring=ring)
    model.generate(prompt, past_key_values=RingspanCache())  # registered without a ring

Everything goes through that library's public doors: `AttentionInterface`, `AttentionMaskInterface`, and keyword
arguments that models hand down to attention. Nothing is patched; what cannot be expressed is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ringspan as rs
from ringspan.integrations.cached_rows import attend, unmark
from ringspan.nn.cross_entropy import IGNORED, Gradients

if TYPE_CHECKING:
    from ringspan.integrations.transformers_cache import RingspanCache

__all__ = ["RingspanCache", "causal_lm_loss", "register", "shard"]

NAME = "ringspan"
AnyRing = rs.Ring | rs.SimulatedRing | None
_SCALES_OF_LOGITS = ("logit_scale", "logits_scaling", "final_logit_softcapping")
# Arguments that models hand down to attention, and that do not change what it computes. Others do, or may: refused.
_HARMLESS = frozenset({
    *("use_cache", "past_key_values", "past_key_value", "cache_position", "position_embeddings", "return_dict"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "num_items_in_batch", "logits_to_keep"),
    *("cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "labels", "shift_labels", "deterministic"),
})  # fmt: skip


def __getattr__(name: str) -> Any:
    if name != "RingspanCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ringspan.integrations.transformers_cache import RingspanCache  # noqa: PLC0415  # needs Transformers

    return RingspanCache


def register(*, pattern: rs.Pattern, ring: AnyRing = None, name: str = NAME) -> None:
    """Make ``attn_implementation=name`` mean attention under a pattern, over a ring if one is given.

    Models keep the name, so several patterns live side by side under several names; the same name again replaces what
    it meant. Over a `Ring` every rank calls the model with its own rows: see `shard`.
    """
    if not isinstance(pattern, (rs.Dilated, rs.Full)):
        raise TypeError(f"pattern={pattern!r}: must be Dilated(...) or Full()")
    try:
        from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("Transformers 5 is not installed: pip install 'ringspan[transformers]'") from error
    meant = _Meant(pattern, ring)
    AttentionInterface.register(name, meant.attention)
    AttentionMaskInterface.register(name, meant.mask)


class _Meant:
    """What a registered name means: the functions that models call for attention, and for its mask."""

    def __init__(self, pattern: rs.Pattern, ring: AnyRing) -> None:
        self.pattern, self.ring = pattern, ring
        self.over_a_ring = isinstance(ring, rs.Ring)
        self.is_packed = False  # as the library found before the layers of a call
        self.seen: tuple[Callable[[], Tensor | None], int] = (lambda: None, 0)  # the last positions, and their version
        self.lengths: Tensor | None = None  # that these told

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        seq_len: int | None = None,
        position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Called by models: (batch, heads, rows, dim) in, (batch, rows, heads, dim) out; no attention weights exist."""
        key, layer = unmark(key)
        _refuse(module, dropout, query, key, others)
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        options: dict[str, Any] = dict(pattern=self.pattern, causal=causal, scale=scaling, ring=self.ring)
        if attention_mask is not None:
            if attention_mask.dim() != 2:
                raise ValueError(
                    f"attention_mask of shape {tuple(attention_mask.shape)}: cannot be expressed beside a pattern; "
                    "give one of shape (batch, rows), which says what is padding"
                )
            if cu_seq_lens_q is not None:
                raise ValueError("both attention_mask and cu_seq_lens_q: packed rows have no padding; leave one out")
            attention_mask = attention_mask.bool()
        if layer is not None:
            _refuse_beside_cache(causal, self.ring, query, position_ids, attention_mask, cu_seq_lens_q)
            return attend(layer, q, k, v, attention_mask, self.pattern, scaling), None
        if attention_mask is not None:
            return _unpadded(q, k, v, attention_mask, position_ids, options), None
        lengths = self._lengths(position_ids, cu_seq_lens_q)
        return rs.attention(q, k, v, lengths=lengths, seq_len=seq_len, **options), None

    def mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        mask_function: Callable[..., Any] | None = None,
        attention_mask: Tensor | None = None,
        local_size: int | None = None,
        use_vmap: bool = False,
        **others: Any,
    ) -> Tensor | None:
        """No mask is built: causality and packing are arguments of attention. Padding stays what it was."""
        if local_size is not None:
            raise ValueError(
                f"a window of {local_size} tokens: cannot be expressed beside a pattern; use its segments instead"
            )
        kind = getattr(mask_function, "__qualname__", "")
        if use_vmap or "or_masks" in kind:
            raise ValueError("this model draws a mask of its own, which cannot be expressed beside a pattern")
        if not torch.compiler.is_compiling():
            self.is_packed = "and_masks" in kind
        if attention_mask is None:
            return None
        if self.over_a_ring:  # also if it is all ones: what is refused on one rank must be refused on all
            raise ValueError("attention_mask over a ring: pack the documents into one row with shard(..., lengths=...)")
        return None if bool(attention_mask.all()) else attention_mask

    def _lengths(self, positions: Tensor | None, borders: Tensor | None) -> Tensor | None:
        """Lengths of packed documents, worked out once for all layers of a call."""
        if borders is not None:
            return borders.diff().to("cpu", torch.int64)
        # Positions of a shard leap by nature, so that they tell nothing; nor can a compiler look at them.
        if self.over_a_ring or torch.compiler.is_compiling():
            return None
        if positions is None:
            if self.is_packed:
                raise ValueError("packed documents, but this model keeps position_ids to itself: give cu_seq_lens_q")
            return None
        if positions.is_inference():  # may change unseen
            return _lengths_told_by(positions)
        if self.seen[0]() is not positions or self.seen[1] != positions._version:
            self.seen, self.lengths = (weakref.ref(positions), positions._version), _lengths_told_by(positions)
        return self.lengths


def _lengths_told_by(positions: Tensor) -> Tensor | None:
    """Packed documents begin anew at position 0; the same ones in every row of the batch."""
    if positions.dim() != 2:
        raise ValueError(
            f"position_ids of shape {tuple(positions.shape)}: must be (batch, rows) to tell documents apart; "
            "give cu_seq_lens_q (0, n if there is but one)"
        )
    leaps = positions.diff(dim=1) != 1
    if not leaps.any():
        return None
    starts = leaps[0].nonzero().flatten() + 1
    if (leaps != leaps[:1]).any() or positions[:, starts].any():
        raise ValueError(
            "position_ids neither run on nor begin anew at 0 in the same places of all rows: pack documents into one "
            "row, and give their borders as cu_seq_lens_q"
        )
    ends = torch.cat([starts, starts.new_tensor([positions.shape[1]])])
    return ends.diff(prepend=ends.new_zeros(1)).to("cpu", torch.int64)


def _refuse(module: nn.Module, dropout: float, query: Tensor, key: Tensor, others: dict[str, Any]) -> None:
    if dropout:
        raise ValueError(f"dropout={dropout}: attention weights never exist here; set config.attention_dropout = 0")
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        raise ValueError("an encoder-decoder model: attention from one sequence to another has no pattern")
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"{query.shape[2]} queries and {key.shape[2]} keys: a cache is in use that is not ours; give "
            "past_key_values=RingspanCache(), or call the model with use_cache=False"
        )
    for name, value in others.items():
        if name not in _HARMLESS and value is not None and value is not False:
            raise ValueError(f"{name}: an argument of this model's attention that cannot be expressed beside a pattern")


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


def shard(
    input_ids: Tensor,
    labels: Tensor | None = None,
    *,
    ring: rs.Ring,
    lengths: tuple[int, ...] | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """This rank's part of a batch that every rank of the ring has: keyword arguments for the model.

    Labels are shifted before the split, as the model would: the last row of a shard predicts another rank's token. They
    come as ``shift_labels``, with ``num_items_in_batch``, the number of targets on all ranks of ``group`` (of the ring
    by default), so that the model's own loss is this rank's share of the mean.

    Args:
        lengths: packed documents that fill each row; positions begin anew in each, and none predicts the first token of
            the next.
    """
    n = input_ids.shape[1]
    if lengths is not None and sum(lengths) != n:
        raise ValueError(f"lengths={lengths}: add up to {sum(lengths)}, but there are {n} tokens in a row; fill it")
    if labels is not None and labels.shape != input_ids.shape:
        raise ValueError(
            f"labels {tuple(labels.shape)}: must be {tuple(input_ids.shape)}, one for each token, unshifted"
        )
    layout = ring.layout_of(n)
    if not all(layout.rows_of(rank) for rank in range(ring.size)):
        raise ValueError(f"{n} tokens over {ring.size} ranks: some would hold none, which models cannot compute")
    positions = torch.arange(n, device=input_ids.device)
    found: dict[str, Any] = {"seq_len": n, "use_cache": False}
    if lengths is not None:
        borders = torch.tensor((0, *lengths), device=input_ids.device).cumsum(0)
        positions = positions - borders[torch.bucketize(positions, borders[1:], right=True)]
        found["cu_seq_lens_q"] = borders
    mine = [ring.split_sequence(x) for x in (input_ids, positions.expand(input_ids.shape))]
    found |= {"input_ids": mine[0], "position_ids": mine[1]}
    if labels is not None:
        targets = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        if lengths is not None:
            targets[:, found["cu_seq_lens_q"][1:] - 1] = IGNORED
        targets = ring.split_sequence(targets).contiguous()  # the library's loss views them flat
        counted = (targets != IGNORED).sum()
        dist.all_reduce(counted, group=group or ring.group)
        found |= {"labels": targets, "shift_labels": targets, "num_items_in_batch": counted}
    return found


def causal_lm_loss(
    model: nn.Module,
    batch: dict[str, Any],
    *,
    ring: rs.Ring,
    group: dist.ProcessGroup | None = None,
    gradients: Gradients = "summed",
) -> Tensor:
    """The loss of a sharded batch in slices of rows: unlike the model's own, it never makes (rows x vocabulary) logits.

    This rank's share of the mean, in the sense of `rs.nn.ring_cross_entropy`. Only for models whose logits are hidden
    states times a matrix; others are refused.
    """
    head, config = model.get_output_embeddings(), model.config  # type: ignore[operator]
    scales = {
        name: getattr(config, name, None) for name in ("logit_scale", "logits_scaling", "final_logit_softcapping")
    }
    changed = [f"{name}={value}" for name, value in scales.items() if value is not None and value != 1]
    changed += ["a bias of the head"] if getattr(head, "bias", None) is not None else []
    changed += ["output_router_logits"] if getattr(config, "output_router_logits", False) else []
    if changed:
        raise ValueError(f"{', '.join(changed)}: logits are more than a product here; use model(**batch).loss")
    inputs = {k: x for k, x in batch.items() if k not in ("labels", "shift_labels", "num_items_in_batch")}
    hidden = model.base_model(**inputs).last_hidden_state  # type: ignore[operator]
    return rs.nn.ring_cross_entropy(
        hidden, head.weight, batch["shift_labels"], ring=ring, group=group, gradients=gradients
    )
