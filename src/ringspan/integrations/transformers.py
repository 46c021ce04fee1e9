"""Hugging Face Transformers: ringspan as the attention of any model that uses the library's attention interface.

    register(ring=ring)  # what the model's config says: full layers, sliding windows, sinks, soft caps
    model = AutoModelForCausalLM.from_config(config, attn_implementation="ringspan")
    batch = shard(input_ids, labels, ring=ring)
    loss = causal_lm_loss(model, batch, ring=ring)
    model.generate(prompt, past_key_values=RingspanCache())  # registered without a ring

Uses only public entry points of Transformers: `AttentionInterface`, `AttentionMaskInterface`, and the keyword arguments
that models pass to attention. Nothing is monkey-patched; what a pattern cannot express is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ringspan as rs
from ringspan.integrations.transformers_attention import AnyRing, RegisteredAttention
from ringspan.nn.cross_entropy import IGNORED, Gradients
from ringspan.runtime.settings import missing_package
from ringspan.validation import Lengths, document_lengths

if TYPE_CHECKING:
    from ringspan.integrations.transformers_cache import RingspanCache

__all__ = ["RingspanCache", "causal_lm_loss", "register", "shard"]

NAME = "ringspan"
# Settings of models that scale or cap their logits; 1 leaves them unchanged.
_CHANGE_LOGITS = (
    *("logit_scale", "logits_scaling", "lm_head_multiplier"),
    *("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"),
)


def __getattr__(name: str) -> Any:
    if name != "RingspanCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ringspan.integrations.transformers_cache import RingspanCache  # noqa: PLC0415  # needs Transformers

    return RingspanCache


def register(
    *, pattern: rs.Pattern | Sequence[rs.Pattern] | None = None, ring: AnyRing = None, name: str = NAME
) -> None:
    """Register attention, optionally over a ring, as ``attn_implementation=name``.

    Args:
        pattern: None computes what the model's configuration says, layer by layer: full attention, sliding windows,
            chunks. An existing checkpoint then gives the same results as on one device. A pattern replaces the full
            attention of all layers; a list has one pattern for each layer, by the layer's index.
        ring: splits the sequence over devices. Every rank calls the model with its own rows: see `shard`.
        name: registering a name again replaces it, also for existing models. Use several names for several patterns.

    Sinks (``s_aux``), soft caps and scales that a model passes to its attention are honoured in any case. Whatever
    else a model passes and ringspan cannot express is an error.
    """
    patterns = tuple(pattern) if isinstance(pattern, Sequence) else pattern
    for one in patterns if isinstance(patterns, tuple) else (patterns,):
        if not (isinstance(one, rs.Pattern) or pattern is None):
            raise TypeError(
                f"pattern={pattern!r}: must be a pattern such as Dilated(...), Window(...) or Full(), a list with one "
                "for each layer, or None for what the model's configuration says"
            )
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, masking_utils  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(missing_package("register", "Transformers 5", "transformers")) from error
    registered = RegisteredAttention(patterns, ring, masking_utils)
    AttentionInterface.register(name, registered.attention)
    AttentionMaskInterface.register(name, registered.mask)


def shard(
    input_ids: Tensor,
    labels: Tensor | None = None,
    *,
    ring: rs.Ring,
    lengths: Lengths | None = None,
    cu_seqlens: Lengths | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """This rank's rows of a batch that every rank of the ring holds, as keyword arguments for the model.

    Labels are shifted before the split, since the last row of a shard predicts a token of another rank. They are
    returned as ``shift_labels``, with ``num_items_in_batch``, the number of targets on all ranks of ``group`` (by
    default the ring's), so that the model's own loss is this rank's share of the mean. A few models compute a loss of
    their own that ignores both (Whisper, CPM-Ant, XLNet): use `causal_lm_loss` or a loss of yours.

    Args:
        lengths, cu_seqlens: packed documents, as for `rs.attention`; the same in every row of the batch. Positions
            restart in each document, and no document predicts the first token of the next.
    """
    n = input_ids.shape[1]
    packed = document_lengths(lengths, cu_seqlens, n)
    if packed is not None and sum(packed) != n:
        raise ValueError(f"lengths={packed}: add up to {sum(packed)}, but each row has {n} tokens; must be equal")
    if labels is not None and labels.shape != input_ids.shape:
        raise ValueError(f"labels {tuple(labels.shape)}: must be {tuple(input_ids.shape)}, one per token, not shifted")
    layout = ring.layout_of(n, packed)
    if not all(layout.rows_of(rank) for rank in range(ring.size)):
        raise ValueError(
            f"{n} tokens over {ring.size} ranks: a rank would hold none, which models do not support; use fewer ranks"
        )
    positions = torch.arange(n, device=input_ids.device)
    found: dict[str, Any] = {"seq_len": n, "use_cache": False}
    if packed is not None:
        borders = torch.tensor((0, *packed), device=input_ids.device).cumsum(0)
        positions = positions - borders[torch.bucketize(positions, borders[1:], right=True)]
        found["cu_seq_lens_q"] = borders
    mine = [ring.split_sequence(x, lengths=packed) for x in (input_ids, positions.expand(input_ids.shape))]
    found |= {"input_ids": mine[0], "position_ids": mine[1]}
    if labels is not None:
        targets = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        if packed is not None:
            targets[:, found["cu_seq_lens_q"][1:] - 1] = IGNORED
        # Contiguous, as the library's loss flattens them with view().
        targets = ring.split_sequence(targets, lengths=packed).contiguous()
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
    """The loss of a sharded batch, in slices of rows, so that no (rows x vocabulary) logits are allocated.

    This rank's share of the mean, as in `rs.nn.ring_cross_entropy`. Models whose logits are more than hidden states
    times a matrix, or whose own loss is not the cross-entropy of the next token (ProphetNet), are refused.
    """
    head, config = model.get_output_embeddings(), model.config.get_text_config()  # type: ignore[operator, union-attr]
    scales = {name: getattr(config, name, None) for name in _CHANGE_LOGITS}
    changed = [f"{name}={value}" for name, value in scales.items() if value is not None and value != 1]
    changed += ["a bias of the head"] if getattr(head, "bias", None) is not None else []
    changed += ["output_router_logits"] if getattr(config, "output_router_logits", False) else []
    changed += [f"ngram={config.ngram}"] if getattr(config, "ngram", None) else []  # predicts several tokens per row
    if changed:
        raise ValueError(
            f"{', '.join(changed)}: this model's loss is not the cross-entropy of hidden states times a matrix; use "
            "model(**batch).loss"
        )
    if model.base_model is model:
        raise ValueError(
            f"{type(model).__name__} names no base model to compute hidden states: use model(**batch).loss"
        )
    inputs = {k: x for k, x in batch.items() if k not in ("labels", "shift_labels", "num_items_in_batch")}
    registered = _registered()
    for each in registered:
        each.is_reached = False
    hidden = model.base_model(**inputs).last_hidden_state  # type: ignore[operator]
    if not any(each.is_reached for each in registered):
        raise ValueError(
            f"{type(model).__name__} never called ringspan's attention, so each rank saw only its own rows: call "
            "register(ring=ring) and create the model with attn_implementation='ringspan'. A model that computes "
            "attention itself, or has none, cannot run over a ring"
        )
    return rs.nn.ring_cross_entropy(
        hidden, head.weight, batch["shift_labels"], ring=ring, group=group, gradients=gradients
    )


def _registered() -> list[RegisteredAttention]:
    from transformers import AttentionInterface  # noqa: PLC0415

    functions = [getattr(function, "__self__", None) for function in AttentionInterface().values()]
    return [each for each in functions if isinstance(each, RegisteredAttention)]
