"""Hugging Face Transformers: ringspan as an attention implementation of any model that uses the attention interface.

    register(pattern=rs.Dilated((2048, 8192), (1, 4)), ring=ring)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="ringspan")
    batch = shard(input_ids, labels, ring=ring)
    loss = causal_lm_loss(model, batch, ring=ring)

Everything goes through that library's public doors: `AttentionInterface`, `AttentionMaskInterface`, and keyword
arguments that models hand down to attention. Nothing is patched; what cannot be expressed is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ringspan as rs
from ringspan.nn.cross_entropy import IGNORED, Gradients

NAME = "ringspan"
AnyRing = rs.Ring | rs.SimulatedRing | None
# Arguments of attention that change what is computed, and that we do not have.
_REFUSED = ("softcap", "s_aux", "sliding_window", "position_bias", "head_mask")


def register(*, pattern: rs.Pattern, ring: AnyRing = None, name: str = NAME) -> None:
    """Make ``attn_implementation=name`` mean attention under a pattern, over a ring if one is given.

    Models keep the name, so several patterns live side by side under several names; the same name again replaces what
    it meant. Over a `Ring` every rank calls the model with its own rows: see `shard`.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("Transformers 5 is not installed: pip install 'ringspan[transformers]'") from error
    AttentionInterface.register(name, _attention(pattern, ring))
    AttentionMaskInterface.register(name, _mask)


def _attention(pattern: rs.Pattern, ring: AnyRing) -> Callable[..., tuple[Tensor, None]]:
    documents = _Documents()

    def ringspan_attention(
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
        _refuse(dropout, query, key, others)
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        options: dict[str, Any] = dict(pattern=pattern, causal=causal, scale=scaling)
        if attention_mask is not None:
            if isinstance(ring, rs.Ring):
                raise ValueError("a padded batch over a ring: pack the documents into one row, and give their lengths")
            return _unpadded(q, k, v, attention_mask, options), None
        lengths = documents.of(position_ids, cu_seq_lens_q, over_a_ring=isinstance(ring, rs.Ring))
        return rs.attention(q, k, v, lengths=lengths, ring=ring, seq_len=seq_len, **options), None

    return ringspan_attention


class _Documents:
    """Lengths of packed documents, worked out once for all layers of a call."""

    def __init__(self) -> None:
        self.positions: Callable[[], Tensor | None] = lambda: None
        self.lengths: Tensor | None = None

    def of(self, positions: Tensor | None, borders: Tensor | None, *, over_a_ring: bool) -> Tensor | None:
        if borders is not None:
            return borders.diff().to("cpu", torch.int64)
        # Positions of a shard leap by nature, so that they tell nothing; nor can a compiler look at them.
        if positions is None or over_a_ring or torch.compiler.is_compiling():
            return None
        if self.positions() is not positions:
            self.positions, self.lengths = weakref.ref(positions), _lengths_told_by(positions)
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


def _refuse(dropout: float, query: Tensor, key: Tensor, others: dict[str, Any]) -> None:
    if dropout:
        raise ValueError(f"dropout={dropout}: attention weights never exist here; set config.attention_dropout = 0")
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"{query.shape[2]} queries and {key.shape[2]} keys: a cache is in use; call the model with use_cache=False"
        )
    for name in _REFUSED:
        if others.get(name) is not None:
            raise ValueError(
                f"{name}={others[name]}: cannot be expressed beside a pattern; switch it off in the config"
            )


def _unpadded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: dict[str, Any]) -> Tensor:
    """Attention of a padded batch: rows that count are packed as documents, computed, and put back; padding gets 0."""
    lengths = mask.sum(1)
    packed = rs.attention(*(x[mask][None] for x in (q, k, v)), lengths=lengths.to("cpu", torch.int64), **options)
    out = q.new_zeros(q.shape)
    out[mask] = packed[0]
    return out


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **others: Any,
) -> Tensor | None:
    """No mask is built: causality and packing are arguments of attention. Padding stays what it was, (batch, rows)."""
    if local_size is not None:
        raise ValueError(
            f"a window of {local_size} tokens: cannot be expressed beside a pattern; use its segments instead"
        )
    if use_vmap or "or_masks" in getattr(mask_function, "__qualname__", ""):
        raise ValueError("this model draws a mask of its own, which cannot be expressed beside a pattern")
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask


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

    This rank's share of the mean, in the sense of `rs.nn.ring_cross_entropy`.
    """
    inputs = {k: x for k, x in batch.items() if k not in ("labels", "shift_labels", "num_items_in_batch")}
    hidden = model.base_model(**inputs).last_hidden_state  # type: ignore[operator]
    weight = model.get_output_embeddings().weight  # type: ignore[operator]
    return rs.nn.ring_cross_entropy(hidden, weight, batch["shift_labels"], ring=ring, group=group, gradients=gradients)
