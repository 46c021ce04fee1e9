"""What Transformers models pass to attention: packed documents from it, and refusals of what a pattern cannot express.

Imports without Transformers. Each refusal names the argument or setting, and the way out.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

import ringspan as rs
from ringspan.integrations.transformers_masks import MaskFunction

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
    *("full_attention", "sliding_attention", "chunked_attention", "window_attention", "attention", "moe", "mlp"),
})  # fmt: skip
# Model types that count positions from pad_token_id + 1.
_POSITIONS_AFTER_PADDING = frozenset({
    *("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod", "camembert", "data2vec-text"),
    *("esm", "luke"),
})  # fmt: skip


def refuse_arguments(dropout: float, others: dict[str, Any]) -> None:
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


def refuse_unstated(module: nn.Module, sinks: Tensor | None, softcap: float | None) -> None:
    """Refuse modules whose own eager attention reads sinks or soft caps from the module, without passing them on."""
    for name, passed in (("sinks", sinks), ("attn_logit_softcapping", softcap)):
        if passed is None and getattr(module, name, None) is not None:
            raise ValueError(
                f"{type(module).__name__} has {name}, but does not pass them to its attention function: they would be "
                "ignored; use attn_implementation='eager'"
            )


def refuse_other_offsets(queries: Tensor | None, keys: Tensor | None) -> None:
    """Refuse packed keys that are not packed as the queries are."""
    if keys is None or keys is queries:
        return
    if (
        queries is None
        or queries.shape != keys.shape
        or not (torch.compiler.is_compiling() or torch.equal(queries, keys))
    ):
        raise ValueError("cu_seq_lens_k without an equal cu_seq_lens_q: queries and keys must be of the same documents")


def refuse_other_window(
    module: nn.Module, configured: rs.Pattern, causal: bool, sliding_window: int | None, length: int
) -> None:
    """Refuse a window that the module passes and the mask lacks, or has with another size."""
    masked = configured.left + 1 if isinstance(configured, rs.Window) else length
    # Models disagree whether a bidirectional window counts its own row.
    if sliding_window is None or sliding_window in ((masked,) if causal else (masked, masked - 1)):
        return
    if min(masked, sliding_window) < length:
        raise ValueError(
            f"{type(module).__name__} has sliding_window={sliding_window}, but its mask is {configured.text} over "
            f"{length} tokens: implementations of attention differ in which of them they follow; use "
            "attn_implementation='eager'"
        )


def refuse_padding_inside(mask: Tensor, positions: Tensor | None, pattern: rs.Pattern) -> None:
    """Refuse padding between two tokens of a text: a model's windows count it, and the rows without padding do not."""
    resumes = mask[:, 1:] & ~mask[:, :-1] & (mask.cumsum(1)[:, :-1] > 0)
    if positions is not None and positions.dim() == 2 and positions.shape[1] == mask.shape[1]:
        resumes = resumes & (positions.expand_as(mask)[:, 1:] != 0)  # another document
    if resumes.any():
        raise ValueError(
            f"attention_mask with padding inside a text, and {pattern.text}: whether a window counts padding is not "
            "defined; pad on the left or on the right only"
        )


def refuse_other_sequences(module: nn.Module, causal: bool, query: Tensor, key: Tensor) -> None:
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
            "past_key_values=RingspanCache() or use_cache=False. A model that adds keys of its own is not supported"
        )


def refuse_other_layers(module: nn.Module) -> None:
    """Refuse recurrent and convolutional layers: over a ring, only attention reaches the rows of other ranks."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None) or ()
    others = sorted({str(kind) for kind in kinds} - _OWN_ROWS_OR_ATTENTION)
    if others:
        raise ValueError(
            f"layers of kind {', '.join(others)} over a ring: they need rows of other ranks, which only attention "
            "can reach; use a model with attention and MLP layers only, or one device"
        )


def refuse_dependence_on_shards(module: nn.Module, seq_len: int, borders: Tensor | None) -> None:
    """Refuse what a model derives from the rows or positions that it is called with: it would differ between ranks."""
    is_tuned = getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", False)
    if is_tuned and seq_len >= getattr(module, "floor_scale", 0):
        raise ValueError(
            f"attn_temperature_tuning with floor_scale={module.floor_scale}, and {seq_len} tokens over a ring: the "
            "model numbers the rows of each rank from 0; set attn_temperature_tuning=False, or use one device"
        )
    config = getattr(module, "config", None)
    found = getattr(config, "rope_parameters", None) or {}
    for rope in (found, *(part for part in found.values() if isinstance(part, dict))):
        same = "short_factor" in rope and rope["short_factor"] == rope.get("long_factor")
        limit = rope.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None)
        if rope.get("rope_type") not in ("dynamic", "longrope") or same or limit is None or seq_len <= limit:
            continue
        longest = seq_len if borders is None or torch.compiler.is_compiling() else int(borders.diff().max())
        if longest > limit:
            raise ValueError(
                f"rope_type={rope['rope_type']!r} and {longest} tokens over a ring: each rank would choose its "
                f"frequencies by whether its own positions exceed {limit}. For 'longrope', set short_factor to "
                "long_factor in config.rope_parameters; otherwise use a rope_type with fixed frequencies"
            )


def _parameters(module: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(module.forward).parameters)


def check_cache_arguments(
    causal: bool,
    ring: rs.Ring | rs.SimulatedRing | None,
    query: Tensor,
    positions: Tensor | None,
    mask: Tensor | None,
    borders: Tensor | None,
) -> None:
    """Raise where a bounded cache cannot take the rows of a call."""
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


def lengths_of_mask(mask_function: MaskFunction, batch: int, rows: int, device: Any) -> Tensor | None:
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


def lengths_of_positions(positions: Tensor) -> Tensor | None:
    """Lengths of packed documents, which start at position 0; the same in every row of the batch."""
    if positions.dim() != 2:
        raise _position_shape_error(positions)
    breaks = positions.diff(dim=1) != 1
    if positions[:, 1:][breaks].any() or (breaks.any() and positions[:, 0].any()):
        raise ValueError(
            "position_ids neither continue nor restart at 0: pack documents into one row and pass their offsets as "
            "cu_seq_lens_q"
        )
    return _lengths_between(breaks)


def positions_of_rank(
    module: nn.Module, positions: Tensor, borders: Tensor | None, ring: rs.Ring, seq_len: int
) -> Tensor | None:
    """The position_ids that this rank's rows must have. None if rows have several positions each."""
    if positions.dim() != 2:
        if borders is None:
            raise _position_shape_error(positions)
        return None
    lengths = None if borders is None else borders.diff()
    expected = ring.positions(seq_len, positions.device, lengths, rows=positions.shape[1])
    if borders is not None:
        expected = expected - borders[torch.bucketize(expected, borders[1:], right=True)]
    config = getattr(module, "config", None)
    if getattr(config, "model_type", None) in _POSITIONS_AFTER_PADDING:
        expected = expected + getattr(config, "pad_token_id", 0) + 1
    return expected


def check_positions(positions: Tensor, expected: Tensor, seq_len: int, over_a_ring: bool) -> None:
    if positions.shape[-1] != expected.shape[-1] or not bool((positions != expected).any()):  # the ring checks lengths
        return
    first = int(expected.flatten()[0])
    raise ValueError(
        f"position_ids are not those of this rank's rows of {seq_len}, which begin with {first}: pass what shard(...) "
        "returns, or position_ids=ring.positions(seq_len)[None]; models such as Roberta add pad_token_id + 1 to them"
        if over_a_ring
        else "position_ids that restart or skip, under torch.compile: pass the documents' offsets as cu_seq_lens_q"
    )


def _position_shape_error(positions: Tensor) -> ValueError:
    return ValueError(
        f"position_ids of shape {tuple(positions.shape)}: must be (batch, rows) to find packed documents; "
        "pass cu_seq_lens_q, (0, n) for a single document"
    )


@torch.library.custom_op("ringspan::lengths_if_positions", mutates_args=())
def lengths_if_positions_op(
    positions: Tensor, expected: Tensor, lengths: Tensor, seq_len: int, over_a_ring: bool
) -> Tensor:
    """A copy of ``lengths``. Raises if the positions differ from the expected ones, which a traced graph cannot do."""
    check_positions(positions, expected, seq_len, over_a_ring)
    return lengths.clone()


@lengths_if_positions_op.register_fake
def _lengths_if_positions_fake(
    positions: Tensor, expected: Tensor, lengths: Tensor, seq_len: int, over_a_ring: bool
) -> Tensor:
    return torch.empty_like(lengths)


def one_unless(lengths: Tensor | None, rows: int) -> Tensor:
    """The lengths of documents, or of a single one."""
    return torch.full((1,), rows, dtype=torch.int64) if lengths is None else lengths
