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

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ringspan as rs
from ringspan.integrations.transformers_attention import AnyRing, RegisteredAttention
from ringspan.nn.cross_entropy import IGNORED, Gradients
from ringspan.runtime.extras import missing_package

if TYPE_CHECKING:
    from ringspan.integrations.transformers_cache import RingspanCache

__all__ = ["RingspanCache", "causal_lm_loss", "register", "shard"]

NAME = "ringspan"
# Settings of models that scale or cap their logits; 1 leaves them as they are.
_CHANGE_LOGITS = (
    *("logit_scale", "logits_scaling", "lm_head_multiplier"),
    *("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"),
)


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
        from transformers import AttentionInterface, AttentionMaskInterface, masking_utils  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(missing_package("register", "Transformers 5", "transformers")) from error
    combined = masking_utils.and_masks(masking_utils.causal_mask_function).__code__
    kinds = (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function, combined)
    registered = RegisteredAttention(pattern, ring, *kinds)
    AttentionInterface.register(name, registered.attention)
    AttentionMaskInterface.register(name, registered.mask)


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
    head, config = model.get_output_embeddings(), model.config.get_text_config()  # type: ignore[operator, union-attr]
    scales = {name: getattr(config, name, None) for name in _CHANGE_LOGITS}
    changed = [f"{name}={value}" for name, value in scales.items() if value is not None and value != 1]
    changed += ["a bias of the head"] if getattr(head, "bias", None) is not None else []
    changed += ["output_router_logits"] if getattr(config, "output_router_logits", False) else []
    if changed:
        raise ValueError(f"{', '.join(changed)}: logits are more than a product here; use model(**batch).loss")
    if model.base_model is model:
        raise ValueError(
            f"{type(model).__name__} names no base model, which would give hidden states: use model(**batch).loss"
        )
    inputs = {k: x for k, x in batch.items() if k not in ("labels", "shift_labels", "num_items_in_batch")}
    hidden = model.base_model(**inputs).last_hidden_state  # type: ignore[operator]
    return rs.nn.ring_cross_entropy(
        hidden, head.weight, batch["shift_labels"], ring=ring, group=group, gradients=gradients
    )
